"""Constrained tool calls: a grammar in the model family's own format, for ``tool_choice``.

:class:`Conversation` sends the grammar to engines as a logits processor; an engine may refuse it.
The gateway checks its requests with :func:`is_free`. The model family is found by marks in the chat
template's source. :mod:`tool_calls` parses forced calls like any other.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.errors import ChatRefused
from tidegate.transport.sampling import LogitsProcessor

Choice = str | Mapping[str, Any] | None
"""OpenAI's ``tool_choice``: ``auto`` (or None), ``none``, ``required``, or one function."""

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}

HERMES_MARK, LLAMA_MARKS = "<tool_call>", ("<|start_header_id|>", '"parameters"')
"""Strings in the chat templates of these families."""


def is_free(choice: Choice) -> bool:
    """Whether no tool call is forced."""
    return choice in (None, "auto", "none")


def forced_call(
    choice: Choice, tools: Sequence[Mapping[str, Any]] | None, template: str
) -> LogitsProcessor:
    """Return the processor that constrains a turn to a call of one of ``tools``.

    ``choice`` may name the tool; ``template`` is the source of the model's chat template.

    Raises:
        ChatRefused: ``tools`` is empty or lacks the named tool, or this model's calls can't be
        constrained.
    """
    functions = _selected_functions(choice, tools or ())
    if HERMES_MARK in template:
        call = json.dumps(_any_call_schema(functions, "arguments"))
        lark = f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {call}\n'
        return LogitsProcessor("grammar", {"lark": lark})
    if all(mark in template for mark in LLAMA_MARKS):
        return LogitsProcessor("json_schema", {"schema": _any_call_schema(functions, "parameters")})
    raise ChatRefused(
        "tool_choice can't force a call of this model: its chat template is neither of Hermes' "
        "form (<tool_call>) nor of Llama 3's; leave it at 'auto'"
    )


def _selected_functions(
    choice: Choice, tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    functions = [tool["function"] for tool in tools]
    if not functions:
        raise ChatRefused("tool_choice forces a call, and there are no tools")
    if choice == "required":
        return functions
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    named = [function for function in functions if function["name"] == name]
    if not named:
        names = ", ".join(function["name"] for function in functions)
        raise ChatRefused(
            f"tool_choice must be 'auto', 'none', 'required', or name one of {names} as "
            f"{{'type': 'function', 'function': {{'name': …}}}}, got {choice!r:.200}"
        )
    return named


def _any_call_schema(functions: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """Return the JSON schema of a call of any function, with the name before the arguments."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: function.get("parameters") or ANY_ARGUMENTS,
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
