"""Weights from a trainer that speaks vLLM's nccl, by a double of the NCCL library over a socket.

The order of calls is that of vLLM's trainers.
"""

import base64
import ctypes
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.nccl_double import built
from tests.serving.vllm_server.vllm_serving import CallInPickle
from tidegate.serving.control.nccl_receiver import (
    NcclUpdateReceiver,
    read_rendezvous,
    read_unique_id,
    unique_id,
)
from tidegate.serving.control.receivers import announced_tensors
from tidegate.serving.http.errors import ApiError, UpdateError
from tidegate.transport.weight_channels.cuda_nccl import packs

pytestmark = pytest.mark.wire

WRAPPER = "vllm.distributed.device_communicators.pynccl_wrapper"
"""Where vLLM has the C struct that it pickles."""

DTYPES = {torch.float32: 7, torch.bfloat16: 9, torch.uint8: 1}

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "odd": torch.tensor([7, 8, 9], dtype=torch.uint8),
    "b": torch.arange(4.0).bfloat16(),
    "none": torch.empty(0, 4),
    "c": torch.arange(5.0) - 2,
}


class ncclUniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(built(tmp_path_factory.mktemp("nccl"))))


@pytest.fixture
def identity() -> Iterator[ncclUniqueId]:
    """A new communicator's, as ncclGetUniqueId would give it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = ncclUniqueId()
        path = f"{folder}/wire".encode()
        ctypes.memmove(made.internal, path, len(path))
        yield made


def pickled(identity: ncclUniqueId, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """As vLLM's StatelessProcessGroup pickles it: by a module that isn't installed here."""
    module: Any = types.ModuleType(WRAPPER)
    module.ncclUniqueId = ncclUniqueId
    with monkeypatch.context() as context:
        for end in range(1, WRAPPER.count(".") + 2):
            context.setitem(sys.modules, ".".join(WRAPPER.split(".")[:end]), module)
        context.setattr(ncclUniqueId, "__module__", WRAPPER)
        return pickle.dumps(identity)


class Trainer:
    """Rank 0, in a thread of its own, by calls of its own."""

    def __init__(self, library: ctypes.CDLL, identity: ncclUniqueId, send: Callable[..., None]):
        self._library, self._identity, self._send = library, identity, send
        self._comm = ctypes.c_void_p()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            comm = ctypes.byref(self._comm)
            assert self._library.ncclCommInitRank(comm, 2, self._identity, 0) == 0
            number = torch.ones(1)
            at = ctypes.c_void_p(number.data_ptr())
            n = ctypes.c_size_t(1)
            assert self._library.ncclAllReduce(at, at, n, 7, 0, self._comm, None) == 0
            self._send(self.broadcast)
            self._library.ncclCommAbort(self._comm)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error

    def broadcast(self, tensor: torch.Tensor) -> None:
        at = ctypes.c_void_p(tensor.data_ptr())
        count = ctypes.c_size_t(tensor.numel())
        dtype = DTYPES[tensor.dtype]
        assert self._library.ncclBroadcast(at, at, count, dtype, 0, self._comm, None) == 0

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None


def one_by_one(broadcast: Callable[[torch.Tensor], None]) -> None:
    for tensor in TENSORS.values():
        broadcast(tensor)


def packed(broadcast: Callable[[torch.Tensor], None]) -> None:
    """Buffers of more than 20 bytes: 24; 3 + 8 + 0 + 20."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in TENSORS.values()]
    broadcast(flat[0])
    broadcast(torch.cat(flat[1:]))


def announcement(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


def by_id(identity: ncclUniqueId) -> dict[str, Any]:
    reported = base64.b64encode(bytes(identity)).decode()
    return {"nccl_unique_id_b64": reported, "rank_offset": 1, "world_size": 2}


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_trainer_met_at_its_store_sends_what_it_announced(
    library: ctypes.CDLL,
    identity: ncclUniqueId,
    monkeypatch: pytest.MonkeyPatch,
    is_packed: bool,
) -> None:
    ready = TCPStore(
        "127.0.0.1", 0, 2, True, timedelta(seconds=60), wait_for_workers=False, use_libuv=False
    )
    reported: Any = pickled(identity, monkeypatch)  # bytes, which the store's types don't have
    ready.set("broadcast_from/0/0", reported)
    trainer = Trainer(library, identity, packed if is_packed else one_by_one)
    receiver = NcclUpdateReceiver(library, torch.device("cpu"))
    where = {"master_address": "127.0.0.1", "master_port": ready.port}
    wire = {"packed": True, "packed_buffer_size_bytes": 20, "packed_num_buffers": 2}
    receiver.connect(where | {"rank_offset": 1, "world_size": 2} | (wire if is_packed else {}))
    came = receiver.receive(announcement(TENSORS))
    trainer.join()
    receiver.close()
    assert list(came) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert came[name].dtype == tensor.dtype
        assert torch.equal(came[name], tensor)


def test_older_trainers_say_packed_with_each_update_and_give_the_id_away_themselves(
    library: ctypes.CDLL, identity: ncclUniqueId
) -> None:
    trainer = Trainer(library, identity, packed)
    receiver = NcclUpdateReceiver(library, torch.device("cpu"))
    receiver.connect(by_id(identity))
    wire = {"packed": True, "packed_buffer_size_bytes": 20}
    came = receiver.receive(announcement(TENSORS) | wire)
    trainer.join()
    receiver.close()
    assert all(torch.equal(came[name], tensor) for name, tensor in TENSORS.items())


def test_a_trainer_that_ends_in_the_midst_fails_the_update_and_must_be_met_anew(
    library: ctypes.CDLL, identity: ncclUniqueId
) -> None:
    trainer = Trainer(library, identity, lambda broadcast: broadcast(TENSORS["a"]))
    receiver = NcclUpdateReceiver(library, torch.device("cpu"))
    receiver.connect(by_id(identity))
    with pytest.raises(UpdateError, match="remote process exited"):
        receiver.receive(announcement(TENSORS))
    trainer.join()
    with pytest.raises(UpdateError, match="init_weight_transfer_engine must be called"):
        receiver.receive(announcement(TENSORS))


def test_a_trainer_is_not_left_waiting_for_a_server_without_room_for_its_tensors(
    library: ctypes.CDLL, identity: ncclUniqueId
) -> None:
    trainer = Trainer(library, identity, lambda broadcast: broadcast(TENSORS["a"]))
    receiver = NcclUpdateReceiver(library, torch.device("cpu"))
    receiver.connect(by_id(identity))
    huge = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2**60]]}
    with pytest.raises(UpdateError, match="no memory for the announced tensors"):
        receiver.receive(huge)
    with pytest.raises(AssertionError):  # its broadcast fails
        trainer.join()
    assert trainer.error is not None


