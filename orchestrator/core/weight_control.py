"""Sans-IO state machine of weight updates, pauses and sleep on all engines.

:class:`tidegate.orchestrator.weight_sync.control.EngineControl` feeds :class:`WeightControl` events
(an engine joined, left or replied; a trainer's call; a timer) and carries out its commands (send
messages, resolve a call, set a timer, remove an engine). The state machine does no I/O and reads no
clock. Its state is one :class:`_Engine` per engine, one :class:`WeightUpdate` per version under
way, and one :class:`_Call` per call, with its :class:`Phase`. docs/architecture.md has the tables.

Weights: an engine gets ``init`` once. For each version it gets ``start`` and ``update``, and copies
the tensors beside its live weights while it decodes; after ``finish`` it swaps between two steps.
The version released last stays in the channel's buffer until the next release, for engines that
join late or whose update failed. A partial publish replaces tensors of the newest published version
that has not failed.

Pauses and sleep are states of the run, not counts: the newest request holds, and one resume ends a
pause. Pauses, resumes and swaps run one after another. Engines are paused before they sleep and
resumed after they wake. :class:`WeightControl` holds the pause that all engines should be in and
which engines have confirmed it; each engine's ``PauseGate`` carries the pause out.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from msgspec import Struct

from tidegate.errors import (
    ConfigError,
    EngineLagging,
    PublishDropped,
    SleepFailed,
    TidegateError,
    WeightsRefused,
)
from tidegate.orchestrator.core.weight_content import (
    LAYERS_MAX,
    MODEL_DIRECTORY,
    UNKNOWN,
    Change,
    WeightContent,
    replace_all,
)
from tidegate.transport import sleep_messages
from tidegate.transport.messages import (
    Asleep,
    Awake,
    FinishWeightUpdate,
    InitWeights,
    KvPolicy,
    Message,
    Pause,
    PauseMode,
    Resume,
    StartWeightUpdate,
    TurnsPaused,
    TurnsResumed,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, Sleep, SleepLevel, Wake

NO_VERSION = -1
"""Served version of an engine that has dropped its weights."""

UPDATES_TIMER = -1
"""Id of the timer of all versions under way; every other timer has the id of its call."""

PublishWait = Literal["live", "staged", "none"]
"""When a publish returns.

``live``: all engines serve the version. ``staged``: all engines hold it beside their live weights,
so none can refuse it any more. ``none``: the version is in the channel's buffer, so the trainer may
change its tensors.
"""

UpdatePhase = Literal["staging", "staged", "swapping"]

Outgoing = list[tuple[str, Message]]
"""(engine, message) pairs in sending order."""

ControlReply = (
    WeightsStaged
    | WeightsLive
    | WeightsFailed
    | TurnsPaused
    | TurnsResumed
    | Asleep
    | Awake
    | sleep_messages.SleepRequestFailed
)
"""Messages from engines about weights, pauses and sleep."""

NO_WHOLE_SET = (
    "engines that drop their weights can't get them back, because only parts of a set were "
    "published so far; publish a whole state dict once, or sleep at level 1"
)
NO_WEIGHTS = "it has dropped its weights, and no published weights fit it"
UNKNOWN_BASE = (
    "this run continues with another process's weights, and does not have the weights that a part "
    "of a set or an adapter would be laid over; publish a whole state dict first, or the model "
    "directory's if only adapters are trained"
)


# ---------------------------------------------------------------- events


class EngineMemory(Struct, frozen=True):
    """Sleep state that an engine reports in its hello message."""

    levels: Sequence[int]
    """Sleep levels that the engine supports."""
    asleep: Sequence[MemoryTag]
    """Tags of the memory that sleeps already: ``weights``, ``kv_cache``."""
    needs_weights: bool
    """Whether the engine has dropped its weights."""


class EngineConnected(Struct, frozen=True):
    """An engine joined or reconnected, serving ``version``."""

    engine: str
    version: int
    memory: EngineMemory | None
    """The engine's sleep state; None if the engine has left again."""


class EngineRemoved(Struct, frozen=True):
    """An engine left, or was removed."""

    engine: str


class ControlReplyReceived(Struct, frozen=True):
    """An engine sent a message about weights, pauses or sleep."""

    engine: str
    message: ControlReply


class ReserveRequested(Struct, frozen=True):
    """A publish asks for the channel's buffer. Resolved with :class:`Reserved`."""

    call: int
    next_version: int
    """Number after the newest released version."""
    is_part: bool = False
    """Whether only some tensors, or an adapter, will be written."""
    has_deltas: bool = False
    """Whether unchanged tensors may be omitted."""
    first_bad: int | None = None
    """For a rollback: versions from this one on are bad. Engines are aborted and paused first, and
    stay paused until good weights are live. None for other publishes."""


class PublishRequested(Struct, frozen=True):
    """Weights were written to the reserved buffer. Resolved when ``wait`` is satisfied."""

    call: int
    version: int
    chunks: list[UpdateWeights]
    wait: PublishWait = "live"
    change: Change = replace_all
    """Computes the version's content from the base version's content and the written tensors."""


class ReserveAbandoned(Struct, frozen=True):
    """The reserved buffer is freed without a publish."""


class PauseRequested(Struct, frozen=True):
    """The user pauses all engines with ``mode``, or resumes them (None). Resolved once all have
    confirmed."""

    call: int
    mode: PauseMode | None
    clear_cache: bool = False


class EngineHaltRequested(Struct, frozen=True):
    """The staleness policy aborts and pauses all engines, or ends that pause."""

    call: int
    is_halted: bool


class SleepRequested(Struct, frozen=True):
    """The user puts engines to sleep. Resolved with the freed bytes, summed over engines."""

    call: int
    level: SleepLevel
    tags: Sequence[MemoryTag]
    mode: PauseMode


class WakeRequested(Struct, frozen=True):
    """The user wakes engines; once nothing sleeps, they resume."""

    call: int
    tags: Sequence[MemoryTag]


class CallWoken(Struct, frozen=True):
    """A call continues after :class:`WakeCall`."""

    call: int
    next_version: int


class CallCancelled(Struct, frozen=True):
    """The caller of a call was cancelled."""

    call: int


class TimerFired(Struct, frozen=True):
    """The timer of a call, or of the versions under way (:data:`UPDATES_TIMER`), has expired."""

    timer: int


class VersionsDurable(Struct, frozen=True):
    """The release of a version is committed, so engines may swap. Reply to
    :class:`ReportWhenDurable`."""


class KvPolicyChosen(Struct, frozen=True):
    """The user changed what the next swap does to the KV of kept turns."""

    kv_policy: KvPolicy


Event = (
    EngineConnected
    | EngineRemoved
    | ControlReplyReceived
    | ReserveRequested
    | PublishRequested
    | ReserveAbandoned
    | PauseRequested
    | EngineHaltRequested
    | SleepRequested
    | WakeRequested
    | CallWoken
    | CallCancelled
    | TimerFired
    | VersionsDurable
    | KvPolicyChosen
)


