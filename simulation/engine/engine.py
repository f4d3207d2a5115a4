"""Simulated engine: a process that speaks the wire protocol exactly, and the host that runs it.

The process's work takes only virtual time. Like a real engine, it reads its messages between steps,
stages weights while it decodes, keeps steps until they are acknowledged, and answers in the same
order. The host starts one process after another, and injects their faults;
:class:`SimulatedEngines` has the hosts of a run.
"""

import itertools
import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from tidegate.orchestrator.fleet.processes import engine_number
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.spec import SimulatedEngineSpec, hello_of
from tidegate.simulation.engine.turns import DEADLY_TOKEN, SimulatedTurns, StepRows, StepWork
from tidegate.simulation.engine.weights import (
    SimulatedAdapters,
    SimulatedSleep,
    SimulatedStaging,
    check_refusal,
)
from tidegate.simulation.engine.wire import SimulatedLink
from tidegate.simulation.faults.faults import LONGEST_FAULT_S, Fault, FaultKind
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
    TurnsResumed,
    UnloadAdapter,
    UpdateWeights,
    Wake,
    WeightsLive,
    Welcome,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.scoring import CancelScore, ScoreFailed, ScoreResult, ScoreTokens
from tidegate.transport.streams import SendWindow

WELCOME_TIMEOUT_S = 1.0
"""Time without a welcome after which an engine process ends and is restarted, in seconds."""

HELLO_INTERVAL_S = 0.5
"""Time after which an unanswered hello is sent again, in seconds."""

COMPLAINTS_MAX = 3
"""Number of complaints about the same oldest unacknowledged step at which an engine ends."""

SLOWNESS = 20.0
"""Factor by which the steps of a slow engine take longer."""

STAGING_DELAY_S = 10.0
"""Additional time that a lagging engine takes to copy weights, in seconds."""

RESTART_S = 0.1
"""Minimum time between the end of one engine process and the start of the next, in seconds."""

NOTICE_S = 0.02
"""Delay of the exit report of a crashed engine that the orchestrator has started, in seconds."""


