"""Tensors that trainers send through SGLang's API: in pickles, or broadcast in a process group.

Call it from threads, because broadcasts and files block.
"""

import base64
import binascii
import io
import math
import mmap
import os
import pickletools
import re
import threading
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from tidegate.serving.control.receivers import announced_tensors, received
from tidegate.serving.control.safe_unpickler import UnsafePickle, read_plain_pickle
from tidegate.serving.http.errors import UpdateError

if TYPE_CHECKING:
    import torch

    from tidegate.transport.weight_channels.collective import BroadcastGroup

PICKLE_BYTES_MAX = 144 * 2**20
"""Bytes of a pickle: two buckets of 64 MiB, with their names."""

SHARED_FILE = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
"""Names that torch gives to shared memory, which are files in ``/dev/shm``."""

STORAGE_MAGIC = 0x1950A86A20F9469CFC6C
"""Number that begins a storage in torch's legacy format."""

STORAGE_OPERATIONS_MAX = 64
"""Operations of one pickle of a storage; torch writes 7 to 30."""

STORAGE_DTYPES = {
    "torch BFloat16Storage": "bfloat16",
    "torch BoolStorage": "bool",
    "torch ByteStorage": "uint8",
    "torch CharStorage": "int8",
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch IntStorage": "int32",
    "torch LongStorage": "int64",
    "torch ShortStorage": "int16",
}
"""Dtypes by the kind of a storage."""

DESCRIBED = ("BINUNICODE", "GLOBAL", "BININT", "BININT1", "BININT2", "LONG1")
"""Operations that push the parts of a storage's description."""

# ---------------------------------------------------------------- in pickles


def read_tensors(pickled: str) -> "dict[str, torch.Tensor]":
    """Read base64 of a pickle of ``[(name, tensor)]``: on the CPU, by value or in shared memory.

    Raises:
        UpdateError: the pickle holds something else, such as handles of memory on a GPU.
    """
    import torch

    try:
        data = base64.b64decode(pickled, validate=True)
        found = read_plain_pickle(data, _named, bytes_max=PICKLE_BYTES_MAX)
    except (UnsafePickle, binascii.Error, ValueError) as error:
        raise UpdateError(
            f"serialized_named_tensors is read for (name, tensor) pairs on the CPU, and refused: "
            f"{error}; send CUDA tensors by update_weights_from_distributed"
        ) from None
    pairs = (
        [each for each in found if isinstance(each, tuple) and len(each) == 2]
        if isinstance(found, list)
        else []
    )
    tensors = {n: t for n, t in pairs if isinstance(n, str) and isinstance(t, torch.Tensor)}
    if not isinstance(found, list) or len(tensors) != len(found):
        raise UpdateError(
            "serialized_named_tensors must be a list of (name, tensor) pairs, got "
            f"{type(found).__name__} with {len(tensors)} of them"
        )
    return tensors


def _named(module: str, name: str) -> Any:
    """Return the constructor that a name in a pickled tensor stands for; None for other names."""
    import torch

    if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return dtype
    return {
        ("torch", "Tensor"): "torch.Tensor",
        ("torch.storage", "UntypedStorage"): "torch.UntypedStorage",
        ("torch", "Size"): tuple,
        ("collections", "OrderedDict"): dict,
        ("torch.storage", "_load_from_bytes"): _stored_bytes,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor_of_storage,
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"): _shared_bytes,
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"): _typed,
        ("torch.multiprocessing.reductions", "rebuild_tensor"): _tensor_of_metadata,
    }.get((module, name))


class _Storage:
    """Values of a pickled storage, and their dtype."""

    def __init__(self, values: "torch.Tensor") -> None:
        self.values = values


def _stored_bytes(data: bytes) -> _Storage:
    """Read a storage that torch wrote by value in its legacy format: five pickles, a length and the
    values. ``torch.load`` would take gigabytes for some of two megabytes."""
    import torch

    stream = io.BytesIO(data)
    magic, _version, _machine, described, _keys = (_operations(stream) for _ in range(5))
    if not magic or magic[1:2] != [("LONG1", STORAGE_MAGIC)]:
        raise UnsafePickle("a storage by value must be in the form of torch's tensor.storage()")
    match [argument for name, argument in described if name in DESCRIBED]:
        case ["storage", str(kind), str(), "cpu", int(length)] if described[-2][0] == "BINPERSID":
            dtype = getattr(torch, STORAGE_DTYPES.get(kind, ""), None)
        case other:
            raise UnsafePickle(f"a storage must be on the CPU, got {other!r:.200}")
    if dtype is None:
        raise UnsafePickle(f"{kind!r:.100} is not among {', '.join(STORAGE_DTYPES)}")
    head = stream.read(8)
    values = bytearray(stream.getbuffer()[stream.tell() :])
    if head != length.to_bytes(8, "little") or len(values) != length * dtype.itemsize:
        raise UnsafePickle(f"a storage of {length} {dtype} has {len(values)} bytes of values")
    if not values:
        return _Storage(torch.empty(0, dtype=dtype))
    return _Storage(torch.frombuffer(values, dtype=dtype))


