"""Sleep of a simulated engine: it has no memory to free, and answers exactly as a real one does."""

from tidegate.simulation.staging import SimulatedStaging
from tidegate.simulation.turns import SimulatedTurns
from tidegate.transport.messages import Message
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepFailed,
    Wake,
)

BYTES = 1 << 30
"""What each kind of memory counts for."""


class SimulatedSleep:
    """Sleep state of one process."""

    def __init__(self, turns: SimulatedTurns, staging: SimulatedStaging) -> None:
        self._turns = turns
        self._staging = staging
        self._asleep: set[MemoryTag] = set()
        self._are_weights_gone = False
        self._are_the_directorys = True
        self.lacks_weights = False
        """Whether nothing but an update can bring weights."""
        self.asked: Sleep | None = None
        """What is to sleep as soon as it can."""
        self.refusals_due = 0
        """So many times there will be no memory to wake in."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """What sleeps now."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep]

    def settle(self) -> list[Message]:
        """Do what was asked for, if it can be done by now; the answer to it."""
        asked, turns = self.asked, self._turns
        if asked is None:
            return []
        if turns.pause_mode is None:
            self.asked = None
            return [SleepFailed(request=asked.request, message="no pause is on")]
        drains = turns.pause_mode == "wait" and turns.running
        if drains or turns.awaited_swap is not None or self._staging.is_busy:
            return []
        self.asked = None
        if "kv_cache" in asked.tags:
            turns.forget_kv()
        if "weights" in asked.tags:
            self._staging.abandon()
            self._are_weights_gone |= asked.level == 2
        returned = BYTES * len(set(asked.tags) - self._asleep)
        self._asleep.update(asked.tags)
        self._hold()
        return [Asleep(request=asked.request, tags=self.asleep, returned_bytes=returned)]

    def wake(self, message: Wake) -> Message:
        """Take memory again."""
        if self.refusals_due:
            self.refusals_due -= 1
            why = "out of memory, as its author wants it"
            return SleepFailed(request=message.request, message=why)
        if "weights" in message.tags and "weights" in self._asleep:
            self.lacks_weights = self._are_weights_gone and not self._are_the_directorys
            self._are_weights_gone = False
        self._asleep.difference_update(message.tags)
        self._hold()
        return Awake(request=message.request, tags=self.asleep, lacks_weights=self.lacks_weights)

    def swapped(self) -> None:
        """Other weights were swapped in."""
        self._asleep.discard("weights")
        self.lacks_weights = self._are_weights_gone = self._are_the_directorys = False
        self._hold()

    def _hold(self) -> None:
        self._turns.is_held = bool(self._asleep) or self.lacks_weights
