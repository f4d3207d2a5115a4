"""Parser of tool calls in a model's output, for the formats that model families are trained on.

    <tool_call>{"name": …, "arguments": …}</tool_call>     Hermes, Qwen; any number of them
    {"name": …, "parameters": …}                            Llama 3, the whole of a turn
    …function…NAME, a block of JSON; or …NAME…{…}           DeepSeek V3 and R1; V3.1: between marks
                                                            of its own, any number of them
    [TOOL_CALLS] [{"name": …, "arguments": …}, …]           Mistral, the end of a turn; or all of
                                                            it: the mark may be a special token

:class:`Conversation`, the gateway and the dashboard use it. Text that can't be parsed stays in the
content unchanged: whether that is an error is the agent's decision. Standard library only
(``json``, ``re``).
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def _deepseek_mark(name: str) -> str:
    """Return a special token of DeepSeek's, with its own characters for bars and blanks."""
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR = map(
    _deepseek_mark,
    ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep"),
)
_DEEPSEEK_CALLS = re.compile(rf"{_CALLS}(.*?)(?:{_CALLS_END}|\Z)", re.DOTALL)
_DEEPSEEK_CALL = re.compile(rf"{_CALL}(.*?){_SEPARATOR}(.*?)(?:{_CALL_END}|\Z)", re.DOTALL)
_JSON_BLOCK = re.compile(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)

MISTRAL_MARK = "[TOOL_CALLS]"

PYTHON_TAG = "<|python_tag|>"
"""Optional beginning of a Llama 3 call."""

_MARKS = ("<tool_call>", _CALLS, MISTRAL_MARK, PYTHON_TAG)
_BEGIN_CALLS = ("{", "[")
"""First characters of turns that are calls without a mark."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Text and tool calls of a turn."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def parse_reply(text: str, tools: Collection[str]) -> ParsedReply:
    """Split a turn's text into content and calls; ``tools`` are the names of the offered tools."""
    if not tools:
        return ParsedReply(text)
    reply = _hermes(text) or _llama(text, tools) or _deepseek(text) or _mistral(text, tools)
    return reply or ParsedReply(text)


def settled_text(text: str, tools: Collection[str], stops: Collection[str] = ()) -> str:
    """Return the text of a running turn that is certain to begin its content, whatever follows.

    It ends where a call, or one of the strings that end the turn, may begin.
    """
    marks = tuple(stops)
    if tools:
        if text[:1] in _BEGIN_CALLS or text[:1].isspace():
            return ""  # all of it may be a call, or be trimmed for one that follows
        marks += _MARKS
    settled = text[: min((_may_begin(mark, text) for mark in marks), default=len(text))]
    return settled.rstrip() if tools else settled


def _may_begin(mark: str, text: str) -> int:
    """Return the index at which a mark stands or may begin; else the text's length."""
    index = text.find(mark)
    if index >= 0:
        return index
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return len(text) - next((n for n in lengths if text.endswith(mark[:n])), 0)


def _hermes(text: str) -> ParsedReply | None:
    blocks = _HERMES.findall(text)
    calls = [_call(_json(block), "arguments") for block in blocks]
    parsed = tuple(call for call in calls if call is not None)
    if not parsed or len(parsed) < len(blocks):
        return None
    return ParsedReply(_HERMES.sub("", text).strip(), parsed)


def _llama(text: str, tools: Collection[str]) -> ParsedReply | None:
    """Parse a turn that is one JSON object, if its ``name`` is an offered tool's: other JSON may be
    the model's answer."""
    stripped = text.strip().removeprefix(PYTHON_TAG).strip()
    if not stripped.startswith("{"):
        return None
    call = _call(_json(stripped), "parameters")
    return ParsedReply("", (call,)) if call is not None and call.name in tools else None


def _deepseek(text: str) -> ParsedReply | None:
    pairs = [p for block in _DEEPSEEK_CALLS.findall(text) for p in _DEEPSEEK_CALL.findall(block)]
    calls = [_deepseek_call(before.strip(), after) for before, after in pairs]
    parsed = tuple(call for call in calls if call is not None)
    if not parsed or len(parsed) < len(pairs):
        return None
    return ParsedReply(_DEEPSEEK_CALLS.sub("", text).strip(), parsed)


def _deepseek_call(before: str, after: str) -> ToolCall | None:
    """Parse one call: V3.1 has ``NAME`` and JSON around the separator; V3 and R1 have a type before
    it, and ``NAME`` with a fenced JSON block after it."""
    block = _JSON_BLOCK.fullmatch(after)
    name, arguments = (before, after) if block is None else (block[1], block[2])
    return _call({"name": name, "arguments": _json(arguments)}, "arguments")


def _mistral(text: str, tools: Collection[str]) -> ParsedReply | None:
    """Parse ``[TOOL_CALLS] [...]``, or a bare JSON list if each item calls an offered tool."""
    content, mark, payload = text.rpartition(MISTRAL_MARK)
    values = _json(payload.strip())
    if not isinstance(values, list) or not values:
        return None
    parsed = tuple(call for value in values if (call := _call(value, "arguments")) is not None)
    if len(parsed) < len(values) or not (mark or all(call.name in tools for call in parsed)):
        return None
    return ParsedReply(content.strip(), parsed)


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
