"""How do published weights become files that another engine loads? A copy here, then a directory.

Knows nothing of engines. What is published may be part of a set, so the whole of the newest one is
kept here beside the one being received: twice the model's size, of this host's memory.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tidegate.engine.adapters.adapter import Capabilities
from tidegate.engine.adapters.loras import HostAdapter
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.weights.lora import PARTS, check_adapter
from tidegate.engine.weights.weight_store import Place, WeightStore
from tidegate.errors import WeightsRefused

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""What tied models have once, and state dicts of them twice."""


class HostWeights(WeightStore):
    """One version's tensors by the names, shapes and dtypes of the model directory."""

    adapters: Mapping[str, HostAdapter]

    def __init__(
        self, model: Path, tensors: Mapping[str, torch.Tensor], able: Capabilities
    ) -> None:
        self.by_name = tensors
        self._able = able
        places = {name: Place(tuple(t.shape), (t,)) for name, t in tensors.items()}
        super().__init__(model.name, places)

    def twin(self) -> "HostWeights":
        """Room for another version."""
        tensors = {name: torch.empty_like(tensor) for name, tensor in self.by_name.items()}
        return HostWeights(Path(self._model), tensors, self._able)

    def is_redundant(self, name: str) -> bool:
        """A head that the directory doesn't have is its embedding."""
        return self.tied_to(name) is not None

    def tied_to(self, name: str) -> str | None:
        """That embedding."""
        is_tied = name == HEAD and HEAD not in self.by_name and EMBEDDING in self.by_name
        return EMBEDDING if is_tied else None

    def make_adapter(self, tensors: Mapping[str, torch.Tensor], scale: float) -> HostAdapter:
        """As it came, once it is known to fit: the engine is asked only when all have it."""
        adapter, able = HostAdapter(tensors, scale), self._able
        if not able.lora_rank_max:
            raise WeightsRefused(
                f"{able.engine} takes no LoRA adapters: {able.lora_lacks or 'it has none'}. Or "
                f"merge them into the weights, and publish those"
            )
        check_adapter(tensors, self._places)
        if adapter.rank > able.lora_rank_max:
            raise WeightsRefused(
                f"{able.engine} takes LoRA adapters of rank {able.lora_rank_max} at most, and this "
                f"one has {adapter.rank}; start it with a larger --max-lora-rank"
            )
        return HostAdapter(self._filled(tensors), scale) if able.lora_fills_matrices else adapter

    def _filled(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """With zeros for projections that lie in one matrix with those of the adapter."""
        filled = dict(tensors)
        for name, narrow in tensors.items():
            module, letter = name.removesuffix(".weight").split(".lora_")
            parts = next((p for p in PARTS.values() if module.endswith(p)), ())
            prefix = next((module.removesuffix(p) for p in parts if module.endswith(p)), "")
            for other in parts if letter == "A" else ():
                own = self.by_name.get(f"{prefix}{other}.weight")
                if own is not None and f"{prefix}{other}.lora_A.weight" not in filled:
                    wide = narrow.new_zeros((own.shape[0], narrow.shape[0]))
                    filled[f"{prefix}{other}.lora_A.weight"] = torch.zeros_like(narrow)
                    filled[f"{prefix}{other}.lora_B.weight"] = wide
        return filled


def read_host_weights(model: Path, able: Capabilities) -> HostWeights:
    """The model directory's own weights.

    Raises:
        ModelError: files are missing or damaged.
    """
    tensors = {name: tensor.clone() for name, tensor in read_tensors(model)}
    return HostWeights(model, tensors, able)


class PublishedDirectories:
    """Hugging Face directories, one per version; the newest two are there."""

    def __init__(self, model: Path, parent: Path) -> None:
        """Made in ``parent``, like ``model`` in all but the tensors."""
        self.model, self.parent = model, parent
        self._made: list[Path] = []

    def write(self, weights: HostWeights, label: str) -> Path:
        """Write one, and remove all but it and the one before."""
        path = self.parent / label
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        self._made.append(path)  # at once: what is half written must go, too
        for file in self.model.iterdir():
            if file.is_file() and not _holds_tensors(file):
                shutil.copy(file, path / file.name)
        save_file(dict(weights.by_name), path / "model.safetensors", metadata={"format": "pt"})
        for old in self._made[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        del self._made[:-2]
        return path

    def forget(self, label: str) -> None:
        """Remove one that the engine doesn't serve; it counts no more among the newest two."""
        path = self.parent / label
        shutil.rmtree(path, ignore_errors=True)
        if path in self._made:
            self._made.remove(path)

    def close(self) -> None:
        """Remove those that are left."""
        for path in self._made:
            shutil.rmtree(path, ignore_errors=True)
        self._made.clear()


def _holds_tensors(file: Path) -> bool:
    """Whether it holds weights, or says where they are."""
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def is_tied(model: Path) -> bool:
    """Whether the model's head is its embedding."""
    config = json.loads((model / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))


def read_sizes(model: Path) -> tuple[str, int]:
    """The architecture and the vocabulary's size, of config.json."""
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    return config.get("architectures", ["unknown"])[0], int(text["vocab_size"])
