"""Simulated engine process: speaks the wire protocol exactly; its work takes only virtual time.

Like a real engine, it reads its messages between steps, stages weights while it decodes, keeps
steps until they are acknowledged, and answers in the same order. :mod:`host` makes it and injects
its faults; :mod:`turns` samples the tokens. Credits and replays are ``transport/streams.py``'s.
"""

import random
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.engine.adapters import SimulatedAdapters
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.scores import SimulatedScores
from tidegate.simulation.engine.sleep import SimulatedSleep
from tidegate.simulation.engine.spec import SimulatedEngineSpec
from tidegate.simulation.engine.staging import SimulatedStaging, check_refusal
from tidegate.simulation.engine.turns import DEADLY_TOKEN, SimulatedTurns, StepRows, StepWork
from tidegate.simulation.engine.wire import SimulatedLink
from tidegate.simulation.faults.faults import LONGEST_FAULT_S
from tidegate.transport.messages import (
    Ack,
    CancelTurn,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromOrchestrator,
    Goodbye,
    Hello,
    HelloRejected,
    LoadAdapter,
    Message,
    MessageRejected,
    Pause,
    Resume,
    Shutdown,
    Sleep,
    StartWeightUpdate,
    SubmitTurn,
    SubmitTurns,
    SwapAdapter,
    TurnFailed,
    TurnsPaused,
    TurnsResumed,
    UnloadAdapter,
    UpdateWeights,
    Wake,
    WeightsLive,
    Welcome,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.scoring import CancelScore, ScoreTokens
from tidegate.transport.streams import SendWindow

WELCOME_TIMEOUT_S = 1.0
"""Time without a welcome after which an engine process ends and is restarted, in seconds."""

HELLO_INTERVAL_S = 0.5
"""Time after which an unanswered hello is sent again, in seconds."""

COMPLAINTS_MAX = 3
"""Number of complaints about the same oldest unacknowledged step at which an engine ends."""


@dataclass(slots=True)
class _PendingReplies:
    """Answers that are due once the turns that ended before them have been reported."""

    due: list[Message] = field(default_factory=list)
    pauses: list[TurnsPaused] = field(default_factory=list)
    """Answers to pauses that are not in effect yet."""


class EngineOwner(Protocol):
    """Host of an engine process, as the process sees it: receives its swaps, steps and end."""

    def swapped(self) -> None:
        """Count one weight swap that the engine has reported."""

    def stepped(self, tokens: int) -> None:
        """Count the tokens of one step that the engine has sent."""

    def shut_down(self, running_turns: int) -> None:
        """Record that the engine process got ``Shutdown`` while it ran this many turns."""

    def ended(self) -> None:
        """Record that the engine process has ended by itself."""

    def crash(self, lasts_s: float, *, is_noticed: bool, is_clean: bool = False) -> None:
        """Kill the engine process, and start another one ``lasts_s`` later."""


class SimulatedEngine:
    """One engine process, driven by its link and the clock until it ends or is killed."""

    def __init__(
        self,
        hello: Hello,
        spec: SimulatedEngineSpec,
        *,
        context: SimulationContext,
        link: SimulatedLink,
        chance: random.Random,
        owner: EngineOwner,
    ) -> None:
        self._hello = hello
        self._link = link
        self._loop = context.loop
        self._spec = spec
        self.staging = SimulatedStaging(
            context.loop,
            context.buffer,
            context.ground_truth,
            copy_s=spec.staging_s,
            on_copied=self._advance,
        )
        self._ground_truth = context.ground_truth
        self._coverage = context.coverage
        self._owner = owner
        self.turns = SimulatedTurns(
            hello.engine, spec, context.model, chance=chance, coverage=context.coverage
        )
        self.adapters = SimulatedAdapters(
            hello.engine,
            self.turns,
            self.staging,
            versions_max=spec.adapters_max,
            context=context,
            copy_s=spec.staging_s,
            on_loaded=self._advance,
        )
        self._scores = SimulatedScores(
            self.turns, spec, context.model, loop=context.loop, on_computed=self._advance
        )
        self.sleep = SimulatedSleep(self.turns, self.staging)
        self.is_alive = True
        self.slowness = 1.0
        """Factor by which steps take longer; 1.0 is normal speed."""
        self._is_hung = False
        self._hung_by_turn_until_s = 0.0
        self._inbox: deque[bytes] = deque()
        self._welcome: Welcome | None = None
        self._window = SendWindow(1)
        self._replies = _PendingReplies()
        self._work: StepWork | None = None
        """Work of the step being computed; None between steps."""
        self._is_step_over = False
        """Whether the step's time is over but the step is unfinished because the engine hangs."""
        self._started_s = self._heard_at_s = self._heartbeat_due_s = 0.0
        self._hello_repeated_at_s: float | None = None
        """Loop time of the last repeated hello, in seconds; None once that hello is answered."""
        self._hello_due = False
        """Whether a hello is sent with the next heartbeat: after a reconnect, complaint or
        timeout."""
        self._complained: deque[int] = deque(maxlen=COMPLAINTS_MAX)
        """Oldest unacknowledged step at each of the last complaints."""

    # ------------------------------------------------------------ start and end

    def start(self) -> None:
        """Connect and send the hello."""
        self._ground_truth.started(self._hello.engine)
        self._link.open(self._on_frame)
        self._send(self._hello)
        self._loop.call_later(WELCOME_TIMEOUT_S, self._end_unless_welcome)

    def kill(self, *, is_clean: bool = False) -> None:
        """Kill the process without a goodbye; if ``is_clean``, frames already sent still arrive."""
        self.is_alive = False
        self._link.hang_up(is_clean=is_clean)

    def end(self, reason: str) -> None:
        """Send a goodbye and end the process; unfinished turns continue on other engines."""
        if self.is_alive:
            self._send(Goodbye(reason=reason, is_requested=reason.startswith("asked")))
            self.is_alive = False
            self._link.hang_up(is_clean=True)
            self._owner.ended()

    def hang(self) -> None:
        """Do nothing until :meth:`wake`."""
        if self.turns.running:
            self._coverage.record(CoverageMark.HUNG)
        self._is_hung = True

    def wake(self) -> None:
        """Resume after a hang, unless a turn keeps the engine hung for longer."""
        if self._loop.time() < self._hung_by_turn_until_s:
            return
        self._is_hung = False
        if self._is_step_over:
            self._end_step()
        else:
            self._advance()

    @property
    def handles(self) -> list[int]:
        """Handles of all turns whose end is not reported yet."""
        return self.turns.handles + self.adapters.waiting_handles

    def __str__(self) -> str:
        turns = self.turns
        return (
            f"{self._hello.engine}: {'hung' if self._is_hung else 'alive'}, "
            f"{'welcome' if self._welcome else 'not welcomed'}, weights v{turns.version}, "
            f"{len(turns.running)} turns running, {len(turns.waiting)} waiting, awaiting swap "
            f"{turns.pending_swap}, beside them {self.staging}, credit {self._window.is_open}"
        )

    def _end_unless_welcome(self) -> None:
        if self._is_hung:
            self._loop.call_later(WELCOME_TIMEOUT_S, self._end_unless_welcome)
        elif self._welcome is None:
            self.end("not welcomed")

    def _send(self, message: Message) -> bytes:
        frame = encode(message)
        self._link.send(frame)
        return frame

    # ------------------------------------------------------------ between steps

    def _on_frame(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self._advance()

    def _advance(self) -> None:
        """Run one round of the engine loop: messages, timeouts, answers, weight swap, next step."""
        if not self.is_alive or self._is_hung or self._work is not None:
            return
        has_heard = bool(self._inbox)
        while self._inbox and self.is_alive and not self._is_hung:
            self._handle(decode_from_orchestrator(self._inbox.popleft()))
        if self._is_hung:
            return
        if self._welcome is not None and self.is_alive:
            self._check_timeouts(self._welcome, has_heard=has_heard)
        if self._welcome is not None and self.is_alive:
            self._send_replies_and_swap()
            self._begin_step()

    def _check_timeouts(self, welcome: Welcome, *, has_heard: bool) -> None:
        now_s = self._loop.time()
        if has_heard and self._hello_repeated_at_s is None:
            self._heard_at_s = now_s
        elif now_s - self._heard_at_s > welcome.orchestrator_timeout_s:
            self.end(f"heard nothing for {now_s - self._heard_at_s:.1f} s")
            return
        if now_s < self._heartbeat_due_s:
            return
        self._heartbeat_due_s = now_s + welcome.heartbeat_interval_s
        self._loop.call_at(self._heartbeat_due_s, self._advance)
        self._hello_due |= self._link.take_reconnected()
        if self._hello_repeated_at_s is not None:
            self._hello_due |= now_s - self._hello_repeated_at_s > HELLO_INTERVAL_S
        if self._hello_due:
            self._repeat_hello()
        if self._hello_repeated_at_s is not None:
            return
        heartbeat = EngineHeartbeat(
            weight_version=self.turns.version,
            running_turns=len(self.turns.running),
            waiting_turns=len(self.turns.waiting),
            free_blocks=1,
            sent_us=round(now_s * 1e6),
        )
        self._send(heartbeat)

    def _repeat_hello(self) -> None:
        """Send the hello again, and drop all pending requests except turns."""
        self._hello_due = False
        self._hello_repeated_at_s = self._loop.time()
        self.turns.pending_swap = self.turns.pause_mode = None
        self._replies = _PendingReplies()
        self._scores.clear()
        self.staging.abandon()
        self.adapters.forget_orchestrator()
        self.sleep.pending = None
        self._send(
            msgspec.structs.replace(
                self._hello,
                weight_version=self.turns.version,
                first_seq=self._window.first_seq,
                next_seq=self._window.next_seq(),
                turns=array("I", self.handles).tobytes(),
                adapters=self.adapters.live,
                asleep=self.sleep.asleep,
                needs_weights=self.sleep.needs_weights,
            )
        )

    def _handle_repeated_welcome(self, welcome: Welcome) -> None:
        """Handle the answer to a repeated hello: resend all unacknowledged steps."""
        self._hello_repeated_at_s = None
        self._heard_at_s = self._loop.time()
        self._window.set_credit(welcome.credit_steps)
        for frame in self._window.unacknowledged():
            self._coverage.record(CoverageMark.REPLAYED)
            self._link.send(frame)

    def _handle_complaint(self, why: str) -> None:
        self._complained.append(self._window.first_seq)
        if self._complained.count(self._window.first_seq) == COMPLAINTS_MAX:
            self.end(f"complained of {COMPLAINTS_MAX} times: {why}")
        self._hello_due = True

    def _send_replies_and_swap(self) -> None:
        """Send the due answers, ended turns first, and swap weights if a swap is due."""
        if self.turns.has_ended and not self._window.is_open:
            return
        self._send_steps(self.turns.take_ended(), self._loop.time())
        self._reply_to_pauses()
        self._replies.due += self.sleep.sleep_if_possible()
        self._replies.due += self.staging.take_replies()
        self._replies.due += self._scores.take_replies()
        if self._hello_repeated_at_s is None:
            for answer in (*self._replies.due, *self.adapters.take_replies()):
                self._send(answer)
        self._replies.due.clear()
        update = self.turns.swap_due
        if update is not None and not self.staging.is_busy:
            self._swap(update)

    def _reply_to_pauses(self) -> None:
        if self.turns.pause_mode != "wait" or not self.turns.running:
            self._replies.due += self._replies.pauses
            self._replies.pauses.clear()

    def _swap(self, update: FinishWeightUpdate) -> None:
        content = self.staging.take()
        self._ground_truth.swapped(self._hello.engine, update.version, content)
        self.sleep.swapped()
        self.turns.swap(update, content)
        self._send(WeightsLive(version=update.version, swapped_us=round(self._loop.time() * 1e6)))
        self._owner.swapped()

    # ------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        if not self._window.is_open:
            if self.turns.running:
                self._coverage.record(CoverageMark.NO_CREDIT)
            return
        if not (self.turns.running or self.turns.waiting):
            return
        work = self.turns.plan()
        if not work.chunks:
            return
        busy_s = self._spec.busy_s(len(work.chunks), work.prefilled_tokens)
        self._work, self._started_s = work, self._loop.time()
        self._loop.call_later(busy_s * self.slowness, self._end_step)

    def _end_step(self) -> None:
        self._is_step_over = True
        if not self.is_alive or self._is_hung:
            return
        assert self._work is not None
        messages = self.turns.complete(self._work)
        self._work, self._is_step_over = None, False
        self._send_steps(messages, self._started_s)
        self._advance()

    def _send_steps(self, messages: list[StepRows], started_s: float) -> None:
        """Send the messages of one decode step, one per weight version."""
        self.adapters.release_ended()
        if len(messages) > 1:
            self._coverage.record(CoverageMark.ADAPTERS_MIXED)
        for number, rows in enumerate(messages):
            seq = self._window.next_seq()
            started_us, ended_us = round(started_s * 1e6), round(self._loop.time() * 1e6)
            step = rows.message(seq, self.turns.version, started_us, ended_us - started_us)
            self._ground_truth.sent(self._hello.engine, step)
            is_held = self._hello_repeated_at_s is not None
            frame = encode(step) if is_held else self._send(step)
            self._window.sent(seq, frame, continues_step=number > 0)
            self._owner.stepped(len(rows.token_ids))

    # ------------------------------------------------------------ messages

    def _handle(self, message: FromOrchestrator) -> None:
        if isinstance(message, Welcome) and self._welcome is None:
            self._welcome = message
            self._window = SendWindow(message.credit_steps)
            self._heartbeat_due_s = self._loop.time()
        match message:
            case HelloRejected(message=why):
                check_refusal(why)
                self.end(f"refused: {why}")
            case Shutdown():
                self._owner.shut_down(len(self.turns.running))
                self.end("asked to shut down")
            case Welcome() if self._hello_repeated_at_s is not None:
                self._handle_repeated_welcome(message)
            case _ if self._welcome is None or self._hello_repeated_at_s is not None:
                pass  # the sender had not received the hello yet
            case MessageRejected(message=why):
                self._handle_complaint(why)
            case Ack(seq=seq):
                self._window.acknowledge(seq)
            case SubmitTurn():
                self._submit(message)
            case SubmitTurns(turns=turns):
                for turn in turns:
                    self._submit(turn)
            case CancelTurn(turn=turn):
                if not self.adapters.cancel(turn):
                    self.turns.cancel(turn)
            case ScoreTokens() | CancelScore():
                self._scores.take(message)
            case Pause() | Resume():
                self._pause_or_resume(message)
            case Sleep():
                self.sleep.pending = message
            case Wake():
                self._replies.due.append(self.sleep.wake(message))
            case StartWeightUpdate() | UpdateWeights() | FinishWeightUpdate():
                self._handle_weights(message)
            case LoadAdapter() | UnloadAdapter():
                self.adapters.handle(message)
            case SwapAdapter():
                self.adapters.handle(message)
                self._owner.swapped()

    def _submit(self, message: SubmitTurn) -> None:
        if DEADLY_TOKEN in array("i", message.token_ids):
            self._end_by_deadly_turn(message.turn)
        if not self.is_alive:
            return
        if message.sampling.adapter_version is not None:
            self.adapters.submit(message)
        elif (refusal := self.turns.submit(message)) is not None:
            self._send(TurnFailed(turn=message.turn, message=refusal))

    def _end_by_deadly_turn(self, handle: int) -> None:
        """Crash, or hang until the orchestrator gives the engine up, by the turn's handle."""
        if handle % 2:
            self._owner.crash(0.0, is_noticed=handle % 4 == 1)
        elif not self._is_hung:
            self.hang()
            self._hung_by_turn_until_s = self._loop.time() + LONGEST_FAULT_S
            self._loop.call_at(self._hung_by_turn_until_s, self.wake)

    def _pause_or_resume(self, message: Pause | Resume) -> None:
        if isinstance(message, Resume):
            self.turns.pause_mode = None
            self._replies.pauses.clear()
            self._replies.due.append(TurnsResumed())
            return
        self.turns.pause_mode = message.mode
        self._replies.pauses.append(TurnsPaused(mode=message.mode))
        if message.mode == "abort":
            self.turns.abort_running()

    def _handle_weights(
        self, message: StartWeightUpdate | UpdateWeights | FinishWeightUpdate
    ) -> None:
        match message:
            case StartWeightUpdate(version=version):
                self.turns.pending_swap = None  # the new version needs its place
                self.staging.start(version)
            case UpdateWeights():
                self.staging.copy(message, self.turns.content)
            case FinishWeightUpdate(version=version) if self.staging.is_staged(version):
                self.turns.pending_swap = message
                if message.pause_mode == "abort":
                    self.turns.abort_running()
            case FinishWeightUpdate(version=version):
                self.staging.fail(version, "is not staged here")
