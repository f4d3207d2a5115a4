"""Constrained tool calls: a grammar in the model family's own format, for ``tool_choice``.

:class:`Conversation` sends the grammar to engines as a logits processor; an engine may refuse it.
The gateway checks its requests with :func:`is_free`. The model family is found by marks in the chat
template's source. :mod:`tool_calls` parses forced calls like any other.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.errors import ChatRefused
from tidegate.orchestrator.episodes.tool_calls import schema_types
from tidegate.transport.sampling import LogitsProcessor, with_bounded_space

Choice = str | Mapping[str, Any] | None
"""OpenAI's ``tool_choice``: ``auto`` (or None), ``none``, ``required``, or one function."""

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}

HERMES_MARK, LLAMA_MARKS = "<tool_call>", ("<|start_header_id|>", '"parameters"')
"""Strings in the chat templates of these families."""

THOUGHT = "thought[lazy]: /(?s:.*)<\\/think>/\n"
"""Rule of the reasoning that a prompt has begun, in llguidance's Lark: up to the first
``</think>``."""

AFTER_THOUGHT = 'thought "\\n\\n" '


@dataclass(frozen=True, slots=True)
class _TagForm:
    """How a family writes a call with a tag for each argument; ``{}`` stands for a name."""

    mark: str
    """Text in the family's chat templates."""
    begin: str
    argument: str
    argument_end: str
    end: str

    def grammar(self, functions: Sequence[Mapping[str, Any]], *, has_thought: bool) -> str:
        """Return a Lark grammar of one call of any function."""
        calls = " | ".join(f"call_{number}" for number in range(len(functions)))
        rules = [f"start: {AFTER_THOUGHT if has_thought else ''}({calls})\n"]
        rules += [THOUGHT] if has_thought else []
        end = _regex_text(self.argument_end)
        rules.append(f"text[lazy]: /(?s:.*){end}/\n")
        for number, function in enumerate(functions):
            rules += self._call(f"call_{number}", function)
        return "".join(rules)

    def _call(self, name: str, function: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rules of a call: required arguments and any of the others, in their order."""
        parameters = function.get("parameters") or ANY_ARGUMENTS
        required = parameters.get("required") or ()
        shared = _definitions(parameters)
        arguments = []
        for number, (argument, schema) in enumerate((parameters.get("properties") or {}).items()):
            rule = f"{name}_{number}"
            arguments.append(rule + ("" if argument in required else "?"))
            begin = json.dumps(self.argument.replace("{}", argument), ensure_ascii=False)
            if (schema_types(schema) or {"string"}) & {"string"}:
                yield f"{rule}: {begin} text\n"
            else:
                end = json.dumps(self.argument_end)
                yield f"{rule}: {begin} {rule}_value {end}\n"
                whole = with_bounded_space({**schema, **shared})
                yield f"{rule}_value: %json {json.dumps(whole)}\n"
        begin = json.dumps(self.begin.replace("{}", function["name"]), ensure_ascii=False)
        yield f"{name}: {begin} {' '.join(arguments)} {json.dumps(self.end)}\n"


TAG_FORMS = (
    _TagForm(
        "<function=",
        "<tool_call>\n<function={}>\n",
        "<parameter={}>\n",
        "\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    _TagForm(
        "<arg_key>",
        "<tool_call>{}\n",
        "<arg_key>{}</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "</tool_call>",
    ),
    _TagForm(
        "<invoke name=",
        '<minimax:tool_call>\n<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ),
)
"""Forms of Qwen3-Coder, GLM and MiniMax."""


def _regex_text(text: str) -> str:
    """Return a regular expression that matches this text, as Lark takes it between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def is_free(choice: Choice) -> bool:
    """Whether no tool call is forced."""
    return choice in (None, "auto", "none")


def forced_call(
    choice: Choice,
    tools: Sequence[Mapping[str, Any]] | None,
    template: str,
    *,
    is_reasoning_open: bool = False,
) -> LogitsProcessor:
    """Return the processor that constrains a turn to a call of one of ``tools``.

    ``choice`` may name the tool; ``template`` is the source of the model's chat template. If the
    prompt has begun the reasoning (``is_reasoning_open``), the model ends it first.

    Raises:
        ChatRefused: ``tools`` is empty or lacks the named tool, or this model's calls can't be
        constrained.
    """
    functions = _selected_functions(choice, tools or ())
    for form in TAG_FORMS:
        if form.mark in template:
            lark = form.grammar(functions, has_thought=is_reasoning_open)
            return LogitsProcessor("grammar", {"lark": lark})
    if HERMES_MARK in template:
        call = json.dumps(with_bounded_space(_any_call_schema(functions, "arguments")))
        begin, rule = (AFTER_THOUGHT, THOUGHT) if is_reasoning_open else ("", "")
        lark = f'start: {begin}"<tool_call>\\n" call "\\n</tool_call>"\n{rule}call: %json {call}\n'
        return LogitsProcessor("grammar", {"lark": lark})
    if all(mark in template for mark in LLAMA_MARKS):
        return LogitsProcessor("json_schema", {"schema": _any_call_schema(functions, "parameters")})
    raise ChatRefused(
        "tool_choice can't force a call of this model: its chat template is none of Hermes' form "
        "(<tool_call>), Qwen3-Coder's, GLM's, MiniMax's and Llama 3's; leave it at 'auto'"
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
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    shared: dict[str, Any] = {}
    for function in functions:
        for key, definitions in _definitions(function.get("parameters") or {}).items():
            shared[key] = {**shared.get(key, {}), **definitions}
    return {**schema, **shared}


def _definitions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions of a schema, which its references name from the schema's root."""
    return {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
