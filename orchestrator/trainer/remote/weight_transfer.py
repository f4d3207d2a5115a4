"""Transfer of a remote trainer's weights to the run: by shared memory, or in chunks over ZeroMQ.

The trainer's rank 0 sends with :class:`WeightUpload`. The run's listener keeps one
:class:`ReceivedWeights` per client, which gives `service.py` the state dict to publish. Built on
the ``shm`` weight channel and torch.
"""

import math
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.errors import WeightsRefused
from tidegate.orchestrator.trainer.remote.link import ReplyFuture, TrainerLink
from tidegate.transport import trainer_messages as wire
from tidegate.transport.messages import InitWeights, TensorSpec
from tidegate.transport.weight_channels import NamedBuffer, WeightReceiver, receiver
from tidegate.transport.weight_channels.base import ITEM_BYTES, check_buffers, layout, views
from tidegate.transport.weight_channels.shm import ShmSender

if TYPE_CHECKING:
    import torch

WRITES_KEPT = 2
"""Number of weight sets that stay in shared memory: the newest set and the one before. If the
trainer cancels a publish, the run may still be reading that publish's set."""


class WeightUpload:
    """Sender of weights, on the trainer's side: by shared memory, or in chunks over ZeroMQ."""

    def __init__(self) -> None:
        self._shared = ShmSender()
        self._writes = 0
        self.reads_shared_memory = False
        """Whether the run can read this trainer's shared memory, as its welcome says."""

    @property
    def init(self) -> InitWeights:
        """Address of the shared memory, for the join request."""
        return self._shared.init()

    def send(
        self,
        link: TrainerLink,
        state_dict: "Mapping[str, torch.Tensor]",
        publish: wire.PublishWeights,
    ) -> wire.PublishWeights:
        """Bring the tensors to the run; return ``publish`` with their location. Blocks.

        Raises:
            WeightsRefused: a tensor can't be sent.
            RunLost, RunClosed: the run is gone, or has ended.
        """
        from tidegate.orchestrator.weight_sync.state_dict import named_buffers  # torch

        buffers = named_buffers(state_dict)
        if not self.reads_shared_memory:
            return self._upload(link, buffers, publish)
        keep = range(self._writes - WRITES_KEPT + 2, self._writes + 1)
        self._writes += 1
        (shared,) = self._shared.write(self._writes, buffers, keep=[w for w in keep if w > 0])
        return msgspec.structs.replace(publish, shared=shared)

    def close(self) -> None:
        """Release the shared memory."""
        self._shared.close()

    def _upload(
        self, link: TrainerLink, buffers: list[NamedBuffer], publish: wire.PublishWeights
    ) -> wire.PublishWeights:
        check_buffers(buffers)
        specs, nbytes = layout(buffers)
        upload = uuid.uuid4().hex
        answers: deque[ReplyFuture] = deque()

        def send(start: int, data: bytes) -> None:
            if len(answers) >= wire.CHUNKS_AHEAD:
                answers.popleft().result()
            chunk = wire.UploadChunk(upload=upload, start=start, nbytes_total=nbytes)
            answers.append(link.request(chunk, (data,)))

        send(0, b"")
        for spec, buffer in zip(specs, buffers, strict=True):
            data = buffer.data.cast("B") if spec.nbytes else memoryview(b"")
            for at in range(0, spec.nbytes, wire.CHUNK_BYTES):
                send(spec.offset + at, bytes(data[at : at + wire.CHUNK_BYTES]))
        while answers:
            answers.popleft().result()
        return msgspec.structs.replace(publish, upload=upload, tensors=specs)


UPLOADS_MAX = 2
"""Uploads held for one trainer: the current one, and an unfinished one of a cancelled publish."""


class ReceivedWeights:
    """Receiver of weights on the run's side: holds a trainer's uploads until their publish."""

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
        """Whether this process can read the trainer's shared memory."""
        return self._receiver is not None

    def take(self, chunk: wire.UploadChunk, data: bytes) -> None:
        """Store a chunk of an upload; a repeated chunk changes nothing.

        Raises:
            WeightsRefused: the chunk lies outside of the announced size.
        """
        upload = self._uploads.get(chunk.upload)
        if upload is None:
            while len(self._uploads) >= UPLOADS_MAX:
                del self._uploads[next(iter(self._uploads))]
            upload = self._uploads[chunk.upload] = _buffer(chunk.nbytes_total)
        end = chunk.start + len(data)
        if end > len(upload):
            raise WeightsRefused(
                f"a chunk at bytes [{chunk.start}, {end}) does not fit an upload of {len(upload)} "
                "bytes; publish again"
            )
        if data:
            upload[chunk.start : end] = np.frombuffer(data, np.uint8)

    def state_dict(self, publish: wire.PublishWeights) -> "dict[str, torch.Tensor]":
        """Return the tensors of a publish.

        Raises:
            WeightsRefused: the upload is missing, or tensors don't fit it.
        """
        if publish.shared is not None:
            if self._receiver is None:
                raise WeightsRefused(
                    "the weights are in shared memory, and the run is on another host or in "
                    "another IPC namespace; connect() from the same one, or over tcp"
                )
            return _tensors(self._receiver.tensors(publish.shared))
        upload = self._uploads.pop(publish.upload, None)
        if upload is None:
            raise WeightsRefused("the weights' upload has not arrived; publish again")
        return _tensors(views(publish.tensors, upload.data))

    def close(self) -> None:
        """Release uploads and shared memory."""
        self._uploads = {}
        if self._receiver is not None:
            self._receiver.close()


def _buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError):
        raise WeightsRefused(
            f"the run's process has no memory for {nbytes} bytes of weights; free memory on its "
            "host"
        ) from None


def _tensors(received: Iterable[tuple[TensorSpec, memoryview]]) -> "dict[str, torch.Tensor]":
    return {spec.name: _tensor(spec, view) for spec, view in received}


def _tensor(spec: TensorSpec, view: memoryview) -> "torch.Tensor":
    import torch

    dtype = getattr(torch, spec.dtype) if spec.dtype in ITEM_BYTES else None
    if dtype is None:
        raise WeightsRefused(
            f"tensor {spec.name!r} has dtype {spec.dtype!r}; publish one of {', '.join(ITEM_BYTES)}"
        )
    if not math.prod(spec.shape):
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(spec.shape)
