"""Tests that a silently broken TCP link is noticed.

tests/orchestrator/trainer/test_network_namespaces.py has the same with links that are really cut.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from tidegate.transport.dealer import DealerSocket
from tidegate.transport.router import RouterSocket
from tidegate.transport.trainer_sockets import TrainerDealer, TrainerRouter
from tidegate.transport.tunnel_exit import TunnelExit
from tidegate.transport.tunnels import TunnelEntrance
from tidegate.transport.weight_channels import relay_node
from tidegate.transport.weight_channels.base import WeightReceiverConfig
from tidegate.transport.weight_channels.relay_node import RelaySockets, Upstream
from tidegate.transport.weight_channels.zmq import ZmqReceiver, ZmqSender
from tidegate.transport.zeromq import KEEPALIVE_INTERVAL_S

pytestmark = pytest.mark.wire

WAIT_S = 60.0

ANYWHERE = "tcp://127.0.0.1:*"

ESTABLISHED, KEEPALIVE = "01", "02"
"""Values in /proc/net/tcp: a connection's state, and the purpose of its timer."""

TICKS_PER_S = 100
"""Clock ticks per second in /proc/net/tcp, on every machine."""


class Link:
    """A proxy to a port of this host, whose connections can be made silent."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._silence = threading.Event()
        """Set when all current connections are to become silent."""
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def fall_silent(self) -> None:
        """Silence the current connections; later ones work."""
        silence, self._silence = self._silence, threading.Event()
        silence.set()

    def close(self) -> None:
        for end in [self._listener, *self._ends]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
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
    monkeypatch.setattr(relay_node, "SENDER_TIMEOUT_S", 1.0)
    link = Link(sender.bind_to_random_port("tcp://127.0.0.1"))
    sockets = RelaySockets(Upstream(link.address, None, None))

    def ask() -> bytes:
        give_up_s = time.monotonic() + WAIT_S
        while time.monotonic() < give_up_s:
            sockets.sender.send(b"where?")
            if sender.poll(100):
                return sender.recv_multipart()[0]
        raise AssertionError("no test asks it")

    before = ask()
    link.fall_silent()
    while sender.poll(0):
        sender.recv_multipart()
    assert ask() != before
    sockets.close()
    link.close()


def engine_and_run(open_: ExitStack) -> str:
    run = open_.enter_context(closing(RouterSocket(ANYWHERE, name="run")))
    open_.enter_context(closing(DealerSocket(run.address, b"engine")))
    return run.address


def trainer_and_run(open_: ExitStack) -> str:
    run = open_.enter_context(closing(TrainerRouter(ANYWHERE)))
    open_.enter_context(closing(TrainerDealer(run.address, identity=b"trainer")))
    return run.address


def tunnel(open_: ExitStack) -> str:
    entrance = open_.enter_context(closing(TunnelEntrance(ANYWHERE, None)))
    far = TunnelExit(entrance.address, "far", None)
    open_.callback(far._socket.close)
    return entrance.address


def weights_by_zmq(open_: ExitStack) -> str:
    sender = open_.enter_context(closing(ZmqSender(ANYWHERE)))
    config = WeightReceiverConfig(address=sender.address.replace("*", "127.0.0.1"))
    open_.enter_context(closing(ZmqReceiver(sender.init(), config)))
    return sender.address


def relay_and_sender(open_: ExitStack) -> str:
    sender = open_.enter_context(closing(ZmqSender(ANYWHERE)))
    address = sender.address.replace("*", "127.0.0.1")
    open_.enter_context(closing(RelaySockets(Upstream(address, None, None))))
    return address


def relay_and_relay(open_: ExitStack) -> str:
    sender = open_.enter_context(closing(ZmqSender(ANYWHERE)))
    up = Upstream(sender.address.replace("*", "127.0.0.1"), None, None)
    first, next_ = (open_.enter_context(closing(RelaySockets(up))) for _ in range(2))
    open_.enter_context(next_.to_parent(first.address))
    return first.address


@pytest.mark.parametrize(
    "connected",
    [
        engine_and_run,
        trainer_and_run,
        tunnel,
        weights_by_zmq,
        relay_and_sender,
        relay_and_relay,
    ],
)
def test_both_ends_of_each_connection_are_asked_by_the_system_whether_they_live(
    connected: Any,
) -> None:
    with ExitStack() as open_:
        port = int(connected(open_).rpartition(":")[2])
        give_up_s = time.monotonic() + WAIT_S
        while not all_are_asked(ends := of_port(port)):
            assert time.monotonic() < give_up_s, ends
            time.sleep(0.01)  # kernel timers give no notification


def of_port(port: int) -> list[tuple[str, float]]:
    """Return the timer's purpose and remaining time for each end of the connections to a port."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    ends = []
    for _, local, remote, state, _, timer, *_ in rows:
        if state == ESTABLISHED and f"{port:04X}" in (local[-4:], remote[-4:]):
            what, ticks = timer.split(":")
            ends.append((what, int(ticks, 16) / TICKS_PER_S))
    return ends


def all_are_asked(ends: list[tuple[str, float]]) -> bool:
    return len(ends) >= 2 and all(
        what == KEEPALIVE and s <= KEEPALIVE_INTERVAL_S for what, s in ends
    )
