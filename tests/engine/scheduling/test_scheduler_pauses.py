"""Effects of pauses and new weights on turns, and their answers."""

import numpy as np
import pytest

from tests.engine.external.fake_engine import FakeEngine
from tidegate.engine.scheduling.scheduler import StepColumns
from tidegate.transport.messages import (
    ABORT,
    LENGTH,
    KvSpan,
    PauseMode,
    Prefill,
    TurnsPaused,
)

# ---------------------------------------------------------------- pauses


def test_abort_ends_running_turns_with_no_token_and_leaves_the_queue() -> None:
    engine = FakeEngine(max_running_turns=2)
    for _ in range(3):
        engine.submit([1, 2], 9)
    engine.step()
    engine.scheduler.pause("abort")
    assert engine.scheduler.take_ended() == StepColumns(
        version=0,
        turns=np.array([0, 1], "<u4").tobytes(),
        finish=bytes([ABORT, ABORT]),
        counts=np.array([0, 0], "<u4").tobytes(),
    )
    assert engine.scheduler.take_replies() == [TurnsPaused(mode="abort")]
    assert (engine.scheduler.waiting_turns, engine.scheduler.free_blocks) == (1, 16)
    assert engine.step() == {}
    engine.scheduler.resume()
    assert engine.step() == {0: 2}


@pytest.mark.parametrize("first", ["wait", "keep"])
def test_a_second_pause_replaces_the_first_and_both_are_answered(first: PauseMode) -> None:
    engine = FakeEngine()
    turn = engine.submit([1], 5)
    engine.step()
    engine.scheduler.pause(first)
    engine.scheduler.pause("abort")
    engine.settle()
    assert engine.answers == [TurnsPaused(mode=first), TurnsPaused(mode="abort")]
    assert engine.turns[turn].finish == ABORT


def test_frozen_turns_finish_when_keep_is_changed_to_wait() -> None:
    engine = FakeEngine()
    turn = engine.submit([1], 3)
    engine.step()
    engine.scheduler.pause("keep")
    engine.settle()
    engine.scheduler.pause("wait")
    engine.run()
    assert engine.turns[turn].finish == LENGTH
    assert engine.answers == [TurnsPaused(mode="keep"), TurnsPaused(mode="wait")]


# ---------------------------------------------------------------- weights


def test_recomputed_turns_are_prefilled_again_ahead_of_waiting_ones() -> None:
    engine = FakeEngine(max_step_tokens=6)
    turn = engine.submit([1] * 5, 4)
    engine.step()
    urgent = engine.submit([1] * 5, 4, priority=-1)
    engine.request_swap(1, "keep", "recompute")
    assert list(engine.step().values()) == [6]
    assert engine.turns[urgent].token_ids == []
    assert engine.recomputed_turns == 1
    engine.run()
    reported = engine.turns[turn]
    assert reported.prefills[1] == Prefill(turn, 1, [KvSpan(1, 0, 6)])
    assert reported.versions == [0, 1, 1, 1]


def test_a_recomputed_turn_whose_last_token_begins_a_block_is_given_it() -> None:
    engine = FakeEngine(block_tokens=4)
    turn = engine.submit([1] * 4, 3)
    engine.step()  # five tokens now, and one block of four
    engine.request_swap(1, "keep", "recompute")
    engine.run()
    assert engine.turns[turn].versions == [0, 1, 1]
    assert engine.scheduler.free_blocks == 16


def test_going_back_to_older_weights_keeps_the_kv_that_they_computed_first() -> None:
    engine = FakeEngine(max_step_tokens=4)
    turn = engine.submit([1] * 4, 9)
    engine.step()
    engine.request_swap(1, "keep", "keep")
    engine.step()
    engine.request_swap(0, "keep", "recompute")
    assert list(engine.step().values()) == [2]  # the position version 1 computed, and the newest
    engine.run()
    assert engine.turns[turn].prefills[1:] == [Prefill(turn, 2, [KvSpan(0, 0, 6)], cached_tokens=4)]


def test_the_same_version_again_recomputes_nothing() -> None:
    engine = FakeEngine()
    turn = engine.submit([1] * 4, 3)
    engine.step()
    engine.request_swap(0, "keep", "recompute")
    engine.run()
    assert engine.recomputed_turns == 0
    assert len(engine.turns[turn].prefills) == 1


def test_an_update_with_wait_starts_no_turn_until_running_ones_have_ended() -> None:
    engine = FakeEngine(max_running_turns=2)
    turn = engine.submit([1], 3)
    engine.step()
    late = engine.submit([1], 2)
    engine.request_swap(1, "wait", "keep")
    engine.run()
    assert engine.turns[turn].versions == [0, 0, 0]
    assert engine.turns[late].versions == [1, 1]


def test_an_update_with_wait_does_not_wait_for_frozen_turns() -> None:
    engine = FakeEngine()
    turn = engine.submit([1], 3)
    engine.step()
    engine.scheduler.pause("keep")
    engine.request_swap(1, "wait", "keep")
    engine.settle()
    assert engine.scheduler.version == 1
    assert engine.step() == {}
    engine.scheduler.resume()
    engine.run()
    assert engine.turns[turn].versions == [0, 1, 1]


def test_a_repeated_swap_request_changes_its_mode() -> None:
    engine = FakeEngine()
    turn = engine.submit([1], 9)
    engine.step()
    engine.request_swap(1, "wait", "keep")
    engine.step()
    assert engine.scheduler.version == 0
    engine.request_swap(1, "abort", "keep")
    engine.settle()
    assert (engine.scheduler.version, engine.turns[turn].finish) == (1, ABORT)
