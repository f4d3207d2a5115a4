"""Base class of all wire messages, and the literals that several of them share."""

from typing import Literal

import msgspec

PauseMode = Literal["abort", "keep", "wait"]
"""Effect of a pause on running turns: ``abort`` ends them now and returns their tokens so far;
``keep`` freezes them with their KV; ``wait`` lets them finish and starts nothing new."""

KvPolicy = Literal["keep", "recompute"]
"""Effect of new weights on the KV of frozen turns: ``keep`` it, or ``recompute`` it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of all messages; the field ``kind`` on the wire selects the subclass."""