# ---------------------------------------------------------------- commands


class Send(Struct, frozen=True):
    """Send (engine, message) pairs in order, after all messages sent before; the list may be
    empty."""

    outgoing: Outgoing


class Resolve(Struct, frozen=True):
    """End a call with a result, or by raising ``error``."""

    call: int
    value: object = None
    error: TidegateError | None = None


class WakeCall(Struct, frozen=True):
    """A call's condition holds: continue it (:class:`CallWoken`) in the loop's next iteration."""

    call: int


class SetTimer(Struct, frozen=True):
    """Deliver :class:`TimerFired` after ``seconds``; replaces the timer's earlier setting."""

    timer: int
    seconds: float


class StopTimer(Struct, frozen=True):
    """Cancel a timer; harmless if it is not set."""

    timer: int


class ReportWhenDurable(Struct, frozen=True):
    """Deliver :class:`VersionsDurable` once no crash can undo the events handled so far."""


class GiveUp(Struct, frozen=True):
    """Remove an engine that did not reply in time."""

    engine: str
    why: str


class RefuseEngine(Struct, frozen=True):
    """Remove an engine that refused weights that other engines serve, and send it the reason."""

    engine: str
    why: str


class RecordSwap(Struct, frozen=True):
    """Record that an engine serves other weights from now on."""

    engine: str
    message: WeightsLive


class ReleaseVersion(Struct, frozen=True):
    """Every engine has staged a version: it is now the trainer's version."""

    version: int


class RetractVersions(Struct, frozen=True):
    """Discard the groups sampled by versions from ``first_bad`` on."""

    first_bad: int


class SuspendDeadlines(Struct, frozen=True):
    """Stop the clocks of all episodes while engines are paused, or start them again."""

    is_halted: bool


class HoldBatches(Struct, frozen=True):
    """Hold batches while the trainer's version is undecided, or hand them over again.

    Sent after every change that a waiting call may depend on.
    """

    is_held: bool


Command = (
    Send
    | Resolve
    | WakeCall
    | SetTimer
    | StopTimer
    | ReportWhenDurable
    | GiveUp
    | RefuseEngine
    | RecordSwap
    | ReleaseVersion
    | RetractVersions
    | SuspendDeadlines
    | HoldBatches
)


class Reserved(Struct, frozen=True):
    """A publish's version number, and what it may write and must keep in the channel's buffer."""

    version: int
    keep: frozenset[int]
    """Versions whose parts must stay in the buffer."""
    over: int | None
    """Version whose tensors a partial publish replaces; None for a whole set."""
    delta_base_version: int | None
    """Version relative to which unchanged tensors may be omitted; None if all tensors must be
    written."""


# ---------------------------------------------------------------- state


@dataclass(slots=True)
class WeightUpdate:
    """Progress of one version. An engine is in at most one of the sets, of at most one update."""

    version: int
    content: WeightContent
    staging: set[str] = field(default_factory=set)
    """Engines that copy the version's tensors."""
    staged: set[str] = field(default_factory=set)
    """Engines that hold the version beside their live weights and wait for ``finish``."""
    swapping: set[str] = field(default_factory=set)
    """Engines that were sent ``finish`` and have not confirmed."""
    is_released: bool = False
    """Whether engines may swap as soon as they have staged the version."""
    is_withdrawn: bool = False
    """Whether engines may no longer swap to the version; the next ``start`` drops their copy."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Engine -> reason for which it refused the version."""

    @property
    def phases(self) -> dict[UpdatePhase, set[str]]:
        """The three sets by name, in the order in which an engine passes through them."""
        return {"staging": self.staging, "staged": self.staged, "swapping": self.swapping}

    def is_pending_on(self, engine: str) -> bool:
        """Whether this engine stages, holds or swaps to the version."""
        return engine in self.staging or engine in self.staged or engine in self.swapping

    def remove(self, engine: str) -> None:
        """Stop waiting for this engine."""
        for engines in (self.staging, self.staged, self.swapping):
            engines.discard(engine)


class LaggingEngines(Struct, frozen=True):
    """Engines that do not serve a version yet, by the phase of its update."""

    version: int
    phase: UpdatePhase
    engines: tuple[str, ...]

    def __str__(self) -> str:
        return f"v{self.version} is {self.phase} on {', '.join(self.engines)}"


@dataclass(slots=True)
class _Engine:
    """State of one engine."""

    version: int
    """Version that the engine serves, if it has weights."""
    newest_finish: int = NO_VERSION
    """Newest version for which the engine was sent ``finish``; the engine may have swapped without
    having confirmed."""
    levels: Sequence[int] = ()
    """Sleep levels that the engine supports."""
    asleep: set[MemoryTag] = field(default_factory=set)
    level: SleepLevel | None = None
    """Level at which the engine sleeps; None if awake, or if another process put it to sleep."""
    needs_weights: bool = False
    """Whether the engine has dropped its weights, so that only an update can restore them."""
    has_new_weights: bool = False
    """Whether the engine serves weights that it got after its own were put to sleep."""
    request_id: int | None = None
    """Id of the sleep or wake request that the engine has not answered yet."""
    requested_level: SleepLevel | None = None
    freed_bytes: int = 0
    failure: str | None = None
    """Reason for which the last sleep or wake request failed."""
    resumes_due: int = 0
    """Number of unconfirmed resumes. Confirmations of pauses sent before them are outdated."""
    unanswered_starts: list[int] = field(default_factory=list)
    """Versions of the ``start`` messages that the engine has not answered, in sending order."""

    @property
    def served_version(self) -> int:
        """Version that the engine can serve now; NO_VERSION without weights."""
        return NO_VERSION if self.needs_weights else self.version

    @property
    def is_swapping(self) -> bool:
        """Whether the engine may serve a later version than :attr:`version`."""
        return self.newest_finish > self.version

    @property
    def base_version(self) -> int | None:
        """Version that a partial publish can change; None if a whole set is needed."""
        return None if "weights" in self.asleep else self.served_version

    def start_message(self, version: int) -> StartWeightUpdate:
        """Make and count the message that begins a version."""
        if not self.unanswered_starts or self.unanswered_starts[-1] != version:
            self.unanswered_starts.append(version)
        return StartWeightUpdate(version=version)

    def is_outdated(self, version: int) -> bool:
        """Whether a reply belongs to an earlier ``start`` of ``version`` than the newest.

        An engine answers each start once and in order, except that two successive starts of the
        same version have one reply.
        """
        if version in self.unanswered_starts:
            del self.unanswered_starts[: self.unanswered_starts.index(version) + 1]
        return version in self.unanswered_starts


