"""Events and commands of weight control: versions, pauses and sleep of all engines.

:class:`tidegate.orchestrator.core.weight_control.WeightControl` takes the events and returns the
commands. An event or command with an ``adapter`` is about the versions of that adapter, which has
weight versions of its own; if the name is empty, it is about the run's weights.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tidegate.errors import TidegateError
from tidegate.orchestrator.core.weight_content import Change, replace_all
from tidegate.transport import sleep_messages
from tidegate.transport.messages import (
    AdapterFailed,
    AdapterLive,
    AdapterLoaded,
    AdapterNeeded,
    Asleep,
    Awake,
    HeldAdapter,
    KvPolicy,
    Message,
    PauseMode,
    TurnsPaused,
    TurnsResumed,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

PublishWait = Literal["live", "staged", "none"]
"""When a publish returns.

``live``: all engines serve the version. ``staged``: all engines hold it beside their live weights,
so none can refuse it any more. ``none``: the version is in the channel's buffer, so the trainer may
change its tensors.
"""

Timer = int | str
"""Id of a call, or name of the adapter (empty: the run's weights) whose versions are under way."""

Outgoing = list[tuple[str, Message]]
"""(engine, message) pairs in sending order."""

AdapterReply = AdapterLoaded | AdapterFailed | AdapterLive | AdapterNeeded
"""Messages from engines about adapters with versions of their own."""

ControlReply = (
    WeightsStaged
    | WeightsLive
    | WeightsFailed
    | TurnsPaused
    | TurnsResumed
    | Asleep
    | Awake
    | sleep_messages.SleepRequestFailed
    | AdapterReply
)
"""Messages from engines about weights, adapters, pauses and sleep."""


# ---------------------------------------------------------------- events


class EngineMemory(Struct, frozen=True):
    """Sleep state that an engine reports in its hello message."""

    levels: Sequence[int]
    """Sleep levels that the engine supports."""
    asleep: Sequence[MemoryTag]
    """Tags of the memory that sleeps already: ``weights``, ``kv_cache``."""
    needs_weights: bool
    """Whether the engine has dropped its weights."""


class AdapterMemory(Struct, frozen=True):
    """Adapters that an engine reports in its hello message."""

    adapters_max: int
    """Number of adapter versions that it holds; 0 if it serves no such adapters."""
    held: Sequence[HeldAdapter] = ()
    """Live versions that it has kept."""


class EngineConnected(Struct, frozen=True):
    """An engine joined or reconnected, serving ``version``."""

    engine: str
    version: int
    memory: EngineMemory | None
    """The engine's sleep state; None if the engine has left again."""
    adapters: AdapterMemory | None = None
    """The engine's adapters; None if it has left again, or has served them all the time."""


class EngineRemoved(Struct, frozen=True):
    """An engine left, or was removed."""

    engine: str
    keeps_adapters: bool = False
    """Whether the engine only leaves the run's weights, pauses and sleep, and serves adapters."""


class ControlReplyReceived(Struct, frozen=True):
    """An engine sent a message about weights, pauses or sleep."""

    engine: str
    message: ControlReply


class ReserveRequested(Struct, frozen=True):
    """A publish asks for the channel's buffer. Resolved with :class:`Reserved`."""

    call: int
    is_part: bool = False
    """Whether only some tensors, or an adapter, will be written."""
    has_deltas: bool = False
    """Whether unchanged tensors may be omitted."""
    first_bad: int | None = None
    """For a rollback: versions from this one on are bad. Engines are aborted and paused first, and
    stay paused until good weights are live. None for other publishes."""
    adapter: str = ""


class PublishRequested(Struct, frozen=True):
    """Weights were written to the reserved buffer. Resolved when ``wait`` is satisfied."""

    call: int
    version: int
    chunks: list[UpdateWeights]
    wait: PublishWait = "live"
    change: Change = replace_all
    """Computes the version's content from the base version's content and the written tensors."""
    adapter: str = ""
    scale: float = 1.0
    """Factor of the adapter's product."""


class ReserveAbandoned(Struct, frozen=True):
    """The reserved buffer is freed without a publish."""

    adapter: str = ""


class PinChanged(Struct, frozen=True):
    """An adapter's version is pinned (kept for turns that name it), or unpinned."""

    adapter: str
    version: int
    is_pinned: bool


class UnloadRequested(Struct, frozen=True):
    """An adapter is dropped by all engines, and its turns are refused."""

    adapter: str


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


class CallCancelled(Struct, frozen=True):
    """The caller of a call was cancelled."""

    call: int


class TimerFired(Struct, frozen=True):
    """A timer has expired."""

    timer: Timer


class VersionDurable(Struct, frozen=True):
    """No crash can undo the release of a version, so engines may swap to it."""

    version: int
    adapter: str = ""


class VersionsRetracted(Struct, frozen=True):
    """The groups of :class:`RetractVersions` are discarded."""


class KvPolicyChosen(Struct, frozen=True):
    """The user changed what the next swap does to the KV of kept turns."""

    kv_policy: KvPolicy


Call = (
    ReserveRequested
    | PublishRequested
    | PauseRequested
    | EngineHaltRequested
    | SleepRequested
    | WakeRequested
)
"""Events that begin a trainer's call."""

Event = (
    Call
    | EngineConnected
    | EngineRemoved
    | ControlReplyReceived
    | ReserveAbandoned
    | PinChanged
    | UnloadRequested
    | CallCancelled
    | TimerFired
    | VersionDurable
    | VersionsRetracted
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


class SetTimer(Struct, frozen=True):
    """Deliver :class:`TimerFired` after ``seconds``; replaces the timer's earlier setting."""

    timer: Timer
    seconds: float


class StopTimer(Struct, frozen=True):
    """Cancel a timer; harmless if it is not set."""

    timer: Timer


class GiveUp(Struct, frozen=True):
    """Remove an engine that did not reply in time."""

    engine: str
    why: str


class RefuseEngine(Struct, frozen=True):
    """Remove an engine that refused weights that other engines serve, and send it the reason."""

    engine: str
    why: str


class RecordSwap(Struct, frozen=True):
    """Record that an engine serves another version from now on."""

    engine: str
    message: WeightsLive | AdapterLive


class ReleaseVersion(Struct, frozen=True):
    """Every engine has staged a version: it is now the trainer's version. Deliver
    :class:`VersionDurable` once no crash can undo that."""

    version: int
    adapter: str = ""


class RetractVersions(Struct, frozen=True):
    """Discard the groups sampled by versions from ``first_bad`` on."""

    first_bad: int


class SuspendDeadlines(Struct, frozen=True):
    """Stop the clocks of all episodes while engines are paused, or start them again."""

    is_halted: bool


class HoldBatches(Struct, frozen=True):
    """Hold batches while the trainer's version is undecided, or hand them over again.

    Sent after every event, because other parts may wait for the change.
    """

    is_held: bool


Command = (
    Send
    | Resolve
    | SetTimer
    | StopTimer
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
    adapter: str = ""
