"""Rotary-embedding parameters of config.json: default, linear, llama3 and yarn.

A model has one rotary embedding for all layers, or one for layers with a sliding window and another
for the rest.
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
    """How a rotary embedding is extended beyond its training context."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context_tokens: int = 0
    """Training context in tokens; unused by ``linear``."""
    low_freq_factor: float = 1.0
    """Only ``llama3``: rotations within the original context up to which a frequency
    is fully scaled."""
    high_freq_factor: float = 4.0
    """Only ``llama3``: rotations within the original context from which a frequency is unscaled."""
    beta_fast: float = 32.0
    """Only ``yarn``: rotations within the original context from which a frequency is unscaled."""
    beta_slow: float = 1.0
    """Only ``yarn``: rotations within the original context up to which a frequency
    is fully scaled."""
    rounds_bounds: bool = True
    """Only ``yarn``: whether the bounds of the transition are rounded to whole coordinate pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Parameters of one rotary embedding."""

    theta: float
    scaling: RopeScaling | None = None
    amplitude: float = 1.0
    """Factor of rotated queries and keys; differs from 1 with ``yarn`` only."""


class _RopeFields(msgspec.Struct):
    """Fields of ``rope_parameters``, or of the older ``rope_scaling``."""

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
        ModelError: its fields are invalid.
        ModelNotComputed: its kind is not supported.
    """
    raw = fields.rope_scaling or fields.rope_parameters or {}  # transformers' precedence
    return _rope(file, fields, raw, fields.rope_theta)


def read_local_rope(file: Path, fields: ConfigFields) -> tuple[Rope, Rope]:
    """Read the two rotary embeddings of a Gemma 3: of layers with a window, and of layers without.

    Raises:
        ModelError: their fields are invalid.
        ModelNotComputed: a kind is not supported.
    """
    nested = fields.rope_parameters or {}
    local_fields = nested.get("sliding_attention") or {}
    global_fields = (nested.get("full_attention") or {}) | (fields.rope_scaling or {})
    if not isinstance(local_fields, dict) or not isinstance(global_fields, dict):
        raise ModelError(
            f"{file}: rope_parameters {nested} must map each layer type (full_attention, "
            "sliding_attention) to its own parameters"
        )
    return (
        _rope(file, fields, local_fields, fields.rope_local_base_freq),
        _rope(file, fields, global_fields, fields.rope_theta),
    )


def context_tokens_max(file: Path, fields: ConfigFields) -> int:
    """Return the context limit in tokens: yarn's extended length if it is stated and larger."""
    raw = fields.rope_scaling or fields.rope_parameters or {}  # transformers' precedence
    rope_fields = _convert(file, raw)
    original = (
        fields.original_max_position_embeddings or rope_fields.original_max_position_embeddings
    )
    if (
        (rope_fields.rope_type or rope_fields.type) != "yarn"
        or original is None
        or rope_fields.factor is None
    ):
        return fields.max_position_embeddings
    return max(fields.max_position_embeddings, int(original * rope_fields.factor))


def _convert(file: Path, raw: dict[str, Any]) -> _RopeFields:
    try:
        return msgspec.convert(raw, _RopeFields)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: rope parameters {raw} are invalid: {error}") from error


def _rope(file: Path, fields: ConfigFields, raw: dict[str, Any], theta: float | None) -> Rope:
    rope_fields = _convert(file, raw)
    if any(isinstance(value, dict) for value in raw.values()):
        raise ModelNotComputed(
            f"{file} has rope parameters by layer type; Tidegate computes one for all layers"
        )
    if rope_fields.partial_rotary_factor != 1.0:
        raise ModelNotComputed(
            f"{file} rotates {rope_fields.partial_rotary_factor} of each head; Tidegate computes "
            "1.0"
        )
    theta = rope_fields.rope_theta or theta or THETA_DEFAULT
    _check(theta > 1, file, "rope_theta must be above 1", theta)
    kind = rope_fields.rope_type or rope_fields.type or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelNotComputed(
            f"{file} asks for rope type {kind!r}; Tidegate computes default, linear, llama3 and "
            "yarn"
        )
    if rope_fields.factor is None or not rope_fields.factor > 0:
        raise ModelError(
            f"{file}: rope type {kind} needs a factor above 0, got {rope_fields.factor}"
        )
    scaling = RopeScaling(
        kind="linear" if kind == "linear" else "llama3" if kind == "llama3" else "yarn",
        factor=rope_fields.factor,
        original_context_tokens=fields.original_max_position_embeddings
        or rope_fields.original_max_position_embeddings
        or fields.max_position_embeddings,
        low_freq_factor=rope_fields.low_freq_factor,
        high_freq_factor=rope_fields.high_freq_factor,
        beta_fast=rope_fields.beta_fast or 32.0,
        beta_slow=rope_fields.beta_slow or 1.0,
        rounds_bounds=rope_fields.truncate,
    )
    _check_scaling(file, scaling)
    amplitude = _yarn_amplitude(rope_fields, rope_fields.factor) if kind == "yarn" else 1.0
    _check(amplitude > 0, file, "attention_factor must be above 0", amplitude)
    return Rope(theta=theta, scaling=scaling, amplitude=amplitude)


def _check_scaling(file: Path, scaling: RopeScaling) -> None:
    """Refuse numbers that lead to no frequencies or to NaN.

    Raises:
        ModelError: a number is out of range.
    """
    tokens, low, high = (
        scaling.original_context_tokens,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    slow, fast = scaling.beta_slow, scaling.beta_fast
    _check(tokens > 0, file, "the original context must have tokens", tokens)
    if scaling.kind == "llama3":
        rule = "high_freq_factor must be above low_freq_factor"
        _check(high > low, file, rule, (low, high))
    if scaling.kind == "yarn":
        rule = "beta_slow and beta_fast must be above 0, beta_fast not the lower"
        _check(fast >= slow > 0, file, rule, (slow, fast))


def _check(holds: bool, file: Path, rule: str, got: object) -> None:
    if not holds:
        raise ModelError(f"{file}: {rule}, got {got}")


def _yarn_amplitude(fields: _RopeFields, factor: float) -> float:
    """Return the attention-entropy correction, unless the config sets it.

    Source: YaRN, Peng et al., arXiv:2309.00071, section 3.4.
    """
    if fields.attention_factor is not None:
        return fields.attention_factor

    def amplitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.mscale and fields.mscale_all_dim:
        return amplitude(fields.mscale) / amplitude(fields.mscale_all_dim)
    return amplitude(1.0)
