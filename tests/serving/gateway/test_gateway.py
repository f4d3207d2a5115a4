"""Answers and refusals of the gateway: those of OpenAI's API, in the rows of the key's session."""

import asyncio
import json
from typing import Any

import pytest
from httpx import AsyncClient

from tests.orchestrator.episodes.chat_templates import TEMPLATES
from tests.orchestrator.episodes.talking import CALL, TOOLS, Talk, tool, user
from tests.serving.gateway.gateway_clients import CHAT, END, client_of, events_of
from tidegate.orchestrator.episodes.chat_template import read_chat_template
from tidegate.serving.gateway import app as app_module
from tidegate.serving.gateway.gateway import Gateway
from tidegate.serving.gateway.sessions import REQUESTS_PER_SESSION_MAX, Session
from tidegate.serving.http import server as http_server
from tidegate.serving.http.server import JSON_VALUES_MAX, TOOLS_BYTES_MAX

pytestmark = pytest.mark.wire

NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


async def test_a_conversation_is_answered_in_openais_form_and_stays_in_one_row(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"I add. {CALL}{END}", f"It is 3.{END}"]
    messages = [user("1+2?")]
    body = {"model": "m", "messages": messages, "tools": TOOLS, "logprobs": True}
    first = (await client.post(CHAT, json={**body, "return_token_ids": True})).json()
    (choice,) = first["choices"]
    assert (first["object"], first["model"]) == ("chat.completion", "m")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I add."
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": [2]}
    assert choice["token_ids"] == talk.rollout.turns[0].token_ids.tolist()
    length = len(choice["token_ids"])
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": length}]
    assert len(choice["logprobs"]["content"]) == first["usage"]["completion_tokens"] == length
    messages += [
        choice["message"],
        {**tool("3"), "tool_call_id": call["id"]},
    ]
    second = (await client.post(CHAT, json=body)).json()
    assert second["choices"][0]["message"] == {"role": "assistant", "content": "It is 3."}
    assert second["choices"][0]["finish_reason"] == "stop"
    assert not talk.rollout.branches
    talk.check()


async def test_choices_are_rows_of_their_own_which_a_seed_of_minus_one_leaves_apart(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"{n}{END}" for n in range(2)]
    body = {"messages": [user("q")], "n": 2, "seed": -1, "bad_words": [], "best_of": 1}
    choices = (await client.post(CHAT, json=body)).json()["choices"]
    assert {choice["message"]["content"] for choice in choices} == {"0", "1"}
    talk.check()
    one, two = (turn.sampling.seed for row in talk.rollout.rows for turn in row.turns)
    assert one != two
    assert -1 not in (one, two)


