"""Sleep mode of a simulated engine: answers sleep and wake requests as a real engine does.

:mod:`engine` makes it. It changes the engine's :mod:`staging` and :mod:`turns`; no memory is freed.
"""

from tidegate.simulation.engine.staging import SimulatedStaging
from tidegate.simulation.engine.turns import SimulatedTurns
from tidegate.transport.messages import Message
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepRequestFailed,
    Wake,
)

BYTES = 1 << 30
"""Bytes that each kind of memory reports as returned."""


class SimulatedSleep:
    """Sleep state of one engine process."""

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
        pending, turns = self.pending, self._turns
        if pending is None:
            return []
        if turns.pause_mode is None:
            self.pending = None
            return [SleepRequestFailed(request_id=pending.request_id, message="no pause is on")]
        is_draining = turns.pause_mode == "wait" and turns.running
        if is_draining or turns.pending_swap is not None or self._staging.is_busy:
            return []
        self.pending = None
        if "kv_cache" in pending.tags:
            turns.forget_kv()
        if "weights" in pending.tags:
            self._staging.abandon()
            self._are_weights_gone |= pending.level == 2
        returned = BYTES * len(set(pending.tags) - self._asleep)
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
        self._turns.is_held = bool(self._asleep) or self.needs_weights
