"""A real engine that loses its connection or its orchestrator loses no token and no turn."""

import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.doomed_orchestrator import CREDIT_STEPS, SAMPLING
from tests.engine.orchestra import (
    GREEDY,
    LONG,
    PROMPT,
    Models,
    Orchestra,
    Publisher,
    SeenTurn,
)
from tests.engine.replaying import assert_replays
from tidegate.transport.messages import (
    LENGTH,
    LIVE_ADAPTER,
    Ack,
    AdapterNeeded,
    CancelTurn,
    FinishWeightUpdate,
    Goodbye,
    Hello,
    MessageRejected,
    Pause,
    SamplingParams,
    Shutdown,
    Step,
    TurnsPaused,
    WeightsFailed,
)

pytestmark = pytest.mark.wire

BREAKS_MAX = 100
"""Limit of reconnects, never reached: a step takes a hundredth of a reconnect's time."""


@pytest.fixture
def paced(models: Models, tmp_path: Path) -> Iterator[Orchestra]:
    """A process of a single test's own, without an orchestrator yet."""
    with Orchestra(tmp_path, models.directories[0], is_there=False) as orchestra:
        yield orchestra


def handles(hello: Hello) -> list[int]:
    return [int(handle) for handle in np.frombuffer(hello.turns, "<u4")]


def seqs_after(orchestra: Orchestra, hello: Hello) -> list[int]:
    """Return the sequence numbers that came after this hello, in order."""
    since = max(n for n, message in enumerate(orchestra.log) if message is hello)
    return [message.seq for message in orchestra.log[since:] if isinstance(message, Step)]


def begin_anew(engine: Orchestra, *, credit_steps: int = 4) -> Hello:
    """Start a new conversation with an engine that has no turns."""
    engine.break_connection()
    return engine.welcome(credit_steps=credit_steps)


def test_after_a_reconnect_the_engine_reports_its_turns_and_resends_unacknowledged_steps(
    engine: Orchestra, models: Models
) -> None:
    before = begin_anew(engine)
    assert before.turns == b""
    start = engine.steps
    turn = engine.submit(PROMPT, GREEDY)
    engine.read_tokens(turn, 2)
    engine.acknowledges = False
    engine.read_until(lambda: engine.steps == start + 6)  # the last four are not acknowledged
    engine.break_connection()
    again = engine.welcome()
    assert again == msgspec.structs.replace(
        before, first_seq=start + 2, next_seq=start + 6, turns=struct.pack("<I", turn)
    )
    engine.acknowledges = True
    assert len(engine.finish(turn).token_ids) == 24
    assert seqs_after(engine, again) == list(range(start + 2, start + 24))
    assert_replays(turn, engine, {0: models.weights[0]})


def test_a_disconnected_engine_decodes_until_its_credit_is_used_and_loses_nothing(
    engine: Orchestra, models: Models
) -> None:
    begin_anew(engine, credit_steps=16)
    turns = [engine.submit(PROMPT[:n], SAMPLING) for n in (5, 20)]
    engine.read_tokens(turns[1], 1)
    engine.acknowledges = False
    for _ in range(BREAKS_MAX):
        engine.break_connection()
        hello = engine.await_one(Hello)
        if hello.next_seq - hello.first_seq == 16:
            break
    assert hello.next_seq - hello.first_seq == 16
    assert handles(hello) == turns
    engine.acknowledges = True
    engine.send_welcome(credit_steps=8)  # it may grant less
    for turn in turns:
        assert len(engine.finish(turn).token_ids) == 40
        assert_replays(turn, engine, {0: models.weights[0]})


def test_a_turn_that_ended_while_disconnected_is_released_and_its_end_resent(
    engine: Orchestra,
) -> None:
    begin_anew(engine, credit_steps=64)
    short = engine.submit(PROMPT, GREEDY)
    long = engine.submit(PROMPT, LONG)
    engine.read_tokens(long, 1)
    for _ in range(BREAKS_MAX):
        engine.break_connection()
        hello = engine.await_one(Hello)
        if handles(hello) == [long]:
            break
    assert handles(hello) == [long]
    engine.send_welcome(credit_steps=64)
    assert engine.finish(short).finish == LENGTH
    engine.send(CancelTurn(turn=long))
    engine.finish(long)


