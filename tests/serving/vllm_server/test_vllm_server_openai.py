"""OpenAI's own client, and the requests of vLLM's documentation."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import tidegate
from tests.serving.vllm_server.vllm_serving import Client

pytestmark = pytest.mark.wire

# ---------------------------------------------------------------- OpenAI's client


@pytest.fixture
def open_ai(server: tidegate.VLLMServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_openais_client_completes_texts_and_tokens(open_ai: openai.OpenAI) -> None:
    (listed,) = open_ai.models.list().data
    answer: Any = open_ai.completions.create(
        model=listed.id,
        prompt=["A robot may not", "injure"],
        n=2,
        max_tokens=5,
        logprobs=3,
        extra_body={"return_token_ids": True, "return_weight_versions": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].prompt_token_ids == answer.choices[1].prompt_token_ids
    for choice in answer.choices:
        count = len(choice.token_ids)
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == count
        starts = itertools.accumulate(map(len, choice.logprobs.tokens[:-1]), initial=0)
        assert choice.logprobs.text_offset == list(starts)
        assert choice.weight_versions == [{"version": "default", "start": 0, "end": count}]
    reported = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert reported == answer.usage.total_tokens

    with pytest.raises(openai.NotFoundError, match="does not exist"):
        open_ai.completions.create(model="no", prompt="x")


def test_openais_client_streams_a_conversation(open_ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Who won the world series in 2020?"}],
        "max_tokens": 24,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    whole: Any = open_ai.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert len(choice.logprobs.content) == len(choice.token_ids)
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    said = ""
    ids: list[int] = []
    for chunk in open_ai.chat.completions.create(**asked, stream=True):
        delta: Any = chunk.choices[0]
        said += delta.delta.content or ""
        ids += delta.token_ids or []
    assert (said, ids) == (choice.message.content, choice.token_ids)


# ---------------------------------------------------------------- what vLLM's docs ask
# The requests of its folder examples/online_serving, in our words.

CONVERSATION: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who won the world series in 2020?"},
    {"role": "assistant", "content": "The Los Angeles Dodgers won the World Series in 2020."},
    {"role": "user", "content": "Where was it played?"},
]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius"]}},
            "required": ["city", "unit"],
        },
    },
}


def test_the_completion_example_streams_as_many_tokens_as_openai_gives_unasked(
    open_ai: openai.OpenAI,
) -> None:
    model = open_ai.models.list().data[0].id
    asked: Any = {"model": model, "prompt": "A robot may not injure a human being", "echo": False}
    chunks = list(open_ai.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.model == model for chunk in chunks)
    whole: Any = open_ai.completions.create(**asked, extra_body={"ignore_eos": True})
    assert whole.usage.completion_tokens == 16


def test_a_rendered_conversation_is_a_request_that_gives_the_chats_tokens(client: Client) -> None:
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "and then?"}]}
    chat |= {"max_completion_tokens": 6, "temperature": 1.0, "top_p": 0.9, "seed": 5}
    chat |= {"logprobs": True, "cache_salt": "s", "response_format": {"type": "json_object"}}
    rendered = client.post("/v1/chat/completions/render", chat)
    asked = {"max_tokens": 6, "temperature": 1.0, "top_p": 0.9, "seed": 5, "logprobs": 0}
    assert rendered["sampling_params"] == asked | {
        "structured_outputs": {"json": {"type": "object"}}
    }
    (expected,) = client.post("/v1/chat/completions", chat | {"return_token_ids": True})["choices"]
    (choice,) = client.post("/inference/v1/generate", rendered)["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    for field, value, code in (("model", "no", 404), ("best_of", 2, 400), ("n", 0, 400)):
        refused = client.refusal("/v1/chat/completions/render", chat | {field: value})
        assert (refused["code"], refused["param"]) == (code, field)


def test_a_batch_of_conversations_gets_a_choice_for_each_as_if_each_were_asked_alone(
    client: Client,
) -> None:
    path = "/v1/chat/completions"
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": True}
    talks = [CONVERSATION, CONVERSATION[:1]]
    reported = client.post(f"{path}/batch", {"messages": talks, **body})
    alone = [client.post(path, {"messages": talk, **body}) for talk in talks]
    assert [choice["index"] for choice in reported["choices"]] == [0, 1]
    for choice, single in zip(reported["choices"], alone, strict=True):
        assert choice["token_ids"] == single["choices"][0]["token_ids"]
        assert choice["message"] == single["choices"][0]["message"]
    spent = [single["usage"]["prompt_tokens"] for single in alone]
    assert reported["usage"]["prompt_tokens"] == sum(spent)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"messages": [[]]}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_vllm_does_not_do_in_batches_is_refused(
    client: Client, wrong: dict[str, Any], param: str
) -> None:
    body = {"messages": [CONVERSATION], "max_tokens": 2} | wrong
    reported = client.refusal("/v1/chat/completions/batch", body)
    assert (reported["code"], reported["param"]) == (400, param)


def test_the_tools_example_shows_the_model_its_tools(open_ai: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": CONVERSATION, "tools": [WEATHER], "max_tokens": 4}
    answer = open_ai.chat.completions.create(**asked)
    assert not answer.choices[0].message.tool_calls
    uncalled = open_ai.chat.completions.create(**asked | {"tool_choice": "none"})
    without = open_ai.chat.completions.create(**asked | {"tools": openai.omit})
    assert answer.usage is not None
    assert uncalled.usage is not None
    assert without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens  # the model was shown them
    assert answer.usage.prompt_tokens == uncalled.usage.prompt_tokens


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
"""Of a tool whose calls soon end, whatever a model of random weights prefers."""

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
ADD_CALL: Any = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def saying(text: str) -> dict[str, Any]:
    """Fields by which the model says this text."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 200}


