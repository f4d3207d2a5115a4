"""How do new weights reach the server? From files, or from the trainer, over one of its ways.

What it receives is one copy, whatever the number of engines: the run brings it to all of them. It
knows no engines and no versions. A receiver blocks, and is called from a thread.
"""

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from tidegate.errors import ConfigError
from tidegate.orchestrator.weight_sync.tensor_files import read_tensor_file
from tidegate.serving.vllm_server.announced import announced_tensors
from tidegate.serving.vllm_server.failures import ServerError, UpdateError
from tidegate.serving.vllm_server.ipc_receiver import IpcReceiver
from tidegate.serving.vllm_server.nccl_receiver import NcclReceiver

if TYPE_CHECKING:
    import torch

Backend = Literal["disk", "gloo", "nccl", "ipc"]

RECEIVE_TIMEOUT_S = 300.0
"""A trainer that has announced tensors, and sends none for so long, sends none."""

SERVER_RANK = 1
"""The trainer is 0, and the server one process, whatever stands behind it."""


class Receiver(Protocol):
    """One way for weights to come."""

    def connect(self, info: Mapping[str, Any]) -> None:
        """Get ready, as ``init_info`` says."""

    def receive(self, info: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """The tensors that ``update_info`` announces."""

    def finished(self) -> None:
        """The update has ended, well or not: nothing that was received is asked for again."""

    def close(self) -> None:
        """Let go of the trainer. Harmless when repeated."""


def receiver(backend: str) -> Receiver:
    """That of a backend.

    Raises:
        ConfigError: there is no such backend.
    """
    kinds: dict[str, Callable[[], Receiver]] = {
        "disk": DiskReceiver,
        "gloo": GlooReceiver,
        "nccl": NcclReceiver,
        "ipc": IpcReceiver,
    }
    if backend not in kinds:
        raise ConfigError(f"weights come by {' or '.join(get_args(Backend))}, got {backend!r}")
    return kinds[backend]()


class DiskReceiver:
    """Reads safetensors: of a file, or of all files in a directory.

    ``update_info`` is ``{"path": …}``, and ``names`` if only some of its tensors are meant.
    """

    def connect(self, info: Mapping[str, Any]) -> None:
        """There is nothing to connect to."""
        _refuse_unknown(info, (), "init_info")

    def receive(self, info: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Read them."""
        _refuse_unknown(info, ("path", "names"), "update_info")
        path = info.get("path")
        if not isinstance(path, str):
            raise UpdateError("update_info must have a path, of safetensors or their directory")
        return read_tensors(Path(path), info.get("names"))

    def finished(self) -> None:
        """Files are closed as soon as they are read."""

    def close(self) -> None:
        """There is nothing to let go of."""


def read_tensors(path: Path, names: Any = None) -> "dict[str, torch.Tensor]":
    """Copies of the tensors of a file or directory; of all, or of these ``names``.

    Raises:
        UpdateError: they can't be read, or some are not there.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise UpdateError(f"No such file or directory: {path}")
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            tensors |= read_tensor_file(file)
    except (OSError, ValueError, RuntimeError) as error:  # torch's: no memory for so much
        raise UpdateError(f"{path} can't be read: {error}") from None
    if names is None:
        return tensors
    if missing := [name for name in names if name not in tensors]:
        raise UpdateError(f"{path} has no tensor {missing[0]!r}")
    return {name: tensors[name] for name in names}


class GlooReceiver:
    """Takes part in broadcasts of a group of two, whose other process is the trainer.

    ``init_info`` is that of vLLM's ``nccl`` backend; ``update_info`` names the tensors in the order
    in which they are sent.
    """

    def __init__(self) -> None:
        self._group: Any = None

    def connect(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer, which listens already or is about to."""
        known = ("master_address", "master_port", "rank_offset", "world_size", "packed")
        _refuse_unknown(info, known, "init_info")
        try:
            address, port = str(info["master_address"]), int(info["master_port"])
            ranks = int(info.get("world_size", 2)), int(info.get("rank_offset", SERVER_RANK))
        except (KeyError, TypeError, ValueError) as error:
            raise UpdateError(f"Invalid init_info for gloo: {error!r}") from None
        if ranks != (2, SERVER_RANK):
            raise UpdateError(
                f"the server is one process, rank {SERVER_RANK} of 2, as /get_world_size says; "
                f"got world_size={ranks[0]}, rank_offset={ranks[1]}"
            )
        _refuse_packed(info)
        self.close()
        self._group = gloo_group(address, port, SERVER_RANK)

    def receive(self, info: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Take what the trainer broadcasts, tensor after tensor."""
        import torch

        if self._group is None:
            raise UpdateError("init_weight_transfer_engine must be called before update_weights.")
        _refuse_unknown(info, ("names", "dtype_names", "shapes", "packed"), "update_info")
        _refuse_packed(info)
        told = announced_tensors(info)
        try:
            tensors = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in told}
        except RuntimeError as error:
            self.close()  # or the trainer would wait in a broadcast for long
            raise UpdateError(f"there is no room for what was announced: {error}") from None
        try:
            for tensor in tensors.values():
                broadcast(self._group, tensor)
        except RuntimeError as error:
            self.close()
            raise UpdateError(f"the trainer sent no more tensors: {error}") from None
        return tensors

    def finished(self) -> None:
        """The group stays for the next update."""

    def close(self) -> None:
        """The group ends with its last user."""
        self._group = None


def gloo_group(address: str, port: int, rank: int) -> Any:
    """A group of two processes, apart from whatever groups this one has else; rank 0 listens.

    Raises:
        UpdateError: the other one was not there in time.
    """
    from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    patience = datetime.timedelta(seconds=RECEIVE_TIMEOUT_S)
    try:
        store = TCPStore(address, port, 2, is_master=rank == 0, timeout=patience)
        return ProcessGroupGloo(store, rank, 2, patience)
    except RuntimeError as error:
        raise UpdateError(f"no trainer at {address}:{port}: {error}") from None


def broadcast(group: Any, tensor: "torch.Tensor") -> None:
    """From rank 0 to rank 1."""
    group.broadcast(tensor, 0).wait()


_OF_NCCL = ("master_address", "nccl_unique_id_b64", "packed", "ipc_handles_pickled")

_NO_NCCL = (
    "the trainer speaks vLLM's nccl or ipc, and this server takes weights in by another way, as "
    "weight_transfer_config of /server_info says: start it with --weight-transfer nccl or ipc, "
    "on a machine with CUDA"
)


def _refuse_packed(info: Mapping[str, Any]) -> None:
    if info.get("packed"):
        raise ServerError(
            400,
            "over gloo each tensor is broadcast by itself: send packed=false; packed buffers are "
            "of vLLM's nccl backend",
        )


def _refuse_unknown(info: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for name in info:
        if name in _OF_NCCL and name not in known:
            raise ServerError(400, _NO_NCCL, param=what)
        if name not in known:
            names = ", ".join(known) or "nothing"
            raise UpdateError(f"Invalid {what}: unknown {name!r}; it may have {names}")
