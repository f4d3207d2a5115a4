"""Sans-IO state machine for all that engines are told beside turns: weights, pauses and sleep.

It takes events (an engine came, left or answered; a trainer's call; a timer) and returns commands
(send, resolve a call, set a timer, give an engine up). It does no I/O and reads no clock.
:class:`tidegate.orchestrator.weight_sync.control.EngineControl` carries the commands out.

What is known of an engine is one record, :class:`_Engine`; how far a version is, one
:class:`WeightUpdate`; how far a call is, its :class:`Phase`. docs/architecture.md has the tables.

A version comes to an engine in four phases: ``init`` once, then ``start`` and ``update`` (the
engine copies it beside its live weights while it decodes) and ``finish`` (it swaps between two
steps). The version released last is kept in its place of the channel's buffer until another is
released: an engine that joins late, or whose publish failed, gets that one. A version that is only
part of a set is laid over the newest that was published and has not failed.

A pause is a state of the run, not a count: the one asked for last holds, and one resume ends it.
Pauses, resumes and swaps come one after another. Sleep is a state of the run, too; engines are
paused first, and go on last.
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
    Paused,
    PauseMode,
    Resume,
    Resumed,
    StartWeightUpdate,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, Sleep, SleepLevel, Wake

NONE = -1
"""The version that an engine serves that has forgotten its weights."""

WATCH = -1
"""The timer of the versions on their way; every other timer has the number of its call."""

PublishWait = Literal["live", "staged", "none"]
"""Until when a publish waits: until all engines serve the version; until all have it beside their
live weights, so that none can refuse it any more; or only until it is written where they copy it
from, so that the trainer may change its tensors."""

Outgoing = list[tuple[str, Message]]
"""(engine, message) pairs, to be sent in order."""

Answer = (
    WeightsStaged
    | WeightsLive
    | WeightsFailed
    | Paused
    | Resumed
    | Asleep
    | Awake
    | sleep_messages.SleepFailed
)
"""What engines say of weights, pauses and sleep."""

ONLY_PARTS = (
    "engines that forget their weights can't have them again, for only parts of a set were "
    "published so far; publish a whole state dict once, or sleep at level 1"
)
NO_WEIGHTS = "it has forgotten its weights, and none were published that it could take"
UNKNOWN_BEFORE = (
    "this run goes on with another's weights, and hasn't got those that a part of a set or an "
    "adapter would be laid over; publish a whole state dict first, the model directory's if only "
    "adapters are trained"
)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What an engine's hello says of its memory."""

    levels: Sequence[int]
    """The levels it can sleep at."""
    asleep: Sequence[MemoryTag]
    lacks_weights: bool


@dataclass(frozen=True, slots=True)
class EngineCame:
    """An engine joined, or began a conversation anew, serving ``version``."""

    engine: str
    version: int
    memory: EngineMemory | None
    """None if it has gone again."""


@dataclass(frozen=True, slots=True)
class EngineGone:
    """An engine left, or was given up."""

    engine: str


@dataclass(frozen=True, slots=True)
class Answered:
    """An engine has said something of weights, pauses or sleep."""

    engine: str
    message: Answer


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    """A publish wants to write its weights. Resolved with a :class:`Reserved`."""

    call: int
    next_version: int
    """The number after the newest released."""
    is_part: bool = False
    """Whether only some tensors, or an adapter, will be written."""
    has_deltas: bool = False
    """Whether tensors that are as they were may be left out."""
    first_bad: int | None = None
    """Of a rollback: from this version on, what was published is bad. Engines are aborted and
    paused first, and stay so until good weights are live."""


@dataclass(frozen=True, slots=True)
class PublishAsked:
    """Weights were written in the buffer reserved. Resolved once their caller need wait no more."""

    call: int
    version: int
    chunks: list[UpdateWeights]
    wait: PublishWait = "live"
    change: Change = anew
    """Makes the version of the one before, and of what was written."""
    is_rollback: bool = False
    """Whether engines go on once it is live: they were paused for it."""


@dataclass(frozen=True, slots=True)
class ReserveGivenUp:
    """Nothing will be published in the buffer reserved."""


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """The user wants engines paused by ``mode``; None: to go on. Resolved once they are."""

    call: int
    mode: PauseMode | None
    clear_cache: bool = False


@dataclass(frozen=True, slots=True)
class StandStillAsked:
    """The run itself wants engines aborted and paused; or what the user wants to hold again."""

    call: int
    is_still: bool


@dataclass(frozen=True, slots=True)
class SleepAsked:
    """The user wants engines to sleep. Resolved with the bytes that they count less together."""

    call: int
    level: SleepLevel
    tags: Sequence[MemoryTag]
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class WakeAsked:
    """The user wants engines awake; once all of them is, they go on."""

    call: int
    tags: Sequence[MemoryTag]


@dataclass(frozen=True, slots=True)
class GoOn:
    """A call that was woken by :class:`WakeCall` has its turn."""

    call: int
    next_version: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller of a call is gone."""

    call: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of a call, or of the versions on their way (:data:`WATCH`), is up."""

    timer: int


@dataclass(frozen=True, slots=True)
class SwapsSafe:
    """No crash can undo the release of the versions that engines are to swap to."""


@dataclass(frozen=True, slots=True)
class KvPolicyChosen:
    """What the next swap does to the KV of turns that are kept."""

    kv_policy: KvPolicy


