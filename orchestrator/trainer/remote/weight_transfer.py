"""Transfer of a remote trainer's weights to the run: by shared memory, or in chunks over ZeroMQ.

The trainer's rank 0 sends whole tensors with :class:`WeightUpload`, or every rank its own parts.
The run's listener keeps one :class:`ReceivedWeights` per client, which gives `service.py` the
tensors or parts to publish.
"""

import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.errors import WeightsRefused
from tidegate.orchestrator.trainer.remote.link import ReplyFuture, TrainerLink
from tidegate.orchestrator.weight_sync.deltas import WrittenElements
from tidegate.orchestrator.weight_sync.tensor_parts import TensorPart
from tidegate.transport import trainer_messages as wire
from tidegate.transport.messages import InitWeights, TensorSpec
from tidegate.transport.weight_channels import NamedBuffer
from tidegate.transport.weight_channels.base import check_buffers, layout, views
from tidegate.transport.weight_channels.checksums import (
    checksums,
    specs_with,
    verify_checksum,
    with_checksums,
)
from tidegate.transport.weight_channels.shm import NAME, ShmReceiver, ShmSender

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
        self._kept = WrittenElements()
        """Copy of the parts that this rank sent last, to make patches from."""
        self._sending = threading.Lock()
        """Held while parts are copied and sent: a cancelled publish's thread may still do so."""
        self.held_plan = ""
        """Plan of the publish whose parts are kept; empty if none are."""
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

        return self._send_buffers(link, named_buffers(state_dict), publish)

    def send_parts(
        self,
        link: TrainerLink,
        parts: Sequence[TensorPart],
        plan: wire.PartsPlan,
        publish: wire.PublishWeights,
    ) -> wire.PublishWeights:
        """Bring a rank's parts to the run, as ``plan`` asks; return ``publish`` with their places.

        Blocks. Where patches would be too large, nothing is sent and ``publish`` says so; then call
        it again with a plan for whole parts.

        Raises:
            WeightsRefused, RunLost, RunClosed: as :meth:`send`.
        """
        publish = msgspec.structs.replace(
            publish,
            plan=plan.plan,
            boxes=[wire.PartBox(list(part.shape), list(part.start)) for part in parts],
        )
        with self._sending:
            buffers = self._kept_and_sent([part.buffer for part in parts], plan)
            if buffers is None:
                return msgspec.structs.replace(publish, is_too_dense=True)
            sent = self._send_buffers(link, buffers, publish)
        if not plan.has_checksums:
            return sent
        if sent.shared is not None:
            (shared,) = with_checksums([sent.shared], checksums(buffers))
            return msgspec.structs.replace(sent, shared=shared)
        return msgspec.structs.replace(sent, tensors=specs_with(sent.tensors, checksums(buffers)))

    def _kept_and_sent(
        self, buffers: list[NamedBuffer], plan: wire.PartsPlan
    ) -> list[NamedBuffer] | None:
        """Keep a copy of the parts if the plan asks for one; return the parts or patches of them,
        or None if patches are too large."""
        held, self.held_plan = self.held_plan, ""  # until the copy is complete
        found: list[NamedBuffer] | None = buffers
        if plan.are_patches:
            found = self._kept.patches(plan.version, buffers, has_checksums=plan.has_checksums)
        elif plan.keep_copy and held != plan.plan:
            self._kept.keep(plan.version, buffers)
        self.held_plan = plan.plan if plan.keep_copy else ""
        return found

    def _send_buffers(
        self, link: TrainerLink, buffers: list[NamedBuffer], publish: wire.PublishWeights
    ) -> wire.PublishWeights:
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
        self._receiver: ShmReceiver | None = None
        self._uploads: dict[str, npt.NDArray[np.uint8]] = {}
        if shared_memory is not None and shared_memory.channel == NAME:
            try:
                self._receiver = ShmReceiver(shared_memory)
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
        return _tensors(self._received(publish))

    def parts(self, publish: wire.PublishWeights) -> list[TensorPart]:
        """Return a rank's parts of a publish.

        Raises:
            WeightsRefused: as :meth:`state_dict`.
        """
        received = list(self._received(publish))
        for spec, view in received:
            verify_checksum(spec, view)
        buffers = list(_buffers(received))
        if len(buffers) != len(publish.boxes):
            raise WeightsRefused(
                f"a rank sent {len(buffers)} tensors and {len(publish.boxes)} boxes; install the "
                "same Tidegate version on the trainer and the run"
            )
        return [
            TensorPart(buffer, tuple(box.shape), tuple(box.start))
            for buffer, box in zip(buffers, publish.boxes, strict=True)
        ]

    def _received(self, publish: wire.PublishWeights) -> Iterator[tuple[TensorSpec, memoryview]]:
        if publish.shared is not None:
            if self._receiver is None:
                raise WeightsRefused(
                    "the weights are in shared memory, and the run is on another host or in "
                    "another IPC namespace; connect() from the same one, or over tcp"
                )
            return self._receiver.tensors(publish.shared)
        upload = self._uploads.pop(publish.upload, None)
        if upload is None:
            raise WeightsRefused("the weights' upload has not arrived; publish again")
        return views(publish.tensors, upload.data)

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
    from tidegate.orchestrator.weight_sync.state_dict import tensors_of  # torch

    return tensors_of(_buffers(received))


def _buffers(received: Iterable[tuple[TensorSpec, memoryview]]) -> Iterator[NamedBuffer]:
    for spec, view in received:
        yield NamedBuffer(spec.name, spec.dtype, tuple(spec.shape), view, patch=spec.patch)
