"""Engines that compute their tokens in virtual time, in whole runs."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import tidegate
from tests.models import make_model_directory
from tidegate.errors import ConfigError
from tidegate.simulation.engine.computing import ComputingEngine
from tidegate.simulation.engine.scripted import ScriptedEngine
from tidegate.simulation.engine.spec import EngineCosts
from tidegate.simulation.run.serve import SimulatedRollouts, run_plan
from tidegate.simulation.run.virtual_time import VirtualTime

COSTS = EngineCosts(
    slots=8, step_s=0.02, running_turn_s=0.001, prefill_tokens_per_s=10_000.0, swap_s=0.05
)
TRAIN_S = 0.1
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("models") / "qwen3")


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    episode.append([1 + task % 90] * 3)
    # lengths differ, so that some turns are under way at a swap
    await episode.generate(max_tokens=4 + 9 * (task % 3) + episode.index, stop_token_ids=[])
    episode.append([7, 8])
    turn = await episode.generate(max_tokens=5)
    return float(turn.token_ids[0] % 2)


@dataclass(slots=True)
class Trained:
    """What a short run left."""

    batches: list[tidegate.Batch] = field(default_factory=list)
    published_s: list[float] = field(default_factory=list)
    versions: list[PreTrainedModel] = field(default_factory=list)
    engines: Sequence[ComputingEngine] = ()


def train(model: Path, *, batches: int = 4, costs: EngineCosts = COSTS, **settings: Any) -> Trained:
    """Train in virtual time; a train step adds noise to the weights."""
    time = VirtualTime(limit_s=1e4)
    engines = [ComputingEngine(costs=costs) for _ in range(2)]
    plan = run_plan(
        model=model,
        engines=engines,
        group_size=2,
        groups_per_batch=3,
        seed=5,
        **settings,
    )
    trained = Trained(engines=engines)
    noise = torch.Generator().manual_seed(3)

    async def main() -> None:
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        trained.versions.append(copy.deepcopy(policy))
        async with SimulatedRollouts(plan, time) as rollouts:
            async for batch in rollouts.batches(range(3 * batches), episode=two_turns):
                await asyncio.sleep(TRAIN_S)
                with torch.no_grad():
                    for tensor in policy.parameters():
                        tensor.add_(torch.randn(tensor.shape, generator=noise), alpha=0.02)
                trained.versions.append(copy.deepcopy(policy))
                await rollouts.publish(policy.state_dict())
                trained.batches.append(batch)
                trained.published_s.append(time.now_s)

    try:
        time.run(main())
    finally:
        time.close()
    return trained


def sampling_versions(batch: tidegate.Batch, row: int) -> list[int]:
    return sorted({version for version in batch.weight_versions[row].tolist() if version >= 0})


@torch.no_grad()
def recomputed_logprobs(
    versions: Sequence[PreTrainedModel], batch: tidegate.Batch, row: int, *, newer: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row's reported log-probs, and those of the weights that its tokens' tags name.

    ``newer`` is added to each tag, as if tags were wrong.
    """
    token_ids = batch.token_ids[row][batch.attention_mask[row].bool()]
    reported, computed = [], []
    for version in sampling_versions(batch, row):
        sampled = (batch.weight_versions[row, : len(token_ids)] == version).nonzero().squeeze(1)
        logits = versions[version + newer](token_ids[None]).logits[0]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        computed.append(logprobs[sampled - 1, token_ids[sampled]])
        reported.append(batch.logprobs[row, sampled])
    return torch.cat(reported), torch.cat(computed)


@pytest.fixture(scope="module")
def recomputing(model: Path) -> Trained:
    """A run that recomputes KV at each swap."""
    return train(model, max_staleness=2, kv_policy="recompute")


def test_every_token_is_of_the_weights_that_its_tag_names(
    model: Path, recomputing: Trained
) -> None:
    for trained in (recomputing, train(model, max_staleness=2, pause_mode="abort")):
        mixed = 0
        for batch in trained.batches:
            for row in range(len(batch.rewards)):
                reported, computed = recomputed_logprobs(trained.versions, batch, row)
                assert torch.allclose(reported, computed, atol=TOLERANCE)
                of_others = recomputed_logprobs(trained.versions, batch, row, newer=1)[1]
                assert not torch.allclose(reported, of_others, atol=10 * TOLERANCE)
                mixed += len(sampling_versions(batch, row)) > 1
        assert mixed, "no rollout was under way at a swap, so the test shows little"


def test_a_run_is_the_same_to_the_bit_when_it_is_repeated(
    model: Path, recomputing: Trained
) -> None:
    again = train(model, max_staleness=2, kv_policy="recompute")
    assert again.published_s == recomputing.published_s
    for one, other in zip(recomputing.batches, again.batches, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.logprobs, other.logprobs)
        assert torch.equal(one.weight_versions, other.weight_versions)


def test_engines_are_busy_for_exactly_the_modelled_time(model: Path) -> None:
    no_prefill_costs = EngineCosts(
        slots=1, step_s=0.02, running_turn_s=0.001, prefill_tokens_per_s=1e12, swap_s=0.05
    )
    trained = train(model, batches=2, costs=no_prefill_costs, max_staleness=0)
    for engine in trained.engines:
        assert engine.tokens == engine.steps > 10  # one slot: a token per step
        assert engine.swaps == 2
        assert engine.busy_s == pytest.approx(0.021 * engine.steps + 0.05 * engine.swaps)


def test_a_synchronous_batch_takes_the_longest_rollout_the_train_step_and_the_swap(
    model: Path,
) -> None:
    trained = train(model, max_staleness=0)
    tokens = [int(batch.loss_mask.sum(1).max()) for batch in trained.batches]
    between = [b - a for a, b in zip(trained.published_s, trained.published_s[1:], strict=False)]
    for longest, elapsed_s in zip(tokens[1:], between, strict=True):
        least_s = longest * COSTS.step_s + TRAIN_S + COSTS.swap_s
        # 3 rows at most per engine, and waits for messages
        most_s = longest * (COSTS.token_s(3) + 0.005) + TRAIN_S + COSTS.swap_s + 0.1
        assert least_s < elapsed_s < most_s


def test_scripted_and_computing_engines_are_not_mixed(model: Path) -> None:
    engines: list[Any] = [ScriptedEngine(), ComputingEngine(costs=COSTS)]
    with pytest.raises(ConfigError, match="all scripted or all compute"):
        run_plan(model=model, engines=engines)
