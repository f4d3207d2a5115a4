"""Loading of an archived weight version as a transformers model, in float32, for the audit.

The audit's replays call :func:`load_version` for every version. A version may be a part of a set (a
partial publish or an adapter): then the full set before it is loaded, and the later parts are
applied in order. Uses `transformers` and `safetensors` and, but for ``clamp_time_steps``, none of
the engine's code, so that an engine's fault can't hide in its own proof. The caller passes each
version's directory.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from tidegate.engine.models.fallback_weights import clamp_time_steps
from tidegate.engine.models.quiet_transformers import quiet_transformers
from tidegate.engine.weights.weight_conversions import auto_class
from tidegate.errors import AuditError
from tidegate.orchestrator.weight_sync.parts import WeightParts
from tidegate.transport.regular_files import check_regular

ROUNDED = re.compile(r".*\.layers\.\d+\..+\.(q|k|v|o|gate|up|gate_up|down)_proj(\.weight)?")
"""Tensors that engines quantize: the layers' matrices, but not router, embedding or head."""

HEAD = "lm_head.weight"
"""Tensor that a directory of a tied model lacks, unless the head differs from the embedding."""

SMALLEST_STEP = 1e-30
"""Lower limit of the quantization step, so that a row of zeros is not divided by 0."""


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """Archived files that a version's weights are put together from."""

    base: Path
    """Model directory of the last whole set."""
    overlays: tuple[Path, ...]
    """Files of the partial sets published since, in order."""
    adapters: Mapping[str, tuple[Path, float]]
    """File and scale of each LoRA adapter of the version, by name."""

    @classmethod
    def find(
        cls,
        version: int,
        weights_directory: Callable[[int], Path],
        own_version: Path | None = None,
    ) -> "VersionFiles":
        """Return the files of a version; ``weights_directory`` returns where each version lies.

        ``own_version``: where the version lies if it is one that an adapter counts itself.

        Raises:
            AuditError: a version's list of parts can't be read.
        """
        file_name = WeightParts(is_adapter=True).file_name
        parts = WeightParts.read(own_version or weights_directory(version))
        base = version
        adapters = {
            name: (weights_directory(entry.version) / file_name, entry.scale)
            for name, entry in parts.adapters.items()
        }
        if own_version is not None:
            base = parts.over or 0
            adapters = {
                name: (own_version / file_name, entry.scale)
                for name, entry in parts.adapters.items()
            }
        overlays: list[Path] = []
        while (parts := WeightParts.read(weights_directory(base))).over is not None:
            if not parts.is_adapter and (weights_directory(base) / parts.file_name).is_file():
                overlays.append(weights_directory(base) / parts.file_name)
            base = parts.over
        return cls(weights_directory(base), tuple(reversed(overlays)), adapters)


def load_version(
    version: int,
    weights_directory: Callable[[int], Path],
    adapter: str = "",
    *,
    own_version: Path | None = None,
    quantization: str = "",
) -> Any:
    """Load a version in float32; if ``adapter`` is not empty, merge that adapter into it.

    ``own_version``: where the version lies if it is one that the adapter counts itself. With a
    ``quantization``, weights are rounded as engines with that setting round them.

    Raises:
        AuditError: a part is missing, damaged, or does not fit.
    """
    files = VersionFiles.find(version, weights_directory, own_version)
    model = load_weights(files.base)
    if files.overlays:
        _untie_as_first(model, weights_directory(0))
    for path in files.overlays:
        model = _overlay(model, path)
    if quantization:
        _round(model, quantization)
    if adapter:
        if adapter not in files.adapters:
            raise AuditError(
                f"v{version} has no adapter {adapter!r} in the archive; it has "
                f"{', '.join(sorted(files.adapters)) or 'none'}"
            )
        _merge(model, *files.adapters[adapter])
    return model


