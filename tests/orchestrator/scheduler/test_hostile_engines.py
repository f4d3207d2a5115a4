"""An engine that lies, floods or is broken harms only the turns that it was given."""

import math
import re
import struct
from collections.abc import Iterator

import msgspec
import pytest

from tests.orchestrator.core.driver import Driver
from tests.orchestrator.fleet.test_fleet import Wire, hello, make_step
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import RolloutState
from tidegate.orchestrator.fleet import fleet as joining
from tidegate.orchestrator.fleet.fleet import ANSWERS_PER_S_MAX, HELLOS_PER_S_MAX, REMEMBERED_MAX
from tidegate.transport.messages import (
    LENGTH,
    RUNNING,
    Attachment,
    Goodbye,
    HelloRejected,
    KvSpan,
    MessageRejected,
    Prefill,
    Step,
    TurnsResumed,
    WeightsLive,
    encode,
)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    wire.hear(hello())
    wire.sent.clear()
    yield wire
    assert wire.fleet.malformed_frames == sum(
        isinstance(message, MessageRejected) for _, message in wire.sent
    )


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def attached(
    name: str, values: bytes, dtype: str = "float32", turn: int = 0, **fields: object
) -> dict[str, object]:
    """Return a step's ``attachments``, unchecked."""
    return {"attachments": [Attachment(turn, name, 0, dtype, values, **fields)]}  # type: ignore[arg-type]


def prefill(*spans: KvSpan, turn: int = 0, at: int = 0) -> dict[str, object]:
    return {"prefills": [Prefill(turn, at, list(spans))]}


RAW, TOP = "raw_logprobs", "top_logprobs"

IMPOSSIBLE: list[tuple[dict[str, object], str]] = [
    ({"logprobs": floats(-1, math.nan)}, r"logprobs\[1\] is nan, no logarithm .* compute NaN"),
    ({"logprobs": floats(-math.inf, -1)}, r"logprobs\[0\] is -inf"),
    ({"logprobs": floats(-1, math.inf)}, r"logprobs\[1\] is inf"),
    ({"logprobs": floats(0.5, -1)}, r"logprobs\[0\] is 0.5"),
    ({"token_ids": ints(3, -1)}, r"token_ids\[1\] is -1, outside of the vocabulary \[0, 96\)"),
    ({"token_ids": ints(96, 0)}, r"token_ids\[0\] is 96"),
    ({"turns": ints(1, 1)}, "a turn has more than one row"),
    ({"finish": b"\0\5"}, "finish codes are 0 to 4, got 5"),
    ({"version": 1}, "sampled by weights v1, but v0 are the newest"),
    (attached(RAW, floats(-1), turn=7), "raw_logprobs of turn 7, which has no row in it"),
    ({"attachments": 2 * [Attachment(0, "raw_logprobs", 0, "float32", floats(-1))]}, "second time"),
    (attached(RAW, floats(-1)[:3]), "raw_logprobs of turn 0 have 3 bytes, no whole number"),
    (attached(RAW, ints(3), "int32"), "are float32, got int32"),
    (attached(RAW, floats(-1), shape=[1]), r"entries of 0 dimensions, got shape \[1\]"),
    (attached(RAW, floats(-1), counts=ints(1)), "entries of one size, but 4 bytes of counts"),
    (attached(RAW, floats(math.nan)), "turn 0 hold a value that is no logarithm"),
    (attached(RAW, floats(-math.inf)), "turn 0 hold a value that is no logarithm"),
    (attached(TOP, floats(math.nan), shape=[1]), "turn 0 hold a value that is no logarithm"),
    (attached(TOP, floats(0.5), shape=[1]), "turn 0 hold a value that is no logarithm"),
    (attached(TOP, floats(-1), shape=[0]), r"entries of 1 dimensions, got shape \[0\]"),
    (attached("top_ids", ints(96), "int32", shape=[1]), r"outside of the vocabulary \[0, 96\)"),
    (attached("top_ids", ints(-1), "int32", shape=[1]), "hold a token outside"),
    (attached("kept_ids", ints(96), "int32", counts=ints(1)), "kept_ids of turn 0 hold a token"),
    (attached("kept_ids", ints(3), "int32", counts=ints(2)), "4 bytes of values, but counts for 2"),
    (attached("kept_ids", ints(3), "int32", counts=b"\1\0"), "counts of 2 bytes"),
    (attached("kept_ids", b"", "int32", counts=ints(-1)), "counts for 4294967295 values"),
    (attached("routed_experts", b"\0\1\2", "uint8", shape=[2, 1]), "have 3 bytes, no whole"),
    (attached("routed_experts", floats(1), shape=[1, 1]), "are uint8 or uint16, got float32"),
    (attached("hidden_states", floats(math.nan), shape=[1]), "turn 0 hold NaN or infinity"),
    (attached("teacher_logprobs", floats(-1)), "are added by the orchestrator, and engines report"),
    (prefill(KvSpan(0, 0, 3), turn=7), "a prefill of turn 7, which has no token in it"),
    (prefill(KvSpan(0, 1, 3)), "turn 0 can't have been prefilled"),
    (prefill(KvSpan(0, 0, 2), KvSpan(0, 3, 4)), "turn 0 can't have been prefilled"),
    (prefill(KvSpan(0, 0, 0)), "turn 0 can't have been prefilled"),
    (prefill(KvSpan(1, 0, 3)), "turn 0 can't have been prefilled"),
    (prefill(), "prefilled over 0 positions"),
    (prefill(KvSpan(0, 0, 3), at=3), "prefilled over 3 positions, after 3 tokens"),
    ({"prefills": [Prefill(0, 0, [KvSpan(0, 0, 3)])] * 2}, "or a second prefill"),
    ({"prefills": [Prefill(0, 0, [KvSpan(0, 0, 3)], 3)]}, "3 of its 3 positions as cached"),
]


