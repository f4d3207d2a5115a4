"""Tests of the relay weight channel: one transfer per host, failover, and keys."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.weight_ends import (
    ORCHESTRATOR,
    RECEIVER_CONFIG,
    WAIT_S,
    Engine,
    as_bytes,
    tensors,
    wait_until,
)
from tidegate.errors import WeightsRefused
from tidegate.transport.messages import InitWeights, UpdateWeights, encode
from tidegate.transport.security import (
    EngineKeys,
    make_keys,
    read_engine_keys,
    read_orchestrator_keys,
)
from tidegate.transport.weight_channels import (
    WeightReceiverConfig,
    receiver,
    relay_node,
    relay_receiver,
)
from tidegate.transport.weight_channels.base import decode_if
from tidegate.transport.weight_channels.base import encode as encode_struct
from tidegate.transport.weight_channels.host_memory import connect
from tidegate.transport.weight_channels.relay import RelayChain, RelaySender
from tidegate.transport.weight_channels.relay_messages import ParentRequest
from tidegate.transport.weight_channels.zmq import (
    CHUNK_BYTES,
    ChunkHeader,
    FetchRequest,
    decode_fetch_request,
)

pytestmark = pytest.mark.wire

DEAD_S = 5.0
"""Five missed keep-alives; fewer might be missed on a busy CPU."""

SIZES = [3, 5 * CHUNK_BYTES + 1, 0, CHUNK_BYTES, 7 * CHUNK_BYTES]
TOTAL_BYTES = 13 * CHUNK_BYTES + 4 * 64
"""Upper bound of the total size, with alignment."""


class Sender(RelaySender):
    """A sender whose network loses requests beyond ``served_bytes``."""

    served_bytes = 1 << 60

    def _reply(self, peer: bytes, frames: list[bytes]) -> None:
        if (
            decode_if(frames, ParentRequest) is None
            and decode_fetch_request(frames).end > self.served_bytes
        ):
            return
        super()._reply(peer, frames)


@pytest.fixture
def weights() -> Iterator[Sender]:
    sender = Sender(ORCHESTRATOR)
    yield sender
    sender.close()


@pytest.fixture(autouse=True)
def _raised_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the liveness timeouts, so that a live relay does not time out on a busy machine."""
    monkeypatch.setattr(relay_node, "PARENT_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(relay_node, "TICK_S", 0.1)


def on_host(weights: RelaySender, host: str, keys: EngineKeys | None = None) -> Engine:
    return Engine(weights, WeightReceiverConfig(ORCHESTRATOR, keys, host))


@pytest.fixture
def engines(weights: Sender) -> Iterator[list[Engine]]:
    """Three hosts with two engines each."""
    with ExitStack() as ending:  # closes all engines, even if one raises
        made = []
        for host in ("a", "b", "c"):
            for _ in range(2):
                made.append(on_host(weights, host))
                ending.callback(made[-1].close)
        yield made


def test_the_sender_sends_once_however_many_hosts_and_engines_there_are(
    weights: Sender, engines: list[Engine]
) -> None:
    for version in (1, 2):
        [update] = weights.write(version, sent := tensors(*SIZES), keep=[version - 1])
        before = weights.sent_bytes
        for got in [engine.fetch(update) for engine in engines]:
            assert got.result(WAIT_S) == as_bytes(sent)
        assert weights.sent_bytes - before == update.tensors[-1].offset + update.tensors[-1].nbytes


def test_an_engine_that_comes_late_gets_what_its_host_has_and_so_does_a_late_host(
    weights: Sender, engines: list[Engine]
) -> None:
    [kept] = weights.write(1, old := tensors(*SIZES))
    engines[0].fetch(kept).result(WAIT_S)
    [newest] = weights.write(2, new := tensors(*SIZES), keep=[1])
    engines[0].fetch(newest).result(WAIT_S)
    before = weights.sent_bytes
    for host in ("a", "d"):
        late = on_host(weights, host)
        assert late.fetch(newest).result(WAIT_S) == as_bytes(new)
        assert late.fetch(kept).result(WAIT_S) == as_bytes(old)
        late.close()
    assert weights.sent_bytes == before


def test_what_is_not_there_any_more_is_refused(weights: Sender, engines: list[Engine]) -> None:
    [old] = weights.write(1, tensors(*SIZES))
    [new] = weights.write(2, sent := tensors(*SIZES))
    refused, taken = engines[0].fetch(old), engines[2].fetch(new)
    with pytest.raises(WeightsRefused, match="not in the sender's memory"):
        refused.result(WAIT_S)
    assert taken.result(WAIT_S) == as_bytes(sent)


def test_memory_is_used_again_on_each_host(weights: Sender) -> None:
    with closing(receiver(weights.init(), RECEIVER_CONFIG)) as end:
        inodes = set()
        for version in range(4):
            [update] = weights.write(version, sent := tensors(*SIZES[:2]), keep=[version - 1])
            assert {s.name: bytes(view) for s, view in end.tensors(update)} == as_bytes(sent)
            inodes.add(end._memory.inode)  # type: ignore[attr-defined]
        assert len(inodes) == 2


def test_a_relay_that_ends_while_it_is_being_closed_is_closed(weights: Sender) -> None:
    engine = on_host(weights, "a")
    node = engine._end._node  # type: ignore[attr-defined]
    node._is_closing = True
    node._thread.join(WAIT_S)  # the thread checks the flag before it is woken
    node._is_closing = False
    engine.close()


# ------------------------------------------------------------------------------ failover

RELAY = """
import sys
from tidegate.transport.messages import decode_from_orchestrator
from tidegate.transport.weight_channels import WeightReceiverConfig, receiver

init, update = (decode_from_orchestrator(bytes.fromhex(line)) for line in sys.argv[2:])
end = receiver(init, WeightReceiverConfig("tcp://127.0.0.1:5555", None, sys.argv[1]))
arriving = end.tensors(update)
next(arriving)
print("fetching", flush=True)
for _ in arriving:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def other_process(host: str, init: InitWeights, update: UpdateWeights) -> "subprocess.Popen[str]":
    """Start an engine that is its host's relay, and has begun to fetch."""
    process = subprocess.Popen(
        [sys.executable, "-c", RELAY, host, encode(init).hex(), encode(update).hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "fetching\n"
    return process


@pytest.mark.parametrize("heirs_host", ["a", "b"], ids=["the same host", "the next host"])
def test_when_a_relay_is_killed_its_engines_and_the_next_host_fetch_only_missing_bytes(
    weights: Sender, monkeypatch: pytest.MonkeyPatch, heirs_host: str
) -> None:
    monkeypatch.setattr(relay_node, "PARENT_TIMEOUT_S", DEAD_S)
    weights.served_bytes = 8 * CHUNK_BYTES
    [update] = weights.write(1, sent := tensors(*SIZES))
    doomed = other_process("a", weights.init(), update)
    heir = on_host(weights, heirs_host)
    got = heir.fetch(update)
    wait_until(lambda: heir._end._ready_bytes >= 8 * CHUNK_BYTES)  # type: ignore[attr-defined]
    assert weights.sent_bytes == 8 * CHUNK_BYTES, "the heir asks the relay"
    doomed.kill()
    doomed.communicate(timeout=WAIT_S)
    weights.served_bytes = 1 << 60
    assert got.result(WAIT_S) == as_bytes(sent)
    assert weights.sent_bytes < TOTAL_BYTES
    heir.close()


def test_a_relay_that_ends_between_connection_and_request_is_passed_over(
    weights: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    [update] = weights.write(1, sent := tensors(*SIZES))
    engine = on_host(weights, "a")
    ours, ended = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended.close()
    first = iter([ours])
    monkeypatch.setattr(relay_receiver, "connect", lambda name: next(first, None) or connect(name))
    engine._end._link.close()  # type: ignore[attr-defined]
    assert engine.fetch(update).result(WAIT_S) == as_bytes(sent)
    assert ours.fileno() == -1, "closed"
    engine.close()


def test_a_sender_that_is_gone_is_an_error_with_a_cause(
    weights: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_node, "STALL_TIMEOUT_S", 2.0)
    [update] = weights.write(1, tensors(*SIZES))
    engine = on_host(weights, "a")
    weights.close()
    with pytest.raises(WeightsRefused, match="for 2 s; is the orchestrator alive"):
        engine.fetch(update).result(WAIT_S)
    engine.close()


# ------------------------------------------------------------------------------ keys


def test_with_keys_relays_serve_each_other_and_no_peer_without(tmp_path: Path) -> None:
    own = read_engine_keys(make_keys(tmp_path))
    weights = RelaySender("tcp://127.0.0.1:*", keys=read_orchestrator_keys(tmp_path))
    engines = [on_host(weights, host, own) for host in ("a", "b")]
    [update] = weights.write(1, sent := tensors(*SIZES))
    for engine in engines:
        assert engine.fetch(update).result(WAIT_S) == as_bytes(sent)
    assert weights.sent_bytes < TOTAL_BYTES
    [line] = weights._chains.values()
    assert not answers(line.relays[0], FetchRequest(update.location, 0, 1))
    for engine in engines:
        engine.close()
    weights.close()


def test_a_relay_without_keys_answers_what_is_asked_well(weights: Sender) -> None:
    engine = on_host(weights, "a")
    [update] = weights.write(1, tensors(*SIZES))
    engine.fetch(update).result(WAIT_S)
    [line] = weights._chains.values()
    for fetch in (FetchRequest(update.location, 1, 2), FetchRequest(update.location, 0, 1 << 40)):
        why = f"{update.location!r} is not served, or the range is invalid"
        header = ChunkHeader(update.location, fetch.start, why)
        assert answers(line.relays[0], fetch) == [encode_struct(header)]
    assert answers(line.relays[0], FetchRequest(update.location, 0, 1))[0] == encode_struct(
        ChunkHeader(update.location, 0)
    )
    engine.close()


def answers(address: str, fetch: FetchRequest) -> list[bytes]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(address)
        stranger.send(encode_struct(fetch))
        return stranger.recv_multipart() if stranger.poll(500) else []


# ------------------------------------------------------------------------------ order of the chain


def test_relays_form_a_chain_that_skips_a_silent_host() -> None:
    line = RelayChain()
    assert line.parent(ParentRequest("w", "a")) == ""
    assert line.parent(ParentRequest("w", "b")) == "a"
    assert line.parent(ParentRequest("w", "c")) == "b"
    assert line.parent(ParentRequest("w", "c", silent_parent="b")) == "a"
    assert line.parent(ParentRequest("w", "d")) == "c"
    assert line.parent(ParentRequest("w", "b")) == "a", "it speaks again"
    assert line.parent(ParentRequest("w", "c", silent_parent="a")) == "b"
    assert line.parent(ParentRequest("w", "b", silent_parent="a")) == ""


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 6)), max_size=40))
def test_no_relay_fetches_from_a_relay_that_fetches_from_it(asked: list[tuple[int, int]]) -> None:
    line, parents = RelayChain(), {}
    for here, avoid in asked:
        where = ParentRequest("w", str(here), str(avoid) if avoid >= 0 else "")
        parents[str(here)] = line.parent(where)
        for start in parents:
            seen, at = {start}, parents[start]
            while at:
                assert at not in seen
                seen.add(at)
                at = parents[at]
