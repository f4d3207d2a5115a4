"""Host copy of published weights, and the Hugging Face directories that external engines load.

A publish may replace only some tensors, so the newest complete set is kept beside the set being
received. The two take twice the model's size in host memory.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from tidegate.engine.external.adapter import Capabilities
from tidegate.engine.external.loras import HostAdapter
from tidegate.engine.external.vllm_patches import write_changes
from tidegate.engine.models.checkpoint import (
    EMBEDDING,
    HEAD,
    has_other_head,
    read_tensors,
    tensor_names,
)
from tidegate.engine.weights.lora import PROJECTIONS, check_adapter
from tidegate.engine.weights.weight_store import CopyTarget, WeightStore
from tidegate.errors import ModelError, WeightsRefused
from tidegate.transport.weight_channels.patches import ElementPatch


class HostWeights(WeightStore):
    """One version's tensors, by the names, shapes and dtypes of the model directory.

    If the engine computes in float32, bfloat16 and float16 tensors are held in float32, so that
    published float32 weights reach the engine unrounded.
    """

    adapters: Mapping[str, HostAdapter]

    def __init__(
        self, model: Path, tensors: Mapping[str, torch.Tensor], capabilities: Capabilities
    ) -> None:
        self.by_name = tensors
        self._capabilities = capabilities
        self._path = model
        self._accepts_state_dict_names = False
        targets = {name: CopyTarget(tuple(t.shape), (t,)) for name, t in tensors.items()}
        super().__init__(model.name, targets)

    def allocate_copy(self) -> "HostWeights":
        """Allocate another version."""
        tensors = {name: torch.empty_like(tensor) for name, tensor in self.by_name.items()}
        return HostWeights(self._path, tensors, self._capabilities)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to its targets, by the directory's name or the ``state_dict()``'s.

        Raises:
            WeightsRefused: as :meth:`WeightStore.load`.
        """
        is_known = (
            name in self._copy_targets or name in self._joint_targets or self.is_redundant(name)
        )
        if not is_known:
            self._add_state_dict_names()
        super().load(name, tensor)

    def patch(self, name: str, dtype: torch.dtype, patch: ElementPatch) -> None:
        """Change elements of a tensor, by the directory's name or the ``state_dict()``'s.

        Raises:
            WeightsRefused: as :meth:`WeightStore.patch`.
        """
        if name not in self._copy_targets and not self.is_redundant(name):
            self._add_state_dict_names()
        super().patch(name, dtype, patch)

    def copy_missing(self, other: WeightStore) -> None:
        """Copy the tensors that have not been loaded from a complete version of the same model."""
        if self._accepts_state_dict_names and isinstance(other, HostWeights):
            other._add_state_dict_names()
        super().copy_missing(other)

    def become(self, other: WeightStore) -> None:
        """Copy all of another complete version of the same model."""
        if self._accepts_state_dict_names and isinstance(other, HostWeights):
            other._add_state_dict_names()
        super().become(other)

    def _add_state_dict_names(self) -> None:
        """Find the ``state_dict()`` names with transformers; takes seconds, once."""
        from tidegate.engine.weights.weight_conversions import (
            converted_targets,
            find_conversions,
            meta_model,
        )

        if self._accepts_state_dict_names:
            return
        self._accepts_state_dict_names = True
        module = meta_model(self._path)
        if module is None:
            return
        tied = module.all_tied_weights_keys
        conversions = find_conversions(module, [n for n in module.state_dict() if n not in tied])
        self._copy_targets, self._joint_targets = converted_targets(
            self._copy_targets, conversions, stores_directory=True
        )
        for name, target in self._joint_targets.items():
            if name in self._loaded:
                self._loaded.update(target.covers)

    def is_redundant(self, name: str) -> bool:
        """Whether it is a tied LM head."""
        return self.tied_to(name) is not None

    def tied_to(self, name: str) -> str | None:
        """Return the embedding's name for an LM head that the directory does not have."""
        is_tied = name == HEAD and HEAD not in self.by_name and EMBEDDING in self.by_name
        return EMBEDDING if is_tied else None

    def make_adapter(self, tensors: Mapping[str, torch.Tensor], scale: float) -> HostAdapter:
        """Validate an adapter; the engine loads it once the whole version has been received."""
        adapter, capabilities = HostAdapter(tensors, scale), self._capabilities
        if not capabilities.lora_rank_max:
            raise WeightsRefused(
                f"{capabilities.engine} takes no LoRA adapters: "
                f"{capabilities.lora_lacks or 'it has none'}. Or merge them into the weights, and "
                "publish those"
            )
        check_adapter(tensors, {**self._joint_targets, **self._copy_targets})
        if adapter.rank > capabilities.lora_rank_max:
            raise WeightsRefused(
                f"{capabilities.engine} takes LoRA adapters of rank {capabilities.lora_rank_max} "
                f"at most, and this one has {adapter.rank}; start it with a larger --max-lora-rank"
            )
        return (
            HostAdapter(self._filled(tensors), scale)
            if capabilities.lora_fills_matrices
            else adapter
        )

    def _filled(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add zeros for projections that share a matrix with the adapter's."""
        filled = dict(tensors)
        for name, lora_a in tensors.items():
            module, letter = name.removesuffix(".weight").split(".lora_")
            parts = next((p for p in PROJECTIONS.values() if module.endswith(p)), ())
            prefix = next((module.removesuffix(p) for p in parts if module.endswith(p)), "")
            for sibling in parts if letter == "A" else ():
                matrix = self.by_name.get(f"{prefix}{sibling}.weight")
                if matrix is not None and f"{prefix}{sibling}.lora_A.weight" not in filled:
                    lora_b = lora_a.new_zeros((matrix.shape[0], lora_a.shape[0]))
                    filled[f"{prefix}{sibling}.lora_A.weight"] = torch.zeros_like(lora_a)
                    filled[f"{prefix}{sibling}.lora_B.weight"] = lora_b
        return filled


def read_host_weights(model: Path, capabilities: Capabilities) -> HostWeights:
    """Read the model directory's own weights.

    Raises:
        ModelError: files are missing or damaged, or have an LM head that the engine would ignore.
    """
    if is_tied(model) and has_other_head(model):
        raise ModelError(
            f"{model} has tie_word_embeddings=true and a {HEAD} that differs from {EMBEDDING}. "
            f"vLLM and SGLang ignore that head, transformers and Tidegate's own engines use it; "
            f"set tie_word_embeddings=false in config.json, and start the engine again"
        )
    halves = (torch.bfloat16, torch.float16)
    is_float32 = capabilities.dtype == "float32"
    tensors = {
        name: tensor.float() if is_float32 and tensor.dtype in halves else tensor.clone()
        for name, tensor in read_tensors(model)
        if name != HEAD or not is_tied(model)
    }
    return HostWeights(model, tensors, capabilities)


class PublishedDirectories:
    """Hugging Face directories of published versions; the newest two are kept."""

    def __init__(self, model: Path, parent: Path) -> None:
        """Directories are made in ``parent``, like ``model`` except for the tensors."""
        self.model, self.parent = model, parent
        self._written: list[Path] = []

    def write(self, weights: HostWeights, label: str) -> Path:
        """Write a version's directory, and remove all but it and the one before."""
        path = self._make(label)
        for file in self.model.iterdir():
            if file.is_file() and not _holds_tensors(file):
                shutil.copy(file, path / file.name)
        save_file(dict(weights.by_name), path / "model.safetensors", metadata={"format": "pt"})
        self._remove_old()
        return path

    def write_patches(
        self,
        weights: HostWeights,
        patches: Sequence[tuple[str, torch.dtype, ElementPatch]],
        label: str,
    ) -> Path | None:
        """Write the elements that make a version from the one before; None if they cannot be."""
        changed: dict[str, list[npt.NDArray[np.int64]]] = {}
        for name, _, patch in patches:
            if not weights.is_redundant(name):
                changed.setdefault(name, []).append(patch.index)
        file = self._make(label) / "patches.safetensors"
        if not write_changes(weights.by_name, changed, file):
            return None
        self._remove_old()
        return file

    def _make(self, label: str) -> Path:
        self.forget(label)
        path = self.parent / label
        path.mkdir(parents=True)
        self._written.append(path)  # before writing, so that a partial directory is removed too
        return path

    def _remove_old(self) -> None:
        for old in self._written[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        del self._written[:-2]

    def forget(self, label: str) -> None:
        """Remove a directory that the engine does not serve, also from the newest two."""
        path = self.parent / label
        shutil.rmtree(path, ignore_errors=True)
        if path in self._written:
            self._written.remove(path)

    def close(self) -> None:
        """Remove all directories."""
        for path in self._written:
            shutil.rmtree(path, ignore_errors=True)
        self._written.clear()


def _holds_tensors(file: Path) -> bool:
    """Whether a file holds weights, or an index of them."""
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def _read_config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def is_tied(model: Path) -> bool:
    """Whether the model's LM head is its embedding."""
    reported = _read_config(model).get("tie_word_embeddings")
    if reported is None:  # the architecture's default, by the tensors: Gemma is tied
        return HEAD not in tensor_names(model)
    return bool(reported)


def read_sizes(model: Path) -> tuple[str, int]:
    """Return the architecture and the vocabulary size in config.json."""
    config = _read_config(model)
    text = config.get("text_config", config)
    return config.get("architectures", ["unknown"])[0], int(text["vocab_size"])


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """Shape of a mixture of experts, as config.json describes it."""

    layers: int
    """Number of all layers."""
    mixture_layers: list[int]
    """Layers that have experts; the others are dense."""
    experts_per_token: int


def read_mixture(model: Path) -> MixtureShape | None:
    """Return the mixture that config.json describes; None of a dense model."""
    config = _read_config(model)
    text = config.get("text_config", config)
    layers, experts_per_token = text["num_hidden_layers"], text.get("num_experts_per_tok")
    if not experts_per_token:
        return None
    dense = {*range(text.get("first_k_dense_replace") or 0), *(text.get("mlp_only_layers") or [])}
    every = text.get("decoder_sparse_step") or 1
    mixture = [n for n in range(layers) if n not in dense and (n + 1) % every == 0]
    return MixtureShape(layers, mixture, experts_per_token)
