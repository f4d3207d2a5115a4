"""Turns of a simulated engine: which of them run in a step, and the tokens they sample.

:class:`SimulatedTurns` follows the rules of a real engine's scheduler: decodes before prefills,
chunked prefill, preemption of the lowest-ranked turn. Pauses and weight swaps are decided by the
real engine's :class:`~tidegate.engine.scheduling.pauses.PauseGate`. Time and messages are left to
:mod:`engine`.
"""

import math
import random
from array import array
from bisect import insort
from dataclasses import dataclass, field

import msgspec

from tidegate.engine.scheduling.pauses import PauseGate, ends_turns, lets_finish
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.checks.model import HashedContext
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.spec import CONTEXT_TOKENS_MAX, TEMPERATURE_MAX, SimulatedEngineSpec
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    LENGTH,
    LIVE_ADAPTER,
    RUNNING,
    STOP,
    FinishWeightUpdate,
    Prefill,
    Step,
    SubmitTurn,
    SwapAdapter,
)

DEADLY_TOKEN = 2**30
"""Token that ends every engine that gets it in a context; no simulated model samples it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWeights:
    """Weights that sample a turn: the live ones, or a version of an adapter."""

    adapter: str = ""
    """Adapter with versions of its own; empty: the engine's live weights."""
    version: int
    content: int = field(compare=False)
    """Content of the weights; adapters' contents differ from all others."""


@dataclass(slots=True)
class SimulatedTurn:
    """Running or waiting turn of one engine."""

    message: SubmitTurn
    rank: tuple[int, int]
    """(rank by the spec, order of arrival): the lowest rank runs first."""
    context: HashedContext
    prompt_tokens: int
    is_prefilling: bool = True
    """Whether the context's KV is being computed, so the next token is reported with a prefill."""
    own_weights: TurnWeights | None = None
    """Version of an adapter that samples the turn; None: the engine's live weights."""

    @property
    def output_tokens(self) -> int:
        """Number of tokens sampled since the turn was submitted to this engine."""
        return len(self.context.tokens) - self.prompt_tokens

    @property
    def tokens_left(self) -> int:
        """Number of tokens after which the turn reaches its limit."""
        return self.message.sampling.max_tokens - self.output_tokens


@dataclass(slots=True)
class StepWork:
    """Turns and token counts that a simulated decode step computes, which set its time."""

    chunks: list[tuple[SimulatedTurn, int]]
    """(turn, number of its positions to compute), for each turn of the step."""
    steps: int = 1
    """Number of decode steps that the work covers; more than one on coarse-grained engines only."""

    @property
    def prefilled_tokens(self) -> int:
        """Number of positions to compute for turns in prefill."""
        return sum(tokens for turn, tokens in self.chunks if turn.is_prefilling)


@dataclass(slots=True)
class StepRows:
    """Columns of a step message that is being built."""

    weights: TurnWeights
    turns: "array[int]" = field(default_factory=lambda: array("I"))
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finish: bytearray = field(default_factory=bytearray)
    counts: "array[int]" = field(default_factory=lambda: array("I"))
    prefills: list[Prefill] = field(default_factory=list)

    def message(self, seq: int, started_us: int, busy_us: int, *, queued_turns: int) -> Step:
        """Encode the columns as a step message."""
        return Step(
            seq=seq,
            version=self.weights.version,
            adapter=self.weights.adapter,
            turns=self.turns.tobytes(),
            token_ids=self.token_ids.tobytes(),
            logprobs=self.logprobs.tobytes(),
            finish=bytes(self.finish) if any(self.finish) else b"",
            counts=b"" if set(self.counts) == {1} else self.counts.tobytes(),
            prefills=self.prefills,
            started_us=started_us,
            busy_us=busy_us,
            queued_turns=queued_turns,
        )


