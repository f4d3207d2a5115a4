"""Safe reads of files whose paths come from others: regular files only, non-blocking, size-limited.

Opening a FIFO blocks until a writer opens it, a device never ends, and a mapped file that is
truncated kills the process with SIGBUS. So a path is opened with O_NONBLOCK, must be a regular
file, and is copied. Key files are not read this way, because shells pass keys through pipes.
"""

import errno
import os
import stat
from pathlib import Path

TEXT_BYTES_MAX = 2**28
"""Maximum size of a configuration, tokenizer or list of facts; the largest tokenizers have 35
MB."""


def open_regular(path: Path | str) -> int:
    """Open a regular file for reading and return its descriptor, which the caller closes.

    Raises:
        OSError: the path does not exist, or is a FIFO, a socket, a device or a directory.
    """
    # O_NONBLOCK: opening a FIFO would block here, before fstat can show that it is one.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


def check_regular(path: Path | str) -> None:
    """Check that a path is a regular file, before it is given to a library that would block on it.

    Raises:
        OSError: as for :func:`open_regular`.
    """
    os.close(open_regular(path))


def check_all_regular(directory: Path) -> None:
    """Check that a model directory holds no entry that a library would block on.

    Raises:
        OSError: one of its JSON, safetensors or Jinja files is not a regular file.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".safetensors", ".jinja") and path.exists():
            check_regular(path)


def read_regular(path: Path | str, bytes_max: int = TEXT_BYTES_MAX) -> bytes:
    """Read a regular file.

    Raises:
        OSError: as for :func:`open_regular`, or the file exceeds ``bytes_max``.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes", str(path))
    return content


def read_exactly(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer from a file, starting at ``offset``.

    Raises:
        OSError: the file is too short; it may have been truncated since it was opened.
    """
    while buffer:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            raise OSError(errno.EIO, f"it ends at byte {offset}, {len(buffer)} bytes too early")
        buffer, offset = buffer[count:], offset + count
