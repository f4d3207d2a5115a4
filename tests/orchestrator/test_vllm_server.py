"""Can a client of vLLM tell the server from vLLM? Over two real engines, one request after another.

What is expected is what vLLM 0.32 and 0.33 were seen to answer.
"""

import asyncio
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.chat_templates import add_chat_template, chat_tokenizer
from tests.orchestrator.vllm_serving import LONG, Asking, Client
from tidegate.orchestrator.vllm_server.words import LONG_TEXT_CHARACTERS, Words

PROMPT = [30, 41, 52, 63]

CONTEXT_TOKENS_MAX = 1024
"""A request that fills it is still going on when the next one has come, on a busy machine too."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    vocab = chat_tokenizer().get_vocab_size()
    make_model_directory(path, vocab_size=vocab, max_position_embeddings=CONTEXT_TOKENS_MAX)
    return add_chat_template(path, "chatml")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.VLLMServer]:
    settings: dict[str, Any] = {"engines": 2, "max_running_turns": 4}
    with tidegate.VLLMServer(model=model, served_model_name="tiny", **settings) as server:
        yield server
        ledger = server.statistics().evaluation_ledger
        assert ledger.error == 0
        assert ledger.generated == ledger.discarded_total > 0


@pytest.fixture
def client(server: tidegate.VLLMServer) -> Iterator[Client]:
    with Client(server.url).http as http:
        client = Client(server.url)
        client.http = http
        yield client
        client.post("/resume")
        client.wait_until(lambda: client.num_running() == 0)


# ---------------------------------------------------------------- what there is


def test_the_server_says_what_it_is_as_vllm_does(client: Client) -> None:
    assert client.http.get("/health").content == b""
    assert client.get("/version") == {"version": "0.33.0"}
    (card,) = client.get("/v1/models")["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", CONTEXT_TOKENS_MAX)
    assert client.get("/get_world_size", include_dp="true") == {"world_size": 1}
    assert client.get("/weight_info") == {"weight_version": "default"}
    about = client.get("/server_info", config_format="json")["vllm_config"]
    assert about["model_config"]["dtype"] == "torch.float32"
    assert about["parallel_config"]["data_parallel_size"] == 1
    paths = client.get("/openapi.json")["paths"]
    assert {"/pause", "/update_weights", "/inference/v1/generate"} <= paths.keys()


def test_texts_and_conversations_are_told_as_tokens_and_back(client: Client) -> None:
    told = client.post("/tokenize", {"prompt": "hi", "return_token_strs": True})
    assert told["token_strs"] == ["h", "i"]
    assert (told["count"], told["max_model_len"]) == (2, CONTEXT_TOKENS_MAX)
    assert client.post("/detokenize", {"tokens": told["tokens"]}) == {"prompt": "hi"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    ids = client.post("/tokenize", chat)["tokens"]
    assert client.post("/detokenize", {"tokens": ids})["prompt"].startswith("<|im_start|>user\nhi")

    for strange in (-1, 2**40):
        assert client.refusal("/detokenize", {"tokens": [strange]})["code"] == 400


async def test_others_go_on_while_a_long_text_becomes_tokens(model: Path) -> None:
    words = Words(Tokenizer.from_file(str(model / "tokenizer.json")))
    short = "hello world"
    times = LONG_TEXT_CHARACTERS // len(short) + 1
    asked = asyncio.ensure_future(words.encode(short * times, adds_special_tokens=False))
    turns = 0
    while not asked.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 1  # one is what a task takes that never waits
    assert await asked == await words.encode(short, adds_special_tokens=False) * times


# ---------------------------------------------------------------- tokens in, tokens out


def test_log_probs_are_those_of_the_model(client: Client, model: Path) -> None:
    import transformers

    sampling = {"max_tokens": 6, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    answer = client.generate(token_ids=PROMPT, sampling_params=sampling, request_id="A")
    (choice,) = answer["choices"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([PROMPT + choice["token_ids"]])
    with torch.no_grad():
        expected = torch.log_softmax(reference(ids).logits[0].float(), -1)
    for place, told in enumerate(choice["logprobs"]["content"], len(PROMPT) - 1):
        assert told["logprob"] == pytest.approx(expected[place, told["token_id"]].item(), abs=1e-4)
        likely = {one["rank"]: one["logprob"] for one in told["top_logprobs"] if one["rank"]}
        best = expected[place].topk(2).values.tolist()
        assert [likely[1], likely[2]] == pytest.approx(best, abs=1e-4)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    for place, (token, told) in enumerate(zip(PROMPT[1:], others, strict=True)):
        own = told[str(token)]["logprob"]
        assert own == pytest.approx(expected[place, token].item(), abs=1e-4)


def test_an_answer_to_tokens_has_vllms_fields(client: Client) -> None:
    sampling = {"max_tokens": 3, "n": 2, "seed": 5, "bogus": 1}
    answer = client.generate(
        request_id="req-A", token_ids=PROMPT, sampling_params=sampling, return_token_ids=True
    )
    assert answer["request_id"] == "generate-tokens-req-A"
    assert answer["prompt_token_ids"] == PROMPT
    usage = {k: v for k, v in answer["usage"].items() if v is not None}
    assert usage == {"prompt_tokens": 4, "total_tokens": 10, "completion_tokens": 6}
    one, two = answer["choices"]
    assert one["token_ids"] != two["token_ids"]
    assert one["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert (one["finish_reason"], one["stop_reason"], one["logprobs"]) == ("length", None, None)
    again = client.generate(token_ids=PROMPT, sampling_params=sampling)
    assert [c["token_ids"] for c in again["choices"]] == [one["token_ids"], two["token_ids"]]


def test_a_stop_token_or_string_is_named_and_left_out_of_the_text(client: Client) -> None:
    drawn = {"max_tokens": 8, "seed": 3, "ignore_eos": True, "skip_special_tokens": False}
    ids = client.generate(token_ids=PROMPT, sampling_params=drawn)["choices"][0]["token_ids"]
    stop = next(i for i in ids[1:] if i != ids[0])
    sampling = drawn | {"stop_token_ids": [stop]}
    told = client.generate(token_ids=PROMPT, sampling_params=sampling, output_mode="text")
    (choice,) = told["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    before = client.post("/detokenize", {"tokens": choice["token_ids"][:-1]})["prompt"]
    assert choice["text"] == before

    whole = client.post("/v1/completions", {"prompt": PROMPT, **drawn})["choices"][0]["text"]
    word = whole[2:4]
    body = {"prompt": PROMPT, **drawn, "stop": [word]}
    (choice,) = client.post("/v1/completions", body)["choices"]
    assert (choice["text"], choice["stop_reason"]) == (whole[: whole.find(word)], word)


def test_without_max_tokens_the_context_is_filled_and_more_is_cut_off(client: Client) -> None:
    left = 20
    prompt = [3] * (CONTEXT_TOKENS_MAX - left)
    for tokens_max in (None, 5000):
        sampling = {"ignore_eos": True, "max_tokens": tokens_max}
        answer = client.generate(token_ids=prompt, sampling_params=sampling)["choices"][0]
        assert (len(answer["token_ids"]), answer["finish_reason"]) == (left, "length")


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"token_ids": [], "sampling_params": {}}, 400, "at least 1"),
        ({"token_ids": [99999], "sampling_params": {}}, 400, "99999 is out of vocabulary"),
        ({"token_ids": [5] * 1100, "sampling_params": {}}, 400, "longer than the maximum model"),
        ({"token_ids": [5], "sampling_params": {}, "model": "x"}, 404, "Valid aliases: tiny"),
        ({"token_ids": [5], "sampling_params": {"n": 2, "temperature": 0}}, 400, "n must be 1"),
        ({"token_ids": [5], "sampling_params": {"top_p": 7}}, 400, "top_p"),
        ({"token_ids": "no"}, 400, "token_ids"),
    ],
)
def test_a_request_that_cant_be_served_says_why(
    client: Client, body: Any, status: int, told: str
) -> None:
    error = client.refusal("/inference/v1/generate", body)
    assert error["code"] == status
    assert told in error["message"]


def test_a_stream_gives_what_one_answer_would(client: Client) -> None:
    sampling = {"max_tokens": 40, "seed": 1, "logprobs": 1, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
    whole = client.generate(token_ids=PROMPT, sampling_params=sampling)["choices"][0]
    chunks = _events(client, "/inference/v1/generate", body | _USAGE)
    *parts, usage = [json.loads(chunk) for chunk in chunks]
    choices = [part["choices"][0] for part in parts]
    assert [i for c in choices for i in c["token_ids"]] == whole["token_ids"]
    told = [one["logprob"] for c in choices for one in c["logprobs"]["content"]]
    assert told == pytest.approx([one["logprob"] for one in whole["logprobs"]["content"]], abs=1e-4)
    assert [c["weight_versions"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 40)


_USAGE = {"stream_options": {"include_usage": True}}


def _events(client: Client, path: str, body: Any) -> list[str]:
    with client.http.stream("POST", path, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [line.removeprefix("data: ") for line in lines[:-1]]


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
    told = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert told == answer.usage.total_tokens

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


def test_a_schema_is_kept_to(open_ai: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = open_ai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "?"}],
        max_tokens=60,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "ok", "schema": schema},
        },
    )
    said = answer.choices[0].message.content or ""
    assert re.match(r'\s*\{\s*"ok"', said)  # a model of random weights may never get to its end


# ---------------------------------------------------------------- pauses and aborts


def test_a_pause_that_aborts_gives_what_there_is_and_refuses_more(
    client: Client, server: tidegate.VLLMServer
) -> None:
    asking = client.begin(server.url, "/inference/v1/generate", LONG)
    assert client.post("/pause") == {"status": "paused"}  # abort is what no mode means
    (choice,) = asking.answer["choices"]
    assert choice["finish_reason"] == "abort"
    count = len(choice["token_ids"])
    assert 0 < count < CONTEXT_TOKENS_MAX - 3
    assert len(choice["logprobs"]["content"]) == count
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
    assert client.get("/is_paused") == {"is_paused": True}
    assert client.get("/is_sleeping") == {"is_sleeping": True}
    error = client.refusal("/v1/completions", {"prompt": "x"})
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert client.post("/resume") == client.post("/resume") == {"status": "resumed"}
    assert client.get("/is_paused") == {"is_paused": False}
    assert client.post("/v1/completions", {"prompt": "x", "max_tokens": 1})["choices"]


@pytest.mark.parametrize("clears", ["true", "false"])
def test_a_pause_that_keeps_freezes_requests_and_queues_new_ones(
    client: Client, server: tidegate.VLLMServer, clears: str
) -> None:
    asking = client.begin(server.url, "/inference/v1/generate", LONG)
    client.post("/pause", mode="keep", clear_cache=clears)
    frozen = client.tokens_generated()
    late = Asking(server.url, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    client.wait_until(lambda: client.num_running() == 2)
    assert client.tokens_generated() == frozen
    client.post("/resume")
    assert len(asking.answer["choices"][0]["token_ids"]) == CONTEXT_TOKENS_MAX - 3
    assert late.answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_mode_in_the_body_is_not_read_and_a_strange_one_is_refused(client: Client) -> None:
    client.post("/pause", {"mode": "keep"})
    assert client.refusal("/v1/completions", {"prompt": "x"})["code"] == 503  # as by abort
    assert client.refusal("/pause", mode="sometimes")["param"] == "query.mode"


def test_a_pause_that_waits_lets_requests_end(client: Client, server: tidegate.VLLMServer) -> None:
    asking = client.begin(server.url, "/inference/v1/generate", LONG)
    client.post("/pause", mode="wait")
    assert asking.answer["choices"][0]["finish_reason"] == "length"
    assert client.get("/is_paused") == {"is_paused": True}


def test_a_resume_ends_a_pause_that_still_waits(
    client: Client, server: tidegate.VLLMServer
) -> None:
    asking = client.begin(server.url, "/inference/v1/generate", LONG)
    pausing = Asking(server.url, "/pause", mode="wait")
    client.wait_until(lambda: client.http.post("/v1/completions", json={}).status_code == 503)
    client.post("/resume")
    assert pausing.answer == {"status": "paused"}
    assert client.get("/is_paused") == {"is_paused": False}
    assert asking.answer["choices"][0]["finish_reason"] == "length"


def test_an_abort_ends_a_pause_that_still_waits(
    client: Client, server: tidegate.VLLMServer
) -> None:
    asking = client.begin(server.url, "/inference/v1/generate", LONG)
    pausing = Asking(server.url, "/pause", mode="wait")
    client.wait_until(lambda: client.http.post("/v1/completions", json={}).status_code == 503)
    client.post("/pause", mode="abort")
    assert asking.answer["choices"][0]["finish_reason"] == "abort"
    assert pausing.answer == {"status": "paused"}
    assert client.get("/is_paused") == {"is_paused": True}


def test_requests_are_aborted_by_the_ids_that_answers_have(
    client: Client, server: tidegate.VLLMServer
) -> None:
    one = client.begin(server.url, "/inference/v1/generate", LONG | {"request_id": "one"})
    two = client.begin(server.url, "/inference/v1/generate", LONG | {"request_id": "two"})
    client.wait_until(lambda: client.num_running() == 2)
    client.post("/pause", mode="keep")
    told = client.post("/abort_requests", {"request_ids": ["one", "no"]})
    assert told == {"status": "aborted", "aborted": 2}  # as many as asked for
    assert client.num_running() == 2
    client.post("/abort_requests", {"request_ids": ["generate-tokens-one"]})
    assert one.answer["choices"][0]["finish_reason"] == "abort"
    assert client.num_running() == 1
    assert not two.is_answered
    client.post("/resume")
    assert client.post("/abort_requests", {})["status"] == "aborted"
    assert two.answer["choices"][0]["finish_reason"] in ("abort", "length")
    assert client.refusal("/abort_requests")["message"].startswith("Invalid JSON format")


def test_who_goes_away_ends_the_request(client: Client, server: tidegate.VLLMServer) -> None:
    with client.http.stream("POST", "/inference/v1/generate", json=LONG | {"stream": True}) as one:
        next(one.iter_bytes())
    client.wait_until(lambda: client.num_running() == 0)


# ---------------------------------------------------------------- caches and sleep


def test_the_prefix_cache_is_not_clean_while_requests_hold_some(
    client: Client, server: tidegate.VLLMServer
) -> None:
    assert client.post("/reset_prefix_cache") == {"success": True}
    asking = client.begin(server.url, "/inference/v1/generate", LONG)
    client.post("/pause", mode="keep")
    assert client.post("/reset_prefix_cache") == {"success": False}
    again = {"reset_running_requests": "true"}
    assert client.post("/reset_prefix_cache", **again) == {"success": True}
    assert client.get("/is_paused") == {"is_paused": True}
    client.post("/resume")
    assert len(asking.answer["choices"][0]["token_ids"]) == CONTEXT_TOKENS_MAX - 3


@pytest.mark.parametrize("level", [1, 2])
def test_engines_sleep_and_wake_part_by_part(client: Client, level: int) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    before = client.post("/v1/completions", greedy)["choices"][0]["token_ids"]
    assert client.post("/sleep", level=level) == {"status": "sleeping", "level": level}
    assert client.get("/is_sleeping") == {"is_sleeping": True}
    told = client.post("/wake_up", tags="weights")
    assert told == {"status": "sleeping", "tags": ["weights"]}
    assert client.get("/is_sleeping") == {"is_sleeping": True}
    told = client.post("/wake_up", tags="kv_cache")
    assert told == {"status": "awake", "tags": ["kv_cache"]}
    assert client.get("/is_sleeping") == {"is_sleeping": False}
    assert client.post("/wake_up") == {"status": "awake", "tags": None}
    assert client.post("/v1/completions", greedy)["choices"][0]["token_ids"] == before


def test_a_sleep_returns_requests_that_were_kept(
    client: Client, server: tidegate.VLLMServer
) -> None:
    asking = client.begin(server.url, "/inference/v1/generate", LONG)
    client.post("/pause", mode="keep")
    client.post("/sleep", level=0)
    assert asking.answer["choices"][0]["finish_reason"] == "abort"
    assert client.post("/wake_up", tags="scheduling")["status"] == "awake"


def test_caches_are_given_back_by_paused_engines_only(client: Client) -> None:
    assert client.refusal("/release_kv_cache_memory")["code"] == 500
    client.post("/pause")
    assert client.post("/release_kv_cache_memory") == {"status": "kv_cache_released"}
    assert client.post("/wake_up") == {"status": "awake", "tags": None}


def test_metrics_have_the_names_that_monitors_read(client: Client) -> None:
    client.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "ignore_eos": True})
    text = client.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    done = 'vllm:request_success_total{model_name="tiny",finished_reason="length"}'
    assert float(values[done]) >= 1
    assert float(values['vllm:num_requests_running{model_name="tiny"}']) == 0
    assert all(math.isfinite(float(value)) for value in values.values())
