"""Imports Triton, or stand-ins if it is missing, so that kernel modules import without it.

CUDA builds of torch include Triton, CPU builds do not; without it kernels can be defined, and
launching one raises ``TritonMissing``. Triton reads ``TRITON_INTERPRET`` when a kernel is defined,
so set it before the import.
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
        """A kernel without Triton: raises ``TritonMissing`` on launch."""

        def __init__(self, kernel: Any) -> None:
            self._name = kernel.__name__

        def __getitem__(self, grid: object) -> Any:
            raise TritonMissing(self._name)

    class _Language:
        """Names in kernel signatures; kernel bodies never run."""

        constexpr = object

    def _unlaunchable(kernel: Any = None, **options: Any) -> Any:
        """Stand-in for ``triton.jit``, with or without options."""
        return _Unlaunchable if kernel is None else _Unlaunchable(kernel)

    jit = _unlaunchable
    tl = _Language
    INTERPRETED = False

__all__ = ["INTERPRETED", "jit", "next_power_of_2", "tl"]


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least ``n`` >= 1, as tile sizes must be."""
    return 1 << (n - 1).bit_length()
