"""Coarse-grained simulated engine: one timer and one message for many decode steps ("multi-step").

All running turns advance together, so no event is needed between two changes of the running set. A
change ends the multi-step at the end of the current step, so lengths, times and version tags are
exactly those of single steps. ``tidegate plan`` and the scheduling benchmark use this engine. Its
messages go over the simulated wire. Built on ``engine_costs.py`` for the times, and ``wire.py``.
"""

import asyncio
import heapq
import math
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tidegate.simulation.engine.costs import EngineCosts
from tidegate.simulation.engine.wire import SimulatedLink
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    LENGTH,
    PROTOCOL,
    RUNNING,
    Ack,
    CancelTurn,
    FinishWeightUpdate,
    Hello,
    Message,
    Pause,
    PauseMode,
    Resume,
    Step,
    SubmitTurn,
    TurnsPaused,
    TurnsResumed,
    UpdateWeights,
    WeightsLive,
    WeightsStaged,
    Welcome,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.streams import SendWindow

MULTI_STEP_TOKENS_MAX = 128
"""Maximum tokens of a turn in one message: 64 KiB for 64 turns, a few percent of a turn."""

TOKEN_BYTES = 4

TIME_TOLERANCE_STEPS = 1e-9
"""Tolerance, as a share of a step: a message that arrives as a step ends counts for its end."""

ZEROS = bytes(TOKEN_BYTES * MULTI_STEP_TOKENS_MAX * 1024)
"""Zero bytes for the token id and log-prob columns, whose values are never read."""


@dataclass(slots=True)
class CoarseSimulatedTurn:
    """Running turn of a coarse-grained engine."""

    handle: int
    context_tokens: int
    """Number of context tokens at the start of the turn."""
    started_at: int
    """Number of steps that the engine had done when the turn started."""
    ends_at: int
    """Number of steps that the engine has done when the turn reaches its token limit."""


@dataclass(slots=True)
class _MultiStep:
    """Consecutive steps of the same running set that one timer covers."""

    begins_s: float
    """Loop time at which the first step begins, after the prefills, in seconds."""
    token_s: float
    """Duration of one step, in seconds."""
    steps: int

    @property
    def ends_s(self) -> float:
        """Loop time at which the last step ends, in seconds."""
        return self.begins_s + self.steps * self.token_s

    def truncate(self, now_s: float) -> bool:
        """Drop the steps that have not begun at ``now_s``; return whether any were dropped."""
        steps_begun = max(
            0, math.ceil((now_s - self.begins_s) / self.token_s - TIME_TOLERANCE_STEPS)
        )
        is_truncated = steps_begun < self.steps
        self.steps = min(self.steps, steps_begun)
        return is_truncated


