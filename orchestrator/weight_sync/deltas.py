"""Changes of a state dict since an earlier version: tensors by hashes, or elements by bits.

The publish path uses it to send less than a whole set: :class:`WrittenTensors` for
``weight_deltas=True``, :class:`WrittenElements` for ``weight_deltas="elements"``. Both keep the
last versions that this process wrote; relative to any other version, everything has changed.
"""

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.transport.weight_channels.base import ITEM_BYTES, NamedBuffer
from tidegate.transport.weight_channels.patches import bits_of, encode_patch

DIGEST_BYTES = 16
"""Bytes of a BLAKE2b digest. Collisions are practically impossible, unlike with the 4 bytes of a
CRC; a collision would serve old weights as new ones."""

VERSIONS_MAX = 4
"""Number of versions kept. The base is the newest version that didn't fail."""

Digests = dict[str, bytes]


class WrittenTensors:
    """Digests of the tensors of the last versions. For one thread at a time."""

    def __init__(self) -> None:
        self._digests: dict[int, Digests] = {}

    def forget(self, version: int) -> None:
        """Forget a version, because other content is written under its number."""
        self._digests.pop(version, None)

    def changed(
        self, version: int, tensors: Sequence[NamedBuffer], *, before: int
    ) -> list[NamedBuffer] | None:
        """Record a whole set written as ``version``; return what differs from ``before``.

        None means that the whole set must be sent.
        """
        digests = {tensor.name: _digest(tensor) for tensor in tensors}
        old = self._digests.get(before, {})
        self._digests.pop(version, None)  # reinserted as the newest
        self._digests[version] = digests
        while len(self._digests) > VERSIONS_MAX:
            del self._digests[next(iter(self._digests))]
        if digests.keys() != old.keys():
            return None
        # A matrix that equalled a changed one is sent too: an engine that computes with only one of
        # two tied matrices must see whether they are still equal.
        changed = {old[name] for name, digest in digests.items() if digest != old[name]}
        to_send = [
            tensor
            for tensor in tensors
            if digests[tensor.name] != old[tensor.name]
            or (len(tensor.shape) > 1 and old[tensor.name] in changed)
        ]
        return to_send if len(to_send) < len(tensors) else None


PATCHED_ITEM_BYTES = 2
"""Size of the elements whose tensors are patched. In float32 a step of Adam changes nearly every
element; there whole tensors are sent, if they have changed."""

SAMPLE_BYTES = 256
"""Bytes of a matrix that are compared before all of its bytes are."""

PATCH_SHARE_MAX = 0.1
"""Largest size of a patch, as a share of its tensor's bytes; above it the tensor is sent whole. An
engine applies a patch of a tenth of the bytes in several times the time of a whole tensor, because
each changed element is a cache line of its own; over a link of 1 Gbit/s both then take as long."""


SMALL_PATCH_BYTES = 65536
"""Patches up to this size are sent whatever their share is. Where all tensors come as patches, also
the norms, engines bring their buffers up to date by patches alone."""


