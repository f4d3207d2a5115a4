"""The scheduler loses, repeats, mixes up and mislabels no turn; model-based, by hypothesis."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.external.fake_engine import FakeEngine, FakeRunner, uninterrupted
from tidegate.engine.scheduling.scheduler import StepColumns
from tidegate.errors import ConfigError, TurnRefused
from tidegate.transport.messages import (
    CANCELLED,
    LENGTH,
    RUNNING,
    STOP,
    KvPolicy,
    KvSpan,
    PauseMode,
    Prefill,
    TurnsResumed,
)

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
        ended += [t for t, reported in engine.turns.items() if reported.finish and t not in ended]
    assert ended == [urgent, first, second]


def test_a_step_with_prefills_only_sends_no_message() -> None:
    engine = FakeEngine(max_step_tokens=4)
    engine.submit([1, 2, 3, 4, 5], 1)
    rows = engine.scheduler.plan()
    assert engine.scheduler.complete(engine.runner.step(rows)) is None


def test_a_step_message_has_one_column_per_field() -> None:
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


def test_steps_that_decode_the_turns_of_the_step_before_have_their_rows_as_columns() -> None:
    engine = FakeEngine()
    short = engine.submit([1, 2, 3], 4)
    long = engine.submit([4], 9)

    def step() -> bool:
        engine.step()
        assert isinstance(engine.runner, FakeRunner)
        return engine.runner.had_columns

    assert [step() for _ in range(4)] == [False, True, True, True]
    assert engine.turns[short].finish == LENGTH
    later = engine.submit([5], 9)  # prefilled in the step in which the first turn is gone
    assert [step() for _ in range(5)] == [False, True, True, True, True]
    assert engine.turns[long].finish == LENGTH
    assert engine.turns[later].token_ids == uninterrupted([5], 9)[:5]


def test_a_stop_token_ends_a_turn_even_where_it_is_the_last_allowed() -> None:
    tokens = uninterrupted([1, 2], 10)
    engine = FakeEngine()
    inside = engine.submit([1, 2], 10, stop=[tokens[4]])
    at_the_end = engine.submit([1, 2], 5, stop=[tokens[4]])
    engine.run()
    for turn in (inside, at_the_end):
        assert engine.turns[turn].token_ids == tokens[:5]
        assert engine.turns[turn].finish == STOP


def test_the_lowest_ranked_turn_is_preempted_and_later_continues() -> None:
    engine = FakeEngine(num_blocks=5, max_running_turns=2)
    worse = engine.submit([1] * 8, 8, priority=1)
    engine.step()
    best = engine.submit([2] * 4, 8)
    while not engine.scheduler.waiting_turns or len(engine.turns[best].token_ids) < 2:
        engine.step()
    assert engine.scheduler.running_turns == 1
    engine.run()
    reported = engine.turns[worse]
    assert reported.token_ids == uninterrupted([1] * 8, 8)
    assert [prefill.output_tokens for prefill in reported.prefills] == [
        0,
        reported.prefills[1].output_tokens,
    ]
    positions = 8 + reported.prefills[1].output_tokens
    # Its first two blocks are still there; the next went to the turn that preempted it.
    assert reported.prefills[1] == Prefill(
        worse, positions - 8, [KvSpan(0, 0, positions)], cached_tokens=8
    )
    assert [prefill.output_tokens for prefill in engine.turns[best].prefills] == [0]


def test_a_preempted_turn_keeps_its_kv_until_its_blocks_are_needed() -> None:
    engine = FakeEngine(num_blocks=4, max_running_turns=2, max_step_tokens=12)
    best = engine.submit([1] * 8, 4)
    worse = engine.submit([2] * 4, 4)
    while engine.turns[best].finish == RUNNING:
        engine.step()
    assert len(engine.turns[worse].token_ids) == 1  # no block for the next, until now
    engine.run()
    assert [prefill.output_tokens for prefill in engine.turns[worse].prefills] == [0]


def test_a_turn_does_not_start_if_the_next_decodes_would_preempt_it() -> None:
    engine = FakeEngine(num_blocks=3, max_running_turns=2)
    first = engine.submit([1] * 2, 6)
    engine.step()
    late = engine.submit([2] * 8, 4)  # its two blocks are free, but the first turn will need one
    while engine.turns[first].finish == RUNNING:
        engine.step()
        assert engine.scheduler.running_turns <= 1
    engine.run()
    assert [prefill.output_tokens for prefill in engine.turns[late].prefills] == [0]


def test_a_cancelled_turn_leaves_the_others_in_their_order() -> None:
    engine = FakeEngine(max_running_turns=1)
    turns = [engine.submit([1], 1, priority=priority) for priority in (1, 2, 9, 5, 3, 8, 7)]
    engine.scheduler.cancel(turns[1])
    ended: list[int] = []
    while engine.step():
        ended += [t for t in turns if engine.turns[t].finish == LENGTH and t not in ended]
    assert ended == [turns[number] for number in (0, 4, 3, 6, 5, 2)]


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize(
    ("limits", "sampled"),
    [
        ({"num_blocks": 3}, 7),  # 12 positions, for the last token is never fed back
        ({"context_tokens_max": 10}, 4),
    ],
)
def test_a_turn_ends_by_its_length_where_the_context_or_the_kv_cache_ends(
    limits: dict[str, Any], sampled: int
) -> None:
    for max_tokens in (sampled - 1, sampled, sampled + 1, 2**40):
        engine = FakeEngine(**limits)
        engine.submit([1] * 6, max_tokens)
        [sequence] = engine.scheduler._turns.values()
        assert sequence.length_max - 6 == min(sampled, max_tokens)


def test_a_context_that_leaves_no_token_is_refused_with_what_to_do() -> None:
    with pytest.raises(TurnRefused, match=r"needs 4 KV blocks of 4 tokens but the .* has 3"):
        FakeEngine(num_blocks=3).submit([1] * 13, 1)
    with pytest.raises(TurnRefused, match=r"10 tokens leaves none of the model's 10"):
        FakeEngine(context_tokens_max=10).submit([1] * 10, 1)


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
    ("name", "value", "reported"),
    [
        ("num_blocks", 0, "num_blocks must be at least 1, got 0"),
        ("block_tokens", -1, "block_tokens must be at least 1, got -1"),
        ("max_step_tokens", 3, "less than one token for each of max_running_turns=4"),
    ],
)
def test_limits_that_can_never_work_are_refused(name: str, value: Any, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        FakeEngine(**{name: value})


# ---------------------------------------------------------------- anything at all

MODES: tuple[PauseMode, ...] = ("abort", "keep", "wait")
POLICIES: tuple[KvPolicy, ...] = ("keep", "recompute")


PROMPTS = st.one_of(
    st.lists(st.integers(0, 49), min_size=1, max_size=14),
    st.builds(
        lambda shared, own: [*range(shared), *own],
        st.integers(1, 14),
        st.lists(st.integers(0, 49), max_size=2),
    ),
)
"""Prompts that often share a beginning, so that turns share blocks."""


class AnythingAtAll(RuleBasedStateMachine):
    """Random submissions, cancellations, pauses and swaps, in a cache that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(
            num_blocks=7, max_running_turns=3, max_step_tokens=5, context_tokens_max=28
        )
        self.pauses = 0
        self.resumes = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        stop=st.lists(st.integers(0, 49), max_size=3),
    )
    def submit(self, prompt: list[int], max_tokens: int, priority: int, stop: list[int]) -> None:
        self.engine.submit(prompt, max_tokens, priority=priority, stop=stop)

    @rule(copies=st.integers(2, 4), prompt=PROMPTS, max_tokens=st.integers(1, 12))
    def submit_samples_of_one_prompt(self, copies: int, prompt: list[int], max_tokens: int) -> None:
        for _ in range(copies):
            self.engine.submit(prompt, max_tokens)

    @precondition(lambda self: self.engine.turns)
    @rule(data=st.data(), said_between=st.lists(st.integers(0, 49), max_size=3))
    def continue_from_what_a_turn_has(self, data: st.DataObject, said_between: list[int]) -> None:
        before = self.engine.turns[data.draw(st.sampled_from(sorted(self.engine.turns)))]
        context = [*before.prompt, *before.token_ids, *said_between]
        if len(context) < self.engine.limits.context_tokens_max:
            self.engine.submit(context, 1)

    @precondition(lambda self: self.engine.turns)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.engine.turns)))
        before = self.engine.turns[turn].finish
        self.engine.scheduler.cancel(turn)
        self.engine.settle()
        assert self.engine.turns[turn].finish == (before or CANCELLED)

    @rule(mode=st.sampled_from(MODES), clear_cache=st.booleans())
    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self.engine.scheduler.pause(mode, clear_cache=clear_cache)
        self.engine.settle()

    @rule()
    def resume(self) -> None:
        self.engine.scheduler.resume()
        self.resumes += 1
        self.engine.settle()

    @rule(version=st.integers(0, 4), mode=st.sampled_from(MODES), kv=st.sampled_from(POLICIES))
    def swap(self, version: int, mode: PauseMode, kv: KvPolicy) -> None:
        self.engine.request_swap(version, mode, kv)
        self.engine.settle()

    @rule()
    def forget_orchestrator(self) -> None:
        self.engine.scheduler.forget_orchestrator()
        assert self.engine.scheduler.swap_due() is None
        self.engine.settle()

    @rule(is_computed=st.booleans())
    def fail_a_step(self, is_computed: bool) -> None:
        rows = self.engine.scheduler.plan()
        if rows:
            if is_computed:  # as far as it came, for nothing
                self.engine.runner.step(rows)
            self.engine.scheduler.fail(sum(len(row.token_ids) for row in rows))

    @rule()
    def sleep(self) -> None:
        self.engine.scheduler.forget_kv()

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @invariant()
    def every_block_is_somewhere_and_none_that_is_shared_is_written(self) -> None:
        self.engine.scheduler.check()

    @invariant()
    def every_turn_is_somewhere(self) -> None:
        alive = {turn for turn, reported in self.engine.turns.items() if reported.finish == RUNNING}
        scheduler = self.engine.scheduler
        assert len(alive) == scheduler.running_turns + scheduler.waiting_turns
        assert set(scheduler.handles) == alive
        assert scheduler.running_turns <= self.engine.limits.max_running_turns

    def teardown(self) -> None:
        """Check that everything ends as it would have ended alone."""
        self.resume()
        self.engine.run()
        assert self.engine.answers.count(TurnsResumed()) == self.resumes
        assert self.engine.scheduler.free_blocks == self.engine.limits.num_blocks
        assert self.engine.scheduler.swap_due() is None
        for reported in self.engine.turns.values():
            assert reported.finish != RUNNING
            reported.check(self.engine.limits.vocab_size)


AnythingAtAll.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestAnythingAtAll = AnythingAtAll.TestCase
