"""Handles of GPU memory are read as facts, whatever else a trainer's pickle holds."""

import base64
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.serving.vllm_server.vllm_serving import CallInPickle
from tidegate.serving.control import ipc_receiver
from tidegate.serving.control.ipc_receiver import IpcUpdateReceiver, read_handles
from tidegate.serving.http.errors import ApiError, UpdateError

pytestmark = pytest.mark.slow

UUID = "5f0c7d3a-0000-4000-8000-000000000001"


def handle(**fields: Any) -> tuple[Any, ...]:
    """What torch's ``reduce_tensor`` says of a tensor of shape [2, 3] on a GPU."""
    reported: dict[str, Any] = {
        "tensor_kind": torch.Tensor,
        "size": torch.Size([2, 3]),
        "stride": (3, 1),
        "offset": 1,
        "storage_kind": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "device": 0,
        "memory": b"m" * 66,
        "storage_bytes": 14,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "counter": b"/torch_123_4567_0",
        "counter_offset": 2,
        "event": b"e" * 64,
        "waits_for_event": True,
    }
    return tuple((reported | fields).values())


def sent(facts: Any) -> str:
    """As vLLM's client over HTTP sends them."""
    return base64.b64encode(pickle.dumps(facts)).decode()


def test_handles_that_torch_makes_are_read() -> None:
    listed = read_handles(sent([{UUID: handle()}, {UUID: handle(dtype=torch.float16)}]))
    assert isinstance(listed, list)
    one = listed[0][UUID]
    assert (one.size, one.stride, one.offset, one.dtype) == ((2, 3), (3, 1), 1, torch.bfloat16)
    assert (one.memory, one.counter, one.event) == (b"m" * 66, b"/torch_123_4567_0", b"e" * 64)
    assert listed[1][UUID].dtype == torch.float16
    packed = read_handles(sent({UUID: handle(tensor_kind=torch.nn.Parameter)}))
    assert isinstance(packed, dict)
    assert list(packed) == [UUID]
    # SkyRL's sender pickles the function, too, which is not called.
    assert read_handles(sent({UUID: (rebuild_cuda_tensor, handle())})) == {UUID: one}


@pytest.mark.parametrize(
    "facts",
    [
        CallInPickle(os.mkdir, "it_was_run"),
        [{UUID: CallInPickle(os.mkdir, "it_was_run")}],
        [{UUID: handle(memory=CallInPickle(bytes, 10))}],
        [{UUID: handle(dtype=CallInPickle(getattr, 5, "real"))}],
        CallInPickle(torch.Tensor, 2**40),
        CallInPickle(torch.zeros, 2**40),
        torch.nn.Module,
    ],
)
def test_nothing_in_a_pickle_is_run(
    facts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ApiError, match="read for CUDA handles and nothing else") as reported:
        read_handles(sent(facts))
    assert reported.value.status == 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"size": (3, 3)}, "ends at byte 20 of a storage of 14"),
        ({"offset": -1}, "must be integers >= 0"),
        ({"stride": (3,)}, "must have a torch dtype"),
        ({"dtype": torch.Tensor}, "must have a torch dtype"),
        ({"counter": b"/tidegate-weights"}, "reference counters"),
        ({"counter": b"/torch_1_2_3/../x"}, "reference counters"),
        ({"counter_offset": 10_000}, "counter 10000 does not exist"),
        ({"event": b"e" * 63}, "an event has 64 bytes, got 63"),
        ({"memory": "text"}, "memory must be bytes, got str"),
        ({"storage_bytes": None}, "storage_bytes must be int, got NoneType"),
    ],
)
def test_a_handle_must_be_whole_and_within_its_memory(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why):
        read_handles(sent([{UUID: handle(**fields)}]))


@pytest.mark.parametrize(
    "pickled", [None, 5, "no base64!", "", base64.b64encode(b"garbage").decode(), sent([[1]])]
)
def test_what_is_no_pickle_of_handles_is_refused(pickled: Any) -> None:
    with pytest.raises(ApiError, match="ipc_handles_pickled"):
        read_handles(pickled)


def doubled(times: int, end: bytes) -> bytes:
    """A pickle of a tuple that holds a tuple twice that holds a tuple twice, and so on."""
    return b"\x80\x04)" + b"q\x00h\x00\x86" * times + end + b"."


