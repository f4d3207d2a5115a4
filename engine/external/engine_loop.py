"""Main loop of an external engine's worker: applies the orchestrator's messages through an adapter.

Run by ``external/worker.py`` on one asyncio loop. Messages only record the desired state; one task,
:meth:`ExternalEngineLoop._reconcile`, compares it with the actual state and calls the engine, one
call after another. Turns are ``ExternalTurnQueue``'s, weights ``WeightSwapper``'s, memory
``ExternalSleepController``'s."""

import asyncio
import time
from collections.abc import Callable, Coroutine

from tidegate.engine.external.adapter import Capabilities, EngineAdapter
from tidegate.engine.external.host_weights import HostWeights, PublishedDirectories
from tidegate.engine.external.scoring import ExternalScoreQueue
from tidegate.engine.external.sleeping import ExternalSleepController
from tidegate.engine.external.step_message_batcher import StepMessageBatcher
from tidegate.engine.external.swaps import WeightSwapper
from tidegate.engine.external.turn_queue import ExternalTurnQueue
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.scheduling.pauses import PauseGate
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.engine.weights.staging import Staging
from tidegate.errors import EngineGone, TidegateError
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
    TurnsPaused,
    TurnsResumed,
    UpdateWeights,
    Wake,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.printable import say
from tidegate.transport.scoring import CancelScore, ScoreTokens

TICK_S = 0.02
"""Seconds between checks for heartbeats, a new connection and staged weights."""

CHECK_INTERVAL_S = 5.0
"""Seconds between liveness checks of the engine. A broken stream is noticed sooner."""

END_TIMEOUT_S = 4.0
"""Seconds to unpause the engine and abort its requests at the end. The parent kills this
process after 5."""


