"""Sans-IO state machine of all messages to engines beside turns: weights, pauses and sleep.

It takes events (an engine came, left or answered; a trainer's call; a timer) and returns commands
(send, resolve a call, set a timer, give an engine up). It does no I/O and reads no clock.
:class:`tidegate.orchestrator.weight_sync.control.EngineControl` carries the commands out.

State: one :class:`_Engine` for each engine, one :class:`WeightUpdate` for each version under way,
one :class:`_Call` for each call, with its :class:`Phase`. docs/architecture.md has the tables.

A version comes to an engine in four phases: ``init`` once, then ``start`` and ``update`` (the
engine copies it beside its live weights while it decodes) and ``finish`` (it swaps between two
steps). The version released last is kept in the channel's buffer until another is released, for
engines that join late or whose publish failed. A version that is only part of a set is laid over
the newest that was published and has not failed.

A pause is a state of the run, not a count: the newest request holds, and one resume ends it.
Pauses, resumes and swaps happen one after another. Sleep is a state of the run, too; engines are
paused first, and resumed last. This is the orchestrator's part of a pause: which one every engine
is to be in, and which engines have confirmed it. Each engine keeps its own part, in its
``PauseGate``; for an external server, the worker's bridge and its streams carry the pause out.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

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
    anew,
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

NONE = -1
"""Version served by an engine that has dropped its weights."""

WATCH = -1
"""Timer of the versions under way; every other timer has the number of its call."""

PublishWait = Literal["live", "staged", "none"]
"""When a publish returns.

``live``: all engines serve the version. ``staged``: all engines have it beside their live weights,
so that none can refuse it any more. ``none``: it is written where engines copy it from, so that the
trainer may change its tensors.
"""

Outgoing = list[tuple[str, Message]]
"""(engine, message) pairs, to be sent in order."""

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

ONLY_PARTS = (
    "engines that forget their weights can't have them again, for only parts of a set were "
    "published so far; publish a whole state dict once, or sleep at level 1"
)
NO_WEIGHTS = "it has forgotten its weights, and none were published that it could take"
UNKNOWN_BASE = (
    "this run continues with another process's weights, and does not have the weights that a part "
    "of a set or an adapter would be laid over; publish a whole state dict first, or the model "
    "directory's if only adapters are trained"
)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory state of an engine, as its hello reports it."""

    levels: Sequence[int]
    """Levels at which it can sleep."""
    asleep: Sequence[MemoryTag]
    needs_weights: bool


@dataclass(frozen=True, slots=True)
class EngineConnected:
    """An engine joined or reconnected, serving ``version``."""

    engine: str
    version: int
    memory: EngineMemory | None
    """None if the engine has left again."""


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """An engine left, or was given up."""

    engine: str


@dataclass(frozen=True, slots=True)
class ControlReplyReceived:
    """An engine sent a message about weights, pauses or sleep."""

    engine: str
    message: ControlReply


@dataclass(frozen=True, slots=True)
class ReserveRequested:
    """A publish wants to write its weights. Resolved with :class:`Reserved`."""

    call: int
    next_version: int
    """Number after the newest released version."""
    is_part: bool = False
    """Whether only some tensors, or an adapter, will be written."""
    has_deltas: bool = False
    """Whether unchanged tensors may be left out."""
    first_bad: int | None = None
    """For a rollback: versions from this one on are bad. Engines are aborted and paused first, and
    stay paused until good weights are live. None for other publishes."""


@dataclass(frozen=True, slots=True)
class PublishRequested:
    """Weights were written in the reserved buffer. Resolved when ``wait`` is satisfied."""

    call: int
    version: int
    chunks: list[UpdateWeights]
    wait: PublishWait = "live"
    change: Change = anew
    """Makes the version's content from the version before and the written tensors."""
    is_rollback: bool = False
    """Whether engines were paused for a rollback, and resume once the version is live."""


@dataclass(frozen=True, slots=True)
class ReserveAbandoned:
    """Nothing will be published in the reserved buffer."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The user wants engines paused by ``mode``; None: resumed. Resolved when all are."""

    call: int
    mode: PauseMode | None
    clear_cache: bool = False


@dataclass(frozen=True, slots=True)
class EngineHaltRequested:
    """The staleness policy wants engines aborted and paused, or wants that to end."""

    call: int
    is_halted: bool


@dataclass(frozen=True, slots=True)
class SleepRequested:
    """The user wants engines to sleep. Resolved with the bytes that they returned together."""

    call: int
    level: SleepLevel
    tags: Sequence[MemoryTag]
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class WakeRequested:
    """The user wants engines awake; once nothing sleeps, they resume."""

    call: int
    tags: Sequence[MemoryTag]


@dataclass(frozen=True, slots=True)
class CallWoken:
    """A call that :class:`WakeCall` named continues."""

    call: int
    next_version: int


@dataclass(frozen=True, slots=True)
class CallCancelled:
    """The caller of a call was cancelled."""

    call: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The timer of a call, or of the versions under way (:data:`WATCH`), has expired."""

    timer: int


@dataclass(frozen=True, slots=True)
class VersionsDurable:
    """The release of a version is committed, so engines may swap. Answers
    :class:`ReportWhenDurable`."""


@dataclass(frozen=True, slots=True)
class KvPolicyChosen:
    """The user chose what the next swap does to the KV of kept turns."""

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


@dataclass(frozen=True, slots=True)
class Send:
    """Send messages to engines, in order, after all messages posted before; maybe none."""

    outgoing: Outgoing


@dataclass(frozen=True, slots=True)
class Resolve:
    """End a call with a result, or by raising ``error``."""

    call: int
    value: object = None
    error: TidegateError | None = None


@dataclass(frozen=True, slots=True)
class WakeCall:
    """A call's condition holds: continue it (:class:`CallWoken`) in the loop's next iteration."""

    call: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send :class:`TimerFired` after ``seconds``, in place of the timer's earlier setting."""

    timer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StopTimer:
    """Cancel a timer; harmless if it is not set."""

    timer: int


