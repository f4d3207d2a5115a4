"""Tests of the CUDA IPC weight channel: weights arrive, and invalid handles are refused unopened.

Host memory stands in for the device's; the messages go through the real wire encoding.
tests/engine/test_on_a_gpu.py covers the same with CUDA.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host_gpu import TOTAL_BYTES, UUID, HostGpu
from tidegate.errors import BadFrame, WeightsRefused
from tidegate.transport.messages import (
    CudaIpcHandle,
    InitWeights,
    TensorSpec,
    UpdateWeights,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.weight_channels import NamedBuffer, cuda_ipc
from tidegate.transport.weight_channels.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from tidegate.transport.weight_channels.cuda_memory import NamedTensor, find_gpu, host_bytes

pytestmark = pytest.mark.wire

replace = msgspec.structs.replace


@pytest.fixture
def trainer() -> HostGpu:
    return HostGpu()


@pytest.fixture
def engine() -> HostGpu:
    """The same device, as seen by another process."""
    return HostGpu()


@pytest.fixture
def channel(trainer: HostGpu) -> Iterator[CudaIpcSender]:
    channel = CudaIpcSender(trainer)
    yield channel
    channel.close()
    channel.close()
    assert (trainer.shared, trainer.rooms_bytes) == ([], 0)


@pytest.fixture
def end(channel: CudaIpcSender, engine: HostGpu) -> CudaIpcReceiver:
    init = wired(channel.init())
    assert isinstance(init, InitWeights)
    return CudaIpcReceiver(init, engine)


def wired(message: InitWeights | UpdateWeights) -> Any:
    """Encode and decode a message, as the wire does."""
    return decode_from_orchestrator(encode(message))


def tensors(rows: int) -> list[NamedTensor]:
    drawn = torch.Generator().manual_seed(rows)
    return [
        NamedTensor("lm_head.weight", torch.randn(rows, 129, generator=drawn).bfloat16()),
        NamedTensor("transposed", torch.randn(5, rows, generator=drawn).t()),
        NamedTensor("scale", torch.tensor(3.5)),
        NamedTensor("nothing", torch.empty(0, 7)),
        NamedTensor("mask", torch.tensor([True, False, True])),
        NamedTensor("ids", torch.arange(rows)),
    ]


def read(end: CudaIpcReceiver, updates: list[UpdateWeights]) -> dict[str, torch.Tensor]:
    return {
        spec.name: tensor.clone()
        for update in updates
        for spec, tensor in end.tensors(wired(update))
    }


def assert_arrived(found: dict[str, torch.Tensor], sent: list[NamedTensor]) -> None:
    assert list(found) == [tensor.name for tensor in sent]
    for tensor in sent:
        arrived = found[tensor.name]
        assert (arrived.dtype, arrived.shape) == (tensor.data.dtype, tensor.data.shape)
        assert torch.equal(arrived, tensor.data)


def test_each_version_arrives_whatever_its_size_and_the_trainers_tensors_do_later(
    channel: CudaIpcSender, end: CudaIpcReceiver
) -> None:
    for version, rows in enumerate([8, 300, 5, 600]):
        sent = tensors(rows)
        updates = channel.write(version, sent)
        for tensor in sent:
            if tensor.data.dtype.is_floating_point:
                tensor.data.zero_()
        assert [(update.version, update.is_last) for update in updates] == [(version, True)]
        assert_arrived(read(end, updates), tensors(rows))


def test_a_set_larger_than_a_buffer_comes_in_parts_of_which_the_last_says_so(
    channel: CudaIpcSender, end: CudaIpcReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "BUFFER_BYTES", 1000)
    sent = [NamedTensor(f"w{n}", torch.full((size,), n)) for n, size in enumerate([50, 60, 900, 3])]
    updates = channel.write(1, sent)
    assert [[spec.name for spec in update.tensors] for update in updates] == [
        ["w0", "w1"],
        ["w2"],  # larger than any buffer
        ["w3"],
    ]
    assert [update.is_last for update in updates] == [False, False, True]
    assert_arrived(read(end, updates), sent)


def test_the_memory_of_a_version_is_freed_at_both_ends_once_another_takes_its_place(
    channel: CudaIpcSender, end: CudaIpcReceiver, trainer: HostGpu, engine: HostGpu
) -> None:
    size = 2**20
    for version in range(4):
        updates = channel.write(version, [NamedTensor("w", torch.ones(size, dtype=torch.uint8))])
        assert trainer.rooms_bytes == size
        assert len(trainer.shared) == 1
        for _, tensor in end.tensors(wired(updates[0])):
            assert engine.mapped == 1
            assert tensor.sum() == size
        del tensor
        assert engine.mapped == 0


def test_a_kept_version_can_be_read_late_and_need_not_have_been_read_before(
    channel: CudaIpcSender, trainer: HostGpu, end: CudaIpcReceiver
) -> None:
    kept = channel.write(1, tensors(50))
    for _ in range(2):  # as if the first attempt had failed
        newest = channel.write(2, tensors(70), keep=[1])
    late = CudaIpcReceiver(wired(channel.init()), HostGpu())
    assert_arrived(read(late, kept), tensors(50))
    assert_arrived(read(late, newest), tensors(70))
    assert_arrived(read(end, kept), tensors(50))
    channel.write(3, tensors(20))
    assert len(trainer.shared) == 1


def test_reading_stops_once_the_version_is_not_wanted(
    channel: CudaIpcSender, end: CudaIpcReceiver, engine: HostGpu
) -> None:
    (update,) = channel.write(1, tensors(9))
    wanted = iter([True, True, False])
    assert [s.name for s, _ in end.tensors(update, lambda: next(wanted))] == [
        "lm_head.weight",
        "transposed",
    ]
    assert engine.mapped == 0


ENGINE = """
import json, sys
from tests.host_gpu import HostGpu
from tidegate.transport.messages import InitWeights, decode_from_orchestrator
from tidegate.transport.weight_channels.cuda_ipc import CudaIpcReceiver
from tidegate.transport.weight_channels.cuda_memory import host_bytes
from zlib import crc32

