"""Tasks with tools that verifiers' own runner plays, through the gateway and `tidegate serve`.

By its ``TrainClient``, unmodified, tokens go in and come out (``/inference/v1/generate``); the
samples that it would train on are compared with what the engine sampled. `make test-environments`
creates the Python that has verifiers.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template
from tests.orchestrator.episodes.talking import CALL, Talk
from tidegate import Endpoint, Gateway
from tidegate.environments.started_worker import child_environment

PYTHON = os.environ.get("TIDEGATE_ENVIRONMENTS_PYTHON", "")
PROGRAM = Path(__file__).parents[2] / "examples" / "verifiers_agent.py"
END = "<|im_end|>"
CONTEXT_TOKENS_MAX = 2048

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        not PYTHON, reason="verifiers is in no Python; run `make test-environments`"
    ),
]


def add_tokenizer(path: Path) -> int:
    """Write a tokenizer with the marks that the renderer of Qwen3 needs; return its vocabulary."""
    add_chat_template(path, "chatml")
    file = path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["<|endoftext|>", "<tool_response>", "</tool_response>"])
    tokenizer.save(str(file))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "bos_token": "<bos>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    size: int = tokenizer.get_vocab_size()
    return size


async def play(*arguments: object) -> list[str]:
    """Have verifiers play the task at a URL, with a key and maybe a tokenizer; return its output:
    the samples if there is a tokenizer, and the reward."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, str(PROGRAM), *map(str, arguments)),
        env=child_environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().split("\n")[:-1]


@pytest.mark.parametrize(("answer", "reward"), [("It is 3.", 1.0), ("It is 4.", 0.0)])
async def test_a_task_with_tools_stays_in_one_row(
    answer: str, reward: float, tmp_path: Path
) -> None:
    async def reward_of(endpoint: Endpoint, task: object) -> float:
        return float((await play(endpoint.base_url, endpoint.api_key))[-1].split()[-1])

    talk, gateway = Talk(tmp_path, "chatml"), Gateway()
    talk.engine.words += [f"I add. {CALL}{END}", f"{answer}{END}"]
    try:
        assert await gateway.episode(reward_of)(talk.episode, None) == reward
    finally:
        gateway.close()
    assert [len(row.turns) for row in talk.rollout.rows] == [2]
    talk.check()


async def test_samples_of_a_task_with_tools_are_a_row_of_the_gateways_rollout_token_for_token(
    tmp_path: Path,
) -> None:
    add_tokenizer(tmp_path / "chatml")
    talk, gateway = Talk(tmp_path, "chatml"), Gateway()
    talk.engine.words += [f"I add. {CALL}{END}", f"It is 3.{END}"]
    reported: list[dict[str, Any]] = []

    async def agent(endpoint: Endpoint, task: object) -> float:
        *_, samples, reward = await play(endpoint.base_url, endpoint.api_key, talk.model.path)
        reported.extend(json.loads(samples))
        return float(reward)

    try:
        assert await gateway.episode(agent)(talk.episode, None) == 1.0
    finally:
        gateway.close()
    [row] = talk.rollout.rows
    [sample] = reported
    assert len(row.turns) == 2
    assert sample["token_ids"] == row.token_ids.tolist()
    assert sample["logprobs"] == list(row.logprobs)
    assert sample["sampled"] == [logprob != 0 for logprob in row.logprobs]
    stops = [turn.sampling.stop_token_ids for turn in row.turns]
    ends = [talk.model.tokenizer.token_to_id(each) for each in (END, "<|endoftext|>")]
    assert stops == [ends, ends]
    talk.check()


async def test_samples_of_tidegate_serve_have_the_engines_tokens_and_log_probs(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    vocab = add_tokenizer(tmp_path / "tokenizer")
    make_model_directory(model, vocab_size=vocab, max_position_embeddings=CONTEXT_TOKENS_MAX)
    add_tokenizer(model)
    async with tidegate.vllm_server(model=model, engines=1, served_model_name="policy") as server:
        *_, samples, reward = await play(f"{server.url}/v1", "EMPTY", model)
        [sample] = json.loads(samples)
        ids, sampled = sample["token_ids"], sample["sampled"]
        assert float(reward) in (0.0, 1.0)
        assert sum(sampled) > 0
        requested = {"max_tokens": 1, "prompt_logprobs": 0}
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
            body = {"token_ids": ids, "sampling_params": requested}
            scored = (await client.post("/inference/v1/generate", json=body)).json()
    expected = [
        entry[str(token)]["logprob"] if is_sampled and entry else 0.0
        for token, is_sampled, entry in zip(ids, sampled, scored["prompt_logprobs"], strict=True)
    ]
    assert sample["logprobs"] == pytest.approx(expected, abs=1e-4)
