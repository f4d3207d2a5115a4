"""Pauses, waves and publishes that don't wait, for real: engine processes, the wire, the audit."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.held_credit import paused, turns_continue_until
from tests.models import make_model_directory
from tidegate.observability.audit.audit import audit_run

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 2,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the run is on another thread
        await asyncio.sleep(0.005)


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=10)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


async def endless(episode: tidegate.Episode, task: int) -> float:
    """More steps than an engine has credit for."""
    episode.append([5, 6, 7])
    await episode.generate(max_tokens=400, stop_token_ids=[])
    return 1.0


async def test_tokens_are_audited_in_waves_when_no_publish_waits(
    model: Path, tmp_path: Path
) -> None:
    state, run = load_file(model / "model.safetensors"), tmp_path / "run"
    noise = torch.Generator().manual_seed(0)
    waits: Any = itertools.cycle(("none", "staged", "live"))
    async with tidegate.serve(
        model=model, **SMALL, max_staleness=2, engines_per_update_wave=1, run_directory=run
    ) as rollouts:
        async for batch in rollouts.batches(range(18), episode=two_turns):
            assert batch.staleness.max() <= 2
            for tensor in state.values():  # in place, while the last version may be on its way
                tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
            await rollouts.publish(state, wait=next(waits))
    statistics = rollouts.statistics()
    assert (statistics.ledger.error, statistics.batches, rollouts.version) == (0, 9, 9)
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained


async def test_a_staged_version_is_certain_and_is_live_when_a_pause_is_over(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    async with tidegate.serve(model=model, **SMALL, pause_mode="wait") as rollouts:
        evaluation = asyncio.create_task(rollouts.evaluate(range(4), episode=endless))
        await until(lambda: rollouts.statistics().evaluation_ledger.generated > 0)
        assert await rollouts.publish(state, wait="staged") == 1
        assert rollouts.statistics().trainer_version == 1
        assert (await evaluation).failures == 0
        await rollouts.pause("keep")  # waits for who swaps
        assert [engine.weight_version for engine in rollouts.statistics().engines] == [1, 1]
        await rollouts.resume()


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_nothing_is_sampled_during_a_pause_and_all_of_it_after(
    model: Path, mode: Any
) -> None:
    async with tidegate.serve(model=model, **SMALL) as rollouts:
        undisturbed = await rollouts.evaluate(range(6), episode=two_turns)
        before = rollouts.statistics().evaluation_ledger.generated
        with turns_continue_until(rollouts, paused):
            evaluation = asyncio.create_task(rollouts.evaluate(range(6), episode=endless))
            await until(lambda: rollouts.statistics().evaluation_ledger.generated > before)
            await rollouts.pause(mode)
        before = rollouts.statistics().evaluation_ledger.generated
        assert await rollouts.publish(load_file(model / "model.safetensors")) == 1
        assert rollouts.statistics().evaluation_ledger.generated == before
        assert not evaluation.done()
        await rollouts.resume()
        assert (await evaluation).failures == 0
        assert await rollouts.evaluate(range(6), episode=two_turns) == undisturbed
