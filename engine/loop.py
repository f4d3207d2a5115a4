"""Main loop of an engine process: receives messages, stages and swaps weights, steps, and sends.

``engine/worker.py`` runs :class:`EngineLoop` on one thread. The loop waits and calls; it decides
nothing. The scheduler decides which turns run, the runner computes, staging completes weights, and
the link delivers messages. Without an orchestrator the engine decodes until the link has no credit
for steps.

Two orders matter. Turns that a pause ended are reported before the pause. New weights are reported
live before the first step that uses them.
"""

import time
import traceback
from collections.abc import Sequence

from tidegate.engine.execution.runner import Row, Runner, StepOutput
from tidegate.engine.execution.sleep import SleepController
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.memory.host_memory import trim_heap
from tidegate.engine.memory.out_of_memory import is_out_of_memory, out_of_memory
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.step_columns import StepColumns, split_attachments
from tidegate.engine.weights.staging import Live, Staging
from tidegate.errors import ScoreRefused, TidegateError, TurnRefused
from tidegate.transport import messages, scoring
from tidegate.transport.clock import Clock
from tidegate.transport.limits import cut
from tidegate.transport.messages import (
    AdapterFailed,
    AdapterLive,
    CancelTurn,
    EndSessions,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromOrchestrator,
    HelloRejected,
    InitWeights,
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
    UnloadAdapter,
    UpdateWeights,
    Wake,
    WeightsFailed,
    WeightsLive,
)
from tidegate.transport.printable import print_stderr
from tidegate.transport.scoring import CancelScore, ScoreTokens

STAGING_POLL_S = 0.002
"""Seconds between checks for staged weights or a compiled grammar while the engine is idle."""

CONNECTION_POLL_S = 0.02
"""Seconds between checks for a new connection while there is none."""

SIGNAL_POLL_S = 0.1
"""Seconds after which an idle engine notices a signal; ten wake-ups a second cost nothing."""

STEP_MEMORY_REMEDY = "lower max_running_turns or num_kv_blocks, or leave the machine more"
"""Advice in the error of a step that ran out of memory."""


