"""GPU kernel that adds a block's output to the residual stream and norms the sum (RMS norm).

The CPU's counterpart is :mod:`tidegate.kernels.norm`. Both steps are one pass, so that the sum is
not read again for the norm.

Source of the norm: Zhang & Sennrich, arXiv:1910.07467.

Letters in shapes: T tokens, D the normalised width, W heads with weights of their own.
"""

import torch

from tidegate.kernels.optional_triton import jit, next_power_of_2, tl

TILE_ELEMENTS = 2048
"""Elements of one program for short rows, such as heads: 16 for each of 128 threads."""

WIDTH_MAX = 32768
"""Largest D. A row stays in registers between its mean and its product: 128 KB of
a core's 256 KB."""


def residual_norm_triton(
    total: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    *,
    gemma: bool = False,
) -> torch.Tensor:
    """Add ``update`` to ``total`` in place; return the sum's root-mean-square norm, weighted.

    Runs on a CPU only with Triton's interpreter.

    Args:
        total: [T, D], or [T, W, D] for heads, each row of D contiguous: the residual stream.
        update: like ``total``, contiguous; None adds nothing.
        weight: [D], or [W, D], contiguous, of ``total``'s dtype.
        epsilon: keeps the root away from 0.
        gemma: multiply by ``1 + weight``, before rounding, as Gemma does; not by ``weight``
            after rounding, as Llama does.

    Returns:
        ``total``'s shape and dtype, fresh memory. The sum is rounded as it is stored; all that
        follows is float32.
    """
    _refuse_shapes(total, update, weight)
    width = total.shape[-1]
    normed = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    heads = total.shape[1] if total.ndim == 3 else 1
    rows = total.shape[0] * heads
    dims = next_power_of_2(width)
    row_tile = max(1, TILE_ELEMENTS // dims)
    if rows:
        _residual_norm_kernel[(-(-rows // row_tile),)](
            total, normed if update is None else update, weight, normed,
            rows, heads, total.stride(0), weight.numel() // width, epsilon,
            D=width, ROWS=row_tile, DIMS=dims, ADDS=update is not None, GEMMA=gemma,
            num_warps=4 if dims <= 2048 else 8 if dims <= 8192 else 16,
        )  # fmt: skip
    return normed


def _refuse_shapes(total: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor) -> None:
    """Check the kernel's assumptions, because a wrong address raises no error on a GPU."""
    width = total.shape[-1]
    if total.ndim not in (2, 3) or weight.shape not in (total.shape[-1:], total.shape[1:]):
        raise ValueError(
            f"expected total [T, D] or [T, W, D] and weight [D] or [W, D], "
            f"got {list(total.shape)} and {list(weight.shape)}"
        )
    if width > WIDTH_MAX:
        raise ValueError(f"rows may be {WIDTH_MAX} wide at most, got {width}")
    if total.stride()[1:] != torch.empty(total.shape[1:]).stride() or not weight.is_contiguous():
        raise ValueError("each row of total, and weight, must be contiguous")
    if update is not None and (update.shape != total.shape or not update.is_contiguous()):
        raise ValueError(
            f"update must be contiguous and of total's shape {list(total.shape)}, "
            f"got {list(update.shape)}"
        )


@jit(do_not_specialize=["rows"])
def _residual_norm_kernel(
    total_ptr,  # [T, W, D], updated
    update_ptr,  # [T * W, D]
    weight_ptr,  # [D] or [W, D]
    normed_ptr,  # [T * W, D] out
    rows,  # T * W
    heads,  # W
    token_stride,
    weight_rows,
    epsilon,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    ADDS: tl.constexpr,
    GEMMA: tl.constexpr,
):
    """One program per ROWS rows, each whole."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIMS)
    inside = (row < rows)[:, None] & (d < D)[None, :]
    packed_at = row.to(tl.int64)[:, None] * D + d[None, :]
    total_at = (row // heads).to(tl.int64) * token_stride + row % heads * D
    total_at = total_ptr + total_at[:, None] + d[None, :]
    x = tl.load(total_at, mask=inside, other=0.0)
    if ADDS:
        update = tl.load(update_ptr + packed_at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
        tl.store(total_at, x, mask=inside)
    wide = x.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1) / D
    unit = wide / tl.sqrt(mean_square + epsilon)[:, None]
    weight_at = row % weight_rows * D
    weight = tl.load(weight_ptr + weight_at[:, None] + d[None, :], mask=inside, other=0.0)
    weight = weight.to(tl.float32)
    normed = unit * (1.0 + weight) if GEMMA else unit.to(x.dtype).to(tl.float32) * weight
    tl.store(normed_ptr + packed_at, normed.to(x.dtype), mask=inside)
