"""Interfaces of weight channels, and the checks of tensor specs that all of them share.

The publish path writes to a channel's sender, an engine's staging reads from its receiver. A
channel moves named byte buffers and uses only the size of a dtype; the engine checks whether names
and shapes fit its model. The phases are those of vLLM: init, start, update, finish. A channel takes
part in two: :meth:`WeightSender.init` and :meth:`WeightSender.write` make the messages of phases 1
and 3; phases 2 and 4 carry no data.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from tidegate.errors import BadFrame, ConfigError, WeightsRefused
from tidegate.transport.addresses import check_connector, resolve_wildcard_host
from tidegate.transport.messages import InitWeights, TensorPatch, TensorSpec, UpdateWeights
from tidegate.transport.security import EngineKeys, OrchestratorKeys

if TYPE_CHECKING:
    from tidegate.transport.weight_channels.cuda_memory import Gpu

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Size of one element in bytes, by dtype name as in torch."""


PATCH_GAP_MAX = 255
"""Value of a gap's byte in a patch that means: as many unchanged elements, and another byte."""

ALIGNMENT_BYTES = 64
"""Alignment of tensors in a buffer: one cache line, enough for every dtype and vector load."""


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """One tensor to send: its bytes, row-major and little-endian, with dtype and shape."""

    name: str
    dtype: str
    """Torch's name of the dtype; a key of :data:`ITEM_BYTES`."""
    shape: tuple[int, ...]
    data: memoryview
    """Contiguous; read while :meth:`WeightSender.write` runs, not kept."""
    patch: TensorPatch | None = None
    """Set if ``data`` is a patch of the tensor instead of its bytes."""


@dataclass(frozen=True, slots=True)
class WeightSenderConfig:
    """Where the orchestrator's end of a channel writes or listens."""

    directory: Path | None = None
    """Directory for files; None: a private one."""
    address: str | None = None
    """The orchestrator's address, whose interface is listened on; None: engines are on this
    host."""
    keys: OrchestratorKeys | None = None
    """Keys of the engines that may connect."""
    device: str = "cpu"
    """Torch's name of the device of the tensors to publish."""


@dataclass(frozen=True, slots=True)
class WeightReceiverConfig:
    """How an engine reaches its orchestrator, for channels that fetch weights over the network."""

    address: str = ""
    keys: EngineKeys | None = None
    host: str = ""
    """Host name. Engines of one host share fetched weights; give them different names to prevent
    it."""
    gpu: "Gpu | None" = None
    """GPU that the engine computes on, able to open another process's memory; None: the CPU."""


@dataclass(frozen=True, slots=True)
class WeightChannel:
    """How to open the two ends of a weight channel, and what it can do. Each channel's module has
    one, named ``CHANNEL``."""

    open_sender: "Callable[[WeightSenderConfig], WeightSender]"
    """Raises ``ConfigError`` if the files or sockets cannot be created, or there is no such GPU."""
    open_receiver: "Callable[[InitWeights, WeightReceiverConfig], WeightReceiver]"
    """Raises ``WeightsRefused`` if the sender's weights are out of reach."""
    needs_gpu: bool = False
    """Whether weights stay on one GPU, which trainer and engines share: the sender is given device
    tensors."""
    one_host: bool = False
    """Whether it reaches engines on the orchestrator's host only."""
    one_reader: bool = False
    """Whether an engine must read with one process, so not with several ranks."""
    carries_patches: bool = True
    """Whether versions may be patches, which are computed on the host."""
    carries_adapters: bool = False
    """Whether it keeps many small sets of tensors beside one another, for adapters with versions of
    their own."""


class WeightSender(Protocol):
    """The orchestrator's end: one writer, any number of readers, a few versions at a time."""

    def init(self) -> InitWeights:
        """Return the phase-1 message, for each engine that joins."""
        ...

    def write(
        self, version: int, tensors: Sequence[NamedBuffer], *, keep: Collection[int] = ()
    ) -> list[UpdateWeights]:
        """Make ``version`` readable for receivers and return the messages of phase 3.

        May overwrite every version not in ``keep``, so call it only when no receiver reads one of
        those. A kept version stays where its messages say, and takes up memory. The time is spent
        in copies that release the GIL, so it can run in a thread.

        Raises:
            WeightsRefused: a tensor's dtype, shape and size contradict each other.
        """
        ...

    def close(self) -> None:
        """Remove the published data; receivers keep what they have mapped. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """An engine's end."""

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, Any]]:
        """Yield the bytes of each tensor, after all specs have been checked: as a ``memoryview``,
        or as a device tensor if the channel needs a GPU.

        A channel that fetches over the network polls ``is_wanted`` and stops yielding once it
        returns False.

        The views are private to this process: writing to one changes no other process's data. They
        show this version until the sender writes the next, so copy them before ``last`` is
        answered. The disk channel yields copies.

        Raises:
            WeightsRefused: a spec contradicts itself or the buffer, or there is no buffer.
        """
        ...

    def close(self) -> None:
        """Release the buffer; yielded views stay readable. Idempotent."""
        ...