Event = (
    EngineCame
    | EngineGone
    | Answered
    | ReserveAsked
    | PublishAsked
    | ReserveGivenUp
    | PauseAsked
    | StandStillAsked
    | SleepAsked
    | WakeAsked
    | GoOn
    | Cancelled
    | TimerFired
    | SwapsSafe
    | KvPolicyChosen
)


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Send:
    """Send messages to engines, in order, after all that was posted before; maybe none."""

    outgoing: Outgoing


@dataclass(frozen=True, slots=True)
class Resolve:
    """Give a call its result, or have it raise ``error``. It is over."""

    call: int
    value: object = None
    error: TidegateError | None = None


@dataclass(frozen=True, slots=True)
class WakeCall:
    """What a call waits for is so: have it go on (:class:`GoOn`) in the loop's next turn."""

    call: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Tell the time after ``seconds``, in place of whatever this timer was set to."""

    timer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StopTimer:
    """Forget a timer; harmless where it is not set."""

    timer: int


@dataclass(frozen=True, slots=True)
class WhenSafe:
    """Tell (:class:`SwapsSafe`) once no crash can undo what was decided so far."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Strike an engine that does not do as it was told."""

    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class RefuseEngine:
    """An engine refuses the weights that others serve: tell it that it can't be of this run."""

    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class NoteSwap:
    """An engine serves other weights from now on."""

    engine: str
    message: WeightsLive


@dataclass(frozen=True, slots=True)
class ReleaseVersion:
    """Every engine has staged a version: it is the trainer's from now on."""

    version: int
    replaced: int = 0
    """Number of earlier publishes whose place it took before every engine had staged them."""


@dataclass(frozen=True, slots=True)
class NoteFailure:
    """Weights that the trainer made were refused, late or given up: no engine serves them."""


@dataclass(frozen=True, slots=True)
class RetractVersions:
    """From this version on, what was published is bad: give up what it has sampled."""

    first_bad: int


@dataclass(frozen=True, slots=True)
class StandStill:
    """Count no episode's time while engines are paused."""

    is_still: bool


@dataclass(frozen=True, slots=True)
class HoldBatches:
    """Hand over no batch while it is undecided which version the trainer has made; or go on.

    Comes whenever something has changed that others may wait for.
    """

    is_held: bool


Command = (
    Send
    | Resolve
    | WakeCall
    | SetTimer
    | StopTimer
    | WhenSafe
    | GiveUp
    | RefuseEngine
    | NoteSwap
    | ReleaseVersion
    | NoteFailure
    | RetractVersions
    | StandStill
    | HoldBatches
)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Where and what a publish is to write."""

    version: int
    keep: frozenset[int]
    """Versions whose parts must stay in the channel's buffer."""
    over: int | None
    """The version that a part of a set will be laid over; None for a whole set."""
    deltas_over: int | None
    """The version over which tensors may be left out that are as they were; None: none may be."""


# ---------------------------------------------------------------- state


@dataclass(slots=True)
class WeightUpdate:
    """One version on its way. An engine is in at most one of the sets, of at most one update."""

    version: int
    content: WeightContent
    staging: set[str] = field(default_factory=set)
    """Engines that copy it now."""
    staged: set[str] = field(default_factory=set)
    """Engines that have it beside the live weights, and wait for the word to swap."""
    swapping: set[str] = field(default_factory=set)
    """Engines that were told to swap."""
    is_released: bool = False
    """Whether engines may swap as soon as they have staged it."""
    is_withdrawn: bool = False
    """Whether nobody may swap any more; engines drop what they staged at the next start."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Engine -> why it can't take the version."""

    @property
    def engines(self) -> set[str]:
        """The engines that it is on its way to."""
        return self.staging | self.staged | self.swapping

    def is_for(self, engine: str) -> bool:
        """Whether it is on its way to this engine."""
        return engine in self.staging or engine in self.staged or engine in self.swapping

    def strike(self, engine: str) -> None:
        """Wait for this engine no more."""
        for engines in (self.staging, self.staged, self.swapping):
            engines.discard(engine)


@dataclass(frozen=True, slots=True)
class Laggards:
    """Engines that a version is on its way to, and how far it has come with them."""

    version: int
    phase: Literal["staging", "staged", "swapping"]
    engines: tuple[str, ...]

    def __str__(self) -> str:
        return f"v{self.version} is {self.phase} on {', '.join(self.engines)}"


@dataclass(slots=True)
class _Engine:
    """All that is known of one engine."""

    version: int
    """What it serves, if it has weights."""
    levels: Sequence[int] = ()
    """The levels it can sleep at."""
    asleep: set[MemoryTag] = field(default_factory=set)
    level: SleepLevel | None = None
    """At which it sleeps; None: it doesn't, or hasn't said so to this process."""
    lacks_weights: bool = False
    """Whether nothing but an update can bring it weights."""
    has_new_weights: bool = False
    """Whether it was sent weights since it was told to put its own to sleep: they serve."""
    request: int | None = None
    """The order to sleep or wake that it has not answered yet."""
    asked_level: SleepLevel | None = None
    returned_bytes: int = 0
    failure: str | None = None
    """Why it can't sleep or wake as asked last."""
    resumes_due: int = 0
    """Resumes it hasn't answered: what it says of pauses before that is old."""
    unanswered: list[int] = field(default_factory=list)
    """The versions that it was told to start and has not answered for, in order."""

    @property
    def serves(self) -> int:
        """The version that it can serve now."""
        return NONE if self.lacks_weights else self.version

    @property
    def base(self) -> int | None:
        """The version that a part of a set can be laid over; None: it needs a whole set."""
        return None if "weights" in self.asleep else self.serves

    def start(self, version: int) -> StartWeightUpdate:
        """The order to begin a version."""
        if not self.unanswered or self.unanswered[-1] != version:
            self.unanswered.append(version)
        return StartWeightUpdate(version=version)

    def has_outdated(self, version: int) -> bool:
        """Whether an answer is to an earlier start of ``version`` than the newest.

        An engine answers each start once and in order, but for one that the same version follows:
        those two have one answer.
        """
        if version in self.unanswered:
            del self.unanswered[: self.unanswered.index(version) + 1]
        return version in self.unanswered


