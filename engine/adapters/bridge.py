"""What does an adapter's worker do all day? It carries turns to an engine, and tokens back.

One asyncio loop. What messages ask for is noted at once; what must be done about it, one call to
the engine after another, is done by one task, :meth:`Bridge._reconcile`, which compares how things
are with how they should be. It knows no engine's API.

Order matters where weights change: every token of the old version is told before the new one is
said to be live, and no request is made in between.
"""

import asyncio
import heapq
import sys
import time
from collections.abc import Callable, Coroutine

from tidegate.engine.adapters.adapter import Capabilities, EngineAdapter
from tidegate.engine.adapters.host_weights import HostWeights, PublishedDirectories
from tidegate.engine.adapters.scoring import ScoreDesk
from tidegate.engine.adapters.streams import Streams
from tidegate.engine.adapters.telling import Teller
from tidegate.engine.adapters.turns import AskedTurn, read_turn
from tidegate.engine.link import Link
from tidegate.engine.pauses import PauseGate
from tidegate.engine.turns import EngineLimits
from tidegate.engine.weights.staging import Live, Staging
from tidegate.errors import EngineGone, TidegateError, TurnRefused, WeightsRefused
from tidegate.transport import messages
from tidegate.transport.limits import cut
from tidegate.transport.messages import (
    CANCELLED,
    CancelTurn,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromOrchestrator,
    InitWeights,
    Message,
    Pause,
    Paused,
    Refused,
    Resume,
    Resumed,
    Shutdown,
    Sleep,
    SleepFailed,
    StartWeightUpdate,
    SubmitTurn,
    SubmitTurns,
    UpdateWeights,
    Wake,
    WeightsFailed,
    WeightsLive,
)
from tidegate.transport.scoring import CancelScore, ScoreTokens

TICK_S = 0.02
"""How long a heartbeat, a new connection or staged weights are left unnoticed."""

CHECK_INTERVAL_S = 5.0
"""How often an engine is asked whether it lives. A stream that breaks tells sooner."""

HELD_S = 0.2
"""After an engine has turned a request away because it is paused, by others than us."""

END_TIMEOUT_S = 4.0
"""What an engine gets to be left unpaused and with nobody's requests. Whoever ends this process
kills it after 5."""


