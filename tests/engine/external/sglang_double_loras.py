"""What does SGLang's double do about LoRA adapters? What 0.5.23 does by its source, with real ones.

An adapter is added to the weights for a step of a request that asks for it, and taken away again.
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
"""What is added to each weight."""


class Loras:
    """One server's."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self._model = model
        self._settings = settings
        self.paths: dict[str, str] = {}
        self.loads = self.most = 0
        """How many were loaded, and the most at a time."""
        self.used: list[str] = []
        """By each request under way."""
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
        said = {"success": error is None, "error_message": error, "loaded_adapters": self.paths}
        return JSONResponse(said, 200 if error is None else 400)

    def refusal(self, name: str | None) -> str | None:
        """Of a request."""
        if name is None or name in self.paths:
            return None
        return f"Got LoRA adapter that has never been loaded: {name}"

    @contextmanager
    def added(self, name: str | None) -> Iterator[None]:
        """While a step is computed."""
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
    """A tensor of a projection whose matrix it would have all of."""
    for name in sorted(names):
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            mine = next((part for part in parts if f".{part}." in name), None)
            if mine is not None and not {name.replace(mine, part) for part in parts} <= names:
                return name
    return None