def test_what_is_packed_together_exceeds_the_buffer_by_one_tensor_at_most() -> None:
    def names(buffer_bytes: int) -> list[list[str]]:
        return list(packs(TENSORS, lambda name: TENSORS[name].nbytes, buffer_bytes))

    assert names(20) == [["a"], ["odd", "b", "none", "c"]]
    assert names(10**9) == [list(TENSORS)]
    assert list(packs([], len, 10)) == []


def test_an_id_is_read_out_of_a_pickle_and_nothing_in_it_is_run(
    identity: ncclUniqueId,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_unique_id(pickled(identity, monkeypatch)) == bytes(identity)
    for wrong in [
        CallInPickle(os.mkdir, "it_was_run"),
        b"short",
        5,
        {"ncclUniqueId": 1},
        ctypes.c_int(3),
        ncclUniqueId,
    ]:
        with pytest.raises(UpdateError, match="ncclUniqueId"):
            read_unique_id(pickle.dumps(wrong))
    for bytes_ in [b"", b"garbage", pickle.dumps(identity)[:-20]]:
        with pytest.raises(UpdateError, match="ncclUniqueId"):
            read_unique_id(bytes_)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"rank_offset": 0}, "rank_offset must be 1"),
        ({"rank_offset": 2}, "rank_offset must be 1"),
        ({"nccl_unique_id_b64": "AAAA"}, "must be 128 bytes, got 3"),
        ({"nccl_unique_id_b64": "no base64!"}, "Invalid init_info"),
        ({"master_address": "127.0.0.1", "master_port": 1}, "either master_address"),
        ({"nccl_unique_id_b64": None}, "either master_address"),
        ({"world_size": "many"}, "Invalid init_info"),
        ({"port": 3}, "unknown 'port'"),
        ({"packed_buffer_size_bytes": 0}, "must be positive"),
    ],
)
def test_a_meeting_that_cant_be_is_refused(
    identity: ncclUniqueId, wrong: dict[str, Any], why: str
) -> None:
    with pytest.raises(UpdateError, match=why):
        read_rendezvous(by_id(identity) | wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"names": ["a"]}, "one length"),
        ({"dtype_names": ["nothing"] * 5}, "one length"),
        ({"dtype_names": ["zeros"] * 5}, "must have a torch dtype"),
        ({"shapes": [[-1]] * 5}, "must have a torch dtype"),
        ({"shapes": [5] * 5}, "one length"),
    ],
)
def test_tensors_that_cant_be_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UpdateError, match=why):
        announced_tensors(announcement(TENSORS) | wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without CUDA")
def test_without_cuda_the_trainer_gets_the_option_to_start_the_server_with(
    identity: ncclUniqueId,
) -> None:
    with pytest.raises(ApiError, match="--weight-transfer gloo") as reported:
        NcclUpdateReceiver().connect(by_id(identity))
    assert reported.value.status == 400
    with pytest.raises(UpdateError, match="init_weight_transfer_engine must be called"):
        NcclUpdateReceiver().receive(announcement(TENSORS))


VLLM_TRAINER = """
import ctypes, sys
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup
identity = ncclUniqueId()
ctypes.memmove(identity.internal, bytes(range(128)), 128)
group = StatelessProcessGroup.create("127.0.0.1", int(sys.argv[1]), 0, 2)
group.broadcast_obj(identity, src=0)
sys.stdin.read()
"""


@pytest.mark.skipif(
    "TIDEGATE_VLLM_PYTHON" not in os.environ,
    reason="TIDEGATE_VLLM_PYTHON must name a Python with vLLM: `make test-vllm`",
)
def test_the_id_that_vllms_own_group_stores_is_read() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    python = os.environ["TIDEGATE_VLLM_PYTHON"]
    command = [python, "-c", VLLM_TRAINER, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as trainer:
        try:
            where = {"master_address": "127.0.0.1", "master_port": port}
            rendezvous = read_rendezvous(where | {"rank_offset": 1, "world_size": 2})
            known, _ = unique_id(rendezvous, timeout_s=300)
        finally:
            trainer.kill()
    assert known == bytes(range(128))
