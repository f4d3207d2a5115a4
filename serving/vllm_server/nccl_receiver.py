"""How do weights come from a trainer of vLLM's ``nccl`` backend? By NCCL, packed or one by one.

The server's process is one rank of the trainer's communicator, and brings what it received to its
engines as it does with any other weights. It knows no engines and no versions.
"""

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidegate.serving.vllm_server.announced import (
    Announced,
    announced_tensors,
    unpacked,
)
from tidegate.serving.vllm_server.failures import ServerError, UpdateError
from tidegate.serving.vllm_server.nccl_meeting import Meeting, read_meeting, unique_id
from tidegate.transport.weight_channels.cuda_nccl import (
    Communicator,
    NcclFailed,
    nccl_library,
    own_device,
    packs,
)

if TYPE_CHECKING:
    import torch

PATIENCE_S = 300.0
"""A trainer that has announced tensors, and sends none for so long, sends none. vLLM's store waits
as long."""

_KNOWN = ("names", "dtype_names", "shapes", "packed", "packed_buffer_size_bytes")


class NcclReceiver:
    """Takes part in broadcasts of a communicator whose rank 0 is the trainer.

    ``library`` and ``device`` are NCCL's and the process' own GPU unless given.
    """

    def __init__(
        self, library: ctypes.CDLL | None = None, device: "torch.device | None" = None
    ) -> None:
        self._library, self._device = library, device
        self._group: Communicator | None = None
        self._store: Any = None
        self._meeting: Meeting | None = None

    def connect(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer, which is about to join."""
        meeting = read_meeting(info)
        device = self._device or _receiving_device()
        library = self._library or _library()
        self.close()
        known, self._store = unique_id(meeting, patience_s=PATIENCE_S)
        try:
            self._group = Communicator(
                library, known, rank=meeting.rank, ranks=meeting.ranks, device=device
            )
        except NcclFailed as error:
            raise UpdateError(str(error)) from None
        self._meeting, self._device, self._library = meeting, device, library

    def receive(self, info: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Take what the trainer broadcasts, into the host's memory."""
        group, meeting = self._group, self._meeting
        if group is None or meeting is None:
            raise UpdateError("init_weight_transfer_engine must be called before update_weights.")
        if strange := [name for name in info if name not in (*_KNOWN, "packed_num_buffers")]:
            raise UpdateError(f"Invalid update_info for nccl: unknown {strange[0]!r}")
        told = announced_tensors(info)
        # vLLM before 0.28, and TRL for it, say here what later ones say when they meet.
        is_packed = bool(info.get("packed", meeting.is_packed))
        buffer_bytes = int(info.get("packed_buffer_size_bytes", meeting.buffer_bytes))
        try:
            if is_packed:
                return self._packed(group, told, buffer_bytes)
            return {one.name: self._one(group, one.shape, one.dtype).cpu() for one in told}
        except NcclFailed as error:
            self.close()
            raise UpdateError(str(error)) from None
        except RuntimeError as error:  # or the trainer would wait in a broadcast for ever
            self.close()
            raise UpdateError(f"there is no room for what was announced: {error}") from None

    def _packed(
        self, group: Communicator, told: list[Announced], buffer_bytes: int
    ) -> "dict[str, torch.Tensor]":
        import torch

        tensors: dict[str, torch.Tensor] = {}
        for together in packs(told, lambda one: one.num_bytes, buffer_bytes):
            size = sum(one.num_bytes for one in together)
            tensors |= unpacked(self._one(group, (size,), torch.uint8), together)
        return tensors

    def _one(
        self, group: Communicator, shape: tuple[int, ...], dtype: "torch.dtype"
    ) -> "torch.Tensor":
        import torch

        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        group.broadcast(tensor, patience_s=PATIENCE_S)
        return tensor

    def finished(self) -> None:
        """The communicator stays for the next update."""

    def close(self) -> None:
        """Leave the communicator."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()


def _library() -> ctypes.CDLL:
    try:
        return nccl_library()
    except NcclFailed as error:
        raise ServerError(
            400,
            f"weights by nccl want NCCL, and {error}; else start the server with "
            "--weight-transfer gloo or disk",
        ) from None


def _receiving_device() -> "torch.device":
    device = own_device()
    if device is None:
        raise ServerError(
            400,
            "weights by nccl want a CUDA device in the server's process, and torch sees none: "
            "start the server with --weight-transfer gloo, by which trainers broadcast over TCP, "
            "or disk",
        )
    return device
