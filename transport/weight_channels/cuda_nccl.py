"""NCCL broadcasts through its C API, in a communicator that torch did not create.

torch.distributed has its own rendezvous, and cannot join the communicator of vLLM's
PyNcclCommunicator; NCCL itself can, given the same unique id. Rank 0 sends. **NCCL does not
encrypt**, so the network must be trusted.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tidegate.errors import TidegateError

if TYPE_CHECKING:
    import torch

LIBRARY = "libnccl.so.2"
"""Name of the library that torch's CUDA builds load."""

UNIQUE_ID_BYTES = 128
"""Size of NCCL's ncclUniqueId, NCCL_UNIQUE_ID_BYTES."""

POLL_S = 0.0005
"""Polling interval for the end of a broadcast, negligible beside models of gigabytes."""

_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
}
"""ncclDataType_t values by torch's name of the dtype."""

_SUM = 0
"""Value of ncclSum in NCCL's ncclRedOp_t."""

One = TypeVar("One")


class NcclFailed(TidegateError):
    """NCCL is missing, or one of its calls failed; the communicator is unusable then."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


def nccl_library() -> ctypes.CDLL:
    """Load NCCL.

    Raises:
        NcclFailed: it is not installed.
    """
    for name in (LIBRARY, *_installed()):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise NcclFailed(f"{LIBRARY} is missing: it is part of torch's builds for CUDA")


def _installed() -> list[str]:
    import importlib.util

    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ImportError:  # no package of the nvidia family
        return []
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    return [str(Path(folder) / "lib" / LIBRARY) for folder in folders]


def own_device() -> "torch.device | None":
    """Return the process's current GPU; None if it sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def new_unique_id(library: ctypes.CDLL) -> bytes:
    """Create the id that all ranks of a new communicator need; called on rank 0.

    Raises:
        NcclFailed: NCCL finds no usable network.
    """
    identity = _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(identity)), "ncclGetUniqueId")
    return bytes(identity)


def packs(
    items: Iterable[One], num_bytes: Callable[[One], int], buffer_bytes: int
) -> Iterator[list[One]]:
    """Group tensors for packed transfer: the fewest items that exceed ``buffer_bytes``.

    Source: vLLM's packed_tensor.py, whose sender and receiver compute the groups independently.
    """
    together: list[One] = []
    size_bytes = 0
    for one in items:
        together.append(one)
        size_bytes += num_bytes(one)
        if size_bytes > buffer_bytes:
            yield together
            together, size_bytes = [], 0
    if together:
        yield together


class Communicator:
    """This process's rank in a communicator. For one thread at a time, except :meth:`close`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        unique_id: bytes,
        *,
        rank: int,
        ranks: int,
        device: "torch.device",
    ) -> None:
        """Join the communicator; blocks without a timeout until all ranks have joined.

        Raises:
            NcclFailed: NCCL refuses, for example because two ranks share a GPU.
        """
        self._library, self._device, self._rank = library, device, rank
        self._comm = ctypes.c_void_p()
        self._closing = threading.Lock()
        identity = _UniqueId()
        ctypes.memmove(ctypes.addressof(identity), unique_id, UNIQUE_ID_BYTES)
        comm = ctypes.c_void_p()
        with self._on_device():
            code = library.ncclCommInitRank(
                ctypes.byref(comm), ctypes.c_int(ranks), identity, ctypes.c_int(rank)
            )
        _check(library, code, "ncclCommInitRank")
        self._comm = comm
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        """All-reduce one number, because vLLM's communicators do so as a warm-up."""
        import torch

        number = torch.zeros(1, device=self._device)
        total = torch.empty_like(number)
        with self._on_device():
            code = self._library.ncclAllReduce(
                ctypes.c_void_p(number.data_ptr()),
                ctypes.c_void_p(total.data_ptr()),
                ctypes.c_size_t(1),
                ctypes.c_int(_TYPES["float32"]),
                ctypes.c_int(_SUM),
                self._comm,
                self._stream(),
            )
        _check(self._library, code, "ncclAllReduce")
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def broadcast(self, tensor: "torch.Tensor", *, timeout_s: float) -> None:
        """Broadcast a contiguous tensor on the communicator's device from rank 0.

        On other ranks the tensor is overwritten.

        Raises:
            NcclFailed: it did not complete within ``patience_s``, or NCCL failed.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _TYPES:
            raise NcclFailed(f"NCCL broadcasts no {dtype}; publish {', '.join(map(str, _TYPES))}")
        if self._comm.value is None:
            raise NcclFailed("the NCCL communicator of weight updates was closed; connect again")
        there = ctypes.c_void_p(tensor.data_ptr())
        with self._on_device():
            code = self._library.ncclBroadcast(
                there if self._rank == 0 else ctypes.c_void_p(),
                there,
                ctypes.c_size_t(tensor.numel()),
                ctypes.c_int(_TYPES[dtype]),
                ctypes.c_int(0),
                self._comm,
                self._stream(),
            )
        _check(self._library, code, "ncclBroadcast")
        self._wait(timeout_s)

    def _wait(self, timeout_s: float) -> None:
        import torch

        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        deadline_s = time.monotonic() + timeout_s
        while not stream.query():
            failed = ctypes.c_int()
            with self._closing:  # a closed communicator is null here
                self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(failed))
            _check(self._library, failed.value, "a broadcast")
            if time.monotonic() > deadline_s:
                self.close()
                raise NcclFailed(
                    f"the other end of a weight broadcast did not respond for {timeout_s:.0f} s; "
                    "does its process run?"
                )
            time.sleep(POLL_S)
        if self._comm.value is None:
            raise NcclFailed("the NCCL communicator was closed during a broadcast of weights")

    def close(self) -> None:
        """Abort the communicator, even during a broadcast. Idempotent."""
        with self._closing:
            comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value is not None:
            with self._on_device():
                self._library.ncclCommAbort(comm)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        import torch

        is_cuda = self._device.type == "cuda"
        return torch.cuda.device(self._device) if is_cuda else contextlib.nullcontext()

    def _stream(self) -> ctypes.c_void_p:
        import torch

        if self._device.type != "cuda":
            return ctypes.c_void_p()
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)


def _check(library: ctypes.CDLL, code: int, what: str) -> None:
    if code == 0:
        return
    library.ncclGetErrorString.restype = ctypes.c_char_p
    reason = library.ncclGetErrorString(ctypes.c_int(code))
    raise NcclFailed(
        f"NCCL: {what} failed: {(reason or b'?').decode(errors='replace')}. Both ends need a GPU "
        "each; set NCCL_DEBUG=WARN in their environment for details"
    )
