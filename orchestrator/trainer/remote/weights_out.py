"""How do weights leave a remote trainer? Into memory that the run shares, or in pieces to it.

It knows tensors and the link; when they are published is for the run.
"""

import uuid
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from tidegate.orchestrator.trainer.remote.link import AnswerFuture, TrainerLink
from tidegate.transport import trainer_messages as wire
from tidegate.transport.messages import InitWeights
from tidegate.transport.weight_channels import NamedBuffer
from tidegate.transport.weight_channels.base import check_buffers, layout
from tidegate.transport.weight_channels.shm import ShmSender

if TYPE_CHECKING:
    import torch

WRITES_KEPT = 2
"""Sets that stay in shared memory: one being read, whose caller may have gone, and the newest."""


class WeightsOut:
    """A trainer's way to bring weights to the run."""

    def __init__(self) -> None:
        self._shared = ShmSender()
        self._writes = 0
        self.reads_shared_memory = False
        """Whether the run does."""

    @property
    def init(self) -> InitWeights:
        """Where shared memory would be."""
        return self._shared.init()

    def send(
        self, link: TrainerLink, state_dict: "Mapping[str, torch.Tensor]", publish: wire.Publish
    ) -> wire.Publish:
        """Put the tensors where the run gets them; the publish that says where. Blocks.

        Raises:
            WeightsRefused: a tensor can't be sent.
            RunLost, RunClosed: there is nobody to send them to.
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
        """Let go of shared memory."""
        self._shared.close()

    def _upload(
        self, link: TrainerLink, buffers: list[NamedBuffer], publish: wire.Publish
    ) -> wire.Publish:
        check_buffers(buffers)
        specs, nbytes = layout(buffers)
        upload = uuid.uuid4().hex
        answers: deque[AnswerFuture] = deque()

        def send(start: int, data: bytes) -> None:
            if len(answers) >= wire.CHUNKS_AHEAD:
                answers.popleft().result()
            chunk = wire.Chunk(upload=upload, start=start, nbytes_total=nbytes)
            answers.append(link.ask(chunk, (data,)))

        send(0, b"")
        for spec, buffer in zip(specs, buffers, strict=True):
            data = buffer.data.cast("B") if spec.nbytes else memoryview(b"")
            for at in range(0, spec.nbytes, wire.CHUNK_BYTES):
                send(spec.offset + at, bytes(data[at : at + wire.CHUNK_BYTES]))
        while answers:
            answers.popleft().result()
        return msgspec.structs.replace(publish, upload=upload, tensors=specs)