@dataclass(frozen=True, slots=True)
class ReportWhenDurable:
    """Tell (:class:`VersionsDurable`) once no crash can undo what was decided so far."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Remove an engine that does not do as it was told."""

    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class RefuseEngine:
    """Remove an engine that refuses the weights that others serve, and tell it why."""

    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class NoteSwap:
    """An engine serves other weights from now on."""

    engine: str
    message: WeightsLive


@dataclass(frozen=True, slots=True)
class ReleaseVersion:
    """Every engine has staged a version: it is now the trainer's version."""

    version: int
    replaced: int = 0
    """Number of earlier publishes that it replaced before every engine had staged them."""


@dataclass(frozen=True, slots=True)
class NoteFailure:
    """A publish was refused, timed out or was abandoned: no engine serves its weights."""


@dataclass(frozen=True, slots=True)
class RetractVersions:
    """Versions from this one on are bad: discard the groups that they sampled."""

    first_bad: int


@dataclass(frozen=True, slots=True)
class SuspendDeadlines:
    """Stop the clocks of all episodes while engines are paused, or start them again."""

    is_halted: bool


@dataclass(frozen=True, slots=True)
class HoldBatches:
    """Hold batches while it is undecided which version the trainer has made, or hand them over
    again.

    Sent after every change that a waiting caller may depend on.
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
    | NoteSwap
    | ReleaseVersion
    | NoteFailure
    | RetractVersions
    | SuspendDeadlines
    | HoldBatches
)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Where and what a publish is to write."""

    version: int
    keep: frozenset[int]
    """Versions whose parts must stay in the channel's buffer."""
    over: int | None
    """Version that a part of a set will be laid over; None for a whole set."""
    deltas_over: int | None
    """Version relative to which unchanged tensors may be left out; None if none may be."""


# ---------------------------------------------------------------- state


@dataclass(slots=True)
class WeightUpdate:
    """One version under way. An engine is in at most one of the sets, of at most one update."""

    version: int
    content: WeightContent
    staging: set[str] = field(default_factory=set)
    """Engines that are copying it."""
    staged: set[str] = field(default_factory=set)
    """Engines that have it beside the live weights, and wait for the order to swap."""
    swapping: set[str] = field(default_factory=set)
    """Engines that were told to swap."""
    is_released: bool = False
    """Whether engines may swap as soon as they have staged it."""
    is_withdrawn: bool = False
    """Whether engines may no longer swap to it; they drop what they staged at the next start."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Engine -> why it can't take the version."""

    @property
    def engines(self) -> set[str]:
        """Engines that the version is on its way to."""
        return self.staging | self.staged | self.swapping

    def is_for(self, engine: str) -> bool:
        """Whether the version is on its way to this engine."""
        return engine in self.staging or engine in self.staged or engine in self.swapping

    def strike(self, engine: str) -> None:
        """Stop waiting for this engine."""
        for engines in (self.staging, self.staged, self.swapping):
            engines.discard(engine)


@dataclass(frozen=True, slots=True)
class LaggingEngines:
    """Engines that a version is on its way to, and the phase they are in."""

    version: int
    phase: Literal["staging", "staged", "swapping"]
    engines: tuple[str, ...]

    def __str__(self) -> str:
        return f"v{self.version} is {self.phase} on {', '.join(self.engines)}"


@dataclass(slots=True)
class _Engine:
    """State of one engine."""

    version: int
    """Version that it serves, if it has weights."""
    levels: Sequence[int] = ()
    """Levels at which it can sleep."""
    asleep: set[MemoryTag] = field(default_factory=set)
    level: SleepLevel | None = None
    """Level at which it sleeps; None if it doesn't, or has not told this process."""
    needs_weights: bool = False
    """Whether it has dropped its weights, so that only an update can restore them."""
    has_new_weights: bool = False
    """Whether it got new weights, which it serves, since its own were put to sleep."""
    request: int | None = None
    """Number of the sleep or wake order that it has not answered yet."""
    requested_level: SleepLevel | None = None
    freed_bytes: int = 0
    failure: str | None = None
    """Why the last order to sleep or wake failed."""
    resumes_due: int = 0
    """Number of resumes it has not answered. Its answers to pauses before those are outdated."""
    unanswered: list[int] = field(default_factory=list)
    """Versions that it was told to start and has not answered, in order."""

    @property
    def serves(self) -> int:
        """Version that it can serve now; NONE without weights."""
        return NONE if self.needs_weights else self.version

    @property
    def base(self) -> int | None:
        """Version that a part of a set can be laid over; None if it needs a whole set."""
        return None if "weights" in self.asleep else self.serves

    def start(self, version: int) -> StartWeightUpdate:
        """Return the order to begin a version."""
        if not self.unanswered or self.unanswered[-1] != version:
            self.unanswered.append(version)
        return StartWeightUpdate(version=version)

    def has_outdated(self, version: int) -> bool:
        """Whether an answer belongs to an earlier start of ``version`` than the newest.

        An engine answers each start once and in order, except that two successive starts of the
        same version have one answer.
        """
        if version in self.unanswered:
            del self.unanswered[: self.unanswered.index(version) + 1]
        return version in self.unanswered