class EngineLoop:
    """Main loop of one engine."""

    def __init__(
        self,
        link: OrchestratorLink,
        *,
        runner: Runner,
        scheduler: EngineScheduler,
        staging: Staging,
        sleep_controller: SleepController,
        step_time_min_s: float = 0.0,
        clock: Clock = time,
    ) -> None:
        self._link = link
        self._clock = clock
        self._step_time_min_s = step_time_min_s
        """Shortest duration of a step, in seconds; 0 means no minimum."""
        self._runner = runner
        self._scheduler = scheduler
        self._staging = staging
        self._sleep_controller = sleep_controller
        sleep_controller.heartbeat = self._send_due_heartbeat
        self._replies: list[Message] = []
        """Replies to send, in order, after the report of the turns that ended before them."""
        self._out_of_memory_steps = 0
        """Number of steps that ran out of memory and were retried smaller."""
        self.refusal: str | None = None
        """Reason that the orchestrator gave for refusing this engine; None if it has not."""
        self.end_reason: str | None = None
        """Reason for the end of the loop; None while it runs."""
        self.is_end_requested = False
        """Whether the loop was asked to end, by a signal or by the orchestrator."""

    def run(self) -> str:
        """Serve until asked to end; return the reason.

        Raises:
            NotUnderstood: the orchestrator refuses the same step repeatedly.
            OutOfMemory: there is no memory for the smallest step.
            Exception: the model's code fails for every turn.
        """
        stepped = False
        while self.end_reason is None:
            stepped = self.run_round(0.0 if stepped else self.idle_s())
        return self.end_reason

    def run_round(self, timeout_s: float) -> bool:
        """Handle messages, send replies, swap due weights, run one step; return whether one ran.

        Waits up to ``timeout_s`` for a message if there is none.
        """
        for message in self._link.receive(timeout_s):
            self._handle(message)
        if self._link.is_hello_due:
            self._send_hello()
        self._check_timeouts()
        self._process_control()
        return self.end_reason is None and self._step()

    def end(self, why: str) -> None:
        """Make ``run`` return soon."""
        self.end_reason = why

    def end_on_request(self, why: str) -> None:
        """Make ``run`` return soon, for good; safe to call from a signal handler."""
        self.is_end_requested = True
        self.end(why)

    def _send_hello(self) -> None:
        """Send a hello. Only turns, live weights and sleep outlive the previous connection.

        The next orchestrator may be another process, which has no record of pauses and staged
        weights, and may reuse their version numbers for other weights.
        """
        self._scheduler.forget_orchestrator()
        self._staging.abandon()
        self._sleep_controller.forget_orchestrator()
        self._replies.clear()
        self._link.send_hello(
            weight_version=self._scheduler.version,
            turns=self._scheduler.handles,
            asleep=self._sleep_controller.asleep,
            needs_weights=self._sleep_controller.needs_weights,
            adapters=self._scheduler.adapters.live_adapters,
        )

    # ------------------------------------------------------------ messages

    def _handle(self, message: FromOrchestrator) -> None:
        match message:
            case SubmitTurn():
                self._submit(message)
            case SubmitTurns(turns=turns):
                for turn in turns:
                    self._submit(turn)
            case CancelTurn(turn=turn):
                self._scheduler.cancel(turn)
            case EndSessions(sessions=sessions):
                self._scheduler.sessions.end(sessions)
            case ScoreTokens():
                self._score(message)
            case CancelScore(request_id=request):
                self._scheduler.scores.cancel(request)
            case Pause(mode=mode, clear_cache=clear_cache):
                self._scheduler.pause(mode, clear_cache=clear_cache)
            case Resume():
                self._scheduler.resume()
            case Sleep():
                self._sleep_controller.queue_request(message)
            case Wake():
                self._replies.append(self._sleep_controller.wake(message))
            case InitWeights():
                self._staging.init(message)
            case StartWeightUpdate():
                self._scheduler.cancel_swap()  # the new weights overwrite the staged ones
                live = Live(self._scheduler.version, self._runner.weights)
                self._staging.start(message, live if self._sleep_controller.has_weights else None)
            case UpdateWeights():
                self._staging.update(message)
            case FinishWeightUpdate():
                self._finish_update(message)
            case LoadAdapter():
                self._load_adapter(message)
            case SwapAdapter():
                self._swap_adapter(message)
            case UnloadAdapter(name=name, version=version):
                self._scheduler.unload_adapter(name, version)
            case Shutdown():
                self.end_on_request("asked to shut down")
            case HelloRejected(message=why):
                self.refusal = why
                self.end(f"refused by the orchestrator: {why}")

    def _submit(self, message: SubmitTurn) -> None:
        try:
            self._scheduler.submit(message)
        except TurnRefused as error:
            self._link.send(messages.TurnFailed(turn=message.turn, message=cut(str(error))))

    def _score(self, message: ScoreTokens) -> None:
        try:
            self._scheduler.score(message)
        except ScoreRefused as error:
            why = cut(str(error))
            self._link.send(scoring.ScoreFailed(request_id=message.request_id, message=why))

    def _finish_update(self, message: FinishWeightUpdate) -> None:
        self._replies += self._staging.take_replies()  # the last copy may be done, but unreported
        if self._staging.is_staged(message.version):
            self._scheduler.request_swap(message)
            return
        why = f"v{message.version} is not staged here; start, update, and await WeightsStaged first"
        self._replies.append(WeightsFailed(version=message.version, message=why))

    def _load_adapter(self, message: LoadAdapter) -> None:
        name, version = message.name, message.version
        if not self._scheduler.adapters.versions_max:
            why = "this engine serves no adapters with versions of their own"
            self._replies.append(AdapterFailed(name=name, version=version, message=why))
            return
        self._staging.load_adapter(message)

    def _take_adapters(self) -> None:
        """Take the adapters that were read since the last call into memory."""
        for read in self._staging.take_adapters():
            request = read.request
            self._scheduler.adapter_loaded(
                (request.name, request.version),
                read.tensors,
                is_live=request.is_live,
                is_staged=request.is_staged,
            )
            self._replies.append(read.reply)

    def _swap_adapter(self, message: SwapAdapter) -> None:
        """Swap one adapter's version now: messages are handled between two steps."""
        self._replies += self._staging.take_replies()
        self._take_adapters()
        name, version = message.name, message.version
        recomputed = self._scheduler.swap_adapter(message)
        if recomputed is None:
            why = f"adapter {name!r} v{version} is not loaded; send LoadAdapter first"
            self._replies.append(AdapterFailed(name=name, version=version, message=why))
            return
        live = AdapterLive(
            name=name,
            version=version,
            swapped_us=self._clock.monotonic_ns() // 1000,
            recomputed_turns=recomputed,
        )
        self._replies.append(live)

    # ------------------------------------------------------------ between steps

    def _process_control(self) -> None:
        """Send due replies, and swap weights if a swap is due."""
        self._replies += self._staging.take_replies()
        self._take_adapters()
        self._replies += self._scheduler.take_replies()
        if (
            sleep_replies := self._sleep_controller.run_pending()
        ):  # may have cancelled the staged update
            self._replies += [*self._staging.take_replies(), *sleep_replies]
        if not self._send_replies():
            return
        update = self._scheduler.swap_due()
        if update is not None and not self._staging.is_busy:
            self._swap(update)

    def _send_replies(self) -> bool:
        """Send ended turns, then replies; False if there is no credit for the ended turns.

        Replies made since the last hello wait for its welcome, because the link drops them before.
        """
        if self._scheduler.has_ended:
            if not self._link.has_credit:
                return False
            ended = self._scheduler.take_ended()
            if ended is not None:
                self._send_step(ended, self._clock.monotonic_ns(), 0)
        if self._link.is_connected:
            for reply in self._replies:
                self._link.send(reply)
            self._replies.clear()
        return True

    def _swap(self, update: FinishWeightUpdate) -> None:
        begun_ns = self._clock.monotonic_ns()
        self._runner.swap(self._staging.swap(update.version, self._runner.weights))
        self._sleep_controller.swapped()
        recomputed_turns = self._scheduler.weights_swapped(
            update, adapters=self._runner.weights.adapters.keys()
        )
        swapped_ns = self._clock.monotonic_ns()
        self._link.send(
            WeightsLive(
                version=update.version,
                swapped_us=swapped_ns // 1000,
                recomputed_turns=recomputed_turns,
                stall_us=(swapped_ns - begun_ns) // 1000,
            )
        )

    # ------------------------------------------------------------ steps

    def _step(self) -> bool:
        """Run one step if turns can run and the link has credit; return whether one ran."""
        if not self._link.has_credit:
            return False
        started_ns = self._clock.monotonic_ns()
        rows = self._scheduler.plan()
        if not rows:
            return False
        output = self._compute(rows)
        if output is None:
            trim_heap()  # the failed step's memory is freed only by now
            return True
        self._pace(started_ns)
        columns = self._scheduler.complete(output)
        took_ns = self._clock.monotonic_ns() - started_ns
        self._scheduler.step_took(took_ns / 1e9)
        if columns is not None:
            self._send_step(columns, started_ns, took_ns)
        return True

    def _pace(self, started_ns: int) -> None:
        """Sleep until the step that began at ``started_ns`` has lasted ``step_time_min_s``.

        The step is computed before, and its tokens are sent after. So the engine reports the time
        as busy, and reads messages and swaps weights between two steps, as a slower device would.
        """
        remaining_s = self._step_time_min_s - (self._clock.monotonic_ns() - started_ns) / 1e9
        if remaining_s > 0 and self.end_reason is None:
            self._clock.sleep(remaining_s)

    def _compute(self, rows: Sequence[Row]) -> StepOutput | None:
        """Return the rows' output; None if the step failed and another must be planned.

        A failed step is not reported, so no token is lost: its turns continue from the tokens
        reported before.

        Raises:
            OutOfMemory: there is no memory for the smallest step.
            Exception: the model's code fails for every turn.
        """
        try:
            return self._runner.step(rows)
        except TidegateError:
            raise
        except (Exception, SystemExit) as error:
            tokens = sum(len(row.token_ids) for row in rows)
            if isinstance(error, SystemExit) or not is_out_of_memory(error):
                self._refuse_failing(error, tokens)
                return None
            doing = f"in a step of {len(rows)} turns and {tokens} tokens"
            shortage = out_of_memory(error, doing=doing, remedy=STEP_MEMORY_REMEDY)
            if not self._scheduler.fail(tokens):
                raise shortage from error
            self._report_out_of_memory(str(shortage))
            return None

    def _refuse_failing(self, error: Exception | SystemExit, tokens: int) -> None:
        """Refuse the turns for which the model's code raises an error, and keep the rest.

        Each turn of the step is computed alone, to find the failing ones. If some fail, a probe row
        of one token is computed; if the probe fails too, the engine has failed. If no turn fails
        alone, only the combination failed, and smaller steps are tried.
        """
        failed: dict[int, str] = {}
        for index, rows in enumerate(self._scheduler.planned_rows()):
            try:
                self._runner.step(rows)
            except TidegateError:
                raise
            except (Exception, SystemExit) as failure:  # noqa: BLE001 - whatever a model raises
                if isinstance(failure, SystemExit) or not is_out_of_memory(failure):
                    failed[index] = f"the model's code failed: {type(failure).__name__}: {failure}"
            self._send_due_heartbeat()
        if not failed:
            if not self._scheduler.fail(tokens):
                raise error
            return
        try:
            self._runner.step([self._scheduler.probe_row()])
        except (Exception, SystemExit) as failure:
            raise error from failure
        traceback.print_exception(error)
        self._scheduler.refuse_planned(failed)

    def _report_out_of_memory(self, shortage: str) -> None:
        self._out_of_memory_steps += 1
        consequence = f"continues with steps of at most {self._scheduler.step_tokens_max} tokens"
        print_stderr(f"warning: {shortage}; {consequence}")
        self._link.send(MessageRejected(message=cut(f"{shortage}; {consequence}")))

    def _send_step(self, columns: StepColumns, started_ns: int, busy_ns: int) -> None:
        """Send a step's messages: the first that has its tokens says how long the step took."""
        is_first = True
        for number, each in enumerate((columns, *columns.others)):
            *ahead, tokens = split_attachments(each)
            parts = [(part, 0) for part in ahead] + [(tokens, 0 if number else busy_ns)]
            for part, part_busy_ns in parts:
                message = part.message(
                    self._link.next_seq,
                    started_ns=started_ns,
                    busy_ns=part_busy_ns,
                    queued_turns=self._scheduler.waiting_turns,
                    free_blocks=self._scheduler.free_blocks,
                )
                self._link.send_step(message, continues_step=not is_first)
                is_first = False

    # ------------------------------------------------------------ time

    def idle_s(self) -> float:
        """Return the seconds to wait for messages: 0 if a step can run."""
        if self._scheduler.can_step and self._link.has_credit:
            return 0.0
        if self._staging.is_busy or self._scheduler.is_preparing:
            return STAGING_POLL_S
        if not self._link.is_connected:
            return CONNECTION_POLL_S
        return min(SIGNAL_POLL_S, self._link.heartbeat_due_in_s())

    def _check_timeouts(self) -> None:
        """Send a due heartbeat; end the loop if the orchestrator has been silent for too long."""
        self.refusal = self.refusal or self._link.key_refusal()
        why = self.refusal or self._link.timeout_reason()
        if why is not None:
            self.end(why)
        self._send_due_heartbeat()

    def _send_due_heartbeat(self) -> None:
        if self._link.take_heartbeat_due():
            self._link.send(
                EngineHeartbeat(
                    weight_version=self._scheduler.version,
                    running_turns=self._scheduler.running_turns,
                    waiting_turns=self._scheduler.waiting_turns,
                    free_blocks=self._scheduler.free_blocks,
                    sent_us=self._clock.monotonic_ns() // 1000,
                    out_of_memory_steps=self._out_of_memory_steps,
                )
            )
