"""Publishes, pins and unloads of adapters with weight versions of their own.

The engine side creates one :class:`AdapterManager`. Trainers' adapter handles publish, pin and
unload through it; :class:`tidegate.orchestrator.weight_sync.control.EngineControl` brings what it
has written to the engines.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.fleet.shell import RunShell
from tidegate.orchestrator.weight_sync.adapter_files import LoadedAdapter
from tidegate.orchestrator.weight_sync.control import EngineControl, finish_write
from tidegate.transport.messages import UpdateWeights
from tidegate.transport.weight_channels import CHANNELS, weight_channel

BUFFERS_FROM = 1 << 40
"""First number of adapters' buffers in the weight channel; weight versions have lower ones."""

Archive = Callable[[str, int, LoadedAdapter], None]
"""Adds an adapter's version to the run's records, if there are any. Blocks."""

Write = Callable[[int, Collection[int]], list[UpdateWeights]]
"""Writes tensors to the weight channel under a number, keeping other buffers. Blocks."""


class AdapterManager:
    """Adapters with versions of their own, as coroutines for the trainer's calls."""

    def __init__(
        self, channel: str, control: EngineControl, run: RunShell, *, archive: Archive
    ) -> None:
        """``channel``: name of the run's weight channel."""
        self._run, self._control = run, control
        self.state = control.state.adapters
        self._archive = archive
        self._channel = channel
        self._buffers = itertools.count(BUFFERS_FROM)
        self._publishing: dict[str, asyncio.Lock] = {}
        """One lock per adapter: publishes of one adapter run one after another."""

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
        run, control = self._run, self._control
        async with self.publishing(name):
            run.hold_batches(True, name)
            try:
                if name_batches is not None:
                    name_batches()
                reserved = await control.reserve(adapter=name)
                try:
                    writing = asyncio.to_thread(write, next(self._buffers), reserved.keep)
                    chunks = await finish_write(writing)
                    if is_archived:
                        await asyncio.to_thread(self._archive, name, reserved.version, adapter)
                except BaseException:
                    control.release(name)
                    raise
                await control.publish(reserved.version, chunks, adapter=name, scale=adapter.scale)
            finally:
                run.hold_batches(False, name)
        return reserved.version

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

    async def unload(self, name: str) -> None:
        """Have engines drop an adapter, and refuse the turns that use it."""
        async with self.publishing(name):
            if name not in self.state.loaded:
                loaded = sorted(self.state.loaded) or "none"
                raise WeightsRefused(f"no adapter {name!r} is loaded; loaded are {loaded}")
            self._control.handle(wc.UnloadRequested(name))

    def pin(self, name: str, version: int | None) -> int:
        """Keep a version for turns that name it, until it is unpinned as often; return it.

        Raises:
            WeightsRefused: the version is not there any more.
        """
        adapter = self.state.get(name)
        live = 0 if adapter is None else adapter.newest_version
        version = live if version is None else version
        if adapter is None or not adapter.has(version):
            raise WeightsRefused(
                f"adapter {name!r} has no v{version} to pin: v{live} is live; pin a version before "
                f"the next publish replaces it"
            )
        self._control.handle(wc.PinChanged(name, version, True))
        return version

    def unpin(self, name: str, version: int) -> None:
        """Undo one :meth:`pin`; harmless for a version that is not pinned."""
        self._control.handle(wc.PinChanged(name, version, False))