def streamed(open_ai: openai.OpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    """The message that the chunks of a stream add up to, with the finish reason."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in open_ai.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["tool_calls"] += [
            (each.id, each.function.name, each.function.arguments)
            for each in choice.delta.tool_calls or []
            if each.function is not None
        ]
        message["finish_reason"] = choice.finish_reason
    return message


def test_calls_are_parsed_whole_and_streamed_and_stay_text_where_no_tool_is_offered(
    open_ai: openai.OpenAI,
) -> None:
    text = f"I add. {CALL}"
    asked: Any = {"model": "tiny", "messages": CONVERSATION, "tools": [ADD], **saying(text)}
    (choice,) = open_ai.chat.completions.create(**asked).choices
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    said = streamed(open_ai, asked)
    assert (said["content"].strip(), said["finish_reason"]) == ("I add.", "tool_calls")
    [(_, *function)] = said["tool_calls"]
    assert function == ["add", '{"a": 1}']
    for plain in (asked | {"tool_choice": "none"}, asked | {"tools": openai.omit}):
        (choice,) = open_ai.chat.completions.create(**plain).choices
        assert choice.message.content == text
        assert not choice.message.tool_calls
        assert choice.finish_reason == "stop"


def test_only_the_first_call_is_kept_where_calls_may_not_be_parallel(
    open_ai: openai.OpenAI,
) -> None:
    asked: Any = {"model": "tiny", "messages": CONVERSATION, "tools": [ADD], **saying(CALL * 2)}
    for parallel, kept in ((True, 2), (False, 1)):
        (choice,) = open_ai.chat.completions.create(**asked, parallel_tool_calls=parallel).choices
        assert len(choice.message.tool_calls or []) == kept


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_may_be_forced_and_its_result_sent_back(open_ai: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "tiny", "messages": [*CONVERSATION], "tools": [ADD], "max_tokens": 300}
    answer = open_ai.chat.completions.create(**asked, tool_choice=choice)
    [call] = answer.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    asked["messages"] += [
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    assert open_ai.chat.completions.create(**asked | {"max_tokens": 4}).choices
    with pytest.raises(openai.BadRequestError, match="omit response_format"):
        open_ai.chat.completions.create(
            **asked, tool_choice=choice, response_format={"type": "json_object"}
        )


@pytest.mark.parametrize(
    "said",
    [
        {"role": "user"},
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": [{"id": "a", **ADD_CALL}]},
    ],
)
def test_a_message_without_content_is_shown_as_an_empty_one(
    client: Client, said: dict[str, Any]
) -> None:
    question = {"role": "user", "content": "1?"}
    tokens = [
        client.post("/tokenize", {"messages": [question, {**said, **content}, question]})["tokens"]
        for content in ({"content": ""}, {"content": None}, {})
    ]
    assert tokens[1] == tokens[0]
    assert tokens[2] == tokens[0]


def test_responses_are_answered_and_continued(open_ai: openai.OpenAI) -> None:
    add: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": None}
    tools: Any = [add, {"type": "web_search"}]
    asked: Any = {"model": "tiny", "input": "1+2?", "tools": tools}
    first = open_ai.responses.create(**asked, tool_choice="required", max_output_tokens=300)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.name, first.model) == ("add", "tiny")
    assert first.usage is not None
    more: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    asked |= {"input": [more], "max_output_tokens": 8, "previous_response_id": first.id}
    second = open_ai.responses.create(**asked)
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    with open_ai.responses.stream(**asked) as stream:
        assert list(stream)[-1].type in ("response.completed", "response.incomplete")
    with pytest.raises(openai.NotFoundError, match="no answer"):
        open_ai.responses.create(model="tiny", input="q", previous_response_id="resp_no")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        open_ai.responses.create(model="no", input="q")


def test_messages_are_answered_whole_and_streamed_and_counted(client: Client) -> None:
    ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": "1+2?"}]}
    ask["tools"] = [{"name": "add", "input_schema": PARAMETERS}]
    counted = client.post("/v1/messages/count_tokens", ask)
    said = client.post("/v1/messages", {**ask, "max_tokens": 300, "tool_choice": {"type": "any"}})
    assert said["usage"]["input_tokens"] == counted["input_tokens"]
    assert [block["type"] for block in said["content"]] == ["tool_use"]
    assert said["weight_versions"][0]["version"] == "default"
    text = client.http.post("/v1/messages", json={**ask, "max_tokens": 4, "stream": True}).text
    assert text.startswith("event: message_start")
    assert "event: message_stop" in text
    refused = client.http.post("/v1/messages", json={**ask, "max_tokens": 4, "model": "no"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
    client.post("/pause", mode="abort")
    assert client.http.post("/v1/messages", json={**ask, "max_tokens": 4}).status_code == 503


def test_a_model_is_described_by_its_name(open_ai: openai.OpenAI) -> None:
    assert open_ai.models.retrieve("tiny") == open_ai.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        open_ai.models.retrieve("other/model")


@pytest.mark.parametrize(
    ("outputs", "fits"),
    [
        ({"choice": ["positive", "negative"]}, r"positive|negative"),
        ({"choice": ['a "quoted" one', "b\\c"]}, r'a "quoted" one|b\\c'),
        ({"regex": r"[a-z]{2}@[a-z]{2}\.com/x"}, r"[a-z]{2}@[a-z]{2}\.com/x"),
        ({"regex": r"\d[^\D]\w"}, r"[0-9]{2}[0-9A-Za-z_]"),
        ({"grammar": 'start: "SELECT " ("a" | "b")'}, r"SELECT [ab]"),
    ],
)
def test_the_structured_outputs_examples_are_kept_to(
    open_ai: openai.OpenAI, outputs: Any, fits: str
) -> None:
    answer = open_ai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Classify this sentiment: vLLM is wonderful!"}],
        max_tokens=60,
        extra_body={"structured_outputs": outputs},
    )
    assert re.fullmatch(fits, answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_the_pause_example_stops_a_stream_until_it_is_resumed(
    open_ai: openai.OpenAI, client: Client
) -> None:
    asked: Any = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 600}
    stream = open_ai.completions.create(**asked, stream=True, extra_body=LONG_AS_IT_IS)
    chunks = itertools.islice(stream, 3)
    ids = [i for chunk in chunks for i in read_ids(chunk)]
    client.post("/pause", mode="keep")
    frozen = client.tokens_generated()
    assert client.get("/is_paused") == {"is_paused": True}
    assert client.tokens_generated() == frozen
    client.post("/resume")
    ids += [i for chunk in stream for i in read_ids(chunk)]
    assert len(ids) == 600


LONG_AS_IT_IS = {"ignore_eos": True, "return_token_ids": True}


def read_ids(chunk: Any) -> list[int]:
    return chunk.choices[0].token_ids or []


# ---------------------------------------------------------------- salts, ranks


def test_contexts_are_shared_among_requests_of_one_salt_only(
    client: Client, server: tidegate.VLLMServer
) -> None:
    def positions_found(salt: str | None) -> int:
        before = server.statistics().cached_context_tokens
        sampling = {"max_tokens": 1, "ignore_eos": True}
        for _ in range(2):  # engines take turns
            client.generate(token_ids=prompt, sampling_params=sampling, cache_salt=salt)
        return server.statistics().cached_context_tokens - before

    client.post("/reset_prefix_cache")
    prompt = [7] * 200
    one_engine_or_both = {0, 192}
    assert positions_found("a") in one_engine_or_both
    assert positions_found("b") in one_engine_or_both  # nothing of the first two
    assert positions_found("a") >= 192
    assert positions_found(None) in one_engine_or_both
    for bad in ("", "x" * 257):
        body = {"token_ids": [5], "sampling_params": {}, "cache_salt": bad}
        assert client.refusal("/inference/v1/generate", body)["param"] == "cache_salt"


def test_a_prompts_own_tokens_are_ranked_among_all(client: Client) -> None:
    prompt = [30, 41, 52, 63]
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 3}
    (choice,) = client.post("/v1/completions", body)["choices"]
    assert choice["prompt_logprobs"][0] is None
    for token, reported in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True):
        ranks = sorted(one["rank"] for one in reported.values())  # TRL's client sorts by them
        assert ranks[:3] == [1, 2, 3]
        is_likely = reported[str(token)]["rank"] <= 3
        assert len(reported) == (3 if is_likely else 4)
