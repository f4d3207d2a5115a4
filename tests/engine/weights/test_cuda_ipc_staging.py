"""Staging of weights on the trainer's GPU by CUDA IPC, and refusals.

Host memory stands in for the GPU's, see tests/host_gpu.py; test_on_a_gpu.py has a real one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.weights.test_staging import answers, assert_same, assert_staged, refusal
from tests.host_gpu import HostGpu
from tests.models import make_model_directory
from tidegate.engine.device.weights import DeviceWeights
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import fill_from_directory
from tidegate.engine.weights.staging import Staging
from tidegate.errors import ConfigError
from tidegate.orchestrator.core.weight_content import WeightContent, replace_some
from tidegate.orchestrator.settings.config import run_settings
from tidegate.orchestrator.trainer.run import Run
from tidegate.orchestrator.weight_sync.state_dict import named_tensors
from tidegate.runs import run_parts
from tidegate.transport.messages import (
    BaseVersions,
    Message,
    MessageRejected,
    StartWeightUpdate,
    UpdateWeights,
    WeightsStaged,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.security import make_keys
from tidegate.transport.weight_channels import WeightReceiverConfig, cuda_ipc, sender
from tidegate.transport.weight_channels.checksums import (
    checksums,
    crc32_of,
    with_checksums,
    write_checked,
)
from tidegate.transport.weight_channels.cuda_ipc import CudaIpcSender
from tidegate.transport.weight_channels.cuda_memory import NamedTensor

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_model_directory(root / str(seed), "qwen3", seed=seed) for seed in range(2)]


@pytest.fixture
def trainer() -> HostGpu:
    return HostGpu()


@pytest.fixture
def engine() -> HostGpu:
    return HostGpu()


@pytest.fixture
def channel(trainer: HostGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaIpcSender]:
    monkeypatch.setattr(cuda_ipc, "BUFFER_BYTES", 16 * 1024)  # so that a set has several parts
    channel = CudaIpcSender(trainer)
    yield channel
    channel.close()


@pytest.fixture
def staging(directories: list[Path], engine: HostGpu, channel: CudaIpcSender) -> Iterator[Staging]:
    """A staging with the channel open."""
    staging = Staging(lambda: room(directories[0]), WeightReceiverConfig(gpu=engine))
    staging.init(wired(channel.init()))
    yield staging
    staging.close()


def room(directory: Path) -> DeviceWeights:
    return DeviceWeights.on_device(ModelConfig.from_directory(directory), torch.float32, CPU)


def filled(directory: Path) -> DeviceWeights:
    weights = room(directory)
    fill_from_directory(weights, directory)
    return weights


def published(directory: Path) -> list[NamedTensor]:
    return [NamedTensor(name, tensor) for name, tensor in read_tensors(directory)]


def wired(message: Message) -> Any:
    """Encode and decode a message, as the wire does."""
    return decode_from_orchestrator(encode(message))


def stage(staging: Staging, version: int, updates: list[UpdateWeights]) -> None:
    staging.start(StartWeightUpdate(version=version))
    for update in updates:
        staging.update(wired(update))


def test_weights_of_the_trainers_gpu_are_staged_and_let_go_of_before_that_is_said(
    staging: Staging, channel: CudaIpcSender, engine: HostGpu, directories: list[Path]
) -> None:
    updates = channel.write(1, published(directories[1]))
    assert len(updates) > 2
    live: Any = filled(directories[0])
    stage(staging, 1, updates)
    reported: list[Message] = []
    while not reported:
        reported = staging.take_replies()
    assert [type(one) for one in reported] == [WeightsStaged]
    assert (len(engine.opened), engine.mapped) == (len(updates), 0)
    staged: Any = staging.swap(1, live)
    assert_same(staged, filled(directories[1]))


def test_part_of_a_set_is_laid_over_the_whole_also_for_an_engine_that_comes_late(
    staging: Staging, channel: CudaIpcSender, directories: list[Path]
) -> None:
    whole, names = channel.write(1, published(directories[0])), ("model.norm.weight",)
    changed = [tensor for tensor in published(directories[1]) if tensor.name in names]
    part = channel.write(2, changed, keep=[1])
    content = replace_some(WeightContent(tuple(whole), bases=BaseVersions(1, 1)), part)
    messages = content.messages(2, live=0)
    assert len(messages) == len(whole) + 1
    stage(staging, 2, messages)
    assert_staged(staging, 2)
    staged: Any = staging.swap(2, filled(directories[0]))
    expected = filled(directories[0])
    expected.start()
    for tensor in [*published(directories[0]), *changed]:
        expected.load(tensor.name, tensor.data)
    assert_same(staged, expected)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"handle": b"\x02c" + bytes(64)}, "can't be opened"),
        ({"handle": b"\x02c" + bytes(3)}, "a handle of 5 bytes"),
        ({"nbytes": 2**62}, "can't be on a GPU"),
        ({"ref_counter_handle": b"/dev/shm/mine"}, "is not a name of torch"),
        ({"ref_counter_offset": 2**40}, "does not exist"),
        ({"gpu": "another"}, "on GPU 'another'"),
        (None, "has no IPC handle"),
    ],
)
def test_hostile_memory_fails_its_version_and_the_next_is_staged(
    staging: Staging,
    channel: CudaIpcSender,
    engine: HostGpu,
    directories: list[Path],
    fields: dict[str, Any] | None,
    why: str,
) -> None:
    replace = msgspec.structs.replace
    first, *others = channel.write(1, published(directories[1]))
    assert first.ipc_handle is not None
    memory = None if fields is None else replace(first.ipc_handle, **fields)
    stage(staging, 1, [replace(first, ipc_handle=memory), *others])
    assert why in refusal(staging)
    assert engine.mapped == 0
    stage(staging, 2, channel.write(2, published(directories[1])))
    assert_staged(staging, 2)


def test_a_tensor_the_model_has_not_or_whose_sum_is_another_fails_the_version(
    staging: Staging, channel: CudaIpcSender, engine: HostGpu, directories: list[Path]
) -> None:
    strange = [*published(directories[1]), NamedTensor("strange", torch.zeros(3))]
    stage(staging, 1, channel.write(1, strange))
    assert "has no tensor 'strange'" in refusal(staging)
    good = published(directories[1])
    sums = checksums(good)
    wrong = sums | {"model.norm.weight": sums["model.norm.weight"] ^ 1}
    stage(staging, 2, with_checksums(channel.write(2, good), wrong))
    assert "'model.norm.weight' has the checksum" in refusal(staging)
    assert engine.mapped == 0
    stage(staging, 3, with_checksums(channel.write(3, good), sums))
    assert_staged(staging, 3)


def test_an_engine_without_that_gpu_says_so_and_takes_weights_another_way(
    directories: list[Path], channel: CudaIpcSender
) -> None:
    for cache_home, why in (
        (WeightReceiverConfig(), "computes on the CPU"),
        (WeightReceiverConfig(gpu=HostGpu("b")), "computes on 'b'"),
    ):
        staging = Staging(lambda: room(directories[0]), cache_home)
        shm = sender("shm")
        staging.init(wired(channel.init()))
        (complaint,) = answers(staging)
        assert isinstance(complaint, MessageRejected)
        assert why in complaint.message
        stage(staging, 1, channel.write(1, published(directories[1]))[:1])
        assert why in refusal(staging)
        staging.init(wired(shm.init()))
        stage(staging, 2, shm.write(2, []))
        assert "tensors are missing" in refusal(staging)
        staging.close()
        shm.close()


def test_a_published_state_dict_is_staged_with_its_sums_and_tied_tensors_come_once(
    staging: Staging, channel: CudaIpcSender, directories: list[Path]
) -> None:
    state = dict(read_tensors(directories[1]))
    twice = state | {"lm_head.weight": state["model.embed_tokens.weight"]}
    updates = write_checked(channel.write, 1, named_tensors(twice), keep=(), has_checksums=True)
    specs = [spec for update in updates for spec in update.tensors]
    assert [spec.name for spec in specs] == list(state)
    assert [spec.crc32 for spec in specs] == [crc32_of(one) for one in state.values()]
    stage(staging, 1, updates)
    assert_staged(staging, 1)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"device": "cpu"}, "but device='cpu'; set device to the trainer's"),
        ({"cluster": "ray"}, "this host only, and Ray places them on any"),
        ({"listen_address": "tcp://*:5555"}, r"listen_address='tcp://\*:5555' is for others too"),
        ({"weight_deltas": True}, "weight_deltas=True can't be combined"),
        ({"tensor_parallel_size": 2}, "of tensor_parallel_size=2 ranks each reads"),
    ],
)
def test_settings_by_which_no_engine_shares_the_gpu_are_refused(
    directories: list[Path], tmp_path: Path, values: dict[str, Any], why: str
) -> None:
    values = {"device": "cuda", "weight_channel": "cuda_ipc"} | values
    if "listen_address" in values:  # of other hosts, which would be refused without keys
        make_keys(tmp_path / "keys")
        values["curve_key_directory"] = tmp_path / "keys"
    with pytest.raises(ConfigError, match=why):
        run_settings(model=directories[0], **values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without CUDA")
def test_a_run_without_cuda_does_not_begin(directories: list[Path]) -> None:
    requested = {"device": "cuda:0", "weight_channel": "cuda_ipc"}
    settings = run_settings(model=directories[0], **requested)
    with pytest.raises(ConfigError, match=r"'cuda_ipc': .* finds no CUDA device here"):
        Run(settings, run_parts(settings))
