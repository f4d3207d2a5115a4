"""Base class of all wire messages, and the literals that several of them share."""

from typing import Literal, NamedTuple, get_args

import msgspec

PauseMode = Literal["abort", "keep", "wait"]
"""Effect of a pause on running turns: ``abort`` ends them now and returns their tokens so far;
``keep`` freezes them with their KV; ``wait`` lets them finish and starts nothing new."""

PAUSE_MODES: list[PauseMode] = list(get_args(PauseMode))

KvPolicy = Literal["keep", "recompute"]
"""Effect of new weights on the KV of frozen turns: ``keep`` it, or ``recompute`` it."""

KV_POLICIES: list[KvPolicy] = list(get_args(KvPolicy))


def keeps_kv(mode: PauseMode, kv_policy: KvPolicy) -> bool:
    """Whether running turns continue with KV of earlier weights after a swap."""
    return kv_policy == "keep" and mode != "abort"


class SwapMode(NamedTuple):
    """What a swap to other weights does to running turns, as fields of the message that asks for
    the swap. Only engines act by it; the orchestrator passes it on."""

    pause_mode: PauseMode
    kv_policy: KvPolicy


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of all messages; the field ``kind`` on the wire selects the subclass."""
