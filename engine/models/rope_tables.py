"""Rotary tables: cosine and sine of every position, from ``rope_config.Rope``.

A runner builds one table per kind of attention: one for each distinct combination of window and
rotary settings among the layers.
"""

import math

import torch

from tidegate.engine.models.rope_config import Rope, RopeScaling
from tidegate.kernels.rope import rope_table


def make_rope_table(
    rope: Rope, *, head_dim: int, positions: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the table [positions, 2, head_dim] of one rotary embedding."""
    frequencies = inverse_frequencies(rope, head_dim)
    return rope_table(frequencies, positions, dtype, amplitude=rope.amplitude)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each coordinate pair. [head_dim / 2], float32

    ``linear`` divides all frequencies by the factor. ``llama3`` and ``yarn`` keep high frequencies,
    divide low ones by the factor, and interpolate between: ``llama3`` linearly in the frequency,
    ``yarn`` linearly in the pair's index.

    Source of ``yarn``: Peng et al., arXiv:2309.00071, section 3.2.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        unscaled = _yarn_share_unscaled(scaling, rope.theta, head_dim)
    else:
        waves_in_context = scaling.original_context_tokens * frequencies / (2 * torch.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        unscaled = ((waves_in_context - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (unscaled + (1.0 - unscaled) / scaling.factor)


def _yarn_share_unscaled(scaling: RopeScaling, theta: float, head_dim: int) -> torch.Tensor:
    """Return each pair's weight of the unscaled frequency, from 0 to 1. [head_dim / 2]"""

    def pair_that_turns(times: float) -> float:
        wave_tokens = scaling.original_context_tokens / (times * 2 * math.pi)
        return head_dim * math.log(wave_tokens) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.rounds_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = max(last - first, 0.001)  # if both are the same pair, the transition is a step
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1.0 - ((pairs - first) / span).clamp(0.0, 1.0)