class Phase(Enum):
    """The condition that a call waits for."""

    RESERVE = auto()
    """The channel's buffer is free to be reserved."""
    DRAIN = auto()
    """No engine reads the buffer that is about to be overwritten."""
    ENGINE_UPDATES = auto()
    """Engines have staged the published version, or serve it."""
    PAUSE_TURN = auto()
    """Earlier pauses and resumes are over."""
    SWAPS_DONE = auto()
    """No engine is swapping."""
    PAUSE_REPLIES = auto()
    """Every engine has confirmed the pause, or the resume."""
    SLEEP_TURN = auto()
    """Earlier sleeps and wakes are over."""
    UPDATES_DONE = auto()
    """For a sleep: no version is under way or being written."""
    SLEEP_REPLIES = auto()
    """Every engine sleeps as requested, or has failed."""
    WAKE_REPLIES = auto()
    """Every engine is awake as requested, or has failed."""
    WEIGHTS_RESTORED = auto()
    """Every engine that woke without weights has some, or no update of it is under way."""


@dataclass(slots=True, eq=False)
class _Call:
    """A trainer's call that has not ended."""

    request: (
        ReserveRequested
        | PublishRequested
        | PauseRequested
        | EngineHaltRequested
        | SleepRequested
        | WakeRequested
    )
    phase: Phase
    mode: PauseMode | None = None
    """Pause mode to apply; None to resume."""
    clear_cache: bool = False
    version: int = -1
    """For a reserve or publish: its version's number."""
    is_resolved: bool = False
    """Whether the caller has returned or is gone while the call goes on: a publish whose version is
    still under way, or the end of a rollback."""
    is_live: bool = False
    """For a publish after a rollback: whether its version is live, and engines may resume."""
    bad_before: int | None = None
    """For a rollback: the newest version that an earlier rollback took back, if no good version is
    live yet."""
    is_woken: bool = False
    """Whether the caller was told to continue the call, and has not yet."""
    is_late: bool = False
    """Whether the call's timer has expired."""

    @property
    def call_id(self) -> int:
        """Id that the caller gave the call."""
        return self.request.call


@dataclass(slots=True)
class _CallQueue:
    """Runs calls of one kind one after another: pauses and resumes, or sleeps and wakes."""

    current: int | None = None
    """Id of the call whose turn it is."""
    waiting: deque[int] = field(default_factory=deque)

    def enter(self, call_id: int) -> bool:
        """Return whether the call may begin now; otherwise queue it."""
        if self.current is None and not self.waiting:
            return True
        self.waiting.append(call_id)
        return False

    def begin(self, call_id: int) -> None:
        """Begin a call that :meth:`enter` admitted, or that was woken from the queue."""
        self.current = call_id
        if call_id in self.waiting:
            self.waiting.remove(call_id)

    def leave(self, call_id: int) -> list["Command"]:
        """Remove a call that ends or is cancelled; return the command that wakes the next call."""
        if call_id in self.waiting:
            self.waiting.remove(call_id)
        if call_id == self.current:
            self.current = None
        return [WakeCall(self.waiting[0])] if self.current is None and self.waiting else []


