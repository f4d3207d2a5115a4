"""Engines of two ranks, for real: their processes, their sums, their weights, and their deaths."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.mortal_trainer import two_turns
from tests.orchestrator.trainer.runs import SMALL, Weights
from tidegate.errors import ConfigError, EngineStartFailed
from tidegate.observability.audit.audit import audit_run
from tidegate.transport.security import make_keys

pytestmark = pytest.mark.wire

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    assert children(recursive=True) == []


def rank_processes() -> list[psutil.Process]:
    """Of this run: the ranks other than 0."""
    found = []
    for process in children(recursive=True):
        try:
            if "tidegate.engine.ranks.worker" in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


async def test_tokens_of_two_ranks_are_audited_and_a_rank_that_is_killed_is_survived(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model", tied=False)
    make_keys(tmp_path / "keys")
    weights, run = Weights(model), tmp_path / "run"
    async with tidegate.serve(
        model=model,
        **SMALL,
        tensor_parallel_size=2,
        speculative_method=f"draft:{model}",  # whole in rank 0, and verified by both
        max_staleness=2,
        run_directory=run,
        listen_address="tcp://127.0.0.1:*",
        curve_key_directory=tmp_path
        / "keys",  # which must be sent to the other ranks, to fetch weights
        weight_channel="zmq",
    ) as rollouts:
        number = 0
        async for _ in rollouts.batches(range(8), episode=two_turns):
            number += 1
            if number == 1:
                [engine] = rollouts.statistics().engines
                assert engine.tensor_parallel_size == 2
                [other] = rank_processes()
                rank_0 = psutil.Process(other.ppid())
                other.kill()
                await asyncio.to_thread(rank_0.wait, WAIT_S)  # another engine takes its place
            state = weights.step()
            await rollouts.publish(state, draft=state)
        [engine] = rollouts.statistics().engines
        assert engine.speculative_method == "draft"
        assert engine.accepted_draft_tokens > 0
        assert await rollouts.sleep() > 0
        assert rollouts.statistics().asleep == ("weights", "kv_cache")
        await rollouts.wake()
        assert len((await rollouts.evaluate(range(2), episode=two_turns)).rewards) == 2
    statistics = rollouts.statistics()
    assert statistics.ledger.error == 0
    assert statistics.trainer_version == number == 4
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained + statistics.evaluation_ledger.generated > 0


def test_a_model_that_ranks_cannot_share_is_refused_by_the_engine_in_its_own_words(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model")
    with (
        pytest.raises(EngineStartFailed, match="which can't be split evenly over 3 ranks"),
        tidegate.serve_sync(model=model, **SMALL, tensor_parallel_size=3),
    ):
        pass


def test_a_channel_with_one_reader_per_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set weight_channel to 'shm'"):
        tidegate.serve_sync(
            model=make_model_directory(tmp_path), tensor_parallel_size=2, weight_channel="relay"
        )
