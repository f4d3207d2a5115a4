"""``echo`` with ``logprobs`` on /v1/completions: scores of given texts, as evaluation tools ask."""

import itertools
from pathlib import Path
from typing import Any

import openai
import pytest

import tidegate
from tests.serving.vllm_server.vllm_serving import PROMPT, Client, logprobs_of

pytestmark = pytest.mark.wire

OTHER_PROMPT = [70, 9, 30]


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(model)


def assert_scores_are_the_models(reference: Any, choice: Any, ids: list[int], top: int) -> None:
    reported, expected = choice["logprobs"], logprobs_of(reference, ids)
    assert reported["token_logprobs"][0] is None
    assert reported["top_logprobs"][0] is None
    for place, token in enumerate(ids[1:]):
        own = expected[place, token].item()
        assert reported["token_logprobs"][place + 1] == pytest.approx(own, abs=1e-4)
        tops = list(reported["top_logprobs"][place + 1].values())
        assert tops[0] == reported["token_logprobs"][place + 1]
        assert max(tops) == pytest.approx(max(own, expected[place].max().item()), abs=1e-4)
        assert len(tops) <= top + 1
    starts = itertools.accumulate(map(len, reported["tokens"]), initial=0)
    assert reported["text_offset"] == list(starts)[:-1]


@pytest.mark.parametrize("top", [1, 3])
def test_an_echo_with_logprobs_scores_the_prompt_before_the_output(
    client: Client, reference: Any, top: int
) -> None:
    body = {"prompt": [PROMPT, OTHER_PROMPT], "echo": True, "logprobs": top, "max_tokens": 1}
    plain = client.post("/v1/completions", body | {"temperature": 0})
    with_ids = client.post("/v1/completions", body | {"temperature": 0, "return_token_ids": True})
    for choice, same, prompt in zip(
        plain["choices"], with_ids["choices"], [PROMPT, OTHER_PROMPT], strict=True
    ):
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
        assert_scores_are_the_models(reference, choice, prompt + same["token_ids"], top)
        assert choice["text"].endswith(same["text"])  # with ids vLLM leaves the prompt's text out
        assert len(choice["prompt_logprobs"]) == len(prompt)


def test_an_echo_of_no_tokens_only_scores_the_prompt(client: Client, reference: Any) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = client.post("/v1/completions", body)
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert_scores_are_the_models(reference, choice, PROMPT, 1)
    assert choice["text"] == client.post("/detokenize", {"tokens": PROMPT})["prompt"]
    # vLLM generates one token that it does not show, and counts it.
    assert answer["usage"]["completion_tokens"] == 1
    assert choice["finish_reason"] in ("length", "stop")
    refused = client.refusal("/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
    assert "max_tokens must be at least 1" in refused["message"]


def test_a_streamed_echo_reports_the_prompts_scores_once(
    server: tidegate.VLLMServer, reference: Any
) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1}
        asked |= {"max_tokens": 6, "seed": 2, "extra_body": {"ignore_eos": True}}
        whole = client.completions.create(**asked).choices[0].logprobs
        chunks = [
            one.choices[0].logprobs for one in client.completions.create(**asked, stream=True)
        ]
    assert whole is not None
    parts = [chunk for chunk in chunks if chunk is not None]
    for name in ("tokens", "token_logprobs", "text_offset"):
        reported = itertools.chain.from_iterable(getattr(part, name) for part in parts)
        assert list(reported) == getattr(whole, name)
