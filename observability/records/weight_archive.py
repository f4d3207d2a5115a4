"""Archive of a run's weight versions: whole sets, and patches against the version before.

    weights/v00000/       the model's files: hard links, or copies where it lies on another disk
    weights/v00012/       model.safetensors, or patch.safetensors with what has changed
    weights/adapters/     NAME/v00003/ of adapters that count their own versions

:class:`WeightArchive` writes it, on the recorder's thread; the audit reads it by
:class:`RebuiltVersions`. Patches are those of ``weight_deltas="elements"``
(:mod:`transport.weight_channels.patches`). A version is renamed to its name once all of its files
are complete, and is removed by the reverse, so a killed process leaves no half of one.
"""

import os
import shutil
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tidegate.errors import AuditError, WeightsRefused
from tidegate.observability.records.run_directories import (
    ADAPTERS,
    RUN_FILE,
    directory_name,
    is_part,
    process_directories,
    read_run_file,
)
from tidegate.observability.records.run_files import appearing_whole
from tidegate.orchestrator.weight_sync.parts import WeightParts
from tidegate.orchestrator.weight_sync.tensor_files import read_tensor_file
from tidegate.transport.messages import TensorSpec
from tidegate.transport.weight_channels.base import ITEM_BYTES
from tidegate.transport.weight_channels.patches import Bits, bits_of, decode_patch, encode_patch

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

PATCHES_MAX = 31
"""Largest number of patches that a version is rebuilt from. A whole set is then written once in 32
versions, which costs 3 % of a set per version, about as much as a patch."""

ENCODED_SHARE_MAX = 0.5
"""Largest share of changed elements at which a patch is tried. Above it, as in float32, where a
step of AdamW changes nearly all elements, encoding takes some 40 bytes of memory an element."""

SAMPLE_BYTES = 256
"""Bytes of a matrix that are compared with others before all of its bytes are."""

READ_BYTES = 2**24
"""Bytes read at once for a checksum."""

REBUILT_KEPT = 2
"""Rebuilt versions kept on disk: that in use, and the one before."""

