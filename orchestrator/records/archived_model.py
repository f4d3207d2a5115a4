"""What model is an archived version? The whole set it goes back to, with what was laid over that.

Uses `transformers` and `safetensors`, and none of the engine's code, so that a fault of the engine
can't hide in its proof. Knows nothing of runs: it is told where each version lies.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tidegate.errors import AuditError
from tidegate.orchestrator.weights.parts import WeightParts

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
"""One expert's matrix, as directories name it; a model holds all experts' in one tensor."""


ROUNDED = re.compile(r".*\.layers\.\d+\..+\.(q|k|v|o|gate|up|gate_up|down)_proj(\.weight)?")
"""What engines round that serve in bytes: layers' matrices; neither router, embedding nor head."""

SMALLEST_STEP = 1e-30
"""Of outputs all of whose weights are zero: what they are divided by must not be."""


def load_version(
    version: int, where: Callable[[int], Path], adapter: str = "", *, quantization: str = ""
) -> Any:
    """Load a version in float32, with one of its adapters merged into it.

    With a ``quantization`` its weights are rounded as engines that serve by it round them.

    Raises:
        AuditError: a part of it is not there, is damaged, or doesn't fit.
    """
    laid_over: list[Path] = []
    adapters = WeightParts.read(where(version)).adapters
    whole = version
    while (parts := WeightParts.read(where(whole))).over is not None:
        if not parts.is_adapter and (where(whole) / parts.file_name).is_file():
            laid_over.append(where(whole) / parts.file_name)
        whole = parts.over
    model = load_weights(where(whole))
    for path in reversed(laid_over):
        _lay_over(model, path)
    if quantization:
        _round(model, quantization)
    if adapter:
        found = adapters.get(adapter)
        if found is None:
            raise AuditError(f"v{version} has no adapter {adapter!r} in the archive")
        _merge(model, where(found.version) / WeightParts(is_adapter=True).file_name, found.scale)
    return model


@torch.no_grad()
def _round(model: Any, quantization: str) -> None:
    """Round each output's weights to what can be told with a byte, and a scale for all of them."""
    if quantization not in ("int8", "fp8"):
        raise AuditError(f"weights were rounded to {quantization!r}, which an audit can't repeat")
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
    """The nearest numbers of four bits before or after the point, from 2**-6 on; below, multiples
    of 2**-9. By arithmetic, not by torch's own type: it shall prove that."""
    exponents = (torch.frexp(x).exponent - 1).clamp_min(-6)
    quanta = torch.ldexp(torch.ones_like(x), exponents - 3)
    return (x / quanta).round() * quanta


@torch.no_grad()
def _merge(model: Any, path: Path, scale: float) -> None:
    """Add ``scale * B @ A`` to each matrix that an adapter has a pair for."""
    try:
        tensors = load_file(path)
        for name, narrow in tensors.items():
            projection, is_narrow, _ = name.partition(".lora_A.weight")
            if is_narrow:
                wide = tensors[f"{projection}.lora_B.weight"]
                matrix = model.get_parameter(f"{projection}.weight")
                matrix += scale * (wide.float() @ narrow.float())
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AuditError(f"the adapter in {path} can't be merged: {why}") from error


def _lay_over(model: Any, path: Path) -> None:
    try:
        tensors = load_file(path)
        _lay_over_experts(model.state_dict(), tensors)
        unknown = model.load_state_dict(tensors, strict=False).unexpected_keys
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AuditError(f"{path} can't be laid over the version before: {why}") from error
    if unknown:
        raise AuditError(
            f"{path} holds {len(unknown)} tensors by names that transformers' model hasn't got, "
            f"first {unknown[0]}; publish parts by the names of its state_dict()"
        )


@torch.no_grad()
def _lay_over_experts(state: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """Put single experts' matrices where ``state`` has them, and take them out of ``tensors``."""
    for name in [name for name in tensors if name not in state]:
        found = EXPERT.fullmatch(name)
        if found is None:
            continue
        layer, expert, kind = found.groups()
        joint = state.get(f"{layer}.{'down' if kind == 'down' else 'gate_up'}_proj")
        if joint is None:
            continue
        place = joint[int(expert)]
        if kind != "down":
            place = place.chunk(2)[kind == "up"]
        tensor = tensors.pop(name)
        if tensor.shape != place.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}")
        place.copy_(tensor)


def load_weights(directory: Path) -> Any:
    """Load one version in float32, quietly.

    Raises:
        AuditError: it is not there, is damaged, or lacks tensors.
    """
    if not (directory / "config.json").is_file():
        raise AuditError(f"{directory} holds no model: its config.json is missing")
    auto: Any = transformers.AutoModelForCausalLM
    try:
        with _quiet_transformers():
            model, info = auto.from_pretrained(
                directory,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AuditError(f"{directory} can't be loaded by transformers: {why}") from error
    if faults := {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}:
        raise AuditError(f"{directory} lacks {len(faults)} tensors, {sorted(faults)[0]} first")
    return model.eval()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Loading forty versions should not print forty progress bars."""
    log: Any = transformers.utils.logging
    had_bars, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        log.set_verbosity(level)
        if had_bars:
            log.enable_progress_bar()
