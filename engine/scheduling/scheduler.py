"""Continuous-batching scheduler of an engine: plans each step's rows, and takes in its results.

Pure: the worker's loop calls ``plan`` for the rows to compute and ``complete`` with what was
sampled. A step takes decodes first, then chunks of prefills, then draft tokens, within the step
budget. Which turns run at all, and in which KV blocks, is the running set's decision
(``sequence_queues.py``).
"""

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate.engine.execution.runner import Row, RowSampling, StepOutput
from tidegate.engine.memory.step_budget import StepBudget
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.sampling.scoring import ScoringCapabilities
from tidegate.engine.scheduling.drafts import DraftSource, Speculation
from tidegate.engine.scheduling.pauses import PauseGate
from tidegate.engine.scheduling.score_queue import ScoreQueue
from tidegate.engine.scheduling.sequence_queues import SequenceQueues
from tidegate.engine.scheduling.sequences import AcceptedTokens, EngineLimits, EngineSequence, admit
from tidegate.engine.scheduling.step_columns import (
    EndedTurn,
    SampledRows,
    ended_columns,
    failures_of,
)
from tidegate.engine.scheduling.step_columns import StepColumns as StepColumns
from tidegate.errors import TurnRefused
from tidegate.transport import messages, scoring
from tidegate.transport.limits import cut
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    RUNNING,
    FinishWeightUpdate,
    Message,
    PauseMode,
    SubmitTurn,
    TurnsResumed,
)
from tidegate.transport.scoring import ScoreTokens


class StepPlanner:
    """Assigns one step's token budget and KV blocks to turns."""

    def __init__(self, seats: SequenceQueues, speculation: Speculation | None) -> None:
        self._seats = seats
        self._prefixes = seats.prefixes
        self._speculation = speculation
        self._planned: list[EngineSequence] = []

    def plan(self, tokens: int, version: int, *, may_start: bool) -> list[EngineSequence]:
        """Return the turns of a step of at most ``tokens`` tokens, with chunks and drafts set.

        ``version`` is the live weights'. Waiting turns are admitted only if ``may_start``.
        """
        planned: list[EngineSequence] = []
        self._planned = planned
        left = tokens - self._plan_decodes()
        for turn in self._seats.running:
            if turn.is_prefilling and left > 0:
                left -= self._plan_chunk(turn, left)
        if left > 0 and may_start:
            for turn in self._seats.start_waiting(version, tokens):
                left -= self._plan_chunk(turn, left)
                if left == 0:
                    break
        if self._speculation is not None:
            self._plan_drafts(self._speculation, left)
        return planned

    def _plan_decodes(self) -> int:
        """Plan one token for each turn that is past its prefill and has room for it."""
        planned = self._planned
        for turn in self._seats.running.copy():
            if turn.is_prefilling:
                # Recomputed turns can lack blocks. They get a first one here, in the order of
                # rank, because a turn that is already planned must not be preempted.
                if turn.computed >= turn.block_tokens_held:
                    self._seats.grow(turn)
                continue
            if turn.computed < turn.block_tokens_held or self._seats.grow(turn):
                turn.chunk_tokens, turn.drafted = 1, 0
                planned.append(turn)
        return len(planned)

    def _plan_chunk(self, turn: EngineSequence, tokens_left: int) -> int:
        """Plan a prefill chunk, as large as the turn's blocks and the step's budget allow."""
        self._prefixes.take(turn, self._prefixes.find(turn))
        end = min(turn.length, turn.computed + tokens_left)
        self._seats.grow_freely(turn, end)
        turn.drafted = 0
        turn.chunk_tokens = min(end, turn.block_tokens_held) - turn.computed
        if turn.chunk_tokens > 0:
            self._planned.append(turn)
            self._prefixes.share_planned(turn)
        return turn.chunk_tokens

    def _plan_drafts(self, speculation: Speculation, tokens_left: int) -> None:
        """Add draft tokens to decoding turns, as far as the step's budget and free blocks allow."""
        decodes = [turn for turn in self._planned if not turn.is_prefilling]
        for turn, draft in speculation.draft(decodes, tokens_left):
            self._seats.grow_to_spare(turn, turn.length + len(draft))
            turn.drafted = min(len(draft), turn.block_tokens_held - turn.length)
            turn.tokens[turn.length : turn.length + turn.drafted] = draft[: turn.drafted]


