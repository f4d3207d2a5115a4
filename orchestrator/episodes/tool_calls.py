"""Reader of a model's replies: splits a turn's text into reasoning, content and tool calls.

:data:`FORMATS` has one record for each form of calls that model families are trained on. Text in
none of these forms stays in the content unchanged. A malformed call is listed with its error, so
that the episode can tell the model, and the calls beside it are read.
"""

import ast
import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

OfferedTools = Collection[str]
"""Names of the offered tools; as a mapping, with the JSON schema of each one's parameters, by which
arguments that are written as text get their types."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and arguments."""

    name: str
    arguments: dict[str, Any]
    call_id: str = ""
    """Id that the model has written itself, which its chat template shows again; else empty."""


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A call that the model has begun in a known form, and that can't be parsed."""

    text: str
    """The call as the model wrote it."""
    error: str
    """Why the call can't be parsed."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Parts of a turn's text."""

    content: str
    """Text beside the calls; all of the text if no call could be parsed."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """Reasoning of a model whose template takes it apart from the content; else empty."""
    shown: str = field(default="", compare=False)
    """Text before the first call as the model wrote it, reasoning included; without a call, all of
    the text. A template that shows the reply again shows this text unchanged."""
    invalid_tool_calls: tuple[InvalidToolCall, ...] = field(default=(), compare=False)


# ---------------------------------------------------------------- calls as JSON


_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character beyond U+FFFF: no text has it, but JSON's escapes can write it alone."""


def well_formed(text: str) -> str:
    """Return a text in which U+FFFD replaces lone surrogates, which tokenizers and UTF-8 refuse.

    They come from a model's ``"\\ud83d"``, and from file names and bytes that Python has decoded
    with ``surrogateescape``.
    """
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def with_well_formed_texts(value: Any) -> Any:
    """Return a value of JSON with :func:`well_formed` texts, keys of objects included.

    Values nested too deep for Python's stack are returned as they are.
    """
    with contextlib.suppress(RecursionError):
        return _with_well_formed_texts(value)
    return value


def _with_well_formed_texts(value: Any) -> Any:
    match value:
        case str():
            return well_formed(value)
        case dict():
            return {
                _with_well_formed_texts(k): _with_well_formed_texts(v) for k, v in value.items()
            }
        case list() | tuple():
            return [_with_well_formed_texts(each) for each in value]
    return value


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


ReadCall = ToolCall | InvalidToolCall


def _call(value: object, arguments_key: str, text: str) -> ReadCall:
    """Return the call of a JSON object that was read from ``text``."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return InvalidToolCall(text, 'a call must be a JSON object with a string "name"')
    arguments = value.get(arguments_key, {})
    if isinstance(arguments, str):  # some models write JSON in JSON
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return InvalidToolCall(text, f'"{arguments_key}" must be a JSON object')
    return ToolCall(well_formed(value["name"]), with_well_formed_texts(arguments))


def _reply(content: str, calls: Sequence[ReadCall]) -> ParsedReply | None:
    """Return a reply with these calls; None if there are none."""
    if not calls:
        return None
    valid = tuple(call for call in calls if isinstance(call, ToolCall))
    invalid = tuple(call for call in calls if isinstance(call, InvalidToolCall))
    return ParsedReply(content, valid, invalid_tool_calls=invalid)


@dataclass(frozen=True, slots=True)
class _JsonBlock:
    """A JSON value with the mark after it."""

    value: object
    error: str
    """Why it can't be read; else empty."""
    end: int
    """Index after the mark; where the mark is missing, after the value."""


_decoder = json.JSONDecoder()