def _operations(stream: io.BytesIO) -> list[tuple[str, Any]]:
    """Read one of the short pickles of a storage, without carrying it out."""
    found = pickletools.genops(stream)
    operations = [(o.name, argument) for o, argument, _ in islice(found, STORAGE_OPERATIONS_MAX)]
    if operations[-1][0] != "STOP":
        raise UnsafePickle(f"a part of a storage has over {STORAGE_OPERATIONS_MAX} operations")
    return operations


def _shared_bytes(kind: object, manager: bytes, handle: bytes, size: int, *_: object) -> _Storage:
    """Copy a storage from shared memory, which the sender keeps until its request is answered."""
    import torch

    if not SHARED_FILE.fullmatch(handle):
        raise UnsafePickle(
            f"{handle!r:.100} is not a name that torch gives shared memory (/torch_...)"
        )
    file = os.open(b"/dev/shm" + handle, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as shared:
            data = bytearray(shared)
    finally:
        os.close(file)
    return _Storage(torch.frombuffer(data, dtype=torch.uint8))


def _typed(storage: _Storage, dtype: "torch.dtype") -> _Storage:
    return _Storage(storage.values.view(dtype))


def _tensor_of_storage(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> "torch.Tensor":
    if min((offset, *size, *stride)) < 0 or len(size) != len(stride):
        raise UnsafePickle(
            "a tensor must have offset, sizes and strides >= 0 and as many strides as sizes, got "
            f"{offset}, {size} and {stride}"
        )
    if math.prod(size) > storage.values.numel():
        raise UnsafePickle(
            f"a tensor of size {size} needs {math.prod(size)} values, and its storage has "
            f"{storage.values.numel()}"
        )
    return storage.values.as_strided(size, stride, offset)


def _tensor_of_metadata(
    kind: object, storage: _Storage, metadata: tuple[Any, ...]
) -> "torch.Tensor":
    offset, size, stride, *_ = metadata
    return _tensor_of_storage(storage, offset, size, stride)


# ---------------------------------------------------------------- by broadcasts


class UpdateGroups:
    """Process groups with trainers, by name; the server is one rank of each."""

    def __init__(self) -> None:
        self._groups: dict[str, BroadcastGroup] = {}
        self._joining: set[str] = set()
        """Names of groups that a thread is joining; ``_lock`` guards the set."""
        self._lock = threading.Lock()

    def join(
        self, name: str, address: str, port: int, *, rank: int, world_size: int, backend: str
    ) -> None:
        """Join a group whose rank 0 is the trainer, which listens or is about to.

        Raises:
            UpdateError: the group can't be joined.
        """
        with self._lock:
            if name in self._groups:
                raise UpdateError(f"the group {name!r} exists; destroy it first")
            if name in self._joining:
                raise UpdateError(f"the group {name!r} is being joined by another request")
            self._joining.add(name)
        try:
            self._groups[name] = _joined(name, address, port, rank, world_size, backend)
        finally:
            with self._lock:
                self._joining.discard(name)

    def receive(
        self, name: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> "dict[str, torch.Tensor]":
        """Return the announced tensors, which the trainer broadcasts one after another.

        Raises:
            UpdateError: there is no such group, or the trainer sent no more.
        """
        group = self._groups.get(name)
        if group is None:
            raise UpdateError(
                f"Group {name} not in {list(self._groups)}. Please call "
                f"`init_weights_update_group` first."
            )
        columns: Mapping[str, Any] = {
            "names": names,
            "dtype_names": [dtype.removeprefix("torch.") for dtype in dtypes],
            "shapes": shapes,
        }
        return received(announced_tensors(columns), group.broadcast, partial(self.leave, name))

    def leave(self, name: str) -> bool:
        """Leave a group; return whether there was one of this name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.leave()
        return group is not None

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)


def _joined(
    name: str, address: str, port: int, rank: int, world_size: int, backend: str
) -> "BroadcastGroup":
    import torch

    from tidegate.transport.weight_channels.collective import join_custom_group, open_store

    if backend not in ("gloo", "nccl"):
        raise UpdateError(f"backend must be gloo or nccl, got {backend!r}")
    if backend == "nccl" and not torch.cuda.is_available():
        raise UpdateError(
            "this server's process sees no GPU, and nccl needs one: make the group with backend "
            "'gloo'"
        )
    if not 1 <= rank < world_size:
        raise UpdateError(
            f"the server is one rank, from 1 to world_size - 1: got rank_offset {rank} of "
            f"{world_size}"
        )
    try:
        return join_custom_group(
            open_store(address, port),
            name,
            backend=backend,
            rank=rank,
            world_size=world_size,
            own_host=None,
        )
    except (RuntimeError, TypeError, ValueError) as error:  # torch's for a port out of range
        raise UpdateError(f"no trainer at {address}:{port}: {error}") from None
