"""Weight channel by files: safetensors in a directory that orchestrator and engines share.

The orchestrator's ``weight_sync/`` writes files, the engine's staging reads them. It needs no
connection between hosts, only a shared file system. A file is renamed to its final name once
complete, and never changes then. The format is written here, because the safetensors library wants
all tensors as copies or raw pointers; tests read the files with the library.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.regular_files import open_regular, read_exactly
from tidegate.transport.weight_channels.base import (
    ITEM_BYTES,
    NamedBuffer,
    WeightChannel,
    check_buffers,
    check_specs,
)

NAME = "disk"

VERSIONS_KEPT = 2
"""Number of versions kept: the newest, and the one before, which an engine may still be reading."""

FILES = "weights-????????.safetensors"
"""Glob pattern of the weight files; the number is the version."""

HEADER_ALIGNMENT_BYTES = 8
"""The header is padded with spaces to a multiple of this, to align the data, as is customary in the
format."""

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class DiskSender:
    """Owns the files it wrote, and the directory if none was given."""

    def __init__(self, directory: Path | None) -> None:
        """Write into ``directory``, created if needed, or into a private one if None.

        Raises:
            ConfigError: the directory cannot be created.
        """
        try:
            self._private = PrivateDirectory("weights") if directory is None else None
            if self._private is not None:
                directory = self._private.path
            assert directory is not None
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"weight_channel='disk' can't make its directory: {error}; set another "
                "run_directory"
            ) from error
        self._directory = directory.resolve()
        # Files that a killed process has left are removed like our own.
        self._files = deque(sorted(self._directory.glob(FILES)))
        """Weight files in the directory, oldest first."""

    def init(self) -> InitWeights:
        """Return the phase-1 message: the directory, outside of which receivers read nothing."""
        return InitWeights(channel=NAME, info={"directory": str(self._directory)})

    def write(
        self, version: int, tensors: Sequence[NamedBuffer], *, keep: Collection[int] = ()
    ) -> list[UpdateWeights]:
        """Write one file, and remove all but the newest two and those to keep."""
        check_buffers(tensors)
        # largest dtype first keeps all tensors aligned
        ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
        header, specs = _header(version, ordered)
        path = self._path(version)
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                file.write(header)
                for tensor in ordered:
                    file.write(tensor.data)
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._remove_older(path, keep)
        return [UpdateWeights(version=version, location=str(path), tensors=specs)]

    def close(self) -> None:
        """Remove the remaining files, and the private directory."""
        while self._files:
            self._files.popleft().unlink(missing_ok=True)
        if self._private is not None:
            self._private.remove()

    def _path(self, version: int) -> Path:
        return self._directory / f"weights-{version:08d}.safetensors"

    def _remove_older(self, path: Path, keep: Collection[int]) -> None:
        if path not in self._files:
            self._files.append(path)
        kept = {self._path(version) for version in keep}
        obsolete = [file for file in self._files if file not in kept][:-VERSIONS_KEPT]
        for file in obsolete:
            self._files.remove(file)
            file.unlink(missing_ok=True)


class DiskReceiver:
    """Copies one tensor at a time, because a mapped file that is truncated would kill the
    engine."""

    def __init__(self, init: InitWeights) -> None:
        """Read from the directory that ``init`` names.

        Raises:
            WeightsRefused: there is no such directory on this host.
        """
        self._directory = Path(str(init.info.get("directory")))
        if not self._directory.is_dir():
            raise WeightsRefused(
                f"weight directory {str(self._directory)!r} does not exist on this host; set one "
                "that all hosts share"
            )

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield copies of the file's tensors."""
        path = Path(update.location)
        if path.parent != self._directory:
            raise WeightsRefused(
                f"an update is at {update.location!r}, outside of the weight directory "
                f"{str(self._directory)!r}; do run and engines share that path?"
            )
        os.close(
            _open_checked(path, update)
        )  # so that errors are raised now, not at the first tensor
        return _read(path, update)

    def close(self) -> None:
        """No-op: a file is closed once its tensors were read."""


def _open_checked(path: Path, update: UpdateWeights) -> int:
    """Open a weight file and return its descriptor, which the caller closes.

    Raises:
        WeightsRefused: the file can't be opened, or is too small for the update's tensors.
    """
    try:
        fd = open_regular(path)
    except OSError as error:
        raise WeightsRefused(f"can't open {update.location!r}: {error.strerror}") from error
    try:
        if (nbytes := os.fstat(fd).st_size) == 0:
            raise WeightsRefused(
                f"{update.location!r} is empty: the writer ended early, or the disk is full"
            )
        check_specs(update.tensors, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(path: Path, update: UpdateWeights) -> Iterator[tuple[TensorSpec, memoryview]]:
    fd = _open_checked(path, update)
    try:
        for spec in update.tensors:
            data = memoryview(bytearray(spec.nbytes))
            try:
                read_exactly(fd, data, spec.offset)
            except OSError as error:
                raise WeightsRefused(
                    f"{update.location!r} was changed while it was read ({error.strerror}); does "
                    "another run write to this directory?"
                ) from error
            yield spec, data
    finally:
        os.close(fd)


def _header(version: int, tensors: Sequence[NamedBuffer]) -> tuple[bytes, list[TensorSpec]]:
    """Return the bytes before the data, and the location of each tensor in the whole file.

    The safetensors layout: u64 length of the JSON, the JSON, the data. Offsets in the JSON count
    from the start of the data and leave no gaps.
    """
    entries: dict[str, object] = {"__metadata__": {"weight_version": str(version)}}
    end = 0
    starts = []
    for tensor in tensors:
        starts.append(end)
        end += tensor.data.nbytes
        is_patch = tensor.patch is not None
        entries[tensor.name] = {
            "dtype": "U8" if is_patch else _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": [tensor.data.nbytes] if is_patch else list(tensor.shape),
            "data_offsets": [starts[-1], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    specs = [
        TensorSpec(
            t.name, t.dtype, list(t.shape), len(header) + start, t.data.nbytes, patch=t.patch
        )
        for t, start in zip(tensors, starts, strict=True)
    ]
    return header, specs


CHANNEL = WeightChannel(
    open_sender=lambda config: DiskSender(config.directory),
    open_receiver=lambda init, config: DiskReceiver(init),
    carries_adapters=True,
)
