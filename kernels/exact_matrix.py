"""Product of bfloat16 activations with an unrounded float32 matrix, such as the LM head.

exact_matrix.cpp has the code. A panel (a group of outputs) whose weights are all representable in
bfloat16, as after a publish in bfloat16, is stored and multiplied in bfloat16. Products are exact
and sums are float32, as with activations widened to float32, except that the processor's bfloat16
instructions flush values below 1.2e-38 to 0.

Letters in shapes: T tokens, N outputs, K inputs.
"""

import ctypes

import torch

from tidegate.kernels.compiled import INT, POINTER, function, library
from tidegate.kernels.weight_matrix import Matrix, PackedMatrix, make_matrix

MULTIPLY = [POINTER] * 4 + [INT] * 5
PACK = [POINTER] * 2 + [INT] * 4
TAKE = [POINTER] * 3 + [INT] * 3
ADD_BITS = [POINTER, INT, POINTER, POINTER, INT, INT, INT, POINTER, POINTER]


class ExactMatrix(PackedMatrix):
    """A float32 matrix for bfloat16 activations. All tensors are contiguous, on the CPU."""

    def __init__(self, outputs: int, inputs: int, functions: ctypes.CDLL) -> None:
        super().__init__(outputs, inputs, torch.float32, functions)
        self._multiply_by = function(functions, "tg_multiply_exact", MULTIPLY)
        pack = function(functions, "tg_pack_exact", PACK)
        take = function(functions, "tg_take_exact", TAKE)
        self._add_bits = function(functions, "tg_add_bits_exact", ADD_BITS)
        self._pack = lambda *arguments: pack(*arguments[:-1], outputs, inputs)
        self._take = lambda *arguments: take(*arguments[:-1], outputs, inputs)
        panel = functions["tg_panel_outputs"]()
        panels, stored = -(-outputs // panel), inputs + inputs % 2
        self.storage = torch.empty(panels * (panel * stored + 1), dtype=torch.float32)
        # Padding of the last panel is multiplied too; one flag per panel follows, with its format.
        self.storage[outputs // panel * panel * stored :] = 0.0

    @property
    def element_dtype(self) -> torch.dtype:
        """bfloat16, as most panels are stored."""
        return torch.bfloat16

    def add_bits(self, first: int, index: torch.Tensor, difference: torch.Tensor) -> bool | None:
        """As :meth:`PackedMatrix.add_bits`; None if a panel among the rows is stored in float32."""
        not_finite, is_done = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self._add_bits(
            self.storage.data_ptr(),
            first,
            index.data_ptr(),
            difference.data_ptr(),
            index.numel(),
            *self.shape,
            not_finite.data_ptr(),
            is_done.data_ptr(),
        )
        return not bool(not_finite) if bool(is_done) else None

    @property
    def panels(self) -> None:
        """None: the panels differ in dtype, so no one tensor holds them."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return outputs [T, N], float32, of ``x`` [T, K], bfloat16, and ``bias`` [N], float32."""
        out = self.storage.new_empty((x.shape[0], self.shape[0]))
        self._multiply(x, out, bias, adds=False)
        return out


def make_exact_matrix(
    outputs: int, inputs: int, dtype: torch.dtype, *, is_packed: bool | None = None
) -> Matrix:
    """Allocate a float32 matrix for activations of ``dtype``.

    If the result is not an :class:`ExactMatrix`, callers must widen the activations to float32.
    ``is_packed`` means the same as in :func:`~tidegate.kernels.weight_matrix.make_matrix`.
    """
    functions = library() if dtype == torch.bfloat16 and is_packed is not False else None
    if functions is not None:
        return ExactMatrix(outputs, inputs, functions)
    return make_matrix(outputs, inputs, torch.float32, is_packed=is_packed)