@pytest.mark.parametrize(
    ("fields", "name", "arguments"),
    [
        (
            {"response_format": {"type": "json_object"}},
            "json_schema",
            {"schema": {"type": "object"}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, "grammar", {"lark": "start: /a+/"}),
        ({"allowed_token_ids": [1, 2]}, "allowed_tokens", {"token_ids": [1, 2]}),
        ({"bad_words": ["no"]}, "bad_words", {"words": ["no"]}),
    ],
)
async def test_an_output_is_held_to_a_form_that_a_request_names_as_vllms_clients_do(
    talk: Talk,
    client: AsyncClient,
    fields: dict[str, Any],
    name: str,
    arguments: dict[str, Any],
) -> None:
    talk.engine.words += [f"{n}{END}" for n in range(2)]
    body = {**fields, "min_tokens": 1}
    chat = {**body, "messages": [user("q")]}
    prompt = talk.model.tokenizer.encode("go").ids
    assert (await client.post(CHAT, json=chat)).status_code == 200
    plain = await client.post("/v1/completions", json={**body, "prompt": prompt})
    assert plain.status_code == 200
    turns = [turn for row in talk.rollout.rows for turn in row.turns]
    assert len(turns) == 2
    for turn in turns:
        assert turn.sampling.min_tokens == 1
        (processor,) = turn.sampling.logits_processors
        assert json.loads(processor) == {"name": name, "arguments": arguments}


async def test_a_conversation_is_rendered_by_the_options_that_a_request_has_for_its_template(
    talk: Talk, client: AsyncClient
) -> None:
    path = talk.model.path / "chat_template.jinja"
    header = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    shown = header + "{{- 'no thought' if enable_thinking is false }}"
    assert header in TEMPLATES["chatml"]
    path.write_text(TEMPLATES["chatml"].replace(header, shown))
    read_chat_template.cache_clear()
    talk.engine.words += [f"a{END}", f"b{END}", f"c{END}", f"d{END}"]
    asked = {"messages": [user("q")], "return_token_ids": True}

    async def prompt(**fields: Any) -> str:
        answer = (await client.post(CHAT, json={**asked, **fields})).json()
        return talk.episode.decode(answer["prompt_token_ids"])

    reported = await client.post("/tokenize", json=asked | NO_THOUGHT)
    assert talk.episode.decode(reported.json()["tokens"]).endswith("no thought")
    assert (await prompt()).endswith("assistant\n")
    assert (await prompt(**NO_THOUGHT)).endswith("assistant\nno thought")
    assert (await prompt(reasoning_effort="none")).endswith("assistant\nno thought")
    assert (await prompt(add_generation_prompt=False)).endswith("q\n")
    clash = {**asked, "continue_final_message": True, "add_generation_prompt": True}
    refused = (await client.post(CHAT, json=clash)).json()["error"]
    assert refused["param"] == "continue_final_message"
    talk.check()


async def test_a_message_that_was_cut_off_is_continued_in_its_row_and_its_conversation_after_it(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += ["It is", f" 3.{END}", f"Yes.{END}", f" 4.{END}"]
    messages = [user("1+2?")]
    first = (await client.post(CHAT, json={"messages": messages})).json()["choices"][0]
    assert first["finish_reason"] == "length"
    messages.append(first["message"])
    body = {"messages": messages, "continue_final_message": True}
    continuation = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]
    assert continuation == " 3."
    messages[-1] = {"role": "assistant", "content": f"It is{continuation}"}
    await client.post(CHAT, json={"messages": [*messages, user("Sure?")]})
    assert [len(row.turns) for row in talk.rollout.rows] == [3]
    begun = [user("2+2?"), {"role": "assistant", "content": "I say"}]
    await client.post(CHAT, json={"messages": begun, "continue_final_message": True})
    *_, row = talk.rollout.rows
    assert talk.text(row).endswith("assistant\nI say 4.<|im_end|>")
    talk.check()


async def test_a_long_conversation_is_rendered_in_a_thread_and_answered_alike(
    talk: Talk, client: AsyncClient
) -> None:
    messages = [user(f"{n} and more") for n in range(3000)]
    talk.engine.words += [f"a{END}", f"b{END}"]
    first = (await client.post(CHAT, json={"messages": messages})).json()
    answer = first["choices"][0]["message"]
    longer = [*messages, answer, user("and now?")]
    second = (await client.post(CHAT, json={"messages": longer})).json()
    assert second["choices"][0]["message"]["content"] == "b"
    assert not talk.rollout.branches  # it continued in its row
    counted = (await client.post("/tokenize", json={"messages": messages})).json()["count"]
    assert counted == first["usage"]["prompt_tokens"]
    talk.check()


async def test_a_list_of_prompts_gets_choices_for_each_in_order(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"{n}{END}" for n in range(4)]
    first, second = (talk.model.tokenizer.encode(text).ids for text in ("go", "hello"))
    body = {"prompt": [first, second], "n": 2, "return_token_ids": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [first, first, second, second]
    assert answer["usage"]["prompt_tokens"] == len(first) + len(second)
    for choice in answer["choices"]:
        assert choice["text"] == talk.episode.decode(choice["token_ids"])
    many = await client.post("/v1/completions", json={"prompt": [first] * 33, "n": 2})
    assert many.json()["error"]["param"] == "n"
    empty = await client.post("/v1/completions", json={"prompt": [first, []]})
    assert "none empty" in empty.json()["error"]["message"]
    talk.check()


async def test_a_chat_reports_its_prompts_tokens_whole_and_as_a_stream(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"a{END}", f"b{END}", f"c{END}"]
    body = {"messages": [user("q")], "return_token_ids": True, "request_id": "mine"}
    prompt = (await client.post("/tokenize", json={"messages": [user("q")]})).json()["tokens"]
    whole = (await client.post(CHAT, json=body)).json()
    assert (whole["prompt_token_ids"], whole["id"]) == (prompt, "chatcmpl-mine")
    first, *others = events_of(await client.post(CHAT, json={**body, "stream": True}))
    assert first["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in each for each in others)
    reported = {"messages": [user("q")], "return_weight_versions": True, "logprobs": True}
    asked = {**reported, "return_tokens_as_token_ids": True, "cache_salt": "s"}
    (choice,) = (await client.post(CHAT, json=asked)).json()["choices"]
    assert "token_ids" not in choice
    assert choice["weight_versions"][0]["version"] == "0"
    assert all(each["token"].startswith("token_id:") for each in choice["logprobs"]["content"])
    salts = [turn.sampling.cache_salt for row in talk.rollout.rows for turn in row.turns]
    assert sorted(salts) == ["", "", "s"]


async def test_a_completion_continues_in_the_row_whose_tokens_it_begins_with(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"a b{END}", f"c{END}", f"d{END}"]
    ids = talk.model.tokenizer.encode("go").ids
    body = {"return_token_ids": True, "logprobs": 0}
    first = (await client.post("/v1/completions", json={**body, "prompt": ids})).json()
    (choice,) = first["choices"]
    assert choice["logprobs"]["tokens"] == ["a", " ", "b", END]
    grown = [*ids, *choice["token_ids"], 30, 31]
    await client.post("/v1/completions", json={**body, "prompt": grown})
    assert not talk.rollout.branches
    await client.post("/v1/completions", json={**body, "prompt": "anything"})
    assert len(talk.rollout.branches) == 1
    talk.check()


async def test_tokens_go_in_and_out_as_on_vllms_path_and_stay_in_one_row(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"a b{END}", f"c{END}"]
    path, ids = "/inference/v1/generate", talk.model.tokenizer.encode("go").ids
    sampling = {"logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [7]}
    body = {"model": "policy", "token_ids": ids, "sampling_params": sampling}
    answer = (await client.post(path, json={**body, "return_token_ids": True})).json()
    (choice,) = answer["choices"]
    assert (answer["prompt_token_ids"], choice["finish_reason"]) == (ids, "stop")
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert {entry["logprob"] for entry in entries} == {-1.0}
    assert choice["weight_versions"] == [
        {"version": "0", "start": 0, "end": len(choice["token_ids"])}
    ]
    grown = [*ids, *choice["token_ids"], 30, 31]
    more = (await client.post(path, json={**body, "token_ids": grown})).json()
    assert more["prompt_token_ids"] is None
    [row] = talk.rollout.rows
    turns = [turn.sampling for turn in row.turns]
    assert [(t.stop_token_ids, t.max_tokens) for t in turns] == [([7], 400)] * 2
    talk.check()
    for wrong, name in (
        ({"stream": True}, "stream"),
        ({"output_mode": "text"}, "output_mode"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ):
        refused = (await client.post(path, json={**body, **wrong})).json()["error"]
        assert refused["param"] == name


async def test_a_long_prompt_is_tokenised_beside_the_runs_thread_and_to_the_same_tokens(
    talk: Talk, client: AsyncClient
) -> None:
    words = "in der ab " * 8000
    for text, is_at_once in ((words, False), ("in der ab", True)):
        encoding = asyncio.ensure_future(talk.episode.encode(text))
        await asyncio.sleep(0)
        assert encoding.done() == is_at_once  # a thread's answer takes another turn of the loop
        assert await encoding == talk.model.encoder.encode(text)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{", "can't be read"),
        ("[" * 100_000, "can't be read"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `messages`"),
        ({"messages": []}, "at least one"),
        ({"messages": "hi"}, "Expected `array`"),
        ({"messages": [{}] * 16_385}, "at most 16384 messages"),
        ({"n": 0}, "n must be from 1 to 64"),
        ({"n": 2, "seed": 1}, "with a seed"),
        ({"tool_choice": "required"}, "tool_ch"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"use_beam_search": True}, "use_beam_s"),
        ({"best_of": 2}, "best_of"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"prompt_logprobs": 1}, "prompt_logp"),
        ({"structured_outputs": {"x": 1}}, "structured_outputs"),
        ({"logprobs": True, "top_logprobs": 4096}, "log-probs of 0 to 20"),
        ({"stop": ["x"] * 65}, "at most 64 strings"),
        ({"response_format": {"type": "x"}}, "json_schema"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 99999999999}, "top_k"),
    ],
)
async def test_what_makes_no_sense_is_refused_in_openais_form(
    talk: Talk, client: AsyncClient, body: str | dict[str, Any], why: str
) -> None:
    text = body if isinstance(body, str) else json.dumps({"messages": [user("q")], **body})
    refused = await client.post(CHAT, content=text)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert why in error["message"]
    assert not talk.engine.received


async def test_too_much_is_refused(
    gateway: Gateway, session: Session, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "BODY_BYTES_MAX", 100)
    async with client_of(gateway, session.api_key) as limited:
        large = await limited.post(CHAT, content=b" " * 101)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    session.requests = REQUESTS_PER_SESSION_MAX
    busy = await client.post(CHAT, json={"messages": [user("q")]})
    assert (busy.status_code, busy.json()["error"]["code"]) == (429, "too_many_requests")
    missing = await client.get("/v1/nothing")
    assert missing.json()["error"]["type"] == "not_found_error"


async def test_tools_of_more_than_a_mebibyte_are_refused(client: AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "x" * TOOLS_BYTES_MAX}}
    for path in (CHAT, "/tokenize"):
        refused = await client.post(path, json={"messages": [user("q")], "tools": [tool]})
        assert refused.json()["error"]["param"] == "tools"


async def test_a_slow_template_renders_short_messages_off_the_loop(
    talk: Talk, session: Session, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_loop: list[object] = []

    def recorded(work: Any) -> Any:
        off_loop.append(work)
        return http_server.off_loop(work)

    monkeypatch.setattr(app_module, "off_loop", recorded)
    talk.engine.words += [f"yes{END}"] * 2
    assert (await client.post(CHAT, json={"messages": [user("q")]})).status_code == 200
    assert not off_loop
    monkeypatch.setattr(session.episode.conversation._template, "is_slow", True)
    assert (await client.post(CHAT, json={"messages": [user("q")]})).status_code == 200
    assert len(off_loop) == 1


async def test_tokens_models_and_health_can_be_asked_for(talk: Talk, client: AsyncClient) -> None:
    counted = (await client.post("/tokenize", json={"prompt": "abc"})).json()
    assert counted == {"count": 2, "tokens": talk.model.tokenizer.encode("abc").ids}
    chat = (await client.post("/tokenize", json={"messages": [user("q")]})).json()
    assert talk.episode.decode(chat["tokens"]) == "user\nq\nassistant\n"
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "policy"
    assert (await client.get("/health")).json() == {"status": "ok", "sessions": 1}


async def test_a_prompt_with_more_tokens_than_a_body_may_have_is_refused_and_the_session_continues(
    talk: Talk, client: AsyncClient
) -> None:
    talk.engine.words += [f"a{END}"]
    body = {"prompt": [1] * (JSON_VALUES_MAX + 1)}
    refused = await client.post("/v1/completions", json=body)
    assert refused.status_code == 413
    assert f"may have {JSON_VALUES_MAX} JSON values" in refused.json()["error"]["message"]
    ids = talk.model.tokenizer.encode("go").ids
    answered = await client.post("/v1/completions", json={"prompt": ids})
    assert answered.json()["choices"][0]["text"] == "a"
