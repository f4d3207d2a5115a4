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

from tidegate.engine.external.adapter import Capabilities
from tidegate.engine.external.loras import HostAdapter
from tidegate.engine.models.checkpoint import (
    EMBEDDING,
    HEAD,
    has_other_head,
    read_tensors,
    tensor_names,
)
from tidegate.engine.weights.lora import PARTS, check_adapter
from tidegate.engine.weights.weight_store import Place, WeightStore
from tidegate.errors import ModelError, WeightsRefused


class HostWeights(WeightStore):
    """One version's tensors by the names, shapes and dtypes of the model directory."""

    adapters: Mapping[str, HostAdapter]

    def __init__(
        self, model: Path, tensors: Mapping[str, torch.Tensor], able: Capabilities
    ) -> None:
        self.by_name = tensors
        self._able = able
        self._path = model
        self._knows_other_names = False
        places = {name: Place(tuple(t.shape), (t,)) for name, t in tensors.items()}
        super().__init__(model.name, places)

    def twin(self) -> "HostWeights":
        """Room for another version."""
        tensors = {name: torch.empty_like(tensor) for name, tensor in self.by_name.items()}
        return HostWeights(self._path, tensors, self._able)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into its place, by the directory's name or that of the ``state_dict()``.

        Raises:
            WeightsRefused: as :meth:`WeightStore.load`.
        """
        is_known = name in self._places or name in self._joint_places or self.is_redundant(name)
        if not is_known:
            self._learn_other_names()
        super().load(name, tensor)

    def complete_from(self, other: WeightStore) -> None:
        """Copy what has not come from a whole set of the same model.

        Raises:
            WeightsRefused: as :meth:`WeightStore.complete_from`.
        """
        if self._knows_other_names and isinstance(other, HostWeights):
            other._learn_other_names()
        super().complete_from(other)

    def _learn_other_names(self) -> None:
        """Have transformers tell how it converts the directory's tensors; takes seconds, once."""
        from tidegate.engine.weights.converted_places import (
            converted_places,
            find_conversions,
            meta_model,
        )

        if self._knows_other_names:
            return
        self._knows_other_names = True
        module = meta_model(self._path)
        if module is None:
            return
        tied = module.all_tied_weights_keys
        found = find_conversions(module, [n for n in module.state_dict() if n not in tied])
        self._places, self._joint_places = converted_places(
            self._places, found, stores_directory=True
        )
        for name, place in self._joint_places.items():
            if name in self._loaded:
                self._loaded.update(place.covers)

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
        check_adapter(tensors, {**self._joint_places, **self._places})
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
        ModelError: files are missing or damaged, or hold an LM head that the engine passes over.
    """
    if is_tied(model) and has_other_head(model):
        raise ModelError(
            f"{model} has tie_word_embeddings=true and a {HEAD} that differs from {EMBEDDING}. "
            f"vLLM and SGLang pass over that head, transformers and Tidegate's own engines use it; "
            f"set tie_word_embeddings=false in config.json, and start the engine again"
        )
    tensors = {
        name: tensor.clone()
        for name, tensor in read_tensors(model)
        if name != HEAD or not is_tied(model)
    }
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
    said = config.get("tie_word_embeddings")
    if said is None:  # the family's default, which the tensors show: a Gemma is tied
        return HEAD not in tensor_names(model)
    return bool(said)


def read_sizes(model: Path) -> tuple[str, int]:
    """The architecture and the vocabulary's size, of config.json."""
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    return config.get("architectures", ["unknown"])[0], int(text["vocab_size"])
