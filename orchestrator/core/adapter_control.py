"""Sans-IO state machine of LoRA adapters with weight versions of their own, on all engines.

:class:`tidegate.orchestrator.weight_sync.adapters.AdapterManager` feeds :class:`AdapterControl`
events and carries out its commands. Every adapter is published, pinned and unloaded independently
of all others and of the model's weights; one publish of an adapter runs at a time. The reasons are
in docs/decisions/adapter-versions.md. The state machine does no I/O and reads no clock.

A version is loaded by every engine, then released (journalled), then swapped in by every engine. If
an engine gets a turn of an adapter that it lacks, it requests the adapter, so this state machine
does not track what engines have in memory.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from tidegate.errors import EngineLagging, TidegateError, WeightsRefused
from tidegate.transport.adapter_messages import LIVE_ADAPTER
from tidegate.transport.messages import (
    AdapterFailed,
    AdapterLive,
    AdapterLoaded,
    AdapterNeeded,
    HeldAdapter,
    KvPolicy,
    LoadAdapter,
    Message,
    PauseMode,
    SwapAdapter,
    UnloadAdapter,
    UpdateWeights,
)

AdapterReply = AdapterLoaded | AdapterFailed | AdapterLive | AdapterNeeded
"""Messages from engines about adapters with versions of their own."""

# ---------------------------------------------------------------- events


class AdapterEngineConnected(Struct, frozen=True):
    """An engine joined or reconnected."""

    engine: str
    adapters_max: int
    """Number of adapter versions that it holds; 0 if it serves no such adapters."""
    held: Sequence[HeldAdapter]
    """Live versions that it has kept."""


class AdapterEngineRemoved(Struct, frozen=True):
    """An engine left, or was removed."""

    engine: str


class ReplyReceived(Struct, frozen=True):
    """An engine sent a message about an adapter."""

    engine: str
    message: AdapterReply


class AdapterPublishRequested(Struct, frozen=True):
    """A version was written to the weight channel. Resolved once every engine serves it."""

    call: int
    name: str
    version: int
    scale: float
    chunks: list[UpdateWeights]
    buffer: int
    """Number under which the channel keeps the tensors."""


class PinChanged(Struct, frozen=True):
    """A version is pinned (kept for turns that name it), or unpinned."""

    name: str
    version: int
    is_pinned: bool


class UnloadRequested(Struct, frozen=True):
    """An adapter is dropped by all engines, and its turns are refused."""

    name: str


class ReleaseDurable(Struct, frozen=True):
    """No crash can undo the release of an adapter's version, so engines may swap."""

    name: str
    version: int


class PublishTimerFired(Struct, frozen=True):
    """The timer of a publish has expired."""

    call: int


class AdapterCallCancelled(Struct, frozen=True):
    """The caller of a publish was cancelled."""

    call: int


Event = (
    AdapterEngineConnected
    | AdapterEngineRemoved
    | ReplyReceived
    | AdapterPublishRequested
    | PinChanged
    | UnloadRequested
    | ReleaseDurable
    | PublishTimerFired
    | AdapterCallCancelled
)

# ---------------------------------------------------------------- commands


class SendAdapterMessage(Struct, frozen=True):
    """Send a message to an engine."""

    engine: str
    message: Message


class ResolveAdapterPublish(Struct, frozen=True):
    """End a publish, by raising ``error`` if there is one."""

    call: int
    error: TidegateError | None = None


class SetPublishTimer(Struct, frozen=True):
    """Deliver :class:`PublishTimerFired` after ``seconds``, unless the publish has ended before."""

    call: int
    seconds: float


class ReleaseAdapter(Struct, frozen=True):
    """Every engine has loaded a version: record its number, and deliver :class:`ReleaseDurable`
    once the record is safe."""

    name: str
    version: int


class RecordLive(Struct, frozen=True):
    """An engine serves an adapter's version from now on."""

    engine: str
    message: AdapterLive


class GiveUpAdapterEngine(Struct, frozen=True):
    """Remove an engine that did not reply in time, or refused a version that all others serve."""

    engine: str
    why: str


Command = (
    SendAdapterMessage
    | ResolveAdapterPublish
    | SetPublishTimer
    | ReleaseAdapter
    | RecordLive
    | GiveUpAdapterEngine
)

# ---------------------------------------------------------------- state


@dataclass(slots=True)
class _AdapterPublish:
    """A publish under way."""

    request: AdapterPublishRequested
    loading: set[str] = field(default_factory=set)
    """Engines that have not loaded the version."""
    swapping: set[str] = field(default_factory=set)
    """Engines that do not serve the released version yet."""
    is_released: bool = False
    is_durable: bool = False


