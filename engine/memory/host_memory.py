"""Host memory for sleep: releases pages to the system, and takes them back at the same address.

``madvise(MADV_DONTNEED)`` drops a tensor's pages and keeps its addresses: views and pointers stay
valid, read zeros, and get pages again when written. Only whole pages are released, so up to one
stays at each end of a tensor.
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
"""Value of ``MADV_DONTNEED`` in Linux' <sys/mman.h>: drops the pages at once."""

CHUNK_BYTES = 64 * 1024 * 1024
"""Bytes copied between two heartbeats: a tenth of a second of a fast disk."""

DISK = Path("/var/tmp")
"""Directory on disk for offloaded weights; /tmp may be tmpfs, which would free nothing."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous piece of this process's memory."""

    address: int
    nbytes: int

    def chunks(self) -> Iterator[memoryview]:
        """Yield the region's bytes in chunks, readable and writable."""
        for start in range(0, self.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.nbytes - start)
            yield memoryview((ctypes.c_char * size).from_address(self.address + start)).cast("B")


def regions_of(tensors: Iterable[torch.Tensor]) -> list[Region]:
    """Return the regions behind these tensors, each once; the tensors must outlive the regions."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return [Region(address, nbytes) for address, nbytes in found.items() if nbytes]


def release(regions: Iterable[Region]) -> None:
    """Release the regions' pages to the system; they read as zeros afterwards.

    Raises:
        OSError: the pages are locked or reserved huge pages.
    """
    for region in regions:
        start = -(-region.address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (region.address + region.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start >= end:
            continue
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED):
            code = ctypes.get_errno()
            raise OSError(code, f"madvise of {end - start} bytes: {os.strerror(code)}")


def reallocate(regions: Iterable[Region], heartbeat: Callable[[], None]) -> None:
    """Write zeros to all released pages now, so that no step has to fault them in."""
    for region in regions:
        for chunk in region.chunks():
            np.frombuffer(chunk, np.uint8).fill(0)
            heartbeat()


def trim_heap() -> None:
    """Release freed memory that the C library keeps."""
    if hasattr(_libc, "malloc_trim"):  # glibc's; others keep less
        _libc.malloc_trim(0)


def anonymous_bytes() -> int:
    """Return this process's resident memory without file-backed pages, in bytes."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


def available_bytes() -> int:
    """Return the machine's ``MemAvailable``: the bytes that can be allocated without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(errno.ENODATA, "/proc/meminfo has no MemAvailable")


class OffloadedBytes:
    """Contents of some regions in an unlinked temporary file, which disappears with the process."""

    def __init__(self, regions: Sequence[Region], heartbeat: Callable[[], None]) -> None:
        """Copy the regions, calling ``heartbeat`` after each chunk.

        Raises:
            OSError: the disk is full.
        """
        self._regions = regions
        file = tempfile.TemporaryFile(dir=_directory(), prefix="tidegate-weights-")  # noqa: SIM115
        self._file = file  # for as long as the weights sleep
        try:
            for region in regions:
                for chunk in region.chunks():
                    self._file.write(chunk)
                    heartbeat()
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def restore(self, heartbeat: Callable[[], None]) -> None:
        """Copy everything back, and discard the file.

        Raises:
            OSError: the file cannot be read.
        """
        self._file.seek(0)
        for region in self._regions:
            for chunk in region.chunks():
                if self._file.readinto(chunk) != len(chunk):
                    raise OSError(errno.EIO, "the file of offloaded weights is truncated")
                heartbeat()
        self.close()

    def close(self) -> None:
        """Discard the file. Harmless if repeated."""
        self._file.close()


def _directory() -> Path:
    """Return ``DISK``, or the temporary directory if $TMPDIR is set or ``DISK`` is not writable."""
    if "TMPDIR" not in os.environ and os.access(DISK, os.W_OK):
        return DISK
    return Path(tempfile.gettempdir())
