"""Fuzz tests of the decoders, a small share of what ``python -m tests.fuzz`` sends."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.frames import (
    ENGINE_EXAMPLES,
    ODD_VALUES,
    ORCHESTRATOR_EXAMPLES,
    Examples,
    LiveState,
)
from tests.fuzz.fuzzed_engine import FuzzedEngine
from tests.fuzz.fuzzed_fleet import FuzzedFleet
from tests.fuzz.fuzzed_run import FuzzedRun
from tidegate.errors import BadFrame
from tidegate.orchestrator.fleet import fleet
from tidegate.transport import limits
from tidegate.transport.messages import (
    Message,
    decode_from_engine,
    decode_from_orchestrator,
    encode,
)

pytestmark = pytest.mark.wire

VALUES = st.recursive(
    st.sampled_from(ODD_VALUES) | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def frames_of(examples: Examples) -> st.SearchStrategy[bytes]:
    """Random bytes; arbitrary MessagePack; and messages with arbitrary values in some fields."""
    messages = [encode(example(LiveState(turns=[1, 2, 3]))) for example in examples]
    fields = [msgspec.msgpack.decode(message) for message in messages]
    names = sorted({name for message in fields for name in message})
    odd = st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3)
    damaged = st.builds(lambda message, damage: message | damage, st.sampled_from(fields), odd)
    return st.binary(max_size=300) | (VALUES | damaged).map(msgspec.msgpack.encode)


def check(decode: Callable[[bytes], Message], frame: bytes) -> None:
    """Check that a frame is refused briefly, or decoded and stable when encoded again."""
    try:
        message = decode(frame)
    except BadFrame as refusal:
        why = str(refusal)
    else:
        why = ""
        said = encode(message)  # compared as bytes, because NaN != NaN
        assert encode(decode(said)) == said
    assert len(why) <= limits.TEXT_CHARS_MAX + 1


@settings(max_examples=250, deadline=None)
@given(frame=frames_of(ENGINE_EXAMPLES))
def test_whatever_an_engine_sends_is_read_or_refused_in_few_words(frame: bytes) -> None:
    check(decode_from_engine, frame)


@settings(max_examples=250, deadline=None)
@given(frame=frames_of(ORCHESTRATOR_EXAMPLES))
def test_whatever_an_orchestrator_sends_is_read_or_refused_in_few_words(frame: bytes) -> None:
    check(decode_from_orchestrator, frame)


def feed(fuzzed: FuzzedFleet, frames: int) -> None:
    for _ in range(frames):
        fuzzed.feed()


def test_a_fleet_beside_a_hostile_engine_continues_training_and_its_ledger_balances() -> None:
    fuzzed = FuzzedFleet(seed=0)
    feed(fuzzed, 12_000)
    assert fuzzed.fleet.malformed_frames > 6_000
    assert fuzzed.healthy_steps == 480
    assert fuzzed.batches > 10


NO_CHECKS = {
    "check_step": lambda *step, **about: None,
    "cut": lambda text: text * 10_000,
}


@pytest.mark.parametrize("name", NO_CHECKS)
def test_the_fuzzer_notices_when_a_check_is_gone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, name, NO_CHECKS[name])
    fuzzed = FuzzedFleet(seed=0)
    with pytest.raises((AssertionError, BadFrame, IndexError)):
        feed(fuzzed, 10_000)


def test_an_engine_under_a_hostile_orchestrator_continues_or_ends_by_itself(tmp_path: Path) -> None:
    engine = FuzzedEngine(0, tmp_path)
    try:
        for _ in range(6_000):
            engine.feed()
        assert engine.still_serves()
        assert engine.malformed > 3_000
    finally:
        engine.close()
    assert engine.failures == []


def test_a_run_that_is_flooded_continues_serving_turns(tmp_path: Path) -> None:
    with FuzzedRun(tmp_path) as run:
        run.flood(frames=4_000, seed=0)
        run.await_frames(4_000)
        before = run.episodes
        run.evaluate()
        assert run.episodes == before + 8
        assert run.malformed > 2_000
