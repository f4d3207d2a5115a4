"""Receivers of new weights, from files or from a trainer's process over gloo.

:class:`WeightUpdates` calls a receiver from a thread, because its methods block. A receiver returns
one copy of the weights, whatever the number of engines: the run brings it to all of them.
"""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.orchestrator.weight_sync.tensor_files import read_tensor_file
from tidegate.serving.http.errors import ApiError, UpdateError

if TYPE_CHECKING:
    import torch

RECEIVE_TIMEOUT_S = 300.0
"""Time to wait for a trainer that has announced tensors, or is about to connect; vLLM's store waits
as long."""

SERVER_RANK = 1
"""Rank of the server, which is one process for all engines; the trainer is rank 0."""


class UpdateReceiver:
    """A way to receive weights, by vLLM's phases of a weight update."""

    def connect(self, info: Mapping[str, Any]) -> None:
        """Connect to the trainer that ``init_info`` describes."""
        raise NotImplementedError

    def receive(self, info: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Return the tensors that ``update_info`` announces, in the host's memory."""
        raise NotImplementedError

    def finished(self) -> None:
        """Release what the update needed; it has succeeded or failed."""

    def close(self) -> None:
        """Disconnect from the trainer. Harmless when repeated."""


# ---------------------------------------------------------------- announced tensors


@dataclass(frozen=True, slots=True)
class AnnouncedTensor:
    """Name, dtype and shape of a tensor that the trainer is about to send."""

    name: str
    dtype: "torch.dtype"
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of the tensor's values."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's values."""
        return self.num_elements * self.dtype.itemsize


def announced_tensors(info: Mapping[str, Any]) -> list[AnnouncedTensor]:
    """Return the tensors that ``update_info`` announces, in the order in which they are sent.

    Raises:
        UpdateError: columns are missing or differ in length, or an entry describes no tensor.
    """
    import torch

    try:
        rows = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        tensors = [
            AnnouncedTensor(str(name), getattr(torch, dtype), tuple(map(int, shape)))
            for name, dtype, shape in rows
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UpdateError(
            f"Invalid update_info: names, dtype_names and shapes must be of one length: {error!r}"
        ) from None
    for tensor in tensors:
        if not isinstance(tensor.dtype, torch.dtype) or min(tensor.shape, default=0) < 0:
            raise UpdateError(
                f"Invalid update_info: {tensor.name} must have a torch dtype and a shape of sizes "
                f">= 0, got {tensor!r}"
            )
    return tensors


def unpacked(
    buffer: "torch.Tensor", tensors: Sequence[AnnouncedTensor]
) -> "dict[str, torch.Tensor]":
    """Copy tensors that lie one after another in a buffer of bytes into the host's memory."""
    copies = {}
    start = 0
    for tensor in tensors:
        part = buffer[start : start + tensor.num_bytes].to("cpu", copy=True)
        copies[tensor.name] = part.view(tensor.dtype).view(tensor.shape)
        start += tensor.num_bytes
    return copies


def received(
    announced: Sequence[AnnouncedTensor],
    broadcast: "Callable[[torch.Tensor], None]",
    leave: Callable[[], object],
) -> "dict[str, torch.Tensor]":
    """Return the announced tensors, which the trainer broadcasts one after another.

    ``leave`` is called if one can't come, or the trainer would wait in a broadcast for long.

    Raises:
        UpdateError: they don't fit in memory, or the trainer sent no more.
    """
    import torch

    try:
        tensors = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in announced}
    except (RuntimeError, TypeError) as error:
        leave()
        raise UpdateError(
            f"no memory for the announced tensors: {error}. Send smaller chunks, or free memory of "
            "the server"
        ) from None
    try:
        for tensor in tensors.values():
            broadcast(tensor)
    except RuntimeError as error:
        leave()
        raise UpdateError(
            f"the trainer's broadcast ended before all announced tensors came: {error}. See the "
            "trainer's log"
        ) from None
    return tensors


# ---------------------------------------------------------------- from files


