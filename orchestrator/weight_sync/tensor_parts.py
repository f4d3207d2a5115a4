"""Joins the parts of tensors that the ranks of a sharded trainer send, whole or as patches.

`state_dict.py` cuts a rank's parts, remote trainers send them, and the publish path joins them:
engines get the same messages as from one rank. A part is a box of its tensor. Parts must cover
their tensor exactly once.

Letters in shapes: C changed elements.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import TensorPatch, TensorSpec
from tidegate.transport.weight_channels.base import NamedBuffer
from tidegate.transport.weight_channels.checksums import joined_crc32
from tidegate.transport.weight_channels.patches import (
    ElementPatch,
    bits_of,
    decode_patch,
    encode_elements,
)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One rank's part of a tensor."""

    buffer: NamedBuffer
    """The tensor's name, dtype, and the part's shape and bytes, or a patch of the part."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """Index of the part's first element, in each dimension."""

    @property
    def elements(self) -> int:
        """Number of the part's elements."""
        return math.prod(self.buffer.shape)

    @property
    def is_run(self) -> bool:
        """Whether the part's elements follow each other in the whole tensor, in row-major order."""
        return self.buffer.shape[1:] == self.shape[1:] or self.elements == math.prod(self.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """Index of the part in the whole tensor."""
        sizes = zip(self.start, self.buffer.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in sizes)

    def indices(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return row-major indices in the whole tensor, [C], of elements of the part, [C]."""
        if self.is_run:
            first = self.start[0] * math.prod(self.shape[1:]) if self.shape else 0
            return index + first
        places = np.unravel_index(index, self.buffer.shape)
        moved = [place + start for place, start in zip(places, self.start, strict=True)]
        return np.ravel_multi_index(moved, self.shape).astype(np.int64, copy=False)


def joined(parts: Iterable[TensorPart]) -> list[NamedBuffer]:
    """Return the whole tensors that the parts make, or the patches of them.

    Raises:
        WeightsRefused: the parts of a tensor overlap, do not cover it, or contradict each other;
            or a patch is damaged.
    """
    by_name: dict[str, list[TensorPart]] = {}
    for part in parts:
        by_name.setdefault(part.buffer.name, []).append(part)
    return [_joined(name, each) for name, each in by_name.items()]


def _joined(name: str, parts: list[TensorPart]) -> NamedBuffer:
    parts.sort(key=lambda part: part.start)
    first = parts[0]
    _check(name, parts)
    if len(parts) == 1:
        return first.buffer
    patches = [part.buffer.patch for part in parts if part.buffer.patch is not None]
    if patches:
        return _joined_patches(name, parts, patches)
    whole = np.empty(first.shape, bits_of(memoryview(b""), first.buffer.dtype).dtype)
    for part in parts:
        whole[part.box] = bits_of(part.buffer.data, first.buffer.dtype).reshape(part.buffer.shape)
    data = whole.reshape(-1).view(np.uint8).data
    return NamedBuffer(name, first.buffer.dtype, first.shape, data)


def _check(name: str, parts: Sequence[TensorPart]) -> None:
    first, total = parts[0], math.prod(parts[0].shape)
    kinds = {(part.buffer.dtype, part.shape, part.buffer.patch is None) for part in parts}
    fit = all(
        len(part.start) == len(part.shape) == len(part.buffer.shape)
        and all(s.start >= 0 and s.stop <= n for s, n in zip(part.box, part.shape, strict=True))
        for part in parts
    )
    covered = sum(part.elements for part in parts)
    if len(kinds) > 1 or not fit or len({part.start for part in parts}) < len(parts):
        places = [(list(part.start), list(part.buffer.shape)) for part in parts[:4]]
        raise WeightsRefused(
            f"ranks sent parts of tensor {name!r} that contradict each other: of shape "
            f"{list(first.shape)}, the parts [start, shape] {places}; give all ranks state dicts "
            "of the same model, sharded on one device mesh"
        )
    if covered != total:
        raise WeightsRefused(
            f"the ranks' parts of tensor {name!r} have {covered} of its {total} elements; call "
            "publish(sharded=True) with its shards on every rank of its device mesh"
        )


def _joined_patches(
    name: str, parts: Sequence[TensorPart], patches: Sequence[TensorPatch]
) -> NamedBuffer:
    dtype, shape = parts[0].buffer.dtype, parts[0].shape
    indices, differences = [], []
    for part in parts:
        buffer = part.buffer
        spec = TensorSpec(
            name, dtype, list(buffer.shape), 0, buffer.data.nbytes, patch=buffer.patch
        )
        decoded = decode_patch(spec, buffer.data)
        indices.append(part.indices(decoded.index))
        differences.append(decoded.difference)
    index, difference = np.concatenate(indices), np.concatenate(differences)
    are_runs = all(part.is_run for part in parts)
    if not are_runs:
        order = np.argsort(index, kind="stable")
        index, difference = index[order], difference[order]
    frame, patch = encode_elements(ElementPatch(index, difference))
    crcs = [patch.result_crc32 for patch in patches]
    if are_runs and None not in crcs:
        crc32 = 0
        for part, crc in zip(parts, crcs, strict=True):
            part_bytes = part.elements * difference.itemsize
            crc32 = joined_crc32(crc32, crc or 0, part_bytes)
        patch = msgspec.structs.replace(patch, result_crc32=crc32)
    return NamedBuffer(name, dtype, shape, memoryview(frame), patch=patch)
