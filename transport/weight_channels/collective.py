"""How do weights travel by torch.distributed? In rounds of broadcasts, to whoever asks in time.

A process group wants all its members named beforehand, and engines come and go. So whoever wants a
version asks the sender, over ZeroMQ as any other request; those who have asked by the time that all
known receivers have, or :data:`GATHER_S` after the first, make up a round: a group of its own, used
again as long as the same members ask. A round that loses a member fails for all of it, which the
sender tells them; they ask again, and go on from the byte that all of them have.

gloo moves the bytes between processes of any kind; nccl where each member has a GPU of its own.
NCCL's way has never run: it is written from torch's documentation. **Neither encrypts**: requests
are made with the run's keys, weights travel in the open, so the network must be trusted.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count

if TYPE_CHECKING:
    import torch

NAME = "collective"

GATHER_S = 0.25
"""So long is waited for others to ask for the same."""

PIECE_BYTES = 16 * 1024 * 1024
"""Broadcast at once: each tensor can be used when its last piece is there."""

ROUND_TIMEOUT_S = 30.0
"""Of one piece; a member that is stopped holds all of a round up for so long."""

POLL_S = 0.1
"""How long it goes unnoticed that nobody wants the weights any more."""

ATTEMPTS_MAX = 4
"""Rounds that an engine takes part in for one version before it gives up."""

Piece = npt.NDArray[np.uint8]

Text = Annotated[str, msgspec.Meta(max_length=256)]


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Engine -> sender: I want what is at ``location``; empty: I will want something some time."""

    location: Text
    have_bytes: Count = 0
    """From the beginning on."""
    gpu: Text = ""
    """Which one it would use; empty: none."""


class Round(msgspec.Struct, frozen=True, array_like=True, tag="round"):
    """Sender -> engine: be ``rank`` of ``size`` in this group. Rank 0 is the sender.

    Of size 0: the round of this group has failed, which gloo doesn't tell all who wait in it.
    """

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


class Group:
    """Processes that have met.

    Nobody who waits in a group of gloo's can be woken. Its ``abort`` wakes nobody, and after it the
    others don't notice any more that this one has left (torch 2.13); so it is for NCCL's only.
    Letting go of gloo's waits for what is under way.
    """

    def __init__(self, group: Any, device: str) -> None:
        """``group``: a ``torch.distributed.ProcessGroup`` backend, outside of the default group,
        which is the trainer's."""
        self._group: Any = group
        self.device = device

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Send what is in it, as rank 0; or have it overwritten.

        Raises:
            RuntimeError: a member is gone.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        there = tensor.to(self.device)
        self._group.broadcast([there], options).wait()
        if there is not tensor:
            tensor.copy_(there)

    def abort(self) -> None:
        """End what is under way, where that is NCCL's."""
        group = self._group
        if group is not None and self.device != "cpu":
            with suppress(RuntimeError):
                group.abort()

    def leave(self) -> None:
        """Let go: others see it as an error. To forget this object isn't enough, which an error's
        traceback may hold."""
        self.abort()
        self._group = None


class Member:
    """One process's part in a group, on a thread of its own.

    Only that thread waits for torch, and for :data:`ROUND_TIMEOUT_S` at the longest; whoever waits
    for it may stop when they like. A process that ends meanwhile waits too: torch would end it with
    SIGABRT if it left such a thread behind.
    """

    def __init__(self, round_: Round, store: Callable[[], Any], *, own_host: str | None) -> None:
        """Begin to meet the other members in ``store()``, which may take its time."""
        self.name = round_.group
        self._group: Group | None = None
        gpu = _current_gpu() if round_.backend == "nccl" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights group")
        self._joined = self._thread.submit(self._join, round_, store, own_host, gpu)

    def broadcast(self, piece: Piece, is_wanted: Callable[[], bool]) -> bool:
        """Send these bytes, as rank 0; or have them overwritten.

        False if nobody wants them any more. Then close it, and use the memory for nothing else:
        what is under way may still come.

        Raises:
            RuntimeError: a member is gone, or didn't come.
        """
        sent = self._thread.submit(self._broadcast, piece)
        while is_wanted():
            if wait([sent], POLL_S).done:
                sent.result()
                return True
        return False

    def close(self) -> None:
        """Leave, without waiting: others see it as an error, once what is under way has ended."""
        with suppress(RuntimeError):  # it is closed
            self._thread.submit(self._leave)
            self._thread.shutdown(wait=False)
        group = self._group
        if group is not None:
            group.abort()

    # ------------------------------------------------------------ the thread

    def _join(
        self, round_: Round, store: Callable[[], Any], own_host: str | None, gpu: int | None
    ) -> None:
        import torch

        if gpu is not None:
            torch.cuda.set_device(gpu)
        self._group = join_group(round_, store(), own_host=own_host)

    def _broadcast(self, piece: Piece) -> None:
        import torch

        self._joined.result()
        assert self._group is not None
        self._group.broadcast(torch.from_numpy(piece))

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()


def _current_gpu() -> int:
    """This thread's; another one's may differ."""
    import torch

    return torch.cuda.current_device()


def join_group(round_: Round, store: Any, *, own_host: str | None) -> Group:
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
        return Group(nccl, "cuda")
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    device = gloo.create_device(hostname=own_host) if own_host else gloo.create_default_device()
    options._devices = [device]
    return Group(gloo(place, round_.rank, round_.size, options), "cpu")


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
