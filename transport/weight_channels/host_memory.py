"""Shared memory for the engines of one host: memfds passed over an abstract Unix socket.

The process that has bound the abstract socket name is the host's relay; the kernel frees the name
when that process ends, however it ends. Names are per network namespace, so a "host" here is a
network namespace: containers with their own networks count as separate hosts.
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
"""Maximum size of a message, far more than a location and a refusal take."""

CONNECT_TIMEOUT_S = 5.0
"""Time in seconds for which to retry if the name is bound but not listening, which lasts only while
a relay starts or ends."""

CLOSED = -1
"""Value of ``fd`` after closing; never a valid descriptor."""

_RETRY_S = 0.01

_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""


class HostMemory:
    """Writable memory of one version (memfd); any process with the descriptor shares it."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        """Create the memory, or map and take ownership of ``fd``."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if fd is None:
            fd = os.memfd_create("tidegate-relay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            os.ftruncate(fd, size)
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._mapping = mmap.mmap(fd, self.nbytes)

    def view(self, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` bytes; only one process may write to them."""
        return memoryview(self._mapping)[:nbytes]

    def close(self) -> None:
        """Close the descriptor; the system frees the memory once no process maps it. Idempotent."""
        self.fd = _closed(self.fd)


class ReadOnlyHostMemory:
    """Read-only counterpart of :class:`HostMemory`, mapped copy-on-write."""

    def __init__(self, fd: int) -> None:
        """Map the memory, taking ownership of ``fd``."""
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self.nbytes = os.fstat(fd).st_size
        self.buffer = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))

    def close(self) -> None:
        """Close the descriptor; the mapping stays while a view of it exists. Idempotent."""
        self.fd = _closed(self.fd)


def _closed(fd: int) -> int:
    """Close once only: later the number may be another file's."""
    if fd != CLOSED:
        os.close(fd)
    return CLOSED


def listen(name: str) -> socket.socket | None:
    """Bind ``name`` and listen; None if another process has it."""
    unix_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        unix_socket.bind("\0" + name)
        unix_socket.listen()
    except OSError as error:
        unix_socket.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return unix_socket


def connect(name: str) -> socket.socket | None:
    """Connect to the process that has bound ``name``; None if there is none.

    Raises:
        WeightsRefused: the process belongs to another user.
    """
    unix_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        unix_socket.connect("\0" + name)
    except OSError:
        unix_socket.close()
        return None
    if not is_own_user(unix_socket):
        unix_socket.close()
        raise WeightsRefused(
            f"the local name {name!r} is held by another user's process, which is not to be "
            f"trusted with weights; end it, or use the weight channel 'zmq'"
        )
    return unix_socket


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer runs as this process's user (SO_PEERCRED)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.geteuid()


def retry_until(deadline_s: float) -> bool:
    """Sleep briefly; return False if the deadline has passed."""
    time.sleep(_RETRY_S)
    return time.monotonic() < deadline_s
