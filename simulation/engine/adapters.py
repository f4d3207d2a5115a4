"""LoRA adapters with weight versions of their own, in a simulated engine.

Loading takes virtual time; which versions are in memory, live and in use is decided by the real
engine's :class:`~tidegate.engine.scheduling.adapter_versions.AdapterVersions`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.engine.scheduling.adapter_versions import AdapterVersions
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.checks.model import TORN_WEIGHTS
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.spec import SimulatedEngineSpec
from tidegate.simulation.engine.staging import SimulatedStaging
from tidegate.simulation.engine.turns import SimulatedTurns, TurnWeights
from tidegate.transport.messages import (
    AdapterFailed,
    AdapterLive,
    AdapterLoaded,
    AdapterNeeded,
    HeldAdapter,
    LoadAdapter,
    Message,
    SubmitTurn,
    SwapAdapter,
    TurnFailed,
    UnloadAdapter,
)


@dataclass(slots=True)
class _LoadingAdapter:
    """Version of an adapter that is being copied from the trainer's buffer."""

    request: LoadAdapter
    contents: dict[int, int]
    """Slots that are read, and their contents at the start of the copy."""
    is_over: bool = False


class SimulatedAdapters:
    """Adapter versions of one engine process, and the turns that wait for one."""

    def __init__(
        self,
        engine: str,
        turns: SimulatedTurns,
        staging: SimulatedStaging,
        spec: SimulatedEngineSpec,
        context: SimulationContext,
        *,
        on_loaded: Callable[[], None],
    ) -> None:
        """``staging``: says how many versions the engine refuses, and how late its copies are."""
        self._engine = engine
        self._turns = turns
        self._staging = staging
        self._context = context
        self._copy_s = spec.staging_s
        self._on_loaded = on_loaded
        self.versions = AdapterVersions(spec.adapters_max)
        self._loading: list[_LoadingAdapter] = []
        self._waiting: dict[int, SubmitTurn] = {}
        """Handle -> turn whose adapter is not in memory, in the order of arrival."""
        self._used: dict[int, tuple[str, int]] = {}
        """Handle -> version that a waiting or running turn uses."""
        self._replies: list[Message] = []

    # ------------------------------------------------------------ queries

    @property
    def live(self) -> list[HeldAdapter]:
        """Live versions, for a hello."""
        return self.versions.live_adapters

    @property
    def waiting_handles(self) -> list[int]:
        """Handles of the turns that wait for an adapter."""
        return list(self._waiting)

    def take_replies(self) -> list[Message]:
        """Take loaded versions into memory; return the replies that are due."""
        self._take_loaded()
        replies, self._replies = self._replies, []
        return replies

    # ------------------------------------------------------------ turns

    def submit(self, message: SubmitTurn) -> None:
        """Start a turn of an adapter once the version that it asks for is in memory."""
        self._waiting[message.turn] = message
        self._admit()

    def cancel(self, handle: int) -> bool:
        """End a turn that waits for an adapter; return False for other turns."""
        if (message := self._waiting.pop(handle, None)) is None:
            return False
        name, version = self._wanted(message)
        self._turns.end_unstarted(handle, name, version)
        self._admit()
        return True

    def release_ended(self) -> None:
        """Uncount the turns that have ended since the last call."""
        if not self._used:
            return
        running = self._turns.started_handles
        ended = [handle for handle in self._used if handle not in running]
        for handle in ended:
            self.versions.release(self._used.pop(handle))
        if ended:
            self._admit()

    def _wanted(self, message: SubmitTurn) -> tuple[str, int]:
        sampling = message.sampling
        assert sampling.adapter_version is not None
        return self.versions.key_of(sampling.adapter, sampling.adapter_version)

    def _admit(self) -> None:
        for handle, message in list(self._waiting.items()):
            key = self._wanted(message)
            if self.versions.is_held(key):
                del self._waiting[handle]
                if (refusal := self._turns.submit(message, self._weights(key))) is not None:
                    self._replies.append(TurnFailed(turn=handle, message=refusal))
                    continue
                self.versions.use(key)
                self._used[handle] = key
                continue
            is_new = self.versions.request(key)
            if is_new is None:
                self._context.coverage.add(CoverageMark.ADAPTERS_IN_USE)
                return
            if is_new:
                self._context.coverage.add(CoverageMark.ADAPTER_NEEDED)
                self._replies.append(AdapterNeeded(name=key[0], version=key[1]))

    def _weights(self, key: tuple[str, int]) -> TurnWeights:
        content = self.versions.tensors(key)
        assert isinstance(content, int)
        self._context.ground_truth.computed(self._engine, *key, content)
        return TurnWeights(adapter=key[0], version=key[1], content=content)

    # ------------------------------------------------------------ versions

    def handle(self, message: LoadAdapter | SwapAdapter | UnloadAdapter) -> None:
        """Handle a message about adapters, between two steps."""
        match message:
            case LoadAdapter(name=name, version=version) if not self.versions.versions_max:
                why = "this engine serves no adapters of their own versions"
                self._replies.append(AdapterFailed(name=name, version=version, message=why))
            case LoadAdapter():
                buffer = self._context.buffer
                slots = [int(chunk.location) for chunk in message.chunks]
                loading = _LoadingAdapter(message, {slot: buffer.contents[slot] for slot in slots})
                self._loading.append(loading)
                delay_s = self._copy_s + self._staging.delay_s
                self._context.loop.call_later(delay_s, self._loaded, loading)
            case SwapAdapter():
                self._take_loaded()
                self._swap(message)
            case UnloadAdapter(name=name, version=version):
                self._unload(name, version)

    def _loaded(self, loading: _LoadingAdapter) -> None:
        loading.is_over = True
        self._on_loaded()

    def _take_loaded(self) -> None:
        for loading in [each for each in self._loading if each.is_over]:
            self._loading.remove(loading)
            self._take(loading.request, loading.contents)

    def _take(self, request: LoadAdapter, read: dict[int, int]) -> None:
        name, version = request.name, request.version
        contents = self._context.buffer.contents
        (content,) = read.values()
        if any(contents[slot] != at_start for slot, at_start in read.items()):
            content = TORN_WEIGHTS
        if self._staging.refuses(content):
            why = f"v{version} does not fit: it was meant to be refused"
            self._replies.append(AdapterFailed(name=name, version=version, message=why))
            return
        self.versions.add(
            (name, version), content, is_live=request.is_live, is_staged=request.is_staged
        )
        self._replies.append(AdapterLoaded(name=name, version=version))
        self._admit()

    def _swap(self, swap: SwapAdapter) -> None:
        key = (swap.name, swap.version)
        if not self.versions.is_held(key):
            why = f"adapter {swap.name!r} v{swap.version} is not loaded"
            self._replies.append(AdapterFailed(name=swap.name, version=swap.version, message=why))
            return
        self.versions.swap(key)
        self.release_ended()
        for handle in self._turns.swap_adapter(swap, self._weights(key)):
            self.versions.use(key)
            self.versions.release(self._used[handle])
            self._used[handle] = key
        self.release_ended()  # those that ``abort`` has ended
        self.versions.end_swap(key)
        self._admit()
        self._replies.append(AdapterLive(name=swap.name, version=swap.version))

    def _unload(self, name: str, version: int | None) -> None:
        for handle, message in list(self._waiting.items()):
            sampling = message.sampling
            if sampling.adapter == name and version in (None, sampling.adapter_version):
                del self._waiting[handle]
                self._replies.append(TurnFailed(turn=handle, message=f"no adapter {name!r}"))
        for handle in self._turns.refuse_adapter(name, version):
            self._replies.append(TurnFailed(turn=handle, message=f"no adapter {name!r}"))
        self.release_ended()
        for key in self.versions.versions_of(name):
            if version in (None, key[1]):
                self.versions.remove(key)
        if version is None:
            self.versions.live.pop(name, None)
        self._admit()

    def forget_orchestrator(self) -> None:
        """Drop what only a lost orchestrator knows: versions not made live, and open requests."""
        self._loading.clear()
        self._replies.clear()
        self._waiting.clear()
        self.versions.forget_orchestrator()