def test_messages_between_hello_and_welcome_are_ignored(engine: Orchestra) -> None:
    begin_anew(engine)
    start = engine.steps
    engine.acknowledges = False
    turn = engine.submit(PROMPT, GREEDY)
    engine.read_tokens(turn, 4)
    engine.break_connection()
    hello = engine.await_one(Hello)
    stale = engine.submit(PROMPT, GREEDY)
    for message in (
        Ack(seq=start + 3),
        CancelTurn(turn=turn),
        Pause(mode="abort"),
        MessageRejected(message="of something before"),
    ):
        engine.send(message)
    engine.acknowledges = True
    engine.send_welcome()
    assert engine.finish(turn).finish == LENGTH
    assert seqs_after(engine, hello) == list(range(start, start + 24))
    assert engine.turns[stale].token_ids == []
    heartbeat = engine.await_heartbeat(2)
    assert (heartbeat.running_turns, heartbeat.waiting_turns) == (0, 0)


def test_pauses_end_with_the_connection_that_requested_them(engine: Orchestra) -> None:
    begin_anew(engine)
    turn = engine.submit(PROMPT, GREEDY)
    engine.read_tokens(turn, 1)
    engine.send(Pause(mode="keep"))
    engine.await_one(TurnsPaused)
    engine.break_connection()
    engine.welcome()
    assert engine.finish(turn).finish == LENGTH


def test_the_hello_is_repeated_if_the_orchestrator_dies_before_its_welcome(
    fresh: Orchestra,
) -> None:
    first = fresh.await_one(Hello)
    fresh.break_connection()
    assert fresh.welcome() == first
    assert fresh.generate(PROMPT, GREEDY).finish == LENGTH


# ---------------------------------------------------------------- complaints


def test_a_rejected_step_is_resent_with_all_later_steps(engine: Orchestra, models: Models) -> None:
    begin_anew(engine, credit_steps=8)
    turn = engine.submit(PROMPT, GREEDY)
    for _ in range(3):
        engine.read_tokens(turn, 4)
        damaged = engine.refuses_from = engine.steps  # as if the next one could not be read
        engine.read_until(lambda: engine.refused > 0)
        engine.send(MessageRejected(message="unreadable frame"))
        hello = engine.welcome(credit_steps=8)
        assert hello.first_seq <= damaged < hello.next_seq
        engine.refuses_from, engine.refused = None, 0
    assert len(engine.finish(turn).token_ids) == 24
    assert_replays(turn, engine, {0: models.weights[0]})


def test_an_engine_whose_steps_are_rejected_repeatedly_exits_with_the_reason(
    fresh: Orchestra,
) -> None:
    fresh.welcome()
    fresh.acknowledges = False
    turn = fresh.submit(PROMPT, GREEDY)
    fresh.read_tokens(turn, 4)
    for _ in range(2):
        fresh.send(MessageRejected(message="step 0: no such column"))
        assert fresh.welcome().first_seq == 0
    fresh.send(MessageRejected(message="step 0: no such column"))
    reason = fresh.await_one(Goodbye).reason
    assert "rejected 3 messages" in reason
    assert "step 0: no such column" in reason
    assert fresh.exit_status() == 1
    assert f"error: {reason}" in fresh.stderr.read_text()


# ---------------------------------------------------------------- weights