def _json_block(text: str, start: int, *marks: str, before: str = "") -> _JsonBlock:
    """Read the JSON value at ``start``, and the mark that ends it, which its strings may have, too.

    A value that can't be read reaches up to the next of the marks. ``before``: text that may
    follow in place of a mark.
    """
    start = _after_space(text, start)
    try:
        value, end = _decoder.raw_decode(text, start)
        end = _after_space(text, end)
        mark = next((each for each in marks if text.startswith(each, end)), None)
        if mark is not None:
            return _JsonBlock(value, "", end + len(mark))
        if end == len(text) or (before and text.startswith(before, end)):
            return _JsonBlock(value, "", end)
        error = f"its JSON is followed by {text[end : end + 20]!r}"
    except json.JSONDecodeError as cause:
        error = f"its JSON can't be read: {cause.msg} at {text[cause.pos : cause.pos + 20]!r}"
    except (ValueError, RecursionError) as cause:
        error = f"its JSON can't be read: {cause}"
    closings = [at + len(each) for each in marks if (at := text.find(each, start)) >= 0]
    return _JsonBlock(None, error, min(closings, default=len(text)))


def _after_space(text: str, start: int) -> int:
    """Return the index of the first character from ``start`` on that is no white space."""
    found = _NO_SPACE.search(text, start)
    return found.start() if found else len(text)


_NO_SPACE = re.compile(r"\S")

_HERMES_BEGIN, _HERMES_END = "<tool_call>", "</tool_call>"


def _hermes(text: str, tools: OfferedTools) -> ParsedReply | None:
    content, position = "", 0
    calls: list[ReadCall] = []
    while (start := text.find(_HERMES_BEGIN, position)) >= 0:
        content += text[position:start]
        block = _json_block(text, start + len(_HERMES_BEGIN), _HERMES_END)
        position = block.end
        calls.append(_call_of(block, text[start:position]))
    return _reply((content + text[position:]).strip(), calls)


def _call_of(block: _JsonBlock, text: str) -> ReadCall:
    """Return the call that a block has whole, with its name; ``text`` is the block as written."""
    if block.error:
        return InvalidToolCall(text, block.error)
    return _call(block.value, "arguments", text)


def _call_with(name: str, block: _JsonBlock, text: str) -> ReadCall:
    """Return the call of ``name`` whose arguments are a block."""
    if block.error:
        return InvalidToolCall(text, block.error)
    return _call({"name": name, "arguments": block.value}, "arguments", text)


def _sections(
    text: str,
    section: tuple[str, str],
    begin: str,
    read: Callable[[str, int], tuple[ReadCall, int]],
) -> ParsedReply | None:
    """Parse calls within marked sections. ``begin`` begins a call; ``read`` parses the call at an
    index, and returns the call and its end."""
    content, position = "", 0
    calls: list[ReadCall] = []
    opens, closes = section
    while (start := text.find(opens, position)) >= 0:
        content += text[position:start]
        position = start + len(opens)
        while True:
            following, closing = text.find(begin, position), text.find(closes, position)
            if following < 0 or 0 <= closing < following:
                break
            call, position = read(text, following)
            calls.append(call)
        position = len(text) if closing < 0 else closing + len(closes)
    return _reply((content + text[position:]).strip(), calls)


PYTHON_TAG = "<|python_tag|>"
"""Optional beginning of a Llama 3 call."""


def _llama(text: str, tools: OfferedTools) -> ParsedReply | None:
    """Parse a turn that is one JSON object, if its ``name`` is an offered tool's: other JSON may be
    the model's answer."""
    stripped = text.strip()
    body = stripped.removeprefix(PYTHON_TAG).strip()
    if not body.startswith("{"):
        return None
    value = _json(body)
    call = _call(value, "parameters", text)
    if isinstance(call, ToolCall):
        return ParsedReply("", (call,)) if call.name in tools else None
    return _reply("", [call]) if stripped.startswith(PYTHON_TAG) else None


def _deepseek_mark(name: str) -> str:
    """Return a special token of DeepSeek's, with its own characters for bars and blanks."""
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR = DEEPSEEK_MARKS = tuple(
    map(
        _deepseek_mark,
        ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep"),
    )
)
_FENCED_NAME = re.compile(r"\s*(\S+)\s*```json")


def _deepseek(text: str, tools: OfferedTools) -> ParsedReply | None:
    return _sections(text, (_CALLS, _CALLS_END), _CALL, _deepseek_call)


