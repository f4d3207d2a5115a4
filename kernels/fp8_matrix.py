"""How is a weight matrix kept in 8-bit floats, and how is a step multiplied by it?

Each output's weights are e4m3 numbers (three bits of mantissa, 448 the largest) of a step of its
own: the largest of them by 448. So small weights of an output lose no more of themselves than large
ones do, as they would in int8. Where processors multiply such numbers is not known here: a product
widens some outputs' weights at a time, and is torch's, in float32. That saves memory, no time.

Micikevicius et al. 2022, arXiv:2209.05433, section 3. Letters: T tokens, N outputs, K inputs.
"""

import torch
import torch.nn.functional as F

from tidegate.kernels.int8_matrix import RoundedRows, rows_beside, steps_of
from tidegate.kernels.weight_matrix import COPY_ELEMENTS, Rows

LARGEST = 448.0
"""Of e4m3 without infinities."""


def rounded(
    weights: torch.Tensor, whole: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``weights`` [N, K] to e4m3; the numbers [N, K], and each output's step [N].

    Where they are some columns of ``whole`` [N, *], steps are those of all of it.
    """
    steps = steps_of(weights if whole is None else whole, LARGEST)
    return (weights.float() / steps[:, None]).to(torch.float8_e4m3fn), steps


class Fp8Matrix:
    """One that is multiplied by activations of ``dtype``, and told of in it."""

    panels = None

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.shape = (outputs, inputs)
        self.dtype = dtype
        weight_bytes = -(-outputs * inputs // 4) * 4  # steps are aligned
        self.storage = torch.zeros(weight_bytes + 4 * outputs, dtype=torch.uint8)
        self._bytes = self.storage[: outputs * inputs].view(outputs, inputs)
        self._steps = self.storage[weight_bytes:].view(torch.float32)

    def rows(self, first: int, count: int) -> Rows:
        """Where the rows ``[first, first + count)`` go."""
        return RoundedRows(self, first, count)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs [T, N] of ``x`` [T, K], with ``bias`` [N]."""
        return self._product(x, bias).to(x.dtype)

    def add_linear_(
        self, total: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Add :meth:`linear` to ``total`` [T, N]."""
        total.copy_(self._product(x, bias).add_(total))

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows [R, K] by their numbers [R], in range, as they were rounded."""
        numbers = rows.long()
        wide = self._bytes[numbers].view(torch.float8_e4m3fn).float()
        return wide.mul_(self._steps[numbers][:, None]).to(self.dtype)

    def unpacked(self) -> torch.Tensor:
        """As published, but for the rounding: [N, K]."""
        return self.take(torch.arange(self.shape[0]))

    def put(self, first: int, source: torch.Tensor, whole: torch.Tensor | None = None) -> None:
        """Put ``source`` [R, K], of any dtype, into the rows from ``first`` on.

        Where it is some columns of ``whole`` [R, *], it is rounded as those were with all of it.
        """
        for part, outputs in rows_beside(source, whole):
            self.put_rounded(first, *rounded(part, outputs))
            first += part.shape[0]

    def put_rounded(self, first: int, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        """Put ``numbers`` [R, K], e4m3, of ``steps`` [R], into the rows from ``first`` on."""
        places = slice(first, first + numbers.shape[0])
        self._bytes[places], self._steps[places] = numbers.view(torch.uint8), steps

    def take_rounded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers [R, K] and steps [R] of some rows [R], int64."""
        return self._bytes[rows].view(torch.float8_e4m3fn), self._steps[rows]

    @property
    def _rows_at_once(self) -> int:
        """As many as are widened to what stays in the processor's caches."""
        return max(1, COPY_ELEMENTS // self.shape[1])

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide, weights = x.float(), self._bytes.view(torch.float8_e4m3fn)
        parts = [F.linear(wide, part.float()) for part in torch.split(weights, self._rows_at_once)]
        product = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(self._steps)
        return product if bias is None else product.add_(bias)


def make_fp8_matrix(outputs: int, inputs: int, dtype: torch.dtype) -> Fp8Matrix:
    """Make room for a matrix that activations of ``dtype`` are multiplied by."""
    return Fp8Matrix(outputs, inputs, dtype)