def test_partly_staged_weights_are_dropped_with_the_connection(
    engine: Orchestra, models: Models
) -> None:
    version = begin_anew(engine).weight_version + 1
    with closing(Publisher(engine)) as dead:
        dead.stage(version, models.directories[1])
    begin_anew(engine)
    with closing(Publisher(engine)) as publisher:
        engine.send(FinishWeightUpdate(version=version, pause_mode="keep", kv_policy="keep"))
        assert "is not staged here" in engine.await_one(WeightsFailed).message
        publisher.stage(version, models.directories[0])
        publisher.swap(version, "keep", "keep")
        turn = engine.submit(PROMPT, GREEDY)
        assert engine.finish(turn).versions == [version] * 24
        assert_replays(turn, engine, {version: models.weights[0]})
        assert len(mapped_segments(engine.process.pid)) == 1


def test_a_swap_pending_at_a_disconnect_is_requested_again_and_done(
    engine: Orchestra, models: Models
) -> None:
    old = begin_anew(engine).weight_version
    with closing(Publisher(engine)) as publisher:
        turn = engine.submit(PROMPT, SAMPLING)
        engine.read_tokens(turn, 1)
        engine.acknowledges = False  # so that the turn can't end, and the swap not be done
        publisher.stage(old + 1, models.directories[1])
        engine.send(FinishWeightUpdate(version=old + 1, pause_mode="wait", kv_policy="keep"))
        engine.await_heartbeat(2)
        assert begin_anew(engine).weight_version == old
        engine.send(publisher.init)
        publisher.stage(old + 1, models.directories[1])
        engine.acknowledges = True
        engine.acknowledge()
        assert publisher.swap(old + 1, "wait", "keep").version == old + 1
        assert engine.finish(turn).versions == [old] * 40
        assert engine.generate(PROMPT, GREEDY).versions == [old + 1] * 24


def mapped_segments(pid: int) -> set[str]:
    """Return the inodes of the weight segments that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:tidegate-weights" in line}


# ---------------------------------------------------------------- another orchestrator


def test_a_restarted_orchestrator_gets_every_token_and_only_its_own_weights(
    paced: Orchestra, models: Models
) -> None:
    program = [sys.executable, "-m", "tests.engine.doomed_orchestrator"]
    program += [paced.address, str(models.directories[1])]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as doomed:
        assert doomed.stdout is not None
        try:
            assert doomed.stdout.readline() == "ready\n"
        finally:
            doomed.kill()
    paced.turns[0] = SeenTurn(PROMPT, SAMPLING)
    paced.acknowledges = False
    paced.come_back()
    for _ in range(BREAKS_MAX):
        hello = paced.await_one(Hello)
        if hello.next_seq == CREDIT_STEPS:
            break
        paced.break_connection()
    assert (hello.first_seq, hello.next_seq) == (0, CREDIT_STEPS)
    assert (handles(hello), hello.weight_version) == ([0], 0)
    paced.send_welcome(credit_steps=4)
    with closing(Publisher(paced)) as publisher:
        publisher.stage(1, models.directories[0])
        live = publisher.swap(1, "keep", "recompute")
        paced.acknowledges = True  # not before, or the turn might end under the old weights
        paced.acknowledge()
        seen = paced.finish(0)
        assert len(seen.token_ids) == 40
        assert set(seen.versions) == {0, live.version}
        assert_replays(0, paced, {0: models.weights[0], 1: models.weights[0]})
        assert len(mapped_segments(paced.process.pid)) == 1
        paced.send(Shutdown())
        assert paced.exit_status() == 0


def test_a_turn_that_waits_for_an_adapter_has_it_asked_for_again_after_a_reconnect(
    models: Models, tmp_path: Path
) -> None:
    options = ["--adapters-max", "2"]
    with Orchestra(tmp_path, models.directories[0], options) as orchestra:
        orchestra.welcome()
        live = SamplingParams(max_tokens=4, adapter="solver", adapter_version=LIVE_ADAPTER)
        handle = orchestra.submit(PROMPT, live)
        assert orchestra.await_one(AdapterNeeded).name == "solver"
        orchestra.break_connection()
        assert handles(orchestra.welcome()) == [handle]
        assert orchestra.await_one(AdapterNeeded).name == "solver"
