"""Filing of steps: every token reaches its turn in order, with its version, whenever read."""

from array import array
from dataclasses import dataclass, field
from itertools import groupby

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate.orchestrator.core.events import StepArrived
from tidegate.orchestrator.core.filing import STEPS_MAX, TokenAppender
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.transport.messages import SamplingParams


@dataclass
class Expected:
    """A turn and its expected content."""

    turn: Turn
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def check(self) -> None:
        turn = self.turn
        assert turn.length == len(self.token_ids)
        assert turn.token_ids.tolist() == self.token_ids
        assert turn.logprobs.tolist() == self.logprobs
        spans = turn.spans()
        assert [s.version for s in spans for _ in range(s.start, s.end)] == self.versions
        assert [s.version for s in spans] == [version for version, _ in groupby(self.versions)]


def new_turn(number: int, *, is_evaluation: bool = False) -> Turn:
    rollout = Rollout(number, -1 if is_evaluation else 0, 0)
    rollout.extend([1, 2, 3])
    turn = Turn(rollout, SamplingParams(max_tokens=10_000))
    rollout.turns.append(turn)
    return turn


def step(
    rows: dict[int, list[tuple[int, float]]], version: int, *, finish: bytes = b""
) -> StepArrived:
    """Make a step of the given tokens by handle."""
    counts = [len(tokens) for tokens in rows.values()]
    tokens = [token for row in rows.values() for token in row]
    return StepArrived(
        engine="a",
        version=version,
        turns=memoryview(array("I", rows).tobytes()).cast("I"),
        token_ids=memoryview(array("i", (t for t, _ in tokens)).tobytes()).cast("i"),
        logprobs=memoryview(array("f", (p for _, p in tokens)).tobytes()).cast("f"),
        finish=finish,
        counts=None if set(counts) == {1} else memoryview(array("I", counts).tobytes()).cast("I"),
        prefills=[],
    )


class AnySteps(RuleBasedStateMachine):
    """Steps of any shape; turns begin and end; tokens are read now and then."""

    @initialize(turns=st.integers(1, 4))
    def start(self, turns: int) -> None:
        self.filing = TokenAppender()
        self.submissions: dict[int, Turn] = {}
        self.expected: dict[int, Expected] = {}
        self.over: list[Expected] = []
        self.on_engine: list[int] = []
        """Turns that the engine has: it learns late that a turn is over."""
        self.next_handle = self.next_token = 0
        self.version = 0
        self.tokens_sent = self.tokens_reported = 0
        for _ in range(turns):
            self.a_turn_begins(is_evaluation=False)

    @rule(is_evaluation=st.booleans())
    def a_turn_begins(self, is_evaluation: bool) -> None:
        self._submit(new_turn(self.next_handle, is_evaluation=is_evaluation))

    def _submit(self, turn: Turn) -> None:
        self.submissions[self.next_handle] = turn
        self.expected[self.next_handle] = Expected(turn)
        self.on_engine.append(self.next_handle)
        self.next_handle += 1

    @rule(times=st.integers(1, STEPS_MAX + 3), tokens_per_row=st.sampled_from([1, 1, 2, 16]))
    def steps_of_all_turns(self, times: int, tokens_per_row: int) -> None:
        for _ in range(times):
            self._send(dict.fromkeys(self.on_engine, tokens_per_row))

    @rule()
    def the_engine_gets_ended_sessions(self) -> None:
        self.on_engine = list(self.submissions)

    @rule(data=st.data())
    def a_step_of_some_turns_and_of_one_that_is_over(self, data: st.DataObject) -> None:
        handles = data.draw(st.sets(st.sampled_from([*self.submissions, 10_000])))
        self._send({handle: data.draw(st.integers(0, 3)) for handle in handles})

    @rule()
    def new_weights(self) -> None:
        self.version += 1

    @precondition(lambda self: self.submissions)
    @rule(data=st.data(), is_continued=st.booleans())
    def a_turn_is_over(self, data: st.DataObject, is_continued: bool) -> None:
        """Cancel a turn; tokens given to its rollout later follow its own."""
        handle = data.draw(st.sampled_from(sorted(self.submissions)))
        before = self.submissions.pop(handle)
        over = self.expected.pop(handle)
        self.over.append(over)
        if is_continued:
            rollout = before.rollout
            rollout.extend([7, 7])
            turn = Turn(rollout, SamplingParams(max_tokens=10_000))
            rollout.turns.append(turn)
            over.check()
            self._submit(turn)

    @precondition(lambda self: self.submissions)
    @rule(data=st.data())
    def tokens_are_read(self, data: st.DataObject) -> None:
        self.expected[data.draw(st.sampled_from(sorted(self.submissions)))].check()

    @rule()
    def the_engine_is_lost(self) -> None:
        """Lose the engine; its turns continue elsewhere from their tokens."""
        self.filing.end()
        self.filing = TokenAppender()
        self.on_engine = list(self.submissions)
        for turn in self.submissions.values():
            turn.sampled_before, turn.sampled_by = turn.length, -1

    def _send(self, tokens: dict[int, int]) -> None:
        rows: dict[int, list[tuple[int, float]]] = {}
        for handle, count in tokens.items():
            rows[handle] = [(self.next_token + n, -0.5 * n) for n in range(count)]
            self.next_token += count
            self.tokens_sent += count
            if handle in self.expected:
                found = self.expected[handle]
                found.token_ids += [token for token, _ in rows[handle]]
                found.logprobs += [logprob for _, logprob in rows[handle]]
                found.versions += [self.version] * count
        outcome = self.filing.file(self.submissions, step(rows, self.version))
        evaluation = sum(
            n for h, n in tokens.items() if h in self.submissions and self._is_evaluation(h)
        )
        unwanted = sum(n for h, n in tokens.items() if h not in self.submissions)
        assert (outcome.evaluation_tokens, outcome.late_tokens) == (evaluation, unwanted)
        self.tokens_reported += outcome.train_tokens + evaluation + unwanted

    def _is_evaluation(self, handle: int) -> bool:
        return self.expected[handle].turn.rollout.group_id < 0

    @invariant()
    def every_token_is_counted_at_once(self) -> None:
        if hasattr(self, "expected"):
            assert self.tokens_reported == self.tokens_sent
            for expected in self.expected.values():
                assert expected.turn.length == len(expected.token_ids)

    def teardown(self) -> None:
        if hasattr(self, "expected"):
            for expected in [*self.expected.values(), *self.over]:
                expected.check()


TestAnySteps = AnySteps.TestCase
TestAnySteps.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_many_steps_of_the_same_turns_are_filed_at_once_with_the_same_result() -> None:
    turns = [new_turn(number) for number in range(3)]
    submissions = dict(enumerate(turns))
    filing = TokenAppender()
    for n in range(10):
        filing.file(submissions, step({h: [(10 * n + h, -1.0)] for h in submissions}, version=4))
    assert turns[1].deferred_tokens is not None
    assert turns[1].length == 10
    assert len(turns[1].rollout.filed_token_ids) < 3 + 10  # the rest waits
    assert turns[1].rollout.token_ids.tolist() == [1, 2, 3, *range(1, 100, 10)]
    assert turns[2].token_ids.tolist() == list(range(2, 100, 10))
