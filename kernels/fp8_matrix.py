"""Weight matrix quantized to 8-bit floats (e4m3), with a scale per output.

Implements ``Matrix`` for ``quantization="fp8"``. Each output's weights are e4m3 numbers (three
mantissa bits, largest 448) times the output's step, which is its largest weight / 448. Relative
precision is the same for small and large weights, unlike int8. A product widens the weights of some
outputs at a time and multiplies them with torch in float32, so quantization saves memory but no
time.

Micikevicius et al. 2022, arXiv:2209.05433, section 3.

Letters in shapes: T tokens, N outputs, K inputs, R rows.
"""

import torch
import torch.nn.functional as F

from tidegate.kernels.int8_matrix import RoundedMatrix, steps_of
from tidegate.kernels.weight_matrix import COPY_ELEMENTS

LARGEST = 448.0
"""Largest number of e4m3 without infinities."""


def rounded(
    weights: torch.Tensor, whole: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``weights`` [N, K] to e4m3; return the numbers [N, K], and each output's step [N].

    If they are columns of ``whole`` [N, *], the steps are those of all its columns.
    """
    steps = steps_of(weights if whole is None else whole, LARGEST)
    return (weights.float() / steps[:, None]).to(torch.float8_e4m3fn), steps


class Fp8Matrix(RoundedMatrix):
    """An e4m3 matrix for activations of ``dtype``, in which it also returns its weights."""

    _rounded = staticmethod(rounded)

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.shape = (outputs, inputs)
        self.dtype = dtype
        weight_bytes = -(-outputs * inputs // 4) * 4  # steps are aligned
        self.storage = torch.zeros(weight_bytes + 4 * outputs, dtype=torch.uint8)
        self._bytes = self.storage[: outputs * inputs].view(outputs, inputs)
        self._steps = self.storage[weight_bytes:].view(torch.float32)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs [T, N] of ``x`` [T, K], with ``bias`` [N]."""
        return self._product(x, bias).to(x.dtype)

    def add_linear_(
        self, total: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Add :meth:`linear` to ``total`` [T, N] in place."""
        total.copy_(self._product(x, bias).add_(total))

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, K] with these indices [R], which must be in range."""
        numbers = rows.long()
        wide = self._bytes[numbers].view(torch.float8_e4m3fn).float()
        return wide.mul_(self._steps[numbers][:, None]).to(self.dtype)

    def put_rounded(self, first: int, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        """Copy ``numbers`` [R, K] with ``steps`` [R] into the rows from ``first`` on."""
        rows = slice(first, first + numbers.shape[0])
        self._bytes[rows], self._steps[rows] = numbers.view(torch.uint8), steps

    def take_rounded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers [R, K] and steps [R] of the rows with these indices [R], int64."""
        return self._bytes[rows].view(torch.float8_e4m3fn), self._steps[rows]

    @property
    def _rows_at_once(self) -> int:
        """Rows widened at a time, so that they stay in the processor's caches."""
        return max(1, COPY_ELEMENTS // self.shape[1])

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide, weights = x.float(), self._bytes.view(torch.float8_e4m3fn)
        parts = [F.linear(wide, part.float()) for part in torch.split(weights, self._rows_at_once)]
        product = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(self._steps)
        return product if bias is None else product.add_(bias)
