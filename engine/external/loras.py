"""Registry of the LoRA adapters that an external engine has loaded, by their names in the engine.

An adapter gets a new name in the engine whenever its tensors change, so KV and requests of the old
tensors are never mixed with those of the new.
"""

import asyncio
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tidegate.engine.external.adapter import LORA_NAMES, EngineAdapter
from tidegate.errors import WeightsRefused

PEFT_PREFIX = "base_model.model."
"""PEFT's prefix of tensor names."""


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter's tensors in host memory."""

    tensors: Mapping[str, torch.Tensor]
    """``model.layers.N.PROJECTION.lora_A.weight`` [r, in], ``….lora_B.weight`` [out, r]."""
    scale: float
    """Factor of the product of the A and B matrices."""

    @property
    def rank(self) -> int:
        """Largest rank; publishers make sure that all ranks are equal."""
        ranks = (tensor.shape[0] for name, tensor in self.tensors.items() if ".lora_A." in name)
        return max(ranks, default=0)

    def is_as(self, other: "HostAdapter") -> bool:
        """Whether the other adapter has equal tensors and scale."""
        tensors, other_tensors = self.tensors, other.tensors
        return (
            self.scale == other.scale
            and tensors.keys() == other_tensors.keys()
            and all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)
        )

    def write(self, directory: Path, model: Path) -> None:
        """Write the adapter as PEFT's ``save_pretrained`` would."""
        directory.mkdir(parents=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model),
            "r": self.rank,
            "lora_alpha": self.scale * self.rank,
            "target_modules": sorted({_module(name) for name in self.tensors}),
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        (directory / "adapter_config.json").write_text(json.dumps(config))
        named = {f"{PEFT_PREFIX}{name}": tensor for name, tensor in self.tensors.items()}
        save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _module(name: str) -> str:
    """Return the projection of a tensor name, e.g. ``q_proj``."""
    return name.rpartition(".lora_")[0].rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter that the engine has loaded."""

    adapter: HostAdapter
    name: str
    """Name under which the engine has the adapter, unique for each set of its tensors."""
    directory: Path
    """Files of the adapter. Engines may read them again at any time: if their cache is full, or
    weights were loaded."""


class LoraRegistry:
    """Adapters of the live version, and older ones that requests may still use."""

    def __init__(self, engine: EngineAdapter, model: Path, parent: Path) -> None:
        """Adapters are written to directories in ``parent``."""
        self._engine = engine
        self._model = model
        self._parent = parent.absolute()  # the engine has another working directory
        self._live: dict[str, LoadedLora] = {}
        self._retired: list[LoadedLora] = []
        self._must_reload = False

    @property
    def names(self) -> dict[str, str]:
        """Name of each adapter in the engine, by its name in the run."""
        return names_of(self._live)

    def mark_lost(self) -> None:
        """Mark all adapters as lost, so that the next version loads all of them again."""
        self._must_reload = True

    async def load(self, adapters: Mapping[str, object], label: str) -> dict[str, LoadedLora]:
        """Load those of the adapters that the engine has not loaded, beside those in use.

        Raises:
            WeightsRefused: the engine refused one, or files could not be written; nothing changed.
        """
        loaded: dict[str, LoadedLora] = {}
        for number, (name, adapter) in enumerate(adapters.items()):
            assert isinstance(adapter, HostAdapter), "as HostWeights make them"
            live = self._live.get(name)
            if live is not None and not self._must_reload and live.adapter.is_as(adapter):
                loaded[name] = live
                continue
            engine_name = f"{LORA_NAMES}{label}.{number}"
            lora = LoadedLora(adapter, engine_name, self._parent / engine_name)
            try:
                await asyncio.to_thread(adapter.write, lora.directory, self._model)
                await self._engine.load_lora(lora.name, lora.directory)
            except (WeightsRefused, OSError) as error:
                shutil.rmtree(lora.directory, ignore_errors=True)
                self.drop(loaded)
                raise WeightsRefused(f"adapter {name!r}: {error}") from error
            loaded[name] = lora
        return loaded

    def drop(self, loaded: Mapping[str, LoadedLora]) -> None:
        """Discard loaded adapters whose version will not become live."""
        serving = self._live.values()
        self._retired += [lora for lora in loaded.values() if lora not in serving]

    def set_live(self, loaded: dict[str, LoadedLora]) -> None:
        """Make these the adapters of the live version."""
        live_loras = loaded.values()
        self._retired += [lora for lora in self._live.values() if lora not in live_loras]
        self._live, self._must_reload = loaded, False

    async def unload_unused(self, used: Collection[str]) -> None:
        """Unload old adapters, except those whose names are in ``used`` by requests."""
        for lora in [lora for lora in self._retired if lora.name not in used]:
            await self._engine.unload_lora(lora.name)
            self._retired.remove(lora)  # last, so that a cancelled call can be repeated
            shutil.rmtree(lora.directory, ignore_errors=True)

    async def close(self) -> None:
        """Unload all adapters."""
        self.set_live({})
        await self.unload_unused(())

    def remove_files(self) -> None:
        """Remove all files, whatever the engine's state."""
        for lora in [*self._live.values(), *self._retired]:
            shutil.rmtree(lora.directory, ignore_errors=True)


def names_of(loaded: Mapping[str, LoadedLora]) -> dict[str, str]:
    """Return the name of each adapter in the engine, by its name in the run."""
    return {name: lora.name for name, lora in loaded.items()}
