"""What do the two ends say of memory that an engine gives back, and takes again?

Part of the one contract in :mod:`tidegate.transport.messages`. Nothing here knows how memory is
given back, nor what it is lent to meanwhile.
"""

from typing import Literal

from tidegate.transport.limits import Count
from tidegate.transport.message import Message

MemoryTag = Literal["weights", "kv_cache"]
"""Which memory: that of the weights, live and staged; and that of all turns' KV."""

MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")

SleepLevel = Literal[1, 2]
"""What becomes of the weights: 1 puts them where they can be had again, 2 forgets them."""


class Sleep(Message, frozen=True, kw_only=True, tag="sleep"):
    """Give memory back to the system, once the pause that was asked for before is in effect.

    Answered by ``Asleep``, or by ``SleepFailed`` if there is no pause or it can't be done. KV is
    forgotten at every level: turns that a pause has frozen are computed again.
    """

    request: Count
    """A number that its answer repeats."""
    level: SleepLevel
    tags: list[MemoryTag]


class Wake(Message, frozen=True, kw_only=True, tag="wake"):
    """Take memory again. Answered by ``Awake``, or by ``SleepFailed`` if there is none to be had.

    Turns run once nothing sleeps, there are weights, and no pause is on.
    """

    request: Count
    tags: list[MemoryTag]


class Asleep(Message, frozen=True, kw_only=True, tag="asleep"):
    """The memory asked for is given back."""

    request: Count
    tags: list[MemoryTag]
    """All that sleeps now."""
    returned_bytes: Count = 0
    """By how much less the system counts for this process, as measured."""


class Awake(Message, frozen=True, kw_only=True, tag="awake"):
    """What was asked for is there again."""

    request: Count
    tags: list[MemoryTag]
    """What sleeps still."""
    lacks_weights: bool = False
    """There is room for weights, but nothing in it: a whole update must come before a turn runs."""


class SleepFailed(Message, frozen=True, kw_only=True, tag="sleep_failed"):
    """A ``Sleep`` or ``Wake`` came to nothing, for this reason; what was asleep is so still."""

    request: Count
    message: str
