"""Tests that a peer that floods, or reads nothing, neither fills memory nor starves others."""

import time
from contextlib import closing

import pytest
import zmq

from tests.transport.conftest import WAIT_S, Inbox, stranger_socket
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import (
    Ack,
    Goodbye,
    MessageRejected,
    Shutdown,
    Step,
    TurnsPaused,
    TurnsResumed,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.router import BYTES_PER_DRAIN, FRAMES_PER_DRAIN, RouterSocket
from tidegate.transport.zeromq import QUEUED_MESSAGES_MAX, REJECTIONS_PER_S_MAX

pytestmark = pytest.mark.wire


async def test_a_flooding_peer_delays_anothers_word_by_a_message_or_two() -> None:
    router = RouterSocket("inproc://flooded", name="test")  # inproc: sent messages have arrived
    with (
        closing(router),
        closing(DealerSocket(router.address, b"flood")) as flood,
        closing(DealerSocket(router.address, b"quiet")) as quiet,
    ):
        for index in range(5000):
            flood.send(Goodbye(reason=str(index)))
        quiet.send(TurnsPaused(mode="keep"))
        inbox = Inbox(router)
        frames = await inbox.wait_for(5001)
    assert [peer for peer, _ in frames].index(b"quiet") <= 2
    assert max(inbox.batch_sizes) <= FRAMES_PER_DRAIN


async def test_a_batch_is_limited_in_bytes_too() -> None:
    router = RouterSocket("inproc://large", name="test")
    step = Step(seq=0, version=0, turns=b"", token_ids=bytes(4_000_000), logprobs=b"")
    with closing(router), closing(DealerSocket(router.address, b"engine-0")) as dealer:
        for _ in range(24):
            dealer.send(step)
        inbox = Inbox(router)
        await inbox.wait_for(24)
    assert max(inbox.batch_sizes) * 4_000_000 < BYTES_PER_DRAIN + 4_000_000


def test_a_peer_whose_messages_are_not_read_is_held_back() -> None:
    router = RouterSocket("tcp://127.0.0.1:*", name="test")
    with closing(router), stranger_socket(zmq.DEALER) as flood:
        flood.sndhwm = 1
        flood.connect(router.address)
        sent = 0
        while flood.poll(500, zmq.POLLOUT):
            flood.send(bytes(4096))
            sent += 1
            assert sent < 2 * QUEUED_MESSAGES_MAX


def test_what_a_peer_does_not_read_is_dropped_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.transport.router.UNREAD_MESSAGES_MAX", 100)
    router = RouterSocket("tcp://127.0.0.1:*", name="test")
    with closing(router), stranger_socket(zmq.DEALER) as deaf:
        deaf.rcvhwm = 1
        deaf.setsockopt(zmq.IDENTITY, b"deaf")
        deaf.connect(router.address)
        deaf.send(encode(TurnsResumed()))
        assert router._socket.poll(int(WAIT_S * 1000))
        router._socket.recv_multipart()
        large = MessageRejected(message="x" * 60_000)  # fills the system's buffers quickly
        assert any(not router.send(b"deaf", large) for _ in range(5000))


async def test_a_peer_that_floods_nonsense_is_answered_now_and_then() -> None:
    router = RouterSocket("tcp://127.0.0.1:*", name="test")
    started_s = time.monotonic()
    with closing(router), stranger_socket(zmq.DEALER) as flood:
        flood.connect(router.address)
        inbox = Inbox(router)
        for _ in range(1000):
            flood.send_multipart([b"two", b"frames"])
        flood.send(b"last")
        await inbox.wait_for(1)
        assert router.statistics().malformed == 1000
        router.send(inbox.frames[0][0], Shutdown())
        answers = 0
        while decode_from_orchestrator(flood.recv()) != Shutdown():
            answers += 1
    elapsed_s = time.monotonic() - started_s
    assert 1 <= answers <= REJECTIONS_PER_S_MAX * (elapsed_s + 1)


def test_an_engine_is_not_kept_from_its_steps_by_a_flood() -> None:
    with stranger_socket(zmq.ROUTER) as stranger:
        stranger.sndhwm = 0
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        with closing(DealerSocket(f"tcp://127.0.0.1:{port}", b"engine-0")) as dealer:
            dealer.send(TurnsResumed())
            stranger.recv_multipart()
            count = 2 * QUEUED_MESSAGES_MAX
            for index in range(count):
                stranger.send_multipart([b"engine-0", encode(Ack(seq=index))])
            received = 0
            while received < count:
                inbox = dealer.receive(WAIT_S)
                assert 0 < len(inbox) <= QUEUED_MESSAGES_MAX
                received += len(inbox)
