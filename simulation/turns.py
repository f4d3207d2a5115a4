"""Turns of a simulated engine: which of them run in a step, and what they sample.

The same rules as a real engine's: decodes before prefills, a prefill in chunks, the lowest-ranked
turn is preempted for a higher one, and pauses and weight swaps change running turns. No clock and
no wire.
"""

import math
import random
from array import array
from bisect import insort
from dataclasses import dataclass, field

from tidegate.simulation.coverage_marks import CoverageMark, CoverageMarks
from tidegate.simulation.engine_spec import CONTEXT_TOKENS_MAX, SimulatedEngineSpec
from tidegate.simulation.model import HashedContext, TurnModel
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    LENGTH,
    RUNNING,
    STOP,
    FinishWeightUpdate,
    PauseMode,
    Prefill,
    Step,
    SubmitTurn,
)

PREEMPTION_CHANCE = 0.01
"""Per step, that one turn's KV is thrown out although there is room."""


DEADLY_TOKEN = 2**30
"""In a context, ends every engine that is sent it. No model of a simulation says it."""


@dataclass(slots=True)
class SimulatedTurn:
    """A turn in an engine, running or waiting."""

    message: SubmitTurn
    rank: tuple[int, int]
    """Priority and arrival: orders turns, best first."""
    context: HashedContext
    prompt_tokens: int
    is_prefilling: bool = True
    """Whether the next token it samples begins a new history of its KV."""

    @property
    def output_tokens(self) -> int:
        """Sampled in this submission."""
        return len(self.context.tokens) - self.prompt_tokens


@dataclass(slots=True)
class StepWork:
    """A step that is being computed."""

    chunks: list[tuple[SimulatedTurn, int]]
    """Turns, and the positions computed of each."""

    @property
    def prefilled_tokens(self) -> int:
        """Positions computed beyond one for each turn that decodes."""
        return sum(tokens for turn, tokens in self.chunks if turn.is_prefilling)


@dataclass(slots=True)
class StepRows:
    """Rows of a step message in the making."""

    turns: "array[int]" = field(default_factory=lambda: array("I"))
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finish: bytearray = field(default_factory=bytearray)
    counts: "array[int]" = field(default_factory=lambda: array("I"))
    prefills: list[Prefill] = field(default_factory=list)

    def message(self, seq: int, version: int, started_us: int, busy_us: int) -> Step:
        """These rows as they travel."""
        return Step(
            seq=seq,
            version=version,
            turns=self.turns.tobytes(),
            token_ids=self.token_ids.tobytes(),
            logprobs=self.logprobs.tobytes(),
            finish=bytes(self.finish) if any(self.finish) else b"",
            counts=b"" if set(self.counts) == {1} else self.counts.tobytes(),
            prefills=self.prefills,
            started_us=started_us,
            busy_us=busy_us,
        )


