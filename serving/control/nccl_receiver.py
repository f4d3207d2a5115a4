"""Receiver of weights from a trainer with vLLM's ``nccl`` backend: NCCL broadcasts, packed or not.

The server's process is one rank of the trainer's communicator. Both join it by NCCL's unique id of
128 bytes, which vLLM's trainers pass in one of two ways: pickled in the TCPStore of their
StatelessProcessGroup, or in ``init_info``.
"""

import base64
import binascii
import ctypes
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.serving.control.receivers import (
    RECEIVE_TIMEOUT_S,
    AnnouncedTensor,
    UpdateReceiver,
    announced_tensors,
    unpacked,
)
from tidegate.serving.control.safe_unpickler import UnsafePickle, read_plain_pickle
from tidegate.serving.http.errors import ApiError, UpdateError
from tidegate.transport.weight_channels.cuda_nccl import (
    UNIQUE_ID_BYTES,
    Communicator,
    NcclFailed,
    nccl_library,
    own_device,
    packs,
)

if TYPE_CHECKING:
    import torch

_UPDATE_FIELDS = (
    "names",
    "dtype_names",
    "shapes",
    "packed",
    "packed_buffer_size_bytes",
    "packed_num_buffers",
)


class NcclUpdateReceiver(UpdateReceiver):
    """Takes part in broadcasts of a communicator whose rank 0 is the trainer.

    ``library`` and ``device`` are NCCL's and the process' own GPU unless given.
    """

    def __init__(
        self, library: ctypes.CDLL | None = None, device: "torch.device | None" = None
    ) -> None:
        self._library, self._device = library, device
        self._group: Communicator | None = None
        self._store: Any = None
        self._rendezvous: Rendezvous | None = None

    def connect(self, info: Mapping[str, Any]) -> None:
        """Join the trainer's communicator."""
        rendezvous = read_rendezvous(info)
        device = self._device or _receiving_device()
        library = self._library or _library()
        self.close()
        known, self._store = unique_id(rendezvous, timeout_s=RECEIVE_TIMEOUT_S)
        try:
            self._group = Communicator(
                library, known, rank=rendezvous.rank, ranks=rendezvous.ranks, device=device
            )
        except NcclFailed as error:
            raise UpdateError(str(error)) from None
        self._rendezvous, self._device, self._library = rendezvous, device, library

    def receive(self, info: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Return the tensors that the trainer broadcasts, in the host's memory."""
        group, rendezvous = self._group, self._rendezvous
        if group is None or rendezvous is None:
            raise UpdateError("init_weight_transfer_engine must be called before update_weights.")
        if strange := [name for name in info if name not in _UPDATE_FIELDS]:
            raise UpdateError(f"Invalid update_info for nccl: unknown {strange[0]!r}")
        announced = announced_tensors(info)
        # Trainers for vLLM before 0.28 name these with each update, later ones in init_info.
        is_packed = bool(info.get("packed", rendezvous.is_packed))
        buffer_bytes = int(info.get("packed_buffer_size_bytes", rendezvous.buffer_bytes))
        try:
            if is_packed:
                return self._packed(group, announced, buffer_bytes)
            return {
                tensor.name: self._broadcast(group, tensor.shape, tensor.dtype).cpu()
                for tensor in announced
            }
        except NcclFailed as error:
            self.close()
            raise UpdateError(str(error)) from None
        except RuntimeError as error:  # or the trainer would wait in a broadcast for ever
            self.close()
            raise UpdateError(
                f"no memory for the announced tensors: {error}. Send smaller chunks, or free GPU "
                "memory"
            ) from None

    def _packed(
        self, group: Communicator, announced: list[AnnouncedTensor], buffer_bytes: int
    ) -> "dict[str, torch.Tensor]":
        import torch

        tensors: dict[str, torch.Tensor] = {}
        for pack in packs(announced, lambda tensor: tensor.num_bytes, buffer_bytes):
            size = sum(tensor.num_bytes for tensor in pack)
            tensors |= unpacked(self._broadcast(group, (size,), torch.uint8), pack)
        return tensors

    def _broadcast(
        self, group: Communicator, shape: tuple[int, ...], dtype: "torch.dtype"
    ) -> "torch.Tensor":
        import torch

        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        group.broadcast(tensor, timeout_s=RECEIVE_TIMEOUT_S)
        return tensor

    def close(self) -> None:
        """Leave the communicator."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()


def _library() -> ctypes.CDLL:
    try:
        return nccl_library()
    except NcclFailed as error:
        raise ApiError(
            400,
            f"weights by nccl want NCCL, and {error}; else start the server with "
            "--weight-transfer gloo or disk",
        ) from None


def _receiving_device() -> "torch.device":
    device = own_device()
    if device is None:
        raise ApiError(
            400,
            "weights by nccl want a CUDA device in the server's process, and torch sees none: "
            "start the server with --weight-transfer gloo, by which trainers broadcast over TCP, "
            "or disk",
        )
    return device


# ---------------------------------------------------------------- meeting the trainer

ID_KEY = "broadcast_from/0/0"
"""Key under which a StatelessProcessGroup of vLLM stores the first broadcast of its rank 0."""

PACKED_BUFFER_BYTES = 2**30
"""vLLM's default size of a packed buffer."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """``init_info`` of vLLM's ``nccl`` backend: where and as which rank to join the trainer."""

    rank: int
    """Rank of the server; the trainer that sends is 0."""
    ranks: int
    """Number of ranks of the communicator, the trainer's included."""
    address: str | None
    """Host of the trainer's TCPStore; None if ``given_id`` is there."""
    port: int
    given_id: bytes | None
    """The communicator's id, if it came in ``init_info``."""
    is_packed: bool
    buffer_bytes: int


_INIT_FIELDS = (
    "master_address",
    "master_port",
    "rank_offset",
    "world_size",
    "nccl_unique_id_b64",
    "packed",
    "packed_buffer_size_bytes",
    "packed_num_buffers",
)


def read_rendezvous(info: Mapping[str, Any]) -> Rendezvous:
    """Read and check an ``init_info``.

    Raises:
        UpdateError: neither an address nor an id is given, or both are.
    """
    for name in info:
        if name not in _INIT_FIELDS:
            raise UpdateError(f"Invalid init_info: unknown {name!r}; it may have {_INIT_FIELDS}")
    try:
        address, id_b64 = info.get("master_address"), info.get("nccl_unique_id_b64")
        rendezvous = Rendezvous(
            rank=int(info["rank_offset"]),
            ranks=int(info["world_size"]),
            address=None if address is None else str(address),
            port=int(info.get("master_port") or 0),
            given_id=None if id_b64 is None else base64.b64decode(id_b64, validate=True),
            is_packed=bool(info.get("packed", False)),
            buffer_bytes=int(info.get("packed_buffer_size_bytes", PACKED_BUFFER_BYTES)),
        )
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UpdateError(f"Invalid init_info for nccl: {error!r}") from None
    _check(rendezvous)
    return rendezvous


def _check(rendezvous: Rendezvous) -> None:
    if not 1 <= rendezvous.rank < rendezvous.ranks:
        raise UpdateError(
            f"the server is one process and the trainer rank 0: rank_offset must be 1 to "
            f"world_size - 1, got rank_offset={rendezvous.rank}, world_size={rendezvous.ranks}"
        )
    if (rendezvous.address is None) == (rendezvous.given_id is None):
        raise UpdateError(
            "init_info must have either master_address and port or nccl_unique_id_b64, got "
            f"{'both' if rendezvous.address is not None else 'neither'}"
        )
    if rendezvous.given_id is not None and len(rendezvous.given_id) != UNIQUE_ID_BYTES:
        raise UpdateError(
            f"nccl_unique_id_b64 must be {UNIQUE_ID_BYTES} bytes, got {len(rendezvous.given_id)}"
        )
    if rendezvous.address is not None and not 0 < rendezvous.port < 2**16:
        raise UpdateError(f"master_port must be a port, got {rendezvous.port}")
    if rendezvous.buffer_bytes < 1:
        raise UpdateError(
            f"packed_buffer_size_bytes must be positive, got {rendezvous.buffer_bytes}"
        )


def unique_id(rendezvous: Rendezvous, *, timeout_s: float) -> tuple[bytes, Any]:
    """Return the communicator's id, and the store that it came from, which must outlive the group.

    Blocks until the trainer has stored the id.

    Raises:
        UpdateError: no trainer was there in time, or it stored something else.
    """
    if rendezvous.given_id is not None:
        return rendezvous.given_id, None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=timeout_s)
    where = f"{rendezvous.address}:{rendezvous.port}"
    try:
        # As vLLM's own workers join: the trainer's store waits until all ranks are there.
        store = TCPStore(
            str(rendezvous.address),
            rendezvous.port,
            rendezvous.ranks,
            is_master=False,
            timeout=timeout,
        )
        pickled = store.get(ID_KEY)
    except RuntimeError as error:
        raise UpdateError(f"no trainer at {where}: {error}") from None
    return read_unique_id(bytes(pickled)), store


