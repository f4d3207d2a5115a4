"""How do new weights come to an engine, and what does it say of them? Four phases for a version.

Knows nothing of turns. How the tensors themselves travel is a channel's business.

Letters in shapes: M tensors.
"""

from typing import Annotated, Any

import msgspec

from tidegate.transport.limits import Count
from tidegate.transport.message import KvPolicy, Message, PauseMode

# ---------------------------------------------------------------- orchestrator -> engine


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor lies in the buffer of an update, and what it is."""

    name: str
    dtype: str
    """As torch spells it: ``float32``, ``bfloat16``, …"""
    shape: Annotated[list[int], msgspec.Meta(max_length=16)]
    offset: Count
    """First byte, from the start of the buffer."""
    nbytes: Count
    crc32: Count | None = None
    """Of its bytes, as zlib computes it; None: nobody asked for it to be checked."""


class SharedMemory(msgspec.Struct, frozen=True, array_like=True):
    """Where the buffer of an update is on a GPU, as torch tells another process of it."""

    gpu: str
    """Its UUID."""
    handle: bytes
    """Of the allocation that the buffer lies in."""
    nbytes: Count
    """The buffer's size."""
    offset: Count
    """Its first byte, from the start of the allocation."""
    counter: bytes
    """Name of the shared memory in which torch counts readers."""
    counter_offset: Count


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its name, and what the products of its matrices are multiplied by."""

    name: str
    scale: float


class Bases(msgspec.Struct, frozen=True, array_like=True):
    """The versions that differ from an update by no more than its tensors: ``[first, last]``."""

    first: Count
    last: Count


class InitWeights(Message, frozen=True, kw_only=True, tag="init_weights"):
    """Phase 1 of 4: how weights will travel."""

    channel: str
    info: dict[str, Any] = {}


class StartWeightUpdate(Message, frozen=True, kw_only=True, tag="start_weight_update"):
    """Phase 2 of 4: make room for ``version`` beside the live weights."""

    version: Count


class UpdateWeights(Message, frozen=True, kw_only=True, tag="update_weights"):
    """Phase 3 of 4, as often as needed: copy these tensors. Answered once all are in by
    ``WeightsStaged`` or ``WeightsFailed``."""

    version: Count
    location: str
    """Where the buffer is, in the channel's own terms: a segment's name, a file's path."""
    tensors: list[TensorSpec]
    last: bool = True
    """No more chunks follow: check names, shapes and dtypes, and answer."""
    bases: Bases | None = None
    """What these tensors may be laid over: if the live version is among them, what doesn't come is
    taken from that, else the update is refused. None: all tensors come. The same in each chunk of
    an update."""
    adapter: Adapter | None = None
    """These tensors are not the model's but all of an adapter's. The version has those adapters
    that come with it, and no others."""
    memory: SharedMemory | None = None
    """The buffer itself, where ``location`` can't name it: on a GPU."""


class FinishWeightUpdate(Message, frozen=True, kw_only=True, tag="finish_weight_update"):
    """Phase 4 of 4: swap ``version`` in between two steps. Answered by ``WeightsLive``."""

    version: Count
    pause_mode: PauseMode
    kv_policy: KvPolicy


# ---------------------------------------------------------------- engine -> orchestrator


class WeightsStaged(Message, frozen=True, kw_only=True, tag="weights_staged"):
    """A version is complete beside the live one, checked, and can be swapped in."""

    version: Count
    staging_us: Count = 0


class WeightsLive(Message, frozen=True, kw_only=True, tag="weights_live"):
    """From now on every token of this engine comes from ``version``."""

    version: Count
    swapped_us: Count = 0
    """Engine's monotonic clock at the swap."""
    recomputed_turns: Count = 0
    standstill_us: Count = 0
    """No turn got on for so long, for the swap alone."""


class WeightsFailed(Message, frozen=True, kw_only=True, tag="weights_failed"):
    """An update was refused; the old version serves on."""

    version: Count
    message: str
