"""Is a sender found again behind a link that fell silent, though no end was told?"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from tidegate.transport.weight_channels import relay_sockets
from tidegate.transport.weight_channels.relay_sockets import RelaySockets, Upstream

WAIT_S = 60.0


class Link:
    """A way to a port of this host, whose connections can be made to carry nothing more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._silence = threading.Event()
        """Of all connections there are."""
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def fall_silent(self) -> None:
        """For the connections that there are; the next is another's."""
        silence, self._silence = self._silence, threading.Event()
        silence.set()

    def close(self) -> None:
        for end in [self._listener, *self._ends]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes who reads from it
            end.close()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for way in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._carry, args=(*way, self._silence), daemon=True
                    ).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket, silence: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not silence.is_set():
                    target.sendall(data)


@pytest.fixture
def sender() -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.linger = 0
        yield made


def test_a_relay_asks_over_another_connection_when_one_is_silent(
    sender: "zmq.Socket[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_sockets, "GUIDE_SILENT_S", 1.0)
    link = Link(sender.bind_to_random_port("tcp://127.0.0.1"))
    sockets = RelaySockets(Upstream(link.address, None, None))

    def ask() -> bytes:
        give_up_s = time.monotonic() + WAIT_S
        while time.monotonic() < give_up_s:
            sockets.guide.send(b"where?")
            if sender.poll(100):
                return sender.recv_multipart()[0]
        raise AssertionError("nobody was asked")

    before = ask()
    link.fall_silent()
    while sender.poll(0):
        sender.recv_multipart()
    assert ask() != before
    sockets.close()
    link.close()
