"""How do weights travel by torch.distributed? In rounds of broadcasts, to whoever asks in time.

A process group wants all its members named beforehand, and engines come and go. So whoever wants a
version asks the sender, over ZeroMQ as any other request; those who have asked by the time that all
known receivers have, or :data:`GATHER_S` after the first, make up a round: a group of its own, used
again as long as the same members ask. A round that loses a member fails for all of it; they ask
again, and go on from the byte that all of them have.

gloo moves the bytes between processes of any kind; nccl where each member has a GPU of its own.
NCCL's way has never run: it is written from torch's documentation. **Neither encrypts**: requests
are made with the run's keys, weights travel in the open, so the network must be trusted.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count

NAME = "collective"

GATHER_S = 0.25
"""So long is waited for others to ask for the same."""

PIECE_BYTES = 16 * 1024 * 1024
"""Broadcast at once: each tensor can be used when its last piece is there."""

ROUND_TIMEOUT_S = 30.0
"""Of one piece; a member that is stopped holds all of a round up for so long."""

ATTEMPTS_MAX = 4
"""Rounds that an engine takes part in for one version before it gives up."""

Text = Annotated[str, msgspec.Meta(max_length=256)]


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Engine -> sender: I want what is at ``location``; empty: I will want something some time."""

    location: Text
    have_bytes: Count = 0
    """From the beginning on."""
    gpu: Text = ""
    """Which one it would use; empty: none."""


class Round(msgspec.Struct, frozen=True, array_like=True, tag="round"):
    """Sender -> engine: be ``rank`` of ``size`` in this group. Rank 0 is the sender."""

    location: str
    group: str = ""
    """Its name in the store; one that was used before is the same group again."""
    store: str = ""
    """``tcp://HOST:PORT``, where ``*`` stands for the host that the sender is reached at."""
    backend: str = "gloo"
    rank: Count = 0
    size: Count = 0
    start: Count = 0
    nbytes: Count = 0
    """Bytes [start, nbytes) will come."""
    refusal: str = ""


_encoder = msgspec.msgpack.Encoder()
_join = msgspec.msgpack.Decoder(Join)
_round = msgspec.msgpack.Decoder(Round)


def encode(message: Join | Round) -> bytes:
    """Turn a message into one frame."""
    return _encoder.encode(message)


def decode_join(frame: bytes) -> Join | None:
    """Read a request; None if it is something else."""
    try:
        return _join.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def decode_round(frame: bytes) -> Round:
    """Read the answer.

    Raises:
        BadFrame: it is none.
    """
    try:
        return _round.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"unreadable answer from where weights come from: {error}") from error


# ------------------------------------------------------------ torch, for those who use it


def own_gpu() -> str:
    """The GPU that this process computes on; empty if it has none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


@dataclass(frozen=True, slots=True)
class Member:
    """One process's part in a group."""

    name: str
    group: Any
    """A ``torch.distributed.ProcessGroup`` backend, outside of the default group, which is the
    trainer's."""
    device: str

    def broadcast(self, piece: npt.NDArray[np.uint8]) -> None:
        """Send these bytes, as rank 0; or have them overwritten.

        Raises:
            RuntimeError: a member is gone.
        """
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        host = torch.from_numpy(piece)
        there: torch.Tensor = host.to(self.device)
        self.group.broadcast([there], options).wait()
        if there is not host:
            host.copy_(there)

    def close(self) -> None:
        """Leave, at once: others are not waited for. They see it as an error."""
        with suppress(RuntimeError, AttributeError):
            self.group.abort()


def join_group(round_: Round, store: Any, *, own_host: str | None) -> Member:
    """Meet the other members in ``store``.

    Raises:
        RuntimeError: some didn't come in time.
    """
    import torch.distributed

    dist: Any = torch.distributed  # much of which its type stubs don't know
    timeout = timedelta(seconds=ROUND_TIMEOUT_S)
    place = dist.PrefixStore(round_.group, store)
    if round_.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(place, round_.rank, round_.size, options)
        return Member(round_.group, nccl, "cuda")
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    device = gloo.create_device(hostname=own_host) if own_host else gloo.create_default_device()
    options._devices = [device]
    return Member(round_.group, gloo(place, round_.rank, round_.size, options), "cpu")


def open_store(host: str, port: int, *, listen_fd: int | None = None) -> Any:
    """Where groups meet: made of a listening socket, or reached.

    Raises:
        ImportError: this torch has no torch.distributed.
        RuntimeError: nobody listens there.
    """
    import torch.distributed

    dist: Any = torch.distributed
    return dist.TCPStore(
        host,
        port,
        is_master=listen_fd is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=ROUND_TIMEOUT_S),
        master_listen_fd=listen_fd,
        use_libuv=False,  # which would listen on every interface
    )
