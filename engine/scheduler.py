"""Which turns run in the next step, and what came of it? Opens no socket, reads no clock.

It decides and the worker moves: ``plan`` says which rows to compute, ``complete`` takes what was
sampled. Same calls in, same answers out.

Turns are ranked by priority, then arrival. The best running turn can always go on, for the worst
one gives up its blocks when there are none left, and no turn larger than the whole cache gets in;
so something always finishes.
"""

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from tidegate.engine.kv_cache import BlockPool
from tidegate.engine.pauses import PauseGate
from tidegate.engine.runner import Row, StepOutput
from tidegate.engine.turns import EngineLimits, TurnState, admit
from tidegate.errors import TurnRefused
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    RUNNING,
    FinishWeightUpdate,
    Message,
    PauseMode,
    Prefill,
    Resumed,
    SubmitTurn,
)

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """The part of a step message that the scheduler knows; R rows as in ``messages.Step``."""

    version: int
    turns: bytes
    token_ids: bytes = b""
    logprobs: bytes = b""
    finish: bytes = b""
    counts: bytes = b""
    prefills: list[Prefill] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that ended without a token."""

    handle: int
    finish: int


class Scheduler:
    """All turns of one engine, and its weights' version."""

    def __init__(self, limits: EngineLimits, version: int = 0) -> None:
        self.version = version
        """The live weights'."""
        self._limits = limits
        self._pool = BlockPool(limits.num_blocks)
        self._gate = PauseGate()
        self._turns: dict[int, TurnState] = {}
        """Every turn by its handle: those running, and those in the waiting heap."""
        self._running: list[TurnState] = []
        """Those that hold blocks, best rank first."""
        self._waiting: list[tuple[tuple[int, int], TurnState]] = []
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
        if message.turn in self._turns:
            raise TurnRefused(
                f"turn handle {message.turn} belongs to a turn that has not ended; "
                f"use each handle once"
            )
        turn = admit(message, self._limits, self._arrivals)
        self._arrivals += 1
        self._turns[turn.handle] = turn
        heapq.heappush(self._waiting, (turn.rank, turn))

    def cancel(self, handle: int) -> None:
        """End a turn; unknown handles are ignored, for it may just have finished."""
        turn = self._turns.get(handle)
        if turn is None:
            return
        if turn.blocks:
            self._running.remove(turn)
        else:
            self._waiting.remove((turn.rank, turn))
            heapq.heapify(self._waiting)
        self._end(turn, CANCELLED)

    def pause(self, mode: PauseMode) -> None:
        """Stop turns as ``mode`` says; ``take_answers`` tells when it has taken effect."""
        self._gate.pause(mode)
        if mode == "abort":
            self._abort_running()

    def resume(self) -> None:
        """Let turns run again, whatever pause there was or was to be."""
        self._gate.resume()
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
        self._gate = PauseGate()
        self._answers.clear()

    # ------------------------------------------------------------ what the worker moves

    def swap_due(self) -> FinishWeightUpdate | None:
        """The swap to do now, before any other step."""
        return self._gate.swap_due(len(self._running))

    def weights_swapped(self, update: FinishWeightUpdate) -> int:
        """The runner computes with other weights now; return how many turns lose KV to that."""
        recomputed = 0
        for turn in self._running:
            turn.history.swap(self.version, turn.computed)
            if update.kv_policy == "recompute":
                recomputed += turn.recompute_kv(update.version)
        self.version = update.version
        self._gate.end_swap()
        return recomputed

    def take_answers(self) -> list[Message]:
        """Answers to pauses and resumes that are due, each told once."""
        answers = [*self._answers, *self._gate.take_effective(len(self._running))]
        self._answers.clear()
        return answers

    def take_ended(self) -> StepColumns | None:
        """Turns that ended between steps, aborted or cancelled: rows without tokens."""
        if not self._ended:
            return None
        ended, self._ended = self._ended, []
        return StepColumns(
            version=self.version,
            turns=np.array([row.handle for row in ended], dtype="<u4").tobytes(),
            finish=bytes([row.finish for row in ended]),
            counts=bytes(4 * len(ended)),
        )

    @property
    def has_ended(self) -> bool:
        """Whether ``take_ended`` has rows."""
        return bool(self._ended)

    def plan(self) -> list[Row]:
        """Choose the rows of the next step, decodes before prefills; none if nothing may run.

        Each plan is followed by ``complete``, with no other call in between.
        """
        self._planned = []
        if not self._gate.turns_run:
            return []
        left = self._limits.max_step_tokens - self._plan_decodes()
        for turn in self._running:
            if turn.is_prefilling and left > 0:
                left -= self._plan_chunk(turn, left)
        if left > 0 and self._gate.turns_start:
            for turn in self._start_waiting():
                left -= self._plan_chunk(turn, left)
                if left == 0:
                    break
        return [turn.next_row() for turn in self._planned]

    def complete(self, output: StepOutput) -> StepColumns | None:
        """Take in what the planned rows sampled; None if it was all prefill, with no end yet."""
        sampled: list[int] = output.token_ids.tolist()
        handles: list[int] = []
        finish = bytearray()
        prefills: list[Prefill] = []
        for turn in self._planned:
            turn.computed += turn.chunk_tokens
            if turn.computed < turn.length:
                continue
            if turn.is_prefilling:
                prefills.append(turn.end_prefill(self.version))
            code = turn.append(sampled[len(handles)])
            handles.append(turn.handle)
            finish.append(code)
            if code != RUNNING:
                self._finish(turn)
        if len(handles) != len(sampled):
            raise AssertionError(f"{len(sampled)} tokens sampled for {len(handles)} rows")
        if not handles:
            return None
        return StepColumns(
            version=self.version,
            turns=np.array(handles, dtype="<u4").tobytes(),
            token_ids=output.token_ids.tobytes(),
            logprobs=output.logprobs.tobytes(),
            finish=bytes(finish) if any(finish) else b"",
            prefills=prefills,
        )

    # ------------------------------------------------------------ what there is

    @property
    def handles(self) -> list[int]:
        """The turns it holds, and those whose end is not told yet."""
        return [*self._turns, *(ended.handle for ended in self._ended)]

    @property
    def running_turns(self) -> int:
        """Turns that hold KV, frozen or not."""
        return len(self._running)

    @property
    def waiting_turns(self) -> int:
        """Turns that hold none."""
        return len(self._waiting)

    @property
    def free_blocks(self) -> int:
        """KV blocks that no turn holds."""
        return self._pool.free_blocks

    @property
    def can_step(self) -> bool:
        """Whether ``plan`` would find a row."""
        if self._running:
            return self._gate.turns_run
        return bool(self._waiting) and self._gate.turns_start

    # ------------------------------------------------------------ planning

    def _plan_decodes(self) -> int:
        """Plan one token for each turn that is past its prefill and has room for it."""
        planned = self._planned
        for turn in self._running.copy():
            if turn.is_prefilling:
                # Recomputed turns can lack the place of their last token. They get it here, in
                # the order of rank, for nobody may be thrown out who is planned already.
                if turn.length > turn.block_tokens_held:
                    self._grow(turn)
                continue
            if turn.computed < turn.block_tokens_held or self._grow(turn):
                turn.chunk_tokens = 1
                planned.append(turn)
        return len(planned)

    def _plan_chunk(self, turn: TurnState, tokens_left: int) -> int:
        has_room_for = min(turn.length, turn.block_tokens_held)
        turn.chunk_tokens = min(tokens_left, has_room_for - turn.computed)
        if turn.chunk_tokens > 0:
            self._planned.append(turn)
        return turn.chunk_tokens

    def _start_waiting(self) -> Iterator[TurnState]:
        """Start waiting turns, best first, while there is room for them.

        A turn gets the blocks of all its known tokens at once, so that a prefill never waits half
        way. And one block must stay free for each turn that runs, or the next decodes would throw
        out again what has just started.
        """
        while self._waiting and len(self._running) < self._limits.max_running_turns:
            turn = self._waiting[0][1]
            needed = self._limits.blocks_for(turn.length)
            if needed + len(self._running) > self._pool.free_blocks:
                return
            heapq.heappop(self._waiting)
            self._give_blocks(turn, needed)
            insort(self._running, turn, key=_rank)
            yield turn

    def _grow(self, turn: TurnState) -> bool:
        """Give a turn one more block, from the worst running turn if need be.

        False if it is the worst itself, or was thrown out for a better one: then it waits. Keeping
        what it has costs nothing, for whoever needs those blocks throws it out.
        """
        while turn.blocks:
            if self._give_blocks(turn, 1):
                return True
            if self._running[-1] is turn:
                return False
            self._preempt(self._running.pop())
        return False

    def _give_blocks(self, turn: TurnState, blocks: int) -> bool:
        given = self._pool.allocate(blocks)
        if given is None:
            return False
        turn.blocks.extend(given)
        turn.block_tokens_held = len(turn.blocks) * self._limits.block_tokens
        return True

    # ------------------------------------------------------------ leaving

    def _preempt(self, turn: TurnState) -> None:
        """Back to the queue, in its old place; its tokens stay, to be prefilled again."""
        self._pool.free(turn.drop_kv())
        heapq.heappush(self._waiting, (turn.rank, turn))

    def _finish(self, turn: TurnState) -> None:
        self._running.remove(turn)
        del self._turns[turn.handle]
        self._pool.free(turn.drop_kv())

    def _end(self, turn: TurnState, finish: int) -> None:
        """End a turn that is in neither list any more, and have it told."""
        del self._turns[turn.handle]
        self._pool.free(turn.drop_kv())
        self._ended.append(EndedTurn(turn.handle, finish))

    def _abort_running(self) -> None:
        running, self._running = self._running, []
        for turn in running:
            self._end(turn, ABORT)
