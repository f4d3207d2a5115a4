"""Where do kernels get Triton from, and what if there is none? Its names, or stand-ins for them.

It knows no kernel. CUDA builds of torch bring Triton along and CPU builds do not, so a module with
a kernel in it must import without: there a kernel can be defined, and launching it says what to
install. Triton reads ``TRITON_INTERPRET`` when a kernel is defined: set it before that.
"""

from typing import Any

from tidegate.errors import TritonMissing

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
except ImportError:

    class _Unlaunchable:
        """What a kernel is without Triton."""

        def __init__(self, kernel: Any) -> None:
            self._name = kernel.__name__

        def __getitem__(self, grid: object) -> Any:
            raise TritonMissing(self._name)

    class _Language:
        """What signatures of kernels name; their bodies never run."""

        constexpr = object

    def _unlaunchable(kernel: Any = None, **options: Any) -> Any:
        """What ``triton.jit`` is without Triton, with options or without."""
        return _Unlaunchable if kernel is None else _Unlaunchable(kernel)

    jit = _unlaunchable
    tl = _Language
    INTERPRETED = False

__all__ = ["INTERPRETED", "jit", "next_power_of_2", "tl"]


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least ``n`` >= 1: what a tile's side has to be."""
    return 1 << (n - 1).bit_length()
