"""Which LoRA adapters has another engine got, by what names, and which of them may go?

It knows neither engines' APIs nor turns. An adapter's name in the engine is another each time that
its tensors are, so KV and requests of the old one can't be taken for those of the new.
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
"""What PEFT puts before the model's own names."""


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter's tensors, in this host's memory."""

    tensors: Mapping[str, torch.Tensor]
    """``model.layers.N.PROJECTION.lora_A.weight`` [r, in], ``….lora_B.weight`` [out, r]."""
    scale: float
    """What the product of its matrices is multiplied by."""

    @property
    def rank(self) -> int:
        """The largest; whoever publishes one sees to it that all are the same."""
        return max(self._ranks(), default=0)

    def _ranks(self) -> list[int]:
        return [tensor.shape[0] for name, tensor in self.tensors.items() if ".lora_A." in name]

    def is_as(self, other: "HostAdapter") -> bool:
        """Whether it computes the same."""
        mine, others = self.tensors, other.tensors
        return (
            self.scale == other.scale
            and mine.keys() == others.keys()
            and all(torch.equal(mine[name], others[name]) for name in mine)
        )

    def write(self, directory: Path, model: Path) -> None:
        """As PEFT's ``save_pretrained`` would."""
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
    """``q_proj``, of one of its tensors."""
    return name.rpartition(".lora_")[0].rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One that the engine has."""

    adapter: HostAdapter
    name: str
    """There."""
    directory: Path
    """Engines may read it again at any time: when their cache is full, or weights were loaded."""


class LoraShelf:
    """Those that serve, and those of before that requests may still use."""

    def __init__(self, engine: EngineAdapter, model: Path, parent: Path) -> None:
        """Written in ``parent``."""
        self._engine = engine
        self._model = model
        self._parent = parent.absolute()  # the engine has another working directory
        self._serving: dict[str, Loaded] = {}
        self._old: list[Loaded] = []
        self._are_lost = False

    @property
    def names(self) -> dict[str, str]:
        """By the adapters' own names, those in the engine."""
        return names_of(self._serving)

    def lose(self) -> None:
        """The engine's memory of them is gone; whatever comes next is loaded anew."""
        self._are_lost = True

    async def load(self, adapters: Mapping[str, object], label: str) -> dict[str, Loaded]:
        """Have the engine load what is new in these, beside those that serve.

        Raises:
            WeightsRefused: it took one of them not, or files couldn't be written; nothing changed.
        """
        loaded: dict[str, Loaded] = {}
        for number, (name, adapter) in enumerate(adapters.items()):
            assert isinstance(adapter, HostAdapter), "as HostWeights make them"
            known = self._serving.get(name)
            if known is not None and not self._are_lost and known.adapter.is_as(adapter):
                loaded[name] = known
                continue
            new = f"{LORA_NAMES}{label}.{number}"
            one = Loaded(adapter, new, self._parent / new)
            try:
                await asyncio.to_thread(adapter.write, one.directory, self._model)
                await self._engine.load_lora(one.name, one.directory)
            except (WeightsRefused, OSError) as error:
                shutil.rmtree(one.directory, ignore_errors=True)
                self.drop(loaded)
                raise WeightsRefused(f"adapter {name!r}: {error}") from error
            loaded[name] = one
        return loaded

    def drop(self, loaded: Mapping[str, Loaded]) -> None:
        """What was loaded doesn't come to serve after all."""
        serving = self._serving.values()
        self._old += [one for one in loaded.values() if one not in serving]

    def serve(self, loaded: dict[str, Loaded]) -> None:
        """From now on these serve, and no others."""
        kept = loaded.values()
        self._old += [one for one in self._serving.values() if one not in kept]
        self._serving, self._are_lost = loaded, False

    async def unload_unused(self, used: Collection[str]) -> None:
        """Have the engine forget old ones, but those that requests use by these names."""
        for one in [one for one in self._old if one.name not in used]:
            await self._engine.unload_lora(one.name)
            self._old.remove(one)  # not before: whoever is cancelled in between leaves it to others
            shutil.rmtree(one.directory, ignore_errors=True)

    async def close(self) -> None:
        """Have the engine forget all of them."""
        self.serve({})
        await self.unload_unused(())

    def remove_files(self) -> None:
        """Whatever became of the engine."""
        for one in [*self._serving.values(), *self._old]:
            shutil.rmtree(one.directory, ignore_errors=True)


def names_of(loaded: Mapping[str, Loaded]) -> dict[str, str]:
    """Their names in the engine."""
    return {name: one.name for name, one in loaded.items()}
