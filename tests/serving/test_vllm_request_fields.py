"""Every field of vLLM's requests is honoured, refused by name, or documented to do nothing."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from tests.site_hooks import generated_pages, hook
from tidegate.serving.gateway import requests as gateway_requests
from tidegate.serving.http.errors import ApiError
from tidegate.serving.openai.requests import (
    UNSERVED,
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Sampling,
    TokenSampling,
    generate_options,
    refuse_fields,
)

FIELDS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("vllm_request_fields.json").read_text()
)
COMPLETION, CHAT = FIELDS["CompletionRequest"], FIELDS["ChatCompletionRequest"]
BATCH_CHAT = FIELDS["BatchChatCompletionRequest"]
GENERATE, SAMPLING_PARAMS = FIELDS["GenerateRequest"], FIELDS["SamplingParams"]

NEMO_GYM = {"required_prefix_token_ids", "prompt_token_ids", "generation_token_ids"}

PAGE = "reference/request-fields.md"

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

ASKED: dict[str, Any] = {
    "prompt": [1, 2],
    "messages": MESSAGES,
    "token_ids": [1, 2],
    "sampling_params": {},
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "n": 2,
    "best_of": 2,
    "stop": ["x"],
    "stop_token_ids": [5],
    "allowed_token_ids": [5],
    "logit_bias": {"5": 1.0},
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "stream_options": {"include_usage": True},
    "model": "m",
    "request_id": "r",
    "cache_salt": "s",
    "suffix": "s",
    "output_mode": "text",
    "reasoning_effort": "low",
    "chat_template": "{{ x }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "bad_words": ["x"],
    "guided_json": {"type": "object"},
    "truncate_prompt_tokens": 4,
    "truncation_side": "right",
    "thinking_token_budget": 16,
    "top_logprobs": 1,
}
"""A value that changes the output, if 2 and true do not."""

BY_OTHER_DEFAULT = {"add_generation_prompt": False, "skip_special_tokens": False}


def value_of(name: str, kind: type[msgspec.Struct]) -> Any:
    if name in ASKED:
        return ASKED[name]
    if name in BY_OTHER_DEFAULT:
        return BY_OTHER_DEFAULT[name]
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return True if bool in get_args(types.get(name)) else 2


GatewayChat = gateway_requests.GatewayChatRequest

Kinds = dict[str, tuple[type[msgspec.Struct], list[str], dict[str, Any]]]
"""Kinds of requests: their models, vLLM's fields of them, and the least body."""

SERVER: Kinds = {
    "completions": (CompletionRequest, COMPLETION, {"prompt": [1]}),
    "chats": (ChatRequest, CHAT, {"messages": MESSAGES}),
    "chats in batches": (BatchChatRequest, BATCH_CHAT, {"messages": [MESSAGES]}),
    "tokens": (GenerateRequest, GENERATE, {"token_ids": [1], "sampling_params": {}}),
    "sampling_params": (TokenSampling, SAMPLING_PARAMS, {}),
}
GATEWAY: Kinds = {
    "completions": (gateway_requests.GatewayCompletionRequest, COMPLETION, {"prompt": [1]}),
    "chats": (GatewayChat, CHAT, {"messages": MESSAGES}),
}


def documented() -> dict[str, list[str]]:
    """Return the effects that the generated reference page states, per field and column."""
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", generated_pages()[PAGE], re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


def refused_field(request: msgspec.Struct) -> str | None:
    """The field that a request is refused for; None if it is served."""
    try:
        if isinstance(request, GenerateRequest):
            refuse_fields(request, request.REFUSED)
        elif isinstance(request, ChatRequest):
            request.rendering  # noqa: B018 - it checks
            generate_options(request, (0,))
        elif isinstance(request, GatewayChat | gateway_requests.GatewayCompletionRequest):
            gateway_requests.generate_options(request)
        else:
            assert isinstance(request, CompletionRequest | TokenSampling)
            generate_options(request, (0,))
    except ApiError as error:
        return error.param
    return None


