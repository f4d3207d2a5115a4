"""Which turn is where? Sends turns to engines and files what comes back. No I/O, no clock.

It knows engines, handles and tokens; not groups, rewards or batches. A turn outlives its
submissions: an abort, or the loss of an engine, only means that the next one starts from the
tokens sampled so far.
"""

from dataclasses import dataclass, field

import msgspec

from tidegate.orchestrator.events import Cancel, Command, EndTurn, FailTurn, StepArrived, Submit
from tidegate.orchestrator.rollout import Rollout, Turn, TurnPrefill
from tidegate.transport.messages import (
    FINISH_REASONS,
    LENGTH,
    RUNNING,
    STOP,
    Prefill,
    SubmitTurn,
)


@dataclass(slots=True)
class Submission:
    """A turn on an engine."""

    turn: Turn
    priority: int
    sampled_before: int
    """Output tokens of the turn that existed when it was submitted."""


@dataclass(slots=True)
class EngineTurns:
    """One engine and the turns it has."""

    weight_version: int
    max_running_turns: int
    submissions: dict[int, Submission] = field(default_factory=dict)
    """By handle."""

    @property
    def load(self) -> float:
        """Turns per slot."""
        return len(self.submissions) / self.max_running_turns


@dataclass(slots=True)
class StepOutcome:
    """What a step meant: commands, and how many of its tokens belong to whom."""

    commands: list[Command]
    train_tokens: int = 0
    evaluation_tokens: int = 0
    unwanted_tokens: int = 0
    """For turns that were over already."""


class TurnBook:
    """All turns that are going on, by engine and handle."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineTurns] = {}
        self.live_version = 0
        """The oldest weights that a turn submitted now could be sampled by. Never falls."""
        self._next_handle = 0
        self._waiting: list[tuple[Turn, int]] = []
        """Turns with their priorities, for which there is no engine now."""

    # ------------------------------------------------------------ engines

    def join(self, engine: str, weight_version: int, max_running_turns: int) -> list[Command]:
        """An engine came, or has reconnected: then nobody knows which turns reached it.

        Those are taken back from it and sent anew, here or elsewhere.
        """
        known = self.engines.get(engine)
        taken_back = list(known.submissions) if known else []
        commands: list[Command] = [Cancel(engine, handle) for handle in taken_back]
        commands += self.leave(engine)
        self.engines[engine] = EngineTurns(weight_version, max_running_turns)
        self._raise_live_version()  # the word of its last swap may have been lost
        return commands + self._submit_waiting()

    def leave(self, engine: str) -> list[Command]:
        """An engine is gone: its turns go on elsewhere, oldest group first."""
        gone = self.engines.pop(engine, None)
        if gone is None:
            return []
        self._raise_live_version()
        orphans = sorted(gone.submissions.values(), key=lambda s: s.priority)
        return [c for orphan in orphans for c in self.submit(orphan.turn, orphan.priority)]

    def swap(self, engine: str, version: int) -> list[Command]:
        """An engine serves ``version`` from now on."""
        if engine in self.engines:
            self.engines[engine].weight_version = version
            self._raise_live_version()
        return self._submit_waiting()

    def _raise_live_version(self) -> None:
        versions = [e.weight_version for e in self.engines.values()]
        self.live_version = max(self.live_version, min(versions, default=0))

    # ------------------------------------------------------------ turns out

    def submit(self, turn: Turn, priority: int) -> list[Command]:
        """Send a turn, with what it has sampled so far, to the least loaded engine.

        An engine that serves weights older than ``live_version`` (a late joiner) gets none, for
        its tokens could be older than admission has counted on.
        """
        fit = [
            (engine.load, name)
            for name, engine in self.engines.items()
            if engine.weight_version >= self.live_version
        ]
        if not fit:
            self._waiting.append((turn, priority))
            return []
        name = min(fit)[1]
        handle = self._next_handle
        self._next_handle = (handle + 1) & 0xFFFFFFFF
        self.engines[name].submissions[handle] = Submission(turn, priority, turn.length)
        sampling = msgspec.structs.replace(
            turn.sampling, max_tokens=turn.sampling.max_tokens - turn.length
        )
        message = SubmitTurn(
            turn=handle,
            token_ids=turn.rollout.token_ids.tobytes(),
            sampling=sampling,
            priority=priority,
            sampled_before=turn.length,
        )
        return [Submit(name, message)]

    def _submit_waiting(self) -> list[Command]:
        waiting, self._waiting = self._waiting, []
        return [c for turn, priority in waiting for c in self.submit(turn, priority)]

    def cancel(self, rollout: Rollout) -> list[Command]:
        """Forget whatever turn of this rollout is going on."""
        self._waiting = [(t, p) for t, p in self._waiting if t.rollout is not rollout]
        if not rollout.turns or rollout.turns[-1].finish_reason is not None:
            return []
        for name, engine in self.engines.items():
            for handle, submission in engine.submissions.items():
                if submission.turn.rollout is rollout:
                    del engine.submissions[handle]
                    return [Cancel(name, handle)]
        return []

    def reject(self, engine: str, handle: int, message: str) -> list[Command]:
        """An engine can never serve this turn."""
        submission = self._pop(engine, handle)
        if submission is None:
            return []
        submission.turn.finish_reason = "refused"
        return [FailTurn(submission.turn, message)]

    def _pop(self, engine: str, handle: int) -> Submission | None:
        turns = self.engines.get(engine)
        return turns.submissions.pop(handle, None) if turns else None

    # ------------------------------------------------------------ tokens in

    def step(self, event: StepArrived) -> StepOutcome:
        """File a step's tokens under their turns."""
        engine = self.engines.get(event.engine)
        submissions = engine.submissions if engine else {}
        for prefill in event.prefills:
            self._file_prefill(submissions.get(prefill.turn), prefill)
        handles = event.turns.tolist()
        rows = [submissions.get(handle) for handle in handles]
        outcome = _take_one_each(rows, event) if event.counts is None else _take(rows, event)
        if event.finish:
            for handle, code in zip(handles, event.finish, strict=True):
                if code != RUNNING and (ended := submissions.pop(handle, None)) is not None:
                    outcome.commands += self._finish(ended, code)
        return outcome

    @staticmethod
    def _file_prefill(submission: Submission | None, prefill: Prefill) -> None:
        if submission is not None:
            at = submission.sampled_before + prefill.at
            submission.turn.prefills.append(TurnPrefill(at, tuple(prefill.spans)))

    def _finish(self, submission: Submission, code: int) -> list[Command]:
        turn = submission.turn
        if code not in (STOP, LENGTH) and turn.length < turn.sampling.max_tokens:
            return self.submit(turn, submission.priority)
        turn.finish_reason = FINISH_REASONS[STOP if code == STOP else LENGTH]
        return [EndTurn(turn)]