class DiskUpdateReceiver(UpdateReceiver):
    """Reads safetensors: of a file, or of all files in a directory.

    ``update_info`` is ``{"path": …}``, and ``names`` if only some of its tensors are meant.
    """

    def connect(self, info: Mapping[str, Any]) -> None:
        """Check that ``init_info`` is empty: files need no connection."""
        _refuse_unknown(info, (), "init_info")

    def receive(self, info: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Return the tensors of the files that ``update_info`` names."""
        _refuse_unknown(info, ("path", "names"), "update_info")
        path = info.get("path")
        if not isinstance(path, str):
            raise UpdateError(
                "update_info must have a path, of a safetensors file or a directory of them, got "
                f"{path!r:.200}"
            )
        return read_tensors(Path(path), info.get("names"))


def read_tensors(path: Path, names: Any = None) -> "dict[str, torch.Tensor]":
    """Read the tensors of a safetensors file or directory: all, or these ``names``.

    Raises:
        UpdateError: a file can't be read, or a named tensor is missing.
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
        raise UpdateError(
            f"{path} has no tensor {missing[0]!r}, which update_info names ({len(missing)} are "
            "missing)"
        )
    return {name: tensors[name] for name in names}


# ---------------------------------------------------------------- over gloo


class GlooUpdateReceiver(UpdateReceiver):
    """Takes part in broadcasts of a group of two, whose other process is the trainer.

    ``init_info`` is that of vLLM's ``nccl`` backend; ``update_info`` names the tensors in the order
    in which they are sent.
    """

    def __init__(self) -> None:
        self._group: Any = None

    def connect(self, info: Mapping[str, Any]) -> None:
        """Connect to the trainer, which listens or is about to."""
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
        """Return the tensors that the trainer broadcasts, one after another."""
        if self._group is None:
            raise UpdateError("init_weight_transfer_engine must be called before update_weights.")
        _refuse_unknown(info, ("names", "dtype_names", "shapes", "packed"), "update_info")
        _refuse_packed(info)
        return received(announced_tensors(info), partial(broadcast, self._group), self.close)

    def close(self) -> None:
        """Leave the group, which ends with its last user."""
        self._group = None


def gloo_group(address: str, port: int, rank: int) -> Any:
    """Make a process group of two, apart from other groups of this process; rank 0 listens.

    Raises:
        UpdateError: the other process did not connect in time.
    """
    from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=RECEIVE_TIMEOUT_S)
    try:
        store = TCPStore(address, port, 2, is_master=rank == 0, timeout=timeout)
        return ProcessGroupGloo(store, rank, 2, timeout)
    except RuntimeError as error:
        raise UpdateError(f"no trainer at {address}:{port}: {error}") from None


def broadcast(group: Any, tensor: "torch.Tensor") -> None:
    """Send a tensor from rank 0 to rank 1."""
    group.broadcast(tensor, 0).wait()


_OF_NCCL = ("master_address", "nccl_unique_id_b64", "packed", "ipc_handles_pickled")

_NO_NCCL = (
    "the trainer sends weights by vLLM's nccl or ipc, and this server receives them otherwise, as "
    "weight_transfer_config of /server_info says: start it with --weight-transfer nccl or ipc, "
    'on a machine with CUDA; without CUDA a trainer sends {"path": DIRECTORY} to a server of '
    "disk, broadcasts over TCP to one of gloo, or has an adapter loaded"
)


def _refuse_packed(info: Mapping[str, Any]) -> None:
    if info.get("packed"):
        raise ApiError(
            400,
            "over gloo each tensor is broadcast by itself: send packed=false; packed buffers are "
            "of vLLM's nccl backend",
        )


def _refuse_unknown(info: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    if any(name in _OF_NCCL and name not in known for name in info):
        raise ApiError(400, _NO_NCCL, param=what)
    for name in info:
        if name not in known:
            names = ", ".join(known) or "nothing"
            raise UpdateError(f"Invalid {what}: unknown {name!r}; it may have {names}")
