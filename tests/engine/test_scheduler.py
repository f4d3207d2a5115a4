"""Does the scheduler lose, repeat, mix up or mislabel a turn, whatever is asked of it?"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.fake_engine import FakeEngine
from tidegate.engine.scheduler import StepColumns
from tidegate.engine.turns import EngineLimits
from tidegate.errors import ConfigError, TurnRefused
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    LENGTH,
    RUNNING,
    STOP,
    KvPolicy,
    KvSpan,
    Paused,
    PauseMode,
    Prefill,
    Resumed,
)


def uninterrupted(prompt: list[int], max_tokens: int, *, sampled_before: int = 0) -> list[int]:
    """The turn's tokens when it is alone in an engine."""
    engine = FakeEngine()
    turn = engine.submit(prompt, max_tokens, sampled_before=sampled_before)
    engine.run()
    return engine.turns[turn].token_ids


# ---------------------------------------------------------------- steps


def test_decodes_go_before_prefills_and_together_they_stay_within_the_budget() -> None:
    engine = FakeEngine(max_step_tokens=8)
    engine.submit([1, 2, 3], 9)
    engine.submit([1, 2], 9)
    assert list(engine.step().values()) == [3, 2]
    engine.submit(list(range(20)), 9)
    assert list(engine.step().values()) == [1, 1, 6]
    assert list(engine.step().values()) == [1, 1, 6]
    assert list(engine.step().values()) == [1, 1, 6]
    assert engine.turns[2].token_ids == []
    assert list(engine.step().values()) == [1, 1, 2]
    assert len(engine.turns[2].token_ids) == 1
    assert list(engine.step().values()) == [1, 1, 1]


def test_waiting_turns_start_by_priority_and_then_by_arrival() -> None:
    engine = FakeEngine(max_running_turns=1)
    first = engine.submit([1], 2, priority=1)
    second = engine.submit([1], 2, priority=1)
    urgent = engine.submit([1], 2, priority=-5)
    ended: list[int] = []
    while engine.step():
        ended += [t for t, told in engine.turns.items() if told.finish and t not in ended]
    assert ended == [urgent, first, second]


def test_a_step_of_prefill_alone_has_nothing_to_tell() -> None:
    engine = FakeEngine(max_step_tokens=4)
    engine.submit([1, 2, 3, 4, 5], 1)
    rows = engine.scheduler.plan()
    assert engine.scheduler.complete(engine.runner.step(rows)) is None


def test_a_step_is_told_in_columns() -> None:
    engine = FakeEngine()
    engine.submit([1, 2, 3], 1)
    engine.submit([4], 5)
    output = engine.runner.step(engine.scheduler.plan())
    assert engine.scheduler.complete(output) == StepColumns(
        version=0,
        turns=np.array([0, 1], "<u4").tobytes(),
        token_ids=output.token_ids.tobytes(),
        logprobs=output.logprobs.tobytes(),
        finish=bytes([LENGTH, RUNNING]),
        prefills=[Prefill(0, 0, [KvSpan(0, 0, 3)]), Prefill(1, 0, [KvSpan(0, 0, 1)])],
    )
    output = engine.runner.step(engine.scheduler.plan())
    assert engine.scheduler.complete(output) == StepColumns(
        version=0,
        turns=np.array([1], "<u4").tobytes(),
        token_ids=output.token_ids.tobytes(),
        logprobs=output.logprobs.tobytes(),
    )


def test_a_stop_token_ends_a_turn_even_where_it_is_the_last_allowed() -> None:
    tokens = uninterrupted([1, 2], 10)
    engine = FakeEngine()
    inside = engine.submit([1, 2], 10, stop=[tokens[4]])
    at_the_end = engine.submit([1, 2], 5, stop=[tokens[4]])
    engine.run()
    for turn in (inside, at_the_end):
        assert engine.turns[turn].token_ids == tokens[:5]
        assert engine.turns[turn].finish == STOP


def test_the_worst_turn_gives_up_its_blocks_and_later_goes_on_where_it_was() -> None:
    engine = FakeEngine(num_blocks=5, max_running_turns=2)
    worse = engine.submit([1] * 8, 8, priority=1)
    engine.step()
    best = engine.submit([2] * 4, 8)
    while not engine.scheduler.waiting_turns or len(engine.turns[best].token_ids) < 2:
        engine.step()
    assert engine.scheduler.running_turns == 1
    engine.run()
    told = engine.turns[worse]
    assert told.token_ids == uninterrupted([1] * 8, 8)
    assert [prefill.at for prefill in told.prefills] == [0, told.prefills[1].at]
    assert told.prefills[1] == Prefill(
        worse, told.prefills[1].at, [KvSpan(0, 0, 8 + told.prefills[1].at)]
    )
    assert [prefill.at for prefill in engine.turns[best].prefills] == [0]