@pytest.mark.parametrize("kinds", [SERVER, GATEWAY], ids=["vllm", "gateway"])
def test_every_field_of_vllms_requests_does_what_the_documentation_says(
    kinds: Kinds,
) -> None:
    effects = documented()
    columns = list(hook("reference").REQUESTS.values())
    for kind, (model, fields, least) in kinds.items():
        column = columns.index(ChatRequest if model is BatchChatRequest else model)
        for name in fields:
            said = effects[name][column] if name in effects else "-"
            body = {**least, name: value_of(name, model)}
            if name == "messages":
                body = least
            if name == "top_logprobs":
                body["logprobs"] = True
            request: msgspec.Struct = msgspec.convert(body, model)
            if said == "refused":
                assert refused_field(request) == name, (kind, name)
            else:
                assert refused_field(request) is None, (kind, name)
            assert (name in model.__struct_encode_fields__) == (said != "-") or name in (
                "model",
                "parallel_tool_calls",
            ), (kind, name)


@pytest.mark.parametrize("kinds", [SERVER, GATEWAY], ids=["vllm", "gateway"])
def test_a_field_that_would_change_the_output_is_refused_by_name_unless_its_value_is_harmless(
    kinds: Kinds,
) -> None:
    for kind, (model, _, least) in kinds.items():
        refused: dict[str, tuple[Any, ...]] = model.REFUSED  # type: ignore[attr-defined]
        for name, harmless in refused.items():
            asked = msgspec.convert({**least, name: value_of(name, model)}, model)
            assert refused_field(asked) == name, (kind, name)
            for value in (None, *harmless):
                served = msgspec.convert({**least, name: value}, model)
                assert refused_field(served) is None, (kind, name, value)


def test_all_documented_fields_are_vllms_or_refused() -> None:
    known = {*COMPLETION, *CHAT, *BATCH_CHAT, *GENERATE, *SAMPLING_PARAMS, *UNSERVED, *NEMO_GYM}
    assert documented().keys() <= known | {"return_weight_versions"}  # an extension of ours


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], param: str) -> None:
    request = msgspec.convert({"messages": MESSAGES, **fields}, ChatRequest)
    assert refused_field(request) == param


def test_the_schema_of_structured_outputs_may_be_text_as_in_vllm() -> None:
    asked = {"messages": MESSAGES, "structured_outputs": {"json": '{"type": "boolean"}'}}
    assert msgspec.convert(asked, ChatRequest).schema == {"type": "boolean"}


def test_a_reasoning_effort_switches_thinking_unless_the_request_says_so_itself() -> None:
    def names(**fields: Any) -> Any:
        return msgspec.convert({"messages": MESSAGES, **fields}, ChatRequest).rendering.names

    assert names(reasoning_effort="none")["enable_thinking"] is False
    assert names(reasoning_effort="low")["enable_thinking"] is True
    own = {"enable_thinking": False}
    assert names(reasoning_effort="low", chat_template_kwargs=own)["enable_thinking"] is False
    assert names() == {}


def test_parallel_tool_calls_are_honoured_at_the_gateway() -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": [TOOL], "parallel_tool_calls": False}
    assert refused_field(msgspec.convert(asked, GatewayChat)) is None
    asked["tool_choice"] = "required"
    assert refused_field(msgspec.convert(asked, GatewayChat)) is None


@pytest.mark.parametrize(
    ("wanted", "lark"),
    [
        ({"regex": "a/b"}, r"start: /a\/b/"),
        ({"regex": r"a\/b"}, r"start: /a\/b/"),
        ({"regex": r"a\\/b"}, r"start: /a\\\/b/"),
        ({"regex": r"\d[^\w.]\\d\s"}, r"start: /[0-9][^[0-9A-Za-z_].]\\d\s/"),
        ({"choice": ["yes", 'a "b"']}, r'start: "yes" | "a \"b\""'),
    ],
    ids=["a slash", "an escaped one", "one after an escaped backslash", "ASCII", "choices"],
)
def test_what_is_wanted_becomes_a_grammar_that_ends_where_it_ends(
    wanted: dict[str, Any], lark: str
) -> None:
    assert Sampling(structured_outputs=wanted).grammar == lark