@dataclass(frozen=True, slots=True)
class _Preparing:
    """A submitted turn whose grammars are still being compiled."""

    message: SubmitTurn
    arrival: int
    futures: list[Future[Any]]


class EngineScheduler:
    """All turns and scoring requests of one engine, and the version of its live weights."""

    def __init__(
        self,
        limits: EngineLimits,
        version: int = 0,
        *,
        options: OptionReader | None = None,
        scoring: ScoringCapabilities | None = None,
        shares_prefixes: bool = True,
        drafts: DraftSource | None = None,
    ) -> None:
        """``options`` reads the turns' sampling options; None serves neither text options
        nor custom logit processors. ``scoring`` says what the model can score; None:
        nothing. ``shares_prefixes`` and ``drafts`` change speed only; tests compare runs
        with and without them."""
        self.version = version
        """Version of the live weights."""
        self._limits = limits
        self._options = options or OptionReader(
            vocab_size=limits.vocab_size, max_running_turns=limits.max_running_turns
        )
        self._seats = SequenceQueues(limits, shares_prefixes=shares_prefixes)
        self.scores = ScoreQueue(limits, scoring or ScoringCapabilities(hidden_size=1), self._seats)
        """Queue of the scoring requests."""
        self.sessions = self._seats.sessions
        """Contexts that are kept for the next turns of their rollouts."""
        self._prefixes = self._seats.prefixes
        self._speculation = None if drafts is None else Speculation(drafts)
        self._planner = StepPlanner(self._seats, self._speculation)
        self._adapters: frozenset[str] = frozenset()
        """Names of the live version's LoRA adapters."""
        self._gate = PauseGate()
        self._budget = StepBudget(limits.max_step_tokens)
        self._clears_cache = False
        """Whether a pending pause is to empty the prefix cache when it takes effect."""
        self._turns: dict[int, EngineSequence] = {}
        """Every running or waiting turn, by handle; scoring requests are in ``scores``."""
        self._preparing: dict[int, _Preparing] = {}
        """Turns whose grammars are being compiled, by handle; disjoint from ``_turns``."""
        self._arrivals = 0
        self._planned: list[EngineSequence] = []
        self._ended: list[EndedTurn] = []
        self._answers: list[Message] = []

    # ------------------------------------------------------------ what others ask for

    def submit(self, message: SubmitTurn) -> None:
        """Queue a turn, compiling its grammars synchronously.

        Raises:
            tidegate.errors.TurnRefused: it can never be served as asked.
        """
        self._refuse_known(message.turn)
        self._arrivals += 1
        self._admit(message, self._arrivals - 1)

    def submit_prepared(self, message: SubmitTurn) -> None:
        """Queue a turn once its grammars are compiled, in its place by arrival.

        A refusal after that is among ``take_answers``.

        Raises:
            tidegate.errors.TurnRefused: it can never be served as asked.
        """
        self._refuse_known(message.turn)
        self._arrivals += 1
        if futures := self._options.prepare(message):
            self._preparing[message.turn] = _Preparing(message, self._arrivals - 1, futures)
        else:
            self._admit(message, self._arrivals - 1)

    def _refuse_known(self, handle: int) -> None:
        if handle in self._turns or handle in self._preparing:
            raise TurnRefused(
                f"turn handle {handle} belongs to a turn that has not ended; use each handle once"
            )

    def _admit_prepared(self) -> None:
        """Queue the turns whose grammars have been compiled, or refuse them if
        compilation failed."""
        ready = [each for each in self._preparing.values() if all(f.done() for f in each.futures)]
        for each in ready:
            del self._preparing[each.message.turn]
            try:
                self._admit(each.message, each.arrival)
            except TurnRefused as error:
                why = cut(str(error))
                self._answers.append(messages.TurnFailed(turn=each.message.turn, message=why))

    def _admit(self, message: SubmitTurn, arrival: int) -> None:
        self.scores.refuse_turns()
        if not self._has(message.sampling.adapter):
            raise TurnRefused(
                f"v{self.version} has no adapter {message.sampling.adapter!r}, it has "
                f"{sorted(self._adapters) or 'none'}; publish it first"
            )
        turn = admit(message, self._limits, arrival, self._options)
        self._turns[turn.handle] = turn
        self._seats.queue(turn)

    def score(self, message: ScoreTokens) -> None:
        """Queue a scoring request; it is ranked among the turns.

        Raises:
            tidegate.errors.ScoreRefused: it can never be answered as asked.
        """
        self.scores.ask(message, self._arrivals)
        self._arrivals += 1

    def cancel(self, handle: int) -> None:
        """End a turn. Unknown handles are ignored, because the turn may just have finished."""
        if self._preparing.pop(handle, None) is not None:
            self._ended.append(EndedTurn(handle, CANCELLED))
            return
        turn = self._turns.get(handle)
        if turn is not None:
            self._seats.remove(turn)
            self._end(turn, CANCELLED)

    def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stop turns as ``mode`` says; ``take_answers`` reports when the pause has taken effect."""
        self._gate.pause(mode)
        self._clears_cache |= clear_cache
        if mode == "abort":
            self._abort_running()

    def resume(self) -> None:
        """Lift any pause, pending or in effect."""
        self._gate.resume()
        self._clears_cache = False
        self._answers.append(TurnsResumed())

    def ask_swap(self, update: FinishWeightUpdate) -> None:
        """Request a swap to staged weights; ``swap_due`` reports when it can be done."""
        self._gate.ask_swap(update)
        if update.pause_mode == "abort":
            self._abort_running()

    def drop_swap(self) -> None:
        """Cancel the pending swap, because its weights are no longer staged.
        Harmless without one."""
        self._gate.end_swap()

    def start_over(self) -> None:
        """Drop pauses, swaps, sessions and scores of a lost orchestrator; turns continue."""
        is_held = self._gate.is_held
        self._gate = PauseGate()
        self._gate.is_held = is_held
        self._clears_cache = False
        self._answers.clear()
        self.scores.clear()
        self.sessions.forget()

    def hold(self, is_held: bool) -> None:
        """Stop or allow all steps, whatever pauses say; used while memory is asleep."""
        self._gate.is_held = is_held

    def forget_kv(self) -> None:
        """Preempt all running turns and empty the prefix cache, because the KV memory is gone."""
        for turn in self._seats.remove_running():
            self._seats.queue(turn)
        self._prefixes.forget([], self.version)

    # ------------------------------------------------------------ what the worker moves

    def swap_due(self) -> FinishWeightUpdate | None:
        """Return the swap to do now, before the next step; None if there is none."""
        return self._gate.swap_due(self.running_turns)

    def weights_swapped(self, update: FinishWeightUpdate, *, adapters: Collection[str] = ()) -> int:
        """Take note of a swap the runner has done; return how many turns must recompute KV.

        Turns whose adapter is not among the new ``adapters`` are refused.
        """
        recomputed = 0
        self.scores.begin_again()
        self._adapters = frozenset(adapters)
        for turn in [turn for turn in self._turns.values() if not self._has(turn.adapter)]:
            self._refuse(turn, f"v{update.version} came without its adapter {turn.adapter!r}")
        for turn in self._seats.running:
            turn.history.swap(self.version, turn.computed)
            if update.kv_policy == "recompute":
                recomputed += self._seats.recompute(turn, update.version)
        self.version = update.version
        # Even if the version is the same: a restarted orchestrator may reuse a number.
        self._prefixes.forget(self._seats.running, self.version)
        self._gate.end_swap()
        return recomputed

    def take_answers(self) -> list[Message]:
        """Return the answers to pauses, resumes and prepared turns that are due, each once."""
        if self._preparing:
            self._admit_prepared()
        paused = self._gate.take_effective(self.running_turns)
        if paused and self._clears_cache:
            self._clears_cache = False
            self._prefixes.forget(self._seats.running, self.version)
        answers = [*self._answers, *paused]
        self._answers.clear()
        return answers

    def take_ended(self) -> StepColumns | None:
        """Return turns that were aborted or cancelled between steps, as rows without tokens."""
        if not self._ended:
            return None
        ended, self._ended = self._ended, []
        return ended_columns(ended, self.version)

    @property
    def has_ended(self) -> bool:
        """Whether ``take_ended`` would return rows."""
        return bool(self._ended)

    def plan(self) -> list[Row]:
        """Choose the rows of the next step; an empty list if nothing may run.

        Every non-empty plan must be followed by ``complete``, ``fail`` or ``refuse_planned``.
        """
        self._planned = []
        if not self._gate.turns_run:
            return []
        self._planned = self._planner.plan(
            self._budget.tokens, self.version, may_start=self._gate.turns_start
        )
        if self._speculation is None:
            return [turn.next_row() for turn in self._planned]
        return [row for turn in self._planned for row in (turn.next_row(), *turn.draft_rows())]

    def complete(self, output: StepOutput) -> StepColumns | None:
        """Apply a step's output to the planned turns; None if the step sampled nothing."""
        self._budget.succeed()
        sampled: list[int] = output.token_ids.tolist()
        failures = failures_of(output, self.version)
        is_sound = not failures and not output.details
        rows = SampledRows()
        scores = iter(output.scores)
        place = 0
        for turn in self._planned:
            turn.computed += turn.chunk_tokens
            if turn.computed >= turn.share_at:
                self._prefixes.share(turn, turn.computed)
            if turn.is_score:
                self._answers += self.scores.take(turn, scores, self.version)
                continue
            if turn.computed < turn.length:
                continue
            if is_sound and not turn.drafted and not turn.is_prefilling:  # nearly every row
                if rows.add_next(turn, place, sampled[place]) != RUNNING:
                    self._finish(turn, is_whole=True)
                place += 1
            else:
                place = self._take(turn, rows, place, output, failures)
        if place != len(sampled):
            raise AssertionError(f"{len(sampled)} tokens sampled for {place} rows")
        return rows.columns(output, self.version) if rows.handles else None

    def fail(self, tokens: int) -> bool:
        """Preempt all turns after an out-of-memory step; False if it cannot be smaller.

        Later steps have half the tokens for a while. Turns outside the failed step are preempted
        too, because they may share blocks that it should have computed.
        """
        self.forget_kv()
        return self._budget.fail(tokens)

    def planned_rows(self) -> list[list[Row]]:
        """Return the planned step's rows, one list per turn, in the order of the plan."""
        return [[turn.next_row(), *turn.draft_rows()] for turn in self._planned]

    def probe_row(self) -> Row:
        """Return a row of one token and no turn, to test whether the model works at all."""
        sampling = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
        samples = sampling if self.scores.generates else None
        return Row(np.zeros(1, np.int32), 0, [0], samples)

    def refuse_planned(self, failed: Mapping[int, str]) -> None:
        """Refuse planned turns; ``failed`` maps places in the plan to reasons.

        The step is planned anew, and the other turns are preempted, because they may share KV with
        the refused ones.
        """
        for place, why in failed.items():
            turn = self._planned[place]
            if turn.is_score:
                self.scores.cancel(turn.handle)
                refusal = scoring.ScoreFailed(request_id=turn.handle, message=cut(why))
                self._answers.append(refusal)
            else:
                self._refuse(turn, why)
        self._planned = []
        self.forget_kv()

    # ------------------------------------------------------------ what there is

    @property
    def step_tokens_max(self) -> int:
        """Token budget of the next step."""
        return self._budget.tokens

    @property
    def handles(self) -> list[int]:
        """Handles of all turns, including ended ones that have not been reported yet."""
        ended = (ended.handle for ended in self._ended)
        return [*self._turns, *self._preparing, *ended]

    @property
    def running_turns(self) -> int:
        """Number of turns in the running set, frozen or not."""
        return len(self._seats.running)

    @property
    def waiting_turns(self) -> int:
        """Number of turns outside the running set; they hold no KV blocks."""
        return self._seats.waiting_turns + len(self._preparing)

    @property
    def is_preparing(self) -> bool:
        """Whether a grammar is being compiled; the engine must poll, because nothing wakes it."""
        return bool(self._preparing)

    @property
    def is_pause_asked(self) -> bool:
        """Whether a pause is pending or in effect."""
        return self._gate.is_pause_asked

    @property
    def is_pause_in_effect(self) -> bool:
        """Whether a pause is in effect and no turn runs."""
        return self._gate.is_pause_in_effect(self.running_turns)

    @property
    def is_swap_asked(self) -> bool:
        """Whether a swap to staged weights is pending."""
        return self._gate.is_swap_asked

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that no turn holds."""
        return self._seats.free_blocks

    @property
    def can_step(self) -> bool:
        """Whether ``plan`` may return rows."""
        if self._seats.running:
            return self._gate.turns_run
        return self._seats.waiting_turns > 0 and self._gate.turns_start

    # ------------------------------------------------------------ completing

    def _take(
        self,
        turn: EngineSequence,
        rows: SampledRows,
        place: int,
        output: StepOutput,
        failures: Mapping[int, str],
    ) -> int:
        """Give a turn its samples, from ``place`` on; return the next turn's first place."""
        end = place + 1 + turn.drafted
        if place in failures:
            self._refuse(turn, failures[place])
            return end
        sound = next((n for n in range(place, end) if n in failures), end)
        accepted = rows.add(turn, place, output.token_ids[place:sound].tolist(), self.version)
        if output.details:
            told = [output.details.get(n) for n in range(place, place + accepted.tokens)]
            rows.tell(turn.handle, told)
        self._go_on(turn, accepted, end - place - 1)
        return end

    def _go_on(self, turn: EngineSequence, accepted: AcceptedTokens, drafted: int) -> None:
        """Share the accepted tokens' blocks, update the draft pace, and finish the turn
        if it is complete."""
        if drafted:
            self._prefixes.share(turn, turn.computed)
            if self._speculation is not None:
                self._speculation.learn(turn, drafted, accepted.tokens - 1)
        if accepted.finish != RUNNING:
            self._finish(turn, is_whole=True)

    def _has(self, adapter: str) -> bool:
        return not adapter or adapter in self._adapters

    # ------------------------------------------------------------ leaving

    def _finish(self, turn: EngineSequence, *, is_whole: bool = False) -> None:
        """Remove and forget a turn; ``is_whole`` says that it finished by itself."""
        self._seats.remove(turn)
        self._forget(turn, is_whole=is_whole)

    def _forget(self, turn: EngineSequence, *, is_whole: bool) -> None:
        del self._turns[turn.handle]
        if self._speculation is not None:
            self._speculation.ended(turn, is_whole=is_whole)

    def _refuse(self, turn: EngineSequence, why: str) -> None:
        """End a turn that cannot be sampled, and queue its refusal; its tokens of this
        step are dropped."""
        self._finish(turn)
        self._answers.append(messages.TurnFailed(turn=turn.handle, message=cut(why)))

    def _end(self, turn: EngineSequence, finish: int) -> None:
        self._forget(turn, is_whole=False)
        self._ended.append(EndedTurn(turn.handle, finish))

    def _abort_running(self) -> None:
        for turn in self._seats.remove_running():
            if turn.is_score:
                self._seats.queue(turn)
            else:
                self._end(turn, ABORT)

    # ------------------------------------------------------------ for tests

    def check(self) -> None:
        """Raise AssertionError unless turns and blocks agree, and none is written twice."""
        self._seats.check()