MODEL_FILES = (
    "config.json",
    "preprocessor_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
DRAFT = ".draft"


def weights_path(directory: Path, version: int) -> Path:
    """Return the directory of the archived weights of ``version`` below a process's directory."""
    return Path(directory) / "weights" / f"v{version:05d}"


def adapter_weights_path(directory: Path, name: str, version: int) -> Path:
    """Return the directory of an archived version of an adapter that counts its own."""
    return Path(directory) / "weights" / ADAPTERS / directory_name(name) / f"v{version:05d}"


def archives(directory: Path) -> list[Path]:
    """Return where a process's weights may be: its own archive, then the run's other ones."""
    parts = (
        process_directories(directory.parent)
        if is_part(directory)
        else process_directories(directory)
    )
    return [p / "weights" for p in dict.fromkeys([directory, *parts]) if (p / "weights").is_dir()]


def archived_weights(directory: Path, version: int) -> Path:
    """Return the directory of the archived weights of ``version``, from any of the archives."""
    name = weights_path(directory, version).name
    found = (archive / name for archive in archives(directory) if (archive / name).is_dir())
    return next(found, weights_path(directory, version))


def archived_versions(directory: Path) -> dict[int, Path]:
    """Return the versions in a process's archives, and where each lies."""
    found: dict[int, Path] = {}
    for archive in archives(directory):
        for path in archive.glob("v*"):
            if path.name[1:].isdecimal():
                found.setdefault(int(path.name[1:]), path)
    return dict(sorted(found.items()))


def complete_versions(directory: Path) -> dict[int, WeightParts]:
    """Return the parts of the versions that can be rebuilt: what they patch is archived, too."""
    complete: dict[int, WeightParts] = {}
    for version, path in archived_versions(directory).items():
        parts = WeightParts.read(path)
        if parts.needed - {version} <= complete.keys():
            complete[version] = parts
    return complete


def archived_adapter(directory: Path, name: str) -> dict[int, Path]:
    """Return the directories of an adapter's archived versions, for one process's records.

    The process may have recorded the run, in which the adapter may be trained, or the trained
    adapter itself. Versions of other processes count only if this one has resumed the run: else it
    numbered them anew.
    """
    processes = [directory]
    if (directory / RUN_FILE).exists() and read_run_file(directory)["resumed_batches"] is not None:
        processes += process_directories(directory.parent if is_part(directory) else directory)
    own_name = directory_name(name)
    found: dict[int, Path] = {}
    for process in processes:
        is_own = own_name in (process.name, process.parent.name)
        for archive in (
            adapter_weights_path(process, name, 0).parent,
            *archives(process / ADAPTERS / own_name),
            *(archives(process) if is_own else ()),
        ):
            for path in sorted(archive.glob("v*")):
                entry = WeightParts.read(path).adapters.get(name)
                if entry is not None and path.name == f"v{entry.version:05d}":
                    found.setdefault(entry.version, path)
    return found


class WeightArchive:
    """Writes the versions of one process. For one thread at a time, but for :meth:`takes`.

    Args:
        directory: the process's directory.
        model: the model's directory.
        archive_weights: the run's setting of this name.
    """

    def __init__(self, directory: Path, model: Path, archive_weights: str) -> None:
        kind, _, count = archive_weights.partition(":")
        self._directory = directory
        self._model = model
        self._is_off = kind == "none"
        self._every = int(count) if kind == "every" else 1
        self._last = int(count) if kind == "last" else None
        self._kept: Tensors | None = None
        """Tensors of the last whole set that was written; None before the first."""
        self._kept_version = 0
        self._patches = 0
        """Number of patches that this set is rebuilt from."""

    def takes(self, version: int, parts: WeightParts) -> bool:
        """Return whether the setting wants a version. Parts and adapters complete other versions,
        so that each of them is wanted."""
        return not self._is_off and (not parts.is_whole_set or version % self._every == 0)

    def write_model(self) -> None:
        """Archive version 0, unless a process before a resume has: the model's own directory may be
        gone when the run is audited."""
        if self._is_off:
            return
        for archive in archives(self._directory):
            for draft in archive.glob(f"v*{DRAFT}"):  # of a killed process
                shutil.rmtree(draft, ignore_errors=True)
        if archived_weights(self._directory, 0).is_dir():
            return
        with appearing_whole(weights_path(self._directory, 0)) as target:
            linked = {}
            for file in (f for pattern in MODEL_FILES for f in self._model.glob(pattern)):
                if file.suffix == ".safetensors" and _link(file, target / file.name):
                    linked[file.name] = _crc32(target / file.name)
                else:
                    shutil.copy(file, target / file.name)
            WeightParts(linked=linked).write(target)

    def write(self, target: Path, tensors: "Tensors", parts: WeightParts) -> None:
        """Archive a version in ``target``, and remove those that the setting does not keep."""
        from safetensors.torch import save_file  # imports torch, which takes a second

        stored = tensors
        if parts.is_whole_set:
            stored, parts = self._as_stored(tensors, parts)
        with appearing_whole(target) as draft:
            save_file(stored, draft / parts.file_name, metadata={"format": "pt"})
            shutil.copy(self._model / "config.json", draft / "config.json")
            parts.write(draft)
        if parts.is_whole_set:
            self._kept = {name: tensors[parts.equal.get(name, name)] for name in tensors}
            self._kept_version = int(target.name[1:])
            self._patches = 0 if parts.patch_of is None else self._patches + 1
            self._remove_older()

    def _as_stored(self, tensors: "Tensors", parts: WeightParts) -> "tuple[Tensors, WeightParts]":
        """Return what is written of a whole set: itself or a patch, equal tensors once."""
        equal = _equal_names(tensors)
        distinct = {name: tensor for name, tensor in tensors.items() if name not in equal}
        parts = msgspec.structs.replace(parts, equal=equal)
        if self._kept is None:
            self._kept = _read_set_if_whole(archived_weights(self._directory, 0))
        # A patch removes no tensor.
        if self._patches < PATCHES_MAX and self._kept and self._kept.keys() <= tensors.keys():
            changed, patches = _changes(self._kept, distinct)
            if _nbytes(changed) < _nbytes(distinct):
                return changed, msgspec.structs.replace(
                    parts, patch_of=self._kept_version, patches=patches
                )
        return distinct, parts

    def _remove_older(self) -> None:
        """Remove all versions but the newest ones, and those that they are patches of."""
        if self._last is None:
            return
        found = archived_versions(self._directory)
        kept: set[int] = set()
        wanted = sorted(found)[-self._last :]
        while wanted:
            version = wanted.pop()
            if version in found and version not in kept:
                kept.add(version)
                wanted += WeightParts.read(found[version]).needed
        for version in sorted(found.keys() - kept, reverse=True):
            draft = found[version].with_name(found[version].name + DRAFT)
            os.replace(found[version], draft)
            shutil.rmtree(draft, ignore_errors=True)


class RebuiltVersions:
    """Model directories of archived versions; patches are rebuilt in a temporary directory.

    That holds up to :data:`REBUILT_KEPT` models, where ``$TMPDIR`` says. Close it at the end.
    """

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="tidegate-audit-")
        self._directories: dict[Path, Path] = {}
        """Rebuilt directories by the archived ones, oldest first."""
        self._checked: set[Path] = set()
        """Directories whose linked files have been compared with their checksums."""
        self._last: tuple[Path, Tensors] | None = None
        """The version that was rebuilt last: the next one mostly follows it."""

    def close(self) -> None:
        """Remove the temporary directory."""
        self._temporary.cleanup()

    def directory(self, archived: Path) -> Path:
        """Return a model directory with the version archived in ``archived``, valid until
        :data:`REBUILT_KEPT` further ones are asked for.

        Raises:
            AuditError: files are missing, or were changed.
        """
        parts = WeightParts.read(archived)
        self._check_linked(archived, parts)
        if parts.patch_of is None and not parts.equal:
            return archived
        if archived not in self._directories:
            while len(self._directories) >= REBUILT_KEPT:
                shutil.rmtree(self._directories.pop(next(iter(self._directories))))
            self._directories[archived] = self._write(archived, parts)
        return self._directories[archived]

    def tensors(self, archived: Path) -> "Tensors":
        """Return the tensors of a whole set; do not change them.

        Raises:
            AuditError: files are missing, or were changed.
        """
        chain: list[tuple[Path, WeightParts]] = []
        tensors: Tensors = {}
        path = archived
        while True:
            if self._last is not None and self._last[0] == path:
                tensors = dict(self._last[1])
                break
            parts = WeightParts.read(path)
            self._check_linked(path, parts)
            chain.append((path, parts))
            if parts.patch_of is None:
                break
            path = _base_of(path, parts.patch_of)
            if len(chain) > PATCHES_MAX or not path.is_dir():
                raise AuditError(f"{archived} is a patch of {path}, which is missing")
        crc32s: dict[str, int] = {}
        for path, parts in reversed(chain):
            tensors = _patched(tensors, path, parts, crc32s)
        for name, crc32 in crc32s.items():
            if zlib.crc32(_bits(tensors[name]).data) != crc32:
                raise AuditError(
                    f"{archived} can't be loaded: tensor {name!r} is not the one that was "
                    f"archived. Was a file of it, or of {chain[-1][0].name} on, changed?"
                )
        self._last = archived, tensors
        return tensors

    def _check_linked(self, path: Path, parts: WeightParts) -> None:
        """Refuse a model whose files, shared with the model's directory, were changed since."""
        if path in self._checked:
            return
        for name, crc32 in parts.linked.items():
            try:
                is_same = _crc32(path / name) == crc32
            except OSError as error:
                raise AuditError(f"{path / name} can't be read: {error}") from None
            if not is_same:
                raise AuditError(
                    f"{path / name} is the file of the model's directory, and was changed in place "
                    "since the run began; put the model's file back"
                )
        self._checked.add(path)

    def _write(self, archived: Path, parts: WeightParts) -> Path:
        from safetensors.torch import save_file

        rebuilt = WeightParts(adapters=parts.adapters)
        target = Path(tempfile.mkdtemp(prefix=archived.name, dir=self._temporary.name))
        # The format refuses tensors that share memory.
        tensors = self.tensors(archived)
        copies = {name: tensors[name].clone() for name in parts.equal}
        save_file(tensors | copies, target / rebuilt.file_name, metadata={"format": "pt"})
        shutil.copy(archived / "config.json", target / "config.json")
        rebuilt.write(target)
        return target


