"""Weight updates of the SGLang double: sessions of pickled or broadcast tensors, as in 0.5.23.

It unpickles no more than the real one, and joins process groups as torch does.
"""

import asyncio
import base64
import io
import pickle
from datetime import timedelta
from typing import Any

import torch
from starlette.responses import JSONResponse, Response

from tests.engine.external import sglang_double

JOIN_TIMEOUT = timedelta(seconds=60)

OUTSIDE = "{} must run between begin_weight_update() and end_weight_update()"


class SafeUnpickler(pickle.Unpickler):
    """Allows the part of SGLang's own list that tensors by value need."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) not in {
            ("torch._utils", "_rebuild_tensor_v2"),
            ("collections", "OrderedDict"),
        }:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name})")
        return super().find_class(module, name)


class Sessions:
    """Weight updates without files."""

    def __init__(self, double: "sglang_double.SglangDouble") -> None:
        self._double = double
        self._is_open = False
        self._groups: dict[str, Any] = {}
        self.fails_at: str | None = None
        """Name of the tensor at which the update fails."""

    @property
    def posts(self) -> dict[str, Any]:
        return {
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/update_weights_from_tensor": self.from_tensor,
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.from_distributed,
            "/destroy_weights_update_group": self.leave,
        }

    async def begin(self, body: dict[str, Any]) -> Response:
        if self._is_open:
            return reply("a weight-update session is already open", is_ok=False)
        self._is_open = True
        return reply("Success")

    async def end(self, body: dict[str, Any]) -> Response:
        if not self._is_open:
            return reply("no weight-update session is open", is_ok=False)
        self._is_open = False
        return reply("Success")

    async def from_tensor(self, body: dict[str, Any]) -> Response:
        if not self._is_open:
            return reply(OUTSIDE.format("update_weights_from_tensor"), is_ok=False)
        data = base64.b64decode(body["serialized_named_tensors"][0], validate=True)
        return self._load(SafeUnpickler(io.BytesIO(data)).load(), body)

    async def join(self, body: dict[str, Any]) -> Response:
        name = body["group_name"]
        try:
            self._groups[name] = await asyncio.to_thread(joined, body)
        except RuntimeError as error:
            return reply(f"Failed to initialize custom process group: {error}.", is_ok=False)
        return reply("Succeeded to initialize custom process group.")

    async def from_distributed(self, body: dict[str, Any]) -> Response:
        if not self._is_open:
            return reply(OUTSIDE.format("update_weights_from_distributed"), is_ok=False)
        try:
            tensors = await asyncio.to_thread(received, self._groups[body["group_name"]], body)
        except RuntimeError as error:
            return reply(f"Failed to receive weights: {error}", is_ok=False)
        return self._load(tensors, body)

    async def leave(self, body: dict[str, Any]) -> Response:
        group = self._groups.pop(body["group_name"], None)
        if group is None:
            return reply("The group to be destroyed does not exist.", is_ok=False)
        torch.distributed.destroy_process_group(group)
        return reply("Succeeded to destroy custom process group.")

    def _load(self, tensors: list[tuple[str, torch.Tensor]], body: dict[str, Any]) -> Response:
        double, state = self._double, self._double.model.state_dict()
        for name, tensor in tensors:
            if name == self.fails_at:
                why = "The full weights of the ModelRunner are partially updated."
                return reply(f"Failed to update parameter online: {name}. {why}", is_ok=False)
            state[name].copy_(tensor)
        label = body.get("weight_version")
        double.label = label or double.label
        if body.get("flush_cache", True) and double.running and double.paused != "retract":
            return reply(sglang_double.NOT_FLUSHED, is_ok=False)
        if body.get("flush_cache", True):
            double.sampler.prefixes.clear()
        double.info_label = double.label
        return reply(f"Success Weight version updated to {label}." if label else "Success")


def joined(body: dict[str, Any]) -> Any:
    """Return the group, made as SGLang's ``init_custom_process_group`` does."""
    dist: Any = torch.distributed
    torch_group = dist.distributed_c10d
    store = torch_group.PrefixStore(
        body["group_name"],
        dist.TCPStore(
            body["master_address"],
            body["master_port"],
            body["world_size"],
            False,
            JOIN_TIMEOUT,
            use_libuv=False,
        ),
    )
    group, _ = torch_group._new_process_group_helper(
        body["world_size"],
        body["rank_offset"],
        [],
        torch_group.Backend(body["backend"]),
        store,
        group_name=body["group_name"],
        timeout=JOIN_TIMEOUT,
    )
    torch_group._world.pg_group_ranks[group] = {n: n for n in range(body["world_size"])}
    return group


def received(group: Any, body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return what rank 0 broadcasts next."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    tensors = []
    for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        group.broadcast([tensor], options).wait()
        tensors.append((name, tensor))
    return tensors


def reply(message: str, *, is_ok: bool = True) -> JSONResponse:
    return JSONResponse({"success": is_ok, "message": message}, status_code=200 if is_ok else 400)