class Phase(Enum):
    """What a call waits for."""

    RESERVE = auto()
    """The channel's buffer is free to be reserved."""
    DRAIN = auto()
    """No engine reads what is about to be overwritten."""
    BRING = auto()
    """Engines have staged the published version, or serve it."""
    PAUSE_TURN = auto()
    """Earlier pauses and resumes are over."""
    SWAPS_END = auto()
    """No engine is swapping."""
    PAUSE_ANSWERS = auto()
    """Every engine has confirmed the pause, or the resume."""
    SLEEP_TURN = auto()
    """Earlier sleeps and wakes are over."""
    WEIGHTS_SETTLE = auto()
    """For a sleep: no version is under way or being written."""
    SLEEP_ANSWERS = auto()
    """Every engine sleeps as wanted, or has failed."""
    WAKE_ANSWERS = auto()
    """Every engine is awake as wanted, or has failed."""
    WEIGHTS_COME = auto()
    """Every engine that woke without weights has some, or none are on their way."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that is not over."""

    asked: (
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
    """For a publish: version that it brings, or is about to write."""
    is_resolved: bool = False
    """For a publish: whether its caller has returned, while the version is still under way."""
    is_live: bool = False
    """For a rollback: whether its version is live, and engines are to be resumed."""
    is_late: bool = False
    """Whether its timer has expired."""


@dataclass(slots=True)
class _SleepTarget:
    """What is to sleep on every engine, and at which level."""

    tags: set[MemoryTag] = field(default_factory=set)
    level: SleepLevel = 1


class WeightControl:
    """Wanted weights, pause and sleep of all engines. Change it only through :meth:`handle`."""

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
        """``wave_engines``: how many engines swap at a time; None for all at once.
        ``weight_update_timeout_s``: time limit of a version, a sleep or a wake;
        ``pause_timeout_s``: of an engine to pause or resume."""
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
        """Newest version published."""
        self._kept: WeightUpdate | None = None
        """Newest version released; the channel's buffer still holds it."""
        self._before: WeightUpdate | None = None
        """Version that a part of a set is laid over; None for the model directory's weights."""
        self.is_reserved = False
        """Whether the buffer is about to be written for a new version, or engines go to sleep."""
        self.newest_version = -1
        """Newest version released by this process, which engines may serve; -1 before the first."""
        self._taken_version = -1
        """Newest number that was given to a publish and may never be released."""
        self._is_watching = False
        """Whether the versions under way have a timer."""
        self.failure: TidegateError | None = None
        """Error of a publish whose caller had returned already, until another call raises it."""
        # -------- pauses
        self.pause_mode: PauseMode | None = None
        """Mode of the last pause sent to engines; None after a resume."""
        self._clears_cache = False
        self._users_mode: PauseMode | None = None
        self._sleeping_mode: PauseMode | None = None
        """Mode by which engines were paused to sleep; None while they are not to sleep."""
        self._is_halted = False
        self._pausing: int | None = None
        """Call whose pause or resume is under way; engines are not told to swap meanwhile."""
        self._pause_queue: deque[int] = deque()
        self._unsettled_pauses: set[str] = set()
        """Engines that have not confirmed the last pause or resume."""
        # -------- sleep
        self._sleep_target = _SleepTarget()
        self._sleeping: int | None = None
        """Call whose sleep or wake is under way."""
        self._sleep_queue: deque[int] = deque()
        self._slept_version = -1
        """Newest version released when engines were put to sleep: later ones replace theirs."""
        self._requests = 0
        """Number of sleep and wake orders so far."""

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
                self._is_halted = is_halted
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
        commands, self._out = self._out, []
        return commands

    # ------------------------------------------------------------ queries

    @property
    def asleep(self) -> tuple[MemoryTag, ...]:
        """Memory that sleeps on all engines, or is about to."""
        return tuple(tag for tag in MEMORY_TAGS if tag in self._sleep_target.tags)

    @property
    def sleep_level(self) -> SleepLevel:
        """Level at which it sleeps."""
        return self._sleep_target.level

    @property
    def staging_version(self) -> int | None:
        """Newest version published, while some engine has not staged it; else None."""
        return self.update.version if self.update is not None and self.is_undecided else None

    @property
    def kept_buffers(self) -> frozenset[int]:
        """Buffers that the version released last needs: its own, and those it is laid over."""
        kept = self._kept
        return frozenset() if kept is None else frozenset({kept.version} | kept.content.buffers)

    @property
    def version_before(self) -> int:
        """Version that a part of a set would be laid over now."""
        return self._before.version if self._before is not None else 0

    @property
    def adapters_before(self) -> Collection[str]:
        """Names of that version's adapters."""
        return self._before.content.adapters if self._before is not None else ()

    def knows_before(self, next_version: int) -> bool:
        """Whether the content that a part of a set would be laid over is known: the model
        directory's weights, or a version that this process published. Not after a resume with
        another process's weights."""
        return self.newest_version >= 0 or next_version <= 1

    @property
    def is_writable(self) -> bool:
        """Whether no engine reads a buffer that may be overwritten. Readers of the kept version
        need not be waited for: the next version replaces it for them, however far they are."""
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
        """Whether an engine was told to swap and has not confirmed it."""
        return any(update.swapping for update in self._updates)

    @property
    def lagging_engines(self) -> list[LaggingEngines]:
        """Engines that versions are on their way to, by version and phase."""
        found: list[LaggingEngines] = []
        for update in self._updates:
            v = update.version
            found += [
                LaggingEngines(v, "staging", tuple(sorted(update.staging))),
                LaggingEngines(v, "staged", tuple(sorted(update.staged))),
                LaggingEngines(v, "swapping", tuple(sorted(update.swapping))),
            ]
        return [lagging for lagging in found if lagging.engines]

    def take_failure(self) -> TidegateError | None:
        """Return the error of a publish whose caller had returned, once."""
        failure, self.failure = self.failure, None
        return failure

    @property
    def _updates(self) -> list[WeightUpdate]:
        """The newest and the kept version, each once, where they exist."""
        kept = None if self._kept is self.update else self._kept
        return [update for update in (self.update, kept) if update is not None]

    @property
    def _publishes(self) -> list[_Call]:
        """Publish calls that are not over, in the order in which they began."""
        calls = self._calls.values()
        return [call for call in calls if call.phase is Phase.BRING and not call.is_live]

    @property
    def _swaps_available(self) -> int:
        """Number of further engines that may swap now."""
        if self._wave_engines is None:
            return len(self._engines)
        return self._wave_engines - sum(len(update.swapping) for update in self._updates)

    def _update_of(self, version: int) -> WeightUpdate | None:
        return next((update for update in self._updates if update.version == version), None)

    def _is_on_its_way(self, engine: str) -> bool:
        return any(update.is_for(engine) for update in self._updates)

    # ------------------------------------------------------------ calls

    def _begin(self, call: _Call) -> _Call:
        self._calls[call.asked.call] = call
        return call

    def _wait(self, call: _Call) -> None:
        self._waiting[call.asked.call] = None

    def _end(self, call: _Call, value: object = None, error: TidegateError | None = None) -> None:
        del self._calls[call.asked.call]
        self._out.append(Resolve(call.asked.call, value, error))

    def _is_ready(self, call: _Call) -> bool:
        match call.phase:
            case Phase.RESERVE:
                return not self.is_reserved
            case Phase.DRAIN:
                return self.is_writable
            case Phase.SWAPS_END:
                return not self.is_swapping
            case Phase.PAUSE_ANSWERS:
                return not self._unsettled_pauses
            case Phase.WEIGHTS_SETTLE:
                return self.is_settled and not self.is_reserved
            case Phase.SLEEP_ANSWERS | Phase.WAKE_ANSWERS:
                return not self._unsettled_sleepers
            case Phase.WEIGHTS_COME:
                return bool(self._engines_without_update) or not self._engines_without_weights
            case Phase.BRING | Phase.PAUSE_TURN | Phase.SLEEP_TURN:
                return False  # the end of another call or update continues it

    def _continue_call(self, number: int, next_version: int) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        match call.phase:
            case Phase.RESERVE if self.is_reserved:
                self._wait(call)  # another call was woken first
            case Phase.RESERVE:
                self._reserve(call, next_version)
            case Phase.DRAIN:
                self._end_drain(call)
            case Phase.PAUSE_TURN:
                self._pause_queue.remove(number)
                self._begin_pause(call)
            case Phase.SWAPS_END:
                self._send_pause(call)
            case Phase.PAUSE_ANSWERS:
                self._end_pause(call)
            case Phase.SLEEP_TURN:
                self._sleep_queue.remove(number)
                self._begin_sleep(call)
            case Phase.WEIGHTS_SETTLE:
                self._sleep_once_settled(call)
            case Phase.SLEEP_ANSWERS | Phase.WAKE_ANSWERS:
                self._end_orders(call)
            case Phase.WEIGHTS_COME:
                self._end_restore(call)
            case Phase.BRING if call.is_live:
                self._is_halted = False
                self._request_pause(call)
            case Phase.BRING:
                pass

    def _on_cancelled(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        self._waiting.pop(number, None)
        self._stop_timer(number)
        match call.phase:
            case Phase.DRAIN:
                self._unreserve()
            case Phase.BRING:
                self._cancel_publish(call)
            case Phase.PAUSE_TURN:
                self._pause_queue.remove(number)
                self._let_pause(None)
                self._advance()
            case Phase.SWAPS_END | Phase.PAUSE_ANSWERS:
                self._let_pause(number)
                self._advance()
            case Phase.SLEEP_TURN:
                self._sleep_queue.remove(number)
            case Phase.SLEEP_ANSWERS:
                self.is_reserved = False
                self._advance_weights()
            case _:
                pass
        if isinstance(call.asked, SleepRequested | WakeRequested):
            self._let_sleep(number)

    def _on_timer(self, timer: int) -> None:
        if timer == WATCH:
            self._on_update_timeout()
        elif timer in self._waiting:
            self._calls[timer].is_late = True
            del self._waiting[timer]
            self._out.append(WakeCall(timer))

    def _set_timer(self, timer: int, seconds: float) -> None:
        self._out.append(SetTimer(timer, seconds))

    def _stop_timer(self, timer: int) -> None:
        self._out.append(StopTimer(timer))

    # ------------------------------------------------------------ what is due

    def _advance(self, only: str | None = None) -> None:
        """Send everything that is due; ``only``: the only engine of which something has changed."""
        self._order_sleep(only)
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
        if self._is_swap_due and self._pausing is None:
            # Only when committed: after a crash that forgets the version, its number could be
            # given to other weights.
            self._out.append(ReportWhenDurable())
        if self.is_settled and not self.is_undecided:
            self._settle()
        self._note()

    def _note(self) -> None:
        """Wake the calls whose condition holds now."""
        self._out.append(HoldBatches(self.is_reserved or self.is_undecided))
        for number in [n for n in self._waiting if self._is_ready(self._calls[n])]:
            del self._waiting[number]
            self._out.append(WakeCall(number))

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
        if engine in self._engines:  # unknown: it was given up here
            self._remove(engine)
            self._advance(engine)

    def _remove(self, engine: str) -> None:
        self._engines.pop(engine, None)
        self._unsettled_pauses.discard(engine)
        for update in self._updates:
            update.strike(engine)
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
        if engine is None or not (engine.needs_weights and self._is_publish_awaited):
            self._send(self._catch_up(name))
        self._advance(name)

    @property
    def _is_publish_awaited(self) -> bool:
        """Whether engines that woke without weights wait for the trainer's next publish: so it is
        until everything is to be awake."""
        if self._sleeping_mode is None:
            return False
        call = None if self._sleeping is None else self._calls.get(self._sleeping)
        return call is None or call.phase is not Phase.WEIGHTS_COME

    # ------------------------------------------------------------ versions: publishing

    def _on_reserve(self, event: ReserveRequested) -> None:
        call = self._begin(_Call(event, Phase.RESERVE))
        if event.is_part and not self.knows_before(event.next_version):
            self._refuse_publish(call, WeightsRefused(UNKNOWN_BASE))
        elif (failure := self.take_failure()) is not None:
            self._refuse_publish(call, failure)
        elif event.first_bad is not None:
            self._is_halted = True  # so that no turn continues from KV that bad weights computed
            self._request_pause(call)
        elif self.is_reserved:  # another version is being written; engines decode meanwhile
            self._wait(call)
        else:
            self._reserve(call, event.next_version)

    def _refuse_publish(self, call: _Call, error: TidegateError) -> None:
        """Fail a publish that has not written anything. Its weights come to nothing as well: the
        batches that they were made from count for the next version."""
        self._out.append(NoteFailure())
        self._end(call, error=error)

    def _reserve(self, call: _Call, next_version: int) -> None:
        """Reserve the buffer for the next version; one that is still being staged is abandoned."""
        self.is_reserved = True
        if self.is_undecided and self.update is not None:
            self._taken_version = self.update.version
            self._stop_watch()
        call.version = max(next_version, self._taken_version + 1)
        self._send(self._supersede(call.version))
        self._note()
        call.phase = Phase.DRAIN
        if self.is_writable:
            self._end_drain(call)
        else:
            self._set_timer(call.asked.call, self._weights_timeout_s)
            self._wait(call)

    def _end_drain(self, call: _Call) -> None:
        self._stop_timer(call.asked.call)
        if not call.is_late:
            assert isinstance(call.asked, ReserveRequested)
            self._end(call, self._reserved(call.version, call.asked))
            return
        assert self.update is not None
        error = self._lagging(sorted(self.update.staging))
        self._unreserve()
        self._give_up(error.engines, str(error))
        self._end(call, error=error)

    def _reserved(self, version: int, asked: ReserveRequested) -> Reserved:
        before, keep, deltas_over = self._before, self.kept_buffers, None
        if asked.has_deltas:
            layers = len({part.version for part in before.content.over}) if before else 0
            deltas_over = UNKNOWN if layers >= LAYERS_MAX else self.version_before
        # A whole set keeps the adapters of before.
        needs_before = asked.is_part or deltas_over is not None or self.adapters_before
        if needs_before and before is not None:
            keep |= before.content.buffers
        return Reserved(version, keep, self.version_before if asked.is_part else None, deltas_over)

    def _supersede(self, version: int) -> Outgoing:
        """Abandon a version that isn't released, because a newer one is about to be written.

        Engines that copy it are told to start the newer one, and so to stop; each answers that it
        has given up, or that it was done. If the newer one has the same number, the answers could
        not be told apart, so the copies are waited for.
        """
        update, before = self.update, self._before
        if update is None or update.is_released:
            return []
        self._withdraw()
        self._before = before  # it hasn't failed: the newer version contains its tensors
        if update.version == version:
            return []
        return [(e, self._engines[e].start(version)) for e in sorted(update.staging)]

    def _unreserve(self) -> None:
        """Give up the reserved buffer; the version that was abandoned for it stays abandoned."""
        self.is_reserved = False
        if self.update is not None and self.update.is_withdrawn:
            self._before = self._kept
        self._out.append(NoteFailure())
        if not self.is_undecided:
            for call in [c for c in self._publishes if c.version > self.newest_version]:
                self._end_publish(call, PublishDropped(version=call.version))
        self._send(self._catch_up())
        self._note()

    def _on_publish(self, event: PublishRequested) -> None:
        """Have every engine stage a version that it does not serve.

        Engines may have kept serving what a resumed run publishes again. Versions still under way
        to some engines are abandoned for this newer one.
        """
        call = self._begin(_Call(event, Phase.BRING, version=event.version))
        self.is_reserved = False
        before = self._before
        content = MODEL_DIRECTORY if before is None else before.content
        if before is not None and before.is_released:
            content = content.served_as(before.version)
        update = WeightUpdate(event.version, event.change(content, event.chunks))
        self.update = self._before = update
        behind = [name for name, engine in self._engines.items() if engine.serves != event.version]
        self._send([message for name in behind for message in self._stage(name, update)])
        if event.wait == "none":
            self._taken_version = event.version
            self._resolve_publish(call)
        self._watch()
        self._advance_weights()

    def _resolve_publish(self, call: _Call) -> None:
        """Return to the caller of a publish, while the version is still under way."""
        if not call.is_resolved:
            call.is_resolved = True
            self._out.append(Resolve(call.asked.call))

    def _end_publish(self, call: _Call, error: TidegateError | None) -> None:
        is_rollback = isinstance(call.asked, PublishRequested) and call.asked.is_rollback
        if is_rollback and error is None:
            call.is_live = True
            self._out.append(WakeCall(call.asked.call))
            return
        if not call.is_resolved:
            self._end(call, error=error)
            return
        del self._calls[call.asked.call]
        if error is not None:
            self.failure = error  # its caller has returned

    def _cancel_publish(self, call: _Call) -> None:
        """Abandon a version whose caller was cancelled, if not all engines have staged it and no
        earlier publish waits for it."""
        if call.version <= self.newest_version:
            return  # engines swap to it already
        is_newest = self.update is not None and self.update.version == call.version
        if is_newest and not any(c.version > self.newest_version for c in self._publishes):
            self._withdraw()
            self._out.append(NoteFailure())
            self._stop_watch()
            self._send(self._catch_up())
            self._note()
        else:
            self._taken_version = max(self._taken_version, call.version)

    def _withdraw(self) -> None:
        """Keep engines from swapping to the newest version, unless it is released."""
        if self.update is not None and not self.update.is_released:
            self.update.is_withdrawn = True
            self.update.staged.clear()
        self._before = self._kept

    def _fail(self, error: TidegateError) -> None:
        """Fail the publish of the newest version; unless it was released, no engine swaps to it."""
        is_released = self.update is not None and self.update.is_released
        self._withdraw()
        if not is_released:
            self._out.append(NoteFailure())
        self._stop_watch()
        for call in [c for c in self._publishes if is_released or c.version > self.newest_version]:
            self._end_publish(call, error)
        self._send(self._catch_up())

    def _release(self, update: WeightUpdate) -> None:
        """Make a version the trainer's: every engine has staged it."""
        replaced = [c for c in self._publishes if self.newest_version < c.version < update.version]
        self.newest_version = update.version
        self._out.append(ReleaseVersion(update.version, len(replaced)))
        update.is_released = True
        self._kept = update
        for call in self._publishes:
            is_enough = isinstance(call.asked, PublishRequested) and call.asked.wait == "staged"
            if is_enough and call.version <= update.version:
                self._resolve_publish(call)

    def _settle(self) -> None:
        self._stop_watch()
        for call in [c for c in self._publishes if c.version <= self.newest_version]:
            self._end_publish(call, None)

    def _watch(self) -> None:
        self._is_watching = True
        self._set_timer(WATCH, self._weights_timeout_s)

    def _stop_watch(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self._stop_timer(WATCH)

    def _on_update_timeout(self) -> None:
        self._is_watching = False
        # Engines that have staged a version wait for others, or for the order to swap.
        late_engines = sorted({engine for u in self._updates for engine in u.staging | u.swapping})
        if not late_engines:
            self._watch()  # a journal commit or a pause delays it: no engine is to blame
            return
        error = self._lagging(late_engines)
        self._fail(error)
        self._give_up(error.engines, str(error))
        if not self.is_settled:
            self._watch()  # other engines continue in their waves
        self._note()

    def _lagging(self, engines: list[str]) -> EngineLagging:
        return EngineLagging(
            engines=engines,
            wanted_version=self.update.version if self.update else 0,
            waited_s=self._weights_timeout_s,
            where="; ".join(map(str, self.lagging_engines)),
        )

    # ------------------------------------------------------------ versions: engines

    def _catch_up(self, engine: str | None = None) -> Outgoing:
        """Have engines stage the newest version if they lack it and none is on its way to them.

        These are engines that joined late, and engines whose copy a failed publish had replaced.
        With ``engine``, only that engine is considered.
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
            and self._engines[name].serves != target.version
            and name not in target.refusals
            and not self._is_on_its_way(name)
            for message in self._stage(name, target)
        ]

    def _stage(self, name: str, update: WeightUpdate) -> Outgoing:
        for other in self._updates:
            other.strike(name)
        update.staging.add(name)
        engine = self._engines[name]
        chunks = update.content.messages(update.version, live=engine.base)
        return [(name, engine.start(update.version)), *((name, chunk) for chunk in chunks)]

    def _on_staged(self, name: str, version: int) -> None:
        engine, update = self._engines.get(name), self._update_of(version)
        if engine is None or engine.has_outdated(version):
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
            update.strike(name)
        self._out.append(NoteSwap(name, message))

    def _on_refused(self, name: str, version: int, why: str) -> bool:
        """Note that an engine can't take a version; it keeps serving the old one.

        Returns True if other engines serve the version already: then this engine must leave the
        run.
        """
        engine, update = self._engines.get(name), self._update_of(version)
        if engine is None or engine.has_outdated(version):
            return False
        if update is None or not update.is_for(name):
            return False  # abandoned for a newer version; or started twice, and just swapped
        update.strike(name)
        update.refusals[name] = why
        return update.is_released

    @property
    def _is_swap_due(self) -> bool:
        return self._swaps_available > 0 and any(u.is_released and u.staged for u in self._updates)

    def _swap(self) -> None:
        """Tell engines that have staged a released version to swap, each once.

        In waves, each engine that serves the new version makes room for the next one.
        """
        if self._pausing is not None:
            return  # a pause has begun since; its end calls this again
        outgoing: Outgoing = []
        for update in self._updates:
            if not update.is_released:
                continue
            finish = FinishWeightUpdate(
                version=update.version, pause_mode=self._swap_mode, kv_policy=self.kv_policy
            )
            wave = sorted(update.staged)[: max(0, self._swaps_available)]
            outgoing += [(engine, finish) for engine in wave]
            update.swapping.update(wave)
            update.staged.difference_update(wave)
        if outgoing:
            self._send(outgoing)
            if self._wave_engines is not None and self._is_watching:
                self._watch()  # each wave has its own time

    # ------------------------------------------------------------ pauses

    def _request_pause(self, call: _Call) -> None:
        """Queue a pause or resume. The policy's pause wins, then a sleep's, then the user's."""
        if call.asked.call not in self._calls:
            self._begin(call)
        call.mode = "abort" if self._is_halted else self._sleeping_mode or self._users_mode
        call.phase = Phase.PAUSE_TURN
        if self._pausing is None and not self._pause_queue:
            self._begin_pause(call)
        else:
            self._pause_queue.append(call.asked.call)

    def _begin_pause(self, call: _Call) -> None:
        self._pausing = call.asked.call
        call.phase = Phase.SWAPS_END
        if self.is_swapping:
            self._wait(call)
        else:
            self._send_pause(call)

    def _send_pause(self, call: _Call) -> None:
        call.phase = Phase.PAUSE_ANSWERS
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
        if call.mode != "wait":  # "wait" takes as long as the longest turn
            self._set_timer(call.asked.call, self._pause_timeout_s)
        self._wait(call)

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
        """End a pause or resume: all engines have confirmed it, or late ones are given up."""
        self._stop_timer(call.asked.call)
        if call.is_late:
            call.is_late = False
            what = "resumed" if call.mode is None else f"paused by mode {call.mode!r}"
            why = f"it has not {what} within {self._pause_timeout_s:.0f} s"
            self._give_up(sorted(self._unsettled_pauses), why)
        self._let_pause(call.asked.call)
        self._advance()  # swaps may have waited for it
        match call.asked:
            case SleepRequested():
                call.phase = Phase.WEIGHTS_SETTLE
                self._sleep_once_settled(call)
            case ReserveRequested(first_bad=first_bad) if first_bad is not None:
                call.phase = Phase.RESERVE
                self._out += [RetractVersions(first_bad), WakeCall(call.asked.call)]
            case WakeRequested():
                self._let_sleep(call.asked.call)
                self._end(call)
            case _:
                self._end(call)

    def _let_pause(self, call: int | None) -> None:
        """End ``call``'s turn to pause, and wake the next call in the queue."""
        if call == self._pausing:
            self._pausing = None
        if self._pausing is None and self._pause_queue:
            self._out.append(WakeCall(self._pause_queue[0]))

    # ------------------------------------------------------------ sleep: calls

    def _on_sleep_or_wake(self, event: SleepRequested | WakeRequested) -> None:
        call = self._begin(_Call(event, Phase.SLEEP_TURN))
        if isinstance(event, SleepRequested) and (why := self._sleep_refusal(event)) is not None:
            self._end(call, error=ConfigError(why))
        elif self._sleeping is None and not self._sleep_queue:
            self._begin_sleep(call)
        else:
            self._sleep_queue.append(event.call)

    def _sleep_refusal(self, event: SleepRequested) -> str | None:
        """Return why engines can't sleep as asked; None if they can."""
        level = event.level
        unable = sorted(n for n, engine in self._engines.items() if level not in engine.levels)
        if unable:
            return (
                f"{', '.join(unable)} can't sleep at level {level}: it said so when it joined. "
                f"Tidegate's own engines can, vLLM with --enable-sleep-mode, SGLang with "
                f"--enable-memory-saver (level 1: and --enable-weights-cpu-backup); else pause()"
            )
        has_whole = self._kept is None or self._kept.content.whole is not None
        return None if has_whole or level == 1 or "weights" not in event.tags else ONLY_PARTS

    def _begin_sleep(self, call: _Call) -> None:
        self._sleeping = call.asked.call
        if isinstance(call.asked, SleepRequested):
            self._sleeping_mode = call.asked.mode
            self._request_pause(call)
            return
        assert isinstance(call.asked, WakeRequested)
        self._sleep_target = _SleepTarget(
            self._sleep_target.tags - set(call.asked.tags), self._sleep_target.level
        )
        self._order(call, Phase.WAKE_ANSWERS)

    def _sleep_once_settled(self, call: _Call) -> None:
        """Put the paused engines to sleep, once no weights are under way."""
        asked = call.asked
        assert isinstance(asked, SleepRequested)
        if self.is_reserved or not self.is_settled:
            self._wait(call)
            return
        self.is_reserved = True  # no publish begins meanwhile
        self._slept_version = self.newest_version
        wanted = self._sleep_target
        deeper = max(asked.level, wanted.level) if "weights" in wanted.tags else asked.level
        self._sleep_target = _SleepTarget(wanted.tags | set(asked.tags), deeper)
        for engine in self._engines.values():
            engine.freed_bytes, engine.has_new_weights = 0, False
        self._order(call, Phase.SLEEP_ANSWERS)

    def _order(self, call: _Call, phase: Phase) -> None:
        call.phase = phase
        for engine in self._engines.values():
            engine.failure = None
        self._order_sleep()
        if not self._unsettled_sleepers:
            self._end_orders(call)
            return
        self._set_timer(call.asked.call, self._weights_timeout_s)
        self._wait(call)

    def _end_orders(self, call: _Call) -> None:
        """End a sleep or wake: all engines have answered, or late ones are given up."""
        self._stop_timer(call.asked.call)
        what = "sleep" if isinstance(call.asked, SleepRequested) else "wake"
        if call.is_late:
            call.is_late = False
            why = f"no {what} within {self._weights_timeout_s:.0f} s"
            self._give_up(self._unsettled_sleepers, why)
        failures = {n: e.failure for n, e in self._engines.items() if e.failure is not None}
        error = SleepFailed(what=what, failures=failures) if failures else None
        if isinstance(call.asked, SleepRequested):
            returned = sum(engine.freed_bytes for engine in self._engines.values())
            self.is_reserved = False
            self._advance_weights()
            self._let_sleep(call.asked.call)
            self._end(call, None if error else returned, error)
        elif error is None and not self._sleep_target.tags and self._sleeping_mode is not None:
            self._restore_weights(call)
        else:
            self._let_sleep(call.asked.call)
            self._end(call, error=error)

    def _restore_weights(self, call: _Call) -> None:
        """Have engines without weights stage some, again if those fail."""
        call.phase = Phase.WEIGHTS_COME
        for engine in self._engines_without_weights:
            self._send(self._catch_up(engine))
        self._advance_weights()
        if self._is_ready(call):
            self._end_restore(call)
            return
        self._set_timer(call.asked.call, self._weights_timeout_s)
        self._wait(call)

    def _end_restore(self, call: _Call) -> None:
        self._stop_timer(call.asked.call)
        if call.is_late:
            call.is_late = False
            why = f"no weights within {self._weights_timeout_s:.0f} s of waking"
            self._give_up(self._engines_without_weights, why)
        elif self._engines_without_update:
            failures = dict.fromkeys(self._engines_without_weights, NO_WEIGHTS)
            self._let_sleep(call.asked.call)
            self._end(call, error=SleepFailed(what="wake", failures=failures))
            return
        self._sleeping_mode = None
        self._request_pause(call)

    def _let_sleep(self, call: int) -> None:
        """End ``call``'s turn to sleep or wake, and wake the next call in the queue."""
        if call == self._sleeping:
            self._sleeping = None
        if self._sleeping is None and self._sleep_queue:
            self._out.append(WakeCall(self._sleep_queue[0]))

    @property
    def _engines_without_weights(self) -> list[str]:
        """Engines that need a whole update before they can serve."""
        return sorted(name for name, engine in self._engines.items() if engine.needs_weights)

    @property
    def _engines_without_update(self) -> list[str]:
        """Engines without weights that no version is on its way to."""
        return [
            engine for engine in self._engines_without_weights if not self._is_on_its_way(engine)
        ]

    # ------------------------------------------------------------ sleep: engines

    def _order_sleep(self, only: str | None = None) -> None:
        """Send each engine the sleep or wake order that it needs and can carry out now.

        ``only`` restricts this to one engine while nothing is to sleep, because each publish has
        each of a thousand engines report two changes.
        """
        outgoing: Outgoing = []
        for name in sorted(self._engines) if only is None or self._sleep_target.tags else (only,):
            engine = self._engines.get(name)
            if engine is None or engine.request is not None or engine.failure is not None:
                continue
            order = self._sleep_order(engine)
            if isinstance(order, Wake) or (order is not None and self._may_sleep(name)):
                engine.request, engine.requested_level = order.request_id, self._sleep_target.level
                self._requests += 1
                outgoing.append((name, order))
        if outgoing:
            self._send(outgoing)

    def _may_sleep(self, name: str) -> bool:
        """Whether an engine is paused and no weights are on their way to it."""
        is_paused = self.pause_mode is not None and name not in self._unsettled_pauses
        return is_paused and not self._is_on_its_way(name)

    def _sleep_order(self, engine: _Engine) -> Sleep | Wake | None:
        """Return the order that brings an engine to the wanted state; None if it is there."""
        wanted = self._sleep_target
        if extra := engine.asleep - wanted.tags:
            return Wake(request_id=self._requests, tags=_in_order(extra))
        tags = wanted.tags - {"weights"} if engine.has_new_weights else wanted.tags
        if not tags or wanted.level not in engine.levels:
            return None
        if tags == engine.asleep and engine.level == wanted.level:
            return None
        return Sleep(request_id=self._requests, level=wanted.level, tags=_in_order(tags))

    @property
    def _unsettled_sleepers(self) -> list[str]:
        """Engines that are not in the wanted state and have not failed."""
        return sorted(
            name
            for name, engine in self._engines.items()
            if engine.request is not None or (engine.failure is None and self._sleep_order(engine))
        )

    def _on_slept(
        self, name: str, message: Asleep | Awake | sleep_messages.SleepRequestFailed
    ) -> None:
        engine = self._engines.get(name)
        if engine is None or message.request_id != engine.request:
            return  # an answer to an earlier connection's order
        engine.request = None
        match message:
            case Asleep(tags=tags, freed_bytes=returned):
                engine.asleep, engine.level = set(tags), engine.requested_level
                engine.freed_bytes += returned
            case Awake(tags=tags, needs_weights=lacks):
                engine.asleep, engine.needs_weights = set(tags), lacks
            case sleep_messages.SleepRequestFailed(message=why):
                engine.failure = why

    def _forget_weights_target(self) -> None:
        """If all engines have new weights, engines that join need not put theirs to sleep."""
        if "weights" not in self._sleep_target.tags or not self._engines:
            return
        if all(engine.has_new_weights for engine in self._engines.values()):
            self._sleep_target.tags.discard("weights")


def _in_order(tags: Iterable[MemoryTag]) -> list[MemoryTag]:
    return [tag for tag in MEMORY_TAGS if tag in set(tags)]
