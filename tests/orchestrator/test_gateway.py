"""What does an agent get from the gateway? What OpenAI's API would give it, and only its own."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.talking import CALL, TOOLS, Talk, tool, user
from tidegate.errors import ConfigError
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.gateway import app as app_module
from tidegate.orchestrator.gateway.app import gateway_app
from tidegate.orchestrator.gateway.gateway import (
    REQUESTS_PER_SESSION_MAX,
    Endpoint,
    Gateway,
    Session,
)
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

CHAT = "/v1/chat/completions"
END = "<|im_end|>"


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway(token="master")
    yield gateway
    gateway.close()


@asynccontextmanager
async def client_of(gateway: Gateway, key: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(gateway_app(gateway))
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as c:
        yield c


@asynccontextmanager
async def session_of(
    gateway: Gateway, tmp_path: Path, template: str = "chatml"
) -> AsyncIterator[tuple[Talk, Session, httpx.AsyncClient]]:
    talk = Talk(tmp_path, template)
    session = gateway.open(talk.episode, {"question": "1+2?"})
    async with client_of(gateway, session.api_key) as client:
        yield talk, session, client


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_conversation_is_answered_in_openais_form_and_stays_in_one_row(
    gateway: Gateway, tmp_path: Path
) -> None:
    async with session_of(gateway, tmp_path) as (talk, _, client):
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


async def test_choices_are_rows_of_their_own_with_one_prompt(
    gateway: Gateway, tmp_path: Path
) -> None:
    async with session_of(gateway, tmp_path) as (talk, _, client):
        talk.engine.words += [f"{n}{END}" for n in range(6)]
        answer = (await client.post(CHAT, json={"messages": [user("q")], "n": 3})).json()
        said = {choice["message"]["content"] for choice in answer["choices"]}
        assert said == {"0", "1", "2"}
        prompt = talk.model.tokenizer.encode("hello").ids
        plain = (await client.post("/v1/completions", json={"prompt": prompt, "n": 3})).json()
        assert {choice["text"] for choice in plain["choices"]} == {"3", "4", "5"}
        assert len(list(talk.rollout.rows)) == 6
        talk.check()


async def test_a_completion_goes_on_in_the_row_whose_tokens_it_begins_with(
    gateway: Gateway, tmp_path: Path
) -> None:
    async with session_of(gateway, tmp_path) as (talk, _, client):
        talk.engine.words += [f"a b{END}", f"c{END}", f"d{END}"]
        ids = talk.model.tokenizer.encode("go").ids
        body = {"return_token_ids": True, "logprobs": 0}
        first = (await client.post("/v1/completions", json={**body, "prompt": ids})).json()
        (choice,) = first["choices"]
        assert choice["logprobs"]["tokens"] == ["a", " ", "b", ""]
        grown = [*ids, *choice["token_ids"], 30, 31]
        await client.post("/v1/completions", json={**body, "prompt": grown})
        assert not talk.rollout.branches
        await client.post("/v1/completions", json={**body, "prompt": "anything"})
        assert len(talk.rollout.branches) == 1
        talk.check()


async def test_a_session_over_its_budget_is_answered_once_it_goes_on(
    gateway: Gateway, tmp_path: Path
) -> None:
    async with session_of(gateway, tmp_path) as (talk, _, client):
        talk.engine.words += [f"a{END}", f"b{END}"]
        body = {"messages": [user("q")]}
        answer = (await client.post(CHAT, json=body)).json()
        talk.engine.newer_weights = asyncio.Event()
        body["messages"] += [answer["choices"][0]["message"], user("r")]
        asking = asyncio.ensure_future(client.post(CHAT, json=body))
        done, _ = await asyncio.wait({asking}, timeout=0.1)
        assert not done
        assert talk.engine.words == [f"b{END}"]  # the engines are others' meanwhile
        talk.engine.newer_weights.set()
        assert (await asking).json()["choices"][0]["message"]["content"] == "b"
        talk.check()


async def test_a_stream_says_the_same_in_parts(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STREAM_INTERVAL_S", 0.0)
    async with session_of(gateway, tmp_path) as (talk, _, client):
        whole = talk.engine.ask

        async def slowly(
            rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
        ) -> Turn:
            turn = Turn(rollout, sampling)
            rollout.turns.append(turn)
            for token in talk.model.tokenizer.encode(f"in der ab{END}").ids:
                turn.append(token, -1.0, 0, "engine-0")
                for _ in range(3):
                    await asyncio.sleep(0)
            turn.finish_reason = "stop"
            return turn

        talk.engine.ask = slowly  # type: ignore[method-assign]
        body = {"messages": [user("q")], "stream": True, "stream_options": {"include_usage": True}}
        chunks = events_of(await client.post(CHAT, json=body))
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content", "") for delta in deltas) == "in der ab"
        assert len([d for d in deltas if d.get("content")]) > 1
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == talk.rollout.turns[0].length
        body = {"messages": [user("p")], "stream": True, "tools": TOOLS, "stop": ["never"]}
        chunks = events_of(await client.post(CHAT, json=body))
        said = [c["choices"][0]["delta"].get("content") for c in chunks]
        assert "".join(filter(None, said)) == "in der ab"
        assert len(list(filter(None, said))) > 1
        talk.engine.ask = whole  # type: ignore[method-assign]
        talk.engine.words.append(f"I add.{CALL}{END}")
        body = {"messages": [user("r")], "stream": True, "tools": TOOLS}
        last = events_of(await client.post(CHAT, json=body))[-1]["choices"][0]
        assert last["finish_reason"] == "tool_calls"
        assert last["delta"]["tool_calls"][0]["function"]["name"] == "add"


async def test_a_long_prompt_is_tokenised_beside_the_runs_thread_and_to_the_same_tokens(
    gateway: Gateway, tmp_path: Path
) -> None:
    words = "in der ab " * 8000
    async with session_of(gateway, tmp_path) as (talk, _, client):
        for text, is_at_once in ((words, False), ("in der ab", True)):
            encoding = asyncio.ensure_future(talk.episode.encoded(text))
            await asyncio.sleep(0)
            assert encoding.done() == is_at_once  # a thread's answer takes another turn of the loop
            assert await encoding == talk.model.encode(text)
        talk.engine.words += [f"a{END}"] * 3
        messages = [user(words)]
        body = {"messages": messages, "n": 2}
        messages += [
            (await client.post(CHAT, json=body)).json()["choices"][0]["message"],
            user(words),
        ]
        await client.post(CHAT, json={"messages": messages})
        talk.check()
        conversation = talk.episode.conversation
        prompts = [
            await conversation.prompt_tokens(asked, None) for asked in (messages[:1], messages)
        ]
        assert sorted(row.num_tokens for row in talk.episode.rows) == [
            len(prompt) + len("a.") for prompt in prompts
        ]


async def test_whoever_has_no_key_of_an_open_session_is_refused(
    gateway: Gateway, tmp_path: Path
) -> None:
    async with session_of(gateway, tmp_path) as (talk, session, client):
        body = {"messages": [user("q")]}
        for headers in (
            {"Authorization": "Bearer wrong"},
            {"Authorization": session.api_key},
            {"Authorization": ""},
            {"Authorization": "Bearer master"},
            {"Authorization": "Bearer master", "X-Session-Id": "another"},
        ):
            refused = await client.post(CHAT, json=body, headers=headers)
            assert refused.status_code == 401, headers
            assert refused.json()["error"]["code"] == "invalid_api_key"
        talk.engine.words += [f"yes{END}"] * 2
        its_clients_own = {"X-Session-Id": "another"}
        assert (await client.post(CHAT, json=body, headers=its_clients_own)).status_code == 200
        by_id = {"Authorization": "Bearer master", "X-Session-Id": session.session_id}
        assert (await client.post(CHAT, json=body, headers=by_id)).status_code == 200
        gateway.end(session)
        assert (await client.post(CHAT, json=body)).status_code == 401


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{", "can't be read"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `messages`"),
        ('{"messages": []}', "at least one"),
        ('{"messages": "hi"}', r"Expected `array`"),
        ('{"messages": [{"role": "user", "content": "q"}], "n": 0}', "n must be from 1 to 64"),
        ('{"messages": [{"role": "user", "content": "q"}], "n": 2, "seed": 1}', "with a seed"),
        ('{"messages": [{"role": "user", "content": "q"}], "tool_choice": "required"}', "tool_ch"),
        ('{"messages": [{"role": "user", "content": "q"}], "logit_bias": {"x": 1}}', "logit_bias"),
        ('{"messages": [{"role": "user"}], "response_format": {"type": "x"}}', "json_schema"),
        ('{"messages": [{"role": "user", "content": "q"}], "temperature": "hot"}', "temperature"),
        ('{"messages": [{"role": "user", "content": "q"}], "top_k": 99999999999}', "top_k"),
        ("[" * 100_000, "can't be read"),
    ],
)
async def test_what_makes_no_sense_is_refused_in_openais_form(
    gateway: Gateway, tmp_path: Path, body: str, why: str
) -> None:
    async with session_of(gateway, tmp_path) as (talk, _, client):
        refused = await client.post(CHAT, content=body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert why in error["message"]
        assert not talk.engine.heard


async def test_too_much_is_refused(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "BODY_BYTES_MAX", 100)
    async with session_of(gateway, tmp_path) as (_, session, client):
        large = await client.post(CHAT, content=b" " * 101)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        session.requests = REQUESTS_PER_SESSION_MAX
        busy = await client.post(CHAT, json={"messages": [user("q")]})
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "too_many_requests")
        missing = await client.get("/v1/nothing")
        assert missing.json()["error"]["type"] == "not_found_error"


async def test_tokens_models_and_health_can_be_asked_for(gateway: Gateway, tmp_path: Path) -> None:
    async with session_of(gateway, tmp_path) as (talk, _, client):
        counted = (await client.post("/tokenize", json={"prompt": "abc"})).json()
        assert counted == {"count": 2, "tokens": talk.model.tokenizer.encode("abc").ids}
        chat = (await client.post("/tokenize", json={"messages": [user("q")]})).json()
        assert talk.episode.decode(chat["tokens"]) == "user\nq\nassistant\n"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "policy"
        assert (await client.get("/health")).json() == {"status": "ok", "sessions": 1}


async def test_an_agent_from_outside_takes_a_task_and_posts_its_reward(
    gateway: Gateway, tmp_path: Path
) -> None:
    talk = Talk(tmp_path, "chatml")
    playing = asyncio.ensure_future(gateway.episode()(talk.episode, {"question": "1+2?"}))
    async with client_of(gateway, "master") as client:
        assert (await client.post("/sessions", headers={"Authorization": ""})).status_code == 401
        session = (await client.post("/sessions")).json()
        assert session["task"] == {"question": "1+2?"}
        path = f"/sessions/{session['id']}/reward"
        own = {"Authorization": f"Bearer {session['api_key']}"}
        talk.engine.words.append(f"3{END}")
        asked = await client.post(CHAT, json={"messages": [user("q")]}, headers=own)
        assert asked.status_code == 200
        for bad in ('{"reward": "much"}', '{"reward": NaN}', '{"reward": 1e999}', "{}"):
            assert (await client.post(path, content=bad, headers=own)).status_code == 400
        others = await client.post("/sessions/another/reward", json={"reward": 0.1}, headers=own)
        assert others.status_code == 401  # it would have been this session's
        assert (await client.post(path, json={"reward": 0.5}, headers=own)).status_code == 200
        assert await playing == 0.5
        assert (await client.post(path, json={"reward": 1}, headers=own)).status_code == 401
    assert gateway.num_sessions == 0


async def test_a_task_is_not_given_to_who_has_gone_away(gateway: Gateway, tmp_path: Path) -> None:
    opener = gateway.episode()
    first = asyncio.ensure_future(opener(Talk(tmp_path, "chatml").episode, "first"))
    headers = {"Authorization": "Bearer master"}
    async with httpx.AsyncClient(headers=headers, timeout=60.0, base_url=gateway.url) as client:
        assert (await client.post("/sessions")).json()["task"] == "first"
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/sessions", timeout=0.3)
        await client.get("/health")  # after it: the server has seen it go by now
        second = asyncio.ensure_future(opener(Talk(tmp_path, "chatml").episode, "second"))
        assert (await client.post("/sessions", timeout=20.0)).json()["task"] == "second"
    first.cancel()
    second.cancel()
    await asyncio.wait({first, second})


async def test_another_run_is_refused_while_one_is_served_and_a_closed_gateway_refuses_all(
    gateway: Gateway, tmp_path: Path
) -> None:
    talk = Talk(tmp_path, "chatml")
    talk.engine.words.append(f"3{END}")
    playing = asyncio.ensure_future(gateway.episode()(talk.episode, "first"))
    await asyncio.sleep(0)

    def play_elsewhere() -> None:
        asyncio.run(gateway.episode()(talk.episode, "second"))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="serves one run at a time"):
        await asyncio.to_thread(play_elsewhere)
    assert gateway.num_sessions == 1
    playing.cancel()
    await asyncio.wait({playing})
    gateway.close()
    with pytest.raises(ConfigError, match="is closed"):
        await asyncio.to_thread(play_elsewhere)


async def test_a_client_that_goes_away_has_its_turn_given_up(
    gateway: Gateway, tmp_path: Path
) -> None:
    talk = Talk(tmp_path, "chatml")
    is_asked, is_given_up = asyncio.Event(), asyncio.Event()

    async def never(
        rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Turn:
        rollout.turns.append(Turn(rollout, sampling))
        is_asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    talk.engine.ask = never  # type: ignore[method-assign]
    talk.engine.give_up_turn = lambda rollout: is_given_up.set()  # type: ignore[method-assign]

    async def agent(endpoint: Endpoint, task: object) -> float:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60.0) as client:
            body = {"messages": [user("q")]}
            url = f"{endpoint.base_url}/chat/completions"
            asking = asyncio.ensure_future(client.post(url, json=body))
            await is_asked.wait()
            asking.cancel()
            await is_given_up.wait()
        return 1.0

    assert await gateway.episode(agent)(talk.episode, "task") == 1.0


async def test_an_agent_that_is_not_async_has_a_thread(gateway: Gateway, tmp_path: Path) -> None:
    talk = Talk(tmp_path, "chatml")
    talk.engine.words.append(f"3{END}")

    def agent(endpoint: Endpoint, task: object) -> float:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        url = f"{endpoint.base_url}/chat/completions"
        answer = httpx.post(url, json={"messages": [user("q")]}, headers=headers, timeout=60.0)
        return float(answer.json()["choices"][0]["message"]["content"])

    assert await gateway.episode(agent)(talk.episode, "task") == 3.0


async def test_an_agent_that_neither_returns_nor_posts_a_reward_is_told_so(
    gateway: Gateway, tmp_path: Path
) -> None:
    async def forgetful(endpoint: object, task: object) -> None:
        return None

    with pytest.raises(ConfigError, match="posted no reward"):
        await gateway.episode(forgetful)(Talk(tmp_path, "chatml").episode, "task")


def test_an_address_that_is_taken_is_named(gateway: Gateway) -> None:
    port = int(gateway.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
        Gateway(port=port)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = ["model", "temperature", "top_p", "n", "stop", "seed", "logprobs", "top_logprobs",
          "logit_bias", "tools", "tool_choice", "max_tokens", "stream", "stream_options",
          "response_format", "stop_token_ids", "return_token_ids", "prompt"]  # fmt: skip
MESSAGE = JSON | st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON, "content": JSON},
    optional={"tool_calls": JSON, "name": JSON},
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3) | JSON}, optional=dict.fromkeys(FIELDS, JSON)
)


@settings(max_examples=40, deadline=None)
@given(body=BODY | JSON, path=st.sampled_from([CHAT, "/v1/completions", "/tokenize"]))
async def test_no_body_kills_it_or_goes_without_an_answer(
    tmp_path_factory: pytest.TempPathFactory, body: Any, path: str
) -> None:
    gateway = Gateway()
    try:
        async with session_of(gateway, tmp_path_factory.getbasetemp()) as (talk, _, client):
            talk.engine.words += [f"ok{END}"] * 64
            answer = await client.post(path, content=json.dumps(body))
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert answer.json()["error"]["message"]
            talk.check()
    finally:
        gateway.close()
