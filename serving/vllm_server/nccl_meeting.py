"""How does the server meet a trainer that sends by NCCL? By an id of 128 bytes that both know.

vLLM's trainers tell it in one of two ways: at a TCPStore of theirs, where their
StatelessProcessGroup leaves it pickled, or in ``init_info`` itself. It knows no NCCL and no
tensors, and needs no CUDA.
"""

import base64
import binascii
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate.serving.vllm_server.failures import UpdateError
from tidegate.serving.vllm_server.pickled_facts import NotFacts, read_facts
from tidegate.transport.weight_channels.cuda_nccl import UNIQUE_ID_BYTES

ID_KEY = "broadcast_from/0/0"
"""Where a StatelessProcessGroup of vLLM leaves what its rank 0 broadcasts first."""

PACKED_BUFFER_BYTES = 2**30
"""vLLM's, where a trainer names none."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """``init_info`` of vLLM's ``nccl``, read."""

    rank: int
    """The server's; the trainer that sends is 0."""
    ranks: int
    address: str | None
    port: int
    given_id: bytes | None
    """Where it came in ``init_info``: then nobody listens at an address."""
    is_packed: bool
    buffer_bytes: int


_KNOWN = (
    "master_address",
    "master_port",
    "rank_offset",
    "world_size",
    "nccl_unique_id_b64",
    "packed",
    "packed_buffer_size_bytes",
    "packed_num_buffers",
)


def read_meeting(info: Mapping[str, Any]) -> Meeting:
    """What ``init_info`` says.

    Raises:
        UpdateError: it says no meeting, or two.
    """
    for name in info:
        if name not in _KNOWN:
            raise UpdateError(f"Invalid init_info: unknown {name!r}; it may have {_KNOWN}")
    try:
        address, id_b64 = info.get("master_address"), info.get("nccl_unique_id_b64")
        meeting = Meeting(
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
    _check(meeting)
    return meeting


def _check(meeting: Meeting) -> None:
    if not 1 <= meeting.rank < meeting.ranks:
        raise UpdateError(
            f"the server is one process and the trainer rank 0: rank_offset must be 1 to "
            f"world_size - 1, got rank_offset={meeting.rank}, world_size={meeting.ranks}"
        )
    if (meeting.address is None) == (meeting.given_id is None):
        raise UpdateError("init_info has either master_address and port, or nccl_unique_id_b64")
    if meeting.given_id is not None and len(meeting.given_id) != UNIQUE_ID_BYTES:
        raise UpdateError(
            f"nccl_unique_id_b64 must be {UNIQUE_ID_BYTES} bytes, got {len(meeting.given_id)}"
        )
    if meeting.address is not None and not 0 < meeting.port < 2**16:
        raise UpdateError(f"master_port must be a port, got {meeting.port}")
    if meeting.buffer_bytes < 1:
        raise UpdateError(f"packed_buffer_size_bytes must be positive, got {meeting.buffer_bytes}")


def unique_id(meeting: Meeting, *, patience_s: float) -> tuple[bytes, Any]:
    """The communicator's id, and the store that it came from, to be kept as long as the meeting.

    Blocks until the trainer has told it.

    Raises:
        UpdateError: nobody was there in time, or what was told is no id.
    """
    if meeting.given_id is not None:
        return meeting.given_id, None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    patience = datetime.timedelta(seconds=patience_s)
    where = f"{meeting.address}:{meeting.port}"
    try:
        # As vLLM's own workers join: the trainer's store waits until all ranks are there.
        store = TCPStore(
            str(meeting.address), meeting.port, meeting.ranks, is_master=False, timeout=patience
        )
        pickled = store.get(ID_KEY)
    except RuntimeError as error:
        raise UpdateError(f"no trainer at {where}: {error}") from None
    return read_unique_id(bytes(pickled)), store


def read_unique_id(pickled: bytes) -> bytes:
    """The 128 bytes in a pickled ``ncclUniqueId``, a C struct of whatever module has it.

    Raises:
        UpdateError: it is something else.
    """
    try:
        found = read_facts(pickled, _named)
    except NotFacts as error:
        raise UpdateError(f"the trainer told no ncclUniqueId: {error}") from None
    if not isinstance(found, bytes) or len(found) != UNIQUE_ID_BYTES:
        raise UpdateError(f"the trainer told no ncclUniqueId of {UNIQUE_ID_BYTES} bytes")
    return found


def _named(module: str, name: str) -> Any:
    if (module, name) == ("_ctypes", "_unpickle"):
        return _struct_bytes
    return _STRUCT if name == "ncclUniqueId" else None


_STRUCT = object()
"""Stands for the struct's type, which is not imported."""


def _struct_bytes(kind: object, state: object) -> bytes:
    """What ctypes would fill the struct with."""
    match state:
        case ({**rest}, bytes(held)) if kind is _STRUCT and not rest:
            return held
    raise NotFacts("it is a C struct, but no ncclUniqueId")
