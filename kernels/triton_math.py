"""Triton helper functions that several kernels share: tile products and soft caps."""

from tidegate.kernels.optional_triton import INTERPRETED, jit, tl


@jit
def product(a, b):
    """Return ``a @ b`` summed in float32, without rounding float32 operands to tf32."""
    if INTERPRETED:  # Triton 3.9's interpreter would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def capped(x, soft_cap):
    """Return ``soft_cap * tanh(x / soft_cap)``, in a form of exp that cannot overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(x / soft_cap))
    size = soft_cap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)
