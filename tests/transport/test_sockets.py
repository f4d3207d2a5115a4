"""Tests that all messages arrive once and in order, whatever else peers send or do."""

import asyncio
import select
import socket as posix
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import uvloop
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.conftest import WAIT_S, Inbox, stranger_socket
from tidegate.errors import BadFrame, ConfigError
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.limits import SMALL_FRAME_BYTES_MAX
from tidegate.transport.messages import (
    Ack,
    FromOrchestrator,
    Goodbye,
    MessageRejected,
    OrchestratorHeartbeat,
    Shutdown,
    Step,
    TurnsPaused,
    TurnsResumed,
    decode_from_engine,
    encode,
)
from tidegate.transport.router import RouterSocket
from tidegate.transport.zeromq import SocketStatistics

pytestmark = pytest.mark.wire


async def hello(dealer: DealerSocket, inbox: Inbox) -> None:
    """Send one message through, so that the router has the peer's identity."""
    before = len(inbox.frames)
    dealer.send(TurnsResumed())
    await inbox.wait_for(before + 1)


async def test_messages_go_both_ways_with_the_senders_name(router: RouterSocket) -> None:
    dealer = DealerSocket(router.address, b"engine-0")
    inbox = Inbox(router)
    assert dealer.receive(0) == dealer.receive(0.001) == []
    dealer.send(TurnsPaused(mode="keep"))

    [(peer, frame)] = await inbox.wait_for(1)
    assert (peer, decode_from_engine(frame)) == (b"engine-0", TurnsPaused(mode="keep"))
    assert dealer.send(TurnsResumed()) == encode(TurnsResumed())
    dealer.send_again(encode(TurnsResumed()))
    assert [frame for _, frame in (await inbox.wait_for(3))[1:]] == [encode(TurnsResumed())] * 2
    assert router.send(peer, Ack(seq=7))
    assert router.send(peer, Ack(seq=8))
    received = dealer.receive(WAIT_S)
    received += dealer.receive(WAIT_S) if len(received) < 2 else []
    assert received == [Ack(seq=7), Ack(seq=8)]
    assert router.statistics() == SocketStatistics(
        frames=3, bytes=len(frame) + 2 * len(encode(TurnsResumed())), malformed=0
    )
    dealer.close()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_20_000_messages_arrive_in_order_while_each_is_answered(
    router: RouterSocket, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    count = 20_000
    answers: list[int] = []

    def engine() -> None:
        dealer = DealerSocket(router.address, b"engine-0")
        for index in range(count):
            dealer.send(Goodbye(reason=str(index)))
            answers.extend(m.seq for m in dealer.receive(0) if isinstance(m, Ack))
        while len(answers) < count and (late := dealer.receive(WAIT_S)):
            answers.extend(m.seq for m in late if isinstance(m, Ack))
        dealer.close()

    async def orchestrator() -> list[bytes]:
        inbox = Inbox(router, budget=100)
        sent = iter(range(count))
        inbox.on_frame = lambda peer, frame: router.send(peer, Ack(seq=next(sent)))
        frames = await inbox.wait_for(count)
        assert max(inbox.batch_sizes) <= 100
        router.detach()
        return [frame for _, frame in frames]

    thread = threading.Thread(target=engine)
    thread.start()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        frames = runner.run(orchestrator())
    thread.join(60)
    assert frames == [encode(Goodbye(reason=str(index))) for index in range(count)]
    assert answers == list(range(count))


@pytest.mark.parametrize("answers_each", [0, 1])
async def test_all_is_read_of_a_stream_that_comes_one_by_one_and_of_what_comes_after_it(
    router: RouterSocket, answers_each: int
) -> None:
    dealer = DealerSocket(router.address, b"engine-0")
    inbox = Inbox(router)
    sent: list[bytes] = []

    def raise_once(peer: bytes, frame: bytes) -> None:
        inbox.on_frame = lambda peer, frame: None
        loop.call_soon(inbox.arrived.set)
        raise ZeroDivisionError("a callback broke")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: None)
    for index in range(120):
        if index == 60:  # the socket is polled by timer by now, unless each message is answered
            inbox.on_frame = raise_once
            sent.append(dealer.send(TurnsResumed()))
        sent.append(dealer.send(Goodbye(reason=str(index))))
        [*_, (peer, _)] = await inbox.wait_for(len(sent))
        for seq in range(answers_each):
            assert router.send(peer, Ack(seq=seq))
    assert [frame for _, frame in inbox.frames] == sent
    router.detach()
    dealer.send(TurnsPaused(mode="abort"))
    assert select.select([router._socket.FD], [], [], WAIT_S)[0]  # before anyone watches again
    [(_, frame)] = await Inbox(router).wait_for(1)
    assert decode_from_engine(frame) == TurnsPaused(mode="abort")
    dealer.close()