def _untie_as_first(model: Any, first: Path) -> None:
    """Untie the model's head if that of version 0 was untied.

    transformers ties head and embedding if they happen to be equal. An engine that started with a
    different head keeps both, so a later part changes only one of them.
    """
    if _is_tied(model) and _has_tensor(first, HEAD) and not _is_tied(load_weights(first)):
        _untie(model)


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _untie(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _has_tensor(directory: Path, name: str) -> bool:
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  (safetensors' own, which isn't iterable)
                return True
    return False


@torch.no_grad()
def _round(model: Any, quantization: str) -> None:
    """Quantize and dequantize each matrix, with one scale per output row."""
    if quantization not in ("int8", "fp8"):
        raise AuditError(
            f"the engines rounded weights to {quantization!r}, and this version audits int8 and "
            "fp8; audit with the version that recorded the run"
        )
    for name, weights in model.named_parameters():
        if weights.dim() > 1 and ROUNDED.fullmatch(name):
            largest = weights.abs().amax(-1, keepdim=True)
            if quantization == "int8":
                steps = (largest / 127).clamp_min(SMALLEST_STEP)
                weights.copy_((weights / steps).round() * steps)
            else:
                steps = (largest / 448).clamp_min(SMALLEST_STEP)
                weights.copy_(_as_e4m3(weights / steps) * steps)


def _as_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to the closest float8 e4m3 numbers: 4 significant bits, below 2**-6 multiples of 2**-9.

    Computed arithmetically and not by torch's float8 type, because the audit has to prove that
    type's result.
    """
    exponents = (torch.frexp(x).exponent - 1).clamp_min(-6)
    quanta = torch.ldexp(torch.ones_like(x), exponents - 3)
    return (x / quanta).round() * quanta


@torch.no_grad()
def _merge(model: Any, path: Path, scale: float) -> None:
    """Add ``scale * B @ A`` to each matrix for which the adapter has a pair."""
    try:
        check_regular(path)
        tensors = load_file(path)
        for name, lora_a in tensors.items():
            projection, is_lora_a, _ = name.partition(".lora_A.weight")
            if is_lora_a:
                lora_b = tensors[f"{projection}.lora_B.weight"]
                matrix = model.get_parameter(f"{projection}.weight")
                matrix += scale * (lora_b.float() @ lora_a.float())
    except Exception as error:
        raise AuditError(
            f"the archived adapter in {path} does not fit the model: {_reason(error)}. Was a file "
            "of the run directory changed?"
        ) from error


def _overlay(model: Any, path: Path) -> Any:
    """Copy the tensors of a partial set into a model, by names of its state_dict or directory."""
    try:
        check_regular(path)
        tensors = load_file(path)
        state = model.state_dict()
        known = {name: tensor for name, tensor in tensors.items() if name in state}
        model.load_state_dict(known, strict=False)
        unknown = {name: tensor for name, tensor in tensors.items() if name not in state}
        return _overlay_saved(model, unknown) if unknown else model
    except AuditError:
        raise
    except Exception as error:
        raise AuditError(
            f"the archived tensors of {path} do not fit the version before: {_reason(error)}. Was "
            "a file of the run directory changed?"
        ) from error


def _overlay_saved(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Convert the model to a directory's names, replace ``tensors``, and load it again."""
    saved = _as_saved(model, tensors)
    for name, tensor in tensors.items():
        entry = next((n for n in _possible_names(model, name) if n in saved), None)
        if entry is None:
            raise ValueError(
                f"{name} is no tensor of transformers' model, nor of a directory that it saves"
            )
        if tensor.shape != saved[entry].shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, and the model's has "
                f"{list(saved[entry].shape)}"
            )
        saved[entry] = tensor
    is_tied = _is_tied(model)
    with quiet_transformers():
        reloaded = type(model).from_pretrained(
            None, config=model.config, state_dict=saved, dtype=torch.float32
        )
    if not is_tied and _is_tied(reloaded):
        _untie(reloaded)
    clamp_time_steps(reloaded)
    return reloaded.eval()


def _as_saved(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all tensors by the loaded directory's names, or by transformers' default names."""
    saved = revert_weight_conversion(model, model.state_dict())
    if not all(any(n in saved for n in _possible_names(model, name)) for name in tensors):
        model._weight_conversions = None  # so that transformers takes its defaults
        saved = revert_weight_conversion(model, model.state_dict())
    return {name: tensor.detach().clone() for name, tensor in saved.items()}


def _possible_names(model: Any, name: str) -> tuple[str, ...]:
    """Return the name as it is, with, and without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def text_config_of(directory: Path) -> Any:
    """Return the configuration of a model directory's language model.

    Raises:
        AuditError: the directory's configuration is missing or damaged.
    """
    _refuse_without_config(directory)
    try:
        return _config_of(directory).get_text_config()
    except Exception as error:
        raise AuditError(f"{directory / 'config.json'} can't be read: {_reason(error)}") from error


def _refuse_without_config(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise AuditError(
            f"{directory} has no config.json, so it is no model directory; give the directory of "
            "the run's model"
        )


def _config_of(directory: Path) -> Any:
    configs: Any = transformers.AutoConfig
    return configs.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def load_weights(directory: Path) -> Any:
    """Load a directory with transformers in float32, without progress bars.

    Raises:
        AuditError: the directory is missing, damaged, or lacks tensors.
    """
    _refuse_without_config(directory)
    try:
        with quiet_transformers():
            model, info = auto_class(_config_of(directory)).from_pretrained(
                directory,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,  # a run directory may come from another person
                use_safetensors=True,  # as all archives are; a pickle is never loaded
                output_loading_info=True,
            )
    except Exception as error:
        raise AuditError(
            f"{directory} can't be loaded by transformers: {_reason(error)}. Was a file of it "
            "removed or changed?"
        ) from error
    if faults := {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}:
        raise AuditError(
            f"{directory} lacks {len(faults)} tensors that its config.json describes, "
            f"{sorted(faults)[0]} first; was a file removed or replaced?"
        )
    clamp_time_steps(model)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # transformers 5.17's default leaves the cap out
    return model.eval()
