"""Draft tokens change speed only, whatever is drafted and whatever happens to turns."""

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import settings

from tests.engine.external.fake_engine import FakeEngine, next_token, uninterrupted
from tests.engine.scheduling.test_scheduler import AnythingAtAll
from tidegate.engine.drafts.lookup import LookupDrafts
from tidegate.engine.drafts.rollouts import SAMPLES_MAX, RolloutDrafts
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.scheduling.drafts import (
    DEBT_MAX,
    NO_TOKENS,
    TRIAL_COST,
    DraftLengthController,
    DraftSource,
    StepCosts,
    Tokens,
)
from tidegate.engine.scheduling.scheduler import StepColumns
from tidegate.engine.scheduling.sequences import EngineSequence, admit
from tidegate.transport.messages import LENGTH, STOP, SamplingParams, SubmitTurn


class Oracle(DraftSource):
    """Draft source that computes the fake model's tokens, each wrong with some probability."""

    def __init__(self, right: float) -> None:
        self._right = right
        self._chance = random.Random(0)
        self.version = 0
        self.held: set[int] = set()

    def propose(self, turns: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        self.held |= {turn.handle for turn in turns}
        return [self._propose(turn, count) for turn, count in zip(turns, counts, strict=True)]

    def ended(self, turn: EngineSequence, *, is_whole: bool) -> None:
        self.held.discard(turn.handle)

    def _propose(self, turn: EngineSequence, count: int) -> Tokens:
        context = turn.tokens[: turn.length].tolist()
        first = turn.sampled_before + turn.output_tokens
        for index in range(first, first + count):
            token = next_token(context, turn.sampling.seed, index, self.version, 50)
            wrong = self._chance.random() >= self._right
            context.append((token + wrong) % 50)
        return np.array(context[turn.length :], np.int32)


def run(engine: FakeEngine) -> int:
    """Run to the end; return the number of steps."""
    steps = 0
    while engine.step():
        engine.scheduler.check()
        steps += 1
    return steps


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_speculation_does_not_change_the_sampled_tokens(right: float) -> None:
    engine = FakeEngine(drafts=Oracle(right), num_blocks=24, max_step_tokens=16)
    turns = [engine.submit([turn, 2, 3], 20) for turn in range(3)]
    steps = run(engine)
    for turn in turns:
        assert engine.turns[turn].token_ids == uninterrupted([turn, 2, 3], 20)
        assert engine.turns[turn].finish == LENGTH
    if right == 1.0:
        assert engine.accepted_tokens == engine.drafted_tokens > 0
        assert steps < 12
    else:
        assert 0 <= engine.accepted_tokens < engine.drafted_tokens
    assert (engine.accepted_tokens == 0) == (right == 0)


def test_a_step_reports_the_number_of_tokens_of_each_turn() -> None:
    engine = FakeEngine(drafts=Oracle(1.0))
    engine.submit([1, 2, 3], 4)
    engine.submit([1], 1)
    engine.step()
    rows = engine.scheduler.plan()
    assert [len(row.token_ids) for row in rows] == [1, 1, 1]
    output = engine.runner.step(rows)
    assert engine.scheduler.complete(output) == StepColumns(
        version=0,
        turns=np.array([0], "<u4").tobytes(),
        token_ids=output.token_ids.tobytes(),
        logprobs=output.logprobs.tobytes(),
        finish=bytes([LENGTH]),
        counts=np.array([3], "<u4").tobytes(),
        drafted_tokens=2,
        accepted_tokens=2,
    )


def test_no_token_follows_a_stop_token_in_a_draft() -> None:
    tokens = uninterrupted([1, 2], 10)
    oracle = Oracle(1.0)
    engine = FakeEngine(drafts=oracle)
    turn = engine.submit([1, 2], 10, stop=[tokens[2]])
    engine.run()
    assert engine.turns[turn].token_ids == tokens[:3]
    assert engine.turns[turn].finish == STOP
    assert not oracle.held


def test_prefills_go_before_draft_tokens() -> None:
    engine = FakeEngine(drafts=Oracle(1.0), max_running_turns=2, max_step_tokens=6)
    engine.submit([1] * 3, 9)
    engine.step()
    engine.submit([2] * 7, 1)
    assert list(engine.step().values()) == [1, 5]
    assert list(engine.step().values()) == [1, 1, 1, 1, 2]


def test_draft_tokens_take_no_block_that_running_turns_may_need() -> None:
    engine = FakeEngine(drafts=Oracle(1.0), num_blocks=4, max_running_turns=2, max_step_tokens=12)
    engine.submit([1] * 3, 9)
    engine.submit([2] * 3, 9)
    engine.step()
    assert list(engine.step().values()) == [1, 1]  # the last of their blocks, and two are free
    assert engine.scheduler.free_blocks == 2


def test_turns_with_penalties_get_no_draft_tokens() -> None:
    engine = FakeEngine(drafts=Oracle(1.0))
    requested = SamplingParams(max_tokens=5, presence_penalty=1.0)
    prompt = np.array([1, 2], "<i4").tobytes()
    engine.scheduler.submit(SubmitTurn(turn=0, token_ids=prompt, sampling=requested))
    engine.scheduler.complete(engine.runner.step(engine.scheduler.plan()))
    assert len(engine.scheduler.plan()) == 1


def test_draft_length_grows_with_acceptance_and_shrinks_with_running_turns() -> None:
    pace = DraftLengthController()
    alone, among_many = StepCosts().break_even(1), StepCosts().break_even(64)
    assert alone == 0.2
    assert (pace.count(10, alone), pace.count(10, among_many)) == (5, 1)
    for _ in range(20):
        pace.record(4, 4, 10)
    assert (pace.count(10, alone), pace.count(10, among_many)) == (16, 16)
    for _ in range(60):
        pace.record(4, 2, 10)
    assert (pace.count(10, alone), pace.count(10, StepCosts().break_even(8))) == (3, 1)


def test_a_turn_begins_with_the_acceptance_rate_of_those_before() -> None:
    engine = FakeEngine(drafts=Oracle(0.0), max_running_turns=1)
    for turn in range(12):
        engine.submit([turn, 2, 3], 12)
    run(engine)
    assert 5 < engine.drafted_tokens < 12 * 5  # what every turn drafts first at .75


def test_drafting_for_a_turn_with_low_acceptance_backs_off() -> None:
    pace, enough = DraftLengthController(), StepCosts().break_even(8)
    waits, length = [], 20
    for _ in range(7):
        pace.record(1, 0, length)
        start = length
        while not pace.count(length, enough):
            length += 1
        waits.append(length - start)
    assert waits == [2, 4, 8, 16, 32, 64, 64]
    pace.record(1, 1, length)
    assert pace.count(length, enough) == 1


def seconds_taken(
    turns: int,
    drafts: Oracle | None,
    *,
    drafted_s: float = 0.010,
    token_s: float = 0.001,
    missed_token_s: float = 0.0,
    tokens: int = 400,
    last_tokens: int = 0,
) -> float:
    """Return what ``turns`` sequences of ``tokens`` tokens take, the last one ``last_tokens`` more.

    A step takes 10 ms without drafts, with drafts ``drafted_s``, each token ``token_s`` more, and
    each context token that drafts have not been made for ``missed_token_s``.
    """
    most = tokens + last_tokens
    engine = FakeEngine(drafts=drafts, num_blocks=most * turns, context_tokens_max=most + 10)
    for turn in range(turns):
        engine.submit([turn, 2, 3], most if turn == turns - 1 else tokens)
    total_s = 0.0
    missed = 0
    while rows := engine.scheduler.plan():
        drafted = engine.scheduler.planned_draft_tokens
        engine.scheduler.complete(engine.runner.step(rows))
        missed += len(rows) - drafted
        took_s = (drafted_s if drafted else 0.010) + token_s * len(rows)
        if drafted:
            took_s, missed = took_s + missed_token_s * missed, 0
        engine.scheduler.step_took(took_s)
        total_s += took_s
    return total_s


class NothingFound(Oracle):
    """Finds no drafts, as a lookup in text that repeats nothing."""

    def _propose(self, turn: EngineSequence, count: int) -> Tokens:
        return NO_TOKENS


@pytest.mark.parametrize(("turns", "tokens"), [(1, 600), (8, 200)])
@pytest.mark.parametrize(
    ("drafted_s", "token_s", "missed_token_s", "steps"),
    [
        (0.04, 0.001, 0.0, TRIAL_COST),
        (0.01, 0.02, 0.0, TRIAL_COST),
        (0.01, 0.001, 0.0003, DEBT_MAX),
    ],
)
def test_drafts_that_do_not_pay_lose_half_a_percent_after_a_first_trial(
    turns: int, tokens: int, drafted_s: float, token_s: float, missed_token_s: float, steps: float
) -> None:
    taken_s = partial(seconds_taken, turns, token_s=token_s, tokens=tokens)
    plain_s = taken_s(None)
    for drafts in (Oracle(0.1), NothingFound(1.0)):
        lost_s = taken_s(drafts, drafted_s=drafted_s, missed_token_s=missed_token_s) - plain_s
        assert lost_s <= 0.005 * plain_s + steps * plain_s / tokens


def test_drafts_that_are_mostly_right_speed_up_few_turns() -> None:
    assert seconds_taken(1, Oracle(0.9)) < 0.4 * seconds_taken(1, None)
    assert seconds_taken(8, Oracle(0.9)) < 0.8 * seconds_taken(8, None)


def test_a_draft_model_pays_although_it_first_reads_each_context() -> None:
    plain_s = seconds_taken(2, None)
    assert seconds_taken(2, Oracle(0.9), missed_token_s=0.0003) < 0.6 * plain_s


def test_drafts_pay_again_once_few_turns_are_left() -> None:
    """With many running turns a draft token costs more than it saves; with the last one, less."""
    plain_s, drafted_s = (
        seconds_taken(16, drafts, token_s=0.004, tokens=100, last_tokens=300)
        for drafts in (None, Oracle(0.7))
    )
    alone_s = seconds_taken(1, None, token_s=0.004, tokens=300)
    assert drafted_s < plain_s - 0.1 * alone_s


# ---------------------------------------------------------------- prompt lookup


def lookup_draft(tokens: list[int], count: int, *, known_before: Sequence[int] = ()) -> list[int]:
    """Return the lookup drafts after ``tokens``, with shorter prefixes indexed before."""
    engine = FakeEngine(context_tokens_max=200, num_blocks=60)
    engine.submit(tokens, 20)
    turn = engine.scheduler._turns[0]
    drafts = LookupDrafts()
    for length in (*known_before, len(tokens)):
        turn.length = length
        (draft,) = drafts.propose([turn], [count])
    return [int(token) for token in draft]


@pytest.mark.parametrize("known_before", [(), (3,), (4, 5), (7, 8, 9), range(1, 10)])
def test_a_lookup_proposes_the_tokens_that_followed_the_last_match(
    known_before: Sequence[int],
) -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 6, 9, 1, 2, 3]
    assert lookup_draft(tokens, 4, known_before=known_before) == [5, 6, 9, 1]