class WrittenElements:
    """Copy of the last set of tensors that was written. For one thread at a time."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._tensors: dict[str, tuple[tuple[str, tuple[int, ...]], npt.NDArray[np.uint8]]] = {}
        """Dtype and shape, and bytes, by name."""

    def forget(self, version: int) -> None:
        """Forget a version, because other content is written under its number."""
        if self._version == version:
            self._version = None

    def patches(
        self, version: int, tensors: Sequence[NamedBuffer], *, has_checksums: bool = False
    ) -> list[NamedBuffer] | None:
        """Record a set written as ``version``; return patches of all tensors from the last one.

        For a rank of a sharded trainer, whose parts are joined with those of others: unchanged
        tensors have empty patches, and tensors of other element sizes than patched ones are whole.
        None if that is too large, or other tensors are known.
        """
        kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
        if kinds != {name: kind for name, (kind, _) in self._tensors.items()}:
            self.keep(version, tensors)
            return None
        self._version = None
        found = [
            self._encoded(tensor, has_checksums=has_checksums)
            if ITEM_BYTES[tensor.dtype] == PATCHED_ITEM_BYTES
            else tensor
            for tensor in tensors
        ]
        self._version = version
        whole_bytes = sum(kept.nbytes for _, kept in self._tensors.values())
        sent_bytes = sum(each.data.nbytes for each in found)
        is_small = sent_bytes <= max(SMALL_PATCH_BYTES, PATCH_SHARE_MAX * whole_bytes)
        return found if is_small else None

    def changed(
        self,
        version: int,
        tensors: Sequence[NamedBuffer],
        *,
        before: int,
        has_checksums: bool = False,
    ) -> list[NamedBuffer] | None:
        """Record a whole set written as ``version``; return patches from ``before`` to it.

        Unchanged tensors are omitted, and tensors that a patch would not make smaller are whole.
        None means that the whole set must be sent.
        """
        kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
        if self._version != before or kinds != {n: kind for n, (kind, _) in self._tensors.items()}:
            self.keep(version, tensors)
            return None
        self._version = None  # until all tensors are compared: an error leaves a mixture
        tied = self._equal_names(tensors)
        found: dict[str, NamedBuffer] = {}
        for tensor in tensors:
            patched = self._patched(tensor, has_checksums=has_checksums)
            if patched is not None:
                found[tensor.name] = patched
        for names in tied:
            # An engine that computes with only one of two equal matrices must see whether they
            # still are equal.
            if 0 < sum(name in found for name in names) < len(names):
                found.update({t.name: t for t in tensors if t.name in names})
        self._version = version
        return [found[tensor.name] for tensor in tensors if tensor.name in found]

    def _patched(self, tensor: NamedBuffer, *, has_checksums: bool) -> NamedBuffer | None:
        """Return a changed tensor as a patch, or whole; None if it has not changed."""
        kept = self._tensors[tensor.name][1]
        given = np.frombuffer(tensor.data.cast("B"), np.uint8) if kept.size else kept
        if ITEM_BYTES[tensor.dtype] != PATCHED_ITEM_BYTES:
            if np.array_equal(kept, given):
                return None
            np.copyto(kept, given)
            return tensor
        patched = self._encoded(tensor, has_checksums=has_checksums)
        if patched.patch is not None and not patched.patch.changed:
            return None
        is_large = len(patched.data) > max(SMALL_PATCH_BYTES, PATCH_SHARE_MAX * kept.nbytes)
        return tensor if is_large else patched

    def _encoded(self, tensor: NamedBuffer, *, has_checksums: bool) -> NamedBuffer:
        """Return the patch from the kept tensor to this one, which is kept instead."""
        kept = self._tensors[tensor.name][1]
        given = np.frombuffer(tensor.data.cast("B"), np.uint8) if kept.size else kept
        old, new = bits_of(kept, tensor.dtype), bits_of(given, tensor.dtype)
        frame, patch, index = encode_patch(old, new)
        kept.view(old.dtype)[index] = new[index]
        if has_checksums:
            patch = msgspec.structs.replace(patch, result_crc32=zlib.crc32(given.data))
        return replace(tensor, data=memoryview(frame), patch=patch)

    def _equal_names(self, tensors: Sequence[NamedBuffer]) -> list[list[str]]:
        """Return the groups of matrices that were equal in the version before."""
        alike: defaultdict[tuple[object, bytes], list[str]] = defaultdict(list)
        for tensor in tensors:
            kind, kept = self._tensors[tensor.name]
            if len(tensor.shape) > 1:  # compared by a sample first: two whole reads each are slow
                alike[kind, kept[:: max(1, kept.size // SAMPLE_BYTES)].tobytes()].append(
                    tensor.name
                )
        groups = []
        for first, *others in alike.values():
            kept = self._tensors[first][1]
            equal = [name for name in others if np.array_equal(self._tensors[name][1], kept)]
            if equal:
                groups.append([first, *equal])
        return groups

    def keep(self, version: int, tensors: Sequence[NamedBuffer]) -> None:
        """Copy a set written as ``version``, in place of the one before."""
        self._version = None
        kept, self._tensors = self._tensors, {}
        for tensor in tensors:
            kind, bytes_ = (tensor.dtype, tensor.shape), tensor.data.nbytes
            old = kept.get(tensor.name)
            # Pages are used again, because the first touch of fresh ones costs more than the copy.
            is_reused = old is not None and old[1].nbytes == bytes_
            target = old[1] if is_reused and old is not None else np.empty(bytes_, np.uint8)
            if bytes_:
                np.copyto(target, np.frombuffer(tensor.data.cast("B"), np.uint8))
            self._tensors[tensor.name] = kind, target
        self._version = version


def written_by(weight_deltas: bool | str) -> WrittenTensors | WrittenElements:
    """Return the record of written weights for a run's setting ``weight_deltas``."""
    return WrittenElements() if weight_deltas == "elements" else WrittenTensors()


def _digest(tensor: NamedBuffer) -> bytes:
    digest = hashlib.blake2b(tensor.data, digest_size=DIGEST_BYTES)
    digest.update(f"{tensor.dtype} {tensor.shape}".encode())
    return digest.digest()