def test_the_worst_turn_keeps_its_kv_while_nobody_needs_the_blocks() -> None:
    engine = FakeEngine(num_blocks=4, max_running_turns=2)
    best = engine.submit([1] * 5, 3)
    worse = engine.submit([2] * 4, 6)
    engine.step()
    while engine.turns[best].finish == RUNNING:
        engine.step()
    engine.run()
    assert [prefill.at for prefill in engine.turns[worse].prefills] == [0]


def test_a_turn_does_not_start_where_the_next_decodes_would_throw_it_out() -> None:
    engine = FakeEngine(num_blocks=3, max_running_turns=2)
    first = engine.submit([1] * 4, 4)
    engine.step()
    late = engine.submit([2] * 8, 1)  # its two blocks are free, but the first turn needs one
    while engine.turns[first].finish == RUNNING:
        engine.step()
        assert engine.scheduler.running_turns <= 1
    engine.run()
    assert [prefill.at for prefill in engine.turns[late].prefills] == [0]


def test_a_cancelled_turn_leaves_the_others_in_their_order() -> None:
    engine = FakeEngine(max_running_turns=1)
    turns = [engine.submit([1], 1, priority=priority) for priority in (1, 2, 9, 5, 3, 8, 7)]
    engine.scheduler.cancel(turns[1])
    ended: list[int] = []
    while engine.step():
        ended += [t for t in turns if engine.turns[t].finish == LENGTH and t not in ended]
    assert ended == [turns[number] for number in (0, 4, 3, 6, 5, 2)]


# ---------------------------------------------------------------- the door


def test_a_turn_larger_than_the_whole_cache_is_refused_with_what_to_do() -> None:
    engine = FakeEngine(num_blocks=3)
    engine.submit([1] * 6, 7)  # 12 positions, for the last token is never fed back
    with pytest.raises(TurnRefused, match=r"needs 4 KV blocks of 4 tokens but the .* has 3"):
        engine.submit([1] * 6, 8)


def test_a_turn_longer_than_the_context_is_refused() -> None:
    engine = FakeEngine(context_tokens_max=10)
    engine.submit([1] * 6, 4)
    with pytest.raises(TurnRefused, match=r"6 tokens plus max_tokens=5 is more than .* 10 tokens"):
        engine.submit([1] * 6, 5)


def test_a_handle_in_use_is_refused() -> None:
    engine = FakeEngine()
    engine.submit([1], 3)
    engine.turns.clear()
    with pytest.raises(TurnRefused, match="handle 0 belongs to a turn that has not ended"):
        engine.submit([1], 3)