LONG_TO_READ = {
    "a key that takes for ever to hash": b"\x80\x04})" + b"q\x00h\x00\x86" * 20 + b"Ns.",
    "a key that takes for ever to print": doubled(20, b""),
    "numbers that take for ever to multiply": pickle.dumps(
        [{UUID: handle(size=(1 << 60_000_000,), stride=(1 << 60_000_000,))}]
    ),
    "a list that holds itself": b"\x80\x04]q\x00h\x00a.",
    "a list that grows where it is held": b"\x80\x04]q\x00h\x00h\x00\x86q\x01h\x00Na.",
    "a size of nothing": b"\x80\x04ctorch\nSize\nK\x05\x85R.",
    "no end": b"\x80\x04]",
    "no beginning": b"\x80\x04a.",
    "a mark as a value": b"\x80\x04(\x85.",
}


@pytest.mark.parametrize("pickled", LONG_TO_READ.values(), ids=LONG_TO_READ)
def test_a_pickle_that_would_keep_the_process_busy_for_ever_is_refused(pickled: bytes) -> None:
    with pytest.raises(ApiError, match="read for CUDA handles and nothing else"):
        read_handles(base64.b64encode(pickled).decode())


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_the_handles_of_ten_thousand_tensors_are_read_of_every_protocol(protocol: int) -> None:
    """Before protocol 3, bytes are pickled as a call of a codec, which is refused."""
    facts = [{UUID: handle()}] * 3 + [{UUID: handle()} for _ in range(10_000)]
    read = read_handles(base64.b64encode(pickle.dumps(facts, protocol)).decode())
    assert len(read) == 10_003


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without CUDA")
def test_without_cuda_a_trainer_gets_an_error_as_it_connects() -> None:
    receiver = IpcUpdateReceiver()
    with pytest.raises(ApiError, match="--weight-transfer gloo or disk") as reported:
        receiver.connect({"packed": True})
    assert reported.value.status == 400


def test_skyrls_chunks_are_cut_by_their_sizes_in_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.arange(8).bfloat16()
    monkeypatch.setattr(ipc_receiver, "_device_uuid", lambda: UUID)
    monkeypatch.setattr(ipc_receiver, "_rebuilt", lambda _: buffer)
    one = handle(size=torch.Size([8]), stride=(1,), offset=0, storage_bytes=16)
    info = {"names": ["a", "b"], "dtype_names": ["bfloat16"] * 2, "shapes": [[2, 3], [2]]}
    info |= {"ipc_handles_pickled": sent({UUID: (rebuild_cuda_tensor, one)})}
    came = IpcUpdateReceiver().receive({**info, "sizes": [6, 2]})
    assert torch.equal(came["a"], buffer[:6].view(2, 3))
    assert torch.equal(came["b"], buffer[6:])
    mixed = {"sizes": [6, 2], "dtype_names": ["bfloat16", "float32"]}
    long = {"sizes": [6, 4], "shapes": [[2, 3], [4]]}
    for wrong, why in (
        ({"sizes": [6, 3]}, "sizes that equal"),
        (mixed, "announced with other dtypes"),
        (long, "or longer and contiguous"),
    ):
        with pytest.raises(UpdateError, match=why):
            IpcUpdateReceiver().receive({**info, **wrong})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_packed", [False, True])
def test_tensors_of_another_process_on_the_gpu_are_copied(is_packed: bool) -> None:
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    reported, done = context.Queue(), context.Event()
    trainer = context.Process(target=share, args=(reported, done, is_packed))
    trainer.start()
    try:
        info, is_wanted = reported.get(timeout=120), {"w": torch.arange(6.0).reshape(2, 3)}
        receiver = IpcUpdateReceiver()
        receiver.connect({"packed": is_packed})
        came = receiver.receive(info)
        receiver.close()
        assert torch.equal(came["w"], is_wanted["w"])
    finally:
        done.set()
        trainer.join(60)


def share(reported: Any, done: Any, is_packed: bool) -> None:
    """What vLLM's trainer does, in a process of its own."""
    from torch.multiprocessing.reductions import reduce_tensor

    tensor = torch.arange(6.0, device="cuda").reshape(2, 3)
    buffer = tensor.reshape(-1).view(torch.uint8).clone() if is_packed else tensor
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    handle = {uuid: reduce_tensor(buffer)[1]}  # type: ignore[no-untyped-call]
    info = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
    sizes = {"tensor_sizes": [24]} if is_packed else {}
    reported.put(info | sizes | {"ipc_handles_pickled": sent(handle if is_packed else [handle])})
    done.wait(120)