class SimulatedTurns:
    """All turns of one simulated engine, and its weights."""

    def __init__(
        self,
        engine: str,
        spec: SimulatedEngineSpec,
        context: SimulationContext,
        chance: random.Random,
    ) -> None:
        self.live = TurnWeights(version=0, content=0)
        """Live weights, which sample the turns without weights of their own."""
        self._engine = engine
        self._spec = spec
        self._model = context.model
        self._chance = chance
        self._coverage = context.coverage
        self.running: list[SimulatedTurn] = []
        """Turns that hold KV, in order of rank."""
        self.waiting: list[SimulatedTurn] = []
        """Turns without KV, in order of rank."""
        self._arrivals = 0
        self._handles: set[int] = set()
        self._ended: list[tuple[int, int, TurnWeights | None]] = []
        """(handle, finish code, weights of its adapter) of turns that ended without a token."""
        self.gate = PauseGate()

    @property
    def handles(self) -> list[int]:
        """Handles of all turns whose end is not reported yet."""
        return self.started_handles + [handle for handle, _, _ in self._ended]

    @property
    def started_handles(self) -> list[int]:
        """Handles of the turns that run or wait for KV."""
        return [turn.message.turn for turn in (*self.running, *self.waiting)]

    # ------------------------------------------------------------ requests

    def submit(self, message: SubmitTurn, weights: TurnWeights | None = None) -> str | None:
        """Queue a turn; return why the turn can never be served, or None if it is queued.

        ``weights``: version of an adapter that samples it; None: the engine's live weights.
        """
        assert message.turn not in self._handles, f"handle {message.turn} was used before"
        self._handles.add(message.turn)
        tokens = array("i", message.token_ids)
        spec = self._spec
        if unsupported := sorted({each.kind for each in message.media} - {*spec.media}):
            return f"it was sent media that it doesn't read: {', '.join(unsupported)}"
        if message.sampling.temperature > TEMPERATURE_MAX:
            return f"a temperature of {message.sampling.temperature:g} is above {TEMPERATURE_MAX:g}"
        left = CONTEXT_TOKENS_MAX - len(tokens)
        if spec.blocks is not None:
            left = min(left, spec.blocks * spec.block_tokens - len(tokens))
        if left < 1:
            return f"a context of {len(tokens)} tokens leaves none to sample"
        if message.sampling.max_tokens > left:
            sampling = msgspec.structs.replace(message.sampling, max_tokens=left)
            message = msgspec.structs.replace(message, sampling=sampling)
        self._arrivals += 1
        rank = (self._spec.rank(message), self._arrivals)
        context = HashedContext(tokens)
        turn = SimulatedTurn(message, rank, context, len(tokens), own_weights=weights)
        insort(self.waiting, turn, key=_rank)
        return None

    def cancel(self, handle: int) -> None:
        """End a turn; ignore unknown handles."""
        for turns in (self.running, self.waiting):
            for turn in turns:
                if turn.message.turn == handle:
                    turns.remove(turn)
                    self._end(turn, CANCELLED)
                    return

    def end_unstarted(self, handle: int, adapter: str, version: int) -> None:
        """Report the end of a cancelled turn that waited for an adapter."""
        weights = TurnWeights(adapter=adapter, version=version, content=0)
        self._ended.append((handle, CANCELLED, weights))

    def _end(self, turn: SimulatedTurn, code: int) -> None:
        self._ended.append((turn.message.turn, code, turn.own_weights))

    def abort_running(self) -> None:
        """End every running turn with ``abort``, to be continued on any engine."""
        if self.running:
            self._coverage.add(CoverageMark.ABORTED)
        for turn in self.running:
            self._end(turn, ABORT)
        self.running.clear()

    # ------------------------------------------------------------ weights

    @property
    def swap_due(self) -> FinishWeightUpdate | None:
        """Weight swap that can be done now, or None."""
        return self.gate.swap_due(len(self.running))

    def swap(self, update: FinishWeightUpdate, content: int) -> None:
        """Compute with the weights ``content`` from now on; discard KV if the update says so."""
        self.live = TurnWeights(version=update.version, content=content)
        self.gate.end_swap()
        if update.kv_policy == "recompute":
            for turn in self.running:
                turn.context.drop_kv()
                turn.is_prefilling = True

    def swap_adapter(self, swap: SwapAdapter, weights: TurnWeights) -> list[int]:
        """Have an adapter's turns that are not pinned follow its new version, as ``swap`` says;
        return the handles of those that do."""
        moved = []
        for turn in (*self.running, *self.waiting):
            own = turn.own_weights
            is_pinned = turn.message.sampling.adapter_version != LIVE_ADAPTER
            if own is None or own.adapter != swap.name or is_pinned or own == weights:
                continue
            is_running = turn in self.running
            if is_running and ends_turns(swap.pause_mode):
                self._coverage.add(CoverageMark.ABORTED)
                self.running.remove(turn)
                self._end(turn, ABORT)
            elif not (is_running and lets_finish(swap.pause_mode)):
                turn.own_weights = weights
                moved.append(turn.message.turn)
                if is_running and swap.kv_policy == "recompute":
                    turn.context.drop_kv()
                    turn.is_prefilling = True
        return moved

    def refuse_adapter(self, name: str, version: int | None) -> list[int]:
        """Remove the turns that use an adapter, or one version of it; return their handles."""
        refused = []
        for turns in (self.running, self.waiting):
            for turn in list(turns):
                own = turn.own_weights
                if own is not None and own.adapter == name and version in (None, own.version):
                    turns.remove(turn)
                    refused.append(turn.message.turn)
        return refused

    # ------------------------------------------------------------ steps

    def take_ended(self) -> list[StepRows]:
        """Return rows without tokens for turns that ended between steps, per weight version."""
        by_weights: dict[TurnWeights, StepRows] = {}
        for handle, code, weights in self._ended:
            rows = _rows_of(by_weights, weights or self.live)
            rows.turns.append(handle)
            rows.finish.append(code)
            rows.counts.append(0)
        self._ended = []
        return list(by_weights.values())

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`take_ended` has rows."""
        return bool(self._ended)

    def plan(self) -> StepWork:
        """Choose the chunks that the next step computes; none if no turn may run."""
        if not self.gate.turns_run:
            return StepWork([])
        self._preempt_by_chance()
        self._preempt_for_memory()
        if self.gate.turns_start:
            self._start_waiting()
        budget_tokens = self._spec.chunk_tokens
        chunks: list[tuple[SimulatedTurn, int]] = []
        for turn in self.running:
            uncomputed = len(turn.context.tokens) - turn.context.computed
            tokens = min(uncomputed, budget_tokens) if turn.is_prefilling else uncomputed
            budget_tokens -= tokens if turn.is_prefilling else 0
            if tokens:
                chunks.append((turn, tokens))
        return StepWork(chunks)

    def complete(self, work: StepWork) -> list[StepRows]:
        """Compute a step; return its sampled rows, per weight version. Empty if all prefills are
        unfinished."""
        by_weights: dict[TurnWeights, StepRows] = {}
        for turn, tokens in work.chunks:
            weights = turn.own_weights or self.live
            turn.context.compute(tokens, content=weights.content, version=weights.version)
            if turn.context.computed == len(turn.context.tokens):
                self._sample(turn, _rows_of(by_weights, weights))
        return list(by_weights.values())

    def _sample(self, turn: SimulatedTurn, rows: StepRows) -> None:
        message, context, weights = turn.message, turn.context, rows.weights
        if turn.is_prefilling:
            turn.is_prefilling = False
            if self._spec.reports_prefills:
                rows.prefills.append(Prefill(message.turn, turn.output_tokens, context.spans))
        code, count = RUNNING, 0
        while code == RUNNING and count < self._spec.tokens_per_step:
            if count:
                context.compute(1, content=weights.content, version=weights.version)
            sampled = self._model.next_token(
                context,
                message,
                content=weights.content,
                version=weights.version,
                engine=self._engine,
            )
            context.tokens.append(sampled.token)
            rows.token_ids.append(sampled.token)
            rows.logprobs.append(sampled.logprob)
            count += 1
            if sampled.token in message.sampling.stop_token_ids:
                code = STOP
            elif turn.output_tokens == message.sampling.max_tokens:
                code = LENGTH
        rows.turns.append(message.turn)
        rows.counts.append(count)
        rows.finish.append(code)
        if code != RUNNING:
            self.running.remove(turn)

    # ------------------------------------------------------------ memory

    def forget_kv(self) -> None:
        """Discard all KV; running turns wait for their KV to be recomputed."""
        for turn in self.running:
            turn.context.drop_kv()
            turn.is_prefilling = True
            insort(self.waiting, turn, key=_rank)
        self.running.clear()

    def _blocks_needed(self, turn: SimulatedTurn) -> int:
        """Return the number of blocks that the turn needs until the end of its next step."""
        return self._spec.blocks_for(len(turn.context.tokens) + self._spec.tokens_per_step - 1)

    def _preempt_for_memory(self) -> None:
        """Preempt the lowest-ranked turns, or end them, until the others' next step fits."""
        if self._spec.blocks is None:
            return
        needed = sum(self._blocks_needed(turn) for turn in self.running)
        while needed > self._spec.blocks and len(self.running) > 1:
            turn = self.running.pop()
            needed -= self._blocks_needed(turn)
            if self._spec.hands_turns_back:
                self._coverage.add(CoverageMark.HANDED_BACK)
                self._end(turn, ABORT)
                continue
            self._coverage.add(CoverageMark.PREEMPTED)
            turn.context.drop_kv()
            turn.is_prefilling = True
            insort(self.waiting, turn, key=_rank)

    def _start_waiting(self) -> None:
        """Start waiting turns in order of rank, while a free block per running turn remains."""
        if not self.waiting:
            return
        spec = self._spec
        free = math.inf if spec.blocks is None else spec.blocks
        free -= sum(self._blocks_needed(turn) for turn in self.running)
        while self.waiting and len(self.running) < spec.costs.slots:
            free -= self._blocks_needed(self.waiting[0])
            if self.running and free < len(self.running):
                return
            self._start(self.waiting.pop(0))

    def _start(self, turn: SimulatedTurn) -> None:
        insort(self.running, turn, key=_rank)

    def _preempt_by_chance(self) -> None:
        share = self._spec.preemption_share
        if self.running and share and self._chance.random() < share:
            turn = self._chance.choice(self.running)
            turn.context.drop_kv()
            turn.is_prefilling = True


def _rows_of(by_weights: dict[TurnWeights, StepRows], weights: TurnWeights) -> StepRows:
    """Return the rows of a step message of these weights, a new one for the first row."""
    rows = by_weights.get(weights)
    if rows is None:
        rows = by_weights[weights] = StepRows(weights)
    return rows


def _rank(turn: SimulatedTurn) -> tuple[int, int]:
    return turn.rank
