"""Weights of a simulated engine: staging, adapters with versions of their own, and sleep.

A version is copied beside the live weights, in virtual time; the copy is torn if the trainer
overwrites its slot of the buffer meanwhile. The real engine's
:class:`~tidegate.engine.scheduling.adapter_versions.AdapterVersions` decides which adapter versions
are in memory, live and in use.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.engine.scheduling.adapter_versions import AdapterVersions
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.checks.model import TORN_WEIGHTS
from tidegate.simulation.engine.context import SimulationContext, WeightBuffer
from tidegate.simulation.engine.spec import SimulatedEngineSpec
from tidegate.simulation.engine.turns import SimulatedTurns, TurnWeights
from tidegate.transport.messages import (
    AdapterFailed,
    AdapterLive,
    AdapterLoaded,
    AdapterNeeded,
    LoadAdapter,
    Message,
    SubmitTurn,
    SwapAdapter,
    TurnFailed,
    UnloadAdapter,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepRequestFailed,
    Wake,
)

SLEEPING_BYTES = 1 << 30
"""Bytes that each kind of memory reports as returned."""

SUPERSEDED = "given up, for"
"""Text in an engine's answer for a version that a newer version has replaced before staging."""


def check_refusal(why: str) -> None:
    """Check that a reported refusal is a real one, not the answer for a superseded version."""
    assert SUPERSEDED not in why, f"a superseded version was reported as refused: {why}"


@dataclass(slots=True)
class _StagedVersion:
    """Version that an engine copies, or has copied, beside its live weights."""

    version: int
    state: str = "open"
    """Progress of the update: ``open``, ``staged`` or ``failed``."""
    content: int = TORN_WEIGHTS
    slots: dict[int, int] = field(default_factory=dict)
    """Slots that were read, and their contents then."""

    def read(self, slot: int, buffer: WeightBuffer, live_content: int | None) -> None:
        """Apply a slot's whole set, or its patches over what was read before.

        The first patches apply to ``live_content``. Patches over other weights than those they
        were made of leave torn weights.
        """
        base = self.content if self.slots else live_content
        content = self.slots[slot] = buffer.contents[slot]
        is_applicable = slot not in buffer.bases or buffer.bases[slot] == base
        self.content = content if is_applicable else TORN_WEIGHTS


class SimulatedStaging:
    """Weight staging of one engine: the newest started version, and the running copies."""

    def __init__(
        self, context: SimulationContext, spec: SimulatedEngineSpec, on_copied: Callable[[], None]
    ) -> None:
        self._loop = context.loop
        self._buffer = context.buffer
        self._ground_truth = context.ground_truth
        self._staging_s = spec.staging_s
        self._on_copied = on_copied
        self._update: _StagedVersion | None = None
        self._copies_running = 0
        self._replies: list[Message] = []
        self.refusals_due = 0
        """Number of coming weights to refuse, among those that no engine has served yet."""
        self._refused: set[int] = set()
        """Contents of the refused weights, which are refused again under any version."""
        self.delay_s = 0.0
        """Additional time of copies that begin now, in seconds."""

    def __str__(self) -> str:
        update = self._update
        return f"v{update.version} is {update.state}" if update else "nothing"

    @property
    def copy_s(self) -> float:
        """Duration of a copy that begins now, in seconds."""
        return self._staging_s + self.delay_s

    @property
    def is_busy(self) -> bool:
        """Whether a copy is running; weights are not swapped meanwhile."""
        return self._copies_running > 0

    def is_staged(self, version: int) -> bool:
        """Return whether ``version`` is completely staged."""
        update = self._update
        return update is not None and (update.version, update.state) == (version, "staged")

    def start(self, version: int) -> None:
        """Begin a version, and discard the previous one, even if it is staged."""
        previous = self._update
        if previous is not None and previous.state == "open":
            previous.state = "failed"
            if previous.version != version:
                self.fail(previous.version, f"{SUPERSEDED} v{version} was started")
        self._update = _StagedVersion(version)

    def abandon(self) -> None:
        """Discard the version and all pending replies."""
        if self._update is not None:
            self._update.state = "failed"
            self._update = None
        self._replies.clear()

    def copy(self, message: UpdateWeights, live_content: int) -> None:
        """Copy a part of a version, beside the live weights ``live_content``; the reply follows
        when all parts are copied."""
        update, version = self._update, message.version
        if update is None or update.version != version:
            self.fail(version, "was not started")
        elif update.state == "open" and not message.location:
            update.state = "failed"
            self.fail(version, "comes without tensors, which no simulated engine can take")
        elif update.state == "open":
            has_base = message.base_versions is not None
            update.read(int(message.location), self._buffer, live_content if has_base else None)
            if message.is_last:
                self._copies_running += 1
                self._loop.call_later(self.copy_s, self._copied, update)

    def _copied(self, update: _StagedVersion) -> None:
        self._copies_running -= 1
        content, contents = update.content, self._buffer.contents
        if self.refuses(content) and update.state == "open":
            update.state = "failed"
            self.fail(update.version, "does not fit: it was meant to be refused")
        elif update.state == "open":
            update.state = "staged"
            if any(contents[slot] != read for slot, read in update.slots.items()):
                update.content = TORN_WEIGHTS
            self._replies.append(WeightsStaged(version=update.version))
        self._on_copied()

    def refuses(self, content: int) -> bool:
        """Return whether the engine refuses these weights; the same ones are always refused."""
        if self.refusals_due and not self._ground_truth.is_served(content):
            self.refusals_due -= 1
            self._refused.add(content)
        return content in self._refused

    def take(self) -> int:
        """Remove the staged version, and return its content."""
        assert self._update is not None
        content, self._update = self._update.content, None
        return content

    def fail(self, version: int, why: str) -> None:
        """Add a reply that a request for ``version`` has failed."""
        self._replies.append(WeightsFailed(version=version, message=f"v{version} {why}"))

    def take_replies(self) -> list[Message]:
        """Remove and return the replies that are due."""
        answers, self._replies = self._replies, []
        return answers


