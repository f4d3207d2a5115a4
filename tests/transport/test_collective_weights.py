"""Tests of the torch.distributed weight channel, while engines join, leave and die."""

import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.transport.weight_ends import (
    RECEIVER_CONFIG,
    WAIT_S,
    Engine,
    as_bytes,
    tensors,
    wait_until,
)
from tidegate.errors import WeightsRefused
from tidegate.transport.messages import UpdateWeights, encode
from tidegate.transport.security import make_keys, read_engine_keys, read_orchestrator_keys
from tidegate.transport.weight_channels import (
    WeightReceiverConfig,
    collective,
    collective_rounds,
)
from tidegate.transport.weight_channels.collective import CollectiveSender
from tidegate.transport.weight_channels.collective_rounds import PIECE_BYTES

pytestmark = pytest.mark.wire

FOR_EVER_S = 1000.0
"""Longer than any test waits."""


@pytest.fixture
def weights() -> Iterator[CollectiveSender]:
    sender = CollectiveSender("tcp://127.0.0.1:*")
    yield sender
    sender.close()


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_rounds, "ROUND_TIMEOUT_S", 5.0)


def test_all_requesters_share_a_round_and_the_same_group_serves_the_next(
    weights: CollectiveSender,
) -> None:
    engines = [Engine(weights) for _ in range(3)]
    for version in (1, 2):
        [update] = weights.write(version, sent := tensors(3, 0, PIECE_BYTES + 1, 70))
        for got in [engine.fetch(update) for engine in engines]:
            assert got.result(WAIT_S) == as_bytes(sent)
        assert weights.rounds == version
    assert weights._groups == 1
    for engine in engines:
        engine.close()


def test_one_that_comes_late_gets_the_newest_and_what_is_kept(weights: CollectiveSender) -> None:
    first = Engine(weights)
    [kept] = weights.write(1, old := tensors(10))
    assert first.fetch(kept).result(WAIT_S) == as_bytes(old)
    [newest] = weights.write(2, new := tensors(20), keep=[1])
    late = Engine(weights)
    assert late.fetch(newest).result(WAIT_S) == as_bytes(new)
    assert late.fetch(kept).result(WAIT_S) == as_bytes(old)
    assert first.fetch(newest).result(WAIT_S) == as_bytes(new)
    weights.write(3, tensors(5))
    with pytest.raises(WeightsRefused, match="not in the sender's memory"):
        late.fetch(kept).result(WAIT_S)
    first.close()
    late.close()


SELF_SIGNALLED = """
import os, sys
from tidegate.transport.messages import decode_from_orchestrator
from tidegate.transport.weight_channels import WeightReceiverConfig, receiver

init, update = (decode_from_orchestrator(bytes.fromhex(line)) for line in sys.argv[1:])
arriving = receiver(init, WeightReceiverConfig("tcp://127.0.0.1:5555")).tensors(update)
next(arriving)
print("in", flush=True)
os.kill(os.getpid(), SIGNAL)
"""


def start(code: str, weights: CollectiveSender, update: UpdateWeights) -> "subprocess.Popen[str]":
    """Start another process that fetches ``update``."""
    arguments = [encode(weights.init()).hex(), encode(update).hex()]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, text=True
    )


def start_one_that_signals_itself(
    number: signal.Signals, weights: CollectiveSender, update: UpdateWeights
) -> "subprocess.Popen[str]":
    """Start another process that sends itself a signal during ``update``."""
    return start(SELF_SIGNALLED.replace("SIGNAL", str(int(number))), weights, update)


def test_a_round_that_a_member_dies_in_is_done_again_without_it(weights: CollectiveSender) -> None:
    survivor = Engine(weights)
    [update] = weights.write(1, sent := tensors(1, 4 * PIECE_BYTES))
    doomed = start_one_that_signals_itself(signal.SIGKILL, weights, update)
    wait_for_two(weights)
    assert survivor.fetch(update).result(WAIT_S) == as_bytes(sent)
    assert doomed.wait(WAIT_S) == -9
    doomed.communicate()
    assert weights.rounds == 2
    survivor.close()


LONG_TIMEOUT_MEMBER = f"""
import sys, zlib
from tidegate.transport.messages import decode_from_orchestrator
from tidegate.transport.weight_channels import WeightReceiverConfig, collective_rounds, receiver

collective_rounds.ROUND_TIMEOUT_S = {FOR_EVER_S}
init, update = (decode_from_orchestrator(bytes.fromhex(line)) for line in sys.argv[1:])
for spec, view in receiver(init, WeightReceiverConfig("tcp://127.0.0.1:5555")).tensors(update):
    print(zlib.crc32(view), flush=True)
sys.stdin.read()
"""