def test_a_lookup_continues_a_repetition() -> None:
    assert lookup_draft([7, 1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 9, 2, 3, 1]])
def test_a_lookup_proposes_nothing_without_a_match(tokens: list[int]) -> None:
    assert lookup_draft(tokens, 4) == []


# ---------------------------------------------------------------- earlier samples


def ended_turn(
    prompt: list[int], output: list[int], handle: int = 0, before: int = 0
) -> EngineSequence:
    """Return a turn with this output, of which ``before`` tokens were sampled by another engine."""
    limits = FakeEngine(context_tokens_max=200, num_blocks=60).limits
    tokens = np.array(prompt + output[:before], "<i4").tobytes()
    message = SubmitTurn(
        turn=handle,
        token_ids=tokens,
        sampling=SamplingParams(max_tokens=40),
        sampled_before=before,
    )
    reader = OptionReader(vocab_size=50, max_running_turns=4)
    turn = admit(message, limits, handle, reader)
    for token_id in output[before:]:
        turn.append(token_id)
    return turn


def draft_of(drafts: RolloutDrafts, turn: EngineSequence, count: int = 4) -> list[int]:
    (draft,) = drafts.propose([turn], [count])
    return [int(token) for token in draft]


def test_a_turn_follows_an_earlier_sample_and_switches_where_they_diverge() -> None:
    drafts = RolloutDrafts()
    drafts.ended(ended_turn([1, 2, 3], [10, 11, 12, 13, 14, 15, 16]), is_whole=True)
    turn = ended_turn([1, 2, 3], [], handle=1)
    assert draft_of(drafts, turn) == [10, 11, 12, 13]
    turn.append(10)
    turn.append(11)
    assert draft_of(drafts, turn) == [12, 13, 14, 15]
    turn.append(30)
    assert draft_of(drafts, turn) == []
    for token_id in (12, 13, 14):
        turn.append(token_id)
    assert draft_of(drafts, turn) == [15, 16]
    drafts.ended(ended_turn([1, 2, 3], [20], handle=2), is_whole=True)
    assert draft_of(drafts, ended_turn([1, 2, 3], [], handle=3)) == [20]
    assert draft_of(drafts, ended_turn([4, 2, 3], [], handle=4)) == []