def _deepseek_call(text: str, start: int) -> tuple[ReadCall, int]:
    """Parse one call: V3.1 has ``NAME`` and JSON around the separator; V3 and R1 have a type before
    it, and ``NAME`` with a fenced JSON block after it."""
    separator = text.find(_SEPARATOR, start)
    if separator < 0:
        return InvalidToolCall(text[start:], f"it has no {_SEPARATOR}"), len(text)
    name, after = text[start + len(_CALL) : separator], separator + len(_SEPARATOR)
    fenced = _FENCED_NAME.match(text, after)
    if fenced is None:
        block = _json_block(text, after, _CALL_END, before=_CALLS_END)
    else:
        name, block = fenced[1], _json_block(text, fenced.end(), "```")
    end = block.end
    closing = _after_space(text, end)
    if text.startswith(_CALL_END, closing):
        end = closing + len(_CALL_END)
    return _call_with(name.strip(), block, text[start:end]), end


MISTRAL_MARK = "[TOOL_CALLS]"


def _mistral(text: str, tools: OfferedTools) -> ParsedReply | None:
    """Parse ``[TOOL_CALLS] [...]``, or a bare JSON list if each item calls an offered tool."""
    start = text.find(MISTRAL_MARK)
    begin = 0 if start < 0 else start + len(MISTRAL_MARK)
    values = _json(text[begin:].strip())
    if not isinstance(values, list) or not values:
        error = "the mark must be followed by a JSON list of calls, and nothing else"
        return None if start < 0 else _reply(text, [InvalidToolCall(text[start:], error)])
    calls = [_call(value, "arguments", json.dumps(value)) for value in values]
    if start < 0 and not all(isinstance(c, ToolCall) and c.name in tools for c in calls):
        return None
    return _reply(text[: max(start, 0)].strip(), calls)


KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+):\d+")


def _kimi(text: str, tools: OfferedTools) -> ParsedReply | None:
    begin, end, call_begin, _, _ = KIMI_MARKS
    return _sections(text, (begin, end), call_begin, _kimi_call)


def _kimi_call(text: str, start: int) -> tuple[ReadCall, int]:
    """Parse one call, whose id is ``functions.NAME:NUMBER``."""
    _, section_end, call_begin, arguments_begin, call_end = KIMI_MARKS
    separator = text.find(arguments_begin, start)
    if separator < 0:
        return InvalidToolCall(text[start:], f"it has no {arguments_begin}"), len(text)
    block = _json_block(text, separator + len(arguments_begin), call_end, before=section_end)
    written = text[start : block.end]
    call_id = text[start + len(call_begin) : separator].strip()
    named = _KIMI_ID.fullmatch(call_id)
    if named is None:
        why = f"its id must be functions.NAME:NUMBER, got {call_id[:40]!r}"
        return InvalidToolCall(written, why), block.end
    call = _call_with(named["name"], block, written)
    return replace(call, call_id=call_id) if isinstance(call, ToolCall) else call, block.end


# ---------------------------------------------------------------- calls as tags