@dataclass(slots=True)
class _Adapter:
    """State of one LoRA adapter: its live version, kept versions, pins and current publish."""

    live: int = 0
    """Newest released version; 0 before the first."""
    contents: dict[int, AdapterPublishRequested] = field(default_factory=dict)
    """Versions that may be sent to engines: live, pinned, and being published."""
    pins: Counter[int] = field(default_factory=Counter)
    publish: _AdapterPublish | None = None
    """Publish under way; None if there is none."""
    queued: list[AdapterPublishRequested] = field(default_factory=list)
    """Publishes that wait for the end of the publish under way, whose caller was cancelled."""


class AdapterControl:
    """Adapters with versions of their own. Its state changes only through :meth:`handle`."""

    def __init__(
        self,
        *,
        pause_mode: PauseMode,
        kv_policy: KvPolicy,
        update_timeout_s: float = 60.0,
        released: Mapping[str, int] | None = None,
    ) -> None:
        """``update_timeout_s``: time for all engines to load a version, and to swap it in.
        ``released``: the run's newest version of each adapter, which after a resume includes those
        that the trainer has not published again."""
        self._released = released if released is not None else {}
        self._unloaded: set[str] = set()
        """Unloaded adapters; publishing an adapter again removes it from the set."""
        self._pause_mode: PauseMode = pause_mode
        self.kv_policy: KvPolicy = kv_policy
        """What a swap does to the KV of the adapter's kept turns."""
        self._timeout_s = update_timeout_s
        self._engines: dict[str, bool] = {}
        """Engine -> whether it serves adapters with versions of their own."""
        self._adapters: dict[str, _Adapter] = {}
        self._reading: dict[tuple[str, str, int], int] = {}
        """(engine, adapter, version) -> buffer that the engine may be reading."""
        self._catching_up: set[tuple[str, str, int]] = set()
        """(engine, adapter, version) of each version that an engine missed while it was
        disconnected, and is loading now."""
        self._out: list[Command] = []

    # ------------------------------------------------------------ queries

    @property
    def loaded(self) -> Collection[str]:
        """Names of the adapters that have a version, or get their first one now."""
        return self._adapters.keys()

    @property
    def buffers(self) -> frozenset[int]:
        """Buffers of the weight channel that must not be overwritten."""
        contents = (c.buffer for a in self._adapters.values() for c in a.contents.values())
        return frozenset({*contents, *self._reading.values()})

    def version(self, name: str) -> int:
        """Return an adapter's newest released version of this process; 0 if there is none."""
        adapter = self._adapters.get(name)
        return adapter.live if adapter is not None else 0

    def has(self, name: str, version: int) -> bool:
        """Whether this version can be sent to engines."""
        adapter = self._adapters.get(name)
        return adapter is not None and version in adapter.contents and version <= adapter.live

    @property
    def unable(self) -> list[str]:
        """Engines that serve no adapters with versions of their own."""
        return sorted(name for name, is_able in self._engines.items() if not is_able)

    # ------------------------------------------------------------ transitions

    def handle(self, event: Event) -> list[Command]:
        """Apply one event and return the commands that follow from it, in order."""
        match event:
            case AdapterEngineConnected():
                self._on_connected(event)
            case AdapterEngineRemoved(engine=engine):
                self._on_removed(engine)
            case ReplyReceived(engine=engine, message=message):
                self._on_reply(engine, message)
            case AdapterPublishRequested():
                self._on_publish(event)
            case PinChanged(name=name, version=version, is_pinned=is_pinned):
                self._on_pin(name, version, is_pinned)
            case UnloadRequested(name=name):
                if (adapter := self._adapters.pop(name, None)) is not None:
                    error = WeightsRefused(f"adapter {name!r} was unloaded")
                    queued, adapter.queued = adapter.queued, []
                    self._out += [ResolveAdapterPublish(each.call, error) for each in queued]
                    self._fail(adapter, error)
                self._unloaded.add(name)
                for engine in self._able:
                    self._out.append(SendAdapterMessage(engine, UnloadAdapter(name=name)))
            case ReleaseDurable(name=name, version=version):
                self._on_durable(name, version)
            case PublishTimerFired(call=call):
                self._on_timer(call)
            case AdapterCallCancelled(call=call):
                self._on_cancelled(call)
        commands, self._out = self._out, []
        return commands

    @property
    def _able(self) -> list[str]:
        return [engine for engine, is_able in self._engines.items() if is_able]

    def _load(
        self,
        engine: str,
        content: AdapterPublishRequested,
        *,
        is_live: bool = False,
        is_staged: bool = False,
    ) -> None:
        self._reading[engine, content.name, content.version] = content.buffer
        message = LoadAdapter(
            name=content.name,
            version=content.version,
            scale=content.scale,
            chunks=content.chunks,
            is_live=is_live,
            is_staged=is_staged,
        )
        self._out.append(SendAdapterMessage(engine, message))

    def _swap(self, engine: str, name: str, version: int) -> None:
        message = SwapAdapter(
            name=name, version=version, pause_mode=self._pause_mode, kv_policy=self.kv_policy
        )
        self._out.append(SendAdapterMessage(engine, message))

    # ------------------------------------------------------------ engines

    def _on_connected(self, event: AdapterEngineConnected) -> None:
        """Bring an engine up to date: it has kept live versions, and forgotten those not live."""
        engine = event.engine
        self._forget_reading(engine)
        is_able = self._engines[engine] = event.adapters_max > 0
        held = {each.name: each.version for each in event.held}
        for name in sorted(held):
            if not self._is_known(name):
                self._out.append(SendAdapterMessage(engine, UnloadAdapter(name=name)))
        for name, adapter in self._adapters.items():
            publish = adapter.publish
            if publish is not None and not is_able:
                publish.loading.discard(engine)
                publish.swapping.discard(engine)
            elif publish is not None:
                version = publish.request.version
                if held.get(name) == version:
                    publish.loading.discard(engine)
                    publish.swapping.discard(engine)
                    continue
                publish.loading.add(engine)
                if publish.is_released:
                    publish.swapping.add(engine)
                self._load(engine, publish.request, is_staged=True)
            elif 0 < held.get(name, 0) < adapter.live and adapter.live in adapter.contents:
                self._catching_up.add((engine, name, adapter.live))
                self._load(engine, adapter.contents[adapter.live], is_staged=True)
        self._advance_all()

    def _is_known(self, name: str) -> bool:
        """Whether an adapter is loaded, or will be once a resumed trainer publishes it again."""
        return name in self._adapters or (name in self._released and name not in self._unloaded)

    def _on_removed(self, engine: str) -> None:
        self._engines.pop(engine, None)
        self._forget_reading(engine)
        for adapter in self._adapters.values():
            if (publish := adapter.publish) is not None:
                publish.loading.discard(engine)
                publish.swapping.discard(engine)
        self._advance_all()

    def _forget_reading(self, engine: str) -> None:
        self._reading = {key: buffer for key, buffer in self._reading.items() if key[0] != engine}
        self._catching_up = {key for key in self._catching_up if key[0] != engine}

    def _on_reply(self, engine: str, message: AdapterReply) -> None:
        name, version = message.name, message.version
        adapter = self._adapters.get(name)
        publish = adapter.publish if adapter is not None else None
        is_current = publish is not None and publish.request.version == version
        match message:
            case AdapterNeeded():
                self._on_needed(engine, name, version)
                return
            case AdapterLoaded():
                self._reading.pop((engine, name, version), None)
                if publish is not None and is_current and engine in publish.loading:
                    publish.loading.discard(engine)
                    if publish.is_durable:
                        self._swap(engine, name, version)
                elif (engine, name, version) in self._catching_up:
                    self._catching_up.discard((engine, name, version))
                    self._swap(engine, name, version)
            case AdapterFailed(message=why):
                self._reading.pop((engine, name, version), None)
                if adapter is None:
                    return
                if publish is not None and is_current and not publish.is_released:
                    self._fail(adapter, WeightsRefused(f"engine {engine!r}: {why}"))
                elif version == adapter.live:
                    self._out.append(
                        GiveUpAdapterEngine(engine, f"adapter {name!r} v{version}: {why}")
                    )
            case AdapterLive():
                self._out.append(RecordLive(engine, message))
                if publish is not None and is_current:
                    publish.swapping.discard(engine)
        if adapter is not None:
            self._advance(name, adapter)

    def _on_needed(self, engine: str, name: str, version: int) -> None:
        adapter = self._adapters.get(name)
        if adapter is None:
            if not self._is_known(name):
                self._out.append(SendAdapterMessage(engine, UnloadAdapter(name=name)))
            return
        wanted = version if version != LIVE_ADAPTER else adapter.live
        content = adapter.contents.get(wanted)
        publish = adapter.publish
        if publish is not None and publish.request.version == wanted and not publish.is_durable:
            return  # every engine gets it, to serve once no crash can give its number to others
        if content is not None and wanted <= adapter.live:
            self._load(engine, content, is_live=wanted == adapter.live)
        elif version != LIVE_ADAPTER and version <= adapter.live:
            self._out.append(SendAdapterMessage(engine, UnloadAdapter(name=name, version=version)))
        # Otherwise its first publish is under way, and reaches every engine.

    # ------------------------------------------------------------ publishing

    def _on_publish(self, event: AdapterPublishRequested) -> None:
        self._unloaded.discard(event.name)
        adapter = self._adapters.setdefault(event.name, _Adapter())
        adapter.contents[event.version] = event
        if adapter.publish is not None:
            adapter.queued.append(event)
        else:
            self._begin(event, adapter)

    def _begin(self, event: AdapterPublishRequested, adapter: _Adapter) -> None:
        publish = adapter.publish = _AdapterPublish(event, set(self._able))
        for engine in self._able:
            self._load(engine, event, is_staged=True)
        if publish.loading:
            self._out.append(SetPublishTimer(event.call, self._timeout_s))
        self._advance(event.name, adapter)

    def _advance_all(self) -> None:
        for name, adapter in list(self._adapters.items()):
            self._advance(name, adapter)

    def _advance(self, name: str, adapter: _Adapter) -> None:
        """Release a version that every engine has loaded; end a publish that all serve."""
        publish = adapter.publish
        if publish is None:
            return
        version = publish.request.version
        if not publish.is_released and not publish.loading:
            publish.is_released = True
            publish.swapping = set(self._able)
            adapter.live = version
            self._out.append(ReleaseAdapter(name, version))
        elif publish.is_durable and not publish.loading and not publish.swapping:
            adapter.publish = None
            self._drop_unused(adapter)
            self._out.append(ResolveAdapterPublish(publish.request.call))
            self._begin_queued(adapter)

    def _begin_queued(self, adapter: _Adapter) -> None:
        if adapter.queued:
            self._begin(adapter.queued.pop(0), adapter)

    def _on_durable(self, name: str, version: int) -> None:
        adapter = self._adapters.get(name)
        publish = adapter.publish if adapter is not None else None
        if adapter is None or publish is None or publish.request.version != version:
            return
        publish.is_durable = True
        for engine in publish.swapping - publish.loading:
            self._swap(engine, name, version)
        self._advance(name, adapter)

    def _fail(self, adapter: _Adapter, error: TidegateError) -> None:
        """End a publish that is not over; engines drop a version that was not released."""
        publish, adapter.publish = adapter.publish, None
        if publish is None:
            return
        request = publish.request
        if not publish.is_released:
            del adapter.contents[request.version]
            for engine in self._able:
                drop = UnloadAdapter(name=request.name, version=request.version)
                self._out.append(SendAdapterMessage(engine, drop))
            if not adapter.contents:
                self._adapters.pop(request.name, None)
        self._out.append(ResolveAdapterPublish(request.call, error))
        self._begin_queued(adapter)

    def _on_timer(self, call: int) -> None:
        found = self._publish_of(call)
        if found is None:
            return
        adapter, publish = found
        late = sorted(publish.loading | publish.swapping)
        request = publish.request
        if not publish.is_released:
            error = EngineLagging(
                engines=late,
                wanted_version=request.version,
                waited_s=self._timeout_s,
                where=f"loading adapter {request.name!r}",
            )
            self._fail(adapter, error)
        for engine in late:
            version = f"adapter {request.name!r} v{request.version}"
            self._out.append(
                GiveUpAdapterEngine(engine, f"{version} took more than {self._timeout_s:.0f} s")
            )

    def _on_cancelled(self, call: int) -> None:
        """Give up a publish that is not released yet; a released one runs to its end."""
        error = WeightsRefused("the publish was cancelled")
        found = self._publish_of(call)
        if found is not None and not found[1].is_released:
            self._fail(found[0], error)
        for adapter in self._adapters.values():
            for queued in [each for each in adapter.queued if each.call == call]:
                adapter.queued.remove(queued)
                del adapter.contents[queued.version]
                self._out.append(ResolveAdapterPublish(call, error))

    def _publish_of(self, call: int) -> tuple[_Adapter, _AdapterPublish] | None:
        for adapter in self._adapters.values():
            if adapter.publish is not None and adapter.publish.request.call == call:
                return adapter, adapter.publish
        return None

    # ------------------------------------------------------------ pins

    def _on_pin(self, name: str, version: int, is_pinned: bool) -> None:
        adapter = self._adapters.get(name)
        if adapter is None or version not in adapter.contents:
            return
        adapter.pins[version] += 1 if is_pinned else -1
        if adapter.pins[version] <= 0:
            del adapter.pins[version]
            self._drop_unused(adapter)

    def _drop_unused(self, adapter: _Adapter) -> None:
        """Forget the versions that are neither live, nor pinned, nor being published."""
        publish = adapter.publish
        kept = {adapter.live, *adapter.pins, *([publish.request.version] if publish else [])}
        kept |= {request.version for request in adapter.queued}
        adapter.contents = {v: content for v, content in adapter.contents.items() if v in kept}
