"""Codec of weight patches: the elements of a tensor that changed, as gaps and differences.

The publish path encodes a patch of each tensor (``weight_deltas="elements"``), engines' staging
decodes it. In bfloat16 a step of RL changes a few percent of a model's elements at most (PULSE,
arXiv:2602.03839), mostly by one unit in the last place. A patch says which and by how much, so the
result has the same bits as the whole tensor.

A patch is one zstd frame, with zstd's checksum, of two columns: for each changed element the number
of unchanged ones before it, in bytes of which 255 means "255, and more follows"; then the
difference of the elements' bits, as unsigned integers of the dtype's size that wrap around, zigzag
encoded (0, -1, 1, -2, … as 0, 1, 2, 3, …), low bytes first, then the next bytes of all.

Letters in shapes: C changed elements.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import TensorPatch, TensorSpec
from tidegate.transport.weight_channels.base import ITEM_BYTES, PATCH_GAP_MAX

LEVEL = 1
"""zstd's level. Level 3 makes patches of real steps 1 % smaller, in twice the time."""

Bits = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class ElementPatch:
    """Decoded patch of one tensor."""

    index: npt.NDArray[np.int64]
    """[C], indices of the changed elements in row-major order, ascending."""
    difference: Bits
    """[C], added to each element's bits, as integers of the dtype's size that wrap around."""


def bits_of(data: memoryview | npt.NDArray[np.uint8], dtype: str) -> Bits:
    """View a tensor's bytes as unsigned integers of its dtype's size."""
    bits: Bits = np.frombuffer(data, dtype=f"<u{ITEM_BYTES[dtype]}")
    return bits


def encode_patch(old: Bits, new: Bits) -> tuple[bytes, TensorPatch, npt.NDArray[np.int64]]:
    """Return the patch from ``old`` to ``new``, its description, and the changed indices."""
    index = np.flatnonzero(old != new)
    return *encode_elements(ElementPatch(index, new[index] - old[index])), index


def encode_elements(elements: ElementPatch) -> tuple[bytes, TensorPatch]:
    """Return the patch of these elements, and its description."""
    index, difference = elements.index, elements.difference
    gaps = np.diff(index, prepend=-1) - 1
    lengths = gaps // PATCH_GAP_MAX + 1
    column = np.full(int(lengths.sum()), PATCH_GAP_MAX, np.uint8)
    column[np.cumsum(lengths) - 1] = gaps % PATCH_GAP_MAX
    bits = 8 * difference.itemsize
    one = difference.dtype.type(1)
    # Zigzag: the sign moves into the lowest bit, so small differences have high bytes of 0.
    sign = difference >> difference.dtype.type(bits - 1)
    zigzag = (difference << one) ^ (~sign + one)
    kind = difference.dtype.type
    planes = [(zigzag >> kind(shift)).astype(np.uint8).tobytes() for shift in range(0, bits, 8)]
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    frame = compressor.compress(b"".join([column.tobytes(), *planes]))
    return frame, TensorPatch(len(index), len(column))


def decode_patch(spec: TensorSpec, frame: memoryview) -> ElementPatch:
    """Decode the patch that ``spec`` describes.

    Raises:
        WeightsRefused: the bytes are damaged, or are no patch of such a tensor.
    """
    patch, item_bytes = spec.patch, ITEM_BYTES[spec.dtype]
    assert patch is not None  # the caller has checked it
    size = patch.gap_bytes + patch.changed * item_bytes
    try:
        # The size is checked before anything is allocated: a frame may claim any.
        if zstandard.frame_content_size(frame) != size:
            raise WeightsRefused(
                f"the patch of tensor {spec.name!r} decompresses to another size than the {size} "
                "bytes that its header gives; publish a whole state dict"
            )
        content = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    except zstandard.ZstdError as error:
        raise WeightsRefused(
            f"the patch of tensor {spec.name!r} can't be decompressed ({error}): its bytes changed "
            "in transit; publish a whole state dict"
        ) from None
    column = content[: patch.gap_bytes]
    is_end = column != PATCH_GAP_MAX
    positions = np.count_nonzero(is_end)
    if (len(column) and not is_end[-1]) or positions != patch.changed:
        raise WeightsRefused(
            f"the patch of tensor {spec.name!r} has {positions} positions for {patch.changed} "
            "changed elements; publish a whole state dict"
        )
    # Of each element, its gap and itself; 255 stays as it is, and no sum passes 255.
    index = np.cumsum(column + is_end.view(np.uint8), dtype=np.int64)[is_end] - 1
    if len(index) and index[-1] >= spec_elements(spec):
        raise WeightsRefused(
            f"the patch of tensor {spec.name!r} changes element {index[-1]} of "
            f"{spec_elements(spec)}; publish a whole state dict"
        )
    planes = content[patch.gap_bytes :].reshape(item_bytes, patch.changed)
    # Shifted into place: copying the transposed planes takes 17 times as long.
    zigzag = planes[0].astype(f"<u{item_bytes}")
    kind = zigzag.dtype.type
    for byte in range(1, item_bytes):
        zigzag |= planes[byte].astype(zigzag.dtype) << kind(8 * byte)
    one = kind(1)
    difference: Bits = (zigzag >> one) ^ (~(zigzag & one) + one)
    return ElementPatch(index, difference)


def spec_elements(spec: TensorSpec) -> int:
    """Return a tensor's number of elements."""
    return int(np.prod(spec.shape, dtype=np.int64))
