"""Asyncio shell around :class:`tidegate.orchestrator.core.weight_control.WeightControl`.

Feeds trainers' calls and engines' messages to the state machine, carries out the commands, and
returns to each caller when its call is resolved.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar, cast

from tidegate.errors import WeightsRefused
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.control_events import PublishWait, Reserved
from tidegate.orchestrator.core.weight_content import Change, replace_all
from tidegate.orchestrator.core.weight_control import WeightControl
from tidegate.orchestrator.fleet.drains import Drains
from tidegate.orchestrator.fleet.pending_futures import PendingFutures, resolve
from tidegate.orchestrator.fleet.shell import EngineShell, RunShell
from tidegate.orchestrator.settings.config import WeightSettings
from tidegate.transport.limits import FRAME_BYTES_MAX_BY_KIND
from tidegate.transport.message import SwapMode
from tidegate.transport.messages import (
    AdapterLive,
    FromEngine,
    Hello,
    InitWeights,
    KvPolicy,
    PauseMode,
    UpdateWeights,
    WeightsLive,
    WeightsStaged,
    encode,
)
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel, SleepRequestFailed

log = logging.getLogger("tidegate")

Result = TypeVar("Result")

HEADER_BYTES = 4096
"""Bytes reserved in a message for the fields besides the chunks: an adapter's name, or the versions
that an engine may have."""


class EngineControl:
    """Weights, pauses and sleep of all engines, as coroutines for the trainer's calls."""

    def __init__(
        self,
        settings: WeightSettings,
        init_weights: InitWeights,
        pending: PendingFutures,
        drains: Drains,
        run: RunShell,
        engines: EngineShell,
        *,
        pause_timeout_s: float,
    ) -> None:
        """``drains``: engines that have left weight control, and may sample on.
        ``pause_timeout_s``: time for an engine to confirm a pause."""
        self._run, self._engines = run, engines
        self._drains = drains
        self._pending = pending
        self._call_ids = itertools.count()
        self._outcomes: dict[int, wc.Resolve] = {}
        """Results of ended calls, until their coroutines read them."""
        self._timers: dict[wc.Timer, asyncio.TimerHandle] = {}
        self._is_closed = False
        self.state = WeightControl(
            init_weights,
            swap_mode=SwapMode(settings.pause_mode, settings.kv_policy),
            wave_engines=settings.engines_per_update_wave,
            weight_update_timeout_s=settings.weight_update_timeout_s,
            pause_timeout_s=pause_timeout_s,
            next_version=self._next_version,
            released_adapters=run.core.adapters,
        )
        """The state machine. Other code may read it, but only this class feeds it events."""

    # ------------------------------------------------------------ engines

    def joined(
        self, engine: str, version: int, hello: Hello | None, *, kept_adapters: bool = False
    ) -> None:
        """Handle an engine that has joined, serving ``version``; without ``hello`` it has left
        again. ``kept_adapters``: it has served adapters all the time."""
        memory = adapters = None
        if hello is not None:
            if not kept_adapters:
                adapters = wc.AdapterMemory(hello.adapters_max, hello.adapters)
            memory = wc.EngineMemory(hello.sleep_levels, hello.asleep, hello.needs_weights)
            if self.state.sleeps.asleep and self.state.sleeps.level not in hello.sleep_levels:
                log.warning("engine=%s joined a sleeping run, but can't sleep at its level", engine)
        self.handle(wc.EngineConnected(engine, version, memory, adapters))

    def left(self, engine: str, *, keeps_adapters: bool = False) -> None:
        """Handle an engine that has gone, or that only serves adapters from now on."""
        self.handle(wc.EngineRemoved(engine, keeps_adapters))

    def receive(self, engine: str, message: FromEngine) -> bool:
        """Handle an engine's message; return False if the state machine does not use its kind."""
        if not isinstance(message, wc.ControlReply):
            return False
        if isinstance(message, SleepRequestFailed):
            log.warning("engine=%s can't sleep or wake: %s", engine, message.message)
        self.handle(wc.ControlReplyReceived(engine, message))
        if isinstance(message, WeightsStaged):
            self._engines.staged(engine, message.version)
        return True

    # ------------------------------------------------------------ weights

    async def reserve(
        self,
        *,
        is_part: bool = False,
        has_deltas: bool = False,
        first_bad: int | None = None,
        adapter: str = "",
    ) -> Reserved:
        """Wait until the weight channel's buffer may be overwritten; return what to write there.

        Call :meth:`publish` or :meth:`release` afterwards. A version that is still being staged is
        abandoned for this one. ``is_part``: only some tensors, or an adapter, will be written;
        ``has_deltas``: unchanged tensors may be omitted. ``first_bad``: versions from this one on
        are bad, and engines are paused first (rollback). ``adapter``: adapter whose version is
        written.

        Raises:
            EngineLagging: an engine still read the buffer after ``weight_update_timeout_s``. It is
                removed.
            WeightsRefused: a part would be laid over weights that this process has not published.
            TidegateError: an earlier publish failed after its call had returned.
        """
        call_id = next(self._call_ids)
        request = wc.ReserveRequested(call_id, is_part, has_deltas, first_bad, adapter)
        return cast(Reserved, await self._run_call(request))

    def _next_version(self, adapter: str) -> int:
        core = self._run.core
        trained = core.trained_adapters.get(adapter) if adapter else core
        return core.adapters.get(adapter, 0) + 1 if trained is None else trained.next_version

    def release(self, adapter: str = "") -> None:
        """Free the reserved buffer; the version that was abandoned for it stays abandoned."""
        self.handle(wc.ReserveAbandoned(adapter))

    async def publish(
        self,
        version: int,
        chunks: list[UpdateWeights],
        wait: PublishWait = "live",
        change: Change = replace_all,
        *,
        adapter: str = "",
        scale: float = 1.0,
    ) -> None:
        """Have every engine stage and swap to version ``version``, which ``chunks`` describe.

        Call it after :meth:`reserve` and the write. It returns when ``wait`` is reached: ``live``,
        once every engine serves this version or a newer one; ``staged``, once every engine holds it
        beside its live weights; ``none``, at once. ``change`` computes the version's content from
        the version before and ``chunks``. Engines that :meth:`reserve` has paused for a rollback
        resume once a whole version is live.

        A publish that fails, or is cancelled, before every engine has staged the version leaves the
        old weights live on all engines. If an earlier publish also waits for this version, a
        cancelled one continues without its caller.

        Raises:
            EngineLagging: an engine took longer than ``weight_update_timeout_s``. It is removed.
            WeightsRefused: the weights don't fit the model, or their names and offsets don't fit
                into a message; the old weights stay live.
            PublishDropped: a newer publish replaced this one, and its write failed.
        """
        try:
            _refuse_too_large(chunks, is_adapter=bool(adapter))
        except WeightsRefused:
            self.release(adapter)
            raise
        call_id = next(self._call_ids)
        await self._run_call(
            wc.PublishRequested(call_id, version, chunks, wait, change, adapter, scale)
        )

    def choose_kv_policy(self, kv_policy: KvPolicy) -> None:
        """Set what the next swap does to the KV of kept turns."""
        self.handle(wc.KvPolicyChosen(kv_policy))

    # ------------------------------------------------------------ pauses and sleep

    async def pause(self, mode: PauseMode | None, *, clear_cache: bool = False) -> None:
        """Pause all engines, or resume them if ``mode`` is None; return once all have confirmed.

        Afterwards no turn runs, and with ``clear_cache`` no KV is kept for one. ``wait`` takes as
        long as the longest turn. An engine that does not confirm in time is removed. If the call
        is cancelled, the pause may hold all the same; resume to be sure. While engines sleep, it
        takes effect once they are awake.
        """
        if mode is not None:
            self._drains.hurry()
        await self._run_call(wc.PauseRequested(next(self._call_ids), mode, clear_cache))
        if mode is not None:
            await self._drains.wait_left()

    async def halt_engines(self, is_halted: bool) -> None:
        """Pause engines for the staleness policy; afterwards the user's pause holds again."""
        if is_halted:
            self._drains.hurry()
        await self._run_call(wc.EngineHaltRequested(next(self._call_ids), is_halted))

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag], mode: PauseMode) -> int:
        """Put this memory to sleep on every engine; return the bytes freed, summed over engines.

        Engines are paused first, and versions under way are waited for.

        Raises:
            ConfigError: an engine can't sleep at this level, or couldn't get its weights again.
            SleepFailed: some engine failed to sleep. The others sleep.
        """
        self._drains.hurry()
        request = wc.SleepRequested(next(self._call_ids), level, tags, mode)
        freed_bytes = cast(int, await self._run_call(request))
        await self._drains.wait_left()
        return freed_bytes

    async def wake(self, tags: Sequence[MemoryTag] | None) -> None:
        """Wake this memory on every engine.

        When nothing sleeps any more, engines resume unless another pause holds. Engines that have
        dropped their weights get the version released last, unless a newer one was published.

        Raises:
            SleepFailed: some engine lacks memory for it, or lacks weights and there are none.
        """
        tags = MEMORY_TAGS if tags is None else tags
        await self._run_call(wc.WakeRequested(next(self._call_ids), tags))

    # ------------------------------------------------------------ calls

    async def _run_call(self, request: wc.Call) -> object:
        """Begin a call in the state machine, and wait until it is resolved."""
        calls, call_id = self._pending.calls, request.call
        resolved = calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.handle(request)
            await resolved
        except BaseException:
            ended = self._outcomes.pop(call_id, None)
            if ended is None:
                self.handle(wc.CallCancelled(call_id))
            elif isinstance(ended.value, Reserved):
                self.release(ended.value.adapter)  # nobody else would
            raise
        finally:
            del calls[call_id]
        outcome = self._outcomes.pop(call_id)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def close(self) -> None:
        """Stop all timers, and set none again: engines have no time limits once the run has ended.
        Calls may still be cancelled."""
        self._is_closed = True
        for timer in list(self._timers):
            self._stop_timer(timer)

    def handle(self, event: wc.Event) -> None:
        """Feed an event to the state machine, and carry out its commands."""
        for command in self.state.handle(event):
            self._carry_out(command)

    def _carry_out(self, command: wc.Command) -> None:
        run, engines = self._run, self._engines
        match command:
            case wc.Send(outgoing=outgoing):
                engines.send(outgoing)
            case wc.HoldBatches(is_held=is_held):
                run.hold_batches(is_held)
                self._pending.notify()
            case wc.Resolve(call=call):
                self._outcomes[call] = command
                resolve(self._pending.calls.get(call), None)
            case wc.SetTimer() if self._is_closed:
                pass
            case wc.SetTimer(timer=timer, seconds=seconds):
                self._stop_timer(timer)
                loop = asyncio.get_running_loop()
                self._timers[timer] = loop.call_later(seconds, self._on_timer, timer)
            case wc.StopTimer(timer=timer):
                self._stop_timer(timer)
            case wc.RecordSwap(engine=engine, message=AdapterLive() as live):
                engines.adapter_live(engine, live)
            case wc.RecordSwap(engine=engine, message=WeightsLive() as live):
                engines.swapped(engine, live)
            case wc.ReleaseVersion(version=version, adapter=adapter):
                if adapter:
                    run.handle(ev.AdapterReleased(adapter, version))
                    run.hold_batches(False, adapter)
                else:
                    run.handle(ev.VersionPublished(version))
                run.when_safe(lambda: self.handle(wc.VersionDurable(version, adapter)))
            case wc.RetractVersions(first_bad=first_bad):
                self._drains.cut()
                run.handle(ev.VersionRetracted(first_bad))
                self.handle(wc.VersionsRetracted())
            case wc.SuspendDeadlines(is_halted=is_halted):
                run.suspend_deadlines(is_halted)
            case wc.GiveUp(engine=engine, why=why):
                engines.give_up_engine(engine, why)
            case wc.RefuseEngine(engine=engine, why=why):
                engines.refuse_engine(engine, why)

    def _on_timer(self, timer: wc.Timer) -> None:
        del self._timers[timer]
        self.handle(wc.TimerFired(timer))

    def _stop_timer(self, timer: wc.Timer) -> None:
        if (handle := self._timers.pop(timer, None)) is not None:
            handle.cancel()


async def finish_write(writing: Awaitable[Result]) -> Result:
    """Await a write to the weight channel; if cancelled, raise once it has ended, because the
    channel has one writer at a time."""
    task = asyncio.ensure_future(writing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await task
        raise


def _refuse_too_large(chunks: Sequence[UpdateWeights], *, is_adapter: bool) -> None:
    """Refuse weights whose message would exceed the frame limit, before any engine gets one: an
    adapter's chunks are in one message."""
    kind = "load_adapter" if is_adapter else "update_weights"
    bytes_max = FRAME_BYTES_MAX_BY_KIND[kind] - HEADER_BYTES
    sizes = [len(encode(chunk)) for chunk in chunks]
    if (size := sum(sizes) if is_adapter else max(sizes, default=0)) > bytes_max:
        tensors = sum(len(chunk.tensors) for chunk in chunks)
        raise WeightsRefused(
            f"the names and offsets of {tensors} tensors take {size} bytes of one message, which "
            f"may have {bytes_max}; publish fewer tensors, or shorter names"
        )