@dataclass(frozen=True, slots=True)
class _Tags:
    """Tags of a format that writes each argument as text between tags of its own."""

    call: re.Pattern[str]
    """Beginning of a call; its group is the tool's name."""
    call_end: str
    argument: re.Pattern[str]
    """Beginning of an argument; its group is the argument's name."""
    argument_end: re.Pattern[str]
    """End of an argument: only before another argument or the call's end, because a value, such as
    a program, may have the same tag in it."""
    wrapper: tuple[str, str] = ("", "")
    """Tags around one or several calls, which some models omit."""
    pads_values: bool = False
    """Whether a value stands on lines of its own."""

    def read(self, text: str, tools: OfferedTools) -> ParsedReply | None:
        """Parse all calls of a text."""
        content, position = "", 0
        calls: list[ReadCall] = []
        begin, end = self.wrapper
        while (opening := self.call.search(text, position)) is not None:
            before = text[position : opening.start()]
            content += before.rstrip().removesuffix(begin)
            arguments, position = self._arguments(text, opening.end(), opening[1], tools)
            if arguments is None:
                why = f"cut off, or malformed at {text[position : position + 20]!r}"
                position = self._end_of_malformed(text, opening.end())
                calls.append(InvalidToolCall(text[opening.start() : position], why))
            else:
                calls.append(ToolCall(opening[1], arguments))
            closing = len(text) - len(text[position:].lstrip())
            if end and text.startswith(end, closing):
                position = closing + len(end)
        return _reply((content + text[position:]).strip(), calls)

    def _end_of_malformed(self, text: str, start: int) -> int:
        """Return where a malformed call ends: after its end tag, or where the next call begins."""
        following = self.call.search(text, start)
        end = len(text) if following is None else following.start()
        closing = text.find(self.call_end, start, end)
        return end if closing < 0 else closing + len(self.call_end)

    def _arguments(
        self, text: str, position: int, tool: str, tools: OfferedTools
    ) -> tuple[dict[str, Any] | None, int]:
        """Parse a call's arguments; return them, None if the call is cut off, and its end."""
        schemas = _argument_schemas(tool, tools)
        arguments: dict[str, Any] = {}
        while True:
            position = len(text) - len(text[position:].lstrip())
            if text.startswith(self.call_end, position):
                return arguments, position + len(self.call_end)
            opening = self.argument.match(text, position)
            if opening is None:
                return None, position
            closing = self.argument_end.search(text, opening.end())
            if closing is None:
                return None, position
            value = text[opening.end() : closing.start()]
            if self.pads_values:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[opening[1]] = typed_value(value, schemas.get(opening[1]))
            position = closing.end()


_QWEN_CODER = _Tags(
    call=re.compile(r"<function=([^>\s]+)>"),
    call_end="</function>",
    argument=re.compile(r"<parameter=([^>\n]+)>"),
    argument_end=re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))"),
    wrapper=("<tool_call>", "</tool_call>"),
    pads_values=True,
)
_GLM = _Tags(
    call=re.compile(r"<tool_call>\s*([^\s<>{}]+)\s*(?=<arg_key>|</tool_call>)"),
    call_end="</tool_call>",
    argument=re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
    argument_end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"),
)
_MINIMAX = _Tags(
    call=re.compile(r'<invoke name="([^"]+)">'),
    call_end="</invoke>",
    argument=re.compile(r'<parameter name="([^"]+)">'),
    argument_end=re.compile(r"</parameter>(?=\s*(?:<parameter |</invoke>))"),
    wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
)


def _argument_schemas(tool: str, tools: OfferedTools) -> Mapping[str, Any]:
    schema = tools.get(tool) if isinstance(tools, Mapping) else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def schema_types(schema: object) -> set[str]:
    """Return the types that a JSON schema names, of its alternatives too."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types = {each for each in declared if isinstance(each, str)}
    for alternatives in ("anyOf", "oneOf"):
        for each in schema.get(alternatives) or ():
            types |= schema_types(each)
    return types


_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
"""Types of Python's values by their names in JSON schemas."""


def typed_value(text: str, schema: object) -> Any:
    """Return an argument written as text, with a type that its schema names; else the text.

    Templates write values that are no strings as JSON or as Python does: ``true`` or ``True``.
    """
    types = schema_types(schema)
    if not types or types & {"string", "null"} == {"string"}:
        return text
    bare = text.strip()
    if bare in ("null", "None"):
        return None
    if "string" in types:
        return text
    value = _plain_value(bare)
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value = int(value)  # 3.0 is an integer of JSON schema
    return value if any(_has_type(value, each) for each in types) else text