@pytest.mark.parametrize(("lie", "why"), IMPOSSIBLE)
def test_what_no_engine_can_have_sampled_is_refused_and_may_be_said_rightly(
    wire: Wire, lie: dict[str, object], why: str
) -> None:
    step = make_step(0, rows=2)
    assert wire.hear(msgspec.structs.replace(step, **lie)) == []
    complaint = wire.last()
    assert isinstance(complaint, MessageRejected)
    assert re.search(why, complaint.message), complaint.message
    assert [type(item) for item in wire.hear(step)] == [ev.StepArrived]


def test_log_probs_at_their_limits_are_taken(wire: Wire) -> None:
    step = msgspec.structs.replace(make_step(0, rows=3), logprobs=floats(0.0, -0.0, -1e4))
    assert len(wire.hear(step)) == 1
    assert len(wire.hear(Step(seq=1, version=0, turns=b"", token_ids=b"", logprobs=b""))) == 1


def test_weights_that_were_never_published_are_not_live(wire: Wire) -> None:
    assert wire.hear(WeightsLive(version=5)) == []
    assert wire.fleet.engines["a"].weight_version == 0
    wire.newest_version = 5
    assert len(wire.hear(WeightsLive(version=5))) == 1


# ------------------------------------------------------------------------------ streams


def test_an_engine_whose_steps_are_refused_for_good_is_lost_after_its_time(wire: Wire) -> None:
    bad = msgspec.structs.replace(make_step(0), token_ids=ints(-1))
    wire.hear(bad)
    for _ in range(2):
        wire.now_s += 5.0
        assert wire.fleet.tick(wire.now_s) == []
        wire.hear(bad, TurnsResumed())  # it is alive, and sends the same again
    wire.now_s += 1.0
    assert wire.fleet.tick(wire.now_s) == [ev.EngineLeft("a")]
    assert "its steps can't be read" in wire.fleet.departed["a"]


def test_an_engine_whose_stream_has_a_hole_is_lost_unless_it_is_filled(wire: Wire) -> None:
    wire.hear(make_step(1))
    wire.now_s += 9.0
    assert len(wire.hear(make_step(0), make_step(1))) == 2
    wire.hear(make_step(3))
    wire.now_s += 9.0
    wire.hear(TurnsResumed())
    assert wire.fleet.tick(wire.now_s) == []
    wire.now_s += 2.0
    assert wire.fleet.tick(wire.now_s) == [ev.EngineLeft("a")]