class WeightControl:
    """Requested weights, pause and sleep of all engines. The state changes only through
    :meth:`handle`."""

    def __init__(
        self,
        init: InitWeights,
        *,
        pause_mode: PauseMode,
        kv_policy: KvPolicy,
        wave_engines: int | None = None,
        weight_update_timeout_s: float = 60.0,
        pause_timeout_s: float = 60.0,
    ) -> None:
        """``wave_engines``: number of engines that swap at a time; None for all at once.
        ``weight_update_timeout_s``: time limit of a version, a sleep or a wake;
        ``pause_timeout_s``: of a pause or resume."""
        self._init = init
        self._wave_engines = wave_engines
        self._swap_mode: PauseMode = pause_mode
        self.kv_policy: KvPolicy = kv_policy
        """What the next swap does to the KV of kept turns."""
        self._weights_timeout_s = weight_update_timeout_s
        self._pause_timeout_s = pause_timeout_s
        self._out: list[Command] = []
        self._engines: dict[str, _Engine] = {}
        """Engines by name, in the order in which they joined."""
        self._calls: dict[int, _Call] = {}
        self._waiting: dict[int, None] = {}
        """Calls whose condition does not hold yet, in the order in which they began to wait."""
        # -------- versions
        self.update: WeightUpdate | None = None
        """Update of the newest published version; None before the first publish."""
        self._kept: WeightUpdate | None = None
        """Newest version released; the channel's buffer still holds its tensors."""
        self._base: WeightUpdate | None = None
        """Version whose tensors a partial publish replaces; None for the model directory's."""
        self.is_reserved = False
        """Whether the buffer is reserved for a new version, or engines are being put to sleep."""
        self.newest_version = -1
        """Newest version released by this process, which engines may serve; -1 before the first."""
        self._assigned_version = -1
        """Newest number that was given to a publish and may never be released."""
        self._is_updates_timer_set = False
        self.failure: TidegateError | None = None
        """Error of a publish whose caller had returned already, until another call raises it."""
        # -------- pauses
        self.pause_mode: PauseMode | None = None
        """Mode of the last pause sent to engines; None after a resume."""
        self._clears_cache = False
        self._users_mode: PauseMode | None = None
        self._sleeping_mode: PauseMode | None = None
        """Mode in which engines were paused for a sleep; None once they are to be awake."""
        self._is_policy_halted = False
        """Whether the staleness policy pauses the engines."""
        self._bad_until: int | None = None
        """Newest version that is taken back: engines are paused until a newer one is live. None if
        they serve good weights."""
        self._pauses = _CallQueue()
        """Pauses and resumes; no ``finish`` is sent while one is under way."""
        self._unsettled_pauses: set[str] = set()
        """Engines that have not confirmed the last pause or resume."""
        # -------- sleep
        self._sleep_tags: set[MemoryTag] = set()
        """Memory that is to sleep on every engine."""
        self.sleep_level: SleepLevel = 1
        """Level at which the memory sleeps."""
        self._sleeps = _CallQueue()
        """Queue of calls to sleep and to wake."""
        self._slept_version = -1
        """Newest version released when engines were put to sleep: later ones replace
        their weights."""
        self._sleep_requests = 0
        """Number of sleep and wake messages so far."""

    def handle(self, event: Event) -> list[Command]:
        """Apply one event and return the commands that follow from it, in order."""
        match event:
            case ControlReplyReceived(engine=engine, message=message):
                self._on_reply(engine, message)
            case EngineConnected():
                self._on_connected(event)
            case EngineRemoved(engine=engine):
                self._on_removed(engine)
            case CallWoken(call=call, next_version=next_version):
                self._continue_call(call, next_version)
            case ReserveRequested():
                self._on_reserve(event)
            case PublishRequested():
                self._on_publish(event)
            case ReserveAbandoned():
                self._unreserve()
            case PauseRequested(call=call, mode=mode):
                self._users_mode = mode
                self._request_pause(_Call(event, Phase.PAUSE_TURN, clear_cache=event.clear_cache))
            case EngineHaltRequested(call=call, is_halted=is_halted):
                self._is_policy_halted = is_halted
                self._request_pause(_Call(event, Phase.PAUSE_TURN))
            case SleepRequested() | WakeRequested():
                self._on_sleep_or_wake(event)
            case CallCancelled(call=call):
                self._on_cancelled(call)
            case TimerFired(timer=timer):
                self._on_timer(timer)
            case VersionsDurable():
                self._swap()
            case KvPolicyChosen(kv_policy=kv_policy):
                self.kv_policy = kv_policy
        return self._commands()

    def _commands(self) -> list[Command]:
        """Take the commands, and continue woken calls whose callers are gone."""
        commands: list[Command] = []
        while self._out:
            taken, self._out = self._out, []
            for command in taken:
                call = self._calls.get(command.call) if isinstance(command, WakeCall) else None
                if call is not None and call.is_resolved:
                    self._continue_call(call.call_id)
                    continue
                if call is not None:
                    call.is_woken = True
                commands.append(command)
        return commands

    # ------------------------------------------------------------ queries

    @property
    def asleep(self) -> tuple[MemoryTag, ...]:
        """Memory that sleeps on all engines, or is about to sleep."""
        return tuple(_in_order(self._sleep_tags))

    @property
    def is_pausing(self) -> bool:
        """Whether engines are paused, or a pause or resume is under way."""
        return self.pause_mode is not None or self._pauses.current is not None

    @property
    def staging_version(self) -> int | None:
        """Newest version published, while some engine has not staged it; else None."""
        return self.update.version if self.update is not None and self.is_undecided else None

    @property
    def kept_buffers(self) -> frozenset[int]:
        """Buffers of the weight channel that hold the version released last, named by the versions
        that were written to them."""
        kept = self._kept
        return frozenset() if kept is None else frozenset({kept.version} | kept.content.buffers)

    @property
    def base_version(self) -> int:
        """Version whose tensors a partial publish would replace now; 0 for the model
        directory's."""
        return self._base.version if self._base is not None else 0

    @property
    def base_adapters(self) -> Collection[str]:
        """Names of the adapters of :attr:`base_version`."""
        return self._base.content.adapters if self._base is not None else ()

    def knows_base(self, next_version: int) -> bool:
        """Whether :attr:`base_version` is the model directory's weights or was published by this
        process. False after a resume with another process's weights."""
        return self.newest_version >= 0 or next_version <= 1

    @property
    def is_writable(self) -> bool:
        """Whether no engine reads a buffer that may be overwritten. Readers of the kept version
        are not waited for, because the next version replaces theirs."""
        update = self.update
        return update is None or update is self._kept or not update.staging

    @property
    def is_undecided(self) -> bool:
        """Whether the newest version is being staged, so that it may still be abandoned."""
        update = self.update
        return update is not None and not update.is_released and not update.is_withdrawn

    @property
    def is_settled(self) -> bool:
        """Whether no version is under way."""
        return not any(u.staging or u.staged or u.swapping for u in self._updates)

    @property
    def is_swapping(self) -> bool:
        """Whether an engine was sent ``finish`` and has not confirmed the swap."""
        return any(update.swapping for update in self._updates)

    @property
    def lagging_engines(self) -> list[LaggingEngines]:
        """Engines that do not serve a version under way yet, by version and phase."""
        return [
            LaggingEngines(update.version, phase, tuple(sorted(engines)))
            for update in self._updates
            for phase, engines in update.phases.items()
            if engines
        ]

    def take_failure(self) -> TidegateError | None:
        """Return and clear the error of a publish whose caller had returned."""
        failure, self.failure = self.failure, None
        return failure

    @property
    def _updates(self) -> list[WeightUpdate]:
        """The newest published and the newest released version, once if they are the same."""
        kept = None if self._kept is self.update else self._kept
        return [update for update in (self.update, kept) if update is not None]

    @property
    def _publishes(self) -> list[_Call]:
        """Publish calls that are not over, in the order in which they began."""
        calls = self._calls.values()
        return [call for call in calls if call.phase is Phase.ENGINE_UPDATES and not call.is_live]

    @property
    def _swaps_available(self) -> int:
        """Number of further engines that may swap now."""
        if self._wave_engines is None:
            return len(self._engines)
        return self._wave_engines - sum(len(update.swapping) for update in self._updates)

    def _update_of(self, version: int) -> WeightUpdate | None:
        return next((update for update in self._updates if update.version == version), None)

    def _is_updating(self, engine: str) -> bool:
        return any(update.is_pending_on(engine) for update in self._updates)

    def may_leave(self, engine: str) -> bool:
        """Whether an engine is in no version, pause or sleep, so that it can leave and rejoin."""
        is_quiet = not (self.is_pausing or self.asleep)
        return engine in self._engines and is_quiet and not self._is_updating(engine)

    # ------------------------------------------------------------ calls

    def _begin(self, call: _Call) -> _Call:
        self._calls[call.call_id] = call
        return call

    def _wait(self, call: _Call, timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            self._set_timer(call.call_id, timeout_s)
        self._waiting[call.call_id] = None

    def _stop_waiting(self, call: _Call) -> bool:
        """Stop a call's timer; return whether it has expired."""
        self._stop_timer(call.call_id)
        is_late, call.is_late = call.is_late, False
        return is_late

    def _end(self, call: _Call, value: object = None, error: TidegateError | None = None) -> None:
        del self._calls[call.call_id]
        if not call.is_resolved:
            self._out.append(Resolve(call.call_id, value, error))
        elif error is not None:
            self.failure = error

    def _is_ready(self, call: _Call) -> bool:
        match call.phase:
            case Phase.RESERVE:
                return not self.is_reserved
            case Phase.DRAIN:
                return self.is_writable
            case Phase.SWAPS_DONE:
                return not self.is_swapping
            case Phase.PAUSE_REPLIES:
                return not self._unsettled_pauses
            case Phase.UPDATES_DONE:
                return self.is_settled and not self.is_reserved
            case Phase.SLEEP_REPLIES | Phase.WAKE_REPLIES:
                return not self._unsettled_sleepers
            case Phase.WEIGHTS_RESTORED:
                return bool(self._engines_without_update) or not self._engines_without_weights
            case Phase.ENGINE_UPDATES | Phase.PAUSE_TURN | Phase.SLEEP_TURN:
                return False  # the end of another call or update continues the call

    def _continue_call(self, call_id: int, next_version: int = 0) -> None:
        call = self._calls.get(call_id)
        if call is None:
            return
        call.is_woken = False
        match call.phase:
            case Phase.RESERVE if self.is_reserved:
                self._wait(call)  # another call was woken first
            case Phase.RESERVE:
                self._reserve(call, next_version)
            case Phase.DRAIN:
                self._end_drain(call)
            case Phase.PAUSE_TURN:
                self._begin_pause(call)
            case Phase.SWAPS_DONE:
                self._send_pause(call)
            case Phase.PAUSE_REPLIES:
                self._end_pause(call)
            case Phase.SLEEP_TURN:
                self._begin_sleep(call)
            case Phase.UPDATES_DONE:
                self._sleep_once_settled(call)
            case Phase.SLEEP_REPLIES | Phase.WAKE_REPLIES:
                self._end_requests(call)
            case Phase.WEIGHTS_RESTORED:
                self._end_restore(call)
            case Phase.ENGINE_UPDATES if call.is_live:
                self._bad_until = None
                self._request_pause(call)
            case Phase.ENGINE_UPDATES:
                pass

    def _on_cancelled(self, call_id: int) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.is_live:
            call.is_resolved = True  # engines resume without the caller
            if call.is_woken:
                self._continue_call(call_id)
            return
        if call is None:
            return
        del self._calls[call_id]
        self._waiting.pop(call_id, None)
        self._stop_timer(call_id)
        match call.phase:
            case Phase.DRAIN:
                self._unreserve()
            case Phase.ENGINE_UPDATES:
                self._cancel_publish(call)
            case Phase.PAUSE_TURN | Phase.SWAPS_DONE | Phase.PAUSE_REPLIES:
                self._out += self._pauses.leave(call_id)
                self._advance()
                if isinstance(call.request, ReserveRequested):  # no version was taken back yet
                    self._bad_until = call.bad_before
                    resume = EngineHaltRequested(call_id, self._is_policy_halted)
                    self._request_pause(_Call(resume, Phase.PAUSE_TURN, is_resolved=True))
            case Phase.SLEEP_REPLIES:
                self.is_reserved = False
                self._advance_weights()
            case _:
                pass
        if isinstance(call.request, SleepRequested | WakeRequested):
            self._out += self._sleeps.leave(call_id)

    def _on_timer(self, timer: int) -> None:
        if timer == UPDATES_TIMER:
            self._on_update_timeout()
        elif timer in self._waiting:
            self._calls[timer].is_late = True
            del self._waiting[timer]
            self._out.append(WakeCall(timer))

    def _set_timer(self, timer: int, seconds: float) -> None:
        self._out.append(SetTimer(timer, seconds))

    def _stop_timer(self, timer: int) -> None:
        self._out.append(StopTimer(timer))

    # ------------------------------------------------------------ commands that are due

    def _advance(self, only: str | None = None) -> None:
        """Send everything that is due; ``only``: the only engine whose state has changed."""
        self._request_sleeps(only)
        self._advance_weights()  # also wakes calls whose condition holds now

    def _advance_weights(self) -> None:
        update = self.update
        if update is not None and self.is_undecided and not update.staging:
            refusal = next(iter(update.refusals.items()), None)
            if refusal is not None:
                engine, why = refusal
                error = f"engine {engine!r} refused weights v{update.version}: {why}"
                self._fail(WeightsRefused(error))
            else:
                self._release(update)
        if self._is_swap_due and self._pauses.current is None:
            # A crash before the commit would forget the version, and its number would be given to
            # other weights.
            self._out.append(ReportWhenDurable())
        if self.is_settled and not self.is_undecided:
            self._settle()
        self._wake_ready_calls()

    def _wake_ready_calls(self) -> None:
        """Hold or release batches, and wake the calls whose condition holds now."""
        self._out.append(HoldBatches(self.is_reserved or self.is_undecided))
        for call_id in [each for each in self._waiting if self._is_ready(self._calls[each])]:
            del self._waiting[call_id]
            self._out.append(WakeCall(call_id))

    def _send(self, outgoing: Outgoing) -> None:
        self._out.append(Send(outgoing))

    # ------------------------------------------------------------ engines

    def _on_connected(self, event: EngineConnected) -> None:
        name, memory = event.engine, event.memory
        self._remove(name)
        engine = self._engines[name] = _Engine(event.version)
        if memory is not None:
            engine.levels, engine.asleep = memory.levels, set(memory.asleep)
            engine.needs_weights = memory.needs_weights
        outgoing: Outgoing = []
        if self.pause_mode is not None:  # it must be paused before it gets turns
            self._unsettled_pauses.add(name)
            outgoing += self._pause_messages(name)
        for update in self._updates:
            update.refusals.pop(name, None)  # a restarted engine may accept it
        outgoing.append((name, self._init))
        self._send([*outgoing, *self._catch_up()])
        self._advance(name)

    def _on_removed(self, engine: str) -> None:
        if engine in self._engines:  # else this state machine had it removed
            self._remove(engine)
            self._advance(engine)

    def _remove(self, engine: str) -> None:
        self._engines.pop(engine, None)
        self._unsettled_pauses.discard(engine)
        for update in self._updates:
            update.remove(engine)
        self._forget_weights_target()

    def _give_up(self, engines: Iterable[str], why: str) -> None:
        for engine in engines:
            self._on_removed(engine)
            self._out.append(GiveUp(engine, why))

    def _on_reply(self, name: str, message: ControlReply) -> None:
        match message:
            case WeightsStaged(version=version):
                self._on_staged(name, version)
            case WeightsLive():
                self._on_live(name, message)
            case WeightsFailed(version=version, message=why):
                if self._on_refused(name, version, why):
                    self._on_removed(name)
                    self._out.append(RefuseEngine(name, why))
            case TurnsPaused() | TurnsResumed():
                self._on_paused(name, message)
            case Asleep() | Awake() | sleep_messages.SleepRequestFailed():
                self._on_slept(name, message)
        engine = self._engines.get(name)
        if engine is None or not (engine.needs_weights and self._is_publish_expected):
            self._send(self._catch_up(name))
        self._advance(name)

    @property
    def _is_publish_expected(self) -> bool:
        """Whether engines without weights wait for the trainer's next publish: from their sleep
        until all memory is to be awake."""
        if self._sleeping_mode is None:
            return False
        current = self._sleeps.current
        call = None if current is None else self._calls.get(current)
        return call is None or call.phase is not Phase.WEIGHTS_RESTORED

    # ------------------------------------------------------------ versions: publishing

    def _on_reserve(self, event: ReserveRequested) -> None:
        call = self._begin(_Call(event, Phase.RESERVE))
        if event.is_part and not self.knows_base(event.next_version):
            self._end(call, error=WeightsRefused(UNKNOWN_BASE))
        elif (failure := self.take_failure()) is not None:
            self._end(call, error=failure)
        elif event.first_bad is not None:
            # Paused before, so that no turn continues from KV that bad weights computed.
            call.bad_before, self._bad_until = self._bad_until, self._newest_assigned
            self._request_pause(call)
        elif self.is_reserved:  # another version is being written
            self._wait(call)
        else:
            self._reserve(call, event.next_version)

    @property
    def _newest_assigned(self) -> int:
        """Newest number in use. A version that was given up leaves its number to the next one."""
        coming = self.update.version if self.is_undecided and self.update is not None else 0
        return max(coming, self.newest_version, self._assigned_version)

    def _reserve(self, call: _Call, next_version: int) -> None:
        """Reserve the buffer for the next version, and abandon a version still being staged."""
        self.is_reserved = True
        if self.is_undecided and self.update is not None:
            self._assigned_version = self.update.version
            self._stop_updates_timer()
        call.version = max(next_version, self._assigned_version + 1)
        self._send(self._supersede(call.version))
        self._wake_ready_calls()
        call.phase = Phase.DRAIN
        if self.is_writable:
            self._end_drain(call)
        else:
            self._wait(call, self._weights_timeout_s)

    def _end_drain(self, call: _Call) -> None:
        if not self._stop_waiting(call):
            assert isinstance(call.request, ReserveRequested)
            self._end(call, self._reserved(call.version, call.request))
            return
        assert self.update is not None
        error = self._lagging(sorted(self.update.staging))
        self._unreserve()
        self._give_up(error.engines, str(error))
        self._end(call, error=error)

    def _reserved(self, version: int, request: ReserveRequested) -> Reserved:
        before, keep, delta_base_version = self._base, self.kept_buffers, None
        if request.has_deltas:
            layers = len({part.version for part in before.content.overlays}) if before else 0
            has_room = before is None or before.content.has_room_for_patches
            delta_base_version = self.base_version if layers < LAYERS_MAX and has_room else UNKNOWN
        # A whole set keeps the adapters of before.
        needs_before = request.is_part or delta_base_version is not None or self.base_adapters
        if needs_before and before is not None:
            keep |= before.content.buffers
        return Reserved(
            version, keep, self.base_version if request.is_part else None, delta_base_version
        )

    def _supersede(self, version: int) -> Outgoing:
        """Abandon an unreleased version, because version ``version`` is about to be written.

        ``start`` of the new version stops the engines that copy the old version. Each such engine
        replies that it failed, or that it had staged the old version. If both versions have the
        same number, their replies look alike, so the old version's copies must end first.
        """
        update, before = self.update, self._base
        if update is None or update.is_released:
            return []
        self._withdraw()
        self._base = before  # it has not failed, so the newer version contains its tensors
        if update.version == version:
            return []
        return [(e, self._engines[e].start_message(version)) for e in sorted(update.staging)]

    def _unreserve(self) -> None:
        """Free the reserved buffer; a version that was abandoned for it stays abandoned."""
        self.is_reserved = False
        if self.update is not None and self.update.is_withdrawn:
            self._base = self._kept
        if not self.is_undecided:
            for call in [c for c in self._publishes if c.version > self.newest_version]:
                self._end_publish(call, PublishDropped(version=call.version))
        self._send(self._catch_up())
        self._wake_ready_calls()

    def _on_publish(self, event: PublishRequested) -> None:
        """Have all engines that do not serve the version stage it, in place of older versions.

        Engines may serve the version already if a resumed run publishes it again.
        """
        call = self._begin(_Call(event, Phase.ENGINE_UPDATES, version=event.version))
        self.is_reserved = False
        before = self._base
        content = MODEL_DIRECTORY if before is None else before.content
        if before is not None and before.is_released:
            content = content.served_as(before.version)
        update = WeightUpdate(event.version, event.change(content, event.chunks))
        self.update = self._base = update
        behind = [
            name for name, engine in self._engines.items() if engine.served_version != event.version
        ]
        self._send([message for name in behind for message in self._stage(name, update)])
        if event.wait == "none":
            self._assigned_version = event.version
            self._resolve_publish(call)
        self._set_updates_timer()
        self._advance_weights()

    def _resolve_publish(self, call: _Call) -> None:
        """Return to a publish's caller while the version is still under way."""
        if not call.is_resolved:
            call.is_resolved = True
            self._out.append(Resolve(call.call_id))

    def _end_publish(self, call: _Call, error: TidegateError | None) -> None:
        content = None if self._kept is None else self._kept.content
        is_good = content is not None and content.whole_version > (self._bad_until or 0)
        if self._bad_until is not None and is_good and error is None:
            call.is_live = True
            self._out.append(WakeCall(call.call_id))
        else:
            self._end(call, error=error)

    def _cancel_publish(self, call: _Call) -> None:
        """Abandon the version of a cancelled publish, unless it is released or an earlier publish
        waits for it."""
        if call.version <= self.newest_version:
            return
        is_newest = self.update is not None and self.update.version == call.version
        if is_newest and not any(c.version > self.newest_version for c in self._publishes):
            self._withdraw()
            self._stop_updates_timer()
            self._send(self._catch_up())
            self._wake_ready_calls()
        else:
            self._assigned_version = max(self._assigned_version, call.version)

    def _withdraw(self) -> None:
        """Keep engines from swapping to the newest version, unless it is released."""
        if self.update is not None and not self.update.is_released:
            self.update.is_withdrawn = True
            self.update.staged.clear()
        self._base = self._kept

    def _fail(self, error: TidegateError) -> None:
        """Fail the publish of the newest version; unless it was released, no engine swaps to it."""
        is_released = self.update is not None and self.update.is_released
        self._withdraw()
        self._stop_updates_timer()
        for call in [c for c in self._publishes if is_released or c.version > self.newest_version]:
            self._end_publish(call, error)
        self._send(self._catch_up())

    def _release(self, update: WeightUpdate) -> None:
        """Make a version that all engines have staged the trainer's version."""
        self.newest_version = update.version
        self._out.append(ReleaseVersion(update.version))
        update.is_released = True
        self._kept = update
        for call in self._publishes:
            is_enough = isinstance(call.request, PublishRequested) and call.request.wait == "staged"
            if is_enough and call.version <= update.version:
                self._resolve_publish(call)

    def _settle(self) -> None:
        self._stop_updates_timer()
        for call in [c for c in self._publishes if c.version <= self.newest_version]:
            self._end_publish(call, None)

    def _set_updates_timer(self) -> None:
        self._is_updates_timer_set = True
        self._set_timer(UPDATES_TIMER, self._weights_timeout_s)

    def _stop_updates_timer(self) -> None:
        if self._is_updates_timer_set:
            self._is_updates_timer_set = False
            self._stop_timer(UPDATES_TIMER)

    def _on_update_timeout(self) -> None:
        self._is_updates_timer_set = False
        # Engines that have staged a version wait for others, or for the order to swap.
        late_engines = sorted({engine for u in self._updates for engine in u.staging | u.swapping})
        if not late_engines:
            self._set_updates_timer()  # a journal commit or a pause delays the version
            return
        error = self._lagging(late_engines)
        self._fail(error)
        self._give_up(error.engines, str(error))
        if not self.is_settled:
            self._set_updates_timer()  # engines of later waves have not swapped yet
        self._wake_ready_calls()

    def _lagging(self, engines: list[str]) -> EngineLagging:
        return EngineLagging(
            engines=engines,
            wanted_version=self.update.version if self.update else 0,
            waited_s=self._weights_timeout_s,
            where="; ".join(map(str, self.lagging_engines)),
        )

    # ------------------------------------------------------------ versions: engines

    def _catch_up(self, engine: str | None = None) -> Outgoing:
        """Have engines that lack the newest version, and stage no other, stage it.

        Such engines joined late, or dropped their copy for a publish that failed. ``engine``
        restricts this to one engine.
        """
        target = self._kept
        if self.update is not None and not self.update.is_withdrawn:
            target = self.update
        if target is None:
            return []
        names = list(self._engines) if engine is None else [engine]
        return [
            message
            for name in names
            if name in self._engines
            and self._engines[name].served_version != target.version
            and name not in target.refusals
            and not self._is_updating(name)
            for message in self._stage(name, target)
        ]

    def _stage(self, name: str, update: WeightUpdate) -> Outgoing:
        for other in self._updates:
            other.remove(name)
        update.staging.add(name)
        engine = self._engines[name]
        chunks = update.content.messages(
            update.version, live=engine.base_version, is_swapping=engine.is_swapping
        )
        return [(name, engine.start_message(update.version)), *((name, chunk) for chunk in chunks)]

    def _on_staged(self, name: str, version: int) -> None:
        engine, update = self._engines.get(name), self._update_of(version)
        if engine is None or engine.is_outdated(version):
            return
        if update is not None and name in update.staging:
            update.staging.discard(name)
            if not update.is_withdrawn:
                update.staged.add(name)

    def _on_live(self, name: str, message: WeightsLive) -> None:
        engine, update = self._engines.get(name), self._update_of(message.version)
        if engine is not None:
            engine.version = message.version
            engine.needs_weights = False
            engine.asleep.discard("weights")
            engine.has_new_weights |= message.version > self._slept_version
            self._forget_weights_target()
        if update is not None:
            update.remove(name)
        self._out.append(RecordSwap(name, message))

    def _on_refused(self, name: str, version: int, why: str) -> bool:
        """Record that an engine refused a version, and still serves the old one.

        Returns whether the version is released, so that the engine must leave the run.
        """
        engine, update = self._engines.get(name), self._update_of(version)
        if engine is None or engine.is_outdated(version):
            return False
        if update is None or not update.is_pending_on(name):
            return False  # abandoned for a newer version, or started twice and swapped already
        update.remove(name)
        update.refusals[name] = why
        return update.is_released

    @property
    def _is_swap_due(self) -> bool:
        return self._swaps_available > 0 and any(u.is_released and u.staged for u in self._updates)

    def _swap(self) -> None:
        """Send ``finish`` to engines that have staged a released version, once each.

        With ``wave_engines``, each engine that has swapped lets the next one swap.
        """
        if self._pauses.current is not None:
            return  # a pause has begun since; its end calls this function again
        outgoing: Outgoing = []
        for update in self._updates:
            if not update.is_released:
                continue
            finish = FinishWeightUpdate(
                version=update.version, pause_mode=self._swap_mode, kv_policy=self.kv_policy
            )
            wave = sorted(update.staged)[: max(0, self._swaps_available)]
            outgoing += [(engine, finish) for engine in wave]
            for engine in wave:
                self._engines[engine].newest_finish = update.version
            update.swapping.update(wave)
            update.staged.difference_update(wave)
        if outgoing:
            self._send(outgoing)
            if self._wave_engines is not None and self._is_updates_timer_set:
                self._set_updates_timer()  # each wave has the whole time limit

    # ------------------------------------------------------------ pauses

    def _request_pause(self, call: _Call) -> None:
        """Queue a pause or resume.

        The pause of a rollback or of the policy has precedence, then a sleep's, then the user's.
        """
        if call.call_id not in self._calls:
            self._begin(call)
        is_halted = self._is_policy_halted or self._bad_until is not None
        call.mode = "abort" if is_halted else self._sleeping_mode or self._users_mode
        call.phase = Phase.PAUSE_TURN
        if self._pauses.enter(call.call_id):
            self._begin_pause(call)

    def _begin_pause(self, call: _Call) -> None:
        self._pauses.begin(call.call_id)
        call.phase = Phase.SWAPS_DONE
        if self.is_swapping:
            self._wait(call)
        else:
            self._send_pause(call)

    def _send_pause(self, call: _Call) -> None:
        call.phase = Phase.PAUSE_REPLIES
        if call.mode is None and self.pause_mode is None:
            self._end_pause(call)
            return
        self.pause_mode, self._clears_cache = call.mode, call.clear_cache
        self._out.append(SuspendDeadlines(call.mode is not None))
        self._unsettled_pauses = set(self._engines)
        self._send(
            [message for name in sorted(self._engines) for message in self._pause_messages(name)]
        )
        if not self._unsettled_pauses:
            self._end_pause(call)
            return
        # Mode "wait" takes as long as the longest turn.
        self._wait(call, None if call.mode == "wait" else self._pause_timeout_s)

    def _pause_messages(self, name: str) -> Outgoing:
        if self.pause_mode is not None:
            return [(name, Pause(mode=self.pause_mode, clear_cache=self._clears_cache))]
        self._engines[name].resumes_due += 1
        return [(name, Resume())]

    def _on_paused(self, name: str, message: TurnsPaused | TurnsResumed) -> None:
        engine = self._engines.get(name)
        if engine is None:
            return
        if isinstance(message, TurnsPaused):
            if message.mode == self.pause_mode and not engine.resumes_due:
                self._unsettled_pauses.discard(name)
        elif engine.resumes_due:
            engine.resumes_due -= 1
            if self.pause_mode is None and not engine.resumes_due:
                self._unsettled_pauses.discard(name)

    def _end_pause(self, call: _Call) -> None:
        """End a pause or resume: all engines have confirmed it, or late ones are removed."""
        if self._stop_waiting(call):
            state = "resumed" if call.mode is None else f"paused by mode {call.mode!r}"
            why = f"it has not {state} within {self._pause_timeout_s:.0f} s"
            self._give_up(sorted(self._unsettled_pauses), why)
        self._out += self._pauses.leave(call.call_id)
        self._advance()  # swaps may have waited for the pause
        match call.request:
            case SleepRequested():
                call.phase = Phase.UPDATES_DONE
                self._sleep_once_settled(call)
            case ReserveRequested(first_bad=first_bad) if first_bad is not None:
                call.phase = Phase.RESERVE
                self._bad_until = self._newest_assigned
                self._out += [RetractVersions(first_bad), WakeCall(call.call_id)]
            case WakeRequested():
                self._end_sleep_call(call)
            case _:
                self._end(call)

    # ------------------------------------------------------------ sleep: calls

    def _on_sleep_or_wake(self, event: SleepRequested | WakeRequested) -> None:
        call = self._begin(_Call(event, Phase.SLEEP_TURN))
        if isinstance(event, SleepRequested) and (why := self._sleep_refusal(event)) is not None:
            self._end(call, error=ConfigError(why))
        elif self._sleeps.enter(event.call):
            self._begin_sleep(call)

    def _sleep_refusal(self, event: SleepRequested) -> str | None:
        """Return why engines can't sleep as requested; None if they can."""
        level = event.level
        unable = sorted(n for n, engine in self._engines.items() if level not in engine.levels)
        if unable:
            return (
                f"{', '.join(unable)} can't sleep at level {level}. Tidegate's own engines can, "
                f"vLLM with --enable-sleep-mode, SGLang with --enable-memory-saver (level 1: and "
                f"--enable-weights-cpu-backup); else pause()"
            )
        has_whole = self._kept is None or self._kept.content.whole is not None
        return None if has_whole or level == 1 or "weights" not in event.tags else NO_WHOLE_SET

    def _begin_sleep(self, call: _Call) -> None:
        self._sleeps.begin(call.call_id)
        if isinstance(call.request, SleepRequested):
            self._sleeping_mode = call.request.mode
            self._request_pause(call)
            return
        assert isinstance(call.request, WakeRequested)
        self._sleep_tags -= set(call.request.tags)
        self._send_requests(call, Phase.WAKE_REPLIES)

    def _sleep_once_settled(self, call: _Call) -> None:
        """Put the paused engines to sleep, once no weights are under way."""
        request = call.request
        assert isinstance(request, SleepRequested)
        if self.is_reserved or not self.is_settled:
            self._wait(call)
            return
        self.is_reserved = True  # no publish begins meanwhile
        self._slept_version = self.newest_version
        is_deeper = "weights" in self._sleep_tags and self.sleep_level > request.level
        if not is_deeper:
            self.sleep_level = request.level
        self._sleep_tags |= set(request.tags)
        for engine in self._engines.values():
            engine.freed_bytes, engine.has_new_weights = 0, False
        self._send_requests(call, Phase.SLEEP_REPLIES)

    def _send_requests(self, call: _Call, phase: Phase) -> None:
        call.phase = phase
        for engine in self._engines.values():
            engine.failure = None
        self._request_sleeps()
        if not self._unsettled_sleepers:
            self._end_requests(call)
            return
        self._wait(call, self._weights_timeout_s)

    def _end_requests(self, call: _Call) -> None:
        """End a sleep or wake: all engines have answered, or late ones are removed."""
        what = "sleep" if isinstance(call.request, SleepRequested) else "wake"
        if self._stop_waiting(call):
            why = f"no {what} within {self._weights_timeout_s:.0f} s"
            self._give_up(self._unsettled_sleepers, why)
        failures = {n: e.failure for n, e in self._engines.items() if e.failure is not None}
        error = SleepFailed(what=what, failures=failures) if failures else None
        if isinstance(call.request, SleepRequested):
            returned = sum(engine.freed_bytes for engine in self._engines.values())
            self.is_reserved = False
            self._advance_weights()
            self._end_sleep_call(call, None if error else returned, error)
        elif error is None and not self._sleep_tags and self._sleeping_mode is not None:
            self._restore_weights(call)
        else:
            self._end_sleep_call(call, error=error)

    def _restore_weights(self, call: _Call) -> None:
        """Have engines without weights stage the newest version, also after a failure."""
        call.phase = Phase.WEIGHTS_RESTORED
        for engine in self._engines_without_weights:
            self._send(self._catch_up(engine))
        self._advance_weights()
        if self._is_ready(call):
            self._end_restore(call)
            return
        self._wait(call, self._weights_timeout_s)

    def _end_restore(self, call: _Call) -> None:
        if self._stop_waiting(call):
            why = f"no weights within {self._weights_timeout_s:.0f} s of waking"
            self._give_up(self._engines_without_weights, why)
        elif self._engines_without_update:
            failures = dict.fromkeys(self._engines_without_weights, NO_WEIGHTS)
            self._end_sleep_call(call, error=SleepFailed(what="wake", failures=failures))
            return
        self._sleeping_mode = None
        self._request_pause(call)

    def _end_sleep_call(
        self, call: _Call, value: object = None, error: TidegateError | None = None
    ) -> None:
        self._out += self._sleeps.leave(call.call_id)
        self._end(call, value, error)

    @property
    def _engines_without_weights(self) -> list[str]:
        """Engines that need a whole update before they can serve."""
        return sorted(name for name, engine in self._engines.items() if engine.needs_weights)

    @property
    def _engines_without_update(self) -> list[str]:
        """Engines without weights that stage no version."""
        return [engine for engine in self._engines_without_weights if not self._is_updating(engine)]

    # ------------------------------------------------------------ sleep: engines

    def _request_sleeps(self, only: str | None = None) -> None:
        """Send each engine the sleep or wake request that it needs and can carry out now.

        ``only`` restricts this to one engine while nothing is to sleep: a publish to a thousand
        engines has two thousand replies, and each calls this function.
        """
        outgoing: Outgoing = []
        for name in sorted(self._engines) if only is None or self._sleep_tags else (only,):
            engine = self._engines.get(name)
            if engine is None or engine.request_id is not None or engine.failure is not None:
                continue
            request = self._next_request(engine)
            if isinstance(request, Wake) or (request is not None and self._may_sleep(name)):
                engine.request_id, engine.requested_level = request.request_id, self.sleep_level
                self._sleep_requests += 1
                outgoing.append((name, request))
        if outgoing:
            self._send(outgoing)

    def _may_sleep(self, name: str) -> bool:
        """Whether an engine is paused and no update of it is under way."""
        is_paused = self.pause_mode is not None and name not in self._unsettled_pauses
        return is_paused and not self._is_updating(name)

    def _next_request(self, engine: _Engine) -> Sleep | Wake | None:
        """Return the request that an engine needs next; None if it sleeps and wakes as wanted."""
        request_id, level = self._sleep_requests, self.sleep_level
        if extra := engine.asleep - self._sleep_tags:
            return Wake(request_id=request_id, tags=_in_order(extra))
        tags = self._sleep_tags - {"weights"} if engine.has_new_weights else self._sleep_tags
        is_done = tags == engine.asleep and engine.level == level
        if not tags or is_done or level not in engine.levels:
            return None
        return Sleep(request_id=request_id, level=level, tags=_in_order(tags))

    @property
    def _unsettled_sleepers(self) -> list[str]:
        """Engines that need or were sent a sleep or wake request, and have not failed."""
        return sorted(
            name
            for name, engine in self._engines.items()
            if engine.request_id is not None
            or (engine.failure is None and self._next_request(engine))
        )

    def _on_slept(
        self, name: str, message: Asleep | Awake | sleep_messages.SleepRequestFailed
    ) -> None:
        engine = self._engines.get(name)
        if engine is None or message.request_id != engine.request_id:
            return  # a reply to a request of an earlier connection
        engine.request_id = None
        match message:
            case Asleep(tags=tags, freed_bytes=returned):
                engine.asleep, engine.level = set(tags), engine.requested_level
                engine.freed_bytes += returned
            case Awake(tags=tags, needs_weights=needs_weights):
                engine.asleep, engine.needs_weights = set(tags), needs_weights
            case sleep_messages.SleepRequestFailed(message=why):
                engine.failure = why

    def _forget_weights_target(self) -> None:
        """Once all engines have new weights, no longer put joining engines' weights to sleep."""
        if "weights" not in self._sleep_tags or not self._engines:
            return
        if all(engine.has_new_weights for engine in self._engines.values()):
            self._sleep_tags.discard("weights")


def _in_order(tags: Iterable[MemoryTag]) -> list[MemoryTag]:
    return [tag for tag in MEMORY_TAGS if tag in set(tags)]
