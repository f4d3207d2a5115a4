"""Tests that one end of a weight transfer reports the death of the other."""

import io
import socket
import sys

import pytest

from benchmarks.transport.weight_end import plain

pytestmark = pytest.mark.wire


def test_a_weight_receiver_exits_when_its_peer_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    one.send(b"abc")
    one.close()
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    with pytest.raises(ConnectionError, match="gone, 7 bytes early"):
        plain(str(other.detach()), "1", "10")
