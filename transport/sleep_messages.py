"""Messages to make an engine release its memory and allocate it again, as vLLM's sleep mode does.

Part of the protocol in :mod:`tidegate.transport.messages`. The orchestrator sends ``Sleep`` and
``Wake``, for example to lend a GPU to the trainer.
"""

from typing import Literal

from tidegate.transport.limits import Count
from tidegate.transport.message import Message

MemoryTag = Literal["weights", "kv_cache"]
"""Kinds of memory: all weights, live and staged; and the KV of all turns."""

MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")

SleepLevel = Literal[1, 2]
"""Sleep level: 1 offloads the weights so that waking restores them, 2 discards them."""


class Sleep(Message, frozen=True, kw_only=True, tag="sleep"):
    """Requests that the engine release memory, once the pause requested before is in effect.

    Answered by ``Asleep``, or by ``SleepRequestFailed`` if there is no pause or the release fails.
    KV is discarded at every level: turns that a pause has frozen are recomputed.
    """

    request_id: Count
    """Request number, repeated in the answer."""
    level: SleepLevel
    tags: list[MemoryTag]


class Wake(Message, frozen=True, kw_only=True, tag="wake"):
    """Requests that the engine allocate memory again.

    Answered by ``Awake`` or ``SleepRequestFailed``. Turns run once nothing sleeps, there are
    weights, and no pause is in effect.
    """

    request_id: Count
    """Request number, repeated in the answer."""
    tags: list[MemoryTag]


class Asleep(Message, frozen=True, kw_only=True, tag="asleep"):
    """The requested memory is released."""

    request_id: Count
    """Number of the answered ``Sleep``."""
    tags: list[MemoryTag]
    """All memory that is asleep now."""
    freed_bytes: Count = 0
    """Measured decrease of this process's memory, in bytes."""


class Awake(Message, frozen=True, kw_only=True, tag="awake"):
    """The requested memory is allocated again."""

    request_id: Count
    """Number of the answered ``Wake``."""
    tags: list[MemoryTag]
    """Memory that is still asleep."""
    needs_weights: bool = False
    """Whether the weights' memory is allocated but empty, so a full update must come before a turn
    runs."""


class SleepRequestFailed(Message, frozen=True, kw_only=True, tag="sleep_request_failed"):
    """A ``Sleep`` or ``Wake`` failed, for this reason; memory that was asleep stays asleep."""

    request_id: Count
    """Number of the request that failed."""
    message: str