async def test_a_send_that_swallows_the_wakeup_does_not_strand_the_message(
    router: RouterSocket,
) -> None:
    dealer = DealerSocket(router.address, b"engine-0")
    inbox = Inbox(router)
    await hello(dealer, inbox)
    wakeup = router._socket.FD

    dealer.send(TurnsPaused(mode="wait"))
    # the loop has not run, so the socket is unread
    assert select.select([wakeup], [], [], WAIT_S)[0]
    while select.select([wakeup], [], [], 0)[0]:
        router.send(b"engine-0", OrchestratorHeartbeat())

    frames = await inbox.wait_for(2)
    assert decode_from_engine(frames[1][1]) == TurnsPaused(mode="wait")
    dealer.close()


async def test_a_callback_that_raises_loses_its_batch_but_not_the_next() -> None:
    router = RouterSocket(None, name="test")
    dealer = DealerSocket(router.address, b"engine-0")
    loop = asyncio.get_running_loop()
    seen: list[bytes] = []
    errors: list[object] = []
    done = asyncio.Event()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def take(batch: list[tuple[bytes, bytes]]) -> None:
        seen.extend(frame for _, frame in batch)
        if len(seen) == 1:
            raise ZeroDivisionError
        if len(seen) == 5:
            done.set()

    router.attach(loop, take, budget=1)
    for index in range(5):
        dealer.send(Goodbye(reason=str(index)))
    async with asyncio.timeout(WAIT_S):
        await done.wait()
    assert seen == [encode(Goodbye(reason=str(index))) for index in range(5)]
    assert [type(error) for error in errors] == [ZeroDivisionError]
    dealer.close()
    router.close()


async def test_sending_to_a_stranger_or_to_a_killed_peer_says_so(router: RouterSocket) -> None:
    assert not router.send(b"nobody", Shutdown())
    inbox = Inbox(router)
    program = (
        "import sys; from tidegate.transport.dealer import DealerSocket;"
        "from tidegate.transport.messages import TurnsResumed;"
        "dealer = DealerSocket(sys.argv[1], b'engine-0'); dealer.send(TurnsResumed());"
        "dealer.receive(1000)"
    )
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", program, router.address)
    await inbox.wait_for(1)
    assert router.send(b"engine-0", OrchestratorHeartbeat())
    engine.kill()
    await engine.wait()
    async with asyncio.timeout(WAIT_S):
        while router.send(b"engine-0", OrchestratorHeartbeat()):
            await asyncio.to_thread(select.select, [router._socket.FD], [], [], 0.1)


async def test_the_last_messages_of_a_process_arrive_though_it_ends_at_once(
    router: RouterSocket,
) -> None:
    inbox = Inbox(router)
    program = (
        "import sys; from tidegate.transport.dealer import DealerSocket;"
        "from tidegate.transport.messages import Goodbye, Step;"
        "dealer = DealerSocket(sys.argv[1], b'engine-0');"
        "[dealer.send(Goodbye(reason=str(i))) for i in range(5000)];"
        "step = Step(seq=0, version=0, turns=b'', token_ids=bytes(4_000_000), logprobs=b'');"
        "[dealer.send(step) for i in range(8)]; dealer.close()"
    )
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", program, router.address)
    frames = await inbox.wait_for(5008)
    assert frames[4999][1] == encode(Goodbye(reason="4999"))
    last = decode_from_engine(frames[-1][1])
    assert isinstance(last, Step)
    assert len(last.token_ids) == 4_000_000
    assert await engine.wait() == 0


async def test_a_peer_that_comes_back_under_its_name_is_served_on_its_new_connection(
    router: RouterSocket,
) -> None:
    inbox = Inbox(router)
    for _ in range(3):
        dealer = DealerSocket(router.address, b"engine-0")
        await hello(dealer, inbox)
        assert router.send(b"engine-0", Shutdown())
        assert dealer.receive(WAIT_S) == [Shutdown()]
        dealer.close()