@pytest.mark.parametrize("sampled_before", [-1, 3])
def test_more_tokens_sampled_before_than_there_are_is_refused(sampled_before: int) -> None:
    with pytest.raises(TurnRefused, match=r"sampled_before must be in \[0, 2\]"):
        FakeEngine().submit([1, 2], 3, sampled_before=sampled_before)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_blocks", 0, "num_blocks must be at least 1, got 0"),
        ("block_tokens", -1, "block_tokens must be at least 1, got -1"),
        ("max_step_tokens", 3, "less than one token for each of max_running_turns=4"),
    ],
)
def test_limits_that_can_never_work_are_refused(name: str, value: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FakeEngine(**{name: value})


def test_blocks_are_counted_up() -> None:
    limits = EngineLimits(
        max_running_turns=1,
        max_step_tokens=1,
        num_blocks=1,
        block_tokens=4,
        context_tokens_max=1,
        vocab_size=1,
    )
    assert [limits.blocks_for(tokens) for tokens in (1, 4, 5, 8)] == [1, 1, 2, 2]


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
    assert engine.scheduler.take_answers() == [Paused(mode="abort")]
    assert (engine.scheduler.waiting_turns, engine.scheduler.free_blocks) == (1, 16)
    assert engine.step() == {}
    engine.scheduler.resume()
    assert engine.step() == {0: 2}


def test_tokens_after_an_abort_and_a_resubmission_are_those_of_an_uninterrupted_turn() -> None:
    engine = FakeEngine()
    turn = engine.submit([1, 2, 3], 12)
    for _ in range(5):
        engine.step()
    engine.scheduler.pause("abort")
    engine.settle()
    done = engine.turns[turn].token_ids
    rest = engine.submit([1, 2, 3, *done], 12 - len(done), sampled_before=len(done))
    engine.scheduler.resume()
    engine.run()
    assert [*done, *engine.turns[rest].token_ids] == uninterrupted([1, 2, 3], 12)


def test_keep_freezes_at_once_and_resume_goes_on_without_a_new_prefill() -> None:
    engine = FakeEngine()
    turn = engine.submit([1, 2], 6)
    engine.step()
    engine.scheduler.pause("keep")
    assert engine.step() == {}
    engine.scheduler.resume()
    engine.run()
    assert engine.answers == [Paused(mode="keep"), Resumed()]
    assert engine.turns[turn].token_ids == uninterrupted([1, 2], 6)
    assert len(engine.turns[turn].prefills) == 1


def test_wait_is_answered_when_the_last_running_turn_has_ended() -> None:
    engine = FakeEngine(max_running_turns=1)
    engine.submit([1], 3)
    engine.step()
    late = engine.submit([1], 3)
    engine.scheduler.pause("wait")
    engine.step()
    assert engine.answers == []
    engine.step()
    assert engine.answers == [Paused(mode="wait")]
    assert engine.step() == {}
    assert engine.turns[late].token_ids == []


def test_resume_during_a_wait_is_answered_and_the_wait_is_not() -> None:
    engine = FakeEngine()
    engine.submit([1], 5)
    engine.step()
    engine.scheduler.pause("wait")
    engine.scheduler.resume()
    engine.run()
    assert engine.answers == [Resumed()]


def test_a_second_pause_replaces_the_first_and_both_are_answered() -> None:
    engine = FakeEngine()
    turn = engine.submit([1], 5)
    engine.step()
    engine.scheduler.pause("wait")
    engine.scheduler.pause("abort")
    engine.settle()
    assert engine.answers == [Paused(mode="wait"), Paused(mode="abort")]
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
    assert engine.answers == [Paused(mode="keep"), Paused(mode="wait")]


# ---------------------------------------------------------------- weights


def test_a_prefill_that_straddles_a_swap_names_both_versions() -> None:
    engine = FakeEngine(max_step_tokens=4)
    turn = engine.submit([1] * 10, 3)
    engine.step()
    engine.ask_swap(1, "keep", "keep")
    engine.run()
    assert engine.turns[turn].prefills == [Prefill(turn, 0, [KvSpan(0, 0, 4), KvSpan(1, 4, 10)])]
    assert engine.recomputed_turns == 0


def test_kept_kv_needs_no_new_prefill_when_a_decode_goes_on_under_new_weights() -> None:
    engine = FakeEngine()
    turn = engine.submit([1] * 3, 4)
    engine.step()
    engine.ask_swap(1, "keep", "keep")
    engine.run()
    told = engine.turns[turn]
    assert told.versions == [0, 1, 1, 1]
    assert told.prefills == [Prefill(turn, 0, [KvSpan(0, 0, 3)])]
    assert told.kv == [0, 0, 0, 1, 1, 1]


def test_recomputed_turns_are_prefilled_again_ahead_of_waiting_ones() -> None:
    engine = FakeEngine(max_step_tokens=6)
    turn = engine.submit([1] * 5, 4)
    engine.step()
    urgent = engine.submit([1] * 5, 4, priority=-1)
    engine.ask_swap(1, "keep", "recompute")
    assert list(engine.step().values()) == [6]
    assert engine.turns[urgent].token_ids == []
    assert engine.recomputed_turns == 1
    engine.run()
    told = engine.turns[turn]
    assert told.prefills[1] == Prefill(turn, 1, [KvSpan(1, 0, 6)])
    assert told.versions == [0, 1, 1, 1]


def test_going_back_to_older_weights_keeps_the_kv_that_they_computed_first() -> None:
    engine = FakeEngine(max_step_tokens=4)
    turn = engine.submit([1] * 4, 9)
    engine.step()
    engine.ask_swap(1, "keep", "keep")
    engine.step()
    engine.ask_swap(0, "keep", "recompute")
    assert list(engine.step().values()) == [2]  # the position version 1 computed, and the newest
    engine.run()
    assert engine.turns[turn].prefills[1:] == [Prefill(turn, 2, [KvSpan(0, 0, 6)])]


def test_the_same_version_again_recomputes_nothing() -> None:
    engine = FakeEngine()
    turn = engine.submit([1] * 4, 3)
    engine.step()
    engine.ask_swap(0, "keep", "recompute")
    engine.run()
    assert engine.recomputed_turns == 0
    assert len(engine.turns[turn].prefills) == 1


def test_an_update_that_waits_starts_nothing_until_running_turns_have_ended() -> None:
    engine = FakeEngine(max_running_turns=2)
    turn = engine.submit([1], 3)
    engine.step()
    late = engine.submit([1], 2)
    engine.ask_swap(1, "wait", "keep")
    engine.run()
    assert engine.turns[turn].versions == [0, 0, 0]
    assert engine.turns[late].versions == [1, 1]


def test_an_update_with_abort_ends_turns_under_their_own_version() -> None:
    engine = FakeEngine()
    turn = engine.submit([1], 3)
    engine.step()
    engine.ask_swap(1, "abort", "keep")
    ended = engine.scheduler.take_ended()
    assert ended is not None
    assert (ended.version, ended.finish) == (0, bytes([ABORT]))
    engine.settle()
    assert engine.scheduler.version == 1
    assert engine.turns[turn].versions == [0]


def test_frozen_turns_are_not_waited_for() -> None:
    engine = FakeEngine()
    turn = engine.submit([1], 3)
    engine.step()
    engine.scheduler.pause("keep")
    engine.ask_swap(1, "wait", "keep")
    engine.settle()
    assert engine.scheduler.version == 1
    assert engine.step() == {}
    engine.scheduler.resume()
    engine.run()
    assert engine.turns[turn].versions == [0, 1, 1]


def test_asking_for_a_swap_again_changes_how_it_is_done() -> None:
    engine = FakeEngine()
    turn = engine.submit([1], 9)
    engine.step()
    engine.ask_swap(1, "wait", "keep")
    engine.step()
    assert engine.scheduler.version == 0
    engine.ask_swap(1, "abort", "keep")
    engine.settle()
    assert (engine.scheduler.version, engine.turns[turn].finish) == (1, ABORT)


# ---------------------------------------------------------------- anything at all

MODES: tuple[PauseMode, ...] = ("abort", "keep", "wait")
POLICIES: tuple[KvPolicy, ...] = ("keep", "recompute")


class AnythingAtAll(RuleBasedStateMachine):
    """Random submissions, cancels, pauses and swaps, in a cache that is too small for them."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(
            num_blocks=7, max_running_turns=3, max_step_tokens=5, context_tokens_max=28
        )
        self.pauses = 0
        self.resumes = 0

    @rule(
        prompt=st.lists(st.integers(0, 49), min_size=1, max_size=14),
        max_tokens=st.integers(1, 14),
        priority=st.integers(-1, 1),
        stop=st.lists(st.integers(0, 49), max_size=3),
    )
    def submit(self, prompt: list[int], max_tokens: int, priority: int, stop: list[int]) -> None:
        self.engine.submit(prompt, max_tokens, priority=priority, stop=stop)

    @precondition(lambda self: self.engine.turns)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.engine.turns)))
        before = self.engine.turns[turn].finish
        self.engine.scheduler.cancel(turn)
        self.engine.settle()
        assert self.engine.turns[turn].finish == (before or CANCELLED)

    @rule(mode=st.sampled_from(MODES))
    def pause(self, mode: PauseMode) -> None:
        self.engine.scheduler.pause(mode)
        self.engine.settle()

    @rule()
    def resume(self) -> None:
        self.engine.scheduler.resume()
        self.resumes += 1
        self.engine.settle()

    @rule(version=st.integers(0, 4), mode=st.sampled_from(MODES), kv=st.sampled_from(POLICIES))
    def swap(self, version: int, mode: PauseMode, kv: KvPolicy) -> None:
        self.engine.ask_swap(version, mode, kv)
        self.engine.settle()

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @invariant()
    def every_turn_is_somewhere(self) -> None:
        alive = sum(told.finish == RUNNING for told in self.engine.turns.values())
        scheduler = self.engine.scheduler
        assert alive == scheduler.running_turns + scheduler.waiting_turns
        assert scheduler.running_turns <= self.engine.limits.max_running_turns

    def teardown(self) -> None:
        """Left to itself, everything ends, as it would have ended alone."""
        self.resume()
        self.engine.run()
        assert self.engine.answers.count(Resumed()) == self.resumes
        assert self.engine.scheduler.free_blocks == self.engine.limits.num_blocks
        assert self.engine.scheduler.awaited_swap is None
        for told in self.engine.turns.values():
            assert told.finish != RUNNING
            told.check(self.engine.limits.vocab_size)


AnythingAtAll.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestAnythingAtAll = AnythingAtAll.TestCase
