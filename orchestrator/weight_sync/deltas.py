"""Which tensors of a set are others than in the version before? By hashes of what was published.

Only of what this process has written, and of the last few versions: where it doesn't know what one
was made of, all tensors count as others. It knows neither engines nor channels.
"""

import hashlib
from collections.abc import Sequence

from tidegate.transport.weight_channels.base import NamedBuffer

DIGEST_BYTES = 16
"""Of BLAKE2b: tensors that differ and have the same one will not be met with, as with the 4 bytes
of a CRC they might be; old weights would then be served as new ones."""

VERSIONS_MAX = 4
"""Remembered. The one before is the newest that didn't fail."""

Digests = dict[str, bytes]


class WrittenTensors:
    """What each of the last versions was made of, by tensor. One thread's at a time."""

    def __init__(self) -> None:
        self._digests: dict[int, Digests] = {}

    def forget(self, version: int) -> None:
        """Something else is written as this version; a number may be used again."""
        self._digests.pop(version, None)

    def changed(
        self, version: int, tensors: Sequence[NamedBuffer], *, before: int
    ) -> list[NamedBuffer] | None:
        """Note a whole set; of it, what has to be laid over the version ``before``.

        None: all of it, and over nothing.
        """
        digests = {tensor.name: _digest(tensor) for tensor in tensors}
        old = self._digests.get(before, {})
        self._digests.pop(version, None)  # so that it is the newest again
        self._digests[version] = digests
        while len(self._digests) > VERSIONS_MAX:
            del self._digests[next(iter(self._digests))]
        if digests.keys() != old.keys():
            return None
        # A matrix that was a copy of one that changes is sent too: an engine that computes with one
        # of both (tied embeddings) must see whether they still are copies.
        changed = {old[name] for name, digest in digests.items() if digest != old[name]}
        others = [
            tensor
            for tensor in tensors
            if digests[tensor.name] != old[tensor.name]
            or (len(tensor.shape) > 1 and old[tensor.name] in changed)
        ]
        return others if len(others) < len(tensors) else None


def _digest(tensor: NamedBuffer) -> bytes:
    made = hashlib.blake2b(tensor.data, digest_size=DIGEST_BYTES)
    made.update(f"{tensor.dtype} {tensor.shape}".encode())
    return made.digest()
