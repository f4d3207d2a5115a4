"""What do all weight channels have in common? Two small interfaces, and the checks of a receiver.

A channel moves named byte buffers and knows their dtypes only by size; whether names and shapes fit
a model is for the engine to say. The phases are vLLM's: init, start, update, finish. A channel has
a part in two: :meth:`WeightSender.init` and :meth:`WeightSender.write` make the messages of phases
1 and 3; phases 2 and 4 carry no data.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.security import EngineKeys

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
"""Size of one element, by torch's name of its dtype."""


ALIGNMENT_BYTES = 64
"""One cache line, and enough for every dtype and vector load."""


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """One tensor to send: its bytes, row-major and little-endian, and what they are."""

    name: str
    dtype: str
    """As torch spells it; a key of :data:`ITEM_BYTES`."""
    shape: tuple[int, ...]
    data: memoryview
    """Contiguous; read while :meth:`WeightSender.write` runs, not kept."""


@dataclass(frozen=True, slots=True)
class Home:
    """How an engine reaches its orchestrator: the way to weights that come over the network."""

    address: str = ""
    keys: EngineKeys | None = None
    host: str = ""
    """Engines of one host share what they fetch; to say that they don't, give them several."""
    gpu: "Gpu | None" = None
    """What the engine computes on, and can open another process's memory of; None: the CPU."""


class WeightSender(Protocol):
    """The orchestrator's end: one writer, any number of readers, a few versions at a time."""

    def init(self) -> InitWeights:
        """Phase 1, for each engine that joins."""
        ...

    def write(
        self, version: int, tensors: Sequence[NamedBuffer], *, keep: Collection[int] = ()
    ) -> list[UpdateWeights]:
        """Put ``version`` where receivers can read it; the messages of phase 3.

        May overwrite every version but those in ``keep``: call it only when no receiver reads
        another. A version that is kept stays where its own messages say, at the price of its room.
        Spends its time in copies that let other threads run, so it may be given to one.

        Raises:
            WeightsRefused: a tensor whose dtype, shape and size contradict each other.
        """
        ...

    def close(self) -> None:
        """Remove what was written; receivers keep what they have mapped. Harmless if repeated."""
        ...


class WeightReceiver(Protocol):
    """An engine's end."""

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """The bytes of each tensor; those of a file are copies, others are where they came to.

        All specs are checked before the first one.

        Where they come from afar, ``is_wanted`` is asked now and then; once it says no, there are
        no more.

        The views are private to this process: writing to one changes it for nobody else. What they
        show is the version asked for until the sender writes the next: copy before ``last`` is
        answered.

        Raises:
            WeightsRefused: a spec that contradicts itself or the buffer, or no buffer there.
        """
        ...

    def close(self) -> None:
        """Let go of the buffer; views given out stay readable. Harmless if repeated."""
        ...


def checked_nbytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """The size of a tensor, if there can be one such.

    Raises:
        WeightsRefused: an unknown dtype or a negative dimension.
    """
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise WeightsRefused(
            f"tensor {name!r} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}"
        )
    if any(dimension < 0 for dimension in shape):
        raise WeightsRefused(f"tensor {name!r} has a negative dimension: {list(shape)}")
    return item_bytes * math.prod(shape)


def check_buffers(tensors: Sequence[NamedBuffer]) -> None:
    """Refuse to send what a receiver would refuse to read."""
    names = set()
    for tensor in tensors:
        wanted = checked_nbytes(tensor.name, tensor.dtype, tensor.shape)
        if tensor.data.nbytes != wanted:
            raise WeightsRefused(
                f"tensor {tensor.name!r} of dtype {tensor.dtype} and shape {list(tensor.shape)} "
                f"takes {wanted} bytes, but its data has {tensor.data.nbytes}"
            )
        if not tensor.data.c_contiguous:
            raise WeightsRefused(
                f"tensor {tensor.name!r} is not contiguous; copy it into row-major order first"
            )
        if tensor.name in names:
            raise WeightsRefused(f"tensor {tensor.name!r} appears twice in one version")
        names.add(tensor.name)


def layout(tensors: Sequence[NamedBuffer], start: int = 0) -> tuple[list[TensorSpec], int]:
    """Where each tensor goes, one after the other from ``start`` on, and the end of the last."""
    specs = []
    end = start
    for tensor in tensors:
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = offset + tensor.data.nbytes
        specs.append(
            TensorSpec(tensor.name, tensor.dtype, list(tensor.shape), offset, tensor.data.nbytes)
        )
    return specs, end


def views(
    specs: Sequence[TensorSpec], buffer: memoryview
) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Slice ``buffer`` as ``specs`` say, once all of them have been checked against it."""
    check_specs(specs, buffer.nbytes)
    return ((spec, buffer[spec.offset : spec.offset + spec.nbytes]) for spec in specs)


def check_specs(specs: Sequence[TensorSpec], buffer_bytes: int) -> None:
    """Refuse specs that contradict themselves or each other, or lie outside of the buffer."""
    names = set()
    for spec in specs:
        wanted = checked_nbytes(spec.name, spec.dtype, spec.shape)
        if spec.nbytes != wanted:
            raise WeightsRefused(
                f"tensor {spec.name!r} of dtype {spec.dtype} and shape {spec.shape} takes "
                f"{wanted} bytes, but its spec says {spec.nbytes}"
            )
        if spec.offset < 0 or spec.offset + spec.nbytes > buffer_bytes:
            raise WeightsRefused(
                f"tensor {spec.name!r} at bytes [{spec.offset}, {spec.offset + spec.nbytes}) is "
                f"outside of the buffer, which has {buffer_bytes}"
            )
        if spec.name in names:
            raise WeightsRefused(f"tensor {spec.name!r} appears twice in one update")
        names.add(spec.name)