class Phase(Enum):
    """What a call waits for."""

    RESERVE = auto()
    """That the channel's buffer is free to be reserved."""
    DRAIN = auto()
    """That no engine reads what is about to be overwritten."""
    BRING = auto()
    """A version that is published: that engines have staged it, or serve it."""
    PAUSE_TURN = auto()
    """That the pauses and resumes asked for before are over."""
    SWAPS_END = auto()
    """That no engine is swapping."""
    PAUSE_ANSWERS = auto()
    """That every engine has said that it is paused, or goes on."""
    SLEEP_TURN = auto()
    """That the sleeps and wakes asked for before are over."""
    WEIGHTS_SETTLE = auto()
    """To sleep: that no version is on its way, or being written."""
    SLEEP_ANSWERS = auto()
    """That every engine sleeps as wanted, or has said why not."""
    WAKE_ANSWERS = auto()
    """That every engine is awake as wanted, or has said why not."""
    WEIGHTS_COME = auto()
    """That every engine that woke without weights has some, or that none are on their way."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call that is not over."""

    asked: ReserveAsked | PublishAsked | PauseAsked | StandStillAsked | SleepAsked | WakeAsked
    phase: Phase
    mode: PauseMode | None = None
    """How engines are to be paused; None: they are to go on."""
    clear_cache: bool = False
    version: int = -1
    """Of a publish: the version that it brings, or is about to write."""
    is_resolved: bool = False
    """Of a publish: whether its caller has gone on."""
    is_live: bool = False
    """Of a rollback: whether its version is live, and engines are yet to go on."""
    is_late: bool = False
    """Whether its time is up."""


@dataclass(slots=True)
class _Wanted:
    """What is to sleep on every engine."""

    tags: set[MemoryTag] = field(default_factory=set)
    level: SleepLevel = 1


