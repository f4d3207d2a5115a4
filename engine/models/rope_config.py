"""How does this model turn positions into angles? Rotary embeddings as config.json asks for them.

It knows nothing of tensors. There is one for all layers, or one for those with a sliding window
and another for the rest.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidegate.engine.models.config_fields import ConfigFields
from tidegate.errors import ModelError, ModelNotComputed

THETA_DEFAULT = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How a rotary embedding is stretched beyond the context it was trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context_tokens: int = 0
    """What it was trained on; ``linear`` doesn't need to know."""
    low_freq_factor: float = 1.0
    """This and the next matter to ``llama3`` only."""
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """This and the next two matter to ``yarn`` only: turns in the original context from which on a
    frequency is left alone,"""
    beta_slow: float = 1.0
    """and up to which it is stretched in full."""
    rounds_bounds: bool = True
    """Whether the pairs between which it passes from one to the other are whole ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """One rotary embedding."""

    theta: float
    scaling: RopeScaling | None = None
    amplitude: float = 1.0
    """What rotated queries and keys are multiplied by; not 1 with ``yarn``."""


class _RopeFields(msgspec.Struct):
    """``rope_parameters``, or the older ``rope_scaling``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


def read_rope(file: Path, fields: ConfigFields) -> Rope:
    """Read the rotary embedding of a model that has one for all layers.

    Raises:
        ModelError: its fields make no sense.
        ModelNotComputed: it is of a kind that we don't compute.
    """
    raw = fields.rope_scaling or fields.rope_parameters or {}  # transformers' precedence
    return _rope(file, fields, raw, fields.rope_theta)


def read_local_rope(file: Path, fields: ConfigFields) -> tuple[Rope, Rope]:
    """Read those of a Gemma-3: for layers with a window, and for the others.

    Raises:
        ModelError: their fields make no sense.
        ModelNotComputed: one is of a kind that we don't compute.
    """
    nested = fields.rope_parameters or {}
    local = nested.get("sliding_attention") or {}
    whole = (nested.get("full_attention") or {}) | (fields.rope_scaling or {})
    if not isinstance(local, dict) or not isinstance(whole, dict):
        raise ModelError(f"{file}: rope parameters {nested} make no sense")
    return (
        _rope(file, fields, local, fields.rope_local_base_freq),
        _rope(file, fields, whole, fields.rope_theta),
    )


def context_tokens_max(file: Path, fields: ConfigFields) -> int:
    """How long contexts may be: what ``yarn`` stretches them to, where that is said and is more."""
    raw = fields.rope_scaling or fields.rope_parameters or {}  # transformers' precedence
    found = _convert(file, raw)
    original = fields.original_max_position_embeddings or found.original_max_position_embeddings
    if (found.rope_type or found.type) != "yarn" or original is None or found.factor is None:
        return fields.max_position_embeddings
    return max(fields.max_position_embeddings, int(original * found.factor))


def _convert(file: Path, raw: dict[str, Any]) -> _RopeFields:
    try:
        return msgspec.convert(raw, _RopeFields)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: rope parameters {raw} make no sense: {error}") from error


def _rope(file: Path, fields: ConfigFields, raw: dict[str, Any], theta: float | None) -> Rope:
    found = _convert(file, raw)
    if any(isinstance(value, dict) for value in raw.values()):
        raise ModelNotComputed(f"{file} has rope parameters by layer type; we compute one for all")
    if found.partial_rotary_factor != 1.0:
        raise ModelNotComputed(
            f"{file} rotates {found.partial_rotary_factor} of each head; we compute 1.0"
        )
    theta = found.rope_theta or theta or THETA_DEFAULT
    _refuse_unless(theta > 1, file, "rope_theta must be above 1", theta)
    kind = found.rope_type or found.type or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelNotComputed(
            f"{file} asks for rope type {kind!r}; we compute default, linear, llama3 and yarn"
        )
    if found.factor is None or not found.factor > 0:
        raise ModelError(f"{file}: rope type {kind} needs a factor above 0, got {found.factor}")
    scaling = RopeScaling(
        kind="linear" if kind == "linear" else "llama3" if kind == "llama3" else "yarn",
        factor=found.factor,
        original_context_tokens=fields.original_max_position_embeddings
        or found.original_max_position_embeddings
        or fields.max_position_embeddings,
        low_freq_factor=found.low_freq_factor,
        high_freq_factor=found.high_freq_factor,
        beta_fast=found.beta_fast or 32.0,
        beta_slow=found.beta_slow or 1.0,
        rounds_bounds=found.truncate,
    )
    _refuse_senseless(file, scaling)
    amplitude = _yarn_amplitude(found, found.factor) if kind == "yarn" else 1.0
    _refuse_unless(amplitude > 0, file, "attention_factor must be above 0", amplitude)
    return Rope(theta=theta, scaling=scaling, amplitude=amplitude)


def _refuse_senseless(file: Path, scaling: RopeScaling) -> None:
    """Refuse numbers that make no frequencies, or NaN.

    Raises:
        ModelError: there are.
    """
    tokens, low, high = (
        scaling.original_context_tokens,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    slow, fast = scaling.beta_slow, scaling.beta_fast
    _refuse_unless(tokens > 0, file, "the original context must have tokens", tokens)
    if scaling.kind == "llama3":
        why = "high_freq_factor must be above low_freq_factor"
        _refuse_unless(high > low, file, why, (low, high))
    if scaling.kind == "yarn":
        why = "beta_slow and beta_fast must be above 0, beta_fast not the lower"
        _refuse_unless(fast >= slow > 0, file, why, (slow, fast))


def _refuse_unless(right: bool, file: Path, rule: str, got: object) -> None:
    if not right:
        raise ModelError(f"{file}: {rule}, got {got}")


def _yarn_amplitude(fields: _RopeFields, factor: float) -> float:
    """The paper's correction of attention's entropy, unless the config has its own.

    Source: YaRN, Peng et al., arXiv:2309.00071, section 3.4.
    """
    if fields.attention_factor is not None:
        return fields.attention_factor

    def amplitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.mscale and fields.mscale_all_dim:
        return amplitude(fields.mscale) / amplitude(fields.mscale_all_dim)
    return amplitude(1.0)
