"""What does an engine do all day? It reads its messages, moves weights, steps, and sends.

All of the waiting and none of the deciding: which turns run is the scheduler's business, what they
say is the runner's, and when weights are complete is staging's.

Order matters in two places. Turns ended by a pause are told before the pause is said to be in
effect. And new weights are announced before the first step that used them.
"""

import sys
import time

import msgspec

from tidegate.engine.runner import ModelRunner
from tidegate.engine.scheduler import Scheduler, StepColumns
from tidegate.engine.staging import Staging
from tidegate.errors import BadFrame, TurnRefused
from tidegate.transport import messages
from tidegate.transport.messages import (
    Ack,
    CancelTurn,
    Complaint,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromOrchestrator,
    Hello,
    InitWeights,
    Message,
    OrchestratorHeartbeat,
    Pause,
    Refused,
    Resume,
    Shutdown,
    StartWeightUpdate,
    Step,
    SubmitTurn,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    Welcome,
)
from tidegate.transport.sockets import DealerSocket
from tidegate.transport.streams import SendWindow

STAGING_POLL_S = 0.002
"""How long an idle engine leaves staged weights unnoticed."""

SIGNAL_POLL_S = 0.1
"""How long an idle engine leaves a signal unnoticed; ten wake-ups a second cost nothing."""


