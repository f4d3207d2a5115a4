"""How is a weight matrix kept in a byte per weight, and how is a step multiplied by it?

Each output's weights are multiples, -127 to 127, of a step of its own: the largest of them by 127.
Activations stay as they are, and sums are in float32, so all that is lost is the weights' rounding.
weight_matrix.cpp widens weights in registers: a quarter of the bytes of float32 is read. Where
nothing can be compiled torch computes the same, over a widened copy.

Each output is one chain of additions whatever tokens are beside, as in a packed matrix.

Letters in shapes: T tokens, N outputs, K inputs.
"""

import ctypes
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from tidegate.kernels.compiled import INT, POINTER, function, library
from tidegate.kernels.weight_matrix import COPY_ELEMENTS, Panels, Rows

LEVELS = 127
"""On each side of zero: with -128 the range would not be symmetric."""

SMALLEST_STEP = 1e-30
"""Of outputs all of whose weights are zero: what they are divided by must not be."""


def quantized(
    weights: torch.Tensor, whole: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``weights`` [N, K] to a byte each; the bytes [N, K], and each output's step [N].

    Where they are some columns of ``whole`` [N, *], steps are those of all of it.
    """
    steps = steps_of(weights if whole is None else whole, LEVELS)
    return (weights.float() / steps[:, None]).round_().to(torch.int8), steps


def steps_of(weights: torch.Tensor, levels: float) -> torch.Tensor:
    """Each output's step [N]: the largest of its ``weights`` [N, K], by ``levels``."""
    return (weights.float().abs().amax(-1) / levels).clamp_min(SMALLEST_STEP)


def rows_beside(
    source: torch.Tensor, whole: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of ``source`` [R, K], each beside that of ``whole`` [R, *], or else itself; so many
    at a time as stay in the processor's caches while they are rounded."""
    source, whole = source.detach(), (source if whole is None else whole).detach()
    at_once = max(1, COPY_ELEMENTS // whole.shape[1])
    return zip(torch.split(source, at_once), torch.split(whole, at_once), strict=True)


class Int8Matrix:
    """One that is multiplied by activations of ``dtype``, and told of in it."""

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, functions: ctypes.CDLL | None
    ) -> None:
        """``functions`` are the compiled ones; None: torch computes."""
        self.shape = (outputs, inputs)
        self.dtype = dtype
        panel = 1 if functions is None else int(functions["tg_panel_outputs"]())
        rows = -(-outputs // panel) * panel
        weight_bytes = -(-rows * inputs // 4) * 4  # steps are aligned
        self.storage = torch.zeros(weight_bytes + 4 * outputs, dtype=torch.uint8)
        self._weights = self.storage[: rows * inputs].view(torch.int8)
        self._steps = self.storage[weight_bytes:].view(torch.float32)
        self._functions = None if functions is None else _Functions(functions, dtype)

    @property
    def panels(self) -> Panels | None:
        """Where its weights are; None where torch multiplies by them."""
        return None if self._functions is None else Panels(self._weights, self._steps)

    def rows(self, first: int, count: int) -> Rows:
        """Where the rows ``[first, first + count)`` go."""
        return RoundedRows(self, first, count)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs [T, N] of ``x`` [T, K], with ``bias`` [N]."""
        out = x.new_empty((x.shape[0], self.shape[0]))
        self._multiply(x, out, bias, adds=False)
        return out

    def add_linear_(
        self, total: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Add :meth:`linear` to ``total`` [T, N]."""
        self._multiply(x, total, bias, adds=True)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows [R, K] by their numbers [R], in range, as they were rounded."""
        numbers = rows.long().contiguous()
        return (self._bytes(numbers).float() * self._steps[numbers][:, None]).to(self.dtype)

    def unpacked(self) -> torch.Tensor:
        """As published, but for the rounding: [N, K]."""
        return self.take(torch.arange(self.shape[0]))

    def put(self, first: int, source: torch.Tensor, whole: torch.Tensor | None = None) -> None:
        """Put ``source`` [R, K], of any dtype, into the rows from ``first`` on.

        Where it is some columns of ``whole`` [R, *], it is rounded as those were with all of it.
        """
        for part, outputs in rows_beside(source, whole):
            self.put_rounded(first, *quantized(part, outputs))
            first += part.shape[0]

    def put_rounded(self, first: int, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        """Put ``numbers`` [R, K], int8, of ``steps`` [R], into the rows from ``first`` on."""
        count, inputs = numbers.shape
        self._steps[first : first + count] = steps
        if self._functions is None:
            self._weights.view(-1, inputs)[first : first + count] = numbers
        else:
            to = self._weights.data_ptr()
            self._functions.pack(numbers.data_ptr(), to, first, count, inputs)

    def take_rounded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers [R, K] and steps [R] of some rows [R], int64."""
        return self._bytes(rows), self._steps[rows]

    def _bytes(self, numbers: torch.Tensor) -> torch.Tensor:
        inputs = self.shape[1]
        if self._functions is None:
            return self._weights.view(-1, inputs)[numbers]
        out = torch.empty((numbers.numel(), inputs), dtype=torch.int8)
        count, origin = numbers.numel(), self._weights.data_ptr()
        self._functions.take(origin, numbers.data_ptr(), out.data_ptr(), count, inputs)
        return out

    def _multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, adds: bool
    ) -> None:
        if self._functions is None:
            self._multiply_by_torch(x, out, bias, adds=adds)
            return
        outputs, inputs = self.shape
        x = x.contiguous()  # held while it is read: its address alone holds nothing
        self._functions.multiply(
            x.data_ptr(),
            self._weights.data_ptr(),
            self._steps.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            outputs,
            inputs,
            adds,
            torch.get_num_threads(),
        )

    def _multiply_by_torch(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, adds: bool
    ) -> None:
        product = F.linear(x.float(), self._weights.view(self.shape).float()) * self._steps
        if bias is not None:
            product += bias
        out.copy_(out.float() + product if adds else product)


class _Functions:
    """The compiled ones, for activations of one dtype."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.multiply = function(functions, "tg_multiply_int8", [POINTER] * 5 + [INT] * 5, dtype)
        self.pack = function(functions, "tg_pack_int8", [POINTER] * 2 + [INT] * 3)
        self.take = function(functions, "tg_take_int8", [POINTER] * 3 + [INT] * 2)


class _Rounded(Protocol):
    shape: tuple[int, int]
    storage: torch.Tensor

    def put(self, first: int, source: torch.Tensor, whole: torch.Tensor | None = None) -> None: ...

    def put_rounded(self, first: int, numbers: torch.Tensor, steps: torch.Tensor) -> None: ...

    def take(self, rows: torch.Tensor) -> torch.Tensor: ...

    def take_rounded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class RoundedRows:
    """Some rows of a matrix whose weights are rounded as they come."""

    def __init__(self, matrix: _Rounded, first: int, count: int) -> None:
        self._matrix, self._first, self._count = matrix, first, count

    def copy_(self, source: torch.Tensor, /, whole: torch.Tensor | None = None) -> None:
        """Round ``source``, and put it there; where it is some columns of ``whole``, to the bit
        what they are of that when it is rounded."""
        if tuple(source.shape) != (self._count, self._matrix.shape[1]):
            raise ValueError(f"{list(source.shape)} is not the shape of {self._count} rows")
        self._matrix.put(self._first, source, whole)

    def take_over(self, other: "RoundedRows", /) -> None:
        """Put what ``other`` holds there, as it is: told in bfloat16 and rounded again, an output
        would have another step, and the model be another than when all of it was published."""
        numbers, steps = other._matrix.take_rounded(other._numbers())
        self._matrix.put_rounded(self._first, numbers, steps)

    def unpacked(self) -> torch.Tensor:
        """A copy, as it was rounded."""
        return self._matrix.take(self._numbers())

    def storages(self) -> list[torch.Tensor]:
        """All the memory that they lie in, with others."""
        return [self._matrix.storage]

    def _numbers(self) -> torch.Tensor:
        return torch.arange(self._first, self._first + self._count)


def make_int8_matrix(outputs: int, inputs: int, dtype: torch.dtype) -> Int8Matrix:
    """Make room for a matrix that activations of ``dtype`` are multiplied by."""
    return Int8Matrix(outputs, inputs, dtype, library())
