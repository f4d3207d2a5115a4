"""How is memory given back to the system, and had again in the same place?

``madvise(MADV_DONTNEED)`` takes the pages of a tensor away and leaves its address: whoever holds a
view or a pointer holds it still, reads zeros, and has a page again by writing to it. Freeing and
allocating anew would need everybody who holds one to be told. It knows nothing of what the memory
is for. Pages are what is given back, so up to one stays at each end of a tensor.
"""

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

MADV_DONTNEED = 4
"""From <sys/mman.h>."""

CHUNK_BYTES = 64 * 1024 * 1024
"""Written or read between two looks at the time: a tenth of a second of a fast disk's."""

DISK = Path("/var/tmp")
"""What a system keeps on disk: /tmp may be memory itself, from which nothing would be won."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of this process's memory."""

    address: int
    nbytes: int

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes, to be read or written, some at a time."""
        for start in range(0, self.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.nbytes - start)
            yield memoryview((ctypes.c_char * size).from_address(self.address + start)).cast("B")


def regions_of(tensors: Iterable[torch.Tensor]) -> list[Region]:
    """The memory behind these tensors, each piece once; those that need views keep it alive."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return [Region(address, nbytes) for address, nbytes in found.items() if nbytes]


def give_back(regions: Iterable[Region]) -> None:
    """Let the system have these pages; zeros are read there from now on.

    Raises:
        OSError: the system doesn't take them, for they are locked, or huge ones set aside.
    """
    for region in regions:
        start = -(-region.address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (region.address + region.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start >= end:
            continue
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED):
            code = ctypes.get_errno()
            raise OSError(code, f"madvise of {end - start} bytes: {os.strerror(code)}")


def take_again(regions: Iterable[Region], beat: Callable[[], None]) -> None:
    """Have all pages of what was given back, as zeros: now, and not in the midst of a step."""
    for region in regions:
        for chunk in region.chunks():
            np.frombuffer(chunk, np.uint8).fill(0)
            beat()


def trim_heap() -> None:
    """Let the system have what the C library keeps of memory that was freed."""
    if hasattr(_libc, "malloc_trim"):  # glibc's; others keep less
        _libc.malloc_trim(0)


def anonymous_bytes() -> int:
    """What the system counts for this process: its resident pages but for those of files."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


def available_bytes() -> int:
    """What the machine can still hand out without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(errno.ENODATA, "/proc/meminfo tells no MemAvailable")


class OffloadedBytes:
    """What some regions held, in a file without a name: it goes with the process."""

    def __init__(self, regions: Sequence[Region], beat: Callable[[], None]) -> None:
        """Copy them. ``beat`` is called now and then meanwhile.

        Raises:
            OSError: there is no room on the disk.
        """
        self._regions = regions
        file = tempfile.TemporaryFile(dir=_directory(), prefix="tidegate-weights-")  # noqa: SIM115
        self._file = file  # for as long as the weights sleep
        try:
            for region in regions:
                for chunk in region.chunks():
                    self._file.write(chunk)
                    beat()
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def restore(self, beat: Callable[[], None]) -> None:
        """Put all of it back where it was, and forget it.

        Raises:
            OSError: the disk does not give it back.
        """
        self._file.seek(0)
        for region in self._regions:
            for chunk in region.chunks():
                if self._file.readinto(chunk) != len(chunk):
                    raise OSError(errno.EIO, "the file of offloaded weights is cut short")
                beat()
        self.close()

    def close(self) -> None:
        """Forget it. Harmless if repeated."""
        self._file.close()


def _directory() -> Path:
    """$TMPDIR if it is set, for then somebody chose it."""
    if "TMPDIR" not in os.environ and os.access(DISK, os.W_OK):
        return DISK
    return Path(tempfile.gettempdir())