def _plain_value(text: str) -> object:
    """Return a value that is written in JSON or in Python; None if it is in neither."""
    for read in (_json, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            value: object = read(text)
            if value is not None:
                return with_well_formed_texts(value)
    return None


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False  # JSON has no such number
    is_boolean = isinstance(value, bool)
    return isinstance(value, _PYTHON_TYPES.get(name, ())) and is_boolean == (name == "boolean")


# ---------------------------------------------------------------- gpt-oss


HARMONY_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
"""Special tokens of gpt-oss, whose turn is several messages, each on a channel."""

_HARMONY_MESSAGE = re.compile(
    r"(?:<\|start\|>)?(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


def _harmony(text: str, tools: OfferedTools) -> ParsedReply:
    """Parse gpt-oss' channels: analysis is reasoning, a message to a recipient is a call, and all
    others are content."""
    content, malformed, reasoning, position = "", "", "", 0
    calls: list[ReadCall] = []
    first_call = len(text)
    while (message := _HARMONY_MESSAGE.search(text, position)) is not None:
        position = message.end()
        channel, recipient = (p.search(message["header"]) for p in (_CHANNEL, _RECIPIENT))
        if recipient is not None and tools:
            start = message.start("body")
            if not message["body"].strip():
                block = _JsonBlock({}, "", position)
            else:
                block = _json_block(text, start, *HARMONY_MARKS[4:], before=HARMONY_MARKS[0])
            if not block.error:  # its strings may have the marks of messages
                position = block.end
            written = text[message.start() : position]
            call = _call_with(recipient[1], block, written)
            if isinstance(call, InvalidToolCall):
                malformed += written
            else:
                first_call = min(first_call, message.start())
            calls.append(call)
        elif channel is not None and channel[1] == "analysis":
            reasoning += message["body"]
        else:
            content += message["body"]
    reply = _reply(content, calls)
    if reply is None or not reply.tool_calls:
        invalid = () if reply is None else reply.invalid_tool_calls
        return ParsedReply(content + malformed, (), reasoning, text, invalid)
    return replace(reply, reasoning=reasoning, shown=text[:first_call])


def _harmony_settled(text: str) -> str:
    """Return the content of a running turn that no later token changes."""
    text = text[: min(_may_end_in(mark, text) for mark in HARMONY_MARKS)]
    for message in _HARMONY_MESSAGE.finditer(text):
        if _RECIPIENT.search(message["header"]):
            text = text[: message.start()]
            break
    return _harmony(text, ()).content


# ---------------------------------------------------------------- the formats


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One form of tool calls."""

    models: str
    """Model families that are trained on it."""
    marks: tuple[str, ...]
    """Texts with which calls begin; a stream sends nothing from there on."""
    read: Callable[[str, OfferedTools], ParsedReply | None]
    """Parse a text; None if it has no call of this form, or one that can't be parsed."""
    end: str | None
    """Text that ends one call, where a turn of a single call may stop; empty if turns of this form
    have a single call anyway, None if nothing ends a call before the next one."""
    special: tuple[str, ...] = ()
    """Marks that are special tokens, which text would not show."""


FORMATS: tuple[CallFormat, ...] = (
    CallFormat(
        "Qwen3-Coder, Qwen3.5", ("<tool_call>", "<function="), _QWEN_CODER.read, "</tool_call>"
    ),
    CallFormat("GLM-4.5 to 5", ("<tool_call>",), _GLM.read, "</tool_call>"),
    CallFormat("Hermes, Qwen2.5, Qwen3", ("<tool_call>",), _hermes, "</tool_call>"),
    CallFormat("MiniMax M2", ("<minimax:tool_call>", "<invoke name="), _MINIMAX.read, "</invoke>"),
    CallFormat("Kimi K2", KIMI_MARKS[:1], _kimi, KIMI_MARKS[4], KIMI_MARKS),
    CallFormat("Llama 3", (PYTHON_TAG,), _llama, "", (PYTHON_TAG,)),
    CallFormat("DeepSeek V3, R1, V3.1", (_CALLS,), _deepseek, _CALL_END, DEEPSEEK_MARKS),
    CallFormat("Mistral", (MISTRAL_MARK,), _mistral, None, (MISTRAL_MARK,)),
)
"""Forms of calls, in the order in which they are tried. gpt-oss has one of its own, because its
channels are in every turn."""

_MARKS = tuple(dict.fromkeys(mark for each in FORMATS for mark in each.marks))
_BEGIN_CALLS = ("{", "[")
"""First characters of turns that are calls without a mark."""

_CALL_RESEMBLANCE = re.compile(
    r"<[|\uff5c/]?\s*(?:\w+:)?(?:tool|function|invoke)|\[TOOL_CALLS|to=functions\.|python_tag",
    re.IGNORECASE,
)


def end_of_call(template: str) -> str | None:
    """Return :attr:`CallFormat.end` of the form of calls in a chat template's source; empty if it
    has none."""
    return next((each.end for each in FORMATS if any(mark in template for mark in each.marks)), "")


def kept_special_tokens(vocabulary: Collection[str]) -> set[str]:
    """Return the special tokens that are marks of calls or channels, of those in a vocabulary."""
    marks = {mark for each in FORMATS for mark in each.special}
    if all(mark in vocabulary for mark in HARMONY_MARKS[:4]):  # others have <|end|> alone
        marks |= set(HARMONY_MARKS)
    return marks & set(vocabulary)


def resembles_call(text: str, tools: OfferedTools) -> bool:
    """Whether a text seems to have a tool call of any supported or unsupported form."""
    if _CALL_RESEMBLANCE.search(text):
        return True
    names = [name for name in tools if name in text]
    return any(re.search(rf'["\']{re.escape(name)}["\']\s*,', text) for name in names)


def parse_reply(
    text: str,
    tools: OfferedTools,
    *,
    separates_reasoning: bool = False,
    is_reasoning_open: bool = False,
) -> ParsedReply:
    """Split a turn's text into reasoning, content and calls.

    ``separates_reasoning``: whether ``<think>…</think>`` is taken out of the content.
    ``is_reasoning_open``: whether the prompt has ended with ``<think>``.
    """
    if _is_harmony(text):
        return _harmony(text, tools)
    head, reasoning = _reasoning(text, is_open=is_reasoning_open)
    rest = text[len(head) :]
    if not tools or head == text:
        replies = []  # an open reasoning has no calls yet
    else:
        replies = [r for each in FORMATS if (r := each.read(rest, tools)) is not None]
    replies.sort(key=lambda reply: not reply.tool_calls)  # of the forms that share a mark
    invalid = replies[0].invalid_tool_calls if replies else ()
    if separates_reasoning and head:
        rest = rest.lstrip("\n")
    if not replies or not replies[0].tool_calls:
        content = rest if separates_reasoning else text
        return ParsedReply(content, (), reasoning if separates_reasoning else "", text, invalid)
    reply = replies[0]
    if separates_reasoning:
        return replace(reply, reasoning=reasoning, shown=head + reply.content)
    gap = rest[: len(rest) - len(rest.lstrip())] if head else ""
    content = (head + gap + reply.content).strip()
    return replace(reply, content=content, shown=content)


def settled_text(
    text: str,
    tools: OfferedTools,
    stops: Collection[str] = (),
    *,
    separates_reasoning: bool = False,
    is_reasoning_open: bool = False,
) -> str:
    """Return the text of a running turn that is certain to begin its content, whatever follows.

    It ends where a call, or one of the strings that end the turn, may begin. The options are those
    of :func:`parse_reply`.
    """
    if _is_harmony(text) or (text and any(mark.startswith(text) for mark in HARMONY_MARKS)):
        return _before_mark(_harmony_settled(text), stops)
    head, _ = _reasoning(text, is_open=is_reasoning_open)
    if separates_reasoning:
        begun = text.lstrip()
        if head == text or OPEN_REASONING.startswith(begun):
            return ""
        text, head = text[len(head) :].lstrip("\n") if head else text, ""
    if tools and (text[:1] in _BEGIN_CALLS or text[:1].isspace()):
        return ""  # all of it may be a call, or be trimmed for one that follows
    rest = text[len(head) :]
    if tools and rest.lstrip()[:1] in _BEGIN_CALLS:  # calls may follow a reasoning without a mark
        settled = head
    else:
        settled = head + (_before_mark(rest, _MARKS) if tools else rest)
    settled = min(settled, _before_mark(text, stops), key=len)
    return settled.rstrip() if tools else settled


OPEN_REASONING, CLOSE_REASONING = "<think>", "</think>"


def _reasoning(text: str, *, is_open: bool) -> tuple[str, str]:
    """Return the text up to the end of the reasoning, and the reasoning; both empty without."""
    begun = text.lstrip().startswith(OPEN_REASONING)
    if not (begun or is_open):
        return "", ""
    end = text.find(CLOSE_REASONING)
    head = text if end < 0 else text[: end + len(CLOSE_REASONING)]
    reasoning = head.removesuffix(CLOSE_REASONING).strip("\n") if end >= 0 else head.strip("\n")
    return head, reasoning.lstrip().removeprefix(OPEN_REASONING).strip("\n") if begun else reasoning


def is_harmony_template(template: str) -> bool:
    """Whether a chat template's source writes gpt-oss' channels."""
    return "<|channel|>" in template and "<|message|>" in template


def _is_harmony(text: str) -> bool:
    return text.startswith(("<|channel|>", "<|start|>")) or "<|message|>" in text


def _before_mark(text: str, marks: Collection[str]) -> str:
    """Return a text up to where one of the marks stands, or may begin at its end."""
    return text[: min((_may_begin(mark, text) for mark in marks), default=len(text))]


def _may_begin(mark: str, text: str) -> int:
    """Return the index at which a mark stands or may begin; else the text's length."""
    index = text.find(mark)
    return index if index >= 0 else _may_end_in(mark, text)


def _may_end_in(mark: str, text: str) -> int:
    """Return the index at which a text's end may begin a mark; else the text's length."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return start if start >= 0 else len(text)


# ---------------------------------------------------------------- one turn's format


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Parser options for the text of one turn: reasoning and tool calls."""

    tools: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the parameters of each offered tool, by name."""
    separates_reasoning: bool = False
    """Whether the model's template takes reasoning apart from the content."""
    is_reasoning_open: bool = False
    """Whether the prompt has begun the reasoning."""
    response_template: Mapping[str, Any] | None = None
    """Template of ``transformers`` by which the tokenizer's replies are parsed; None without."""
    prompt: str = ""
    """Prompt of the turn, which a response template needs."""

    def parse(self, text: str) -> ParsedReply:
        """Split the whole text of the turn."""
        if self.response_template is not None:
            return _by_response_template(text, self.response_template, self.prompt, self.tools)
        return parse_reply(
            text,
            self.tools,
            separates_reasoning=self.separates_reasoning,
            is_reasoning_open=self.is_reasoning_open,
        )

    def settled(self, text: str, stops: Collection[str]) -> str:
        """Return the beginning of a running turn's content, as :func:`settled_text`."""
        if self.response_template is not None:
            return ""
        return settled_text(
            text,
            self.tools,
            stops,
            separates_reasoning=self.separates_reasoning,
            is_reasoning_open=self.is_reasoning_open,
        )


def _by_response_template(
    text: str, template: Mapping[str, Any], prompt: str, tools: Mapping[str, Any]
) -> ParsedReply:
    """Parse a reply by a tokenizer's ``response_template``, with ``transformers``' own parser."""
    from transformers.utils.chat_parsing import parse_response  # on use: takes half a second

    offered: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in tools.items()
    ]
    try:
        message = parse_response(text, dict(template), prefix=prompt, tools=offered)
    except (ValueError, TypeError, KeyError, RecursionError):
        return ParsedReply(text, shown=text)  # text that is not of the template's form
    listed = message.get("tool_calls") or []
    functions = [each.get("function", each) if isinstance(each, dict) else None for each in listed]
    calls = [_call(function, "arguments", json.dumps(function)) for function in functions]
    content = str(message.get("content") or "")
    reasoning = str(message.get("reasoning_content") or message.get("thinking") or "")
    reply = _reply(content, calls)
    if reply is None or not reply.tool_calls:
        invalid = () if reply is None else reply.invalid_tool_calls
        return ParsedReply(
            text if calls else content, (), "" if calls else reasoning, text, invalid
        )
    return replace(reply, reasoning=reasoning, shown=_up_to_call(text, reply))


def _up_to_call(text: str, reply: ParsedReply) -> str:
    """Return the text before the first call. Only the response template defines the call's tags, so
    the text ends where the content, or else the reasoning, ends."""
    last = reply.content.strip() or reply.reasoning.strip()
    return text[: text.rfind(last) + len(last)] if last else ""
