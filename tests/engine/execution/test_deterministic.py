"""Deterministic mode: a turn's bits do not depend on the batch, chunking, preemption or aborts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.engine.crowd import Crowd, run_crowd
from tests.engine.external.fake_engine import DrivenEngine
from tests.models import make_model_directory
from tidegate.engine.drafts.lookup import LookupDrafts
from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights, load_directory
from tidegate.engine.scheduling.drafts import DraftSource
from tidegate.errors import ConfigError
from tidegate.transport.messages import SamplingParams, SubmitTurn

pytestmark = pytest.mark.wire

VOCAB = 101
"""Not a multiple of a vector's length, so that rows of logits have every alignment."""


def make_weights(path: Path, architecture: str, dtype: torch.dtype) -> Weights:
    make_model_directory(path, architecture, vocab_size=VOCAB, initializer_range=0.1)
    config = ModelConfig.from_directory(path)
    if native_for(config, dtype) is None:
        pytest.skip("no C++ compiler: no engine is deterministic here")
    return load_directory(path, config, dtype, is_packed=True)


def make_engine(weights: Weights, drafts: DraftSource | None, num_blocks: int) -> DrivenEngine:
    return DrivenEngine(
        [weights],
        drafts=drafts,
        native=native_for(weights.config, weights.dtype),
        is_deterministic=True,
        max_running_turns=6,
        max_step_tokens=24,
        num_blocks=num_blocks,
        context_tokens_max=128,
    )


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "dtype", "has_drafts"),
    [
        ("qwen3", FLOAT32, False),
        ("qwen3", BFLOAT16, True),
        ("qwen2", FLOAT32, True),
        ("mistral", BFLOAT16, False),
        ("gemma3_text", FLOAT32, False),
        ("qwen3_moe", FLOAT32, False),
        ("qwen3_moe", BFLOAT16, False),
    ],
)
def test_a_turn_gets_the_same_bits_alone_and_in_any_batch(
    tmp_path: Path, architecture: str, dtype: torch.dtype, has_drafts: bool
) -> None:
    """Chunked, preempted, aborted and resubmitted, with shared prefixes."""
    weights = make_weights(tmp_path, architecture, dtype)
    drafts = LookupDrafts() if has_drafts else None
    crowd: Crowd = run_crowd(make_engine(weights, drafts, 36), seed=3, swaps=False)
    assert crowd.cached_tokens > 0
    assert any(len(asked.submissions) > 1 for asked in crowd.asked)
    for asked in crowd.asked:
        alone = make_engine(weights, None, 64)
        turn = alone.submit(
            asked.prompt, asked.max_tokens, seed=asked.seed, temperature=asked.temperature
        )
        alone.run()
        assert crowd.tokens(asked) == alone.turns[turn].token_ids
        assert crowd.logprobs(asked) == alone.turns[turn].logprobs


OPTIONS: list[dict[str, Any]] = [
    {"top_k": 7},
    {"top_p": 0.8, "temperature": 0.7},
    {"min_p": 0.02, "top_logprobs": 3},
    {"repetition_penalty": 1.2, "raw_logprobs": True},
]


def sample_with_options(weights: Weights, numbers: list[int]) -> dict[int, list[bytes]]:
    """Return the output of turns with the numbered options, run together."""
    engine = make_engine(weights, None, 64)
    reported: dict[int, list[bytes]] = {number: [] for number in numbers}
    for number in numbers:
        asked = SamplingParams(max_tokens=9, seed=number, **OPTIONS[number % len(OPTIONS)])
        prompt = np.arange(3 + number, dtype="<i4").tobytes()
        engine.scheduler.submit(SubmitTurn(turn=number, token_ids=prompt, sampling=asked))
    while rows := engine.scheduler.plan():
        columns = engine.scheduler.complete(engine.runner.step(rows))
        assert columns is not None
        for place, handle in enumerate(np.frombuffer(columns.turns, "<u4").tolist()):
            one = slice(4 * place, 4 * place + 4)
            reported[handle] += [columns.token_ids[one], columns.logprobs[one]]
        for attachment in columns.attachments:
            reported[attachment.turn].append(attachment.values)
    return reported


def test_turns_with_options_get_the_same_bits_too(tmp_path: Path) -> None:
    weights = make_weights(tmp_path, "qwen3", FLOAT32)
    together = sample_with_options(weights, [0, 1, 2, 3, 5])
    for number, reported in together.items():
        assert len(reported) >= 18
        assert reported == sample_with_options(weights, [number])[number]


# ---------------------------------------------------------------- the door


def test_models_whose_bits_depend_on_the_batch_are_refused_with_what_to_do(tmp_path: Path) -> None:
    odd = make_model_directory(tmp_path / "odd", "qwen3", head_dim=20)
    with pytest.raises(ConfigError, match=r"no compiled code for Qwen3ForCausalLM.*head_dim=20"):
        open_model(odd, "auto", is_deterministic=True)
    other = make_model_directory(tmp_path / "other", "gpt_neox", num_key_value_heads=4)
    with pytest.raises(
        ConfigError, match="results of transformers depend on the chunking of a context"
    ):
        open_model(other, "auto", is_deterministic=True)


def test_a_deterministic_runner_without_packed_weights_is_refused(tmp_path: Path) -> None:
    weights = make_weights(tmp_path, "qwen3", FLOAT32)
    with pytest.raises(ValueError, match="needs compiled kernels"):
        ModelRunner(weights.config, weights, num_blocks=1, is_deterministic=True)


# ---------------------------------------------------------------- whole runs


async def test_two_runs_train_on_the_same_bits_however_many_turns_share_their_steps(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model")
    if native_for(ModelConfig.from_directory(model), FLOAT32) is None:
        pytest.skip("no C++ compiler: no engine is deterministic here")

    async def solve(episode: tidegate.Episode, task: int) -> float:
        for _ in range(2):
            episode.append([task + 1, *range(9)])
            await episode.generate(max_tokens=7)
        return float(task)

    batches = []
    for engines, running in ((1, 1), (2, 8)):
        async with tidegate.serve(
            model=model,
            engines=engines,
            group_size=2,
            groups_per_batch=4,
            max_running_turns=running,
            deterministic=True,
        ) as rollouts:
            batches += [batch async for batch in rollouts.batches(range(4), episode=solve)]
            assert all(engine.is_deterministic for engine in rollouts.statistics().engines)
    one, other = batches
    assert torch.equal(one.token_ids, other.token_ids)
    assert torch.equal(one.logprobs, other.logprobs)
