"""Reader of safetensors files that copies their tensors, for files that may change meanwhile.

The safetensors library maps a file: if it is truncated afterwards, SIGBUS ends the process, and if
it is overwritten, the tensors change. The format: a length (u64, little-endian), that many bytes of
JSON with each tensor's dtype, shape and offsets, then the data.
"""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.transport.regular_files import open_regular, read_exactly

if TYPE_CHECKING:
    import torch

HEADER_BYTES_MAX = 100_000_000
"""Limit of the safetensors library itself."""

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of torch dtypes, by the format's names."""


def read_header(fd: int) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entry of each tensor in an open file, by name, and the offset of the data.

    Raises:
        OSError, ValueError: the file is cut off, or not of this format.
    """
    length = bytearray(8)
    read_exactly(fd, memoryview(length), 0)
    nbytes = int.from_bytes(length, "little")
    if nbytes > HEADER_BYTES_MAX:
        raise ValueError(f"its header claims {nbytes} bytes; is it a safetensors file?")
    text = bytearray(nbytes)
    read_exactly(fd, memoryview(text), 8)
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object; is it a safetensors file?")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + nbytes


def read_tensor_file(path: Path) -> "dict[str, torch.Tensor]":
    """Return copies of all tensors of a safetensors file.

    Raises:
        OSError, ValueError: it can't be read, is damaged, or was changed while it was read.
    """
    fd = open_regular(path)
    try:
        before = os.fstat(fd)
        header, start = read_header(fd)
        tensors = {name: _read(fd, name, entry, start) for name, entry in header.items()}
        after = os.fstat(fd)
    finally:
        os.close(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ValueError("it was changed while it was read; write another file and rename it")
    return tensors


def _read(fd: int, name: str, entry: Any, start: int) -> "torch.Tensor":
    import torch

    try:
        dtype, shape = getattr(torch, DTYPES[entry["dtype"]]), [int(n) for n in entry["shape"]]
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"tensor {name!r} has an invalid entry in the header: {error!r}") from None
    nbytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != nbytes:
        raise ValueError(f"tensor {name!r} of {nbytes} bytes has offsets [{begin}, {end})")
    if start + end > os.fstat(fd).st_size:
        raise ValueError(f"tensor {name!r} ends after the file; it is cut off")
    tensor = torch.empty(shape, dtype=dtype)
    if nbytes:
        flat = tensor.view(-1).view(torch.uint8)
        read_exactly(fd, flat.numpy().data, start + begin)
    return tensor
