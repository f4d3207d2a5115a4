"""Events and commands of weight control: versions, pauses and sleep of all engines.

:class:`tidegate.orchestrator.core.weight_control.WeightControl` takes the events and returns the
commands.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tidegate.errors import TidegateError
from tidegate.orchestrator.core.weight_content import Change, replace_all
from tidegate.transport import sleep_messages
from tidegate.transport.messages import (
    Asleep,
    Awake,
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

UPDATES_TIMER = -1
"""Id of the timer of all versions under way; every other timer has the id of its call."""

PublishWait = Literal["live", "staged", "none"]
"""When a publish returns.

``live``: all engines serve the version. ``staged``: all engines hold it beside their live weights,
so none can refuse it any more. ``none``: the version is in the channel's buffer, so the trainer may
change its tensors.
"""

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


class VersionDurable(Struct, frozen=True):
    """No crash can undo the release of a version, so engines may swap to it."""

    version: int


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
    | VersionDurable
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
    """Every engine has staged a version: it is now the trainer's version. Deliver
    :class:`VersionDurable` once no crash can undo that."""

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