class ExternalEngineLoop:
    """Connects one external engine to a run, for the lifetime of this process."""

    def __init__(
        self,
        link: OrchestratorLink,
        adapter: EngineAdapter,
        able: Capabilities,
        *,
        limits: EngineLimits,
        staging: Staging,
        weights: HostWeights,
        directories: PublishedDirectories,
        label: str,
        label_of: Callable[[int], str],
    ) -> None:
        """``label`` names the engine's current weights; ``label_of`` makes a new name for a
        version at each call."""
        self._link = link
        self._adapter = adapter
        self._staging = staging
        self._teller = StepMessageBatcher(link)
        self._changed = asyncio.Event()
        self._desk = ExternalTurnQueue(
            link,
            adapter,
            able,
            limits=limits,
            label=label,
            teller=self._teller,
            on_change=self._changed.set,
            on_gone=self._fail,
        )
        self._streams = self._desk.streams
        self._swapper = WeightSwapper(
            adapter,
            able,
            link,
            staging=staging,
            weights=weights,
            directories=directories,
            label=label,
            label_of=label_of,
        )
        self._sleeper = ExternalSleepController(
            adapter,
            able,
            reload=self._swapper.reload,
            are_the_directorys=lambda: not self._swapper.has_swapped,
        )
        self._scores = ExternalScoreQueue(adapter, able, link, on_gone=self._fail)
        self._gate = PauseGate()
        self._resumes_unanswered = 0
        self._answers: list[Message] = []
        """Answers to send, in order, after the tokens that came before them."""
        self._ended = asyncio.Event()
        self.ending: str | None = None
        self.refusal: str | None = None
        self.failure: TidegateError | None = None
        """The error that ended the loop; None if it ended on request."""

    # ------------------------------------------------------------ life

    async def run(self) -> str:
        """Serve until asked to end, or until the engine is gone; return the reason."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._pump)
        tasks = [
            asyncio.create_task(self._guard(work), name=name)
            for name, work in (
                ("reconcile", self._reconcile_for_ever()),
                ("tick", self._tick_for_ever()),
                ("check", self._check_for_ever()),
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
            await self._streams.close()
            self._teller.tell_now()
            if self.failure is None:
                await self._leave_as_it_was()
            self._swapper.loras.remove_files()
        return self.ending or "ended"

    async def _leave_as_it_was(self) -> None:
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                if self._streams.paused is not None:
                    await self._sleeper.wake_all()
                    await self._adapter.resume()
                await self._swapper.loras.close()
        except (TidegateError, TimeoutError) as error:
            say(f"warning: the engine isn't left as it was: {error}")

    def end(self, why: str) -> None:
        """Make ``run`` return soon."""
        self.ending = self.ending or why
        self._ended.set()

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        """Run a task; any error ends the bridge, so that the orchestrator is told."""
        try:
            await work
        except TidegateError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineGone(f"the adapter failed: {type(error).__name__}: {error}"))
            raise

    def _fail(self, error: TidegateError) -> None:
        self.failure = self.failure or error
        self.end(str(error))

    async def _tick_for_ever(self) -> None:
        while True:
            self._pump()
            await asyncio.sleep(TICK_S)

    async def _check_for_ever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self._adapter.check()

    # ------------------------------------------------------------ messages

    def _pump(self) -> None:
        for message in self._link.receive(0.0):
            self._handle(message)
            self._changed.set()
        is_changing = self._swapper.is_swapping or self._sleeper.is_at_work
        if self._link.hello_due and not is_changing:  # a hello says what is live and what sleeps
            self._introduce()
        self._teller.note_credit()
        self._answers += self._staging.take_answers()
        if self._answers or self._gate.is_swap_asked or self._sleeper.is_asked:
            self._changed.set()
        self._keep_time()

    def _introduce(self) -> None:
        """Send a hello; only turns and live weights survive the previous conversation."""
        self._gate = PauseGate()
        self._resumes_unanswered = 0
        self._scores.clear()
        self._staging.abandon()
        self._answers.clear()
        held = dict.fromkeys([*self._desk.handles, *self._teller.rows.handles])
        self._sleeper.start_over()
        self._link.say_hello(
            weight_version=self._teller.version,
            turns=list(held),
            asleep=self._sleeper.asleep,
            needs_weights=self._sleeper.needs_weights,
        )
        self._changed.set()

    def _handle(self, message: FromOrchestrator) -> None:
        match message:
            case SubmitTurn():
                self._desk.submit(message)
            case SubmitTurns(turns=turns):
                for turn in turns:
                    self._desk.submit(turn)
            case CancelTurn(turn=handle):
                self._desk.cancel(handle)
            case ScoreTokens():
                self._scores.ask(message)
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
                self._sleeper.ask(message)
            case Shutdown():
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
                self._staging.start(message, self._swapper.live(self._teller.version))
            case UpdateWeights():
                self._staging.update(message)
            case FinishWeightUpdate(version=version):
                self._answers += self._staging.take_answers()
                if self._staging.is_staged(version):
                    self._gate.ask_swap(message)
                else:
                    why = f"v{version} is not staged here; await WeightsStaged first"
                    self._answers.append(WeightsFailed(version=version, message=why))

    # ------------------------------------------------------------ how things should be

    async def _reconcile_for_ever(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._reconcile()

    async def _reconcile(self) -> None:
        """Pause or resume the engine, swap weights, and start turns; then send the answers."""
        await self._pause_or_resume()
        update = self._gate.swap_due(self._streams.running)
        if update is not None and not self._staging.is_busy:
            await self._swap(update)
            self._changed.set()
        else:
            self._start_turns()
        if self._streams.paused is None:  # a cancelled frozen request may still use its adapter
            await self._swapper.loras.unload_unused(self._streams.loras_used)
        settled = await self._sleeper.settle(self._gate, self._streams, self._staging)
        if settled:
            self._answers += settled
            self._changed.set()  # a resume may have waited for the wake
        if self._gate.mode == "wait" or self._streams.paused is not None:
            self._answers += self._paused()
        if self._answers:
            answers, self._answers = self._answers, []
            await self._teller.all_told()
            for answer in answers:
                if not isinstance(answer, WeightsStaged) or await self._is_ready(answer.version):
                    self._link.send(answer)

    async def _is_ready(self, version: int) -> bool:
        """Load a staged version's adapters before it is reported as staged, because
        afterwards it cannot fail."""
        if self._sleeper.holds:
            return True  # adapters are loaded with the next weights
        return await self._swapper.prepare(version)

    async def _pause_or_resume(self) -> None:
        mode = self._gate.mode
        if mode == "abort" and self._streams.paused != "abort":
            self._scores.stop()
            await self._streams.stop(are_over=True)
        elif mode == "keep" and self._streams.paused is None:
            self._scores.stop()
            await self._streams.freeze()
        elif mode is None and self._streams.paused is not None and not self._sleeper.holds:
            await self._streams.resume()
        if mode is None and self._resumes_unanswered:
            self._answers += [TurnsResumed()] * self._resumes_unanswered
            self._resumes_unanswered = 0

    def _paused(self) -> list[TurnsPaused]:
        """Return the ``TurnsPaused`` answers of pauses that the engine has carried out."""
        mode = self._gate.mode
        if mode == "wait" or mode == self._streams.paused or self._streams.paused == "abort":
            return self._gate.take_effective(self._streams.running)
        return []

    def _start_turns(self) -> None:
        if self._streams.paused is not None or not self._gate.turns_start:
            return
        if not self._ended.is_set() and self._desk.start():
            self._scores.start(self._teller.version)

    async def _swap(self, update: FinishWeightUpdate) -> None:
        try:
            await self._sleeper.make_room()
            if self._sleeper.needs_weights:
                self._swapper.loras.lose()
            failed = await self._swapper.swap(
                update,
                self._streams,
                self._scores,
                self._teller,
                needs_weights=self._sleeper.needs_weights,
            )
        finally:
            self._gate.end_swap()
        if failed is None:
            self._sleeper.loaded()
            self._desk.new_adapters(self._swapper.loras.names)
        if failed is not None:
            self._answers.append(failed)

    # ------------------------------------------------------------ time

    def _keep_time(self) -> None:
        self.refusal = self.refusal or self._link.shut_out()
        why = self.refusal or self._link.given_up()
        if why is not None:
            self.end(why)
        if self._streams.running == 0:
            self._teller.note_idle()
        if self._link.take_heartbeat_due():
            self._link.send(
                EngineHeartbeat(
                    weight_version=self._teller.version,
                    running_turns=self._streams.running,
                    waiting_turns=self._desk.waiting,
                    free_blocks=0,
                    sent_us=time.monotonic_ns() // 1000,
                )
            )
