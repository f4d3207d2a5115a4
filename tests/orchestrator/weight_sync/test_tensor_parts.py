"""Parts of tensors are joined to what one rank would have sent, bit for bit."""

import zlib

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import WeightsRefused
from tidegate.orchestrator.weight_sync.deltas import PATCH_SHARE_MAX, WrittenElements
from tidegate.orchestrator.weight_sync.tensor_parts import TensorPart, joined
from tidegate.transport.messages import TensorSpec
from tidegate.transport.weight_channels.base import NamedBuffer
from tidegate.transport.weight_channels.checksums import joined_crc32
from tidegate.transport.weight_channels.patches import bits_of, decode_patch, encode_patch

Elements = npt.NDArray[np.uint16]
Cuts = list[list[int]]


def cut(name: str, whole: Elements, cuts: Cuts) -> list[TensorPart]:
    """Cut a tensor at these indices of each dimension; empty parts are omitted."""
    edges = [[0, *sorted(at), size] for at, size in zip(cuts, whole.shape, strict=True)]
    parts = []
    for corner in np.ndindex(*(len(each) - 1 for each in edges)):
        ranges = [(each[at], each[at + 1]) for each, at in zip(edges, corner, strict=True)]
        part = np.array(whole[tuple(slice(*each) for each in ranges)], order="C")
        if part.size:
            data = part.reshape(-1).view(np.uint8).data
            buffer = NamedBuffer(name, "bfloat16", part.shape, data)
            parts.append(TensorPart(buffer, whole.shape, tuple(first for first, _ in ranges)))
    return parts


def patched_part(old: TensorPart, new: TensorPart) -> TensorPart:
    before, after = (bits_of(part.buffer.data, "bfloat16") for part in (old, new))
    frame, patch, _ = encode_patch(before, after)
    patch = msgspec.structs.replace(patch, result_crc32=zlib.crc32(new.buffer.data))
    buffer = NamedBuffer("w", "bfloat16", new.buffer.shape, memoryview(frame), patch=patch)
    return TensorPart(buffer, new.shape, new.start)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Elements, Elements, Cuts]:
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = noise.integers(0, 2**16, shape, dtype=np.uint16)
    is_changed = noise.random(shape) < draw(st.floats(0, 1))
    new = np.where(is_changed, noise.integers(0, 2**16, shape, dtype=np.uint16), old)
    cuts = [draw(st.lists(st.integers(0, size), max_size=3)) for size in shape]
    return old, new.astype(np.uint16), cuts


@given(tensors())
def test_parts_cut_anywhere_make_the_whole_tensor_again(
    case: tuple[Elements, Elements, Cuts],
) -> None:
    _, new, cuts = case
    (whole,) = joined(reversed(cut("w", new, cuts)))
    assert whole.shape == new.shape
    assert bytes(whole.data) == new.tobytes()


@given(tensors())
def test_patches_of_parts_make_the_patch_of_the_whole_tensor(
    case: tuple[Elements, Elements, Cuts],
) -> None:
    old, new, cuts = case
    pairs = zip(cut("w", old, cuts), cut("w", new, cuts), strict=True)
    parts = [patched_part(*pair) for pair in pairs]
    (whole,) = joined(reversed(parts))
    assert whole.patch is not None
    spec = TensorSpec("w", "bfloat16", list(new.shape), 0, len(whole.data), patch=whole.patch)
    patch = decode_patch(spec, whole.data)
    result = old.reshape(-1).copy()
    result[patch.index] += patch.difference
    assert np.array_equal(result, new.reshape(-1))
    assert np.all(np.diff(patch.index) > 0)
    is_sum_known = all(part.is_run for part in parts)
    assert whole.patch.result_crc32 == (zlib.crc32(new.tobytes()) if is_sum_known else None)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_two_halves_give_the_checksum_of_both(one: bytes, other: bytes) -> None:
    assert joined_crc32(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


def test_parts_that_leave_something_out_or_contradict_each_other_are_refused() -> None:
    whole = np.arange(12, dtype=np.uint16).reshape(4, 3)
    above, below = cut("w", whole, [[2], []])
    with pytest.raises(WeightsRefused, match="'w' have 6 of its 12 elements"):
        joined([above])
    with pytest.raises(WeightsRefused, match="contradict each other"):
        joined([above, above])
    with pytest.raises(WeightsRefused, match="contradict each other"):
        joined([above, TensorPart(below.buffer, (4, 3), (3, 0))])
    with pytest.raises(WeightsRefused, match="contradict each other"):
        joined([above, patched_part(below, below)])


def test_a_rank_sends_patches_of_all_its_tensors_and_those_of_other_element_sizes_whole() -> None:
    noise = np.random.default_rng(0)
    elements = 200_000
    old = noise.integers(0, 2**16, elements, dtype=np.uint16)

    def buffers(changed: int) -> list[NamedBuffer]:
        new = old.copy()
        new[:changed] = noise.integers(0, 2**16, changed, dtype=np.uint16)
        return [
            NamedBuffer("matrix", "bfloat16", (elements,), new.view(np.uint8).data),
            NamedBuffer("same", "bfloat16", (9,), memoryview(bytes(18))),
            NamedBuffer("wide", "float32", (2,), memoryview(bytes(8))),
        ]

    written = WrittenElements()
    written.keep(1, buffers(0))
    patches = written.patches(2, buffers(100))
    assert patches is not None
    changed = [None if each.patch is None else each.patch.changed for each in patches]
    assert changed == [100, 0, None]
    assert written.patches(3, buffers(int(2 * PATCH_SHARE_MAX * elements))) is None
    small = written.patches(4, buffers(int(2 * PATCH_SHARE_MAX * elements)))
    assert small is None  # other elements than before
    assert written.patches(5, buffers(0)[:2]) is None  # another set of names
    again = written.patches(6, buffers(0)[:2])
    assert again is not None
    assert [each.patch.changed for each in again if each.patch is not None] == [0, 0]
