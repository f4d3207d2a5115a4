"""Continuous-batching scheduler of an engine: plans each step's rows, and takes in its results.

Pure: the worker's loop calls ``plan`` for the rows to compute and ``complete`` with what was
sampled. A step takes decodes first, then chunks of prefills, then draft tokens, within the step
budget. Which turns run at all, and in which KV blocks, is the running set's decision
(``seats.py``).
"""

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate.engine.execution.runner import Row, RowSampling, StepOutput
from tidegate.engine.memory.step_budget import StepBudget
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.sampling.scoring import ScoringTraits
from tidegate.engine.scheduling.drafts import DraftSource, Speculation
from tidegate.engine.scheduling.pauses import PauseGate
from tidegate.engine.scheduling.scores import ScoreDesk
from tidegate.engine.scheduling.seats import Seats
from tidegate.engine.scheduling.step_columns import (
    EndedTurn,
    SampledRows,
    ended_columns,
    failures_of,
)
from tidegate.engine.scheduling.step_columns import StepColumns as StepColumns
from tidegate.engine.scheduling.turns import AcceptedTokens, EngineLimits, TurnState, admit
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
    Resumed,
    SubmitTurn,
)
from tidegate.transport.scoring import ScoreTokens


class StepPlanner:
    """Hands out the tokens and the blocks of one step at a time."""

    def __init__(self, seats: Seats, speculation: Speculation | None) -> None:
        self._seats = seats
        self._prefixes = seats.prefixes
        self._speculation = speculation
        self._planned: list[TurnState] = []

    def plan(self, tokens: int, version: int, *, may_start: bool) -> list[TurnState]:
        """The turns of a step of at most so many tokens, each told what it computes.

        ``version`` is the live weights'. Unless turns ``may_start``, only those that run go on.
        """
        planned: list[TurnState] = []
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
                # rank, for nobody may be thrown out who is planned already.
                if turn.computed >= turn.block_tokens_held:
                    self._seats.grow(turn)
                continue
            if turn.computed < turn.block_tokens_held or self._seats.grow(turn):
                turn.chunk_tokens, turn.drafted = 1, 0
                planned.append(turn)
        return len(planned)

    def _plan_chunk(self, turn: TurnState, tokens_left: int) -> int:
        """Plan what is left of a prefill, as far as it has room and the step has tokens."""
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
        """Have decodes verify guesses, where prefills leave tokens and turns leave blocks."""
        decodes = [turn for turn in self._planned if not turn.is_prefilling]
        for turn, draft in speculation.draft(decodes, tokens_left):
            self._seats.grow_to_spare(turn, turn.length + len(draft))
            turn.drafted = min(len(draft), turn.block_tokens_held - turn.length)
            turn.tokens[turn.length : turn.length + turn.drafted] = draft[: turn.drafted]


@dataclass(frozen=True, slots=True)
class _Preparing:
    """A turn that waits for its grammars to be compiled."""

    message: SubmitTurn
    arrival: int
    futures: list[Future[Any]]