@dataclass(slots=True)
class _LoadingAdapter:
    request: LoadAdapter
    slot: int
    content: int
    """Content of the slot at the start of the copy."""
    is_over: bool = False


class SimulatedAdapters:
    """Adapter versions of one engine process, and the turns that wait for one."""

    def __init__(
        self,
        engine: str,
        turns: SimulatedTurns,
        staging: SimulatedStaging,
        context: SimulationContext,
        *,
        versions_max: int,
        on_loaded: Callable[[], None],
    ) -> None:
        """``staging``: says how many versions the engine refuses, and how long its copies take."""
        self._engine = engine
        self._turns = turns
        self._staging = staging
        self._context = context
        self._on_loaded = on_loaded
        self.versions = AdapterVersions(versions_max)
        self._loading: list[_LoadingAdapter] = []
        self._waiting: dict[int, SubmitTurn] = {}
        """Handle -> turn whose adapter is not in memory, in the order of arrival."""
        self._used: dict[int, tuple[str, int]] = {}
        """Handle -> version that a waiting or running turn uses."""
        self._replies: list[Message] = []

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
                else:
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
                (chunk,) = message.chunks
                slot = int(chunk.location)
                loading = _LoadingAdapter(message, slot, self._context.buffer.contents[slot])
                self._loading.append(loading)
                self._context.loop.call_later(self._staging.copy_s, self._loaded, loading)
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
            self._take(loading)

    def _take(self, loading: _LoadingAdapter) -> None:
        request = loading.request
        name, version = request.name, request.version
        is_torn = self._context.buffer.contents[loading.slot] != loading.content
        content = TORN_WEIGHTS if is_torn else loading.content
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


class SimulatedSleep:
    """Answers requests to sleep and wake as a real engine does; frees no memory."""

    def __init__(self, turns: SimulatedTurns, staging: SimulatedStaging) -> None:
        self._turns = turns
        self._staging = staging
        self._asleep: set[MemoryTag] = set()
        self._are_weights_gone = False
        self._are_initial_weights = True
        self.needs_weights = False
        """Whether the weights are lost and only a weight update can restore them."""
        self.pending: Sleep | None = None
        """Sleep request that is pending until the engine can sleep; None if there is none."""
        self.refusals_due = 0
        """Number of coming wake requests to refuse for lack of memory."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """Kinds of memory that are asleep, in the order of ``MEMORY_TAGS``."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep]

    def sleep_if_possible(self) -> list[Message]:
        """Carry out the pending sleep request if that is possible now, and return its answer."""
        pending, gate = self.pending, self._turns.gate
        if pending is None:
            return []
        if not gate.is_pause_requested:
            self.pending = None
            return [SleepRequestFailed(request_id=pending.request_id, message="no pause is on")]
        is_quiet = gate.is_pause_in_effect(len(self._turns.running)) and not self._staging.is_busy
        if not is_quiet or gate.is_swap_requested:
            return []
        self.pending = None
        if "kv_cache" in pending.tags:
            self._turns.forget_kv()
        if "weights" in pending.tags:
            self._staging.abandon()
            self._are_weights_gone |= pending.level == 2
        returned = SLEEPING_BYTES * len(set(pending.tags) - self._asleep)
        self._asleep.update(pending.tags)
        self._hold()
        return [Asleep(request_id=pending.request_id, tags=self.asleep, freed_bytes=returned)]

    def wake(self, message: Wake) -> Message:
        """Wake the named kinds of memory, or refuse if a refusal is due; return the answer."""
        if self.refusals_due:
            self.refusals_due -= 1
            why = "out of memory, as its author wants it"
            return SleepRequestFailed(request_id=message.request_id, message=why)
        if "weights" in message.tags and "weights" in self._asleep:
            self.needs_weights = self._are_weights_gone and not self._are_initial_weights
            self._are_weights_gone = False
        self._asleep.difference_update(message.tags)
        self._hold()
        return Awake(
            request_id=message.request_id, tags=self.asleep, needs_weights=self.needs_weights
        )

    def swapped(self) -> None:
        """Record that other weights were swapped in, which wakes the weights' memory."""
        self._asleep.discard("weights")
        self.needs_weights = self._are_weights_gone = self._are_initial_weights = False
        self._hold()

    def _hold(self) -> None:
        self._turns.gate.is_held = bool(self._asleep) or self.needs_weights
