"""Rotary position embedding with torch: the table of rotations, and their application.

It is also the reference of the compiled and Triton versions. A head's halves are the two
coordinates of D/2 points, each rotated by position x its frequency.

Source: RoFormer, Su et al., arXiv:2104.09864.

Letters in shapes: T tokens, P positions, A heads, D head_dim.
"""

import torch


def rope_table(
    inverse_frequencies: torch.Tensor,
    positions: int,
    dtype: torch.dtype,
    *,
    amplitude: float = 1.0,
) -> torch.Tensor:
    """Precompute the rotations of positions ``[0, positions)``.

    Args:
        inverse_frequencies: [D/2], float32: radians per position.
        positions: P, the number of positions.
        dtype: of the table; the angles are computed in float32, as transformers does.
        amplitude: factor of rotated heads.

    Returns:
        [P, 2, D]: per position the cosines, and the sines signed for :func:`apply_rope`.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies
    cosines, sines = angles.cos() * amplitude, angles.sin() * amplitude
    cosines, sines = torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)
    return torch.stack([cosines, sines], dim=1).to(dtype)


def apply_rope(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate each head of each token by its token's position.

    Args:
        x: [T, A, D].
        cosines: [T, 1, D] of ``x``'s dtype, from :func:`rope_table`.
        sines: like ``cosines``; negative in the first half, so that the rotation only has to swap
            the halves of ``x``.

    Returns:
        [T, A, D], fresh memory.
    """
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)