# ------------------------------------------------------------------------------ floods


def test_nonsense_is_counted_always_and_answered_so_often() -> None:
    wire = Wire()
    wire.fleet.receive([(b"x", b"\xc1")] * 1000, wire.now_s)
    assert wire.fleet.malformed_frames == 1000
    assert len(wire.sent) == ANSWERS_PER_S_MAX
    wire.fleet.receive([(b"x", b"\xc1")], wire.now_s + 1.0)
    assert len(wire.sent) == ANSWERS_PER_S_MAX + 1


def test_hellos_without_end_are_not_each_answered_with_all_there_is_to_do() -> None:
    wire = Wire()
    received = wire.hear(*[hello()] * 100)
    assert len(received) == HELLOS_PER_S_MAX
    assert wire.fleet.malformed_frames == 100 - HELLOS_PER_S_MAX


def test_remarks_without_end_are_not_all_passed_on(wire: Wire) -> None:
    received = wire.hear(*[MessageRejected(message="x" * 5000)] * 100)
    assert len(received) == ANSWERS_PER_S_MAX
    wire.fleet.malformed_frames = 0


def test_peers_that_connect_under_ever_new_names_are_forgotten() -> None:
    wire = Wire()
    for number in range(REMEMBERED_MAX + 50):
        name = f"e{number}"
        wire.now_s += 0.1
        wire.hear(hello(name), Goodbye(reason="x" * 5000), peer=name.encode())
        wire.hear(hello(name, protocol=9), peer=name.encode())
    fleet = wire.fleet
    assert fleet.engines == {}
    for memory in (fleet.departed, fleet.refused_engines, fleet._given_up):
        assert len(memory) == REMEMBERED_MAX
        assert "e0" not in memory
        assert name in memory
    assert len(fleet.departed[name]) < 5000


def test_a_hello_that_is_half_right_leaves_no_engine_behind() -> None:
    wire = Wire()
    assert wire.hear(msgspec.structs.replace(hello(), turns=b"\0")) == []
    assert isinstance(wire.last(), MessageRejected)
    assert wire.fleet.engines == {}


def test_a_run_takes_so_many_engines_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "ENGINES_MAX", 2)
    wire = Wire()
    for name in "abc":
        wire.hear(hello(name), peer=name.encode())
    assert wire.last() == HelloRejected(message="this run has 2 engines, its maximum")
    assert len(wire.hear(hello("a"))) == 1  # who is in may come back


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "x" * 201, ""])
def test_names_that_would_garble_a_log_are_refused_in_few_words(name: str) -> None:
    wire = Wire()
    wire.hear(hello(name), peer=name.encode())
    refusal = wire.last()
    assert isinstance(refusal, HelloRejected)
    assert refusal.message.startswith("engine names ")
    assert refusal.message.isprintable()


def test_a_name_that_is_no_text_names_no_session() -> None:
    wire = Wire()
    wire.hear(hello("\ufffd"), peer="\ufffd".encode())
    frames = [(b"\xff", encode(Goodbye(reason="I am the one of that name")))]
    assert wire.fleet.receive(frames, wire.now_s) == []
    assert isinstance(wire.last(), MessageRejected)
    assert list(wire.fleet.engines) == ["\ufffd"]


# ------------------------------------------------------------------------------ turns


@pytest.mark.parametrize("finish", [RUNNING, LENGTH])
def test_a_turn_that_continues_past_its_end_is_never_trained_on(finish: int) -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    driver.join("engine-0")
    driver.fill()
    [rollout] = driver.running.values()
    driver.ask_turn(rollout, max_tokens=4)
    [handle] = driver.engines["engine-0"].turns

    driver.sample("engine-0", handle, 4)
    assert rollout.turns[-1].finish_reason is None
    driver.sample("engine-0", handle, 1, finish)

    assert rollout.turns[-1].finish_reason == "refused"
    assert rollout.sampled_tokens == 0
    assert driver.core.turns.engines["engine-0"].submissions == {}
    driver.fail(rollout)
    assert rollout.state is RolloutState.DISCARDED
