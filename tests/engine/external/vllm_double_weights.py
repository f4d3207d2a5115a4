"""Weight transfer of the vLLM double by NCCL or IPC, in the four phases of 0.32.0's source.

With NCCL its one worker is rank 1, through NCCL's own function names. A layer counts the weights
that it receives until an update is finished, and fails if it receives one twice.
"""

import asyncio
import base64
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.engine.external import vllm_double
from tests.engine.external.vllm_double_loras import error_body
from tests.host_gpu import HostGpu
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import load_directory
from tidegate.errors import TidegateError, WeightsRefused
from tidegate.serving.control.ipc_receiver import read_handles
from tidegate.transport.messages import CudaIpcHandle
from tidegate.transport.weight_channels.cuda_nccl import (
    Communicator,
    NcclFailed,
    nccl_library,
    packs,
)

ACTIVE = (
    "start_weight_update called while a weight update is already active. "
    "Call finish_weight_update first."
)

INIT_FIELDS = {
    "nccl_unique_id_b64",
    "rank_offset",
    "world_size",
    "packed",
    "packed_buffer_size_bytes",
}

TIMEOUT_S = 30.0


class Transfers:
    """One server's weight transfer engine."""

    def __init__(self, double: "vllm_double.VllmDouble") -> None:
        self._double = double
        self._group: Communicator | None = None
        self.gpu = HostGpu()
        """The worker's GPU."""
        self._init: dict[str, Any] = {}
        self._is_active = False
        self.is_apart = False
        """Whether its layers are disassembled, without weights to compute with."""
        self._given: dict[str, torch.Tensor] = {}
        self.took: list[list[str]] = []
        """Tensor names of each complete update."""
        self.fails_at: str | None = None
        """Name of the tensor at which the update fails, once."""
        self.refuses_to_start = False
        self.refuses_updates = False
        self.stays_away = False
        """Whether it claims to have joined the trainer's communicator without doing so."""
        self.workers = 1

    @property
    def routes(self) -> dict[str, Any]:
        return {
            "/init_weight_transfer_engine": self._connect,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/shutdown_weight_transfer_engine": self._shut_down,
            "/get_world_size": self._world_size,
        }

    async def _world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": self.workers})

    async def _connect(self, request: Request) -> Response:
        info = (await request.json())["init_info"]
        if self._double.config["weight_transfer"]["backend"] == "ipc":
            self._init = info
            return JSONResponse({"message": "Weight transfer initialized"})
        if unknown := set(info) - INIT_FIELDS:
            return failed(f"Invalid init_info for NCCLWeightTransferEngine: {unknown}")
        self._init = info
        if self.stays_away:
            return JSONResponse({"message": "Weight transfer initialized"})
        identity = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        try:
            self._group = await asyncio.to_thread(
                Communicator,
                nccl_library(),
                identity,
                rank=info["rank_offset"],
                ranks=info["world_size"],
                device=torch.device("cpu"),
            )
        except NcclFailed as error:
            return failed(str(error))
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _start(self, request: Request) -> Response:
        if self.refuses_to_start or self._is_active:
            return failed(ACTIVE if self._is_active else "Weight transfer not configured.")
        assert self._double.paused, "EngineDeadError: the next step would meet meta tensors"
        self._is_active = self.is_apart = True
        return JSONResponse({"message": "Weight update started"})

    async def _update(self, request: Request) -> Response:
        if not self._is_active:
            return failed("start_weight_update must be called before update_weights.")
        if self._group is None and "rank_offset" in self._init:
            return self._broken("NCCL weight transfer not initialized.")
        if self.refuses_updates:
            return self._broken("CUDA out of memory.")
        info = (await request.json())["update_info"]
        try:
            for name, tensor in await asyncio.to_thread(self._received, info):
                if name == self.fails_at:
                    self.fails_at = None
                    return self._broken(f"There is no module or parameter named {name!r}")
                if name in self._given:
                    return self._broken(f"a layer has more than its elements: {name}")
                self._given[name] = tensor
        except (NcclFailed, WeightsRefused) as error:
            return self._broken(str(error))
        return JSONResponse({"message": "Weights updated"})

    def _broken(self, why: str) -> Response:
        self._is_active = False
        return failed(why)

    def _received(self, info: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        return self._mapped(info) if self._group is None else self._broadcast(self._group, info)

    def _mapped(self, info: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors in the shared buffer, which are concatenated there."""
        handles = read_handles(info["ipc_handles_pickled"])
        assert isinstance(handles, dict)
        if self.gpu.uuid not in handles:
            raise WeightsRefused(f"IPC handle not found for GPU UUID {self.gpu.uuid}.")
        reported = handles[self.gpu.uuid]
        assert (reported.size, reported.dtype) == ((reported.storage_bytes,), torch.uint8)
        where = (reported.memory, reported.storage_bytes, reported.storage_offset_bytes)
        memory = CudaIpcHandle(self.gpu.uuid, *where, reported.counter, reported.counter_offset)
        sizes = info["tensor_sizes"]
        parts = torch.split(self.gpu.open(memory)[: sum(sizes)], sizes)
        rows = zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True)
        return [(n, p.clone().view(getattr(torch, d)).view(shape)) for n, d, shape, p in rows]

    def _broadcast(
        self, group: Communicator, info: dict[str, Any]
    ) -> list[tuple[str, torch.Tensor]]:
        rows = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        empty = [(name, torch.empty(shape, dtype=getattr(torch, d))) for name, d, shape in rows]
        if not self._init["packed"]:
            for _, tensor in empty:
                group.broadcast(tensor, timeout_s=TIMEOUT_S)
            return empty
        size = self._init["packed_buffer_size_bytes"]
        for together in packs(empty, lambda one: one[1].nbytes, size):
            buffer = torch.empty(sum(one.nbytes for _, one in together), dtype=torch.uint8)
            group.broadcast(buffer, timeout_s=TIMEOUT_S)
            start = 0
            for _, tensor in together:
                part = buffer[start : start + tensor.nbytes]
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
                start += tensor.nbytes
        return empty

    async def _finish(self, request: Request) -> Response:
        if not self._is_active:
            return failed("finish_weight_update called without a matching start_weight_update.")
        self._is_active = self.is_apart = False
        given, self._given = self._given, {}
        if given:
            self.took.append(list(given))
            shape = ModelConfig.from_directory(self._double.path)
            weights = load_directory(self._double.path, shape, torch.float32)
            try:
                for name, tensor in given.items():
                    weights.load(name, tensor)
            except TidegateError as error:
                return failed(str(error))
            self._double.runner.swap(weights)
        body = await request.body()
        if body and (label := (await request.json())["weight_version"]) is not None:
            self._double.label = label
        return JSONResponse({"message": "Weight update finished"})

    async def _shut_down(self, request: Request) -> Response:
        if self._is_active:
            return failed("Cannot release a trainer connection during a weight update")
        group, self._group = self._group, None
        if group is not None:
            group.close()
        return JSONResponse({"message": "Weight transfer shut down"})


def failed(why: str) -> Response:
    return error_body(500, f"Call to collective_rpc method failed: {why}")