class Scheduler:
    """All turns of one engine, and its weights' version."""

    def __init__(
        self,
        limits: EngineLimits,
        version: int = 0,
        *,
        options: OptionReader | None = None,
        scoring: ScoringTraits | None = None,
        shares_prefixes: bool = True,
        drafts: DraftSource | None = None,
    ) -> None:
        """``options`` reads what turns ask of sampling; None serves no text, and no user's own
        processors. ``scoring``: what the model tells of given tokens; None: nothing.
        ``shares_prefixes`` and ``drafts`` change nothing but speed; tests compare them with none.
        """
        self.version = version
        """The live weights'."""
        self._limits = limits
        self._options = options or OptionReader(
            vocab_size=limits.vocab_size, max_running_turns=limits.max_running_turns
        )
        self._seats = Seats(limits, shares_prefixes=shares_prefixes)
        self.scores = ScoreDesk(limits, scoring or ScoringTraits(hidden_size=1), self._seats)
        """What is asked for beside turns."""
        self.sessions = self._seats.sessions
        """Whose contexts are gone on with."""
        self._prefixes = self._seats.prefixes
        self._speculation = None if drafts is None else Speculation(drafts)
        self._planner = StepPlanner(self._seats, self._speculation)
        self._adapters: frozenset[str] = frozenset()
        """The live version's, by name."""
        self._gate = PauseGate()
        self._budget = StepBudget(limits.max_step_tokens)
        self._clears_cache = False
        """Whether a pause that is yet to take effect is to."""
        self._turns: dict[int, TurnState] = {}
        """Every turn by its handle, running or waiting; scores are elsewhere."""
        self._preparing: dict[int, _Preparing] = {}
        """Turns by handle whose options are being compiled; not among ``_turns`` yet."""
        self._arrivals = 0
        self._planned: list[TurnState] = []
        self._ended: list[EndedTurn] = []
        self._answers: list[Message] = []

    # ------------------------------------------------------------ what others ask for

    def submit(self, message: SubmitTurn) -> None:
        """Queue a turn.

        Raises:
            tidegate.errors.TurnRefused: it can never be served as asked.
        """
        self._refuse_known(message.turn)
        self._arrivals += 1
        self._admit(message, self._arrivals - 1)

    def submit_prepared(self, message: SubmitTurn) -> None:
        """Queue a turn once its grammars are compiled, in its place by arrival; mostly at once.

        What refuses it after that is among ``take_answers``.

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
        """Queue the turns whose grammars are compiled, or could not be."""
        ready = [each for each in self._preparing.values() if all(f.done() for f in each.futures)]
        for each in ready:
            del self._preparing[each.message.turn]
            try:
                self._admit(each.message, each.arrival)
            except TurnRefused as error:
                why = cut(str(error))
                self._answers.append(messages.TurnRefused(turn=each.message.turn, message=why))

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
        """Queue a request to score, among the turns.

        Raises:
            tidegate.errors.ScoreRefused: it can never be answered as asked.
        """
        self.scores.ask(message, self._arrivals)
        self._arrivals += 1

    def cancel(self, handle: int) -> None:
        """End a turn; unknown handles are ignored, for it may just have finished."""
        if self._preparing.pop(handle, None) is not None:
            self._ended.append(EndedTurn(handle, CANCELLED))
            return
        turn = self._turns.get(handle)
        if turn is not None:
            self._seats.remove(turn)
            self._end(turn, CANCELLED)

    def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stop turns as ``mode`` says; ``take_answers`` tells when it has taken effect."""
        self._gate.pause(mode)
        self._clears_cache |= clear_cache
        if mode == "abort":
            self._abort_running()

    def resume(self) -> None:
        """Let turns run again, whatever pause there was or was to be."""
        self._gate.resume()
        self._clears_cache = False
        self._answers.append(Resumed())

    def ask_swap(self, update: FinishWeightUpdate) -> None:
        """Have staged weights swapped in; ``swap_due`` tells when."""
        self._gate.ask_swap(update)
        if update.pause_mode == "abort":
            self._abort_running()

    def drop_swap(self) -> None:
        """The weights that were to be swapped in are not there any more. Harmless if none were."""
        self._gate.end_swap()

    def start_over(self) -> None:
        """Whoever asked for pauses and swaps is gone; what turns there are stays, and goes on."""
        is_held = self._gate.is_held
        self._gate = PauseGate()
        self._gate.is_held = is_held
        self._clears_cache = False
        self._answers.clear()
        self.scores.clear()
        self.sessions.forget()

    def hold(self, is_held: bool) -> None:
        """Run no turn whatever pauses say, until told otherwise: there is no memory for it."""
        self._gate.is_held = is_held

    def forget_kv(self) -> None:
        """The memory of all KV is gone; turns that have any wait to be computed again."""
        for turn in self._seats.remove_running():
            self._seats.queue(turn)
        self._prefixes.forget([], self.version)

    # ------------------------------------------------------------ what the worker moves

    def swap_due(self) -> FinishWeightUpdate | None:
        """The swap to do now, before any other step."""
        return self._gate.swap_due(self.running_turns)

    def weights_swapped(self, update: FinishWeightUpdate, *, adapters: Collection[str] = ()) -> int:
        """The runner computes with other weights now; return how many turns lose KV to that.

        Turns with an adapter that isn't among the new ``adapters`` end.
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
        # Whatever its number: a process that went on for another's may use one again.
        self._prefixes.forget(self._seats.running, self.version)
        self._gate.end_swap()
        return recomputed

    def take_answers(self) -> list[Message]:
        """Answers to pauses, resumes and prepared turns that are due, each told once."""
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
        """Turns that ended between steps, aborted or cancelled: rows without tokens."""
        if not self._ended:
            return None
        ended, self._ended = self._ended, []
        return ended_columns(ended, self.version)

    @property
    def has_ended(self) -> bool:
        """Whether ``take_ended`` has rows."""
        return bool(self._ended)

    def plan(self) -> list[Row]:
        """Choose the rows of the next step, decodes before prefills; none if nothing may run.

        Each plan is followed by ``complete`` or ``fail``, with no other call in between.
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
        """Take in what the planned rows sampled; None if it was all prefill, with no end yet."""
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
        """There was no memory for the step planned; False if none can be smaller.

        Its turns wait to be computed again, in steps of half the tokens for a while. So do those
        that were not in it: they may share what it should have computed.
        """
        self.forget_kv()
        return self._budget.fail(tokens)

    def planned_rows(self) -> list[list[Row]]:
        """The rows of the step planned, turn by turn, in the order of their places in it."""
        return [[turn.next_row(), *turn.draft_rows()] for turn in self._planned]

    def probe_row(self) -> Row:
        """A row of one token and no turn, in place of a step that failed."""
        sampling = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
        samples = sampling if self.scores.generates else None
        return Row(np.zeros(1, np.int32), 0, [0], samples)

    def refuse_planned(self, failed: Mapping[int, str]) -> None:
        """Refuse the turns at these places of the step planned, and why; it is planned anew.

        The other turns wait to be computed again, for they may share KV with the refused ones.
        """
        for place, why in failed.items():
            turn = self._planned[place]
            if turn.is_score:
                self.scores.cancel(turn.handle)
                refusal = scoring.ScoreRefused(request=turn.handle, message=cut(why))
                self._answers.append(refusal)
            else:
                self._refuse(turn, why)
        self._planned = []
        self.forget_kv()

    # ------------------------------------------------------------ what there is

    @property
    def step_tokens_max(self) -> int:
        """How many tokens the next step may have."""
        return self._budget.tokens

    @property
    def handles(self) -> list[int]:
        """The turns it holds, and those whose end is not told yet."""
        ended = (ended.handle for ended in self._ended)
        return [*self._turns, *self._preparing, *ended]

    @property
    def running_turns(self) -> int:
        """Turns that have started, frozen or not."""
        return len(self._seats.running)

    @property
    def waiting_turns(self) -> int:
        """Turns that hold no KV."""
        return self._seats.waiting_turns + len(self._preparing)

    @property
    def is_preparing(self) -> bool:
        """Whether a turn waits for a grammar to be compiled, which nothing wakes the engine for."""
        return bool(self._preparing)

    @property
    def is_pause_asked(self) -> bool:
        """Whether a pause is on, or will be."""
        return self._gate.is_pause_asked

    @property
    def is_pause_in_effect(self) -> bool:
        """Whether a pause is on, and no turn runs."""
        return self._gate.is_pause_in_effect(self.running_turns)

    @property
    def is_swap_asked(self) -> bool:
        """Whether staged weights are to be swapped in."""
        return self._gate.is_swap_asked

    @property
    def free_blocks(self) -> int:
        """KV blocks that no turn holds."""
        return self._seats.free_blocks

    @property
    def can_step(self) -> bool:
        """Whether ``plan`` would find a row."""
        if self._seats.running:
            return self._gate.turns_run
        return self._seats.waiting_turns > 0 and self._gate.turns_start

    # ------------------------------------------------------------ completing

    def _take(
        self,
        turn: TurnState,
        rows: SampledRows,
        place: int,
        output: StepOutput,
        failures: Mapping[int, str],
    ) -> int:
        """Have a turn take what was sampled for it from ``place`` on; return the next one's."""
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

    def _go_on(self, turn: TurnState, accepted: AcceptedTokens, drafted: int) -> None:
        """A turn has taken in its tokens."""
        if drafted:
            self._prefixes.share(turn, turn.computed)
            if self._speculation is not None:
                self._speculation.learn(turn, drafted, accepted.tokens - 1)
        if accepted.finish != RUNNING:
            self._finish(turn, is_whole=True)

    def _has(self, adapter: str) -> bool:
        return not adapter or adapter in self._adapters

    # ------------------------------------------------------------ leaving

    def _finish(self, turn: TurnState, *, is_whole: bool = False) -> None:
        """End a turn; ``is_whole``: it came to its own end."""
        self._seats.remove(turn)
        self._forget(turn, is_whole=is_whole)

    def _forget(self, turn: TurnState, *, is_whole: bool) -> None:
        del self._turns[turn.handle]
        if self._speculation is not None:
            self._speculation.ended(turn, is_whole=is_whole)

    def _refuse(self, turn: TurnState, why: str) -> None:
        """End a turn that can't be sampled from, and have its asker told; no token comes of it."""
        self._finish(turn)
        self._answers.append(messages.TurnRefused(turn=turn.handle, message=cut(why)))

    def _end(self, turn: TurnState, finish: int) -> None:
        """End a turn that is removed already, and have it told."""
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
        """Raise AssertionError unless turns and blocks agree, and no two turns write to one."""
        self._seats.check()
