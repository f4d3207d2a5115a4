"""Main loop of an external engine's worker: applies the orchestrator's messages through an adapter.

Messages only record the desired state; one task, :meth:`ExternalEngineLoop._reconcile`, compares it
with the actual state and calls the engine, one call after another. The link to the run and the
staging of weights are those of Tidegate's own engine.
"""

import asyncio
import time
from collections.abc import Coroutine

from tidegate.engine.external.adapter import EngineAdapter, adapter_failed
from tidegate.engine.external.scoring import ExternalScoreQueue
from tidegate.engine.external.sleeping import ExternalSleepController
from tidegate.engine.external.step_message_batcher import StepMessageBatcher
from tidegate.engine.external.streams import ExternalTurnQueue
from tidegate.engine.external.swaps import WeightSwapper
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.scheduling.pauses import PauseGate, ends_turns, lets_finish
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.engine.weights.staging import Staging
from tidegate.errors import TidegateError
from tidegate.transport.messages import (
    CancelTurn,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromOrchestrator,
    HelloRejected,
    InitWeights,
    Message,
    Pause,
    Resume,
    Shutdown,
    Sleep,
    StartWeightUpdate,
    SubmitTurn,
    SubmitTurns,
    TurnsResumed,
    UpdateWeights,
    Wake,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.printable import print_stderr
from tidegate.transport.scoring import CancelScore, ScoreTokens

TICK_S = 0.02
"""Seconds between checks for heartbeats, a new connection and staged weights."""

CHECK_INTERVAL_S = 5.0
"""Seconds between liveness checks of the engine. A broken stream is noticed sooner."""

HAND_BACK_TIMEOUT_S = 2.0
"""Seconds after a signal for the engine to abort its requests and return their tokens."""

END_TIMEOUT_S = 2.0
"""Seconds to unpause the engine and abort its requests at the end. The parent kills this
process after 5."""


class ExternalEngineLoop:
    """Connects one external engine to a run, for the lifetime of this process."""

    def __init__(
        self,
        link: OrchestratorLink,
        adapter: EngineAdapter,
        swapper: WeightSwapper,
        *,
        limits: EngineLimits,
        staging: Staging,
        label: str,
        stream_interval_tokens: int,
    ) -> None:
        """``label`` names the engine's current weights. The engine may collect
        ``stream_interval_tokens`` of a turn before it sends them."""
        self._link = link
        self._adapter = adapter
        self._swapper = swapper
        self._staging = staging
        self._batcher = StepMessageBatcher(link)
        self._changed = asyncio.Event()
        self._turns = ExternalTurnQueue(
            link,
            adapter,
            limits=limits,
            label=label,
            batcher=self._batcher,
            on_change=self._changed.set,
            on_gone=self._fail,
            stream_interval_tokens=stream_interval_tokens,
        )
        self._streams = self._turns.streams
        self._sleep_controller = ExternalSleepController(adapter, swapper)
        self._scores = ExternalScoreQueue(adapter, link, on_gone=self._fail)
        self._gate = PauseGate()
        self._resumes_unanswered = 0
        self._replies: list[Message] = []
        """Replies to send, in order, after all tokens received before them."""
        self._ended = asyncio.Event()
        self.end_reason: str | None = None
        self.is_end_requested = False
        """Whether the loop was asked to end, by a signal or by the orchestrator."""
        self._is_signalled = False
        self.refusal: str | None = None
        self.failure: TidegateError | None = None
        """The error that ended the loop; None if it ended on request."""

    # ------------------------------------------------------------ start and end

    async def run(self) -> str:
        """Serve until asked to end, or until the engine is gone; return the reason."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._receive)
        tasks = [
            asyncio.create_task(self._guard(work), name=name)
            for name, work in (
                ("reconcile", self._reconcile_loop()),
                ("tick", self._tick_loop()),
                ("check", self._check_loop()),
            )
        ]
        self._changed.set()
        try:
            await self._ended.wait()
        finally:
            loop.remove_reader(self._link.fileno())
            self._scores.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._is_signalled and self.failure is None and self._streams.paused is None:
                await self._hand_back_turns()
            await self._streams.close()
            self._batcher.flush_now()
            if self.failure is None:
                await self._restore_engine()
            self._swapper.loras.remove_files()
        return self.end_reason or "ended"

    async def _hand_back_turns(self) -> None:
        """Have the engine abort its requests, which return the tokens sampled so far."""
        try:
            async with asyncio.timeout(HAND_BACK_TIMEOUT_S):
                await self._streams.stop(ends_turns=True)
        except (TidegateError, TimeoutError) as error:
            print_stderr(f"warning: tokens of unfinished turns may be lost: {error}")

    async def _restore_engine(self) -> None:
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                if self._streams.may_be_paused:
                    await self._sleep_controller.wake_all()
                    await self._adapter.resume()
                await self._swapper.loras.close()
        except (TidegateError, TimeoutError) as error:
            print_stderr(f"warning: the engine may be left paused or with adapters loaded: {error}")

    def end(self, why: str) -> None:
        """Make ``run`` return soon."""
        self.end_reason = self.end_reason or why
        self._ended.set()

    def end_on_signal(self, why: str) -> None:
        """Make ``run`` return soon, for good, with the tokens of all unfinished turns."""
        self.is_end_requested = self._is_signalled = True
        self.end(why)

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        """Run a task; any error ends the loop, and its message is sent to the orchestrator."""
        try:
            await work
        except TidegateError as error:
            self._fail(error)
        except Exception as error:
            self._fail(adapter_failed(error))
            raise

    def _fail(self, error: TidegateError) -> None:
        self.failure = self.failure or error
        self.end(str(error))

    async def _tick_loop(self) -> None:
        while True:
            self._receive()
            await asyncio.sleep(TICK_S)

    async def _check_loop(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self._adapter.check()

    # ------------------------------------------------------------ messages

    def _receive(self) -> None:
        for message in self._link.receive(0.0):
            self._handle(message)
            self._changed.set()
        is_changing = self._swapper.is_swapping or self._sleep_controller.is_changing
        # A hello contains the live version and the sleeping memory.
        if self._link.is_hello_due and not is_changing:
            self._send_hello()
        self._batcher.on_credit()
        self._replies += self._staging.take_replies()
        if self._replies or self._gate.is_swap_requested or self._sleep_controller.pending:
            self._changed.set()
        self._check_timeouts()

    def _send_hello(self) -> None:
        """Send a hello. Only turns and live weights outlive the previous connection."""
        self._gate = PauseGate()
        self._resumes_unanswered = 0
        self._scores.clear()
        self._staging.abandon()
        self._replies.clear()
        handles = dict.fromkeys([*self._turns.handles, *self._batcher.rows.handles])
        self._sleep_controller.pending.clear()
        self._link.send_hello(
            weight_version=self._batcher.version,
            turns=list(handles),
            asleep=self._sleep_controller.asleep,
            needs_weights=self._sleep_controller.needs_weights,
        )
        self._changed.set()

    def _handle(self, message: FromOrchestrator) -> None:
        match message:
            case SubmitTurn():
                self._turns.submit(message)
            case SubmitTurns(turns=turns):
                for turn in turns:
                    self._turns.submit(turn)
            case CancelTurn(turn=handle):
                self._turns.cancel(handle)
            case ScoreTokens():
                self._scores.submit(message)
            case CancelScore(request_id=request):
                self._scores.cancel(request)
            case Pause(mode=mode, clear_cache=clear_cache):
                self._gate.pause(mode)
                if clear_cache:
                    self._streams.new_salt()
            case Resume():
                self._gate.resume()
                self._resumes_unanswered += 1
            case Sleep() | Wake():
                self._sleep_controller.pending.append(message)
            case Shutdown():
                self.is_end_requested = True
                self.end("asked to shut down")
            case HelloRejected(message=why):
                self.refusal = why
                self.end(f"refused by the orchestrator: {why}")
            case _:
                self._handle_weights(message)

    def _handle_weights(self, message: FromOrchestrator) -> None:
        match message:
            case InitWeights():
                self._staging.init(message)
            case StartWeightUpdate():
                self._gate.end_swap()
                self._staging.start(message, self._swapper.live(self._batcher.version))
            case UpdateWeights():
                self._staging.update(message)
            case FinishWeightUpdate(version=version):
                self._replies += self._staging.take_replies()
                if self._staging.is_staged(version):
                    self._gate.request_swap(message)
                else:
                    why = f"v{version} is not staged here; await WeightsStaged first"
                    self._replies.append(WeightsFailed(version=version, message=why))

    # ------------------------------------------------------------ reconciliation

    async def _reconcile_loop(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._reconcile()

    async def _reconcile(self) -> None:
        """Pause or resume the engine, swap weights and start turns; then send the replies."""
        await self._pause_or_resume()
        update = self._gate.swap_due(self._streams.running)
        if update is not None and not self._staging.is_busy:
            await self._swap(update)
            self._changed.set()
        else:
            self._start_turns()
        if self._streams.paused is None:  # a cancelled frozen request may still use its adapter
            await self._swapper.loras.unload_unused(self._streams.loras_used)
        sleep_replies = await self._sleep_controller.run_pending(
            self._gate, self._streams, self._staging
        )
        if sleep_replies:
            self._replies += sleep_replies
            self._changed.set()  # a resume may have waited for the wake
        mode, paused = self._gate.mode, self._streams.paused
        if lets_finish(mode) or mode == paused or self._streams.is_stopped:
            self._replies += self._gate.take_effective(self._streams.running)
        if self._replies:
            answers, self._replies = self._replies, []
            await self._batcher.flush_all()
            for reply in answers:
                if not isinstance(reply, WeightsStaged) or await self._is_ready(reply.version):
                    self._link.send(reply)

    async def _is_ready(self, version: int) -> bool:
        """Load a staged version's adapters before the version is reported as staged, because
        afterwards the update must not fail."""
        if self._sleep_controller.keeps_paused:
            return True  # adapters are loaded with the next weights
        return await self._swapper.prepare(version)

    async def _pause_or_resume(self) -> None:
        mode = self._gate.mode
        if ends_turns(mode) and not self._streams.is_stopped:
            self._scores.stop()
            await self._streams.stop(ends_turns=True)
        elif self._gate.freezes_turns and self._streams.paused is None:
            self._scores.stop()
            await self._streams.freeze()
        elif (
            mode is None
            and self._streams.paused is not None
            and not self._sleep_controller.keeps_paused
        ):
            await self._streams.resume()
        if mode is None and self._resumes_unanswered:
            self._replies += [TurnsResumed()] * self._resumes_unanswered
            self._resumes_unanswered = 0

    def _start_turns(self) -> None:
        if self._streams.paused is not None or not self._gate.turns_start:
            return
        if not self._ended.is_set() and self._turns.start():
            self._scores.start(self._batcher.version)

    async def _swap(self, update: FinishWeightUpdate) -> None:
        try:
            await self._sleep_controller.wake_for_update()
            if self._sleep_controller.needs_weights:
                self._swapper.loras.mark_lost()
            failed = await self._swapper.swap(
                update,
                self._streams,
                self._scores,
                self._batcher,
                needs_weights=self._sleep_controller.needs_weights,
            )
        finally:
            self._gate.end_swap()
        if failed is not None:
            self._replies.append(failed)
            return
        self._sleep_controller.needs_weights = False
        self._turns.refuse_unserved()

    # ------------------------------------------------------------ time

    def _check_timeouts(self) -> None:
        self.refusal = self.refusal or self._link.key_refusal()
        why = self.refusal or self._link.timeout_reason()
        if why is not None:
            self.end(why)
        if self._streams.running == 0:
            self._batcher.skip_idle_time()
        if self._link.take_heartbeat_due():
            self._link.send(
                EngineHeartbeat(
                    weight_version=self._batcher.version,
                    running_turns=self._streams.running,
                    waiting_turns=self._turns.waiting,
                    free_blocks=0,
                    sent_us=time.monotonic_ns() // 1000,
                )
            )
