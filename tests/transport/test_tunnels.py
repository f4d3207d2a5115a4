"""Tests of tunnels to another host: bytes, ends, and broken connections."""

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq

from tidegate.transport.security import EngineKeys, ephemeral_keys
from tidegate.transport.tunnel_exit import TunnelExit
from tidegate.transport.tunnels import Tunnel, TunnelEntrance

pytestmark = pytest.mark.wire

WAIT_S = 60.0
"""Timeout far longer than anything here takes."""


class FarEnd:
    """The far end of a tunnel, with its process played by the test."""

    def __init__(self, address: str, name: str, keys: EngineKeys) -> None:
        self.connection, inner = socket.socketpair()
        self.connection.settimeout(WAIT_S)
        read, self.output = os.pipe()
        self.ends = 0

        def end() -> str:
            self.ends += 1
            return "exit status 3"

        def carry() -> None:
            with inner, os.fdopen(read, "rb", buffering=0) as output:
                TunnelExit(address, name, keys).carry(inner, output, end)

        self.thread = threading.Thread(target=carry)
        self.thread.start()

    def stop(self) -> None:
        """End the process."""
        self.connection.close()
        os.close(self.output)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@dataclass
class Near:
    """The near end, and the keys for far ends."""

    entrance: TunnelEntrance
    keys: EngineKeys
    tunnels: list[Tunnel] = field(default_factory=list)

    def open(self) -> Tunnel:
        tunnel = self.entrance.open("far")
        tunnel.connection.settimeout(WAIT_S)
        self.tunnels.append(tunnel)
        return tunnel

    def far_end(self) -> FarEnd:
        return FarEnd(self.entrance.address, "far", self.keys)


@pytest.fixture
def near() -> Iterator[Near]:
    keys, far_keys = ephemeral_keys()
    made = Near(TunnelEntrance("tcp://127.0.0.1:*", keys), far_keys)
    yield made
    made.entrance.close()
    for tunnel in made.tunnels:
        tunnel.connection.close()
        tunnel.output.close()


def received(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count and (part := connection.recv(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def test_megabytes_come_through_both_ways_as_they_were_and_so_does_what_is_printed(
    near: Near,
) -> None:
    tunnel, data = near.open(), random.Random(0).randbytes(3_000_000)
    far = near.far_end()
    far.connection.sendall(b"ready")
    assert received(tunnel.connection, 5) == b"ready"
    sending = threading.Thread(target=tunnel.connection.sendall, args=(data,))
    sending.start()
    assert received(far.connection, len(data)) == data
    sending.join()
    sending = threading.Thread(target=far.connection.sendall, args=(data,))
    sending.start()
    assert received(tunnel.connection, len(data)) == data
    sending.join()
    os.write(far.output, b"last words")
    far.stop()
    assert received(tunnel.connection, 1) == b""
    assert tunnel.output.read() == b"last words"
    assert tunnel.how_it_ended == "exit status 3"


def test_a_near_end_that_says_no_more_lets_the_far_one_end_and_a_kill_does_not_wait(
    near: Near,
) -> None:
    for is_killed in (False, True):
        tunnel = near.open()
        far = near.far_end()
        far.connection.sendall(b"x")
        assert received(tunnel.connection, 1) == b"x"
        if is_killed:
            near.entrance.kill(tunnel)
            far.thread.join(WAIT_S)
            assert not far.thread.is_alive()
            assert tunnel.how_it_ended == "killed"
        else:
            tunnel.connection.shutdown(socket.SHUT_WR)
            assert received(far.connection, 1) == b""
        far.stop()
        assert far.ends == 1
        assert received(tunnel.connection, 1) == b""


@pytest.mark.parametrize("frame", [b"\xc1", msgspec.msgpack.encode([1, "said", b"x"])])
def test_a_piece_that_is_damaged_or_comes_after_a_lost_one_ends_the_tunnel(
    near: Near, frame: bytes
) -> None:
    tunnel = near.open()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IDENTITY, b"far")
        dealer.setsockopt(zmq.CURVE_SERVERKEY, near.keys.orchestrator)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, near.keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, near.keys.secret)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(near.entrance.address)
        dealer.send(frame)
        assert dealer.poll(int(WAIT_S * 1000))
        assert msgspec.msgpack.decode(dealer.recv())[1] == "kill"
    assert received(tunnel.connection, 1) == b""
    assert "lost" in str(tunnel.how_it_ended)


def test_a_far_end_that_is_declared_lost_counts_as_lost_although_it_never_connected(
    near: Near,
) -> None:
    tunnel = near.open()
    near.entrance.lose(tunnel, "its node is gone")
    assert received(tunnel.connection, 1) == b""
    assert tunnel.how_it_ended == "its node is gone"


def test_a_process_that_reads_nothing_is_killed_all_the_same(near: Near) -> None:
    tunnel = near.open()
    far = near.far_end()
    far.connection.sendall(b"x")
    assert received(tunnel.connection, 1) == b"x"
    tunnel.connection.sendall(bytes(8_000_000))  # more than the socket buffers hold
    near.entrance.kill(tunnel)
    far.thread.join(WAIT_S)
    assert not far.thread.is_alive()
    assert far.ends == 1
    far.stop()


def test_a_far_end_that_comes_after_its_tunnel_was_ended_ends_too(near: Near) -> None:
    tunnel = near.open()
    near.entrance.kill(tunnel)
    assert received(tunnel.connection, 1) == b""
    far = near.far_end()
    far.connection.sendall(b"ready")
    far.thread.join(WAIT_S)
    assert not far.thread.is_alive()
    far.stop()


def test_a_process_has_ended_although_what_it_started_prints_on_and_on(near: Near) -> None:
    tunnel = near.open()
    far = near.far_end()
    far.connection.close()
    printed = b"x"
    with suppress(BrokenPipeError):
        while printed:
            os.write(far.output, b"x")
            printed = tunnel.output.read(1)
    far.stop()
    assert received(tunnel.connection, 1) == b""
    assert tunnel.how_it_ended == "exit status 3"
