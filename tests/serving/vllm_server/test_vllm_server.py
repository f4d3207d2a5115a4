"""Answers of the server over two real engines, one request after another.

Expected answers are those observed of vLLM 0.32 and 0.33.
"""

import asyncio
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tidegate
from tests.forked_programs import children
from tests.serving.vllm_server.vllm_serving import CONTEXT_TOKENS_MAX, PROMPT, Client, logprobs_of
from tidegate.errors import EngineLost
from tidegate.orchestrator.episodes.model_files import (
    LONG_CHARACTERS,
    TextEncoder,
    read_tokenizer,
)
from tidegate.orchestrator.fleet import processes
from tidegate.serving.openai.outputs import OutputTokenizer

pytestmark = pytest.mark.wire

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


def test_texts_and_conversations_are_tokenised_and_decoded(client: Client) -> None:
    reported = client.post("/tokenize", {"prompt": "hi", "return_token_strs": True})
    assert reported["token_strs"] == ["h", "i"]
    assert (reported["count"], reported["max_model_len"]) == (2, CONTEXT_TOKENS_MAX)
    assert client.post("/detokenize", {"tokens": reported["tokens"]}) == {"prompt": "hi"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    ids = client.post("/tokenize", chat)["tokens"]
    assert client.post("/detokenize", {"tokens": ids})["prompt"].startswith("<|im_start|>user\nhi")

    for strange in (-1, 2**40):
        assert client.refusal("/detokenize", {"tokens": [strange]})["code"] == 400


async def test_others_continue_while_a_long_text_becomes_tokens(model: Path) -> None:
    tokenizer = OutputTokenizer(TextEncoder(read_tokenizer(model / "tokenizer.json")))
    short = "hello world"
    times = LONG_CHARACTERS // len(short) + 1
    asked = asyncio.ensure_future(tokenizer.encode(short * times, adds_special_tokens=False))
    turns = 0
    while not asked.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 1  # one is what a task takes that never waits
    assert await asked == await tokenizer.encode(short, adds_special_tokens=False) * times


TOO_LONG = "word " * 1_000_000
"""A text of more than CHARACTERS_MAX, which is another error if it is looked at first."""

IN_VLLMS_WORDS = "maximum context length is 1024 tokens. However, your prompt contains"


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}, IN_VLLMS_WORDS),
        ("/v1/completions", {"prompt": ["short", TOO_LONG]}, IN_VLLMS_WORDS),
        ("/v1/chat/completions", {"messages": TOO_LONG}, IN_VLLMS_WORDS),
        ("/v1/chat/completions/render", {"messages": TOO_LONG}, IN_VLLMS_WORDS),
        ("/v1/responses", {"input": TOO_LONG}, "maximum context length is 1024 tokens"),
        ("/v1/messages", {"messages": TOO_LONG, "max_tokens": 4}, "prompt is too long: "),
        ("/generate", {"text": TOO_LONG}, "is longer than the model's context length (1024"),
    ],
)
def test_a_text_that_no_context_holds_is_answered_like_a_full_context(
    client: Client, path: str, asked: dict[str, Any], words: str
) -> None:
    def error(text: str) -> tuple[int, str, int]:
        put = {TOO_LONG: text}
        body = {k: put.get(v, v) if isinstance(v, str) else v for k, v in asked.items()}
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": body["messages"]}]
        if isinstance(body.get("prompt"), list):
            body["prompt"] = ["short", text]
        answer = client.http.post(path, json={"model": "tiny", **body})
        assert words in answer.text
        tokens = int(max(re.findall(r"\d+", answer.text), key=int))
        return answer.status_code, re.sub(r"\d+", "N", answer.text), tokens

    refused, full = error(TOO_LONG), error("word " * 400)
    assert refused[:2] == full[:2]
    assert 2000 <= full[2] < 3000 < refused[2] < len(TOO_LONG)  # a lower bound: it was not counted


def test_metrics_have_the_names_that_monitors_read(client: Client) -> None:
    client.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "ignore_eos": True})
    text = client.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    done = 'vllm:request_success_total{model_name="tiny",finished_reason="length"}'
    assert float(values[done]) >= 1
    assert float(values['vllm:num_requests_running{model_name="tiny"}']) == 0
    assert all(math.isfinite(float(value)) for value in values.values())
    families = list(text_string_to_metric_families(text))
    assert len(families) > 8
    assert all(family.documentation for family in families)
    (line,) = [name for name in values if name.startswith("tidegate_event_loop_longest_block_s")]
    assert float(values[line]) >= 0


