"""Which arithmetic do several kernels share? Products of tiles, and soft caps.

It knows no kernel's data. These are Triton functions: kernels call them, nobody else.
"""

from tidegate.kernels.optional_triton import INTERPRETED, jit, tl


@jit
def product(a, b):
    """``a @ b`` summed in float32, without rounding float32 operands to tf32 as is the default."""
    if INTERPRETED:  # Triton 3.9's interpreter would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def capped(x, soft_cap):
    """``soft_cap * tanh(x / soft_cap)``, by exp: in this form it can't overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(x / soft_cap))
    size = soft_cap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)