def _base_of(path: Path, version: int) -> Path:
    """Return where the version lies that ``path`` is a patch of: beside it, or in the archive of a
    process before a resume."""
    beside = path.with_name(weights_path(path, version).name)
    return beside if beside.is_dir() else archived_weights(path.parent.parent, version)


def _patched(
    tensors: "Tensors", path: Path, parts: WeightParts, crc32s: dict[str, int]
) -> "Tensors":
    """Return the set archived in ``path``; of a patch, ``tensors`` is the set before.

    ``crc32s``: checksums of the patched tensors, to be compared once the last patch is applied.
    """
    patches = {spec.name: spec for spec in parts.patches}
    try:
        if parts.patch_of is None:
            tensors = _read_set(path)
        else:
            for name, tensor in read_tensor_file(path / parts.file_name).items():
                crc32s.pop(name, None)
                if (spec := patches.get(name)) is not None:
                    tensor = _apply(spec, tensor, tensors[name])
                    if spec.patch is not None and spec.patch.result_crc32 is not None:
                        crc32s[name] = spec.patch.result_crc32
                tensors[name] = tensor
        for name, same in parts.equal.items():
            tensors[name] = tensors[same]
            crc32s.pop(name, None)
    except (OSError, ValueError, KeyError, WeightsRefused) as error:
        raise AuditError(
            f"{path} can't be loaded: {error}. Was a file of it removed or changed?"
        ) from error
    return tensors


