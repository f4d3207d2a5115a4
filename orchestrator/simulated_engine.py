"""What does an engine do whose work takes only virtual time? Speaks the protocol, to the letter.

One process of one engine: it reads its messages between steps, stages weights beside its steps,
keeps what isn't acknowledged, and answers in the order that a real one does. What its turns say is
:mod:`simulated_turns`' matter; when it breaks is decided elsewhere.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tidegate.orchestrator.simulated_model import VOCAB_SIZE
from tidegate.orchestrator.simulated_staging import SimulatedStaging, WeightBuffer
from tidegate.orchestrator.simulated_truth import Truth
from tidegate.orchestrator.simulated_turns import SimulatedTurns, StepRows, StepWork
from tidegate.orchestrator.simulated_wire import Link
from tidegate.transport.messages import (
    PROTOCOL,
    Ack,
    CancelTurn,
    Complaint,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromOrchestrator,
    Goodbye,
    Hello,
    Message,
    Pause,
    Paused,
    Refused,
    Resume,
    Resumed,
    Shutdown,
    StartWeightUpdate,
    SubmitTurn,
    UpdateWeights,
    WeightsLive,
    Welcome,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.streams import SendWindow

WELCOME_TIMEOUT_S = 1.0
"""An engine that isn't welcomed for so long ends, and is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """What an engine's work takes."""

    step_s: float
    """Of any step: reading the weights once."""
    running_turn_s: float
    """More per turn in the step."""
    prefill_tokens_per_s: float
    staging_s: float
    """To copy one version of the weights."""
    max_running_turns: int
    chunk_tokens: int
    """Tokens prefilled per step, at most."""


@dataclass(slots=True)
class _Answers:
    """What is due once the turns that ended before it have been told."""

    due: list[Message] = field(default_factory=list)
    pauses: list[Paused] = field(default_factory=list)
    """Not in effect yet."""


class SimulatedEngine:
    """One process. It is started, lives by its link and the clock, and ends or is killed."""

    def __init__(
        self,
        hello: Hello,
        *,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        costs: EngineCosts,
        buffer: WeightBuffer,
        chance: random.Random,
        truth: Truth,
        on_swap: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._hello = hello
        self._link = link
        self._loop = loop
        self._costs = costs
        self._staging = SimulatedStaging(
            loop, buffer, copy_s=costs.staging_s, on_copied=self._go_on
        )
        self._truth = truth
        self._on_swap = on_swap
        self._on_end = on_end
        self.turns = SimulatedTurns(
            hello.engine,
            running_max=costs.max_running_turns,
            chunk_tokens=costs.chunk_tokens,
            chance=chance,
        )
        self.is_alive = True
        self.slowness = 1.0
        """Steps take so many times as long."""
        self._is_hung = False
        self._inbox: deque[bytes] = deque()
        self._welcome: Welcome | None = None
        self._window = SendWindow(1)
        self._answers = _Answers()
        self._work: StepWork | None = None
        """The step being computed."""
        self._is_step_over = False
        """It is, but the engine hangs."""
        self._started_s = self._heard_at_s = self._heartbeat_due_s = 0.0
        self._was_complained_of = False

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Connect, and say who it is."""
        self._truth.started(self._hello.engine)
        self._link.open(self._on_frame)
        self._send(self._hello)
        self._loop.call_later(WELCOME_TIMEOUT_S, self._end_unless_welcome)

    def kill(self) -> None:
        """Gone, without a word."""
        self.is_alive = False
        self._link.hang_up(is_clean=False)

    def end(self, reason: str) -> None:
        """Take leave; whatever is unfinished goes on elsewhere."""
        if self.is_alive:
            self._send(Goodbye(reason=reason))
            self.is_alive = False
            self._link.hang_up(is_clean=True)
            self._on_end()

    def hang(self) -> None:
        """Do nothing until :meth:`wake`."""
        self._is_hung = True

    def wake(self) -> None:
        """Go on where it hung."""
        self._is_hung = False
        if self._is_step_over:
            self._end_step()
        else:
            self._go_on()

    def __str__(self) -> str:
        turns = self.turns
        return (
            f"{self._hello.engine}: {'hung' if self._is_hung else 'alive'}, "
            f"{'welcome' if self._welcome else 'not welcomed'}, weights v{turns.version}, "
            f"{len(turns.running)} turns running, {len(turns.waiting)} waiting, awaiting swap "
            f"{turns.awaited_swap}, beside them {self._staging}, credit {self._window.is_open}"
        )

    def _end_unless_welcome(self) -> None:
        if self._welcome is None:
            self.end("not welcomed")

    def _send(self, message: Message) -> bytes:
        frame = encode(message)
        self._link.send(frame)
        return frame

    # ------------------------------------------------------------ between steps

    def _on_frame(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self._go_on()

    def _go_on(self) -> None:
        """One round of a real engine's loop: messages, time, answers, a swap, the next step."""
        if not self.is_alive or self._is_hung or self._work is not None:
            return
        is_heard = bool(self._inbox)
        while self._inbox and self.is_alive:
            self._handle(decode_from_orchestrator(self._inbox.popleft()))
        if self._welcome is not None and self.is_alive:
            self._keep_time(self._welcome, is_heard=is_heard)
        if self._welcome is not None and self.is_alive:
            self._settle()
            self._begin_step()

    def _keep_time(self, welcome: Welcome, *, is_heard: bool) -> None:
        now_s = self._loop.time()
        if is_heard:
            self._heard_at_s = now_s
        elif now_s - self._heard_at_s > welcome.orchestrator_timeout_s:
            self.end(f"heard nothing for {now_s - self._heard_at_s:.1f} s")
            return
        if now_s < self._heartbeat_due_s:
            return
        self._heartbeat_due_s = now_s + welcome.heartbeat_interval_s
        self._loop.call_at(self._heartbeat_due_s, self._go_on)
        if self._link.take_reconnected() or self._was_complained_of:
            self._introduce_again()
        heartbeat = EngineHeartbeat(
            weight_version=self.turns.version,
            running_turns=len(self.turns.running),
            waiting_turns=len(self.turns.waiting),
            free_blocks=1,
            sent_us=round(now_s * 1e6),
        )
        self._send(heartbeat)

    def _introduce_again(self) -> None:
        self._was_complained_of = False
        self._send(msgspec.structs.replace(self._hello, weight_version=self.turns.version))
        for frame in self._window.unacknowledged():
            self._link.send(frame)

    def _settle(self) -> None:
        """Say what is due, ended turns first, and swap weights that are."""
        if self.turns.has_ended and not self._window.is_open:
            return
        if (ended := self.turns.take_ended()) is not None:
            self._send_step(ended, self._loop.time())
        self._answer_pauses()
        self._answers.due += self._staging.take_answers()
        for answer in self._answers.due:
            self._send(answer)
        self._answers.due.clear()
        update = self.turns.swap_due
        if update is not None and not self._staging.is_busy:
            self._swap(update)

    def _answer_pauses(self) -> None:
        if self.turns.pause_mode != "wait" or not self.turns.running:
            self._answers.due += self._answers.pauses
            self._answers.pauses.clear()

    def _swap(self, update: FinishWeightUpdate) -> None:
        content = self._staging.take()
        self._truth.swapped(self._hello.engine, update.version, content)
        self.turns.swap(update, content)
        self._send(WeightsLive(version=update.version, swapped_us=round(self._loop.time() * 1e6)))
        self._on_swap()

    # ------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        if not self._window.is_open:
            return
        work = self.turns.plan()
        if not work.chunks:
            return
        costs = self._costs
        busy_s = costs.step_s + costs.running_turn_s * len(work.chunks)
        busy_s += work.prefilled_tokens / costs.prefill_tokens_per_s
        self._work, self._started_s = work, self._loop.time()
        self._loop.call_later(busy_s * self.slowness, self._end_step)

    def _end_step(self) -> None:
        self._is_step_over = True
        if not self.is_alive or self._is_hung:
            return
        assert self._work is not None
        rows = self.turns.complete(self._work)
        self._work, self._is_step_over = None, False
        if rows is not None:
            self._send_step(rows, self._started_s)
        self._go_on()

    def _send_step(self, rows: StepRows, started_s: float) -> None:
        seq = self._window.next_seq()
        started_us, ended_us = round(started_s * 1e6), round(self._loop.time() * 1e6)
        step = rows.message(seq, self.turns.version, started_us, ended_us - started_us)
        self._truth.sent(self._hello.engine, step)
        self._window.sent(seq, self._send(step))

    # ------------------------------------------------------------ messages

    def _handle(self, message: FromOrchestrator) -> None:
        if isinstance(message, Welcome) and self._welcome is None:
            self._welcome = message
            self._window = SendWindow(message.credit_steps)
            self._heartbeat_due_s = self._loop.time()
        match message:
            case Refused(message=why):
                self.end(f"refused: {why}")
            case Shutdown():
                self.end("asked to shut down")
            case Complaint():
                self._was_complained_of = True
            case _ if self._welcome is None:
                pass  # a real engine reads nothing before the welcome either
            case Ack(seq=seq):
                self._window.acknowledge(seq)
            case SubmitTurn():
                self.turns.submit(message)
            case CancelTurn(turn=turn):
                self.turns.cancel(turn)
            case Pause() | Resume():
                self._pause_or_resume(message)
            case StartWeightUpdate() | UpdateWeights() | FinishWeightUpdate():
                self._handle_weights(message)

    def _pause_or_resume(self, message: Pause | Resume) -> None:
        if isinstance(message, Resume):
            self.turns.pause_mode = None
            self._answers.pauses.clear()
            self._answers.due.append(Resumed())
            return
        self.turns.pause_mode = message.mode
        self._answers.pauses.append(Paused(mode=message.mode))
        if message.mode == "abort":
            self.turns.abort_running()

    def _handle_weights(
        self, message: StartWeightUpdate | UpdateWeights | FinishWeightUpdate
    ) -> None:
        match message:
            case StartWeightUpdate(version=version):
                if not self._staging.has_in_hand(version):
                    self.turns.awaited_swap = None  # of an older version: its place is needed
                self._staging.start(version)
            case UpdateWeights(version=version):
                self._staging.copy(version)
            case FinishWeightUpdate(version=version) if self._staging.is_staged(version):
                self.turns.awaited_swap = message
                if message.pause_mode == "abort":
                    self.turns.abort_running()
            case FinishWeightUpdate(version=version):
                self._staging.fail(version, "is not staged here")


def hello_of(engine: str, epoch: int, costs: EngineCosts) -> Hello:
    """What an engine of these costs says of itself."""
    return Hello(
        protocol=PROTOCOL,
        engine=engine,
        epoch=epoch,
        weight_version=0,
        architecture="Hash",
        vocab_size=VOCAB_SIZE,
        context_tokens_max=1 << 20,
        max_running_turns=costs.max_running_turns,
        num_blocks=1,
        block_tokens=1,
        pause_modes=["abort", "keep", "wait"],
        kv_policies=["keep", "recompute"],
        weight_channels=["shm"],
    )