def test_a_member_that_stops_within_a_round_delays_no_other_round(
    weights: CollectiveSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "GATHER_S", 2.0)  # so that both are in the round
    short_timeout = Engine(weights)
    [update] = weights.write(1, sent := tensors(1, 4 * PIECE_BYTES))
    # In a process, which can be killed: this one would have to wait for gloo at its exit.
    member = start(LONG_TIMEOUT_MEMBER, weights, update)
    try:
        wait_for_two(weights)
        assert short_timeout.fetch_one(update).result(WAIT_S) == "w0"
        assert member.stdout is not None
        with ThreadPoolExecutor(1) as reading:
            lines = [reading.submit(member.stdout.readline) for _ in sent]
            try:
                got = [int(line.result(WAIT_S)) for line in lines]
            finally:
                member.kill()
        assert got == [zlib.crc32(tensor.data) for tensor in sent]
        assert weights.rounds == 2
    finally:
        member.kill()
        member.communicate()
        short_timeout.close()


def test_a_member_that_hangs_in_a_round_delays_neither_the_others_nor_the_next_version(
    weights: CollectiveSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_rounds, "ROUND_TIMEOUT_S", FOR_EVER_S)
    monkeypatch.setattr(collective, "GATHER_S", 2.0)  # so that both are in the round
    engine = Engine(weights)
    [update] = weights.write(1, tensors(1, 8 * PIECE_BYTES))
    hanging = start_one_that_signals_itself(signal.SIGSTOP, weights, update)
    wait_for_two(weights)
    given_up = threading.Event()
    partly = engine.fetch(update, lambda: not given_up.is_set())
    assert hanging.stdout is not None
    assert hanging.stdout.readline() == "in\n"
    given_up.set()
    assert set(partly.result(WAIT_S)) <= {"w0"}
    [newer] = weights.write(2, sent := tensors(3))
    assert engine.fetch(newer).result(WAIT_S) == as_bytes(sent)
    hanging.kill()  # unblocks the thread that waits in torch, so that this process can exit
    hanging.communicate()
    engine.close()


def test_one_that_gave_up_before_a_round_has_no_place_in_it(
    weights: CollectiveSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "GATHER_S", 1.0)
    monkeypatch.setattr(collective_rounds, "ROUND_TIMEOUT_S", FOR_EVER_S)
    first, second = Engine(weights), Engine(weights)
    wait_for_two(weights)
    [update] = weights.write(1, sent := tensors(3))
    answers = iter([True, True, True])
    assert first.fetch(update, lambda: next(answers, False)).result(WAIT_S) == {}
    assert second.fetch(update).result(WAIT_S) == as_bytes(sent)
    assert weights.rounds == 1
    first.close()
    second.close()


def test_one_that_refuses_its_place_in_a_round_says_so(weights: CollectiveSender) -> None:
    """Otherwise the members that took their places would wait for it."""
    engine = Engine(weights)
    [update] = weights.write(1, sent := tensors(8))
    [whole] = update.tensors
    half = msgspec.structs.replace(whole, shape=[4], nbytes=4)
    with pytest.raises(
        WeightsRefused, match="would send 8 bytes of weights where the update has 4"
    ):
        engine.fetch(msgspec.structs.replace(update, tensors=[half])).result(WAIT_S)
    wait_until(lambda: weights._has_member_left)
    assert engine.fetch(update).result(WAIT_S) == as_bytes(sent)
    engine.close()


def wait_for_two(weights: CollectiveSender) -> None:
    """Wait until the other process has sent its request."""
    wait_until(lambda: len(weights._receivers_last_message_s) == 2)


def test_requests_are_made_with_the_runs_keys(tmp_path: Path) -> None:
    own = read_engine_keys(make_keys(tmp_path))
    weights = CollectiveSender("tcp://127.0.0.1:*", keys=read_orchestrator_keys(tmp_path))
    engine = Engine(weights, WeightReceiverConfig(RECEIVER_CONFIG.address, own))
    [update] = weights.write(1, sent := tensors(100))
    assert engine.fetch(update).result(WAIT_S) == as_bytes(sent)
    engine.close()
    weights.close()
