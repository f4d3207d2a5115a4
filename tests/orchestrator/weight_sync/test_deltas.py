"""Deltas have the tensors that differ from the version before, and no others."""

import pytest

from tidegate.orchestrator.core.weight_content import LAYERS_MAX
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.weight_sync.deltas import VERSIONS_MAX, WrittenTensors
from tidegate.testing import ServeInTests
from tidegate.transport.weight_channels.base import NamedBuffer


def tensors(**values: bytes) -> list[NamedBuffer]:
    return [NamedBuffer(n, "uint8", (len(v),), memoryview(v)) for n, v in values.items()]


def changed(
    written: WrittenTensors, version: int, before: int, **values: bytes
) -> list[str] | None:
    """Return the names of tensors to send; None for all of them, over nothing."""
    others = written.changed(version, tensors(**values), before=before)
    return None if others is None else [tensor.name for tensor in others]


def test_tensors_that_differ_from_the_version_before_are_returned_and_there_may_be_none() -> None:
    written = WrittenTensors()
    assert changed(written, 1, 0, a=b"1", b=b"2") is None
    assert changed(written, 2, 1, a=b"1", b=b"3") == ["b"]
    assert changed(written, 3, 2, a=b"1", b=b"3") == []
    assert changed(written, 4, 1, a=b"1", b=b"3") == ["b"]  # 2 and 3 have failed


def test_a_set_of_which_nothing_stayed_or_with_other_names_is_sent_whole() -> None:
    written = WrittenTensors()
    changed(written, 1, 0, a=b"1", b=b"2")
    assert changed(written, 2, 1, a=b"2", b=b"1") is None
    assert changed(written, 3, 2, a=b"2") is None


def test_the_same_bytes_of_another_shape_or_kind_are_another_tensor() -> None:
    written = WrittenTensors()
    data = memoryview(b"1234")
    same = NamedBuffer("same", "uint8", (4,), data)
    written.changed(1, [same, NamedBuffer("a", "uint8", (4,), data)], before=0)
    for version, dtype, shape in ((2, "uint8", (2, 2)), (3, "int8", (2, 2))):
        other = NamedBuffer("a", dtype, shape, data)
        assert written.changed(version, [same, other], before=version - 1) == [other]


def test_a_version_that_is_written_as_something_else_is_not_known_any_more() -> None:
    written = WrittenTensors()
    changed(written, 1, 0, a=b"1", b=b"2")
    written.forget(1)
    assert changed(written, 2, 1, a=b"1", b=b"3") is None


def test_no_more_than_a_few_versions_are_remembered() -> None:
    written = WrittenTensors()
    for version in range(1, VERSIONS_MAX + 2):
        changed(written, version, version - 1, a=b"1", b=bytes([version]))
    assert changed(written, 90, 1, a=b"1", b=b"x") is None
    assert changed(written, 91, VERSIONS_MAX + 1, a=b"1", b=b"x") == ["b"]


async def test_however_many_tensors_change_in_turns_few_versions_are_kept(
    tidegate_serve: ServeInTests,
) -> None:
    """A mixture's experts change in turns, so tensors of each version would be needed for long."""
    torch = pytest.importorskip("torch")
    state = {f"expert {n}": torch.zeros(4) for n in range(40)}
    kept, sent = [], []
    async with tidegate_serve(weight_deltas=True) as rollouts:
        weights = (await rollouts._requests.do(_scheduler)).control.state.weights
        for number in range(40):
            state[f"expert {number}"] += 1.0
            state[f"expert {(number + 1) % 40}"] += 1.0
            await rollouts.publish(state)
            assert weights.update is not None
            kept.append(len(weights.update.content.buffers))
            sent.append(len({part.version for part in weights.update.content.overlays}))
    assert max(kept) == LAYERS_MAX + 1
    assert sent[:3] == [0, 1, 2]
    assert sent.count(0) == 5  # whole sets


async def _scheduler(scheduler: Scheduler) -> Scheduler:
    return scheduler