def test_an_engine_knows_whether_there_is_a_connection_and_which(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    with closing(DealerSocket(address, b"engine-0")) as dealer:
        for number in (1, 2):
            assert dealer.connection() is None
            with closing(RouterSocket(address, name="test")) as router:
                receive_from(dealer, router)
                assert dealer.connection() == number
            deadline_s = time.monotonic() + WAIT_S
            while dealer.connection() is not None and time.monotonic() < deadline_s:
                dealer.receive(0.01)


def receive_from(dealer: DealerSocket, router: RouterSocket) -> None:
    """Send until a message is received, because messages to a dead connection are lost."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        dealer.send(TurnsResumed())
        if router._socket.poll(50):
            return
    raise AssertionError(f"nothing was heard within {WAIT_S} s")


# ------------------------------------------------------------------------------ malformed messages


MULTIPART = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(messages=st.lists(MULTIPART, min_size=1, max_size=30), budget=st.integers(1, 8))
def test_messages_of_many_frames_are_counted_and_the_others_arrive_as_they_are(
    messages: list[list[bytes]], budget: int
) -> None:
    good = [message[0] for message in messages if len(message) == 1]

    async def run() -> None:
        router = RouterSocket("tcp://127.0.0.1:*", name="test")
        with stranger_socket(zmq.DEALER) as stranger:
            stranger.connect(router.address)
            for message in [*messages, [b"last"]]:
                stranger.send_multipart(message)
            inbox = Inbox(router, budget=budget)
            frames = await inbox.wait_for(len(good) + 1)
        assert [frame for _, frame in frames] == [*good, b"last"]
        assert router.statistics().malformed == len(messages) - len(good)
        router.close()

    asyncio.run(run())


@settings(max_examples=40, deadline=None)
@given(
    noise=st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5),
    claims_length=st.booleans(),
)
def test_bytes_that_are_not_even_zeromq_disturb_no_other_peer(
    noise: list[bytes], claims_length: bool
) -> None:
    async def run() -> None:
        router = RouterSocket("tcp://127.0.0.1:*", name="test")
        dealer = DealerSocket(router.address, b"engine-0")
        inbox = Inbox(router)
        await hello(dealer, inbox)
        host_port = ("127.0.0.1", int(router.address.rpartition(":")[2]))
        with posix.create_connection(host_port) as raw:
            try:
                if claims_length:  # a long frame of 2^62 bytes, behind a true ZMTP 3 greeting
                    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
                    raw.sendall(b"\x02" + (1 << 62).to_bytes(8, "big"))
                for chunk in noise:
                    raw.sendall(chunk)
            except ConnectionError:
                pass  # the router has closed the connection already
        dealer.send(TurnsPaused(mode="keep"))
        # Some noise is a message: ZeroMQ's first protocol had neither greeting nor names.
        while (b"engine-0", encode(TurnsPaused(mode="keep"))) not in inbox.frames:
            await inbox.wait_for(len(inbox.frames) + 1)
        dealer.close()
        router.close()

    asyncio.run(run())


async def test_a_complaint_reaches_the_peer_and_is_counted(router: RouterSocket) -> None:
    dealer = DealerSocket(router.address, b"engine-0")
    await hello(dealer, Inbox(router))
    router.reject(b"engine-0", "what was that?")
    assert dealer.receive(WAIT_S) == [MessageRejected(message="what was that?")]
    assert router.statistics().malformed == 1
    dealer.close()


@settings(max_examples=40, deadline=None)
@given(noise=MULTIPART)
def test_an_engine_skips_what_it_cannot_read_and_complains(noise: list[bytes]) -> None:
    with stranger_socket(zmq.ROUTER) as stranger:
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        dealer = DealerSocket(f"tcp://127.0.0.1:{port}", b"engine-0")
        dealer.send(TurnsResumed())
        stranger.recv_multipart()
        for message in ([encode(Ack(seq=1))], noise, [encode(Ack(seq=2))]):
            stranger.send_multipart([b"engine-0", *message])
        received: list[FromOrchestrator] = []
        while len(received) < 2:
            received += dealer.receive(WAIT_S)
        assert received == [Ack(seq=1), Ack(seq=2)]
        assert dealer.statistics().malformed == 1
        complaint = decode_from_engine(stranger.recv_multipart()[1])
        assert isinstance(complaint, MessageRejected)
        dealer.close()


async def test_a_message_that_no_receiver_accepts_is_refused_before_it_is_sent(
    router: RouterSocket,
) -> None:
    with pytest.raises(
        BadFrame, match="a MessageRejected would be refused by its receiver: a frame of"
    ):
        router.send(b"engine-0", MessageRejected(message="x" * SMALL_FRAME_BYTES_MAX))


@pytest.mark.parametrize("identity", [b"", b"\0x", b"x" * 256])
def test_an_identity_that_zeromq_would_not_take_is_refused(identity: bytes) -> None:
    with pytest.raises(ConfigError, match="1 to 255 bytes"):
        DealerSocket("tcp://127.0.0.1:5555", identity)
