"""LoRA adapters of the SGLang double, by the source of 0.5.23, with real tensors.

An adapter is added to the weights for a step of its requests, and removed afterwards.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from starlette.responses import JSONResponse, Response

PEFT_PREFIX = "base_model.model."

Deltas = dict[str, torch.Tensor]
"""Changes to the weights, by tensor name."""


class Loras:
    """Adapters of one server."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self._model = model
        self._settings = settings
        self.paths: dict[str, str] = {}
        self.loads = self.most = 0
        """Number of loads, and the most adapters at a time."""
        self.used: list[str] = []
        """Adapter of each request in flight."""
        self._deltas: dict[str, Deltas] = {}
        self.posts = {"/load_lora_adapter": self._load, "/unload_lora_adapter": self._unload}

    async def _load(self, body: dict[str, Any]) -> Response:
        name, path = body["lora_name"], Path(body["lora_path"])
        if not self._settings.get("enable_lora"):
            return self._answer("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self.paths:
            return self._answer(f"Failed to load LoRA adapter {name} because it is already loaded")
        config = json.loads((path / "adapter_config.json").read_text())
        if config["r"] > self._settings["max_lora_rank"]:
            rank = config["r"]
            return self._answer(f"LoRA adapter {name} with rank {rank} is incompatible with the …")
        tensors = load_file(path / "adapter_model.safetensors")
        if half := _half_of_a_matrix(set(tensors)):  # it ends at the first request instead
            return self._answer(f"Cannot find target module name for {half}")
        self.paths[name] = str(path)
        self.loads, self.most = self.loads + 1, max(self.most, len(self.paths))
        self._deltas[name] = _deltas(tensors, config)
        return self._answer(None)

    async def _unload(self, body: dict[str, Any]) -> Response:
        name = body["lora_name"]
        if name not in self.paths:
            return self._answer(f"LoRA adapter {name} does not exist.")
        del self.paths[name]
        while name in self.used:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        del self._deltas[name]
        return self._answer(None)

    def _answer(self, error: str | None) -> Response:
        reported_labels = {
            "success": error is None,
            "error_message": error,
            "loaded_adapters": self.paths,
        }
        return JSONResponse(reported_labels, 200 if error is None else 400)

    def refusal(self, name: str | None) -> str | None:
        """Return why a request with this adapter is refused."""
        if name is None or name in self.paths:
            return None
        return f"Got LoRA adapter that has never been loaded: {name}"

    @contextmanager
    def added(self, name: str | None) -> Iterator[None]:
        """Add the adapter to the weights within the block."""
        if name is None:
            yield
            return
        saved = {}
        with torch.no_grad():
            for key, delta in self._deltas[name].items():
                weight = self._model.get_parameter(key)
                saved[key] = weight.clone()
                weight.add_(delta)
            try:
                yield
            finally:
                for key, weight in saved.items():
                    self._model.get_parameter(key).copy_(weight)


def _deltas(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Deltas:
    scale = config["lora_alpha"] / config["r"]
    found: Deltas = {}
    for name, narrow in tensors.items():
        if ".lora_A." in name:
            wide = tensors[name.replace(".lora_A.", ".lora_B.")]
            key = name.removeprefix(PEFT_PREFIX).replace(".lora_A.", ".")
            found[key] = scale * (wide @ narrow)
    return found


def _half_of_a_matrix(names: set[str]) -> str | None:
    """Return a tensor of a projection whose fused matrix lacks others, if there is one."""
    for name in sorted(names):
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            mine = next((part for part in parts if f".{part}." in name), None)
            if mine is not None and not {name.replace(mine, part) for part in parts} <= names:
                return name
    return None
