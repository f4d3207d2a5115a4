from array import array
from typing import Any

import msgspec
import pytest

from tidegate.errors import BadFrame
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.step_checks import step_arrived
from tidegate.orchestrator.fleet.fleet import EngineReply, Fleet
from tidegate.orchestrator.settings.config import FleetSettings
from tidegate.transport.messages import (
    PROTOCOL,
    Ack,
    EngineHeartbeat,
    Goodbye,
    Hello,
    HelloRejected,
    KvSpan,
    Message,
    MessageRejected,
    OrchestratorHeartbeat,
    Prefill,
    Step,
    TurnFailed,
    WeightsStaged,
    Welcome,
    encode,
)

SETTINGS = FleetSettings(
    heartbeat_interval_s=1.0, engine_timeout_s=10.0, orchestrator_timeout_s=10.0, credit_steps=8
)


def hello(engine: str = "a", *, epoch: int = 1, protocol: int = PROTOCOL, vocab: int = 96) -> Hello:
    return Hello(
        protocol=protocol,
        engine=engine,
        epoch=epoch,
        weight_version=0,
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab,
        context_tokens_max=256,
        max_running_turns=4,
        num_kv_blocks=16,
        block_tokens=16,
        pause_modes=["abort", "keep", "wait"],
        kv_policies=["keep", "recompute"],
        weight_channels=["shm"],
    )


def make_step(seq: int, rows: int = 1) -> Step:
    return Step(
        seq=seq,
        version=0,
        turns=array("I", range(rows)).tobytes(),
        token_ids=array("i", range(rows)).tobytes(),
        logprobs=array("f", [-0.5] * rows).tobytes(),
        busy_us=10,
    )


