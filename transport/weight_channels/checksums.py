"""Optional CRC-32 checksums of published tensors, computed by the sender and checked by engines.

The publish path computes them, staging verifies them. CRC-32 is zlib's: it is in the standard
library, releases the GIL, and reads about a gigabyte a second, once at publishing and once in each
engine, in parallel with decoding. Specs are those of ``base.py``.
"""

import zlib
from collections.abc import Iterable, Mapping

import msgspec

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import TensorSpec, UpdateWeights
from tidegate.transport.weight_channels.base import NamedBuffer


def checksums(tensors: Iterable[NamedBuffer]) -> dict[str, int]:
    """Return each tensor's CRC-32, by name."""
    return {tensor.name: zlib.crc32(tensor.data) for tensor in tensors}


def with_checksums(chunks: Iterable[UpdateWeights], sums: Mapping[str, int]) -> list[UpdateWeights]:
    """Return the update messages with the checksums filled in."""
    replace = msgspec.structs.replace
    return [
        replace(c, tensors=[replace(spec, crc32=sums[spec.name]) for spec in c.tensors])
        for c in chunks
    ]


def verify_checksum(spec: TensorSpec, view: memoryview) -> None:
    """Compare a tensor's bytes with its checksum, if it has one.

    Raises:
        WeightsRefused: the bytes differ.
    """
    if spec.crc32 is not None and (actual := zlib.crc32(view)) != spec.crc32:
        raise WeightsRefused(
            f"tensor {spec.name!r} has the checksum {actual:#010x}, but {spec.crc32:#010x} was "
            "sent: its bytes changed in transit; publish again, and check the memory, disk or "
            "network in between"
        )