class CoarseSimulatedEngine:
    """Simulated engine with slots, a queue ordered by priority, and one weight version."""

    def __init__(
        self,
        name: str,
        costs: EngineCosts,
        *,
        loop: asyncio.AbstractEventLoop,
        link: SimulatedLink,
        stopwatch: AbstractContextManager[None],
    ) -> None:
        self.name = name
        self._costs = costs
        self._loop = loop
        self._link = link
        self._stopwatch = stopwatch
        self._window = SendWindow(1)
        self._version = 0
        self._steps_done = 0
        self._running: dict[int, CoarseSimulatedTurn] = {}
        self._handles = b""
        """Handles of the running turns, encoded as a column of the step message."""
        self._waiting: list[tuple[int, int, SubmitTurn]] = []
        """Heap of (rank, order of arrival, turn)."""
        self._arrivals = 0
        self._cancelled: set[int] = set()
        """Handles of cancelled turns, removed when the turn is found running or waiting."""
        self._multi_step: _MultiStep | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the current multi-step or weight swap; no other work begins while it is set."""
        self._swap: FinishWeightUpdate | None = None
        self._pause: PauseMode | None = None
        self._is_pause_answered = False
        self.reprefilled_tokens = 0
        """Number of context tokens that were prefilled again after an abort or a weight swap."""

    # ------------------------------------------------------------ messages from the orchestrator

    def start(self) -> None:
        """Connect and send the hello."""
        self._link.open(self._on_frame)
        hello = Hello(
            protocol=PROTOCOL,
            engine=self.name,
            epoch=1,
            weight_version=0,
            architecture="Benchmark",
            vocab_size=1,
            context_tokens_max=1 << 30,
            max_running_turns=self._costs.slots,
            num_kv_blocks=1 << 20,  # contexts are as long as they like
            block_tokens=16,
            pause_modes=["abort", "keep", "wait"],
            kv_policies=["keep", "recompute"],
            weight_channels=["shm"],
        )
        self._send(hello)

    def _on_frame(self, frame: bytes) -> None:
        with self._stopwatch:
            self._handle(frame)

    def _handle(self, frame: bytes) -> None:
        match decode_from_orchestrator(frame):
            case SubmitTurn() as turn:
                self._arrivals += 1
                heapq.heappush(self._waiting, (self._rank(turn), self._arrivals, turn))
                if len(self._running) < self._costs.slots:
                    self._interrupt_steps()
            case Ack(seq=seq):
                was_open = self._window.is_open
                self._window.acknowledge(seq)
                if not was_open:
                    self._interrupt_steps()
            case CancelTurn(turn=handle):
                self._cancelled.add(handle)
                self._interrupt_steps()
            case UpdateWeights(version=version):
                self._send(WeightsStaged(version=version))
            case FinishWeightUpdate() as swap:
                self._swap = swap
                self._interrupt_steps()
            case Pause(mode=mode):
                self._pause, self._is_pause_answered = mode, False
                self._interrupt_steps()
            case Resume():
                self._pause = None
                self._send(TurnsResumed())
                self._interrupt_steps()
            case Welcome(credit_steps=credit_steps):
                self._window = SendWindow(credit_steps)

    def _rank(self, turn: SubmitTurn) -> int:
        """Return a turn's rank in the queue; the lowest starts first."""
        return turn.priority

    def _send(self, message: Message) -> bytes:
        frame = encode(message)
        self._link.send(frame)
        return frame

    # ------------------------------------------------------------ multi-steps

    def _interrupt_steps(self) -> None:
        """Apply a change at the end of the current step, or now if the engine is idle."""
        if self._timer is None:
            self._advance()
        elif self._multi_step is not None and self._multi_step.truncate(self._loop.time()):
            self._timer.cancel()
            self._timer = self._loop.call_at(
                self._multi_step.ends_s, self._on_timer, self._end_multi_step
            )

    def _on_timer(self, end_work: Callable[[], None]) -> None:
        with self._stopwatch:
            self._timer = None
            end_work()
            self._advance()

    def _end_multi_step(self) -> None:
        multi_step, self._multi_step = self._multi_step, None
        assert multi_step is not None
        self._steps_done += multi_step.steps
        if not multi_step.steps:
            return
        done = self._steps_done
        ended = [turn.handle for turn in self._running.values() if turn.ends_at <= done]
        counts = [multi_step.steps] * len(self._running)
        self._send_tokens(counts, dict.fromkeys(ended, LENGTH))

    def _send_tokens(self, counts: list[int], ended: dict[int, int]) -> None:
        """Send ``counts[i]`` tokens of the i-th running turn, and the ``ended`` turns' finish
        codes."""
        seq = self._window.next_seq()
        column = ZEROS[: TOKEN_BYTES * sum(counts)]
        message = Step(
            seq=seq,
            version=self._version,
            turns=self._handles,
            token_ids=column,
            logprobs=column,
            finish=bytes(ended.get(handle, RUNNING) for handle in self._running) if ended else b"",
            counts=array("I", counts).tobytes(),
            queued_turns=len(self._waiting),
        )
        self._window.sent(seq, self._send(message))
        for handle in ended:
            del self._running[handle]
        if ended:
            self._encode_handles()

    def _encode_handles(self) -> None:
        self._handles = array("I", self._running).tobytes()

    def _advance(self) -> None:
        """Cancel, pause, swap and fill slots, then begin the next multi-step."""

        if self._timer is not None or not self._window.is_open:
            return
        if not self._cancelled.isdisjoint(self._running):
            self._end_turns(CANCELLED, self._cancelled & self._running.keys())
        if "abort" in self._pending_modes and self._running:
            self._end_turns(ABORT, set(self._running))
        if not self._window.is_open:
            return
        self._answer_pause()
        if self._swap is not None and (self._swap.pause_mode != "wait" or not self._running):
            self._begin_swap(self._swap)
            return
        prefill_s = 0.0 if self._pending_modes else self._fill_slots()
        if self._running and self._pause != "keep":
            self._begin_multi_step(prefill_s)

    @property
    def _pending_modes(self) -> list[PauseMode]:
        """Pause modes of the pending swap and pause; no turn starts while there are any."""
        swap = [self._swap.pause_mode] if self._swap is not None else []
        return [*swap, self._pause] if self._pause is not None else swap

    def _end_turns(self, code: int, handles: set[int]) -> None:
        """End turns early with a finish code; all their sampled tokens have been sent."""
        self._send_tokens([0] * len(self._running), dict.fromkeys(handles, code))
        self._cancelled -= handles

    def _answer_pause(self) -> None:
        is_in_effect = self._pause == "keep" or not self._running
        if self._pause is not None and not self._is_pause_answered and is_in_effect:
            self._is_pause_answered = True
            self._send(TurnsPaused(mode=self._pause))

    def _begin_multi_step(self, prefill_s: float) -> None:
        next_end = min(turn.ends_at for turn in self._running.values())
        steps = min(MULTI_STEP_TOKENS_MAX, next_end - self._steps_done)
        self._begin_steps(prefill_s, self._costs.token_s(len(self._running)), steps)

    def _begin_steps(self, prefill_s: float, token_s: float, steps: int) -> None:
        """Begin a multi-step of ``steps`` steps of ``token_s`` seconds, after the prefills."""
        self._multi_step = _MultiStep(self._loop.time() + prefill_s, token_s, steps)
        self._timer = self._loop.call_at(
            self._multi_step.ends_s, self._on_timer, self._end_multi_step
        )

    def _fill_slots(self) -> float:
        """Start the most urgent waiting turns in free slots; return the prefill time in seconds."""
        tokens = 0.0
        free = self._costs.slots - len(self._running)
        while free and self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if turn.turn in self._cancelled:
                self._cancelled.discard(turn.turn)
                continue
            context = len(turn.token_ids) // TOKEN_BYTES
            tokens += self._prefill_tokens(turn, context)
            ends_at = self._steps_done + turn.sampling.max_tokens
            running = CoarseSimulatedTurn(turn.turn, context, self._steps_done, ends_at)
            self._running[turn.turn] = running
            free -= 1
        self._encode_handles()
        return tokens / self._costs.prefill_tokens_per_s

    def _prefill_tokens(self, turn: SubmitTurn, context_tokens: int) -> float:
        """Return the tokens to prefill for a turn.

        An aborted turn prefills its whole context again, and a first turn its share of the group's
        prompt. A later turn of an episode finds its KV and prefills nothing.
        """
        if turn.sampled_before:
            self.reprefilled_tokens += context_tokens
            return context_tokens
        if context_tokens <= self._costs.prompt_tokens:
            return context_tokens / self._costs.group_size
        return 0.0

    # ------------------------------------------------------------ weights

    def _begin_swap(self, swap: FinishWeightUpdate) -> None:
        seconds = self._costs.swap_s
        if swap.kv_policy == "recompute":
            tokens = sum(
                turn.context_tokens + self._steps_done - turn.started_at
                for turn in self._running.values()
            )
            self.reprefilled_tokens += tokens
            seconds += tokens / self._costs.prefill_tokens_per_s
        self._timer = self._loop.call_later(seconds, self._on_timer, self._end_swap)

    def _end_swap(self) -> None:
        assert self._swap is not None
        self._version = self._swap.version
        self._swap = None
        self._send(WeightsLive(version=self._version))