class Wire:
    """A fleet, the messages it has sent, and a clock."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Message]] = []
        self.newest_version = 0
        self.fleet = Fleet(SETTINGS, self.send, newest_version=lambda _: self.newest_version)
        self.now_s = 100.0

    def send(self, peer: bytes, message: Message) -> bool:
        self.sent.append((peer, message))
        return True

    def hear(self, *messages: Message, peer: bytes = b"a") -> list[ev.Event | EngineReply]:
        received = self.fleet.receive([(peer, encode(message)) for message in messages], self.now_s)
        self.fleet.acknowledge(self.fleet.take_acks())
        return received

    def last(self) -> Message:
        return self.sent[-1][1]


@pytest.fixture
def wire() -> Wire:
    wire = Wire()
    assert wire.hear(hello()) == [ev.EngineJoined("a", 0, 4, epoch=1)]
    assert isinstance(wire.last(), Welcome)
    return wire


@pytest.mark.parametrize(
    ("requirements", "wrong", "why"),
    [
        ({}, {"protocol": 99}, f"speaks protocol 99, this run {PROTOCOL}; run the same version"),
        ({"is_deterministic": True}, {}, "is not deterministic, but this run is"),
        ({"weight_channel": "relay"}, {}, "no weight channel 'relay'"),
        (
            {"kv_policy": "keep"},
            {"kv_policies": ["recompute"]},
            "does not support kv_policy='keep' with correct provenance; it supports 'recompute'",
        ),
        ({}, {"engine": "b"}, "must connect under its own name, not b'a'"),
        ({}, {"weight_version": 3}, "serves weights v3, but this run has published none newer"),
    ],
)
def test_an_engine_that_a_run_cannot_use_is_refused_with_the_reason(
    requirements: dict[str, Any], wrong: dict[str, Any], why: str
) -> None:
    wire = Wire()
    wire.fleet = Fleet(SETTINGS, wire.send, **requirements)
    assert wire.hear(msgspec.structs.replace(hello(), **wrong)) == []
    refusal = wire.last()
    assert isinstance(refusal, HelloRejected)
    assert why in refusal.message
    able = msgspec.structs.replace(hello(), is_deterministic=True, weight_channels=["relay"])
    assert wire.hear(able) == [ev.EngineJoined("a", 0, 4, epoch=1)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"block_tokens": 32}, "KV blocks of 32 tokens, 'a' of 16"),
        ({"vocab_size": 7}, "a vocabulary of 7 tokens, 'a' one of 96"),
    ],
)
def test_engines_of_a_deterministic_run_serve_one_model_by_blocks_of_one_size(
    wrong: dict[str, Any], why: str
) -> None:
    wire = Wire()
    wire.fleet = Fleet(SETTINGS, wire.send, is_deterministic=True)
    wire.hear(msgspec.structs.replace(hello("a"), is_deterministic=True))
    other = msgspec.structs.replace(hello("b"), is_deterministic=True, **wrong)
    assert wire.hear(other, peer=b"b") == []
    assert why in str(wire.last())


def test_a_reconnected_engine_joins_anew_and_keeps_its_stream(wire: Wire) -> None:
    wire.hear(make_step(0))
    assert wire.hear(hello()) == [ev.EngineJoined("a", 0, 4, epoch=1)]
    assert isinstance(wire.last(), Welcome)
    received = wire.hear(make_step(0), make_step(1))
    assert len(received) == 1
    assert (b"a", Ack(seq=0)) in wire.sent  # the duplicate shows that the first one was lost


def test_a_new_process_under_the_same_name_replaces_the_old(wire: Wire) -> None:
    wire.hear(make_step(0))
    assert wire.hear(hello(epoch=2)) == [ev.EngineLeft("a"), ev.EngineJoined("a", 0, 4, epoch=2)]
    assert len(wire.hear(make_step(0))) == 1


def test_a_step_with_broken_columns_is_not_counted_as_received(wire: Wire) -> None:
    broken = Step(seq=0, version=0, turns=b"\0", token_ids=b"", logprobs=b"")
    assert wire.hear(broken) == []
    assert isinstance(wire.last(), MessageRejected)
    assert [type(item) for item in wire.hear(make_step(0))] == [ev.StepArrived]


def test_a_step_is_taken_in_once_whatever_is_repeated(wire: Wire) -> None:
    received = wire.hear(make_step(0), make_step(0), make_step(1))
    assert [type(item) for item in received] == [ev.StepArrived, ev.StepArrived]
    assert wire.fleet.engines["a"].tokens == 2


def test_context_found_in_caches_is_counted_once_and_outlives_the_engine(wire: Wire) -> None:
    wire.hear(hello())
    found = Prefill(0, 0, [KvSpan(0, 0, 20)], cached_tokens=16)
    step = msgspec.structs.replace(make_step(0, rows=2), prefills=[found])
    wire.hear(step, step, Goodbye(reason="done"))

    assert (wire.fleet.context_tokens, wire.fleet.cached_context_tokens) == (20, 16)


def test_steps_are_acknowledged_by_the_quarter_of_the_credit(wire: Wire) -> None:
    wire.sent.clear()
    for seq in range(5):
        wire.hear(make_step(seq))
    assert [m for _, m in wire.sent] == [Ack(seq=1), Ack(seq=3)]


def test_steps_heard_at_once_are_acknowledged_once(wire: Wire) -> None:
    wire.sent.clear()
    wire.hear(*[make_step(seq) for seq in range(5)])
    assert [m for _, m in wire.sent] == [Ack(seq=3)]


def test_a_silent_engine_is_lost_after_its_time_and_not_before(wire: Wire) -> None:
    assert wire.fleet.tick(wire.now_s + 10.0) == []
    assert wire.last() == OrchestratorHeartbeat()
    assert wire.fleet.tick(wire.now_s + 10.1) == [ev.EngineLeft("a")]
    assert wire.fleet.departed == {"a": "said nothing for 10 s"}


def test_an_engine_given_up_for_its_silence_is_asked_to_say_hello_and_is_welcome_again(
    wire: Wire,
) -> None:
    wire.hear(make_step(0), make_step(1))
    assert wire.fleet.tick(wire.now_s + 11.0) == [ev.EngineLeft("a")]
    assert wire.hear(make_step(2)) == []
    assert wire.last() == MessageRejected(
        message="'a' said nothing for 11 s and was removed; send a hello message to join again"
    )
    joined, step = wire.hear(hello(), make_step(2))
    assert isinstance(joined, ev.EngineJoined)
    assert isinstance(step, ev.StepArrived)  # its stream continues


def test_an_engine_given_up_for_what_it_did_must_end(wire: Wire) -> None:
    wire.fleet.lose("a", "still without weights v3")
    assert wire.hear(make_step(0)) == []
    assert wire.last() == HelloRejected(message="removed: still without weights v3")


def test_time_in_which_the_loop_was_blocked_is_no_engines_silence(wire: Wire) -> None:
    assert wire.fleet.tick(wire.now_s) == []
    assert wire.fleet.tick(wire.now_s + 30.0) == []  # the user's code has kept the loop so long
    assert wire.fleet.tick(wire.now_s + 31.0) == []
    for second in range(32, 41):
        silent = wire.fleet.tick(wire.now_s + second)
    assert silent == [ev.EngineLeft("a")]


def test_any_word_from_an_engine_keeps_it(wire: Wire) -> None:
    wire.now_s += 9.0
    beat = EngineHeartbeat(
        weight_version=0, running_turns=3, waiting_turns=2, free_blocks=1, sent_us=0
    )
    assert wire.hear(beat) == []
    assert wire.fleet.tick(wire.now_s + 9.0) == []
    (statistics,) = wire.fleet.statistics()
    assert (statistics.running_turns, statistics.waiting_turns) == (3, 2)


def test_what_an_engine_says_keeps_its_order(wire: Wire) -> None:
    received = wire.hear(
        make_step(0),
        WeightsStaged(version=1),
        TurnFailed(turn=5, message="no"),
        Goodbye(reason=""),
    )
    assert [type(item) for item in received] == [
        ev.StepArrived,
        EngineReply,
        ev.TurnRejected,
        ev.EngineLeft,
    ]


def test_an_unknown_peer_is_asked_for_a_hello_first(wire: Wire) -> None:
    assert wire.hear(make_step(0), peer=b"stranger") == []
    assert isinstance(wire.last(), MessageRejected)
    assert wire.fleet.malformed_frames == 1


def test_a_bad_frame_harms_no_other_engine(wire: Wire) -> None:
    good = encode(make_step(0))
    received = wire.fleet.receive([(b"a", b"\xc1garbage"), (b"a", good)], wire.now_s)
    assert [type(item) for item in received] == [ev.StepArrived]
    assert wire.fleet.malformed_frames == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"turns": b"\0\0\0"},
        {"token_ids": b"\0" * 8},
        {"logprobs": b""},
        {"finish": b"\1\1"},
        {"counts": b"\2\0\0\0"},
    ],
)
def test_columns_whose_lengths_disagree_are_refused(damage: dict[str, bytes]) -> None:
    columns: dict[str, bytes] = {
        "turns": b"\0" * 4,
        "token_ids": b"\0" * 4,
        "logprobs": b"\0" * 4,
        **damage,
    }
    with pytest.raises(BadFrame, match="step 0"):
        step_arrived("a", Step(seq=0, version=0, **columns))  # type: ignore[arg-type]


def test_turns_go_together_only_to_engines_that_have_said_they_take_them_so() -> None:
    wire = Wire()
    new = msgspec.structs.replace(hello("b"), supports_submit_turns=True)
    wire.hear(hello("a"))
    wire.hear(new, peer=b"b")
    assert [wire.fleet.supports_submit_turns(engine) for engine in ("a", "b", "none")] == [
        False,
        True,
        False,
    ]
