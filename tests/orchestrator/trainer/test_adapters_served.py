"""Tests that LoRA adapters are added, changed and dropped during a real run, and each token is
audited."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tidegate.errors import ConfigError, TurnRefused, WeightsRefused
from tidegate.observability.audit.audit import audit_run

pytestmark = pytest.mark.wire

CONFIG = {"r": 4, "lora_alpha": 8}

Tensors = dict[str, torch.Tensor]


def random_adapter(model: Path, seed: int, rank: int = 4) -> Tensors:
    """As a trainer holds one, of some projections."""
    noise = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        projection = name.removesuffix(".weight")
        if projection.endswith(("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")):
            for letter, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensor = torch.randn(shape, generator=noise) / 4
                tensors[f"base_model.model.{projection}.lora_{letter}.weight"] = tensor
    return tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")


async def solve_by_adapters(episode: tidegate.Episode, task: int) -> float:
    """Two turns by the run's own adapter; then, of every other task, one by another."""
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=8)
    episode.append([13])
    turn = await episode.generate(max_tokens=20)
    if task % 2:
        await episode.generate(max_tokens=4, adapter="critic")
    return float(turn.token_ids[0] % 2)


async def solve(episode: tidegate.Episode, task: int) -> float:
    """The same, and then one by none."""
    reward = await solve_by_adapters(episode, task)
    if task % 2:
        await episode.generate(max_tokens=4, adapter="")
    return reward


async def test_all_tokens_are_audited_while_the_trained_adapter_changes_beside_another(
    model: Path, tmp_path: Path
) -> None:
    policy = random_adapter(model, 0)
    async with tidegate.serve(
        model=model,
        engines=2,
        group_size=2,
        groups_per_batch=2,
        max_staleness=1,
        adapter="policy",
        weight_checksums=True,
        run_directory=tmp_path / "run",
    ) as rollouts:
        assert (
            await rollouts.publish_adapter("critic", random_adapter(model, 1), config=CONFIG) == 1
        )
        await rollouts.publish_adapter("policy", policy, config=CONFIG)
        async for batch in rollouts.batches(range(12), episode=solve):
            assert batch.staleness.max() <= 1
            for tensor in policy.values():
                tensor *= 1.1
            if batch.trainer_version == 4:  # the model's own weights, under the same adapters
                state: Any = load_file(model / "model.safetensors")
                await rollouts.publish({name: t * 1.05 for name, t in state.items()})
            else:
                await rollouts.publish_adapter("policy", policy, batches=[batch], config=CONFIG)
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert (report.tokens_unreplayable, report.tokens_unknown) == (0, 0)
    assert report.versions >= 3  # none sampled for more than two batches
    # What other adapters sampled is the same in neighbouring versions.
    assert report.version_power.unnoticed_share < 0.5


async def test_an_adapter_serves_until_it_is_unloaded_and_what_is_unknown_is_refused(
    model: Path,
) -> None:
    adapter = random_adapter(model, 2)
    answers: list[list[int]] = []

    async def greedy(episode: tidegate.Episode, name: str) -> float:
        episode.append([7, 8, 9])
        try:
            turn = await episode.generate(max_tokens=12, temperature=0.0, adapter=name)
        except TurnRefused as error:
            return float("no adapter" in str(error))
        answers.append(turn.token_ids)
        return 0.0

    async with tidegate.serve(model=model, engines=1, group_size=2) as rollouts:
        assert (await rollouts.evaluate(["a"], episode=greedy)).rewards == [1.0]
        with pytest.raises(WeightsRefused, match="no adapter 'a' is published"):
            await rollouts.unload_adapter("a")
        with pytest.raises(ConfigError, match="DoRA"):
            await rollouts.publish_adapter("a", adapter, config=CONFIG | {"use_dora": True})
        odd = {name.replace("layers.0", "layers.7"): t for name, t in adapter.items()}
        with pytest.raises(WeightsRefused, match="is no matrix of this model"):
            await rollouts.publish_adapter("a", odd, config=CONFIG)
        await rollouts.publish_adapter("a", adapter, config=CONFIG)
        await rollouts.publish_adapter("b", {n: 2 * t for n, t in adapter.items()}, config=CONFIG)
        assert (await rollouts.evaluate(["a", "b", "", "a"], episode=greedy)).failures == 0
        a, b, none, again = answers
        assert a == again
        assert a != b != none != a
        await rollouts.unload_adapter("a")
        assert (await rollouts.evaluate(["a", "b"], episode=greedy)).rewards == [1.0, 0.0]
        assert answers[4:] == [b]
