"""Reader of LoRA adapters, from PEFT directories or a trainer's tensors; refuses unsupported ones.

Engines check whether an adapter fits their model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate.errors import ConfigError
from tidegate.orchestrator.weight_sync.tensor_files import read_tensor_file
from tidegate.transport.regular_files import read_regular

if TYPE_CHECKING:
    import torch

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"

NAME_BYTES_MAX = 128

PREFIX = "base_model.model."
"""Prefix that PEFT adds to the model's parameter names."""

UNSUPPORTED_FIELDS = {
    "use_dora": "DoRA",
    "modules_to_save": "modules trained whole",
    "rank_pattern": "ranks that differ between layers",
    "alpha_pattern": "scales that differ between layers",
    "lora_bias": "biases of its own",
    "fan_in_fan_out": "transposed matrices",
    "layer_replication": "repeated layers",
    "target_parameters": "parameters that are no layers of their own",
    "trainable_token_indices": "embeddings of single tokens",
    "alora_invocation_tokens": "activation by tokens",
    "use_qalora": "QA-LoRA",
    "arrow_config": "Arrow",
}
"""PEFT config fields that, if set, need more than two matrices and a scale, with what they mean."""

BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda")
"""Initialisations that change the model's own weights."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that is ready to be sent."""

    scale: float
    """Factor of the product of its matrices."""
    tensors: "dict[str, torch.Tensor]"
    """Tensors by their names in the protocol: ``model.layers.0.self_attn.q_proj.lora_A.weight``."""


def load_adapter(
    adapter: "Mapping[str, torch.Tensor] | str | Path", config: object = None
) -> LoadedAdapter:
    """Read an adapter from a PEFT directory, or from tensors and their config.

    ``config`` is a ``peft.LoraConfig``, or a mapping with ``r`` and ``lora_alpha`` at least.

    Raises:
        ConfigError: the adapter is not LoRA, or needs more than engines support.
    """
    if isinstance(adapter, (str, Path)):
        if config is not None:
            raise ConfigError("an adapter's directory has its own config; leave config out")
        fields, tensors = _read_directory(Path(adapter))
    else:
        fields, tensors = _fields(config), dict(adapter)
    scale, renamed = _scale(fields), _renamed(tensors)
    _refuse_other_ranks(renamed, int(fields["r"]))
    return LoadedAdapter(scale, renamed)


def checked_name(name: str) -> str:
    """Return an adapter's name, if it is valid.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(name, str) or not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        raise ConfigError(
            f"an adapter's name is a text of 1 to {NAME_BYTES_MAX} bytes, got {name!r:.200}"
        )
    return name


def _read_directory(path: Path) -> "tuple[dict[str, Any], dict[str, torch.Tensor]]":
    try:
        fields = msgspec.json.decode(read_regular(path / CONFIG_FILE), type=dict[str, Any])
        return fields, read_tensor_file(path / TENSORS_FILE)
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} holds no LoRA adapter that can be read ({why}); PEFT's save_pretrained writes "
            f"{CONFIG_FILE} and {TENSORS_FILE}"
        ) from error


def _fields(config: object) -> dict[str, Any]:
    to_dict = getattr(config, "to_dict", None)  # as a LoraConfig has
    if to_dict is not None:
        config = to_dict()
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"tensors of an adapter need its config, a peft.LoraConfig or a mapping with r and "
            f"lora_alpha, got {config!r:.200}"
        )
    return dict(config)


def _scale(fields: Mapping[str, Any]) -> float:
    """Return alpha / r; rank-stabilised: alpha / sqrt(r), Kalajdzievski 2023, arXiv:2312.03732."""
    kind = str(getattr(fields.get("peft_type"), "value", fields.get("peft_type") or "LORA"))
    if kind != "LORA":
        raise ConfigError(
            f"the adapter's peft_type is {kind}, and engines serve LORA; train a LoraConfig, or "
            "merge the adapter and publish the weights"
        )
    for name, feature in UNSUPPORTED_FIELDS.items():
        if fields.get(name):
            raise ConfigError(
                f"the adapter has {feature} ({name}={fields[name]!r:.100}), which engines don't "
                "serve; train without it, or merge the adapter and publish the weights"
            )
    if (bias := fields.get("bias", "none")) != "none":
        raise ConfigError(
            f"the adapter trains biases (bias={bias!r:.50}), which engines don't serve; set "
            "bias='none' in its LoraConfig"
        )
    init = str(fields.get("init_lora_weights", "")).lower()
    if init.startswith(BASE_CHANGING_INITS):
        raise ConfigError(
            f"init_lora_weights={init!r} changes the model's own weights, which engines haven't "
            f"got; convert the adapter to a plain LoRA when it is saved"
        )
    try:
        rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
        scale = alpha / (sqrt(rank) if fields.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"an adapter's config needs r >= 1 and lora_alpha, got r={fields.get('r')!r:.50}, "
            f"lora_alpha={fields.get('lora_alpha')!r:.50}"
        ) from error
    if not isfinite(scale):
        raise ConfigError(f"the adapter's scale is {scale}; lora_alpha must be finite")
    return scale


def _refuse_other_ranks(tensors: "Mapping[str, torch.Tensor]", rank: int) -> None:
    """Refuse tensors of another rank than the config says: their scale would silently be wrong."""
    for name, tensor in tensors.items():
        tensor_rank = tensor.shape[0 if ".lora_A." in name else -1] if tensor.ndim == 2 else rank
        if tensor_rank != rank:
            raise ConfigError(
                f"{name} has rank {tensor_rank}, and the config says r={rank}; pass the "
                f"adapter's own config"
            )
        if not tensor.isfinite().all():
            raise ConfigError(
                f"the adapter's {name} contains NaN or infinity: the training step before this "
                "publish diverged. Undo it, and publish the previous adapter"
            )


def _renamed(tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(PREFIX)
        projection, matrix, rest = short.rpartition(".lora_")
        letter, _, ending = rest.partition(".")  # "A", "weight" or "default.weight"
        if not matrix or letter not in ("A", "B") or ending.rpartition(".")[2] != "weight":
            raise ConfigError(
                f"{name!r} is no matrix of a LoRA adapter; pass only the tensors of "
                "peft.get_peft_model_state_dict(model)"
            )
        short = f"{projection}.lora_{letter}.weight"
        if short in renamed:
            raise ConfigError(
                f"{short!r} appears twice, so these are tensors of several adapters; pass those of "
                "one, peft.get_peft_model_state_dict(model, adapter_name=...)"
            )
        renamed[short] = tensor
    if not renamed:
        raise ConfigError("the adapter has no tensors; pass peft.get_peft_model_state_dict(model)")
    return renamed