def test_a_migrated_turn_counts_as_a_sample_of_its_original_prompt() -> None:
    drafts = RolloutDrafts()
    drafts.ended(ended_turn([1, 2], [10, 11, 12, 13], before=2), is_whole=True)
    assert draft_of(drafts, ended_turn([1, 2], [10], handle=1, before=1)) == [11, 12, 13]


def test_incomplete_outputs_are_not_kept_and_old_prompts_are_dropped() -> None:
    drafts = RolloutDrafts(held_tokens_max=700)
    drafts.ended(ended_turn([1, 2, 3], [10, 11]), is_whole=False)
    assert draft_of(drafts, ended_turn([1, 2, 3], [], handle=1)) == []
    for prompt in range(2, 9):
        drafts.ended(ended_turn([prompt, 2, 3], [10, 11], handle=prompt), is_whole=True)
    known = [bool(draft_of(drafts, ended_turn([n, 2, 3], [], handle=n + 9))) for n in range(2, 9)]
    assert known == [False, False, True, True, True, True, True]


def test_samples_of_a_frequent_prompt_are_limited() -> None:
    drafts = RolloutDrafts()
    drafts.ended(ended_turn([1, 2, 3], list(range(10, 50))), is_whole=True)
    assert draft_of(drafts, ended_turn([1, 2, 3], [], handle=1)) == [10, 11, 12, 13]
    chance = random.Random(0)
    for handle in range(2, 60):
        output = [chance.randrange(50) for _ in range(40)]
        turn = ended_turn([1, 2, 3], output[:3], handle=handle)
        draft_of(drafts, turn)
        for token_id in output[3:]:
            turn.append(token_id)
        drafts.ended(turn, is_whole=True)
        (prompt,) = drafts._prompts.values()
        assert len(prompt.ends) <= 2 * SAMPLES_MAX * 40
    assert draft_of(drafts, ended_turn([1, 2, 3], output[:10], handle=60)) == output[10:14]


# ---------------------------------------------------------------- anything at all


class AnythingWithDrafts(AnythingAtAll):
    """The scheduler's state machine with draft tokens, in a cache that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle(0.7)
        self.engine = FakeEngine(
            drafts=self.oracle,
            num_blocks=9,
            max_running_turns=3,
            max_step_tokens=8,
            context_tokens_max=28,
        )

    def teardown(self) -> None:
        super().teardown()
        assert not self.oracle.held


AnythingWithDrafts.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestAnythingWithDrafts = AnythingWithDrafts.TestCase
