"""Reads files from paths that others named: regular files only, without waiting and up to a limit.

Opening a FIFO waits for whoever writes to it, a device never ends, and a mapped file that somebody
truncates ends the process by SIGBUS. So a path is opened without waiting, must be a regular file,
and is copied. Key files are not read by this, for shells pass keys through pipes.
"""

import errno
import os
import stat
from pathlib import Path

TEXT_BYTES_MAX = 2**28
"""Size of a configuration, a tokenizer or a list of facts. The largest tokenizers have 35 MB."""


def open_regular(path: Path | str) -> int:
    """Open a regular file for reading; return its descriptor, to be closed by the caller.

    Raises:
        OSError: there is none, or it is a FIFO, a socket, a device or a directory.
    """
    # O_NONBLOCK: else a FIFO is waited for here, before it is known to be one.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


def check_regular(path: Path | str) -> None:
    """Refuse what a library that is given this path would wait for.

    Raises:
        OSError: as for :func:`open_regular`.
    """
    os.close(open_regular(path))


def check_all_regular(directory: Path) -> None:
    """Refuse a directory of a model with an entry that a library would wait for.

    Raises:
        OSError: one of its JSON or safetensors files is not a regular file.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".safetensors", ".jinja") and path.exists():
            check_regular(path)


def read_regular(path: Path | str, bytes_max: int = TEXT_BYTES_MAX) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as for :func:`open_regular`, or it has more than ``bytes_max``.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes", str(path))
    return content


def read_whole(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer from a file's bytes at ``offset`` on.

    Raises:
        OSError: the file ends before; it may have been truncated since it was opened.
    """
    while buffer:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            raise OSError(errno.EIO, f"it ends at byte {offset}, {len(buffer)} bytes too early")
        buffer, offset = buffer[count:], offset + count
