"""Versions of the LoRA adapters that have weight versions of their own.

Every adapter is published, pinned and unloaded independently of all others and of the run's
weights; one publish of an adapter runs at a time. The reasons are in
docs/decisions/adapter-versions.md. If an engine gets a turn of an adapter that it lacks, it
requests the adapter, so nothing here tracks what engines have in memory.
"""

from collections import Counter
from collections.abc import Collection

from typing_extensions import override

from tidegate.errors import WeightsRefused
from tidegate.orchestrator.core.control_events import (
    AdapterMemory,
    AdapterReply,
    PublishRequested,
    RecordSwap,
    Reserved,
    ReserveRequested,
)
from tidegate.orchestrator.core.control_state import ControlState, NextVersion, Steps, Wait
from tidegate.orchestrator.core.target_versions import TargetVersions, WeightUpdate
from tidegate.orchestrator.core.weight_content import WeightContent
from tidegate.orchestrator.core.weight_versions import WeightVersions
from tidegate.transport.message import SwapMode
from tidegate.transport.messages import (
    LIVE_ADAPTER,
    AdapterFailed,
    AdapterLive,
    AdapterLoaded,
    AdapterNeeded,
    LoadAdapter,
    Message,
    SwapAdapter,
    UnloadAdapter,
)


class LoraVersions(TargetVersions):
    """Versions of one adapter: the live one, pinned ones, and the one that is published."""

    def __init__(self, adapters: "Adapters", name: str) -> None:
        super().__init__(adapters.state, timeout_s=adapters.timeout_s, name=name)
        self.newest_version = 0
        self._adapters = adapters
        self._contents: dict[int, WeightUpdate] = {}
        """Versions that may be sent to engines: live, pinned, and being published."""
        self._pins: Counter[int] = Counter()
        self._held: dict[str, int] = {}
        """Engine -> its live version. Engines without one ask for it when they need it."""

    @property
    @override
    def buffers(self) -> set[int]:
        return {buffer for each in self._contents.values() for buffer in each.content.buffers}

    def has(self, version: int) -> bool:
        """Whether this version can be sent to engines."""
        return version in self._contents and version <= self.newest_version

    # ------------------------------------------------------------ what the target says

    @property
    @override
    def _engines(self) -> Collection[str]:
        return self._adapters.able

    @override
    def _lacks(self, engine: str, update: WeightUpdate) -> bool:
        held, is_published = self._held.get(engine, 0), update is self.update and not self.is_over
        if held == update.version:  # a resumed run publishes it again
            return not update.is_durable  # the engine may lack it in memory: see `_on_needed`
        return held < update.version and (held > 0 or is_published)

    @override
    def _stage_messages(self, engine: str, update: WeightUpdate) -> list[Message]:
        return [self._load(engine, update, is_staged=True)]

    def _load(
        self, engine: str, update: WeightUpdate, *, is_live: bool = False, is_staged: bool = False
    ) -> Message:
        self._adapters.reading[engine, self.name, update.version] = update.content.buffers
        return LoadAdapter(
            name=self.name,
            version=update.version,
            scale=update.request.scale,
            chunks=update.request.chunks,
            is_live=is_live,
            is_staged=is_staged,
        )

    @override
    def _swap_message(self, engine: str, update: WeightUpdate) -> Message:
        mode = self._adapters.swap_mode._asdict()
        return SwapAdapter(name=self.name, version=update.version, **mode)

    @override
    def _content_of(self, event: PublishRequested) -> WeightContent:
        return WeightContent(tuple(event.chunks))

    # ------------------------------------------------------------ publishing

    @override
    def publish(self, event: PublishRequested) -> None:
        super().publish(event)
        assert self.update is not None
        self._contents[event.version] = self.update

    @override
    def _withdraw(self) -> None:
        super()._withdraw()
        update, self.update = self.update, self.kept
        if update is not None and update.is_withdrawn:
            del self._contents[update.version]
            self._adapters.drop(self.name, update.version)

    @override
    def advance(self) -> None:
        super().advance()
        if self.is_over:
            kept = {self.newest_version, *self._pins}
            self._contents = {v: update for v, update in self._contents.items() if v in kept}

    def pin(self, version: int, is_pinned: bool) -> None:
        """Keep a version for turns that name it, or undo one such pin."""
        if version in self._contents:
            self._pins[version] += 1 if is_pinned else -1
            if self._pins[version] <= 0:
                del self._pins[version]

    def end(self) -> None:
        """Fail the publishes that are not over, because the adapter is unloaded."""
        self._stop_timer()
        for publish in list(self._publishes):
            self._end(publish, WeightsRefused(f"adapter {self.name!r} was unloaded"))

    # ------------------------------------------------------------ engines

    @override
    def remove(self, engine: str) -> None:
        super().remove(engine)
        self._held.pop(engine, None)

    def join_holding(self, engine: str, version: int) -> None:
        """Bring an engine that has joined up to date; it has kept ``version`` as its live one."""
        self._held[engine] = version
        self.join(engine)

    def on_reply(self, engine: str, message: AdapterReply) -> None:
        """Record an engine's reply, or send it the version that it needs."""
        version = message.version
        match message:
            case AdapterNeeded():
                self._on_needed(engine, version)
            case AdapterLoaded():
                if version == self.newest_version and not self.is_pending_on(engine):
                    self._held[engine] = version  # it asked for the live version
                self.on_staged(engine, version)
            case AdapterFailed(message=why):
                if self.on_refused(engine, version, why) or version == self.newest_version:
                    self._state.give_up([engine], f"{self._title(version)}: {why}")
            case AdapterLive():
                self._held[engine] = version
                self.on_live(engine, version)
                self._state.command(RecordSwap(engine, message))

    def _on_needed(self, engine: str, version: int) -> None:
        wanted = version if version != LIVE_ADAPTER else self.newest_version
        content = self._contents.get(wanted)
        if self.update is not None and self.update.version == wanted and not self.update.is_durable:
            return  # every engine gets it, to serve once no crash can give its number to others
        if content is not None and wanted <= self.newest_version:
            message = self._load(engine, content, is_live=wanted == self.newest_version)
            self._state.send([(engine, message)])
        elif version != LIVE_ADAPTER and version <= self.newest_version:
            self._state.send([(engine, UnloadAdapter(name=self.name, version=version))])
        # Otherwise its first publish is under way, and reaches every engine.