class SimulatedEngine:
    """One engine process, driven by its link and the clock until it ends or is killed."""

    turns_class: type[SimulatedTurns] = SimulatedTurns

    def __init__(
        self,
        hello: Hello,
        spec: SimulatedEngineSpec,
        *,
        context: SimulationContext,
        link: SimulatedLink,
        chance: random.Random,
        owner: "EngineHost",
    ) -> None:
        self._hello = hello
        self._link = link
        self._loop = context.loop
        self._spec = spec
        self.staging = SimulatedStaging(context, spec, self._on_copied)
        self._ground_truth = context.ground_truth
        self._coverage = context.coverage
        self._owner = owner
        self.turns = self.turns_class(hello.engine, spec, context, chance)
        self.adapters = SimulatedAdapters(
            hello.engine,
            self.turns,
            self.staging,
            context,
            versions_max=spec.adapters_max,
            on_loaded=self._advance,
        )
        self._scores: dict[int, tuple[float, ScoreTokens]] = {}
        """Open score requests by number, each with the virtual time at which its answer is
        computed."""
        self._model = context.model
        self.sleep = SimulatedSleep(self.turns, self.staging)
        self.is_alive = True
        self.slowness = 1.0
        """Factor by which steps take longer; 1.0 is normal speed."""
        self._is_hung = False
        self._hung_by_turn_until_s = 0.0
        self._inbox: deque[FromOrchestrator] = deque()
        self._welcome: Welcome | None = None
        self._window = SendWindow(1)
        self._replies: list[Message] = []
        """Answers that are due once the turns that ended before them have been reported."""
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
            self._coverage.add(CoverageMark.HUNG)
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
            f"{'welcome' if self._welcome else 'not welcomed'}, weights v{turns.live.version}, "
            f"{len(turns.running)} turns running, {len(turns.waiting)} waiting, pause "
            f"{turns.gate.mode}, swap due {turns.swap_due}, beside them {self.staging}, credit "
            f"{self._window.is_open}"
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
        self._inbox.append(decode_from_orchestrator(frame))
        self._advance()

    def _on_copied(self) -> None:
        self._advance()

    def _advance(self) -> None:
        """Run one round of the engine loop: messages, timeouts, answers, weight swap, next step."""
        if not self.is_alive or self._is_hung or self._work is not None:
            return
        has_heard = bool(self._inbox)
        while self._inbox and self.is_alive and not self._is_hung:
            self._handle(self._inbox.popleft())
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
            weight_version=self.turns.live.version,
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
        self.turns.gate.resume()
        self.turns.gate.end_swap()
        self._replies.clear()
        self._scores.clear()
        self.staging.abandon()
        self.adapters.forget_orchestrator()
        self.sleep.pending = None
        self._send(
            msgspec.structs.replace(
                self._hello,
                weight_version=self.turns.live.version,
                first_seq=self._window.first_seq,
                next_seq=self._window.next_seq(),
                turns=array("I", self.handles).tobytes(),
                adapters=self.adapters.versions.live_adapters,
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
            self._coverage.add(CoverageMark.REPLAYED)
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
        self._send_replies()
        update = self.turns.swap_due
        if update is not None and not self.staging.is_busy:
            self._swap(update)

    def _send_replies(self) -> None:
        self._replies += self.turns.gate.take_effective(len(self.turns.running))
        self._replies += self.sleep.sleep_if_possible()
        self._replies += self.staging.take_replies()
        self._replies += self._computed_scores()
        if self._hello_repeated_at_s is None:
            for answer in (*self._replies, *self.adapters.take_replies()):
                self._send(answer)
        self._replies.clear()

    def _swap(self, update: FinishWeightUpdate) -> None:
        self._serve(update, self.staging.take())

    def _serve(self, update: FinishWeightUpdate, content: int) -> None:
        """Compute with the weights ``content`` from now on, and report it."""
        self._ground_truth.swapped(self._hello.engine, update.version, content)
        self.sleep.swapped()
        self.turns.swap(update, content)
        self._send(WeightsLive(version=update.version, swapped_us=round(self._loop.time() * 1e6)))
        self._owner.swapped()

    # ------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        if not self._window.is_open:
            if self.turns.running:
                self._coverage.add(CoverageMark.NO_CREDIT)
            return
        if not (self.turns.running or self.turns.waiting):
            return
        work = self.turns.plan()
        if work.chunks:
            self._work, self._started_s = work, self._loop.time()
            self._schedule(work)

    def _schedule(self, work: StepWork) -> None:
        busy_s = self._spec.busy_s(len(work.chunks), work.prefilled_tokens)
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
            self._coverage.add(CoverageMark.ADAPTERS_MIXED)
        for number, rows in enumerate(messages):
            seq = self._window.next_seq()
            started_us, ended_us = round(started_s * 1e6), round(self._loop.time() * 1e6)
            queued = len(self.turns.waiting)
            step = rows.message(seq, started_us, ended_us - started_us, queued_turns=queued)
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
            case ScoreTokens():
                # computed beside the turns, by the weights that are live when the answer is sent
                due_s = self._loop.time() + self._spec.busy_s(1, len(message.token_ids) // 4)
                self._scores[message.request_id] = (due_s, message)
                self._loop.call_at(due_s, self._advance)
            case CancelScore(request_id=request_id):
                self._scores.pop(request_id, None)
            case Pause(mode=mode):
                if self.turns.gate.pause(mode):
                    self.turns.abort_running()
            case Resume():
                self.turns.gate.resume()
                self._replies.append(TurnsResumed())
            case Sleep():
                self.sleep.pending = message
            case Wake():
                self._replies.append(self.sleep.wake(message))
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
        """Crash if the turn's handle is odd, else hang until the orchestrator gives it up."""
        if handle % 2:
            self._owner.crash(0.0, is_noticed=handle % 4 == 1)
        elif not self._is_hung:
            self.hang()
            self._hung_by_turn_until_s = self._loop.time() + LONGEST_FAULT_S
            self._loop.call_at(self._hung_by_turn_until_s, self.wake)

    def _handle_weights(
        self, message: StartWeightUpdate | UpdateWeights | FinishWeightUpdate
    ) -> None:
        match message:
            case StartWeightUpdate(version=version):
                self.turns.gate.end_swap()  # the new version needs its place
                self.staging.start(version)
            case UpdateWeights():
                self.staging.copy(message, self.turns.live.content)
            case FinishWeightUpdate(version=version) if self.staging.is_staged(version):
                if self.turns.gate.request_swap(message):
                    self.turns.abort_running()
            case FinishWeightUpdate(version=version):
                self.staging.fail(version, "is not staged here")

    # ------------------------------------------------------------ scores

    def _computed_scores(self) -> Sequence[Message]:
        """Remove the score requests that are computed, and return their answers; none while the
        engine is paused or asleep."""
        gate = self.turns.gate
        if not self._scores or gate.is_pause_requested or gate.is_held:
            return []
        now_s = self._loop.time()
        due = [message for due_s, message in self._scores.values() if due_s <= now_s]
        for message in due:
            del self._scores[message.request_id]
        return [self._score(message) for message in due]

    def _score(self, message: ScoreTokens) -> ScoreResult | ScoreFailed:
        tokens = array("i", message.token_ids)
        if message.score_kind != "logprobs" or message.top_logprobs:
            why = "a simulated engine computes only log-probs of the given tokens"
            return ScoreFailed(request_id=message.request_id, message=why)
        if not 1 <= message.start < len(tokens):
            why = f"start must be in [1, {len(tokens) - 1}], got {message.start}"
            return ScoreFailed(request_id=message.request_id, message=why)
        logprobs = self._model.logprobs(tokens, message.start, content=self.turns.live.content)
        return ScoreResult(
            request_id=message.request_id,
            version=self.turns.live.version,
            start=message.start,
            logprobs=array("f", logprobs).tobytes(),
        )


Host = TypeVar("Host", bound="EngineHost")


class EngineHost:
    """Starts the processes of one engine name one after another, and injects its faults."""

    def __init__(
        self,
        name: str,
        spec: SimulatedEngineSpec,
        *,
        context: SimulationContext,
        latency_s: float,
        chance: random.Random,
        engine_class: type[SimulatedEngine] = SimulatedEngine,
        on_exit: Callable[[str, str], None] = lambda engine, why: None,
        on_drain: Callable[[str, float], None] = lambda engine, within_s: None,
    ) -> None:
        """Create the host; ``on_exit`` is called with a crashed engine's name and the reason,
        ``on_drain`` with an engine that the run is to drain, and the time for it in seconds."""
        self.name = name
        self._spec = spec
        self._context = context
        self._loop = context.loop
        self._on_exit = on_exit
        self._on_drain = on_drain
        self._engine_class = engine_class
        self.must_end_idle = False
        """Whether the engine must have handed back its turns when it gets ``Shutdown``, because
        nothing but drains was planned for it."""
        self._chance = chance
        self._epoch = 0
        self._swaps = 0
        self._is_stopped = False
        self._faults: list[Fault] = []
        self.link = context.router.link(name, latency_s=latency_s, chance=chance)
        self.engine: SimulatedEngine | None = None
        """Newest engine process; None before the first one is started."""

    def __str__(self) -> str:
        return str(self.engine or f"{self.name}: not started yet")

    @property
    def is_gone(self) -> bool:
        """Whether the host starts no process any more, and not because it was told so."""
        return False

    def start(self) -> None:
        """Start the first process, unless a planned fault delays the start."""
        if not any(fault.kind is FaultKind.LATE for fault in self._faults):
            self._restart()

    def plan(self, fault: Fault) -> None:
        """Schedule a fault for its time or weight swap. Call this before :meth:`start`."""
        self._faults.append(fault)
        if not fault.after_swap:
            self._loop.call_at(fault.at_s, self._inject, fault)

    # ------------------------------------------------------------ reports of the engine process

    def swapped(self) -> None:
        """Count one reported weight swap, and inject the faults due after this number of swaps."""
        self._swaps += 1
        for fault in self._faults:
            if fault.after_swap == self._swaps:
                self._loop.call_soon(self._inject, fault)

    def stepped(self, tokens: int) -> None:
        """Count the tokens of one step that the engine process has sent."""

    def shut_down(self, running_turns: int) -> None:
        """Record that the engine process got ``Shutdown`` while it ran this many turns."""
        assert not (running_turns and self.must_end_idle), (
            f"{self.name} was told to end while it ran {running_turns} turns"
        )

    def ended(self) -> None:
        """Start the next process after the engine process has ended by itself."""
        self._loop.call_later(RESTART_S, self._restart)

    # ------------------------------------------------------------ fault injection

    def _inject(self, fault: Fault) -> None:
        """Inject one fault now, if the engine is in a state that the fault applies to."""
        if self.engine is None:
            if fault.kind is FaultKind.LATE:
                self._context.coverage.add(CoverageMark.LATE)
                self._restart()
        elif fault.kind in (FaultKind.CUT, FaultKind.STALL, FaultKind.GARBLE):
            self._inject_wire_fault(fault)
        elif self.engine.is_alive:
            self._inject_engine_fault(self.engine, fault)

    def _inject_wire_fault(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.CUT:
                self.link.cut(fault.lasts_s)
            case FaultKind.STALL:
                self.link.stall(fault.lasts_s)
            case FaultKind.GARBLE:
                self.link.garble(1 + int(fault.lasts_s))

    def _inject_engine_fault(self, engine: SimulatedEngine, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.CRASH:
                self.crash(fault.lasts_s, is_noticed=self._chance.random() < 0.5)
            case FaultKind.HANG:
                engine.hang()
                self._loop.call_later(fault.lasts_s, engine.wake)
            case FaultKind.SLOW:
                self._context.coverage.add(CoverageMark.SLOWED)
                engine.slowness = SLOWNESS
                self._loop.call_later(fault.lasts_s, setattr, engine, "slowness", 1.0)
            case FaultKind.LEAVE:
                self._context.coverage.add(CoverageMark.LEFT)
                engine.end("asked to leave")
            case FaultKind.DRAIN:
                self._on_drain(self.name, fault.lasts_s)
            case FaultKind.REFUSE:
                engine.staging.refusals_due += 1
            case FaultKind.LAG:
                engine.staging.delay_s = STAGING_DELAY_S
                self._loop.call_later(fault.lasts_s, setattr, engine.staging, "delay_s", 0.0)

    def crash(self, lasts_s: float, *, is_noticed: bool, is_clean: bool = False) -> None:
        """Kill the engine process, and start another one if ``lasts_s`` is finite.

        ``is_noticed``: the orchestrator has started the process itself and gets an exit report;
        otherwise only the engine's silence shows the crash. ``is_clean``: frames that the engine
        sent before the crash still arrive.
        """
        if self.engine is None or not self.engine.is_alive:
            return
        self._context.coverage.add(CoverageMark.CRASHED)
        self.engine.kill(is_clean=is_clean)
        if is_noticed:
            self._loop.call_later(NOTICE_S, self._on_exit, self.name, "crashed")
        if math.isfinite(lasts_s):
            self._loop.call_later(RESTART_S + lasts_s, self._restart)

    def retire(self) -> None:
        """Start no other process once the present one has ended."""
        self._is_stopped = True

    def begin_again(self, delay_s: float) -> None:
        """Start another process of a retired engine in ``delay_s`` seconds."""
        self._is_stopped = False
        self._loop.call_later(delay_s, self._restart)

    def stop(self) -> None:
        """Kill the engine process and start no other one."""
        self._is_stopped = True
        if self.engine is not None:
            self.engine.kill()

    def _restart(self) -> None:
        if self._is_stopped or (self.engine is not None and self.engine.is_alive):
            return
        self._epoch += 1
        self.engine = self._engine_class(
            hello_of(self.name, self._epoch, self._spec),
            self._spec,
            context=self._context,
            link=self.link,
            chance=self._chance,
            owner=self,
        )
        self.engine.start()


class SimulatedEngines(Generic[Host]):
    """Launcher of a simulated run's engines; their hosts start them again when they crash."""

    def __init__(
        self, hosts: dict[str, Host], make_host: Callable[[str], Host], *, start_s: float
    ) -> None:
        """``make_host`` makes the host of an added engine, which serves after ``start_s``."""
        self.hosts = hosts
        """Hosts of all engines so far, by name."""
        self._make_host = make_host
        self._start_s = start_s
        self._retired: set[str] = set()
        self.may_restart = True

    @property
    def are_gone(self) -> bool:
        """Whether all engines have ended, and none starts again."""
        return not self.names

    def start(self) -> None:
        """Start the first engines."""
        for host in self.hosts.values():
            host.start()

    @property
    def names(self) -> list[str]:
        """Names of the engines that run or will start again, by number."""
        here = (name for name in self.hosts.keys() - self._retired if not self._is_gone(name))
        return sorted(here, key=engine_number)

    def _is_gone(self, name: str) -> bool:
        return name in self.hosts and self.hosts[name].is_gone

    def add(self, count: int) -> list[str]:
        """Start more engines; return their names: the lowest unused numbers."""
        unused = (n for n in map("engine-{}".format, itertools.count()) if n not in self.names)
        names = list(itertools.islice((n for n in unused if not self._is_gone(n)), count))
        for name in names:
            if name not in self.hosts:
                self.hosts[name] = self._make_host(name)
            self._retired.discard(name)
            self.hosts[name].begin_again(self._start_s)
        return names

    def retire(self, name: str) -> None:
        """Start no further process of an engine that was asked to leave."""
        if name in self.hosts:
            self._retired.add(name)
            self.hosts[name].retire()

    def lost(self, name: str) -> None:
        """Do nothing: the host starts the engine again, or not."""

    def kill(self, name: str) -> None:
        """Do nothing: an engine that hangs does so for as long as its faults say."""

    def kill_all(self) -> None:
        """Kill all processes, and start no other ones."""
        for host in self.hosts.values():
            host.stop()

    stop = kill_all