def _apply(spec: TensorSpec, frame: "torch.Tensor", before: "torch.Tensor") -> "torch.Tensor":
    tensor = before.clone()
    bits = _bits(tensor)
    elements = decode_patch(spec, frame.numpy().data)
    bits[elements.index] += elements.difference
    return tensor


def _read_set_if_whole(directory: Path) -> "Tensors":
    """As :func:`_read_set`; empty if a file is damaged or missing."""
    try:
        return _read_set(directory)
    except (OSError, ValueError):
        return {}


def _read_set(directory: Path) -> "Tensors":
    """Read all tensors of a model's directory, copied."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= read_tensor_file(file)
    return tensors


def _changes(
    before: "Tensors", now: "Mapping[str, torch.Tensor]"
) -> "tuple[Tensors, tuple[TensorSpec, ...]]":
    """Return what changed: the patch of each tensor, or the tensor where that is smaller."""
    changed: Tensors = {}
    patches: list[TensorSpec] = []
    for name, tensor in now.items():
        known = before.get(name)
        is_alike = known is not None and _kind(known) == _kind(tensor)
        patch = _patch(name, known, tensor) if known is not None and is_alike else None
        if patch is None:
            changed[name] = tensor
        elif patch[0].patch is not None and patch[0].patch.changed:
            patches.append(patch[0])
            changed[name] = patch[1]
    return changed, tuple(patches)


def _patch(
    name: str, before: "torch.Tensor", now: "torch.Tensor"
) -> "tuple[TensorSpec, torch.Tensor] | None":
    """Return a tensor's patch; None if the whole tensor is smaller, or nearly so."""
    import torch

    if _dtype(now) not in ITEM_BYTES or not now.numel():
        return None
    old, new = _bits(before), _bits(now)
    if np.count_nonzero(old != new) > ENCODED_SHARE_MAX * new.size:
        return None
    frame, patch, _ = encode_patch(old, new)
    if len(frame) >= new.nbytes and patch.changed:
        return None
    patch = msgspec.structs.replace(patch, result_crc32=zlib.crc32(new.data))
    spec = TensorSpec(name, _dtype(now), list(now.shape), 0, len(frame), patch=patch)
    return spec, torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def _equal_names(tensors: "Tensors") -> dict[str, str]:
    """Return the matrices whose bytes are those of an earlier one, by name: tied ones, for example,
    that a cast has made two of."""
    alike: defaultdict[tuple[object, bytes], list[str]] = defaultdict(list)
    equal: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or _dtype(tensor) not in ITEM_BYTES or not tensor.numel():
            continue
        data = _bits(tensor)
        sample = data[:: max(1, data.nbytes // SAMPLE_BYTES)].tobytes()
        firsts = alike[_kind(tensor), sample]
        same = next((n for n in firsts if np.array_equal(_bits(tensors[n]), data)), None)
        if same is None:
            firsts.append(name)
        else:
            equal[name] = same
    return equal


def _bits(tensor: "torch.Tensor") -> Bits:
    """View a contiguous tensor's elements as unsigned integers, which share its memory."""
    import torch

    return bits_of(tensor.reshape(-1).view(torch.uint8).numpy(), _dtype(tensor))


def _kind(tensor: "torch.Tensor") -> object:
    return tensor.dtype, tensor.shape


def _dtype(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nbytes(tensors: "Mapping[str, torch.Tensor]") -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _link(file: Path, target: Path) -> bool:
    """Make a hard link of a file, through symbolic links; return whether that was possible."""
    try:
        target.hardlink_to(file.resolve())
    except OSError:  # another disk, another owner, or a file system without them
        return False
    return True


def _crc32(file: Path) -> int:
    crc32 = 0
    with file.open("rb") as opened:
        while block := opened.read(READ_BYTES):
            crc32 = zlib.crc32(block, crc32)
    return crc32