class Bridge:
    """One engine's life in a run, as long as this process lives."""

    def __init__(
        self,
        link: Link,
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
        """``label`` is the name of the weights it computes with; ``label_of`` a version makes a
        name for others, another each time."""
        self._link = link
        self._adapter = adapter
        self._able = able
        self._limits = limits
        self._staging = staging
        self._weights = weights
        self._is_copy_right = True
        """Whether ``_weights`` are those that the engine computes with."""
        self._directories = directories
        self._label_of = label_of
        self._teller = Teller(link)
        self._turns: dict[int, AskedTurn] = {}
        self._waiting: list[tuple[tuple[int, int], AskedTurn]] = []
        """A heap. Turns that were cancelled meanwhile are still in it."""
        self._arrivals = 0
        self._streams = Streams(
            adapter,
            able,
            label,
            teller=self._teller,
            on_over=self._over,
        )
        self._scores = ScoreDesk(adapter, able, link, on_gone=self._fail)
        self._gate = PauseGate()
        self._resumes_unanswered = 0
        self._is_swapping = False
        self._is_held = False
        """Whether the engine has just turned a request away, so that none is made for a moment."""
        self._answers: list[Message] = []
        """Due, in order, once the tokens that came before them have been told."""
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self.ending: str | None = None
        self.refusal: str | None = None
        self.failure: TidegateError | None = None
        """What it ends of, if not on request."""

    # ------------------------------------------------------------ life

    async def run(self) -> str:
        """Serve until told to end, or until the engine is gone; return why."""
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
        return self.ending or "ended"

    async def _leave_as_it_was(self) -> None:
        if self._streams.paused is not None:
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await self._adapter.resume()
            except (TidegateError, TimeoutError) as error:
                sys.stderr.write(f"warning: the engine stays paused: {error}\n")

    def end(self, why: str) -> None:
        """Have ``run`` return soon."""
        self.ending = self.ending or why
        self._ended.set()

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        """Whatever goes wrong in a task of ours, the orchestrator must hear of it."""
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
        """Read what has arrived, and say what is due."""
        for message in self._link.receive(0.0):
            self._handle(message)
            self._changed.set()
        if self._link.hello_due and not self._is_swapping:
            self._introduce()
        self._teller.note_credit()
        self._answers += self._staging.take_answers()
        if self._answers or self._gate.is_swap_asked:
            self._changed.set()
        self._keep_time()

    def _introduce(self) -> None:
        """Begin a conversation: turns and live weights outlast the one before, nothing else."""
        self._gate = PauseGate()
        self._resumes_unanswered = 0
        self._scores.clear()
        self._staging.abandon()
        self._answers.clear()
        held = dict.fromkeys([*self._turns, *self._teller.rows.handles])
        self._link.say_hello(weight_version=self._teller.version, turns=list(held))
        self._changed.set()

    def _handle(self, message: FromOrchestrator) -> None:
        match message:
            case SubmitTurn():
                self._submit(message)
            case SubmitTurns(turns=turns):
                for turn in turns:
                    self._submit(turn)
            case CancelTurn(turn=handle):
                self._cancel(handle)
            case ScoreTokens():
                self._scores.ask(message)
            case CancelScore(request=request):
                self._scores.cancel(request)
            case Pause(mode=mode, clear_cache=clear_cache):
                self._gate.pause(mode)
                if clear_cache:
                    self._streams.new_salt()
            case Resume():
                self._gate.resume()
                self._resumes_unanswered += 1
            case Sleep(request=request) | Wake(request=request):
                why = "an engine behind an adapter can't be put to sleep"
                self._answers.append(SleepFailed(request=request, message=why))
            case Shutdown():
                self.end("asked to shut down")
            case Refused(message=why):
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
                live = Live(self._teller.version, self._weights) if self._is_copy_right else None
                self._staging.start(message, live)
            case UpdateWeights():
                self._staging.update(message)
            case FinishWeightUpdate(version=version):
                self._answers += self._staging.take_answers()
                if self._staging.is_staged(version):
                    self._gate.ask_swap(message)
                else:
                    why = f"v{version} is not staged here; await WeightsStaged first"
                    self._answers.append(WeightsFailed(version=version, message=why))

    def _submit(self, message: SubmitTurn) -> None:
        try:
            if message.turn in self._turns:
                raise TurnRefused(f"turn handle {message.turn} is in use; use each handle once")
            turn = read_turn(message, self._arrivals, limits=self._limits, able=self._able)
        except TurnRefused as error:
            self._link.send(messages.TurnRefused(turn=message.turn, message=cut(str(error))))
            return
        self._arrivals += 1
        self._turns[turn.handle] = turn
        heapq.heappush(self._waiting, (turn.rank, turn))

    def _cancel(self, handle: int) -> None:
        turn = self._turns.pop(handle, None)
        if turn is not None and not turn.is_over:  # its end may have been told, and comes once
            self._streams.cut(turn)
            self._teller.rows.end(handle, CANCELLED)
            self._teller.tell()

    # ------------------------------------------------------------ how things should be

    async def _reconcile_for_ever(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._reconcile()

    async def _reconcile(self) -> None:
        """Pause or go on, swap weights, and start turns; then say so."""
        await self._pause_or_resume()
        update = self._gate.swap_due(self._streams.running)
        if update is not None and not self._staging.is_busy:
            await self._swap(update)
            self._changed.set()
        else:
            self._start_turns()
        if self._gate.mode == "wait" or self._streams.paused is not None:
            self._answers += self._paused()
        if self._answers:
            answers, self._answers = self._answers, []
            await self._teller.all_told()
            for answer in answers:
                self._link.send(answer)

    async def _pause_or_resume(self) -> None:
        mode = self._gate.mode
        if mode == "abort" and self._streams.paused != "abort":
            self._scores.stop()
            await self._streams.stop(are_over=True)
        elif mode == "keep" and self._streams.paused is None:
            self._scores.stop()
            if self._able.freezes:
                await self._streams.freeze()
            else:
                await self._streams.stop(are_over=False)
        elif mode is None and self._streams.paused is not None:
            await self._streams.resume()
        if mode is None and self._resumes_unanswered:
            self._answers += [Resumed()] * self._resumes_unanswered
            self._resumes_unanswered = 0

    def _paused(self) -> list[Paused]:
        """Answers to pauses; one that came a moment ago is none yet."""
        mode = self._gate.mode
        if mode == "wait" or mode == self._streams.paused or self._streams.paused == "abort":
            return self._gate.take_effective(self._streams.running)
        return []

    def _start_turns(self) -> None:
        if self._streams.paused is not None or not self._gate.turns_start:
            return
        if self._is_held or self._ended.is_set():
            return
        self._teller.queued_turns = len(self._waiting)
        self._scores.start(self._teller.version)
        while self._waiting and self._streams.running < self._limits.max_running_turns:
            _, turn = heapq.heappop(self._waiting)
            if self._turns.get(turn.handle) is turn:
                self._streams.start(turn, self._teller.version)

    def _over(self, turn: AskedTurn, error: TidegateError | None, *, is_held: bool = False) -> None:
        """A request has ended; the turn too, unless there is more to ask for."""
        self._changed.set()
        if isinstance(error, TurnRefused):
            if self._turns.pop(turn.handle, None) is turn:
                self._refuse(turn, error)
        elif error is not None:
            self._fail(error)
        elif self._turns.get(turn.handle) is not turn:
            pass  # cancelled meanwhile
        elif turn.is_over:
            del self._turns[turn.handle]
        else:
            heapq.heappush(self._waiting, (turn.rank, turn))
            if is_held and not self._is_held:
                self._is_held = True
                asyncio.get_running_loop().call_later(HELD_S, self._let_go)

    def _let_go(self) -> None:
        self._is_held = False
        self._changed.set()

    def _refuse(self, turn: AskedTurn, error: TurnRefused) -> None:
        # Tokens told later, for want of credit, would be of a turn that nobody knows any more.
        self._teller.rows.drop(turn.handle)
        self._link.send(messages.TurnRefused(turn=turn.handle, message=cut(str(error))))

    # ------------------------------------------------------------ weights

    async def _swap(self, update: FinishWeightUpdate) -> None:
        """Bring staged weights to the engine; requests under way as the update says."""
        self._is_swapping = True
        label = self._label_of(update.version)
        try:
            staged = self._staging.exchange(update.version, self._weights)
            assert isinstance(staged, HostWeights)
            self._weights, self._is_copy_right = staged, False
            directory = await asyncio.to_thread(self._directories.write, staged, label)
            self._scores.stop()
            keeps_kv = update.kv_policy == "keep" and update.pause_mode != "abort"
            recomputed = 0
            if keeps_kv and self._able.keeps_kv:
                await self._streams.freeze()
                await self._streams.cut_unbegun()
            else:
                recomputed = await self._streams.stop(are_over=update.pause_mode == "abort")
            await self._adapter.load_weights(directory, label)
            await self._teller.all_told()  # tokens that were sampled before came until now
            self._teller.version, self._is_copy_right = update.version, True
            self._link.send(
                WeightsLive(
                    version=update.version,
                    swapped_us=time.monotonic_ns() // 1000,
                    recomputed_turns=recomputed,
                )
            )
            await self._streams.new_weights(label)
        except (WeightsRefused, OSError) as error:
            self._directories.forget(label)
            self._answers.append(WeightsFailed(version=update.version, message=cut(str(error))))
        finally:
            self._gate.end_swap()
            self._is_swapping = False

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
                    # A request that was cut may run for a moment after its turn has ended.
                    waiting_turns=max(0, len(self._turns) - self._streams.running),
                    free_blocks=0,
                    sent_us=time.monotonic_ns() // 1000,
                )
            )
