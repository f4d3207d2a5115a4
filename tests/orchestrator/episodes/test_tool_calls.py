"""Replies of today's models: reasoning, content and calls, read whole, streamed and replayed."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.episodes.talking import Talk, tool, user
from tests.reference_cycles import cycles_found
from tidegate.errors import ChatRefused, ModelError
from tidegate.orchestrator.episodes.call_counts import WARN_AFTER_TURNS
from tidegate.orchestrator.episodes.chat_template import read_chat_template
from tidegate.orchestrator.episodes.tool_calls import (
    DEEPSEEK_MARKS,
    MISTRAL_MARK,
    ParsedReply,
    ToolCall,
    end_of_call,
    parse_reply,
    resembles_call,
    settled_text,
    typed_value,
)

SCHEMAS: dict[str, Any] = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "exact": {"type": "boolean"},
            "weight": {"type": "number"},
            "fields": {"type": "array"},
            "filter": {"type": "object"},
            "site": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NOW = ToolCall("now", {})
TIDES = ToolCall("search", {"query": "tides", "limit": 3})


# ---------------------------------------------------------------- examples of each form

CODER = (
    "<tool_call>\n<function=search>\n<parameter=query>\ntides\n</parameter>\n"
    "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>tides</arg_value>\n"
    "<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
MINIMAX = (
    '<invoke name="search">\n<parameter name="query">tides</parameter>\n'
    '<parameter name="limit">3</parameter>\n</invoke>\n'
)
KIMI = (
    "<|tool_call_begin|>functions.search:0 <|tool_call_argument_begin|>"
    '{"query": "tides", "limit": 3} <|tool_call_end|>'
)
THOUGHT = "<|channel|>analysis<|message|>They want tides.<|end|>"
HARMONY = (
    "<|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
    '{"query": "tides", "limit": 3}'
)
KIMI_TIDES = ToolCall("search", {"query": "tides", "limit": 3}, "functions.search:0")


def kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def minimax(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


EXAMPLES = [
    (CODER, ParsedReply("", (TIDES,))),
    (f"I look.\n{CODER}\n", ParsedReply("I look.", (TIDES,))),
    (CODER + CODER, ParsedReply("", (TIDES, TIDES))),
    (CODER.replace("<tool_call>\n", ""), ParsedReply("", (TIDES,))),
    ("<tool_call>\n<function=now>\n</function>\n</tool_call>", ParsedReply("", (NOW,))),
    (
        "<tool_call><function=search><parameter=query>a\n</parameter>\nb</parameter></function>"
        "</tool_call>",
        ParsedReply("", (ToolCall("search", {"query": "a\n</parameter>\nb"}),)),
    ),
    (GLM, ParsedReply("", (TIDES,))),
    (GLM.replace("\n", ""), ParsedReply("", (TIDES,))),
    (f"Both.{GLM}{GLM}", ParsedReply("Both.", (TIDES, TIDES))),
    ("  \n<tool_call>now</tool_call>", ParsedReply("", (NOW,))),
    (minimax(MINIMAX), ParsedReply("", (TIDES,))),
    (f"I look. {minimax(MINIMAX, MINIMAX)}", ParsedReply("I look.", (TIDES, TIDES))),
    (minimax('<invoke name="now"></invoke>'), ParsedReply("", (NOW,))),
    (f"I look. {kimi(KIMI)}", ParsedReply("I look.", (KIMI_TIDES,))),
    (kimi(KIMI, KIMI), ParsedReply("", (KIMI_TIDES, KIMI_TIDES))),
    (
        kimi("<|tool_call_begin|>now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ParsedReply("", (ToolCall("now", {}, "now:1"),)),
    ),
    (THOUGHT + HARMONY, ParsedReply("", (TIDES,), "They want tides.")),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.search"
        '<|channel|>commentary json<|message|>{"query": "tides", "limit": 3}<|call|>',
        ParsedReply("I look.", (TIDES,)),
    ),
    (
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        ParsedReply("", (NOW,)),
    ),
    (
        f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>High at noon.<|return|>",
        ParsedReply("High at noon.", (), "They want tides."),
    ),
]


@pytest.mark.parametrize(("text", "reply"), EXAMPLES)
def test_calls_are_read_with_the_types_of_their_schema(text: str, reply: ParsedReply) -> None:
    assert parse_reply(text, SCHEMAS) == reply


UNREADABLE = [
    "<tool_call><function=search>",
    "<tool_call><function=></function></tool_call>",
    "<function=search><parameter=query>tides",
    "<tool_call>search<arg_key>query</arg_key></tool_call>",
    minimax('<invoke name="search"><parameter name="query">tides</invoke>'),
    kimi("<|tool_call_begin|>search<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    kimi("<|tool_call_begin|>search:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_call_that_cannot_be_read_stays_in_the_content(text: str) -> None:
    assert parse_reply(text, SCHEMAS) == ParsedReply(text)
    assert resembles_call(text, SCHEMAS)


def test_a_call_of_gpt_oss_that_cannot_be_read_stays_in_the_content() -> None:
    broken = HARMONY.replace("3}", "")
    assert parse_reply(THOUGHT + broken, SCHEMAS) == ParsedReply(broken, (), "They want tides.")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("3", {"type": "string"}, "3"),
        ("null", {"type": "string"}, "null"),
        ("None", {"type": ["string", "null"]}, None),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("1e3", {"type": "number"}, 1000.0),
        ("NaN", {"type": "number"}, "NaN"),
        ("{'a': [1]}", {"type": "object"}, {"a": [1]}),
        ('["a"]', {"anyOf": [{"type": "array"}, {"type": "null"}]}, ["a"]),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("7", None, "7"),
    ],
)
def test_an_argument_has_a_type_of_its_schema_or_stays_text(
    text: str, schema: Any, value: object
) -> None:
    assert typed_value(text, schema) == value
    assert type(typed_value(text, schema)) is type(value)


# ---------------------------------------------------------------- any calls, by any form


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_coder(call: ToolCall) -> str:
    values = (f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{''.join(values)}</function>\n</tool_call>"


def write_glm(call: ToolCall) -> str:
    values = (
        f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n"
        for k, v in call.arguments.items()
    )
    return f"<tool_call>{call.name}\n{''.join(values)}</tool_call>"


def write_minimax(call: ToolCall) -> str:
    values = (
        f'<parameter name="{k}">{as_text(v)}</parameter>\n' for k, v in call.arguments.items()
    )
    return minimax(f'<invoke name="{call.name}">\n{"".join(values)}</invoke>\n')


def write_kimi(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments)
    return kimi(
        f"<|tool_call_begin|>{call.name}:7<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    )


def write_hermes(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def write_harmony(call: ToolCall) -> str:
    header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
    return f"<|start|>assistant{header}{json.dumps(call.arguments)}<|call|>"


WRITERS: Mapping[str, Callable[[ToolCall], str]] = {
    "coder": write_coder,
    "glm": write_glm,
    "minimax": write_minimax,
    "kimi": write_kimi,
    "hermes": write_hermes,
    "harmony": write_harmony,
}

words = st.text(
    st.characters(
        codec="utf-8", exclude_characters="<>[]{}\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029"
    )
)
numbers = st.integers(-(2**53), 2**53)
plain = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
searches = st.fixed_dictionaries(
    {},
    optional={
        "query": words,
        "limit": numbers,
        "exact": st.booleans(),
        "weight": st.floats(allow_nan=False, allow_infinity=False).map(float),
        "fields": st.lists(plain, max_size=3),
        "filter": st.dictionaries(words, plain, max_size=3),
        "site": st.none() | words.filter(lambda text: text.strip() not in ("null", "None")),
    },
).map(lambda arguments: ToolCall("search", arguments))
calls = st.lists(searches | st.just(NOW), min_size=1, max_size=3)


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=60)
@given(said=words, called=calls)
def test_calls_come_back_as_they_were_written_and_a_stream_never_shows_them(
    form: str, said: str, called: list[ToolCall]
) -> None:
    written = "".join(WRITERS[form](call) for call in called)
    if form == "harmony":
        written, called = WRITERS[form](called[0]), called[:1]
        text = f"<|channel|>commentary<|message|>{said}<|end|>{written}"
    else:
        text, said = said + written, said.strip()
    reply = parse_reply(text, SCHEMAS)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [
        (call.name, call.arguments) for call in called
    ]
    assert reply.content == said
    sent = ""
    for length in range(len(text) + 1):
        settled = settled_text(text[:length], SCHEMAS)
        if settled.startswith(sent):
            sent = settled
        assert reply.content.startswith(sent)


THOUGHTS = st.sampled_from(["<think>\nHm.\n</think>\n\n", "<think></think>\n", ""])


@settings(max_examples=60)
@given(thought=THOUGHTS, said=words, called=st.lists(searches, max_size=2))
def test_a_stream_shows_the_content_without_the_reasoning(
    thought: str, said: str, called: list[ToolCall]
) -> None:
    text = thought + said + "".join(map(write_hermes, called))
    reply = parse_reply(text, SCHEMAS, separates_reasoning=True)
    for length in range(len(text) + 1):
        settled = settled_text(text[:length], SCHEMAS, separates_reasoning=True)
        assert reply.content.startswith(settled)


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>\nHm.", False, "Hm.", ""),
        ("Hm.", True, "Hm.", ""),
        ("Yes.", False, "", "Yes."),
        ("Yes, </think> is a tag.", False, "", "Yes, </think> is a tag."),
    ],
)
def test_reasoning_is_taken_out_of_the_content(
    text: str, is_open: bool, reasoning: str, content: str
) -> None:
    reply = parse_reply(text, (), separates_reasoning=True, is_reasoning_open=is_open)
    assert (reply.reasoning, reply.content) == (reasoning, content)


def test_text_like_a_call_within_the_reasoning_is_no_call() -> None:
    text = f"<think>\nI could write {CODER}\n</think>\n\nNo."
    reply = parse_reply(text, SCHEMAS, separates_reasoning=True)
    assert (reply.tool_calls, reply.content) == ((), "No.")


# ---------------------------------------------------------------- conversations

SAID = {
    "qwen_coder": f"I look.\n{CODER}<|im_end|>",
    "glm": f"\n<think>Hm.</think>\nI look.\n{GLM}<|observation|>",
    "minimax": f"Hm.\n</think>\n\nI look.\n{minimax(MINIMAX)}<|im_end|>",
    "kimi": f"I look.{kimi(KIMI.replace(' <', '<'))}<|im_end|>",
    "harmony": f"{THOUGHT}{HARMONY}<|call|>",
}
"""A first turn of each model, with a call."""

ANSWERED = {
    "qwen_coder": "High.<|im_end|>",
    "glm": "\n<think></think>\nHigh.<|user|>",
    "minimax": "So.\n</think>\n\nHigh.<|im_end|>",
    "kimi": "High.<|im_end|>",
    "harmony": "<|channel|>final<|message|>High.<|return|>",
}


def answers(message: Mapping[str, Any], content: str = "noon") -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call in message["tool_calls"]
    ]


@pytest.mark.parametrize("keeps_reasoning", [True, False])
@pytest.mark.parametrize("model", SAID)
async def test_a_tool_s_answer_continues_the_tokens_that_the_model_has_sampled(
    tmp_path: Path, model: str, keeps_reasoning: bool
) -> None:
    """Also if the client leaves out the reasoning that it was given."""
    talk = Talk(tmp_path, model)
    messages = [user("When is high tide?")]
    message = await talk.say(SAID[model], messages, tools=TOOLS)
    [called] = message["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == {"query": "tides", "limit": 3}
    sent = {k: v for k, v in message.items() if keeps_reasoning or k != "reasoning_content"}
    messages += [sent, *answers(message)]
    last = await talk.say(ANSWERED[model], messages, tools=TOOLS)
    assert last["content"] == "High."
    assert not talk.episode.branches
    talk.check()
    assert talk.model.call_counts.parsed_turns == talk.model.call_counts.turns == 1


async def test_reasoning_is_a_field_of_its_own_where_the_template_takes_it(tmp_path: Path) -> None:
    glm = await Talk(tmp_path, "glm").say(SAID["glm"], [user("q")], tools=TOOLS)
    assert (glm["reasoning_content"], glm["content"]) == ("Hm.", "I look.")
    older = Talk(tmp_path, "chatml_thinking")
    qwen = await older.say("<think>\nHm.\n</think>\n\nYes.<|im_end|>", [user("q")])
    assert qwen == {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}


async def test_an_agent_that_changes_the_reasoning_gets_a_row_of_its_own(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "glm")
    messages = [user("q")]
    message = await talk.say(SAID["glm"], messages, tools=TOOLS)
    messages += [{**message, "reasoning_content": "Another."}, *answers(message)]
    await talk.say(ANSWERED["glm"], messages, tools=TOOLS)
    [branch] = talk.episode.branches
    assert "Another." in talk.text(branch._rollout)


async def test_gpt_oss_may_speak_beside_a_call_although_its_template_takes_one_of_both(
    tmp_path: Path,
) -> None:
    talk = Talk(tmp_path, "harmony")
    spoken = f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    message = await talk.say(f"{spoken}{HARMONY}<|call|>", [user("q")], tools=TOOLS)
    assert (message["content"], message["reasoning_content"]) == ("I look.", "They want tides.")
    messages = [user("q"), message, *answers(message)]
    assert (await talk.say(ANSWERED["harmony"], messages, tools=TOOLS))["content"] == "High."
    talk.check()


# ---------------------------------------------------------------- one call a turn


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen_coder", f"I look.\n{CODER}"),
        ("glm", f"\n<think>Hm.</think>\nI look.\n{GLM}"),
        ("minimax", "Hm.\n</think>\n\n<minimax:tool_call>\n" + MINIMAX.rstrip()),
        (
            "kimi",
            "I look." + kimi(KIMI.replace(" <", "<")).partition("<|tool_calls_section_end")[0],
        ),
    ],
)
async def test_without_parallel_calls_a_turn_stops_after_its_first_call_and_is_closed_as_given(
    tmp_path: Path, model: str, said: str
) -> None:
    talk = Talk(tmp_path, model)
    messages = [user("q")]
    message = await talk.say(said, messages, tools=TOOLS, parallel_tool_calls=False)
    turn = talk.rollout.turns[0]
    assert turn.finish_reason == "stop"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["search"]
    messages += [message, *answers(message)]
    await talk.say(ANSWERED[model], messages, tools=TOOLS, parallel_tool_calls=False)
    assert not talk.episode.branches
    talk.check()
    whole = talk.model.tokenizer.encode(SAID[model], add_special_tokens=False).ids
    given = talk.rollout.token_ids.tolist()
    if model in ("kimi", "minimax"):  # what closes the calls was not sampled, but given
        closing = whole[-1]
        assert closing in given[turn.start + turn.length :]


def test_a_model_that_lists_its_calls_cannot_be_stopped_after_one() -> None:
    assert end_of_call("… [TOOL_CALLS] …") is None
    assert end_of_call("a template without calls") == ""


# ---------------------------------------------------------------- what is never read


async def test_a_form_of_calls_that_is_never_parsed_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk = Talk(tmp_path, "chatml")
    for number in range(2 * WARN_AFTER_TURNS):
        await talk.say("<function_call>search(tides)<|im_end|>", [user(str(number))], tools=TOOLS)
    counts = talk.model.call_counts
    assert (counts.parsed_turns, counts.turns) == (0, 2 * WARN_AFTER_TURNS)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert f"0 of {WARN_AFTER_TURNS} turns that resemble tool calls were parsed" in warnings[0]
    assert "<function_call>search(tides)" in warnings[0]


def test_plain_answers_do_not_resemble_calls() -> None:
    for text in ("High at noon.", "if a < b: return [1]", '{"answer": 3}', "Use the search."):
        assert not resembles_call(text, SCHEMAS), text


# ---------------------------------------------------------------- templates


async def test_a_template_that_fails_is_reported_with_the_line_and_field_that_it_reads(
    tmp_path: Path,
) -> None:
    talk = Talk(tmp_path, "kimi")
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [user("q"), {"role": "assistant", "content": "", "tool_calls": [call]}, tool("noon")]
    with pytest.raises(ChatRefused, match=r"in line \d+ of the template: .*call\['id'\]"):
        await talk.say("High.<|im_end|>", messages, tools=TOOLS)
    with cycles_found() as cycles, contextlib.suppress(ChatRefused):
        await talk.episode.generate(messages=messages, tools=TOOLS)
    assert not cycles, "they would keep the messages"


RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "[[call ",
            "close": "]]",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}


def add_response_template(talk: Talk, template: object) -> None:
    path = talk.model.path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "response_template": template}))
    read_chat_template.cache_clear()


async def test_a_tokenizer_s_response_template_reads_forms_that_tidegate_does_not_know(
    tmp_path: Path,
) -> None:
    talk = Talk(tmp_path, "chatml")
    add_response_template(talk, RESPONSE_TEMPLATE)
    said = 'I look.[[call {"name": "search", "arguments": {"query": "tides"}}]]<|im_end|>'
    message = await talk.say(said, [user("q")], tools=TOOLS)
    read_chat_template.cache_clear()
    assert message["content"] == "I look."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["search"]


async def test_a_response_template_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "chatml")
    add_response_template(talk, {"fields": {}})
    with pytest.raises(ModelError, match=r"response_template in .*tokenizer_config\.json"):
        await talk.say("Yes.<|im_end|>", [user("q")])
    read_chat_template.cache_clear()


# ---------------------------------------------------------------- malformed calls


def write_deepseek(call: ToolCall) -> str:
    begin, end, call_begin, call_end, separator = DEEPSEEK_MARKS
    body = f"{call.name}{separator}{json.dumps(call.arguments, ensure_ascii=False)}"
    return f"{begin}{call_begin}{body}{call_end}{end}"


def write_older_deepseek(call: ToolCall) -> str:
    begin, end, call_begin, call_end, separator = DEEPSEEK_MARKS
    fenced = f"```json\n{json.dumps(call.arguments, ensure_ascii=False)}\n```"
    return f"{begin}{call_begin}function{separator}{call.name}\n{fenced}{call_end}{end}"


def write_mistral(call: ToolCall) -> str:
    return f"{MISTRAL_MARK}{json.dumps([{'name': call.name, 'arguments': call.arguments}])}"


ALL_WRITERS = {
    **WRITERS,
    "deepseek": write_deepseek,
    "older deepseek": write_older_deepseek,
    "mistral": write_mistral,
}
MARKS_IN_ARGUMENTS = (
    "the tag </tool_call> ends it, <tool_call> begins it",
    "see </function>, </invoke>, </minimax:tool_call> and </parameter>",
    f"{MISTRAL_MARK} [{{}}]",
    f"{DEEPSEEK_MARKS[3]}{DEEPSEEK_MARKS[1]} and ``` too",
    "<|tool_call_end|><|tool_calls_section_end|>",
    "<|end|><|call|><|return|><|start|>assistant",
)


@pytest.mark.parametrize("argument", MARKS_IN_ARGUMENTS)
@pytest.mark.parametrize("form", ALL_WRITERS)
def test_marks_within_an_argument_are_its_text(form: str, argument: str) -> None:
    call = ToolCall("search", {"query": argument, "limit": 3})
    text = ALL_WRITERS[form](call)
    reply = parse_reply(text, SCHEMAS)
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("search", call.arguments)]
    assert (reply.content, reply.invalid_tool_calls) == ("", ())


MALFORMED = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {"query": tides}}\n</tool_call>',
    "coder": "<tool_call>\n<function=search>\ntides\n</function>\n</tool_call>",
    "glm": "<tool_call>search\n<arg_key>query</arg_key>\ntides</tool_call>",
    "minimax": minimax('<invoke name="search">tides</invoke>'),
    "kimi": kimi("<|tool_call_begin|>search:0<|tool_call_argument_begin|>{tides<|tool_call_end|>"),
    "harmony": "<|channel|>commentary to=functions.search<|message|>{tides<|call|>",
    "deepseek": write_deepseek(TIDES).replace("{", "{{"),
    "older deepseek": write_older_deepseek(TIDES).replace("{", "{{"),
}


@pytest.mark.parametrize("form", MALFORMED)
def test_a_malformed_call_costs_its_siblings_nothing_and_is_listed_with_its_error(
    form: str,
) -> None:
    good, bad = ALL_WRITERS[form](NOW), MALFORMED[form]
    for text, number in ((good + bad, 1), (bad + good, 1), (good + bad + good, 2), (bad, 0)):
        reply = parse_reply(text, SCHEMAS)
        assert [call.name for call in reply.tool_calls] == ["now"] * number, text
        [invalid] = reply.invalid_tool_calls
        assert "tides" in invalid.text
        assert invalid.error
        assert reply.content == ("" if number else bad)


async def test_an_episode_tells_the_model_of_its_malformed_call_in_the_same_row(
    tmp_path: Path,
) -> None:
    talk = Talk(tmp_path, "chatml")
    messages = [user("When is high tide?")]
    message = await talk.say(MALFORMED["hermes"] + "<|im_end|>", messages, tools=TOOLS)
    [invalid] = talk.episode.turns[-1].invalid_tool_calls
    assert invalid.error == "its JSON can't be read: Expecting value at 'tides}}\\n</tool_call>'"
    messages += [message, user(f"Your call is malformed: {invalid.error}")]
    await talk.say("High.<|im_end|>", messages, tools=TOOLS)
    assert not talk.episode.branches
    talk.check()


THOUGHT_CALLS = f"<think>\nI could say {write_hermes(NOW)}.\n</think>\n\n"


def test_calls_within_reasoning_are_not_executed_where_the_template_keeps_it_in_the_content() -> (
    None
):
    text = f"{THOUGHT_CALLS}I look.\n{write_hermes(TIDES)}"
    assert parse_reply(text, SCHEMAS) == ParsedReply(f"{THOUGHT_CALLS}I look.", (TIDES,))
    plain = f"{THOUGHT_CALLS}High."
    assert parse_reply(plain, SCHEMAS) == ParsedReply(plain)
    opened = plain.removeprefix("<think>")
    assert parse_reply(opened, SCHEMAS, is_reasoning_open=True) == ParsedReply(opened)
    for whole, is_open in ((text, False), (plain, False), (opened, True)):
        content = parse_reply(whole, SCHEMAS, is_reasoning_open=is_open).content
        sent = ""
        for end in range(len(whole) + 1):
            settled = settled_text(whole[:end], SCHEMAS, is_reasoning_open=is_open)
            assert content.startswith(settled)
            assert settled.startswith(sent)
            sent = settled


# ---------------------------------------------------------------- text that is no Unicode


@pytest.mark.parametrize("form", ["hermes", "coder", "glm", "minimax", "kimi", "harmony"])
def test_half_a_character_in_a_call_is_replaced_in_every_form(form: str) -> None:
    arguments = {"query": "half \ud83d", "filter": {"\udce9": ["\ud83d\ude00"]}}
    escaped = WRITERS[form](ToolCall("search", arguments))
    text = escaped.encode("utf-8", "backslashreplace").decode()  # as JSON's escapes
    [call] = parse_reply(text, SCHEMAS).tool_calls
    is_json = form in ("hermes", "kimi", "harmony")  # else a text is written as it is
    assert call.arguments["query"] == ("half \ufffd" if is_json else "half \\ud83d")
    assert call.arguments["filter"] == {"\ufffd": ["😀"]}


async def test_half_a_character_in_messages_or_given_text_ends_no_episode(tmp_path: Path) -> None:
    """As from ``os.fsdecode``: a name of a file that is no UTF-8."""
    talk = Talk(tmp_path, "qwen_coder")
    messages = [user("caf\udce9")]
    message = await talk.say(SAID["qwen_coder"], messages, tools=TOOLS)
    messages += [message, *answers(message, "caf\udce9.txt")]
    await talk.say(ANSWERED["qwen_coder"], messages, tools=TOOLS)
    assert not talk.episode.branches
    talk.episode.append("caf\udce9.txt")
    encode = talk.model.encoder.encode
    assert await talk.episode.encode("caf\udce9") == encode("caf\ufffd")
    assert encode("\udce9" * 40_000) == encode("\ufffd" * 40_000)
