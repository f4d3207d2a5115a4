"""Messages of a weight update, in vLLM's four phases: init, start, update, finish.

Part of the protocol in :mod:`tidegate.transport.messages`. The orchestrator sends phases 1-4 for
each version; the tensors themselves travel through a weight channel.

Letters in shapes: M tensors.
"""

from typing import Annotated, Any

import msgspec

from tidegate.transport.limits import Count
from tidegate.transport.message import KvPolicy, Message, PauseMode

# ---------------------------------------------------------------- orchestrator -> engine


class TensorPatch(msgspec.Struct, frozen=True, array_like=True):
    """Marks a tensor whose bytes in an update are a patch: its changed elements, compressed."""

    changed: Count
    """Number of changed elements of the tensor."""
    gap_bytes: Count
    """Bytes of the decompressed patch that encode the gaps between changed elements; their
    differences follow."""
    result_crc32: Count | None = None
    """CRC-32 (zlib) of the whole tensor's bytes after the patch; None if no check is requested."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, type and location of one tensor in the buffer of an update."""

    name: str
    dtype: str
    """Torch's name of the dtype: ``float32``, ``bfloat16``, …"""
    shape: Annotated[list[int], msgspec.Meta(max_length=16)]
    offset: Count
    """Offset of the first byte from the start of the buffer."""
    nbytes: Count
    """Number of bytes of the tensor in the buffer; of its patch, if it has one."""
    crc32: Count | None = None
    """CRC-32 (zlib) of the bytes in the buffer; None if no check is requested."""
    patch: TensorPatch | None = None
    """Set if the bytes are a patch of the same tensor in the version that the update follows; then
    ``nbytes`` is the patch's size. None: the bytes are the whole tensor."""


class CudaIpcHandle(msgspec.Struct, frozen=True, array_like=True):
    """CUDA IPC handle of an update's buffer, as torch exports it."""

    gpu: str
    """UUID of the GPU that has the memory."""
    handle: bytes
    """IPC handle of the allocation that contains the buffer."""
    nbytes: Count
    """Size of the buffer, in bytes."""
    offset: Count
    """Offset of the buffer from the start of the allocation, in bytes."""
    ref_counter_handle: bytes
    """Name of the shared memory that holds torch's reference counters."""
    ref_counter_offset: Count


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its name, and the scale of the product of its matrices."""

    name: str
    scale: float
    """Factor of the product of the adapter's matrices: alpha / r."""


class BaseVersions(msgspec.Struct, frozen=True, array_like=True):
    """Range of versions ``[first, last]`` that differ from an update only in the update's
    tensors."""

    first: Count
    """Oldest version of the range."""
    last: Count
    """Newest version of the range, included."""


class InitWeights(Message, frozen=True, kw_only=True, tag="init_weights"):
    """Phase 1 of 4: sets up the weight channel."""

    channel: str
    """Name of the channel, one of ``Hello.weight_channels``."""
    info: dict[str, Any] = {}


class StartWeightUpdate(Message, frozen=True, kw_only=True, tag="start_weight_update"):
    """Phase 2 of 4: allocates room for ``version`` beside the live weights."""

    version: Count


class UpdateWeights(Message, frozen=True, kw_only=True, tag="update_weights"):
    """Phase 3 of 4, once per buffer: copy these tensors. Once all have been copied, the engine
    answers with ``WeightsStaged`` or ``WeightsFailed``."""

    version: Count
    location: str
    """Location of the buffer in the channel's own terms: a segment's path, a file's path."""
    tensors: list[TensorSpec]
    """Tensors in this buffer; empty if the chunk has no buffer."""
    is_last: bool = True
    """Whether this is the last chunk: then check names, shapes and dtypes, and answer."""
    base_versions: BaseVersions | None = None
    """Versions that a partial update applies to: if the live version is among them, missing tensors
    are taken from it, otherwise the update is refused. None: the update is complete. Equal in each
    chunk of an update."""
    adapter: Adapter | None = None
    """The adapter that all of these tensors belong to; None: they belong to the model. A version
    has only those adapters that come with it."""
    ipc_handle: CudaIpcHandle | None = None
    """The buffer on a GPU, which ``location`` cannot name."""


class FinishWeightUpdate(Message, frozen=True, kw_only=True, tag="finish_weight_update"):
    """Phase 4 of 4: swap ``version`` in between two steps. Answered by ``WeightsLive``."""

    version: Count
    pause_mode: PauseMode
    kv_policy: KvPolicy


# ---------------------------------------------------------------- engine -> orchestrator


class WeightsStaged(Message, frozen=True, kw_only=True, tag="weights_staged"):
    """A version is staged beside the live one, checked, and ready to be swapped in."""

    version: Count
    staging_us: Count = 0
    """Time from the start of the update until it was staged, in microseconds."""


class WeightsLive(Message, frozen=True, kw_only=True, tag="weights_live"):
    """From now on every token of this engine is sampled by ``version``."""

    version: Count
    swapped_us: Count = 0
    """Time of the swap on the engine's monotonic clock, in microseconds."""
    recomputed_turns: Count = 0
    """Number of frozen turns whose KV is computed again."""
    stall_us: Count = 0
    """Time that no turn made progress because of the swap, in microseconds."""


class WeightsFailed(Message, frozen=True, kw_only=True, tag="weights_failed"):
    """An update was refused; the engine keeps serving the old version."""

    version: Count
    message: str
