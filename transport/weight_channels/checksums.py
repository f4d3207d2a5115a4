"""Optional CRC-32 checksums of published tensors, computed by the sender and checked by engines.

The publish path computes them, staging verifies them. CRC-32 is zlib's: it is in the standard
library, releases the GIL, and reads about a gigabyte a second, once at publishing and once in each
engine, in parallel with decoding.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import TensorSpec, UpdateWeights
from tidegate.transport.weight_channels.base import NamedBuffer
from tidegate.transport.weight_channels.cuda_memory import NamedTensor, host_bytes

if TYPE_CHECKING:
    from tidegate.transport.weight_channels.cuda_memory import TensorView


def crc32_of(view: "TensorView") -> int:
    """Return the CRC-32 of a tensor's bytes, computed on the host."""
    return zlib.crc32(view if isinstance(view, memoryview) else host_bytes(view))


def checksums(tensors: Iterable[NamedBuffer | NamedTensor]) -> dict[str, int]:
    """Return each tensor's CRC-32, by name."""
    return {tensor.name: crc32_of(tensor.data) for tensor in tensors}


def write_checked(
    write: Callable[..., list[UpdateWeights]],
    version: int,
    tensors: Sequence[NamedBuffer | NamedTensor],
    *,
    keep: Collection[int],
    has_checksums: bool,
) -> list[UpdateWeights]:
    """Write a version by a sender's ``write``; fill in checksums if ``has_checksums``. Blocks.

    Raises:
        WeightsRefused: as :meth:`WeightSender.write`.
    """
    # Computed over the source tensors, so that copy errors are detected too.
    sums = checksums(tensors) if has_checksums else {}
    chunks = write(version, tensors, keep=keep)
    return with_checksums(chunks, sums) if sums else chunks


POLYNOMIAL = 0xEDB88320
"""CRC-32's polynomial without x^32; bit 31 - k stands for x^k."""


def joined_crc32(first: int, second: int, second_nbytes: int) -> int:
    """Return ``crc32(a + b)``, given ``crc32(a)``, ``crc32(b)`` and ``len(b)``.

    Appending n bytes multiplies the polynomial of what came before by x^(8 n).
    """
    power, shift = 1 << 23, second_nbytes  # x^8
    while shift:
        if shift & 1:
            first = _product(first, power)
        power, shift = _product(power, power), shift >> 1
    return first ^ second


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials modulo CRC-32's."""
    result = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            result ^= other
        other = other >> 1 ^ (POLYNOMIAL if other & 1 else 0)
    return result


def with_checksums(chunks: Iterable[UpdateWeights], sums: Mapping[str, int]) -> list[UpdateWeights]:
    """Return the update messages with the checksums filled in."""
    return [
        msgspec.structs.replace(chunk, tensors=specs_with(chunk.tensors, sums)) for chunk in chunks
    ]


def specs_with(specs: Iterable[TensorSpec], sums: Mapping[str, int]) -> list[TensorSpec]:
    """Return the specs with the checksums filled in."""
    return [msgspec.structs.replace(spec, crc32=sums[spec.name]) for spec in specs]


def verify_checksum(spec: TensorSpec, view: "TensorView") -> None:
    """Compare a tensor's bytes with its checksum, if it has one.

    Raises:
        WeightsRefused: the bytes differ.
    """
    if spec.crc32 is not None and (actual := crc32_of(view)) != spec.crc32:
        raise WeightsRefused(
            f"tensor {spec.name!r} has the checksum {actual:#010x}, but {spec.crc32:#010x} was "
            "sent: its bytes changed in transit; publish again, and check the memory, disk or "
            "network in between"
        )
