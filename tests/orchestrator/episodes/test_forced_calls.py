"""Forced tool calls, and parsing of calls in the format of each model family."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.orchestrator.episodes.chat_templates import (
    CHATML,
    GEMMA,
    GLM,
    LLAMA3,
    MINIMAX,
    QWEN_CODER,
)
from tests.orchestrator.episodes.talking import CALL, TOOLS, Talk, user
from tests.orchestrator.episodes.test_tool_calls import (
    write_coder,
    write_glm,
    write_hermes,
    write_minimax,
)
from tidegate.errors import ChatRefused
from tidegate.orchestrator.episodes.forced_calls import forced_call
from tidegate.orchestrator.episodes.tool_calls import (
    ParsedReply,
    ToolCall,
    parse_reply,
    settled_text,
)
from tidegate.transport.sampling import LogitsProcessor

ADD = {"a": {"type": "integer"}}
TWO: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": ADD, "required": ["a"]},
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "stop"}}


def allows(processor: LogitsProcessor, text: str) -> bool:
    """Whether the grammar library lets a model generate exactly this text."""
    library = pytest.importorskip("llguidance")
    if processor.name == "grammar":
        grammar = library.LLMatcher.grammar_from_lark(processor.arguments["lark"])
    else:
        schema = json.dumps(processor.arguments["schema"])
        grammar = library.LLMatcher.grammar_from_json_schema(schema)
    words = library.LLTokenizer("byte")
    matcher = library.LLMatcher(words, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = words.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def test_a_call_of_any_tool_is_forced_in_the_form_of_hermes() -> None:
    forced = forced_call("required", TWO, CHATML)
    assert allows(forced, said := hermes('{"name": "add", "arguments": {"a": 3}}'))
    assert allows(forced, hermes('{"name": "stop", "arguments": {}}'))
    assert not allows(forced, "hello")
    assert not allows(forced, hermes('{"name": "add", "arguments": {"a": "three"}}'))
    assert not allows(forced, hermes('{"name": "other", "arguments": {}}'))
    assert parse_reply(said, ["add"]).tool_calls == (ToolCall("add", {"a": 3}),)


@pytest.mark.parametrize("form", [CHATML, GLM])
def test_white_space_in_a_forced_calls_json_is_bounded(form: str) -> None:
    begin, end = ('{"name": "add", "arguments": {', '"a": 3}}')
    if form == GLM:
        begin, end = "", "3"
    write = (
        hermes
        if form == CHATML
        else "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>".format
    )
    forced = forced_call("required", TWO, form)
    assert allows(forced, write(begin + end))
    assert allows(forced, write(begin + " " * 20 * (form == CHATML) + end))
    assert not allows(forced, write(begin + " " * 30 + end))


def test_a_named_one_is_forced_in_the_form_of_llama() -> None:
    forced = forced_call(NAMED, TWO, LLAMA3)
    assert allows(forced, said := '{"name": "stop", "parameters": {}}')
    assert not allows(forced, '{"name": "add", "parameters": {"a": 3}}')
    assert parse_reply(said, ["stop"]).tool_calls == (ToolCall("stop", {}),)


PLACES: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "fields": {"type": "array", "items": {"$ref": "#/$defs/field"}},
                },
                "$defs": {"field": {"type": "string"}},
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in PLACES}

FORMS: dict[str, tuple[str, Callable[[ToolCall], str]]] = {
    "coder": (QWEN_CODER, write_coder),
    "glm": (GLM, write_glm),
    "minimax": (MINIMAX, lambda call: write_minimax(call).removesuffix("\n")),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_forced_in_the_form_of_models_that_write_each_argument_between_tags(
    form: str,
) -> None:
    template, write = FORMS[form]
    forced = forced_call("required", PLACES, template)
    full = ToolCall("search", {"query": "if a < b: </p>", "limit": 3, "fields": ["x", "y"]})
    for call in (full, ToolCall("search", {"query": ""}), ToolCall("now", {})):
        assert allows(forced, said := write(call))
        assert parse_reply(said, SCHEMAS).tool_calls == (call,)
    for wrong in (
        ToolCall("search", {}),
        ToolCall("search", {"query": "q", "limit": "three"}),
        ToolCall("search", {"query": "q", "other": 1}),
        ToolCall("fly", {}),
    ):
        assert not allows(forced, write(wrong)), wrong
    assert not allows(forced, "hello")


@pytest.mark.parametrize(("template", "write"), [(MINIMAX, write_minimax), (CHATML, write_hermes)])
def test_a_model_whose_prompt_has_begun_its_reasoning_ends_it_before_a_forced_call(
    template: str, write: Callable[[ToolCall], str]
) -> None:
    forced = forced_call("required", PLACES, template, is_reasoning_open=True)
    call = write(ToolCall("now", {})).removesuffix("\n")
    said = f"Hm, 1 < 2.\n</think>\n\n{call}"
    assert allows(forced, said)
    reply = parse_reply(said, SCHEMAS, separates_reasoning=True, is_reasoning_open=True)
    assert (reply.reasoning, reply.tool_calls) == ("Hm, 1 < 2.", (ToolCall("now", {}),))
    assert not allows(forced, call)


def test_what_cannot_be_forced_is_refused_with_what_there_is() -> None:
    with pytest.raises(ChatRefused, match="none of Hermes' form"):
        forced_call("required", TWO, GEMMA)
    with pytest.raises(ChatRefused, match="there are no tools"):
        forced_call("required", None, CHATML)
    for choice in ("always", {"type": "function", "function": {"name": "fly"}}):
        with pytest.raises(ChatRefused, match="name one of add, stop"):
            forced_call(choice, TWO, CHATML)


async def test_an_episode_asks_its_engine_to_hold_the_turn_to_the_call(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "chatml")
    message = await talk.say(
        f"{CALL}<|im_end|>", [user("1+2?")], tools=TOOLS, tool_choice="required"
    )
    assert message["tool_calls"][0]["function"]["name"] == "add"
    await talk.say("hm<|im_end|>", [user("?")], tools=TOOLS, tool_choice="none")
    asked = [turn.sampling.logits_processors for row in talk.rollout.rows for turn in row.turns]
    assert asked == [[forced_call("required", TOOLS, CHATML).to_str()], []]


# ---------------------------------------------------------------- other families


def deepseek(text: str) -> str:
    """Return a text with DeepSeek's special marks."""
    return text.replace("<|", "<\uff5c").replace("|>", "\uff5c>")


