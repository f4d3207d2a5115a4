"""Patches of weights: decoded patches equal the encoded ones, and damaged bytes are refused."""

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import TensorPatch, TensorSpec
from tidegate.transport.weight_channels.base import check_specs
from tidegate.transport.weight_channels.patches import (
    Bits,
    bits_of,
    decode_patch,
    encode_patch,
)

DTYPES = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64"}


def spec_of(old: Bits, frame: bytes, patch: TensorPatch) -> TensorSpec:
    dtype = DTYPES[old.itemsize]
    return TensorSpec("w", dtype, [len(old)], 0, len(frame), patch=patch)


def patched(old: Bits, spec: TensorSpec, frame: bytes) -> Bits:
    decoded = decode_patch(spec, memoryview(frame))
    result = old.copy()
    result[decoded.index] += decoded.difference
    return result


@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 3000),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_patch_restores_every_bit_whatever_the_elements_are(
    item_bytes: int, elements: int, share: float, is_near: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    old = bits_of(memoryview(draw.bytes(elements * item_bytes)), DTYPES[item_bytes])
    new = old.copy()
    chosen = draw.random(elements) < share
    other = bits_of(memoryview(draw.bytes(elements * item_bytes)), DTYPES[item_bytes])
    new[chosen] = old[chosen] + old.dtype.type(1) if is_near else other[chosen]
    frame, patch, index = encode_patch(old, new)
    spec = spec_of(old, frame, patch)
    check_specs([spec], len(frame))
    assert np.array_equal(patched(old, spec, frame), new)
    assert np.array_equal(index, np.flatnonzero(old != new))


def test_a_percent_of_elements_that_change_by_one_bit_takes_a_hundredth_of_the_bytes() -> None:
    draw = np.random.default_rng(0)
    old = bits_of(memoryview(draw.bytes(2_000_000)), "bfloat16")
    new = old.copy()
    new[draw.random(len(old)) < 0.01] += np.uint16(1)
    frame, _, _ = encode_patch(old, new)
    assert len(frame) < 0.01 * old.nbytes


FRAME, PATCH, _ = encode_patch(np.arange(900, dtype="<u2"), np.arange(900, dtype="<u2") // 2)


def refused(frame: bytes, patch: TensorPatch, elements: int = 900) -> str:
    spec = TensorSpec("w", "bfloat16", [elements], 0, len(frame), patch=patch)
    try:
        check_specs([spec], len(frame))
        decode_patch(spec, memoryview(frame))
    except WeightsRefused as error:
        return str(error)
    raise AssertionError("nothing was refused")


def test_a_damaged_frame_is_refused() -> None:
    assert "can't be decompressed" in refused(FRAME[:-1], PATCH)
    flipped = bytearray(FRAME)
    flipped[-1] ^= 1
    assert "can't be decompressed" in refused(bytes(flipped), PATCH)
    assert "can't be decompressed" in refused(b"no zstd frame", PATCH)


def test_a_frame_of_another_size_is_refused_before_it_is_decompressed() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(2**28))
    assert "decompresses to another size" in refused(bomb, PATCH)


@pytest.mark.parametrize(
    "changes",
    [{"changed": 901}, {"gap_bytes": 1}, {"gap_bytes": 2000}],
)
def test_counts_that_no_patch_of_the_tensor_can_have_are_refused(changes: dict[str, int]) -> None:
    assert "of gaps, and that many changes take" in refused(
        FRAME, msgspec.structs.replace(PATCH, **changes)
    )


def test_a_patch_that_reaches_beyond_the_tensor_is_refused() -> None:
    old = np.zeros(900, "<u2")
    new = old.copy()
    new[899] = 1
    frame, patch, _ = encode_patch(old, new)
    assert "changes element 899 of 800" in refused(frame, patch, elements=800)


def test_gaps_that_do_not_end_are_refused() -> None:
    content = bytes([255, 1, 0])
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    assert "changed elements" in refused(frame, TensorPatch(1, 1))
