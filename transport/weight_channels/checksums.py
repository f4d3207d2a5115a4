"""Are a tensor's bytes those that were sent? The sums by which an engine can tell, on request.

CRC-32 as zlib has it: it is in the standard library, lets other threads run, and reads about a
gigabyte a second, once where weights are published and once in each engine, beside its decoding.
"""

import zlib
from collections.abc import Iterable, Mapping

import msgspec

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import TensorSpec, UpdateWeights
from tidegate.transport.weight_channels.base import NamedBuffer


def checksums(tensors: Iterable[NamedBuffer]) -> dict[str, int]:
    """Each tensor's sum, by its name."""
    return {tensor.name: zlib.crc32(tensor.data) for tensor in tensors}


def with_checksums(chunks: Iterable[UpdateWeights], sums: Mapping[str, int]) -> list[UpdateWeights]:
    """The same messages, with the sums in them."""
    replaced = msgspec.structs.replace
    return [
        replaced(c, tensors=[replaced(spec, crc32=sums[spec.name]) for spec in c.tensors])
        for c in chunks
    ]


def check_sum(spec: TensorSpec, view: memoryview) -> None:
    """Hold a tensor's bytes against its sum, if it has one.

    Raises:
        WeightsRefused: they are others.
    """
    if spec.crc32 is not None and (found := zlib.crc32(view)) != spec.crc32:
        raise WeightsRefused(
            f"tensor {spec.name!r} has the checksum {found:#010x} where {spec.crc32:#010x} was "
            f"sent: its bytes changed on the way; publish again, and suspect the memory, disk or "
            f"network that it came through"
        )
