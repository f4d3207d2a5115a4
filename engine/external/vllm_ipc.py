"""Sends weights to a vLLM server on the same GPU by CUDA IPC.

Used by ``VllmWeights`` for ``#weights=ipc``. Tensors are packed into a buffer on the shared GPU; an
HTTP message to vLLM says how to open the buffer and what it contains. The message is a pickle of
plain values, as vLLM's own trainers send it. Uses torch's CUDA IPC handles and ``http.py``.
"""

import asyncio
import base64
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.errors import ConfigError, EngineGone, WeightsRefused
from tidegate.transport.messages import CudaIpcHandle
from tidegate.transport.weight_channels.cuda_memory import EVENT_BYTES, Gpu
from tidegate.transport.weight_channels.cuda_nccl import packs

PACK_BYTES = 256 * 2**20
"""Size of the buffer, which may exceed it by one tensor."""

JOIN_TIMEOUT_S = 60.0

SEND_TIMEOUT_S = 600.0
"""Seconds for each buffer, which vLLM loads before it answers."""


class VllmIpcSender:
    """Sender for one server with one worker."""

    def __init__(self, http: HttpEngine, *, workers: int, gpu: Gpu) -> None:
        """``gpu`` is the worker's own GPU.

        Raises:
            ConfigError: the server has several workers.
        """
        if workers != 1:
            raise ConfigError(
                f"weights go by ipc to one worker on one GPU, and {http.url} has {workers}: start "
                f"servers of one worker each, or use #weights=nccl, or files"
            )
        self._http, self._gpu = http, gpu

    async def join(self) -> None:
        """Announce the transfer method to the server.

        Raises:
            Refusal: the server does not accept it.
        """
        info = {"init_info": {"packed": True}}
        await self._post("/init_weight_transfer_engine", info, JOIN_TIMEOUT_S)

    async def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors, one buffer per call, within an update that has begun.

        Raises:
            EngineGone: it is unknown how many were loaded.
        """
        all_packs = list(packs(tensors.items(), lambda named: named[1].nbytes, PACK_BYTES))
        try:
            buffer = self._gpu.allocate(max(sum(t.nbytes for _, t in pack) for pack in all_packs))
            memory = self._gpu.share(buffer)
            try:
                handles = _pickle({memory.gpu: _rebuild_arguments(memory)})
                for pack in all_packs:
                    await asyncio.to_thread(self._fill, buffer, pack)
                    update = {"update_info": _update_info(pack) | {"ipc_handles_pickled": handles}}
                    await self._post("/update_weights", update, SEND_TIMEOUT_S)
            except BaseException:
                self._gpu.unshare(memory)  # on success vLLM drops its reference itself
                raise
        except (
            HttpStatusError,
            WeightsRefused,
            RuntimeError,
        ) as error:  # RuntimeError: from torch, if the GPU fails
            raise EngineGone(
                f"vLLM may have loaded only some of the weights: {error}; its weights are unknown"
            ) from error

    def _fill(self, buffer: torch.Tensor, pack: list[tuple[str, torch.Tensor]]) -> None:
        start = 0
        for _, tensor in pack:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            buffer[start : start + flat.numel()].copy_(flat)
            start += flat.numel()
        self._gpu.settle()

    async def _post(self, path: str, body: object, timeout_s: float) -> None:
        await self._http.call("POST", path, body, timeout_s=timeout_s)

    async def close(self) -> None:
        """Do nothing: nothing outlives a call."""


def _update_info(pack: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    return {
        "names": [name for name, _ in pack],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in pack],
        "shapes": [list(tensor.shape) for _, tensor in pack],
        "tensor_sizes": [tensor.nbytes for _, tensor in pack],
    }


def _rebuild_arguments(memory: CudaIpcHandle) -> tuple[object, ...]:
    """Return the arguments of torch's ``rebuild_cuda_tensor`` for the buffer as bytes.

    Source: torch 2.13, torch/multiprocessing/reductions.py. No event is needed, because the buffer
    is complete before the message is sent.
    """
    return (
        torch.Tensor,
        torch.Size([memory.nbytes]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        0,  # device index, which the reader replaces by its own
        memory.handle,
        memory.nbytes,
        memory.offset,
        False,
        memory.ref_counter_handle,
        memory.ref_counter_offset,
        bytes(EVENT_BYTES),
        False,
    )


def _pickle(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()