def checked_nbytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes.

    Raises:
        WeightsRefused: an unknown dtype or a negative dimension.
    """
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise WeightsRefused(
            f"tensor {name!r} has dtype {dtype!r}; publish one of {', '.join(ITEM_BYTES)}"
        )
    if any(dimension < 0 for dimension in shape):
        raise WeightsRefused(f"tensor {name!r} has a negative dimension: {list(shape)}")
    return item_bytes * math.prod(shape)


def check_patch(name: str, patch: TensorPatch, dtype: str, shape: Sequence[int]) -> None:
    """Check that a patch can be one of a tensor of this dtype and shape.

    Raises:
        WeightsRefused: it changes more elements than there are, or its gaps are too long or short.
    """
    elements = checked_nbytes(name, dtype, shape) // ITEM_BYTES[dtype]
    gap_bytes_max = patch.changed + elements // PATCH_GAP_MAX
    if patch.changed > elements or not patch.changed <= patch.gap_bytes <= gap_bytes_max:
        raise WeightsRefused(
            f"the patch of tensor {name!r} changes {patch.changed} of {elements} elements by "
            f"{patch.gap_bytes} bytes of gaps, and that many changes take {patch.changed} to "
            f"{gap_bytes_max}"
        )


def check_buffers(tensors: Sequence[NamedBuffer]) -> None:
    """Check tensors before sending, with the receiver's rules."""
    names = set()
    for tensor in tensors:
        expected = checked_nbytes(tensor.name, tensor.dtype, tensor.shape)
        if tensor.patch is None and tensor.data.nbytes != expected:
            raise WeightsRefused(
                f"tensor {tensor.name!r} of dtype {tensor.dtype} and shape {list(tensor.shape)} "
                f"takes {expected} bytes, but its data has {tensor.data.nbytes}"
            )
        if not tensor.data.c_contiguous:
            raise WeightsRefused(
                f"tensor {tensor.name!r} is not contiguous; copy it into row-major order first"
            )
        if tensor.name in names:
            raise WeightsRefused(
                f"tensor {tensor.name!r} appears twice in one version; publish each name once"
            )
        names.add(tensor.name)


def layout(tensors: Sequence[NamedBuffer], start: int = 0) -> tuple[list[TensorSpec], int]:
    """Lay tensors out one after the other, aligned, from ``start`` on; return specs and end
    offset."""
    specs = []
    end = start
    for tensor in tensors:
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = offset + tensor.data.nbytes
        specs.append(
            TensorSpec(
                tensor.name,
                tensor.dtype,
                list(tensor.shape),
                offset,
                tensor.data.nbytes,
                patch=tensor.patch,
            )
        )
    return specs, end


def views(
    specs: Sequence[TensorSpec], buffer: memoryview
) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Check all ``specs`` against ``buffer``, then slice it accordingly."""
    check_specs(specs, buffer.nbytes)
    return ((spec, buffer[spec.offset : spec.offset + spec.nbytes]) for spec in specs)


def check_specs(specs: Sequence[TensorSpec], buffer_bytes: int) -> None:
    """Check that specs are consistent, distinct, and inside of the buffer."""
    names = set()
    for spec in specs:
        expected = checked_nbytes(spec.name, spec.dtype, spec.shape)
        if spec.patch is not None:
            check_patch(spec.name, spec.patch, spec.dtype, spec.shape)
        elif spec.nbytes != expected:
            raise WeightsRefused(
                f"tensor {spec.name!r} of dtype {spec.dtype} and shape {spec.shape} takes "
                f"{expected} bytes, but its spec says {spec.nbytes}"
            )
        if spec.offset < 0 or spec.offset + spec.nbytes > buffer_bytes:
            raise WeightsRefused(
                f"tensor {spec.name!r} at bytes [{spec.offset}, {spec.offset + spec.nbytes}) is "
                f"outside of the buffer, which has {buffer_bytes}"
            )
        if spec.name in names:
            raise WeightsRefused(f"tensor {spec.name!r} appears twice in one update")
        names.add(spec.name)


# ---------------------------------------------------------------- channels with own sockets

Frame = TypeVar("Frame", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message between the ends of a channel as one frame."""
    return msgspec.msgpack.encode(message)


def decode(frame: bytes, kind: type[Frame]) -> Frame:
    """Decode a message between the ends of a channel.

    Raises:
        BadFrame: the frame is not a message of this kind.
    """
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"unreadable {kind.__name__} of a weight channel: {error}") from error


def decode_if(frames: Sequence[bytes], kind: type[Frame]) -> Frame | None:
    """Decode a message; None if the frames are something else."""
    try:
        return decode(frames[0], kind) if len(frames) == 1 else None
    except BadFrame:
        return None


def sender_address(init: InitWeights, config: WeightReceiverConfig) -> str:
    """Return the address in ``init``, as this engine reaches it.

    Raises:
        WeightsRefused: it is invalid, or on another host while there are no keys.
    """
    address = resolve_wildcard_host(config.address, str(init.info.get("address")))
    try:
        check_connector(address, has_keys=config.keys is not None)
    except ConfigError as error:
        raise WeightsRefused(f"invalid address of the weight sender: {error}") from error
    return address
