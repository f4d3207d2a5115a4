"""Weights are staged whole or refused whole, with one answer each."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.engine.orchestra import named_buffers
from tests.models import make_model_directory
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights, load_directory
from tidegate.engine.weights.staging import Staging
from tidegate.engine.weights.weight_store import WeightStore, _is_finite
from tidegate.errors import OutOfMemory
from tidegate.kernels.weight_matrix import published
from tidegate.transport.messages import (
    InitWeights,
    Message,
    MessageRejected,
    StartWeightUpdate,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.weight_channels import NamedBuffer, WeightSender, sender
from tidegate.transport.weight_channels import zmq as zmq_channel

pytestmark = pytest.mark.wire

TIMEOUT_S = 60.0


class Gate:
    """Allocates weights unless the test closed it, so that the thread's progress is known."""

    def __init__(self, config: ModelConfig) -> None:
        self._opened = threading.Event()
        self._config = config
        self.allocated = 0
        self.open()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    def allocate(self) -> Weights:
        assert self._opened.wait(TIMEOUT_S)
        self.allocated += 1
        return Weights.allocate(self._config, torch.float32)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_model_directory(root / str(seed), "qwen2", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def config(directories: list[Path]) -> ModelConfig:
    return ModelConfig.from_directory(directories[0])


@pytest.fixture
def tensors(directories: list[Path]) -> list[NamedBuffer]:
    """All tensors of the second model."""
    return named_buffers(directories[1])


@pytest.fixture
def gate(config: ModelConfig) -> Gate:
    return Gate(config)


@pytest.fixture
def staging(gate: Gate) -> Iterator[Staging]:
    staging = Staging(gate.allocate)
    yield staging
    gate.open()
    staging.close()


@pytest.fixture(params=["shm", "zmq", "disk"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightSender]:
    channel = sender(request.param, tmp_path)
    yield channel
    channel.close()


@pytest.fixture
def shm() -> Iterator[WeightSender]:
    """A channel for tests where its kind makes no difference."""
    channel = sender("shm")
    yield channel
    channel.close()


def answers(staging: Staging) -> list[Message]:
    """Return all answers, once the thread is idle."""
    deadline_s, reported = time.monotonic() + TIMEOUT_S, staging.take_replies()
    while staging.is_busy:
        assert time.monotonic() < deadline_s
        reported += staging.take_replies()
    return reported + staging.take_replies()


def publish(
    staging: Staging, channel: WeightSender, version: int, tensors: list[NamedBuffer]
) -> None:
    staging.start(StartWeightUpdate(version=version))
    for update in channel.write(version, tensors):
        staging.update(update)


def assert_staged(staging: Staging, version: int) -> None:
    """Assert that the only answer is that ``version`` is staged."""
    (staged,) = answers(staging)
    assert isinstance(staged, WeightsStaged), staged
    assert staged.version == version
    assert staging.is_staged(version)


def refusal(staging: Staging) -> str:
    """Return why a version was refused, which must be the only answer."""
    (failed,) = answers(staging)
    assert isinstance(failed, WeightsFailed), failed
    assert not staging.is_staged(failed.version)
    return failed.message


def assert_same(one: WeightStore, other: WeightStore) -> None:
    assert one._copy_targets.keys() == other._copy_targets.keys()
    for name, place in one._copy_targets.items():
        for a, b in zip(place.targets, other._copy_targets[name].targets, strict=True):
            assert torch.equal(published(a), published(b)), name


def test_staged_weights_equal_the_published_ones_and_the_old_ones_become_the_buffer(
    staging: Staging,
    gate: Gate,
    channel: WeightSender,
    directories: list[Path],
    config: ModelConfig,
) -> None:
    weights = [load_directory(path, config, torch.float32) for path in directories]
    staging.init(channel.init())
    live: WeightStore = load_directory(directories[0], config, torch.float32)
    seen = {id(live)}
    for version in range(1, 5):
        publish(staging, channel, version, named_buffers(directories[version % 2]))
        assert_staged(staging, version)
        live = staging.swap(version, live)
        seen.add(id(live))
        assert_same(live, weights[version % 2])
    assert (len(seen), gate.allocated) == (2, 1)


def test_without_a_thread_a_version_is_staged_when_its_last_call_returns(
    gate: Gate, shm: WeightSender, tensors: list[NamedBuffer]
) -> None:
    staging = Staging(gate.allocate, is_threaded=False)
    staging.init(shm.init())
    publish(staging, shm, 1, tensors)
    (staged,) = staging.take_replies()
    assert isinstance(staged, WeightsStaged)
    assert not staging.is_busy
    staging.close()


def test_a_version_that_lacks_tensors_is_refused_by_name(
    staging: Staging, channel: WeightSender, tensors: list[NamedBuffer]
) -> None:
    staging.init(channel.init())
    publish(staging, channel, 1, [t for t in tensors if t.name != "model.norm.weight"])
    assert refusal(staging) == (
        "1 tensors are missing, first model.norm.weight; publish all the names that the model "
        "directory has"
    )


class Homeless(Weights):
    """Weights whose memory is taken by others, as a device's may be while they sleep."""

    has_room = False

    def start(self) -> None:
        if not self.has_room:
            raise OutOfMemory(doing="to wake", remedy="free some", why="taken")
        super().start()


def test_a_version_without_memory_is_refused_once_and_the_next_is_taken(
    config: ModelConfig,
    shm: WeightSender,
    tensors: list[NamedBuffer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = Homeless.allocate(config, torch.float32)
    staging = Staging(lambda: buffer)
    try:
        staging.init(shm.init())
        publish(staging, shm, 1, tensors)
        assert refusal(staging) == "out of memory to wake; free some (taken)"
        assert buffer.is_untouched
        monkeypatch.setattr(Homeless, "has_room", True)
        publish(staging, shm, 2, tensors)
        assert_staged(staging, 2)
    finally:
        staging.close()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_weights_with_nan_are_refused_by_name(
    number: float, staging: Staging, shm: WeightSender, tensors: list[NamedBuffer]
) -> None:
    staging.init(shm.init())
    broken = tensors[3]
    values = np.frombuffer(bytes(broken.data), np.float32).copy()
    values[-1] = number
    wrong = NamedBuffer(broken.name, broken.dtype, broken.shape, memoryview(values.tobytes()))
    publish(staging, shm, 1, [*tensors[:3], wrong, *tensors[4:]])
    assert refusal(staging).startswith(f"{broken.name} contains NaN or infinity")
    publish(staging, shm, 2, tensors)
    assert_staged(staging, 2)


def test_large_finite_weights_are_accepted_though_their_sum_overflows() -> None:
    assert _is_finite(torch.full((10,), 3e38))
    assert not _is_finite(torch.tensor([3e38, 3e38, math.inf]))


def test_a_failed_version_gets_one_reply(
    staging: Staging, channel: WeightSender, tensors: list[NamedBuffer]
) -> None:
    staging.init(channel.init())
    wrong = NamedBuffer("no.such.tensor", "float32", (1,), memoryview(bytes(4)))
    (whole,) = channel.write(1, [*tensors, wrong])
    partial = replace(whole, tensors=whole.tensors[:-1])
    staging.start(StartWeightUpdate(version=1))
    staging.update(whole)
    staging.update(partial)
    assert "no.such.tensor" in refusal(staging)
    staging.update(partial)
    assert answers(staging) == []
    publish(staging, channel, 1, tensors)
    assert_staged(staging, 1)


def test_chunks_are_staged_when_the_last_is_in(
    staging: Staging, channel: WeightSender, tensors: list[NamedBuffer]
) -> None:
    staging.init(channel.init())
    (whole,) = channel.write(1, tensors)
    staging.start(StartWeightUpdate(version=1))
    half = len(whole.tensors) // 2
    for specs, last in ((whole.tensors[:half], False), (whole.tensors[half:], True)):
        assert answers(staging) == []
        staging.update(replace(whole, tensors=specs, is_last=last))
    assert_staged(staging, 1)


def test_starting_the_version_under_way_anew_is_answered_once_and_not_as_a_failure(
    staging: Staging, gate: Gate, channel: WeightSender, tensors: list[NamedBuffer]
) -> None:
    gate.close()
    staging.init(channel.init())
    publish(staging, channel, 1, tensors)
    publish(staging, channel, 1, tensors)  # as after a lost connection
    gate.open()
    assert_staged(staging, 1)


def test_starting_a_version_gives_up_the_one_under_way_and_says_so(
    staging: Staging, gate: Gate, channel: WeightSender, tensors: list[NamedBuffer]
) -> None:
    gate.close()  # the thread waits for it, so version 1 can't be complete
    staging.init(channel.init())
    publish(staging, channel, 1, tensors)
    publish(staging, channel, 2, tensors)
    gate.open()
    failed, staged = answers(staging)
    assert failed == WeightsFailed(
        version=1, message="cancelled, because v2 was started before it was complete"
    )
    assert isinstance(staged, WeightsStaged)
    assert (staged.version, staging.is_staged(1), staging.is_staged(2)) == (2, False, True)


def test_tensors_after_the_last_message_are_rejected(
    staging: Staging, shm: WeightSender, tensors: list[NamedBuffer]
) -> None:
    staging.init(shm.init())
    publish(staging, shm, 1, tensors)
    answers(staging)
    staging.update(UpdateWeights(version=1, location="", tensors=[]))
    assert answers(staging) == [
        MessageRejected(message="v1 is complete; tensors after those marked as last are ignored")
    ]
    assert staging.is_staged(1)


def test_tensors_without_a_start_or_a_channel_are_refused(staging: Staging) -> None:
    update = UpdateWeights(version=5, location="", tensors=[])
    staging.update(update)
    assert refusal(staging) == "v5 was not started; send StartWeightUpdate first"
    staging.start(StartWeightUpdate(version=5))
    staging.update(update)
    assert refusal(staging) == "no weight channel is open; send InitWeights first"


def test_without_memory_for_a_second_set_of_weights_each_version_is_refused_and_says_what_to_do(
    channel: WeightSender, tensors: list[NamedBuffer]
) -> None:
    def allocate() -> Weights:
        torch.empty(1 << 54)
        raise AssertionError("no machine has so much")

    staging = Staging(allocate)
    try:
        staging.init(channel.init())
        publish(staging, channel, 1, tensors)
        complaint, failed = answers(staging)
        assert isinstance(complaint, MessageRejected)
        assert isinstance(failed, WeightsFailed)
        assert failed.message == complaint.message
        assert "out of memory for a second set of weights" in failed.message
        assert "lower num_kv_blocks" in failed.message
    finally:
        staging.close()


def test_an_abandoned_version_gets_no_reply_and_can_be_started_again(
    staging: Staging, gate: Gate, channel: WeightSender, tensors: list[NamedBuffer]
) -> None:
    gate.close()
    staging.init(channel.init())
    publish(staging, channel, 1, tensors)
    staging.abandon()
    gate.open()
    assert answers(staging) == []
    assert not staging.is_staged(1)
    publish(staging, channel, 1, tensors)
    assert_staged(staging, 1)
    staging.abandon()
    assert not staging.is_staged(1)


def test_an_unknown_channel_is_rejected(staging: Staging) -> None:
    staging.init(InitWeights(channel="carrier-pigeon"))
    (complaint,) = answers(staging)
    assert isinstance(complaint, MessageRejected)
    assert "carrier-pigeon" in complaint.message


def publish_from_a_lost_sender(staging: Staging, tensors: list[NamedBuffer]) -> None:
    """Publish version 1 over a channel that is closed before the weights were sent."""
    gone = sender("zmq")
    staging.init(gone.init())
    updates = gone.write(1, tensors)
    gone.close()
    staging.start(StartWeightUpdate(version=1))
    for update in updates:
        staging.update(update)


def test_weights_of_a_lost_sender_are_refused_and_the_next_sender_is_accepted(
    staging: Staging, tensors: list[NamedBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_channel, "STALL_TIMEOUT_S", 0.5)
    publish_from_a_lost_sender(staging, tensors)
    assert "no weights arrived" in refusal(staging)
    there = sender("zmq")
    staging.init(there.init())
    publish(staging, there, 2, tensors)
    assert_staged(staging, 2)
    there.close()


def test_a_new_version_ends_the_wait_for_missing_weights(
    staging: Staging, tensors: list[NamedBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_channel, "STALL_TIMEOUT_S", 3600.0)
    publish_from_a_lost_sender(staging, tensors)
    there = sender("zmq")
    staging.init(there.init())
    publish(staging, there, 2, tensors)
    failed, staged = answers(staging)
    assert isinstance(failed, WeightsFailed)
    assert isinstance(staged, WeightsStaged)
    there.close()