class Adapters:
    """The weight versions of each LoRA adapter that has its own, by the adapter's name."""

    def __init__(
        self,
        state: ControlState,
        weights: WeightVersions,
        swap_mode: SwapMode,
        *,
        timeout_s: float,
        next_version: NextVersion,
        released: Collection[str],
    ) -> None:
        """The arguments are those of :class:`WeightControl`."""
        self.state, self._weights = state, weights
        self._next_version, self._released = next_version, released
        self.swap_mode = swap_mode
        self.timeout_s = timeout_s
        self._loaded: dict[str, LoraVersions] = {}
        self._unloaded: set[str] = set()
        """Unloaded adapters; publishing an adapter again removes it from the set."""
        self._engines: dict[str, bool] = {}
        """Engine -> whether it serves adapters with versions of their own."""
        self.reading: dict[tuple[str, str, int], set[int]] = {}
        """(engine, adapter, version) -> buffers that the engine may be reading."""
        self._assigned: dict[str, int] = {}
        """Newest number given to a publish of each adapter; failed publishes keep their numbers."""

    # ------------------------------------------------------------ queries

    @property
    def loaded(self) -> Collection[str]:
        """Names of the adapters that have a version, or get their first one now."""
        return self._loaded.keys()

    @property
    def able(self) -> list[str]:
        """Engines that serve adapters with versions of their own."""
        return [engine for engine, is_able in self._engines.items() if is_able]

    @property
    def unable(self) -> list[str]:
        """Engines that serve no adapters with versions of their own."""
        return sorted(engine for engine, is_able in self._engines.items() if not is_able)

    @property
    def buffers(self) -> frozenset[int]:
        """Buffers of the weight channel that must not be overwritten."""
        held = (each.buffers for each in self._loaded.values())
        return frozenset().union(*held, *self.reading.values())

    def get(self, name: str) -> LoraVersions | None:
        """Return a loaded adapter."""
        return self._loaded.get(name)

    def _is_known(self, name: str) -> bool:
        """Whether an adapter is loaded, or will be once a resumed trainer publishes it again."""
        return name in self._loaded or (name in self._released and name not in self._unloaded)

    # ------------------------------------------------------------ calls

    def reserve(self, event: ReserveRequested) -> Steps[Reserved]:
        """Reserve the weight channel for an adapter's next version, once its last one is over."""
        name, state = event.adapter, self.state

        def is_over() -> bool:
            adapter = self._loaded.get(name)
            return adapter is None or adapter.is_over

        yield Wait(lambda: state.reserved_for is None and is_over())
        state.reserved_for = name
        version = self._assigned[name] = max(
            self._next_version(name), self._assigned.get(name, 0) + 1
        )
        return Reserved(version, self.buffers | self._weights.buffers, None, None, name)

    def publish(self, event: PublishRequested) -> None:
        """Bring a version that was written to all engines."""
        self._unloaded.discard(event.adapter)
        adapter = self._loaded.setdefault(event.adapter, LoraVersions(self, event.adapter))
        adapter.publish(event)

    def cancel(self, call_id: int) -> bool:
        """As :meth:`TargetVersions.cancel`, for the publishes of all adapters."""
        return any(each.cancel(call_id) for each in self._loaded.values())

    def unload(self, name: str) -> None:
        """Have engines drop an adapter, and refuse the turns that use it."""
        if (adapter := self._loaded.pop(name, None)) is not None:
            adapter.end()
        self._unloaded.add(name)
        self.drop(name)

    def drop(self, name: str, version: int | None = None) -> None:
        """Have engines drop one version of an adapter, or all."""
        message = UnloadAdapter(name=name, version=version)
        self.state.send([(engine, message) for engine in self.able])

    def advance(self) -> None:
        """As :meth:`TargetVersions.advance`, for all adapters."""
        for name, adapter in list(self._loaded.items()):
            adapter.advance()
            if not adapter.buffers:
                del self._loaded[name]  # its first version has failed

    # ------------------------------------------------------------ engines

    def join(self, engine: str, memory: AdapterMemory) -> None:
        """Bring an engine up to date: it has kept live versions, and forgotten those not live."""
        self.remove(engine)
        self._engines[engine] = memory.adapters_max > 0
        held = {each.name: each.version for each in memory.held}
        for name in sorted(held):
            if not self._is_known(name):
                self.state.send([(engine, UnloadAdapter(name=name))])
        for name, adapter in self._loaded.items():
            adapter.join_holding(engine, held.get(name, 0))

    def remove(self, engine: str) -> None:
        """Wait for an engine no longer."""
        self._engines.pop(engine, None)
        self.reading = {key: read for key, read in self.reading.items() if key[0] != engine}
        for adapter in self._loaded.values():
            adapter.remove(engine)

    def on_reply(self, engine: str, message: AdapterReply) -> None:
        """Handle an engine's message about an adapter."""
        adapter = self._loaded.get(message.name)
        if isinstance(message, AdapterLoaded | AdapterFailed):
            self.reading.pop((engine, message.name, message.version), None)
        if adapter is not None:
            adapter.on_reply(engine, message)
        elif isinstance(message, AdapterNeeded) and not self._is_known(message.name):
            self.state.send([(engine, UnloadAdapter(name=message.name))])
        elif isinstance(message, AdapterLive):
            self.state.command(RecordSwap(engine, message))
