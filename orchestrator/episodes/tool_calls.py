"""Which tools does a model call in what it says? Read from the forms that models are taught.

    <tool_call>{"name": …, "arguments": …}</tool_call>     Hermes, Qwen; any number of them
    {"name": …, "parameters": …}                            Llama 3, the whole of a turn

What can't be read stays in the content, as it was said: whether that is an error is the agent's to
say. Knows no tokens, and calls nothing.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

PYTHON_TAG = "<|python_tag|>"
"""Llama 3 begins a call with it, or doesn't."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool, and what it is called with."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def parse_reply(text: str, tools: Collection[str]) -> Reply:
    """Part what was said into words and calls; ``tools`` are the names of those it was offered."""
    if not tools:
        return Reply(text)
    return _hermes(text) or _llama(text, tools) or Reply(text)


def _hermes(text: str) -> Reply | None:
    blocks = _HERMES.findall(text)
    calls = [_call(_json(block), "arguments") for block in blocks]
    read = tuple(call for call in calls if call is not None)
    if not read or len(read) < len(blocks):
        return None
    return Reply(_HERMES.sub("", text).strip(), read)


def _llama(text: str, tools: Collection[str]) -> Reply | None:
    """Any JSON may be an answer, so it is a call only if it names a tool that there is."""
    said = text.strip().removeprefix(PYTHON_TAG).strip()
    if not said.startswith("{"):
        return None
    call = _call(_json(said), "parameters")
    return Reply("", (call,)) if call is not None and call.name in tools else None


def _call(value: object, arguments_key: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(arguments_key, {})
    if isinstance(arguments, str):  # some models write JSON in JSON
        arguments = _json(arguments)
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