class WeightControl:
    """Weights, pauses and sleep of every engine. Change it only through :meth:`handle`."""

    def __init__(
        self,
        init: InitWeights,
        *,
        pause_mode: PauseMode,
        kv_policy: KvPolicy,
        wave_engines: int | None = None,
        weights_timeout_s: float = 60.0,
        pause_timeout_s: float = 60.0,
    ) -> None:
        """``wave_engines``: so many swap at a time, at most; None: all at once.
        ``weights_timeout_s``: how long a version, a sleep or a wake may take; ``pause_timeout_s``:
        how long an engine may take to stop what it does, or to go on."""
        self._init = init
        self._wave_engines = wave_engines
        self._swap_mode: PauseMode = pause_mode
        self.kv_policy: KvPolicy = kv_policy
        """What the next swap does to the KV of turns that are kept."""
        self._weights_timeout_s = weights_timeout_s
        self._pause_timeout_s = pause_timeout_s
        self._out: list[Command] = []
        self._engines: dict[str, _Engine] = {}
        """In the order in which they joined."""
        self._calls: dict[int, _Call] = {}
        self._waiting: dict[int, None] = {}
        """Calls that wait until something is so, in the order in which they began to."""
        # -------- versions
        self.update: WeightUpdate | None = None
        """The newest version published."""
        self._kept: WeightUpdate | None = None
        """The newest released; the buffer holds it still."""
        self._before: WeightUpdate | None = None
        """What a part of a set is laid over; None: the model directory's weights."""
        self.is_reserved = False
        """Whether the buffer is about to be written for the next version, or engines sleep now."""
        self.newest_version = -1
        """Released by this process: engines may serve it; -1: none."""
        self._taken_version = -1
        """The newest number that somebody was told of and that may never be released."""
        self._is_watching = False
        """Whether the versions on their way have a timer."""
        self.failure: TidegateError | None = None
        """Of a publish whose caller was gone by then, until somebody is told."""
        # -------- pauses
        self.pause_mode: PauseMode | None = None
        """As engines were told last; None: they run."""
        self._clears_cache = False
        self._users_mode: PauseMode | None = None
        self._sleeping_mode: PauseMode | None = None
        """What engines were paused by to sleep; None while none are to."""
        self._stands_still = False
        self._pausing: int | None = None
        """The call whose pause or resume is under way; no engine is told to swap meanwhile."""
        self._pause_queue: deque[int] = deque()
        self._unsettled_pauses: set[str] = set()
        """Engines that have not said yet that they are paused, or go on, as was asked last."""
        # -------- sleep
        self._wanted = _Wanted()
        self._sleeping: int | None = None
        """The call whose sleep or wake is under way."""
        self._sleep_queue: deque[int] = deque()
        self._slept_version = -1
        """The newest released when engines were put to sleep: later ones wake their weights."""
        self._requests = 0
        """Orders to sleep or wake so far."""

    def handle(self, event: Event) -> list[Command]:
        """Take in one event and say what to do about it."""
        match event:
            case Answered(engine=engine, message=message):
                self._on_answer(engine, message)
            case EngineCame():
                self._on_came(event)
            case EngineGone(engine=engine):
                self._on_gone(engine)
            case GoOn(call=call, next_version=next_version):
                self._go_on(call, next_version)
            case ReserveAsked():
                self._on_reserve(event)
            case PublishAsked():
                self._on_publish(event)
            case ReserveGivenUp():
                self._unreserve()
            case PauseAsked(call=call, mode=mode):
                self._users_mode = mode
                self._ask_pause(_Call(event, Phase.PAUSE_TURN, clear_cache=event.clear_cache))
            case StandStillAsked(call=call, is_still=is_still):
                self._stands_still = is_still
                self._ask_pause(_Call(event, Phase.PAUSE_TURN))
            case SleepAsked() | WakeAsked():
                self._on_sleep_or_wake(event)
            case Cancelled(call=call):
                self._on_cancelled(call)
            case TimerFired(timer=timer):
                self._on_timer(timer)
            case SwapsSafe():
                self._swap()
            case KvPolicyChosen(kv_policy=kv_policy):
                self.kv_policy = kv_policy
        commands, self._out = self._out, []
        return commands

    # ------------------------------------------------------------ looking

    @property
    def asleep(self) -> tuple[MemoryTag, ...]:
        """What sleeps on all engines, or is about to."""
        return tuple(tag for tag in MEMORY_TAGS if tag in self._wanted.tags)

    @property
    def sleep_level(self) -> SleepLevel:
        """At which level it does."""
        return self._wanted.level

    @property
    def staging_version(self) -> int | None:
        """The newest version published, until every engine has staged it."""
        return self.update.version if self.update is not None and self.is_undecided else None

    @property
    def kept_buffers(self) -> frozenset[int]:
        """The versions as which the one released last, and what it is laid over, were written."""
        kept = self._kept
        return frozenset() if kept is None else frozenset({kept.version} | kept.content.buffers)

    @property
    def version_before(self) -> int:
        """What a part of a set would be laid over now."""
        return self._before.version if self._before is not None else 0

    @property
    def adapters_before(self) -> Collection[str]:
        """The adapters that it has."""
        return self._before.content.adapters if self._before is not None else ()

    def knows_before(self, next_version: int) -> bool:
        """Whether it is known what a part of a set would be laid over: the model directory's
        weights, or what this process published. Not so in a run that goes on with another's."""
        return self.newest_version >= 0 or next_version <= 1

    @property
    def is_writable(self) -> bool:
        """Whether no engine reads what isn't kept. Those that read what is kept need not be waited
        for: the next version takes its place with them, however far they are."""
        update = self.update
        return update is None or update is self._kept or not update.staging

    @property
    def is_undecided(self) -> bool:
        """Whether the newest version may still be given up: it is being staged."""
        update = self.update
        return update is not None and not update.is_released and not update.is_withdrawn

    @property
    def is_settled(self) -> bool:
        """Whether no version is on its way."""
        return not any(u.staging or u.staged or u.swapping for u in self._updates)

    @property
    def is_swapping(self) -> bool:
        """Whether an engine was told to swap, and hasn't yet said that it has."""
        return any(update.swapping for update in self._updates)

    @property
    def laggards(self) -> list[Laggards]:
        """The engines that versions are on their way to, by version and phase."""
        found: list[Laggards] = []
        for update in self._updates:
            v = update.version
            found += [
                Laggards(v, "staging", tuple(sorted(update.staging))),
                Laggards(v, "staged", tuple(sorted(update.staged))),
                Laggards(v, "swapping", tuple(sorted(update.swapping))),
            ]
        return [laggards for laggards in found if laggards.engines]

    def take_failure(self) -> TidegateError | None:
        """The error of a publish that failed behind its caller's back; told once."""
        failure, self.failure = self.failure, None
        return failure

    @property
    def _updates(self) -> list[WeightUpdate]:
        """The newest and the kept one, where there are such and they are two."""
        kept = None if self._kept is self.update else self._kept
        return [update for update in (self.update, kept) if update is not None]

    @property
    def _publishes(self) -> list[_Call]:
        """Those that are not over, in the order in which they were asked for."""
        calls = self._calls.values()
        return [call for call in calls if call.phase is Phase.BRING and not call.is_live]

    @property
    def _places_in_wave(self) -> int:
        """How many more engines may swap now."""
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
        """Whether what a call waits for is so."""
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
                return bool(self._in_vain) or not self._lacking
            case Phase.BRING | Phase.PAUSE_TURN | Phase.SLEEP_TURN:
                return False  # somebody else's end brings it on

    def _go_on(self, number: int, next_version: int) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        match call.phase:
            case Phase.RESERVE if self.is_reserved:
                self._wait(call)  # somebody else was woken before
            case Phase.RESERVE:
                self._reserve(call, next_version)
            case Phase.DRAIN:
                self._end_drain(call)
            case Phase.PAUSE_TURN:
                self._pause_queue.remove(number)
                self._begin_pause(call)
            case Phase.SWAPS_END:
                self._tell_pause(call)
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
                self._end_bringing(call)
            case Phase.BRING if call.is_live:
                self._stands_still = False
                self._ask_pause(call)
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
        if isinstance(call.asked, SleepAsked | WakeAsked):
            self._let_sleep(number)

    def _on_timer(self, timer: int) -> None:
        if timer == WATCH:
            self._be_late()
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
        """Do what is due; ``only``: since something has changed of that engine, and of no other."""
        self._order_sleep(only)
        self._advance_weights()  # and has others look at what they wait for

    def _advance_weights(self) -> None:
        update = self.update
        if update is not None and self.is_undecided and not update.staging:
            refusal = next(iter(update.refusals.items()), None)
            if refusal is not None:
                engine, why = refusal
                said = f"engine {engine!r} refused weights v{update.version}: {why}"
                self._fail(WeightsRefused(said))
            else:
                self._release(update)
        if self._is_swap_due and self._pausing is None:
            # Only when safe: a crash that forgets the version could give its number to others.
            self._out.append(WhenSafe())
        if self.is_settled and not self.is_undecided:
            self._settle()
        self._note()

    def _note(self) -> None:
        """Others may wait for what has changed."""
        self._out.append(HoldBatches(self.is_reserved or self.is_undecided))
        for number in [n for n in self._waiting if self._is_ready(self._calls[n])]:
            del self._waiting[number]
            self._out.append(WakeCall(number))

    def _send(self, outgoing: Outgoing) -> None:
        self._out.append(Send(outgoing))

    # ------------------------------------------------------------ engines

    def _on_came(self, event: EngineCame) -> None:
        name, memory = event.engine, event.memory
        self._remove(name)
        engine = self._engines[name] = _Engine(event.version)
        if memory is not None:
            engine.levels, engine.asleep = memory.levels, set(memory.asleep)
            engine.lacks_weights = memory.lacks_weights
        told: Outgoing = []
        if self.pause_mode is not None:  # it knows of no pause, and must before it gets turns
            self._unsettled_pauses.add(name)
            told += self._pause_word(name)
        for update in self._updates:
            update.refusals.pop(name, None)  # another process may see it differently
        told.append((name, self._init))
        self._send([*told, *self._catch_up()])
        self._advance(name)

    def _on_gone(self, engine: str) -> None:
        if engine in self._engines:  # else it was given up here
            self._remove(engine)
            self._advance(engine)

    def _remove(self, engine: str) -> None:
        """Wait for an engine no more."""
        self._engines.pop(engine, None)
        self._unsettled_pauses.discard(engine)
        for update in self._updates:
            update.strike(engine)
        self._note_new_weights()

    def _give_up(self, engines: Iterable[str], why: str) -> None:
        for engine in engines:
            self._on_gone(engine)
            self._out.append(GiveUp(engine, why))

    def _on_answer(self, name: str, message: Answer) -> None:
        match message:
            case WeightsStaged(version=version):
                self._on_staged(name, version)
            case WeightsLive():
                self._on_live(name, message)
            case WeightsFailed(version=version, message=why):
                if self._on_refused(name, version, why):
                    self._on_gone(name)
                    self._out.append(RefuseEngine(name, why))
            case Paused() | Resumed():
                self._on_paused(name, message)
            case Asleep() | Awake() | sleep_messages.SleepFailed():
                self._on_slept(name, message)
        engine = self._engines.get(name)
        if engine is None or not (engine.lacks_weights and self._is_publish_awaited):
            self._send(self._catch_up(name))
        self._advance(name)

    @property
    def _is_publish_awaited(self) -> bool:
        """Whether engines that woke without weights are to get them by the trainer's next publish:
        as long as not all is to be awake."""
        if self._sleeping_mode is None:
            return False
        call = None if self._sleeping is None else self._calls.get(self._sleeping)
        return call is None or call.phase is not Phase.WEIGHTS_COME

    # ------------------------------------------------------------ versions: publishing

    def _on_reserve(self, event: ReserveAsked) -> None:
        call = self._begin(_Call(event, Phase.RESERVE))
        if event.is_part and not self.knows_before(event.next_version):
            self._refuse_publish(call, WeightsRefused(UNKNOWN_BEFORE))
        elif (failure := self.take_failure()) is not None:
            self._refuse_publish(call, failure)
        elif event.first_bad is not None:
            self._stands_still = True  # so that no turn goes on from KV that bad weights computed
            self._ask_pause(call)
        elif self.is_reserved:  # another is written now, which takes no engine's time
            self._wait(call)
        else:
            self._reserve(call, event.next_version)

    def _refuse_publish(self, call: _Call, error: TidegateError) -> None:
        """Fail a publish that has not written anything. Its weights come to nothing as well: the
        batches that they were made from count for the next version."""
        self._out.append(NoteFailure())
        self._end(call, error=error)

    def _reserve(self, call: _Call, next_version: int) -> None:
        """Take the buffer for the next version. One that is still being staged is given up."""
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
            assert isinstance(call.asked, ReserveAsked)
            self._end(call, self._reserved(call.version, call.asked))
            return
        assert self.update is not None
        error = self._lagging(sorted(self.update.staging))
        self._unreserve()
        self._give_up(error.engines, str(error))
        self._end(call, error=error)

    def _reserved(self, version: int, asked: ReserveAsked) -> Reserved:
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
        """A newer version is about to be written: nobody swaps to one that isn't released yet.

        Engines that copy it are told of the newer one, and so to stop; each says that it has given
        up, or that it was done. Where the newer one goes by the same number they can't be told
        apart: then the copies are waited for.
        """
        update, before = self.update, self._before
        if update is None or update.is_released:
            return []
        self._withdraw()
        self._before = before  # it hasn't failed: what it brought is in the newer one too
        if update.version == version:
            return []
        return [(e, self._engines[e].start(version)) for e in sorted(update.staging)]

    def _unreserve(self) -> None:
        """Nothing will be published in the buffer reserved; what it was reserved over is gone."""
        self.is_reserved = False
        if self.update is not None and self.update.is_withdrawn:
            self._before = self._kept
        self._out.append(NoteFailure())
        if not self.is_undecided:
            for call in [c for c in self._publishes if c.version > self.newest_version]:
                self._end_publish(call, PublishDropped(version=call.version))
        self._send(self._catch_up())
        self._note()

    def _on_publish(self, event: PublishAsked) -> None:
        """Have every engine stage a version that doesn't serve it.

        A resumed run publishes once more what engines may have kept serving. What was on its way to
        some is given up, for this is newer.
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
        """Its caller has what it waits for; the version is still on its way."""
        if not call.is_resolved:
            call.is_resolved = True
            self._out.append(Resolve(call.asked.call))

    def _end_publish(self, call: _Call, error: TidegateError | None) -> None:
        is_rollback = isinstance(call.asked, PublishAsked) and call.asked.is_rollback
        if is_rollback and error is None:
            call.is_live = True
            self._out.append(WakeCall(call.asked.call))
            return
        if not call.is_resolved:
            self._end(call, error=error)
            return
        del self._calls[call.asked.call]
        if error is not None:
            self.failure = error  # who called it has gone on

    def _cancel_publish(self, call: _Call) -> None:
        """Nobody waits for this publish any more. Until all engines have staged its version, none
        will swap to it; unless an earlier call waits for it too: then it goes on."""
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
        """Nobody swaps to the newest version, unless they were told to already."""
        if self.update is not None and not self.update.is_released:
            self.update.is_withdrawn = True
            self.update.staged.clear()
        self._before = self._kept

    def _fail(self, error: TidegateError) -> None:
        """The newest version comes to nothing; unless it was released, nobody swaps to it."""
        is_released = self.update is not None and self.update.is_released
        self._withdraw()
        if not is_released:
            self._out.append(NoteFailure())
        self._stop_watch()
        for call in [c for c in self._publishes if is_released or c.version > self.newest_version]:
            self._end_publish(call, error)
        self._send(self._catch_up())

    def _release(self, update: WeightUpdate) -> None:
        """Every engine has staged it."""
        replaced = [c for c in self._publishes if self.newest_version < c.version < update.version]
        self.newest_version = update.version
        self._out.append(ReleaseVersion(update.version, len(replaced)))
        update.is_released = True
        self._kept = update
        for call in self._publishes:
            is_enough = isinstance(call.asked, PublishAsked) and call.asked.wait == "staged"
            if is_enough and call.version <= update.version:
                self._resolve_publish(call)

    def _settle(self) -> None:
        """All engines serve the newest version released."""
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

    def _be_late(self) -> None:
        """An engine has not taken the newest version in time."""
        self._is_watching = False
        # Those that have staged a version wait for others, or for the word to swap.
        holdups = sorted({engine for u in self._updates for engine in u.staging | u.swapping})
        if not holdups:
            self._watch()  # the journal is late, or a pause: no engine is to blame
            return
        error = self._lagging(holdups)
        self._fail(error)
        self._give_up(error.engines, str(error))
        if not self.is_settled:
            self._watch()  # others go on in their waves
        self._note()

    def _lagging(self, engines: list[str]) -> EngineLagging:
        return EngineLagging(
            engines=engines,
            wanted_version=self.update.version if self.update else 0,
            waited_s=self._weights_timeout_s,
            where="; ".join(map(str, self.laggards)),
        )

    # ------------------------------------------------------------ versions: engines

    def _catch_up(self, engine: str | None = None) -> Outgoing:
        """Have engines stage the newest version there is, if none is on its way to them.

        Those that joined late; and those for whom a publish that failed had taken its place. Only
        ``engine`` is looked at if it is given: the one that has just said something.
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
            engine.lacks_weights = False
            engine.asleep.discard("weights")
            engine.has_new_weights |= message.version > self._slept_version
            self._note_new_weights()
        if update is not None:
            update.strike(name)
        self._out.append(NoteSwap(name, message))

    def _on_refused(self, name: str, version: int, why: str) -> bool:
        """An engine can't take a version; it serves the old one on.

        True if others serve it already: then this engine can't be of the run any more.
        """
        engine, update = self._engines.get(name), self._update_of(version)
        if engine is None or engine.has_outdated(version):
            return False
        if update is None or not update.is_for(name):
            return False  # given up for a newer one; or asked for twice, and it has just swapped
        update.strike(name)
        update.refusals[name] = why
        return update.is_released

    @property
    def _is_swap_due(self) -> bool:
        return self._places_in_wave > 0 and any(u.is_released and u.staged for u in self._updates)

    def _swap(self) -> None:
        """The word to swap, for those that have staged what is released; each is told once.

        In waves, each engine that serves the new version makes room for the next one.
        """
        if self._pausing is not None:
            return  # a pause has begun since; its end looks again
        told: Outgoing = []
        for update in self._updates:
            if not update.is_released:
                continue
            finish = FinishWeightUpdate(
                version=update.version, pause_mode=self._swap_mode, kv_policy=self.kv_policy
            )
            wave = sorted(update.staged)[: max(0, self._places_in_wave)]
            told += [(engine, finish) for engine in wave]
            update.swapping.update(wave)
            update.staged.difference_update(wave)
        if told:
            self._send(told)
            if self._wave_engines is not None and self._is_watching:
                self._watch()  # each wave has its own time

    # ------------------------------------------------------------ pauses

    def _ask_pause(self, call: _Call) -> None:
        """Pause, or go on, in turn: as the run wants it, else a sleep, else the user."""
        if call.asked.call not in self._calls:
            self._begin(call)
        call.mode = "abort" if self._stands_still else self._sleeping_mode or self._users_mode
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
            self._tell_pause(call)

    def _tell_pause(self, call: _Call) -> None:
        call.phase = Phase.PAUSE_ANSWERS
        if call.mode is None and self.pause_mode is None:
            self._end_pause(call)
            return
        self.pause_mode, self._clears_cache = call.mode, call.clear_cache
        self._out.append(StandStill(call.mode is not None))
        self._unsettled_pauses = set(self._engines)
        self._send([word for name in sorted(self._engines) for word in self._pause_word(name)])
        if not self._unsettled_pauses:
            self._end_pause(call)
            return
        if call.mode != "wait":  # which takes as long as the longest turn
            self._set_timer(call.asked.call, self._pause_timeout_s)
        self._wait(call)

    def _pause_word(self, name: str) -> Outgoing:
        if self.pause_mode is not None:
            return [(name, Pause(mode=self.pause_mode, clear_cache=self._clears_cache))]
        self._engines[name].resumes_due += 1
        return [(name, Resume())]

    def _on_paused(self, name: str, message: Paused | Resumed) -> None:
        engine = self._engines.get(name)
        if engine is None:
            return
        if isinstance(message, Paused):
            if message.mode == self.pause_mode and not engine.resumes_due:
                self._unsettled_pauses.discard(name)
        elif engine.resumes_due:
            engine.resumes_due -= 1
            if self.pause_mode is None and not engine.resumes_due:
                self._unsettled_pauses.discard(name)

    def _end_pause(self, call: _Call) -> None:
        """All engines have answered; or those that haven't in time are given up."""
        self._stop_timer(call.asked.call)
        if call.is_late:
            call.is_late = False
            what = "resumed" if call.mode is None else f"paused by mode {call.mode!r}"
            why = f"it has not {what} within {self._pause_timeout_s:.0f} s"
            self._give_up(sorted(self._unsettled_pauses), why)
        self._let_pause(call.asked.call)
        self._advance()  # swaps may have waited for it
        match call.asked:
            case SleepAsked():
                call.phase = Phase.WEIGHTS_SETTLE
                self._sleep_once_settled(call)
            case ReserveAsked(first_bad=first_bad) if first_bad is not None:
                call.phase = Phase.RESERVE
                self._out += [RetractVersions(first_bad), WakeCall(call.asked.call)]
            case WakeAsked():
                self._let_sleep(call.asked.call)
                self._end(call)
            case _:
                self._end(call)

    def _let_pause(self, call: int | None) -> None:
        """Let the next one pause, if none does; ``call`` does no more."""
        if call == self._pausing:
            self._pausing = None
        if self._pausing is None and self._pause_queue:
            self._out.append(WakeCall(self._pause_queue[0]))

    # ------------------------------------------------------------ sleep: calls

    def _on_sleep_or_wake(self, event: SleepAsked | WakeAsked) -> None:
        call = self._begin(_Call(event, Phase.SLEEP_TURN))
        if isinstance(event, SleepAsked) and (why := self._objection(event)) is not None:
            self._end(call, error=ConfigError(why))
        elif self._sleeping is None and not self._sleep_queue:
            self._begin_sleep(call)
        else:
            self._sleep_queue.append(event.call)

    def _objection(self, event: SleepAsked) -> str | None:
        """Why engines can't sleep so."""
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
        if isinstance(call.asked, SleepAsked):
            self._sleeping_mode = call.asked.mode
            self._ask_pause(call)
            return
        assert isinstance(call.asked, WakeAsked)
        self._wanted = _Wanted(self._wanted.tags - set(call.asked.tags), self._wanted.level)
        self._order(call, Phase.WAKE_ANSWERS)

    def _sleep_once_settled(self, call: _Call) -> None:
        """Engines are paused: put them to sleep, once no weights are on their way."""
        asked = call.asked
        assert isinstance(asked, SleepAsked)
        if self.is_reserved or not self.is_settled:
            self._wait(call)
            return
        self.is_reserved = True  # no publish begins meanwhile
        self._slept_version = self.newest_version
        wanted = self._wanted
        deeper = max(asked.level, wanted.level) if "weights" in wanted.tags else asked.level
        self._wanted = _Wanted(wanted.tags | set(asked.tags), deeper)
        for engine in self._engines.values():
            engine.returned_bytes, engine.has_new_weights = 0, False
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
        """All engines have answered; or those that haven't in time are given up."""
        self._stop_timer(call.asked.call)
        what = "sleep" if isinstance(call.asked, SleepAsked) else "wake"
        if call.is_late:
            call.is_late = False
            why = f"no {what} within {self._weights_timeout_s:.0f} s"
            self._give_up(self._unsettled_sleepers, why)
        failures = {n: e.failure for n, e in self._engines.items() if e.failure is not None}
        error = SleepFailed(what=what, failures=failures) if failures else None
        if isinstance(call.asked, SleepAsked):
            returned = sum(engine.returned_bytes for engine in self._engines.values())
            self.is_reserved = False
            self._advance_weights()
            self._let_sleep(call.asked.call)
            self._end(call, None if error else returned, error)
        elif error is None and not self._wanted.tags and self._sleeping_mode is not None:
            self._bring_weights(call)
        else:
            self._let_sleep(call.asked.call)
            self._end(call, error=error)

    def _bring_weights(self, call: _Call) -> None:
        """Have engines that have no weights stage some; again, if those come to nothing."""
        call.phase = Phase.WEIGHTS_COME
        for engine in self._lacking:
            self._send(self._catch_up(engine))
        self._advance_weights()
        if self._is_ready(call):
            self._end_bringing(call)
            return
        self._set_timer(call.asked.call, self._weights_timeout_s)
        self._wait(call)

    def _end_bringing(self, call: _Call) -> None:
        self._stop_timer(call.asked.call)
        if call.is_late:
            call.is_late = False
            why = f"no weights within {self._weights_timeout_s:.0f} s of waking"
            self._give_up(self._lacking, why)
        elif self._in_vain:
            failures = dict.fromkeys(self._lacking, NO_WEIGHTS)
            self._let_sleep(call.asked.call)
            self._end(call, error=SleepFailed(what="wake", failures=failures))
            return
        self._sleeping_mode = None
        self._ask_pause(call)

    def _let_sleep(self, call: int) -> None:
        """Let the next one sleep or wake, if none does; ``call`` does no more."""
        if call == self._sleeping:
            self._sleeping = None
        if self._sleeping is None and self._sleep_queue:
            self._out.append(WakeCall(self._sleep_queue[0]))

    @property
    def _lacking(self) -> list[str]:
        """Engines that need a whole update before they can serve."""
        return sorted(name for name, engine in self._engines.items() if engine.lacks_weights)

    @property
    def _in_vain(self) -> list[str]:
        """Those of them that none is on its way to."""
        return [engine for engine in self._lacking if not self._is_on_its_way(engine)]

    # ------------------------------------------------------------ sleep: engines

    def _order_sleep(self, only: str | None = None) -> None:
        """Tell engines what they can do now of what is wanted.

        With ``only`` just that one is looked at, while none is to sleep: each publish has each of a
        thousand engines say twice that something has changed.
        """
        told: Outgoing = []
        for name in sorted(self._engines) if only is None or self._wanted.tags else (only,):
            engine = self._engines.get(name)
            if engine is None or engine.request is not None or engine.failure is not None:
                continue
            word = self._sleep_word(engine)
            if isinstance(word, Wake) or (word is not None and self._may_sleep(name)):
                engine.request, engine.asked_level = word.request, self._wanted.level
                self._requests += 1
                told.append((name, word))
        if told:
            self._send(told)

    def _may_sleep(self, name: str) -> bool:
        """Whether an engine runs no turn, and no weights are on their way to it."""
        is_paused = self.pause_mode is not None and name not in self._unsettled_pauses
        return is_paused and not self._is_on_its_way(name)

    def _sleep_word(self, engine: _Engine) -> Sleep | Wake | None:
        """What an engine is to do next, if it isn't as wanted."""
        wanted = self._wanted
        if extra := engine.asleep - wanted.tags:
            return Wake(request=self._requests, tags=_in_order(extra))
        tags = wanted.tags - {"weights"} if engine.has_new_weights else wanted.tags
        if not tags or wanted.level not in engine.levels:
            return None
        if tags == engine.asleep and engine.level == wanted.level:
            return None
        return Sleep(request=self._requests, level=wanted.level, tags=_in_order(tags))

    @property
    def _unsettled_sleepers(self) -> list[str]:
        """Engines that are not as wanted, and have not said why."""
        return sorted(
            name
            for name, engine in self._engines.items()
            if engine.request is not None or (engine.failure is None and self._sleep_word(engine))
        )

    def _on_slept(self, name: str, message: Asleep | Awake | sleep_messages.SleepFailed) -> None:
        engine = self._engines.get(name)
        if engine is None or message.request != engine.request:
            return  # of a conversation that is over
        engine.request = None
        match message:
            case Asleep(tags=tags, returned_bytes=returned):
                engine.asleep, engine.level = set(tags), engine.asked_level
                engine.returned_bytes += returned
            case Awake(tags=tags, lacks_weights=lacks):
                engine.asleep, engine.lacks_weights = set(tags), lacks
            case sleep_messages.SleepFailed(message=why):
                engine.failure = why

    def _note_new_weights(self) -> None:
        """Where all engines have new weights, who joins need not put its own to sleep."""
        if "weights" not in self._wanted.tags or not self._engines:
            return
        if all(engine.has_new_weights for engine in self._engines.values()):
            self._wanted.tags.discard("weights")


def _in_order(tags: Iterable[MemoryTag]) -> list[MemoryTag]:
    return [tag for tag in MEMORY_TAGS if tag in set(tags)]