def _take_one_each(rows: list[Submission | None], event: StepArrived) -> StepOutcome:
    """One token per row: the usual step of an engine. The hot path, run once per token."""
    outcome = StepOutcome([])
    version, engine = event.version, event.engine
    token_ids, logprobs = event.token_ids.tolist(), event.logprobs.tolist()
    for submission, token_id, logprob in zip(rows, token_ids, logprobs, strict=True):
        if submission is None:
            outcome.unwanted_tokens += 1
            continue
        turn = submission.turn
        turn.append(token_id, logprob, version, engine)
        if turn.rollout.group_id < 0:
            outcome.evaluation_tokens += 1
    outcome.train_tokens = len(rows) - outcome.unwanted_tokens - outcome.evaluation_tokens
    return outcome


def _take(rows: list[Submission | None], event: StepArrived) -> StepOutcome:
    """Any number of tokens per row."""
    assert event.counts is not None
    outcome = StepOutcome([])
    token_ids, logprobs = event.token_ids.cast("B"), event.logprobs.cast("B")
    at = 0
    for submission, count in zip(rows, event.counts.tolist(), strict=True):
        end = at + count
        if submission is None:
            outcome.unwanted_tokens += count
        elif count:
            turn = submission.turn
            own = slice(4 * at, 4 * end)
            turn.extend(count, token_ids[own], logprobs[own], event.version, event.engine)
            if turn.rollout.group_id < 0:
                outcome.evaluation_tokens += count
        at = end
    outcome.train_tokens = at - outcome.unwanted_tokens - outcome.evaluation_tokens
    return outcome
