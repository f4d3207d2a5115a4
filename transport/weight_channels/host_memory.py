"""How do engines of one host share what one of them fetches? Memory passed over a local socket.

It knows descriptors, and which process has a name; not what the bytes are, nor where they come
from. The socket's name is abstract: it belongs to whoever has bound it until that process ends,
however it does, and then to the next. Names are seen by processes of one network namespace, which
is therefore what "host" means here. Containers with networks of their own are hosts of their own.
"""

import errno
import fcntl
import mmap
import os
import socket
import struct
import time

from tidegate.errors import WeightsRefused

MESSAGE_BYTES_MAX = 4096
"""Far more than a location and its reason for not being there take."""

CONNECT_TIMEOUT_S = 5.0
"""A name that is taken, but by nobody who listens, is so for the instant of a death or a birth."""

CLOSED = -1
"""In place of a descriptor; the system has none by that number."""

_RETRY_S = 0.01

_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""


class HostMemory:
    """A version's bytes, in memory without a name; whoever has the descriptor shares them."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        """Make it, or map what ``fd`` leads to, which is taken over."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if fd is None:
            fd = os.memfd_create("tidegate-relay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            os.ftruncate(fd, size)
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._mapping = mmap.mmap(fd, self.nbytes)

    def view(self, nbytes: int) -> memoryview:
        """The first so many bytes, to be written to by one process only."""
        return memoryview(self._mapping)[:nbytes]

    def close(self) -> None:
        """Forget it here; the system does once nobody maps it. Harmless if repeated."""
        self.fd = _closed(self.fd)


class ReadMemory:
    """The same in a process that reads it. What it writes there, nobody else sees."""

    def __init__(self, fd: int) -> None:
        """Takes ``fd`` over."""
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self.nbytes = os.fstat(fd).st_size
        self.buffer = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))

    def close(self) -> None:
        """Let go of it; it stays mapped as long as a view of it lives. Harmless if repeated."""
        self.fd = _closed(self.fd)


def _closed(fd: int) -> int:
    """Close it unless that was done: by then its number may be another file's."""
    if fd != CLOSED:
        os.close(fd)
    return CLOSED


def listen(name: str) -> socket.socket | None:
    """Become the process that ``name`` stands for; None if another one is."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        made.bind("\0" + name)
        made.listen()
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return made


def connect(name: str) -> socket.socket | None:
    """Reach that process; None if there is none.

    Raises:
        WeightsRefused: it is another user's.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.connect("\0" + name)
    except OSError:
        made.close()
        return None
    if not is_own_user(made):
        made.close()
        raise WeightsRefused(
            f"the local name {name!r} is held by another user's process, which is not to be "
            f"trusted with weights; end it, or use the weight channel 'zmq'"
        )
    return made


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end runs as this process does."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1]) == os.geteuid()


def retry_until(deadline_s: float) -> bool:
    """Wait a little; False if it is too late."""
    time.sleep(_RETRY_S)
    return time.monotonic() < deadline_s
