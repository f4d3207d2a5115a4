"""How are broadcasts of NCCL received, from a communicator that torch did not make? By its C calls.

torch.distributed meets its peers in a way of its own, and can't join what vLLM's PyNcclCommunicator
has begun; NCCL itself can, given the same id. It knows no trainer and no tensor's name.
"""

import contextlib
import ctypes
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.orchestrator.vllm_server.failures import ServerError, UpdateError
from tidegate.orchestrator.vllm_server.nccl_meeting import UNIQUE_ID_BYTES

if TYPE_CHECKING:
    import torch

LIBRARY = "libnccl.so.2"
"""As torch's builds for CUDA have loaded it."""

POLL_S = 0.0005
"""How often is looked whether a broadcast has come: nothing beside models of gigabytes."""

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
"""ncclDataType_t, by torch's names."""

_SUM = 0
"""ncclRedOp_t."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


def nccl_library() -> ctypes.CDLL:
    """NCCL, as this process has it.

    Raises:
        ServerError: it has none.
    """
    for name in (LIBRARY, *_installed()):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise ServerError(
        400,
        f"weights by nccl want NCCL, and there is no {LIBRARY} here: it comes with torch's builds "
        "for CUDA; else start the server with --weight-transfer gloo or disk",
    )


def _installed() -> list[str]:
    import importlib.util

    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ImportError:  # no package of that family
        return []
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    return [str(Path(folder) / "lib" / LIBRARY) for folder in folders]


def receiving_device() -> "torch.device":
    """Where broadcasts are received: the process' own GPU.

    Raises:
        ServerError: it has none.
    """
    import torch

    if not torch.cuda.is_available():
        raise ServerError(
            400,
            "weights by nccl want a CUDA device in the server's process, and torch sees none: "
            "start the server with --weight-transfer gloo, by which trainers broadcast over TCP, "
            "or disk",
        )
    return torch.device("cuda", torch.cuda.current_device())


class NcclGroup:
    """The server's place in a communicator of NCCL."""

    def __init__(
        self, library: ctypes.CDLL, unique_id: bytes, *, rank: int, ranks: int, device: Any
    ) -> None:
        """Join; blocks until all ranks have come, however long that takes.

        Raises:
            UpdateError: NCCL says no: two ranks on one GPU, say.
        """
        self._library, self._device = library, device
        self._comm = ctypes.c_void_p()
        identity = _UniqueId()
        ctypes.memmove(ctypes.addressof(identity), unique_id, UNIQUE_ID_BYTES)
        with self._on_device():
            self._check(
                library.ncclCommInitRank(
                    ctypes.byref(self._comm), ctypes.c_int(ranks), identity, ctypes.c_int(rank)
                ),
                "ncclCommInitRank",
            )
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        """All ranks sum one number first: vLLM's communicators do, to be warm."""
        import torch

        number = torch.zeros(1, device=self._device)
        told = torch.empty_like(number)
        with self._on_device():
            code = self._library.ncclAllReduce(
                ctypes.c_void_p(number.data_ptr()),
                ctypes.c_void_p(told.data_ptr()),
                ctypes.c_size_t(1),
                ctypes.c_int(_TYPES["float32"]),
                ctypes.c_int(_SUM),
                self._comm,
                self._stream(),
            )
        self._check(code, "ncclAllReduce")
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def receive(self, tensor: "torch.Tensor", *, patience_s: float) -> None:
        """Fill a tensor of the group's device with what rank 0 broadcasts.

        Raises:
            UpdateError: it did not come in time, or NCCL failed. The group is of no use then.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _TYPES:
            raise UpdateError(f"NCCL broadcasts no {dtype}")
        with self._on_device():
            code = self._library.ncclBroadcast(
                ctypes.c_void_p(),
                ctypes.c_void_p(tensor.data_ptr()),
                ctypes.c_size_t(tensor.numel()),
                ctypes.c_int(_TYPES[dtype]),
                ctypes.c_int(0),
                self._comm,
                self._stream(),
            )
        self._check(code, "ncclBroadcast")
        self._wait(patience_s)

    def _wait(self, patience_s: float) -> None:
        import torch

        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        deadline_s = time.monotonic() + patience_s
        while not stream.query():
            failed = ctypes.c_int()
            self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(failed))
            self._check(failed.value, "a broadcast")
            if time.monotonic() > deadline_s:
                self.close()
                raise UpdateError(f"the trainer broadcast nothing for {patience_s:.0f} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave, in the midst of a broadcast too. Harmless when repeated."""
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

    def _check(self, code: int, what: str) -> None:
        if code == 0:
            return
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        told = self._library.ncclGetErrorString(ctypes.c_int(code))
        raise UpdateError(
            f"NCCL: {what} failed: {(told or b'?').decode(errors='replace')}. Trainer and server "
            "must be on GPUs of their own; NCCL_DEBUG=WARN in the server's environment says more"
        )
