"""Root-mean-square norms with torch, for the CPU; the GPU's kernel is ``residual_norm.py``.

It runs where compiled code does not apply.

Letters in shapes: D the normalised width.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x²) + epsilon) * weight``, over the last dimension.

    Args:
        x: [..., D], any floating dtype.
        weight: broadcastable to ``x``, of its dtype.
        epsilon: keeps the root away from 0.

    Returns:
        [..., D] of ``x``'s dtype. The root is computed in float32, rounded to that dtype, and
        only then multiplied, as transformers does.
    """
    return F.rms_norm(x, x.shape[-1:], None, epsilon).mul_(weight)


def rms_norm_plus_one(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x²) + epsilon) * (1 + weight)``, over the last dimension.

    Arguments are as for :func:`rms_norm`; all is computed in float32 and rounded once, at the end,
    as transformers does in a Gemma.
    """
    normed = F.rms_norm(x.float(), x.shape[-1:], None, epsilon)
    return torch.addcmul(normed, normed, weight.float()).to(x.dtype)
