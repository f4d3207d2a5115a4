"""Rounds of the ``collective`` weight channel: their messages, and torch.distributed's groups.

A process group needs all members in advance, but engines come and go. So an engine requests a
version from the sender over ZeroMQ. The sender collects requests until all known receivers have
asked, or for :data:`GATHER_S` after the first request. These requests form a round with a process
group of its own, which is reused while the members stay the same. If a round loses a member, the
sender notifies all others; they ask again, and continue after the last byte that all of them have.

gloo moves the bytes between processes of any kind; NCCL is used if each member has a GPU of its
own. The NCCL path has never run: it is written from torch's documentation. **Neither encrypts**:
requests use the run's keys, but weights travel unencrypted, so the network must be trusted.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.transport.limits import Count

if TYPE_CHECKING:
    import torch

GATHER_S = 0.25
"""Time in seconds for which a round waits for others to ask for the same version."""

PIECE_BYTES = 16 * 1024 * 1024
"""Size of one broadcast; a tensor can be used once its last piece has arrived."""

ROUND_TIMEOUT_S = 30.0
"""Timeout of one piece; a stopped member delays the whole round by this long."""

POLL_S = 0.1
"""Polling interval for whether the weights are still wanted."""

ATTEMPTS_MAX = 4
"""Number of rounds that an engine tries for one version before it gives up."""

Piece = npt.NDArray[np.uint8]

Text = Annotated[str, msgspec.Meta(max_length=256)]


class RoundRequest(msgspec.Struct, frozen=True, array_like=True, tag="round_request"):
    """Engine -> sender: request for ``location``; if empty, announces an engine that will ask
    later."""

    location: Text
    received_bytes: Count = 0
    """Number of leading bytes that the engine has already."""
    gpu: Text = ""
    """UUID of the GPU that the engine would use; empty: none."""


class RoundAssignment(msgspec.Struct, frozen=True, array_like=True, tag="round_assignment"):
    """Sender -> engine: join this group as ``rank`` of ``size``. Rank 0 is the sender.

    Size 0 means that the round of this group has failed, which gloo does not report to all members.
    """

    location: str
    group: str = ""
    """Name of the group in the store; a name used before is the same group again."""
    store: str = ""
    """``tcp://HOST:PORT`` of the TCPStore; ``*`` stands for the host at which the sender is
    reached."""
    backend: str = "gloo"
    rank: Count = 0
    world_size: Count = 0
    start: Count = 0
    nbytes: Count = 0
    """Bytes [start, nbytes) will be broadcast."""
    refusal: str = ""


# ------------------------------------------------------------ torch.distributed


def own_gpu() -> str:
    """Return the UUID of the GPU that this process computes on; empty if it has none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class BroadcastGroup:
    """Joined torch.distributed process group.

    A gloo collective cannot be interrupted: its ``abort`` wakes no waiting member, and afterwards
    the others no longer notice that this one has left (torch 2.13). So ``abort`` is used for NCCL
    only. Dropping a gloo group waits for the operation in progress.
    """

    def __init__(self, group: Any, device: str) -> None:
        """Wrap a ``torch.distributed.ProcessGroup`` backend that is not part of the default group,
        because that is the trainer's."""
        self._group: Any = group
        self.device = device

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Broadcast ``tensor`` from rank 0; on other ranks, overwrite it.

        Raises:
            RuntimeError: a member is gone.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        staged = tensor.to(self.device)
        self._group.broadcast([staged], options).wait()
        if staged is not tensor:
            tensor.copy_(staged)

    def abort(self) -> None:
        """Abort the operation in progress, on NCCL only."""
        group = self._group
        if group is not None and self.device != "cpu":
            with suppress(RuntimeError):
                group.abort()

    def leave(self) -> None:
        """Drop the process group, which the other members see as an error. Dropping this object is
        not enough, because an exception's traceback may hold it."""
        self.abort()
        self._group = None


class BroadcastMember:
    """One process's membership in a group, on a thread of its own.

    Only that thread blocks in torch, at most :data:`ROUND_TIMEOUT_S`; callers may stop waiting at
    any time. A process that exits meanwhile waits for the thread, because torch would otherwise end
    it with SIGABRT.
    """

    def __init__(
        self, round_: RoundAssignment, store: Callable[[], Any], *, own_host: str | None
    ) -> None:
        """Start joining the group through ``store()``, which may block."""
        self.name = round_.group
        self._group: BroadcastGroup | None = None
        gpu = _current_gpu() if round_.backend == "nccl" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights group")
        self._joined = self._thread.submit(self._join, round_, store, own_host, gpu)

    def broadcast(self, piece: Piece, is_wanted: Callable[[], bool]) -> bool:
        """Broadcast these bytes from rank 0; on other ranks, overwrite them.

        Returns False if the weights are no longer wanted. Close the member then and do not reuse
        the memory, because the operation in progress may still write to it.

        Raises:
            RuntimeError: a member is gone, or did not join.
        """
        future = self._thread.submit(self._broadcast, piece)
        while is_wanted():
            if wait([future], POLL_S).done:
                future.result()
                return True
        return False

    def close(self) -> None:
        """Leave without waiting; the others see an error once the operation in progress has
        ended."""
        with suppress(RuntimeError):  # already closed
            self._thread.submit(self._leave)
            self._thread.shutdown(wait=False)
        group = self._group
        if group is not None:
            group.abort()

    # ------------------------------------------------------------ the thread

    def _join(
        self,
        round_: RoundAssignment,
        store: Callable[[], Any],
        own_host: str | None,
        gpu: int | None,
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
    """Return this thread's current device; it may differ between threads."""
    import torch

    return torch.cuda.current_device()


def join_group(round_: RoundAssignment, store: Any, *, own_host: str | None) -> BroadcastGroup:
    """Create the process group of a round through ``store``.

    Raises:
        RuntimeError: a member did not join in time.
    """
    import torch.distributed

    dist: Any = torch.distributed  # its type stubs are incomplete
    timeout = timedelta(seconds=ROUND_TIMEOUT_S)
    prefix_store = dist.PrefixStore(round_.group, store)
    if round_.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(prefix_store, round_.rank, round_.world_size, options)
        return BroadcastGroup(nccl, "cuda")
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    device = gloo.create_device(hostname=own_host) if own_host else gloo.create_default_device()
    options._devices = [device]
    return BroadcastGroup(gloo(prefix_store, round_.rank, round_.world_size, options), "cpu")


def join_custom_group(
    store: Any, name: str, *, backend: str, rank: int, world_size: int, own_host: str | None
) -> BroadcastGroup:
    """Join a group that SGLang's ``init_custom_process_group`` joins, by torch's key prefixes.

    Raises:
        RuntimeError: a member did not join in time.
    """
    import torch.distributed

    dist: Any = torch.distributed
    prefixed = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    device = "cpu/" if backend == "gloo" else "cuda/"
    round_ = RoundAssignment("", group=device, backend=backend, rank=rank, world_size=world_size)
    return join_group(round_, prefixed, own_host=own_host)


def open_store(host: str, port: int, *, listen_fd: int | None = None) -> Any:
    """Open the TCPStore through which groups meet: serve it on a socket, or connect to it.

    Raises:
        ImportError: this torch has no torch.distributed.
        RuntimeError: the store cannot be reached.
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
        use_libuv=False,  # libuv would listen on every interface
    )
