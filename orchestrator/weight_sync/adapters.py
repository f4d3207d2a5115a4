"""Asyncio shell around :class:`tidegate.orchestrator.core.adapter_control.AdapterControl`.

The engine side creates one :class:`AdapterManager`. Trainers' adapter handles publish, pin and
unload through it; it writes tensors to the run's weight channel, one adapter at a time.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.orchestrator.core import adapter_control as ac
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.adapter_control import AdapterControl
from tidegate.orchestrator.core.weight_control import WeightControl
from tidegate.orchestrator.fleet.pending_futures import PendingFutures, fail, resolve
from tidegate.orchestrator.fleet.shell import EngineShell, RunShell
from tidegate.orchestrator.settings.config import WeightSettings
from tidegate.orchestrator.weight_sync.adapter_files import LoadedAdapter
from tidegate.transport.limits import FRAME_BYTES_MAX_BY_KIND
from tidegate.transport.messages import (
    FromEngine,
    Hello,
    UpdateWeights,
    encode,
)
from tidegate.transport.weight_channels import CHANNELS, weight_channel

BUFFERS_FROM = 1 << 40
"""First number of adapters' buffers in the weight channel; weight versions have lower ones."""

HEADER_BYTES = 4096
"""Bytes reserved in a message for the adapter's name and the fields besides its chunks."""

Archive = Callable[[str, int, LoadedAdapter], None]
"""Adds an adapter's version to the run's records, if there are any. Blocks."""

Write = Callable[[int, Collection[int]], list[UpdateWeights]]
"""Writes tensors to the weight channel under a number, keeping other buffers. Blocks."""