def read_unique_id(pickled: bytes) -> bytes:
    """Return the 128 bytes of a pickled ``ncclUniqueId``, a C struct of any module.

    Raises:
        UpdateError: the pickle holds something else.
    """
    try:
        found = read_plain_pickle(pickled, _named)
    except UnsafePickle as error:
        raise UpdateError(
            f"the trainer must store a pickled ncclUniqueId, and it can't be read: {error}"
        ) from None
    if not isinstance(found, bytes) or len(found) != UNIQUE_ID_BYTES:
        raise UpdateError(
            f"the trainer must store an ncclUniqueId of {UNIQUE_ID_BYTES} bytes, got "
            f"{len(found) if isinstance(found, bytes) else type(found).__name__}"
        )
    return found


def _named(module: str, name: str) -> Any:
    if (module, name) == ("_ctypes", "_unpickle"):
        return _struct_bytes
    return _STRUCT if name == "ncclUniqueId" else None


_STRUCT = object()
"""Stand-in for the struct's type, which is not imported."""


def _struct_bytes(kind: object, state: object) -> bytes:
    """Return the bytes that ctypes would fill the struct with."""
    match state:
        case ({**rest}, bytes(held)) if kind is _STRUCT and not rest:
            return held
    raise UnsafePickle("it must hold ncclUniqueId's bytes, and holds another C struct")
