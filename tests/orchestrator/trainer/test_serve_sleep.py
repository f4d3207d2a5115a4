"""Tests of sleep and wake in a whole run on one machine, each token audited."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tidegate.observability.audit.audit import audit_run
from tidegate.transport.sleep_messages import SleepLevel

pytestmark = pytest.mark.wire

MIB = 1024 * 1024


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    """Of some length, so that turns are frozen while others make up a batch."""
    episode.append([3, 5, 7, 11 + task % 50])
    turn = await episode.generate(max_tokens=4 + 11 * (task % 4))
    return float(turn.token_ids[0] % 2)


def test_a_trainer_sleeps_the_engine_publishes_into_it_and_wakes_it(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model")
    state, noise = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    with tidegate.serve_sync(
        model=model,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        max_staleness=1,
        kv_policy="keep",
        run_directory=tmp_path / "run",
        num_kv_blocks=1000,
    ) as rollouts:
        levels: Iterator[SleepLevel] = iter((1, 2, 2))
        for batch in rollouts.batches(range(6), episode=one_turn):
            assert rollouts.sleep(next(levels), mode="keep") > 10 * MIB  # of a KV cache of 16 MiB
            for tensor in state.values():
                tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
            assert len(batch.rewards) == 4
            rollouts.wake(["weights"])
            rollouts.publish(state)
            assert rollouts.statistics().asleep == ("kv_cache",)
            rollouts.wake()
        statistics = rollouts.statistics()
    assert (statistics.trainer_version, statistics.ledger.error) == (3, 0)
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.spans_mixed == 0  # what was frozen was computed again
    assert report.tokens == statistics.ledger.trained