class AdapterManager:
    """Adapters with versions of their own, as coroutines for the trainer's calls."""

    def __init__(
        self,
        settings: WeightSettings,
        channel: str,
        pending: PendingFutures,
        weights: WeightControl,
        run: RunShell,
        engines: EngineShell,
        *,
        archive: Archive,
    ) -> None:
        """``channel``: name of the run's weight channel, in which ``weights`` has buffers, too."""
        self._run, self._engines = run, engines
        self._weights = weights
        self._archive = archive
        self._channel = channel
        self._pending = pending
        self.state = AdapterControl(
            pause_mode=settings.pause_mode,
            kv_policy=settings.kv_policy,
            update_timeout_s=settings.weight_update_timeout_s,
            released=run.core.adapters,
        )
        """The state machine. Other code may read it, but only this class feeds it events."""
        self._calls = itertools.count()
        self._buffers = itertools.count(BUFFERS_FROM)
        self._results: dict[int, asyncio.Future[None]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._publishing: dict[str, asyncio.Lock] = {}
        """One lock per adapter: publishes of one adapter run one after another."""
        self._assigned: dict[str, int] = {}
        """Newest number given to a publish of each adapter; failed publishes keep their numbers."""
        self._writing = asyncio.Lock()

    def close(self) -> None:
        """Stop the timers of publishes that are under way; the run is over."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # ------------------------------------------------------------ engines

    def joined(self, engine: str, hello: Hello | None) -> None:
        """Handle an engine that has joined or reconnected."""
        if hello is not None:
            self._handle(ac.AdapterEngineConnected(engine, hello.adapters_max, hello.adapters))

    def left(self, engine: str) -> None:
        """Handle an engine that has gone."""
        self._handle(ac.AdapterEngineRemoved(engine))

    def receive(self, engine: str, message: FromEngine) -> bool:
        """Handle an engine's message; return False if it is not about adapters."""
        if not isinstance(message, ac.AdapterReply):
            return False
        self._handle(ac.ReplyReceived(engine, message))
        return True

    # ------------------------------------------------------------ calls

    @property
    def in_use(self) -> Collection[str]:
        """Names of adapters that are loaded, or are being published for the first time."""
        publishing = [name for name, lock in self._publishing.items() if lock.locked()]
        return {*self.state.loaded, *publishing}

    async def publish(
        self,
        name: str,
        adapter: LoadedAdapter,
        write: Write,
        *,
        name_batches: Callable[[], None] | None = None,
        is_archived: bool = True,
    ) -> int:
        """Bring a version of an adapter to every engine; return its number once all serve it.

        ``write`` writes the adapter's tensors. ``name_batches`` tells the core what a trained
        adapter's version was made from. ``is_archived``: add the tensors to the run's records.

        Raises:
            ConfigError: the run's weight channel or one of its engines cannot do this.
            WeightsRefused: the adapter does not fit the model; the version served before stays
                live.
            EngineLagging: an engine took too long, and was removed.
        """
        self._refuse_unable(name)
        async with self.publishing(name):
            version = self._assigned[name] = self._next_version(name)
            self._run.hold_batches(True, name)
            call, buffer = next(self._calls), next(self._buffers)
            result = self._results[call] = asyncio.get_running_loop().create_future()
            self._pending.others.add(result)
            try:
                if name_batches is not None:
                    name_batches()
                async with self._writing:
                    chunks = await self._write(buffer, write)
                    _refuse_too_large(chunks)
                    if is_archived:
                        await asyncio.to_thread(self._archive, name, version, adapter)
                    self._handle(
                        ac.AdapterPublishRequested(
                            call, name, version, adapter.scale, chunks, buffer
                        )
                    )
                await result
            finally:
                self._pending.others.discard(result)
                del self._results[call]
                if not result.done() or result.cancelled():
                    self._handle(ac.AdapterCallCancelled(call))
                self._publish_ended(name)
        return version

    def _next_version(self, name: str) -> int:
        """Return the number of an adapter's next publish; failed publishes keep their numbers."""
        core = self._run.core
        trained = core.trained_adapters.get(name)
        after_newest = core.adapters.get(name, 0) + 1 if trained is None else trained.next_version
        return max(self._assigned.get(name, 0) + 1, after_newest)

    def _publish_ended(self, name: str) -> None:
        """Let a trained adapter's trainer get batches again, after a publish or its failure."""
        if name in self._run.core.trained_adapters:
            self._run.hold_batches(False, name)

    def publishing(self, name: str) -> asyncio.Lock:
        """Return the lock that publishes of an adapter hold."""
        return self._publishing.setdefault(name, asyncio.Lock())

    def _refuse_unable(self, name: str) -> None:
        if not weight_channel(self._channel).carries_adapters:
            able = [name for name in CHANNELS if weight_channel(name).carries_adapters]
            raise ConfigError(
                f"weight_channel={self._channel!r} carries no adapters with versions of their own; "
                f"use one of {', '.join(able)}, or publish_adapter"
            )
        if unable := self.state.unable:
            raise ConfigError(
                f"{', '.join(unable)} can't serve adapter {name!r} with versions of its own; use "
                f"CPU engines of one process, or publish_adapter"
            )

    async def _write(self, buffer: int, write: Write) -> list[UpdateWeights]:
        weights, base = self._weights, self._weights.weights
        await self._pending.until(lambda: not weights.shared.is_reserved)
        keep = {*self.state.buffers, *base.kept_buffers}
        if base.update is not None:
            keep |= {base.update.version, *base.update.content.buffers}
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(None, write, buffer, keep)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await writing
            raise

    async def unload(self, name: str) -> None:
        """Have engines drop an adapter, and refuse the turns that use it."""
        async with self.publishing(name):
            if name not in self.state.loaded:
                loaded = sorted(self.state.loaded) or "none"
                raise WeightsRefused(f"no adapter {name!r} is loaded; loaded are {loaded}")
            self._handle(ac.UnloadRequested(name))

    def pin(self, name: str, version: int | None) -> int:
        """Keep a version for turns that name it, until it is unpinned as often; return it.

        Raises:
            WeightsRefused: the version is not there any more.
        """
        version = self.state.version(name) if version is None else version
        if not self.state.has(name, version):
            live = self.state.version(name)
            raise WeightsRefused(
                f"adapter {name!r} has no v{version} to pin: v{live} is live; pin a version before "
                f"the next publish replaces it"
            )
        self._handle(ac.PinChanged(name, version, True))
        return version

    def unpin(self, name: str, version: int) -> None:
        """Undo one :meth:`pin`; harmless for a version that is not pinned."""
        self._handle(ac.PinChanged(name, version, False))

    # ------------------------------------------------------------ commands

    def _handle(self, event: ac.Event) -> None:
        for command in self.state.handle(event):
            self._carry_out(command)

    def _carry_out(self, command: ac.Command) -> None:
        run, engines = self._run, self._engines
        match command:
            case ac.SendAdapterMessage(engine=engine, message=message):
                engines.send([(engine, message)])
            case ac.ResolveAdapterPublish(call=call, error=error):
                if (timer := self._timers.pop(call, None)) is not None:
                    timer.cancel()
                if error is None:
                    resolve(self._results.get(call), None)
                else:
                    fail(self._results.get(call), error)
            case ac.SetPublishTimer(call=call, seconds=seconds):
                loop = asyncio.get_running_loop()
                self._timers[call] = loop.call_later(
                    seconds, lambda: self._handle(ac.PublishTimerFired(call))
                )
            case ac.ReleaseAdapter(name=name, version=version):
                run.handle(ev.AdapterReleased(name, version))
                run.hold_batches(False, name)
                run.when_safe(lambda: self._handle(ac.ReleaseDurable(name, version)))
            case ac.RecordLive(engine=engine, message=live):
                engines.adapter_live(engine, live)
            case ac.GiveUpAdapterEngine(engine=engine, why=why):
                engines.give_up_engine(engine, why)


def _refuse_too_large(chunks: Sequence[UpdateWeights]) -> None:
    bytes_max = FRAME_BYTES_MAX_BY_KIND["load_adapter"] - HEADER_BYTES
    if (size := sum(len(encode(chunk)) for chunk in chunks)) > bytes_max:
        raise WeightsRefused(
            f"the names and offsets of an adapter's tensors take {size} bytes of one message, "
            f"which may have {bytes_max}; publish fewer tensors"
        )