class SimulatedTurns:
    """All turns of one simulated engine, and its weights."""

    def __init__(
        self,
        engine: str,
        traits: SimulatedEngineSpec,
        model: TurnModel,
        *,
        chance: random.Random,
        hardships: CoverageMarks,
    ) -> None:
        self.version = 0
        """What the live weights are called."""
        self.content = 0
        """What they really are."""
        self._engine = engine
        self._traits = traits
        self._model = model
        self._chance = chance
        self._hardships = hardships
        self.running: list[SimulatedTurn] = []
        """Best rank first; they hold KV."""
        self.waiting: list[SimulatedTurn] = []
        """Best rank first."""
        self._arrivals = 0
        self._handles: set[int] = set()
        self._ended: list[tuple[int, int]] = []
        """(handle, finish code) of turns that ended without a token."""
        self.pause_mode: PauseMode | None = None
        self.awaited_swap: FinishWeightUpdate | None = None
        self.is_held = False
        """Whether no turn may run whatever pauses say, for want of memory."""

    @property
    def handles(self) -> list[int]:
        """The turns it holds, and those whose end is not told yet."""
        held = [turn.message.turn for turn in (*self.running, *self.waiting)]
        return held + [handle for handle, _ in self._ended]

    # ------------------------------------------------------------ what others ask for

    def submit(self, message: SubmitTurn) -> str | None:
        """Queue a turn; or say why it can never be served."""
        assert message.turn not in self._handles, f"handle {message.turn} was used before"
        self._handles.add(message.turn)
        tokens = array("i", message.token_ids)
        tokens_max = len(tokens) + message.sampling.max_tokens
        traits = self._traits
        if lacking := sorted({each.kind for each in message.media} - {*traits.media}):
            return f"it was sent media that it doesn't read: {', '.join(lacking)}"
        if tokens_max > CONTEXT_TOKENS_MAX:
            return f"{tokens_max} tokens are more than the context's {CONTEXT_TOKENS_MAX}"
        if traits.blocks is not None and traits.blocks_for(tokens_max) > traits.blocks:
            return f"{tokens_max} tokens never fit {traits.blocks} blocks of {traits.block_tokens}"
        self._arrivals += 1
        rank = (message.priority, self._arrivals)
        turn = SimulatedTurn(message, rank, HashedContext(tokens), len(tokens))
        insort(self.waiting, turn, key=_rank)
        return None

    def cancel(self, handle: int) -> None:
        """End a turn; unknown handles are ignored."""
        for turns in (self.running, self.waiting):
            for turn in turns:
                if turn.message.turn == handle:
                    turns.remove(turn)
                    self._ended.append((handle, CANCELLED))
                    return

    def abort_running(self) -> None:
        """End every running turn, to be continued elsewhere."""
        if self.running:
            self._hardships.note(CoverageMark.ABORTED)
        self._ended += [(turn.message.turn, ABORT) for turn in self.running]
        self.running.clear()

    # ------------------------------------------------------------ weights

    @property
    def swap_due(self) -> FinishWeightUpdate | None:
        """The swap that can be done now. Frozen turns never finish, so none waits for them."""
        swap = self.awaited_swap
        if swap is not None and swap.pause_mode == "wait":
            are_frozen = self.is_held or self.pause_mode == "keep"
            return None if self.running and not are_frozen else swap
        return swap

    def swap(self, update: FinishWeightUpdate, content: int) -> None:
        """Compute with other weights from now on."""
        self.version, self.content = update.version, content
        self.awaited_swap = None
        if update.kv_policy == "recompute":
            for turn in self.running:
                turn.context.drop_kv()
                turn.is_prefilling = True

    # ------------------------------------------------------------ steps

    def take_ended(self) -> StepRows | None:
        """Turns that ended between steps: rows without tokens."""
        if not self._ended:
            return None
        rows = StepRows()
        for handle, code in self._ended:
            rows.turns.append(handle)
            rows.finish.append(code)
            rows.counts.append(0)
        self._ended = []
        return rows

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`take_ended` has rows."""
        return bool(self._ended)

    def plan(self) -> StepWork:
        """Choose what the next step computes; no chunks if nothing may run."""
        if self.pause_mode == "keep" or self.is_held:
            return StepWork([])
        self._preempt_by_chance()
        self._make_room()
        drains = self.awaited_swap is not None and self.awaited_swap.pause_mode == "wait"
        if self.pause_mode is None and not drains:
            self._start_waiting()
        left = self._traits.chunk_tokens
        chunks: list[tuple[SimulatedTurn, int]] = []
        for turn in self.running:
            missing = len(turn.context.tokens) - turn.context.computed
            tokens = min(missing, left) if turn.is_prefilling else missing
            left -= tokens if turn.is_prefilling else 0
            if tokens:
                chunks.append((turn, tokens))
        return StepWork(chunks)

    def complete(self, work: StepWork) -> StepRows | None:
        """What the planned rows sampled; None if it was all prefill, with no end yet."""
        rows = StepRows()
        for turn, tokens in work.chunks:
            turn.context.compute(tokens, content=self.content, version=self.version)
            if turn.context.computed == len(turn.context.tokens):
                self._sample(turn, rows)
        return rows if rows.turns else None

    def _sample(self, turn: SimulatedTurn, rows: StepRows) -> None:
        message, context = turn.message, turn.context
        if turn.is_prefilling:
            turn.is_prefilling = False
            if self._traits.tells_prefills:
                rows.prefills.append(Prefill(message.turn, turn.output_tokens, context.spans))
        code, count = RUNNING, 0
        while code == RUNNING and count < self._traits.tokens_per_step:
            if count:
                context.compute(1, content=self.content, version=self.version)
            said = self._model.next_token(
                context,
                message,
                content=self.content,
                version=self.version,
                engine=self._engine,
            )
            context.tokens.append(said.token)
            rows.token_ids.append(said.token)
            rows.logprobs.append(said.logprob)
            count += 1
            if said.token in message.sampling.stop_token_ids:
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
        """The memory of all KV is gone; turns that have any wait to be computed again."""
        for turn in self.running:
            turn.context.drop_kv()
            turn.is_prefilling = True
            insort(self.waiting, turn, key=_rank)
        self.running.clear()

    def _blocks_wanted(self, turn: SimulatedTurn) -> int:
        """By the end of its next step."""
        return self._traits.blocks_for(len(turn.context.tokens) + self._traits.tokens_per_step - 1)

    def _make_room(self) -> None:
        """The worst turns give way until all that run can go on."""
        if self._traits.blocks is None:
            return
        wanted = sum(self._blocks_wanted(turn) for turn in self.running)
        while wanted > self._traits.blocks and len(self.running) > 1:
            turn = self.running.pop()
            wanted -= self._blocks_wanted(turn)
            if self._traits.hands_turns_back:
                self._hardships.note(CoverageMark.HANDED_BACK)
                self._ended.append((turn.message.turn, ABORT))
                continue
            self._hardships.note(CoverageMark.PREEMPTED)
            turn.context.drop_kv()
            turn.is_prefilling = True
            insort(self.waiting, turn, key=_rank)

    def _start_waiting(self) -> None:
        """Start waiting turns, best first, while there is room for them and one block to spare."""
        traits = self._traits
        free = math.inf if traits.blocks is None else traits.blocks
        free -= sum(self._blocks_wanted(turn) for turn in self.running)
        while self.waiting and len(self.running) < traits.max_running_turns:
            free -= self._blocks_wanted(self.waiting[0])
            if self.running and free < len(self.running):
                return
            insort(self.running, self.waiting.pop(0), key=_rank)

    def _preempt_by_chance(self) -> None:
        if self.running and self._chance.random() < PREEMPTION_CHANCE:
            turn = self._chance.choice(self.running)
            turn.context.drop_kv()
            turn.is_prefilling = True


def _rank(turn: SimulatedTurn) -> tuple[int, int]:
    return turn.rank
