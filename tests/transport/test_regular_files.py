"""Tests that a path to anything but a regular file is refused without blocking."""

import os
import socket
from pathlib import Path

import pytest

from tidegate.transport.regular_files import check_all_regular, read_exactly, read_regular

pytestmark = pytest.mark.wire


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"content"
    assert read_regular(tmp_path / "file", 7) == b"content"
    with pytest.raises(OSError, match="it has more than 6 bytes"):
        read_regular(tmp_path / "file", 6)


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "device", "directory", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "path.json"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link to a fifo":
            os.mkfifo(tmp_path / "fifo")
            path.symlink_to("fifo")
        case "device":
            path = Path("/dev/zero")
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        read_regular(path)
    if path.parent == tmp_path:
        with pytest.raises(OSError, match=r"not a regular file|No such device"):
            check_all_regular(tmp_path)


def test_a_file_that_was_cut_off_since_it_was_opened_says_where(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with path.open("rb") as file:
        os.truncate(path, 6)
        with pytest.raises(OSError, match="it ends at byte 6, 3 bytes too early"):
            read_exactly(file.fileno(), memoryview(bytearray(7)), 2)