class EngineLoop:
    """One engine's life after it was welcomed, on one thread."""

    def __init__(
        self,
        socket: DealerSocket,
        hello: Hello,
        *,
        runner: ModelRunner,
        scheduler: Scheduler,
        staging: Staging,
    ) -> None:
        self._socket = socket
        self._hello = hello
        self._runner = runner
        self._scheduler = scheduler
        self._staging = staging
        self._answers: list[Message] = []
        """Due, in order, once the turns that ended before them have been told."""
        self.ending: str | None = None
        """Why it ends; None while it goes on."""

    def run(self, welcome: Welcome, inbox: list[FromOrchestrator]) -> str:
        """Serve until told to end; return why. ``inbox`` is what came along with the welcome."""
        self._window = SendWindow(welcome.credit_steps)
        self._welcome = welcome
        self._heartbeat_due_s = self._heard_at_s = time.monotonic()
        stepped = False
        while self.ending is None:
            inbox += self._socket.receive(0.0 if stepped else self._idle_s())
            for message in inbox:
                self._handle(message)
            self._keep_time(heard=bool(inbox))
            inbox = []
            self._settle()
            stepped = self.ending is None and self._step()
        return self.ending

    def end(self, why: str) -> None:
        """Have ``run`` return soon; safe to call from a signal handler."""
        self.ending = why

    # ------------------------------------------------------------ messages

    def _handle(self, message: FromOrchestrator) -> None:
        match message:
            case Ack(seq=seq):
                self._acknowledge(seq)
            case SubmitTurn():
                self._submit(message)
            case CancelTurn(turn=turn):
                self._scheduler.cancel(turn)
            case Pause(mode=mode):
                self._scheduler.pause(mode)
            case Resume():
                self._scheduler.resume()
            case InitWeights():
                self._staging.init(message)
            case StartWeightUpdate():
                self._start_update(message)
            case UpdateWeights():
                self._staging.update(message)
            case FinishWeightUpdate():
                self._finish_update(message)
            case Shutdown():
                self.end("asked to shut down")
            case Refused(message=why):
                self.end(f"refused by the orchestrator: {why}")
            case Complaint(message=why):
                sys.stderr.write(f"orchestrator complained: {why}\n")
            case Welcome() | OrchestratorHeartbeat():
                pass

    def _acknowledge(self, seq: int) -> None:
        try:
            self._window.acknowledge(seq)
        except BadFrame as error:
            self._socket.send(Complaint(message=str(error)))

    def _submit(self, message: SubmitTurn) -> None:
        try:
            self._scheduler.submit(message)
        except TurnRefused as error:
            self._socket.send(messages.TurnRefused(turn=message.turn, message=str(error)))

    def _start_update(self, message: StartWeightUpdate) -> None:
        """Begin staging, unless that would overwrite weights that wait to be swapped in."""
        awaited = self._scheduler.awaited_swap
        if awaited is None:
            self._staging.start(message)
            return
        why = f"v{awaited.version} still waits to be swapped in; start v{message.version} after it"
        self._answers.append(WeightsFailed(version=message.version, message=why))

    def _finish_update(self, message: FinishWeightUpdate) -> None:
        self._answers += self._staging.take_answers()  # the last copy may be done, and untold
        if self._staging.is_staged(message.version):
            self._scheduler.ask_swap(message)
            return
        why = f"v{message.version} is not staged here; start, update, and await WeightsStaged first"
        self._answers.append(WeightsFailed(version=message.version, message=why))

    # ------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Say what is due, and swap weights that are."""
        self._answers += self._staging.take_answers()
        self._answers += self._scheduler.take_answers()
        if not self._tell():
            return
        update = self._scheduler.swap_due()
        if update is not None and not self._staging.is_busy:
            self._swap(update)

    def _tell(self) -> bool:
        """Send ended turns, then answers; False if there is no credit for the former."""
        if self._scheduler.has_ended:
            if not self._window.is_open:
                return False
            ended = self._scheduler.take_ended()
            if ended is not None:
                self._send_step(ended, time.monotonic_ns(), 0)
        for answer in self._answers:
            self._socket.send(answer)
        self._answers.clear()
        return True

    def _swap(self, update: FinishWeightUpdate) -> None:
        self._runner.weights = self._staging.exchange(update.version, self._runner.weights)
        recomputed_turns = self._scheduler.weights_swapped(update)
        self._socket.send(
            WeightsLive(
                version=update.version,
                swapped_us=time.monotonic_ns() // 1000,
                recomputed_turns=recomputed_turns,
            )
        )

    # ------------------------------------------------------------ steps

    def _step(self) -> bool:
        """Run one step if there is one to run, and credit to tell of it."""
        if not self._window.is_open:
            return False
        started_ns = time.monotonic_ns()
        rows = self._scheduler.plan()
        if not rows:
            return False
        columns = self._scheduler.complete(self._runner.step(rows))
        if columns is not None:
            self._send_step(columns, started_ns, time.monotonic_ns() - started_ns)
        return True

    def _send_step(self, columns: StepColumns, started_ns: int, busy_ns: int) -> None:
        seq = self._window.next_seq()
        step = Step(
            seq=seq,
            version=columns.version,
            turns=columns.turns,
            token_ids=columns.token_ids,
            logprobs=columns.logprobs,
            finish=columns.finish,
            counts=columns.counts,
            prefills=columns.prefills,
            started_us=started_ns // 1000,
            busy_us=busy_ns // 1000,
            queued_turns=self._scheduler.waiting_turns,
            free_blocks=self._scheduler.free_blocks,
        )
        self._window.sent(seq, self._socket.send(step))

    # ------------------------------------------------------------ time

    def _idle_s(self) -> float:
        """How long to wait for messages when there may be nothing to do."""
        if self._scheduler.can_step and self._window.is_open:
            return 0.0
        if self._staging.is_busy:
            return STAGING_POLL_S
        return min(SIGNAL_POLL_S, max(0.0, self._heartbeat_due_s - time.monotonic()))

    def _keep_time(self, *, heard: bool) -> None:
        """Send a heartbeat if one is due; end if the orchestrator has been silent for too long."""
        now_s = time.monotonic()
        if heard:
            self._heard_at_s = now_s
        elif now_s - self._heard_at_s > self._welcome.orchestrator_timeout_s:
            self.end(f"heard nothing for {now_s - self._heard_at_s:.1f} s")
        if now_s < self._heartbeat_due_s:
            return
        self._heartbeat_due_s = now_s + self._welcome.heartbeat_interval_s
        if self._socket.has_reconnected():
            self._introduce_again()
        self._socket.send(
            EngineHeartbeat(
                weight_version=self._scheduler.version,
                running_turns=self._scheduler.running_turns,
                waiting_turns=self._scheduler.waiting_turns,
                free_blocks=self._scheduler.free_blocks,
                sent_us=time.monotonic_ns() // 1000,
            )
        )

    def _introduce_again(self) -> None:
        """After a reconnect: who we are, and the steps that may have been lost with it."""
        self._socket.send(
            msgspec.structs.replace(self._hello, weight_version=self._scheduler.version)
        )
        for frame in self._window.unacknowledged():
            self._socket.send_again(frame)