gpu = HostGpu()
end = CudaIpcReceiver(decode_from_orchestrator(bytes.fromhex(sys.stdin.readline())), gpu)
for line in sys.stdin:
    update = decode_from_orchestrator(bytes.fromhex(line))
    sums = {spec.name: crc32(host_bytes(tensor)) for spec, tensor in end.tensors(update)}
    print(json.dumps([sums, gpu.mapped]), flush=True)
"""


def test_another_process_reads_the_bytes_that_were_sent(channel: CudaIpcSender) -> None:
    sent = tensors(100)
    messages = [channel.init(), *channel.write(1, sent)]
    reported = subprocess.run(
        [sys.executable, "-W", "error", "-c", ENGINE],
        input="".join(encode(message).hex() + "\n" for message in messages),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert reported.stderr == ""
    sums = {tensor.name: crc32(host_bytes(tensor.data)) for tensor in sent}
    assert json.loads(reported.stdout) == [sums, 0]


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        ([NamedTensor("w", torch.empty(2, device="meta"))], "'w' is on meta, .* move the model"),
        ([NamedBuffer("w", "uint8", (2,), memoryview(b"ab"))], "'w' is on the host, .* move the"),
        ([NamedTensor("w", torch.zeros(2, dtype=torch.complex64))], "dtype 'complex64'"),
        ([NamedTensor("w", torch.zeros(2))] * 2, "appears twice"),
    ],
)
def test_a_sender_refuses_what_no_engine_would_take_and_keeps_what_it_has(
    channel: CudaIpcSender,
    end: CudaIpcReceiver,
    spoilt: list[NamedTensor | NamedBuffer],
    why: str,
) -> None:
    updates = channel.write(1, tensors(5))
    with pytest.raises(WeightsRefused, match=why):
        channel.write(2, spoilt)
    assert_arrived(read(end, updates), tensors(5))


def test_a_set_for_which_there_is_no_room_leaves_none_of_it_behind() -> None:
    trainer = HostGpu(free_bytes=3000)
    channel = CudaIpcSender(trainer)
    large = [NamedTensor("w", torch.zeros(4000, dtype=torch.uint8))]
    kept = channel.write(1, [NamedTensor("w", torch.ones(2000, dtype=torch.uint8))])
    with pytest.raises(WeightsRefused, match="no room for another 4000 bytes"):
        channel.write(2, large, keep=[1])
    assert (len(trainer.shared), trainer.rooms_bytes) == (1, 2000)
    end = CudaIpcReceiver(channel.init(), HostGpu())
    assert read(end, kept)["w"].sum() == 2000
    channel.close()


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"gpu": "another"}, "on GPU 'another', but this engine computes on"),
        ({"gpu": 7}, "on GPU '7'"),
        ({"host": "elsewhere"}, "needs trainer and engine on one host"),
        ({"host": None}, "needs trainer and engine on one host"),
    ],
)
def test_an_engine_on_another_gpu_or_host_refuses_the_channel(
    channel: CudaIpcSender, engine: HostGpu, info: dict[str, Any], why: str
) -> None:
    init = channel.init()
    with pytest.raises(WeightsRefused, match=why):
        CudaIpcReceiver(wired(replace(init, info=init.info | info)), engine)
    with pytest.raises(WeightsRefused):
        CudaIpcReceiver(InitWeights(channel="cuda_ipc"), engine)


def test_an_engine_on_the_cpu_refuses_the_channel(channel: CudaIpcSender) -> None:
    with pytest.raises(WeightsRefused, match="computes on the CPU; start it with --device cuda"):
        CudaIpcReceiver(channel.init(), None)


SPOILT = [
    ({"gpu": "another"}, "on GPU 'another'"),
    ({"handle": b""}, "a handle of 0 bytes"),
    ({"handle": b"\x02c" + bytes(63)}, "a handle of 65 bytes"),
    ({"handle": b"\x02e" + bytes(64)}, "is no GPU memory handle"),
    ({"handle": b"\x02c" + b"\xff" * 64}, "can't be opened"),
    ({"nbytes": 0}, "can't be on a GPU"),
    ({"nbytes": TOTAL_BYTES + 1}, "can't be on a GPU"),
    ({"offset": TOTAL_BYTES}, "can't be on a GPU"),
    ({"offset": 2**63 - 1}, "can't be on a GPU"),
    ({"nbytes": 64}, "outside of the buffer"),
    ({"ref_counter_handle": b"/tidegate-weights"}, "is not a name of torch"),
    ({"ref_counter_handle": b"/torch_1_2_3/../x"}, "is not a name of torch"),
    ({"ref_counter_handle": b"/torch_1_2_3\0"}, "is not a name of torch"),
    ({"ref_counter_offset": 10_000}, "reference counter 10000 does not exist"),
]
"""Invalid fields of a valid handle, with the expected error."""


@pytest.mark.parametrize(("fields", "why"), SPOILT)
def test_memory_that_can_not_be_is_refused_unopened_and_the_next_update_is_read(
    channel: CudaIpcSender,
    end: CudaIpcReceiver,
    engine: HostGpu,
    fields: dict[str, Any],
    why: str,
) -> None:
    (update,) = channel.write(1, tensors(30))
    assert update.ipc_handle is not None
    spoilt = replace(update, ipc_handle=replace(update.ipc_handle, **fields))
    with pytest.raises(WeightsRefused, match=why):
        read(end, [spoilt])
    assert engine.opened == []
    assert_arrived(read(end, [update]), tensors(30))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (TensorSpec("w", "float32", [2], 1024, 8), "outside of the buffer"),
        (TensorSpec("w", "float32", [2], 4, 8), "no multiple of 64"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_before_memory_is_opened(
    channel: CudaIpcSender, end: CudaIpcReceiver, engine: HostGpu, spec: TensorSpec, why: str
) -> None:
    good = NamedTensor("good", torch.zeros(1024, dtype=torch.uint8))
    (update,) = channel.write(1, [good])
    with pytest.raises(WeightsRefused, match=why):
        read(end, [replace(update, tensors=[*update.tensors, spec])])
    with pytest.raises(WeightsRefused, match="has no IPC handle"):
        read(end, [replace(update, ipc_handle=None)])
    assert engine.opened == []


def test_a_frame_whose_memory_has_other_types_is_no_message() -> None:
    memory = CudaIpcHandle(UUID, bytes(66), 64, 0, b"/torch_1_2_3", 0)
    good: list[Any] = msgspec.to_builtins(memory, builtin_types=(bytes,))
    for index, value in ((0, 5), (1, "text"), (2, -1), (3, 2**64 - 1), (4, None), (5, 0.5)):
        reported = {"kind": "update_weights", "version": 1, "location": "", "tensors": []}
        spoilt = [*good[:index], value, *good[index + 1 :]]
        assert decode_from_orchestrator(msgspec.msgpack.encode(reported | {"ipc_handle": good}))
        with pytest.raises(BadFrame):
            decode_from_orchestrator(msgspec.msgpack.encode(reported | {"ipc_handle": spoilt}))


@given(
    st.builds(
        CudaIpcHandle,
        st.sampled_from([UUID, ""]),
        st.binary(max_size=70) | st.builds(lambda tail: b"\x02c" + tail, st.binary(min_size=64)),
        st.integers(0, 2**63 - 1) | st.integers(0, 100),
        st.integers(0, 2**63 - 1) | st.integers(0, 100),
        st.binary(max_size=20) | st.just(b"/torch_1_2_3"),
        st.integers(0, 2**63 - 1) | st.integers(0, 10_001),
    )
)
@settings(deadline=None, max_examples=200)
def test_whatever_memory_a_peer_names_is_refused_without_another_error(
    memory: CudaIpcHandle,
) -> None:
    engine = HostGpu()
    end = CudaIpcReceiver(CudaIpcSender(HostGpu()).init(), engine)
    update = UpdateWeights(version=1, location="", tensors=[], ipc_handle=memory)
    with pytest.raises(WeightsRefused):
        read(end, [update])
    assert engine.opened == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without CUDA")
def test_without_cuda_there_is_no_such_gpu() -> None:
    with pytest.raises(WeightsRefused, match="finds no CUDA device here; set weight_channel"):
        find_gpu("cuda:0")
