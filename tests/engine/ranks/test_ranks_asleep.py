"""Sleep of several ranks: all release their memory or none does, and wake unchanged."""

import errno
from pathlib import Path

import pytest

from tests.engine.models.test_tensor_parallel import assert_alike, make_turns, one_rank, stage, swap
from tests.engine.orchestra import named_buffers
from tests.engine.ranks.ranked import RankedEngine, ranked_engine
from tests.engine.scheduling.driving import drive
from tests.models import make_model_directory
from tidegate.engine.ranks.multi_rank_sleep import MultiRankSleepController, NullSchedulerControl
from tidegate.transport.messages import Message, WeightsStaged
from tidegate.transport.sleep_messages import (
    Asleep,
    Awake,
    Sleep,
    SleepLevel,
    SleepRequestFailed,
    Wake,
)


def sleep_controller_of(engine: RankedEngine) -> MultiRankSleepController:
    return MultiRankSleepController(
        engine.runner,
        engine.staging,
        NullSchedulerControl(),
        reload=engine.model.reload,
        peers=engine.peers,
    )


def put_to_sleep(sleep_controller: MultiRankSleepController, level: SleepLevel) -> Message:
    sleep_controller.queue_request(Sleep(request_id=1, level=level, tags=["weights", "kv_cache"]))
    [answer] = sleep_controller.run_pending()  # at once, for nothing is being staged
    return answer


def wake(sleep_controller: MultiRankSleepController) -> Message:
    return sleep_controller.wake(Wake(request_id=2, tags=["weights", "kv_cache"]))


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_that_slept_compute_what_they_did_before(level: SleepLevel, tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen3", hidden_size=128)
    before, after = make_turns(), make_turns()
    with ranked_engine(path) as engine:
        drive(engine.runner, before, new_tokens=4)
        sleep_controller = sleep_controller_of(engine)
        awake_sums = sums(engine)
        asleep = put_to_sleep(sleep_controller, level)
        assert isinstance(asleep, Asleep)
        assert set(asleep.tags) == set(sleep_controller.asleep) == {"weights", "kv_cache"}
        assert all(now < was / 2 for now, was in zip(sums(engine), awake_sums, strict=True))
        assert not sleep_controller.has_weights
        assert wake(sleep_controller) == Awake(request_id=2, tags=[])
        assert sums(engine) == awake_sums
        drive(engine.runner, after, new_tokens=4)
    assert_alike(before, after)


def sums(engine: RankedEngine) -> list[float]:
    """Return the sum of each rank's weights; released pages read as zeros."""
    return [
        sum(float(tensor.float().abs().sum()) for tensor in runner.weights.tensors())
        for _, runner in sorted(engine.runners.items())
    ]


def test_memory_that_one_rank_can_not_wake_stays_asleep(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen3")
    before, after = make_turns(), make_turns()
    with ranked_engine(path, reloads_late=True) as engine:
        drive(engine.runner, before, new_tokens=4)
        sleep_controller = sleep_controller_of(engine)
        assert isinstance(put_to_sleep(sleep_controller, 2), Asleep)
        failed = wake(sleep_controller)
        assert isinstance(failed, SleepRequestFailed)
        assert failed.message.startswith("rank 1: ")
        assert "weights" in sleep_controller.asleep
        assert wake(sleep_controller) == Awake(request_id=2, tags=[])
        drive(engine.runner, after, new_tokens=4)
    assert_alike(before, after)


def test_all_ranks_wake_again_if_one_can_not_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model_directory(tmp_path / "model", "qwen3")
    before, after = make_turns(), make_turns()
    with ranked_engine(path) as engine:
        drive(engine.runner, before, new_tokens=4)
        sleep_controller = sleep_controller_of(engine)
        monkeypatch.setenv("TMPDIR", str(tmp_path / "not there"))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "not there"))
        failed = put_to_sleep(sleep_controller, 1)
        assert isinstance(failed, SleepRequestFailed)
        assert "rank 0: can't release memory" in failed.message
        assert "rank 1: can't release memory" in failed.message
        assert sleep_controller.asleep == []
        drive(engine.runner, after, new_tokens=4)
    assert_alike(before, after)


class FullDisk(MultiRankSleepController):
    """Rank 0's memory on a machine without room to offload it."""

    def _put_weights_to_sleep(self, level: SleepLevel) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")


def test_memory_asleep_after_a_failed_sleep_stays_asleep_until_it_can_wake(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen3")
    before, after = make_turns(), make_turns()
    with ranked_engine(path, reloads_late=True) as engine:
        drive(engine.runner, before, new_tokens=4)
        sleep_controller = FullDisk(
            engine.runner,
            engine.staging,
            NullSchedulerControl(),
            reload=engine.model.reload,
            peers=engine.peers,
        )
        failed = put_to_sleep(sleep_controller, 2)
        assert isinstance(failed, SleepRequestFailed)
        assert "rank 0: can't release memory: [Errno 28]" in failed.message
        assert sleep_controller.asleep == ["weights", "kv_cache"]  # on rank 1, and so for all
        assert wake(sleep_controller) == Awake(request_id=2, tags=[])
        drive(engine.runner, after, new_tokens=4)
    assert_alike(before, after)


def test_weights_published_into_ranks_asleep_are_those_of_all_once_swapped(tmp_path: Path) -> None:
    paths = [make_model_directory(tmp_path / str(seed), "qwen3", seed=seed) for seed in (0, 1)]
    expected, seen = make_turns(), make_turns()
    drive(one_rank(paths[1]), expected, new_tokens=4)
    with ranked_engine(paths[0]) as engine:
        sleep_controller = sleep_controller_of(engine)
        assert isinstance(put_to_sleep(sleep_controller, 2), Asleep)
        [reported] = stage(engine, 1, named_buffers(paths[1]))
        assert isinstance(reported, WeightsStaged)
        swap(engine, 1)
        sleep_controller.swapped()
        assert sleep_controller.asleep == ["kv_cache"]
        assert wake(sleep_controller) == Awake(request_id=2, tags=[])
        drive(engine.runner, seen, new_tokens=4)
    assert_alike(expected, seen)