def test_calls_of_deepseek_are_read_in_both_of_its_forms() -> None:
    begin, call, sep = "<|tool▁calls▁begin|>", "<|tool▁call▁begin|>", "<|tool▁sep|>"
    end, ends = "<|tool▁call▁end|>", "<|tool▁calls▁end|>"
    first = f'{call}function{sep}add\n```json\n{{"a": 3}}\n```{end}\n'
    second = f"{call}function{sep}stop\n```json\n{{}}\n```{end}"
    calls = (ToolCall("add", {"a": 3}), ToolCall("stop", {}))
    v3 = deepseek(f"I look.{begin}{first}{second}{ends}")
    assert parse_reply(v3, ["add", "stop"]) == ParsedReply("I look.", calls)
    v31 = deepseek(f'{begin}{call}add{sep}{{"a": 3}}{end}{call}stop{sep}{{}}{end}{ends}')
    assert parse_reply(v31, ["add", "stop"]) == ParsedReply("", calls)
    broken = v31.replace("{}", "{")
    reply = parse_reply(broken, ["add", "stop"])
    assert reply == ParsedReply("", calls[:1])
    assert len(reply.invalid_tool_calls) == 1


def test_calls_of_mistral_are_read_with_their_mark_and_without() -> None:
    listed = '[{"name": "add", "arguments": {"a": 3}}, {"name": "stop", "arguments": {}}]'
    calls = (ToolCall("add", {"a": 3}), ToolCall("stop", {}))
    assert parse_reply(f"Well.[TOOL_CALLS] {listed}", ["add"]) == ParsedReply("Well.", calls)
    assert parse_reply(listed, ["add", "stop"]) == ParsedReply("", calls)
    assert parse_reply(listed, ["add"]) == ParsedReply(listed)
    assert parse_reply("[1, 2]", ["add"]) == ParsedReply("[1, 2]")


PIECES = st.sampled_from(
    [
        *("a", "Well. ", " ", "\n", "[", "{", "<", "|", "[1]", "STOP", "ST", "<tool_call>"),
        *('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "[TOOL_CALLS]"),
        *('[{"name": "add", "arguments": {}}]', '{"name": "add", "parameters": {}}'),
        *("<|python_tag|>", "</tool_call>", "<tool_call", "[TOOL_"),
    ]
)


@given(st.lists(PIECES, max_size=6).map("".join), st.booleans(), st.booleans())
def test_what_is_shown_of_a_turn_is_what_it_begins_with_when_it_has_ended(
    said: str, has_tools: bool, has_stop: bool
) -> None:
    tools, stops = ["add"] * has_tools, ["STOP"] * has_stop
    end = said.find("STOP") if has_stop else -1  # an engine goes no further
    whole = said[: end + len("STOP")] if end >= 0 else said
    content = parse_reply(said[:end] if end >= 0 else said, tools).content
    for length in range(len(whole) + 1):
        assert content.startswith(settled_text(whole[:length], tools, stops))


def test_a_turn_is_shown_up_to_where_a_call_or_a_stop_may_begin() -> None:
    assert settled_text("I add. ", ["add"]) == "I add."
    assert settled_text("I add. <tool", ["add"]) == "I add."
    assert settled_text("1 < 2", ["add"]) == "1 < 2"
    assert settled_text("I add. <tool", []) == "I add. <tool"
    assert settled_text("over and ou", [], ["over and out"]) == ""
    assert settled_text("over and up", [], ["over and out"]) == "over and up"