# ---------------------------------------------------------------- tokens in, tokens out


def test_log_probs_are_those_of_the_model(client: Client, model: Path) -> None:
    sampling = {"max_tokens": 6, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    answer = client.generate(token_ids=PROMPT, sampling_params=sampling, request_id="A")
    (choice,) = answer["choices"]
    expected = logprobs_of(model, PROMPT + choice["token_ids"])
    for place, reported in enumerate(choice["logprobs"]["content"], len(PROMPT) - 1):
        assert reported["logprob"] == pytest.approx(
            expected[place, reported["token_id"]].item(), abs=1e-4
        )
        likely = {one["rank"]: one["logprob"] for one in reported["top_logprobs"] if one["rank"]}
        best = expected[place].topk(2).values.tolist()
        assert [likely[1], likely[2]] == pytest.approx(best, abs=1e-4)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    for place, (token, reported) in enumerate(zip(PROMPT[1:], others, strict=True)):
        own = reported[str(token)]["logprob"]
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


def test_a_stop_token_or_string_is_named_and_is_not_in_the_text(client: Client) -> None:
    drawn = {"max_tokens": 8, "seed": 3, "ignore_eos": True, "skip_special_tokens": False}
    ids = client.generate(token_ids=PROMPT, sampling_params=drawn)["choices"][0]["token_ids"]
    stop = next(i for i in ids[1:] if i != ids[0])
    sampling = drawn | {"stop_token_ids": [stop]}
    reported = client.generate(token_ids=PROMPT, sampling_params=sampling, output_mode="text")
    (choice,) = reported["choices"]
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
    ("body", "status", "reported"),
    [
        ({"token_ids": [], "sampling_params": {}}, 400, "at least 1"),
        ({"token_ids": [99999], "sampling_params": {}}, 400, "99999 is out of vocabulary"),
        (
            {"token_ids": [5] * 1100, "sampling_params": {}},
            400,
            "maximum context length is 1024 tokens",
        ),
        ({"token_ids": [5], "sampling_params": {}, "model": "x"}, 404, "Valid aliases: tiny"),
        ({"token_ids": [5], "sampling_params": {"n": 2, "temperature": 0}}, 400, "n must be 1"),
        ({"token_ids": [5], "sampling_params": {"top_p": 7}}, 400, "top_p"),
        ({"token_ids": "no"}, 400, "token_ids"),
    ],
)
def test_a_request_that_cant_be_served_says_why(
    client: Client, body: Any, status: int, reported: str
) -> None:
    error = client.refusal("/inference/v1/generate", body)
    assert error["code"] == status
    assert reported in error["message"]


def test_a_stream_gives_what_one_answer_would(client: Client) -> None:
    sampling = {"max_tokens": 40, "seed": 1, "logprobs": 1, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
    whole = client.generate(token_ids=PROMPT, sampling_params=sampling)["choices"][0]
    chunks = _events(client, "/inference/v1/generate", body | _USAGE)
    *parts, usage = [json.loads(chunk) for chunk in chunks]
    choices = [part["choices"][0] for part in parts]
    assert [i for c in choices for i in c["token_ids"]] == whole["token_ids"]
    reported = [one["logprob"] for c in choices for one in c["logprobs"]["content"]]
    assert reported == pytest.approx(
        [one["logprob"] for one in whole["logprobs"]["content"]], abs=1e-4
    )
    assert [c["weight_versions"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 40)


_USAGE = {"stream_options": {"include_usage": True}}


def _events(client: Client, path: str, body: Any) -> list[str]:
    with client.http.stream("POST", path, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [line.removeprefix("data: ") for line in lines[:-1]]


def test_a_server_whose_last_engine_is_gone_says_why(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RESTARTS_MAX", 0)
    before = set(children(recursive=True))
    with tidegate.vllm_server(model=model, port=0, max_running_turns=2) as server:
        for process in set(children(recursive=True)) - before:
            process.kill()
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(EngineLost, match="the last engine, 'engine-0', has ended: killed by"),
        ):
            pool.submit(server.wait).result(60.0)
