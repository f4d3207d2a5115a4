"""How do a remote trainer's weights come in? From its shared memory, or in pieces over the wire.

Either way they become a state dict that is published as any other. It knows nobody's turn.
"""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import InitWeights, TensorSpec
from tidegate.transport.trainer_messages import Chunk, Publish
from tidegate.transport.weight_channels import WeightReceiver, receiver
from tidegate.transport.weight_channels.base import ITEM_BYTES, views

UPLOADS_MAX = 2
"""Of one trainer at once: the one before may have been given up."""


class TrainersWeights:
    """What one trainer's process has brought, and not published yet."""

    def __init__(self, shared_memory: InitWeights | None) -> None:
        self._receiver: WeightReceiver | None = None
        self._uploads: dict[str, npt.NDArray[np.uint8]] = {}
        if shared_memory is not None and shared_memory.channel == "shm":
            try:
                self._receiver = receiver(shared_memory)
            except WeightsRefused:  # on another host, or in another container
                self._receiver = None

    @property
    def reads_shared_memory(self) -> bool:
        """Whether the trainer may leave them in its own."""
        return self._receiver is not None

    def take(self, chunk: Chunk, data: bytes) -> None:
        """A piece of an upload has come; the same one twice does no harm.

        Raises:
            WeightsRefused: it lies outside of what was announced.
        """
        upload = self._uploads.get(chunk.upload)
        if upload is None:
            while len(self._uploads) >= UPLOADS_MAX:
                del self._uploads[next(iter(self._uploads))]
            upload = self._uploads[chunk.upload] = _room(chunk.nbytes_total)
        end = chunk.start + len(data)
        if end > len(upload):
            raise WeightsRefused(
                f"a piece of weights at [{chunk.start}, {end}) of an upload of {len(upload)} bytes"
            )
        if data:
            upload[chunk.start : end] = np.frombuffer(data, np.uint8)

    def state_dict(self, publish: Publish) -> dict[str, torch.Tensor]:
        """The tensors of a publish.

        Raises:
            WeightsRefused: they are not there, or not as they should be.
        """
        if publish.shared is not None:
            if self._receiver is None:
                raise WeightsRefused("weights lie in memory that this host doesn't share")
            return _tensors(self._receiver.tensors(publish.shared))
        upload = self._uploads.pop(publish.upload, None)
        if upload is None:
            raise WeightsRefused("weights were announced and never came; publish again")
        return _tensors(views(publish.tensors, upload.data))

    def close(self) -> None:
        """Let go of all of it."""
        self._uploads = {}
        if self._receiver is not None:
            self._receiver.close()


def _room(nbytes: int) -> npt.NDArray[np.uint8]:
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError):
        raise WeightsRefused(f"no memory for weights of {nbytes} bytes") from None


def _tensors(shown: Iterable[tuple[TensorSpec, memoryview]]) -> dict[str, torch.Tensor]:
    return {spec.name: _tensor(spec, view) for spec, view in shown}


def _tensor(spec: TensorSpec, view: memoryview) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype) if spec.dtype in ITEM_BYTES else None
    if dtype is None:
        raise WeightsRefused(f"tensor {spec.name!r} has dtype {spec.dtype!r}")
    if not math.prod(spec.shape):
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(spec.shape)
