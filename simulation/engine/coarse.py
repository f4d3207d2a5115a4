"""Coarse time mode of the simulated engine: one timer and one message for many decode steps.

All running turns advance together, so no event is needed between two changes of the running set (a
"multi-step"). A change ends the multi-step at the end of the current step, so lengths, times and
version tags are exactly those of single steps.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import msgspec
from typing_extensions import override

from tidegate.simulation.engine.engine import SimulatedEngine
from tidegate.simulation.engine.spec import CONTEXT_TOKENS_MAX, SimulatedEngineSpec
from tidegate.simulation.engine.turns import SimulatedTurn, SimulatedTurns, StepRows, StepWork
from tidegate.transport.messages import (
    LENGTH,
    RUNNING,
    CancelTurn,
    FinishWeightUpdate,
    Pause,
    Resume,
    SubmitTurn,
    Welcome,
    decode_from_orchestrator,
)
from tidegate.transport.sleep_messages import SleepLevel

MULTI_STEP_TOKENS_MAX = 128
"""Maximum tokens of a turn in one message: 64 KiB for 64 turns, a few percent of a turn."""

TOKEN_BYTES = 4

TIME_TOLERANCE_STEPS = 1e-9
"""Tolerance, as a share of a step: a message that arrives as a step ends counts for its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseEngineSpec(SimulatedEngineSpec):
    """Slots, and times that depend on turns' lengths only; token ids and log-probs are 0."""

    stopwatch: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Entered while the engine works."""
    staging_s: float = 0.0
    chunk_tokens: int = CONTEXT_TOKENS_MAX
    block_tokens: int = 16
    sleep_levels: tuple[SleepLevel, ...] = ()
    reports_prefills: bool = False
    preemption_share: float = 0.0
    supports_submit_turns: bool = False

    def steps(self, turns: Sequence[SimulatedTurn]) -> int:
        """Return the steps until one of the running turns ends, or the most of one message."""
        return min(MULTI_STEP_TOKENS_MAX, min(turn.tokens_left for turn in turns))

    def token_s(self, turns: Sequence[SimulatedTurn]) -> float:
        """Return the duration of one step of these turns, in seconds."""
        return self.costs.token_s(len(turns))

    def tokens(self, turn: SimulatedTurn, steps: int) -> int:
        """Return the tokens that a turn samples in so many steps."""
        return steps

    def prefilled_tokens(self, turn: SubmitTurn) -> float:
        """Return the tokens to prefill for a turn that starts.

        An aborted turn prefills its whole context again, and a first turn its share of the group's
        prompt. A later turn of an episode finds its KV and prefills nothing.
        """
        context_tokens = len(turn.token_ids) // TOKEN_BYTES
        if turn.sampled_before:
            return context_tokens
        is_first = context_tokens <= self.costs.prompt_tokens
        return context_tokens / self.costs.group_size if is_first else 0.0


class CoarseTurns(SimulatedTurns):
    """Turns whose tokens are all 0, and are sampled many at a time."""

    _spec: CoarseEngineSpec

    @override
    def complete(self, work: StepWork) -> list[StepRows]:
        rows = StepRows(self.live)
        for turn, _ in work.chunks:
            turn.is_prefilling = False
            tokens = self._spec.tokens(turn, work.steps)
            zeros = bytes(TOKEN_BYTES * tokens)
            turn.context.tokens.frombytes(zeros)
            turn.context.computed = len(turn.context.tokens) - 1
            rows.token_ids.frombytes(zeros)
            rows.logprobs.frombytes(zeros)
            rows.turns.append(turn.message.turn)
            rows.counts.append(tokens)
            rows.finish.append(RUNNING if turn.tokens_left else LENGTH)
        self.running = [turn for turn in self.running if turn.tokens_left]
        return [rows] if work.steps else []

    @override
    def _start(self, turn: SimulatedTurn) -> None:
        self.running.append(turn)  # no order of rank: nothing is preempted


class CoarseEngine(SimulatedEngine):
    """Engine that takes many decode steps at a time, and swaps weights in modelled time."""

    turns_class = CoarseTurns
    _spec: CoarseEngineSpec

    _begins_s = 0.0
    """Loop time at which the multi-step's first step begins, after the prefills, in seconds."""
    _token_s = 0.0
    """Duration of one step of the multi-step, in seconds."""
    _timer: asyncio.TimerHandle | None = None
    """Timer of the current multi-step."""

    @override
    def _on_frame(self, frame: bytes) -> None:
        message = decode_from_orchestrator(frame)
        is_change = isinstance(message, CancelTurn | Pause | Resume | FinishWeightUpdate)
        with self._spec.stopwatch:
            if self._work is None:
                self._inbox.append(message)
                self._advance()
                return
            if is_change:
                self._inbox.append(message)
            else:
                self._handle(message)
                self._send_replies()
            has_slot = len(self.turns.running) < self._spec.costs.slots
            if is_change or (has_slot and isinstance(message, SubmitTurn)):
                self._end_multi_step_early(self._work)

    def _end_multi_step_early(self, work: StepWork) -> None:
        """Drop the steps that have not begun."""
        elapsed_s = self._loop.time() - self._begins_s
        steps_begun = max(0, math.ceil(elapsed_s / self._token_s - TIME_TOLERANCE_STEPS))
        if steps_begun < work.steps and self._timer is not None:
            work.steps = steps_begun
            self._timer.cancel()
            self._set_timer(work)

    @override
    def _on_copied(self) -> None:
        if self._work is None:
            self._advance()
        else:
            self._send_replies()

    @override
    def _check_timeouts(self, welcome: Welcome, *, has_heard: bool) -> None:
        """Send no heartbeats: these runs have no faults."""

    @override
    def _begin_step(self) -> None:
        if self._work is None:  # else a swap has just begun
            super()._begin_step()

    @override
    def _schedule(self, work: StepWork) -> None:
        spec = self._spec
        turns = [turn for turn, _ in work.chunks]
        starting = [turn.message for turn in turns if turn.is_prefilling]
        prefilled = sum(map(spec.prefilled_tokens, starting), 0.0)
        work.steps = spec.steps(turns)
        self._begins_s = self._loop.time() + prefilled / spec.costs.prefill_tokens_per_s
        self._token_s = spec.token_s(turns)
        self._set_timer(work)

    def _set_timer(self, work: StepWork) -> None:
        ends_s = self._begins_s + work.steps * self._token_s
        self._timer = self._loop.call_at(ends_s, self._end_step)

    @override
    def _end_step(self) -> None:
        with self._spec.stopwatch:
            super()._end_step()

    @override
    def _swap(self, update: FinishWeightUpdate) -> None:
        """Swap after the time of a swap, and of computing the KV again if ``update`` says so."""
        self._work, self._timer = StepWork([], steps=0), None
        costs, seconds = self._spec.costs, self._spec.costs.swap_s
        if update.kv_policy == "recompute":
            tokens = sum(len(turn.context.tokens) for turn in self.turns.running)
            seconds += tokens / costs.prefill_tokens_per_s
        self._loop.call_later(seconds, self._end_swap, update, self.staging.take())

    def _end_swap(self, update: FinishWeightUpdate, content: int) -> None:
        with self._spec.stopwatch:
            self._work = None
            self._serve(msgspec.structs.replace(update, kv_policy="keep"), content)
            self._advance()
