"""Weight channel by shared memory: an anonymous segment (memfd) that engines of this host map.

The publish path writes the segment, the engine's staging reads it. Receivers open it as
``/proc/PID/fd/N``. It has no name in /dev/shm. So it needs no unlinking, the kernel frees it when
the last process that uses it ends in any way, no resource tracker interferes, and a container's
small /dev/shm does not limit it. It only grows and its pages are reused, because the first touch of
a fresh page costs ten times a copy into an old one. Receivers that do not share the sender's /proc
or user need another channel.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.weight_channels.base import (
    ALIGNMENT_BYTES,
    NamedBuffer,
    WeightChannel,
    check_buffers,
    layout,
    views,
)

NAME = "shm"


class ShmSender:
    """Owns the segment, and a writable mapping of it."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("tidegate-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Receivers rely on the size: touching a truncated mapping raises SIGBUS.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._mapping = mmap.mmap(self._fd, mmap.PAGESIZE)
        self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._ranges: dict[int, range] = {}
        """Byte range of each version in the segment: the newest, and the kept ones."""
        self._is_closed = False

    def init(self) -> InitWeights:
        """Return the phase-1 message: the segment's path, and its inode, because a path may be
        reused."""
        return InitWeights(
            channel=NAME, info={"path": self._path, "inode": os.fstat(self._fd).st_ino}
        )

    def write(
        self, version: int, tensors: Sequence[NamedBuffer], *, keep: Collection[int] = ()
    ) -> list[UpdateWeights]:
        """Copy the tensors into the segment beside the kept versions, over all others."""
        check_buffers(tensors)
        kept = {v: occupied for v, occupied in self._ranges.items() if v in keep}
        start = _first_gap(kept.values(), layout(tensors)[1])
        specs, end = layout(tensors, start)
        if end > len(self._mapping):
            self._grow(end)
        self._ranges = {**kept, version: range(start, end)}
        target = np.frombuffer(self._mapping, dtype=np.uint8)
        for spec, tensor in zip(specs, tensors, strict=True):
            if spec.nbytes:  # numpy rejects empty buffers
                source = np.frombuffer(tensor.data.cast("B"), dtype=np.uint8)
                np.copyto(target[spec.offset : spec.offset + spec.nbytes], source)
        return [UpdateWeights(version=version, location=self._path, tensors=specs)]

    def close(self) -> None:
        """Close the segment; the system frees it once no receiver maps it. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._mapping.close()
            os.close(self._fd)

    def _grow(self, nbytes: int) -> None:
        pages = -(-nbytes // mmap.PAGESIZE)
        self._mapping.close()
        os.ftruncate(self._fd, pages * mmap.PAGESIZE)
        self._mapping = mmap.mmap(self._fd, pages * mmap.PAGESIZE)


def _first_gap(used: Iterable[range], nbytes: int) -> int:
    """Return the first offset where ``nbytes`` fit, aligned as all places are."""
    start = 0
    for occupied in sorted(used, key=lambda occupied: occupied.start):
        if start + nbytes <= occupied.start:
            break
        start = max(start, -(-occupied.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return start


class ShmReceiver:
    """Maps a sender's segment, again whenever it has grown."""

    def __init__(self, init: InitWeights) -> None:
        """Open the segment that ``init`` names.

        Raises:
            WeightsRefused: the segment is gone, or not accessible from this process.
        """
        self._path = str(init.info.get("path"))
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsRefused(
                f"can't open shared weights at {self._path!r}: {error.strerror}; is the sender "
                f"alive, on this host, in this PID namespace, and this user's? If it can't be, "
                f"use the weight channel 'disk'"
            ) from error
        if os.fstat(self._fd).st_ino != init.info.get("inode"):
            os.close(self._fd)
            raise WeightsRefused(
                f"{self._path!r} is another segment than the sender's at init; was the sender "
                "restarted? Its engines must join again"
            )
        self._buffer = memoryview(b"")
        self._is_closed = False

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield each tensor of an update as a view of the shared memory, without a copy."""
        if update.location != self._path:
            raise WeightsRefused(
                f"an update is at {update.location!r}, but the segment agreed on at init is "
                f"{self._path!r}"
            )
        if os.fstat(self._fd).st_size > len(self._buffer):
            # Copy-on-write, so that a stray write here cannot change what other engines read.
            self._buffer = memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY))
        return views(update.tensors, self._buffer)

    def close(self) -> None:
        """Close the segment; it stays mapped while a view of it exists. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._buffer = memoryview(b"")
            os.close(self._fd)


CHANNEL = WeightChannel(
    open_sender=lambda config: ShmSender(),
    open_receiver=lambda init, config: ShmReceiver(init),
    one_host=True,
    carries_adapters=True,
)
