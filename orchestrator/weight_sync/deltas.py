"""Tensors of a state dict that changed since an earlier version, by hashes.

The publish path uses it to send only changed tensors. Digests are kept of the last few versions
that this process wrote; relative to any other version, all tensors count as changed.
"""

import hashlib
from collections.abc import Sequence

from tidegate.transport.weight_channels.base import NamedBuffer

DIGEST_BYTES = 16
"""Bytes of a BLAKE2b digest. Collisions are practically impossible, unlike with the 4 bytes of a
CRC; a collision would serve old weights as new ones."""

VERSIONS_MAX = 4
"""Number of versions kept. The base is the newest version that didn't fail."""

Digests = dict[str, bytes]


class WrittenTensors:
    """Digests of the tensors of the last versions. Used by one thread at a time."""

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


def _digest(tensor: NamedBuffer) -> bytes:
    digest = hashlib.blake2b(tensor.data, digest_size=DIGEST_BYTES)
    digest.update(f"{tensor.dtype} {tensor.shape}".encode())
    return digest.digest()
