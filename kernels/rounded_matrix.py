"""Weight matrices quantized to int8 or to 8-bit floats (e4m3), with a scale per output.

Each output's weights are numbers times the output's step. Of int8 the numbers are -127 to 127, and
the step is the output's largest weight / 127; of e4m3 (three mantissa bits, largest 448) it is the
largest / 448, and relative precision is the same for small and large weights. Activations are not
quantized and sums are float32, so only the weights' rounding is lost.

For int8 weight_matrix.cpp widens weights in registers and reads a quarter of float32's bytes;
without a compiler torch computes the same over a widened copy. Each output is summed in one order,
so rows have the same bits in every batch. The layout is that of ``weight_matrix.py``. For e4m3 a
product widens the weights of some outputs at a time and multiplies them with torch, so
quantization saves memory but no time.

Source of e4m3: Micikevicius et al. 2022, arXiv:2209.05433, section 3.

Letters in shapes: T tokens, N outputs, K inputs, R rows.
"""

import ctypes

import torch
import torch.nn.functional as F

from tidegate.kernels.compiled import INT, POINTER, function, library
from tidegate.kernels.weight_matrix import COPY_ELEMENTS, Matrix, Panels, Rows

LEVELS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest number of each dtype. -128 is unused, so that the range is symmetric."""

SMALLEST_STEP = 1e-30
"""Step of outputs whose weights are all zero, to avoid dividing by 0."""


def rounded(
    weights: torch.Tensor, dtype: torch.dtype, whole: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``weights`` [N, K] to ``dtype``; return the numbers [N, K], and each output's step [N].

    If they are columns of ``whole`` [N, *], the steps are those of all its columns.
    """
    largest = (weights if whole is None else whole).float().abs().amax(-1)
    steps = (largest / LEVELS[dtype]).clamp_min(SMALLEST_STEP)
    numbers = weights.float() / steps[:, None]
    return (numbers.round_() if dtype == torch.int8 else numbers).to(dtype), steps


class RoundedMatrix(Matrix):
    """A matrix of rounded weights, each output's beside its step, in ``dtype`` when returned."""

    number_dtype: torch.dtype
    """Dtype of the rounded weights."""

    def _allocate(self, outputs: int, inputs: int, dtype: torch.dtype, rows: int) -> None:
        self.shape = (outputs, inputs)
        self.dtype = dtype
        weight_bytes = -(-rows * inputs // 4) * 4  # steps are aligned
        self.storage = torch.zeros(weight_bytes + 4 * outputs, dtype=torch.uint8)
        self._weights = self.storage[: rows * inputs]
        self._steps = self.storage[weight_bytes:].view(torch.float32)

    def rows(self, first: int, count: int) -> Rows:
        """Return the copy target of rows ``[first, first + count)``."""
        return RoundedRows(self, first, count)

    def put(self, first: int, source: torch.Tensor, whole: torch.Tensor | None = None) -> None:
        """Round ``source`` [R, K], of any dtype, into the rows from ``first`` on.

        If it is columns of ``whole`` [R, *], it is rounded with the steps of all columns.
        """
        source, whole = source.detach(), (source if whole is None else whole).detach()
        at_once = max(1, COPY_ELEMENTS // whole.shape[1])  # they stay in the processor's caches
        parts = zip(torch.split(source, at_once), torch.split(whole, at_once), strict=True)
        for part, outputs in parts:
            self.put_rounded(first, *rounded(part, self.number_dtype, outputs))
            first += part.shape[0]

    def put_rounded(self, first: int, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        """Copy ``numbers`` [R, K] with ``steps`` [R] into the rows from ``first`` on."""
        raise NotImplementedError

    def take_rounded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers [R, K] and steps [R] of the rows with these indices [R], int64."""
        raise NotImplementedError


class Int8Matrix(RoundedMatrix):
    """An int8 matrix for activations of ``dtype``."""

    number_dtype = torch.int8

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, functions: ctypes.CDLL | None
    ) -> None:
        """``functions`` is the compiled library; None computes with torch."""
        panel = 1 if functions is None else int(functions["tg_panel_outputs"]())
        self._allocate(outputs, inputs, dtype, rows=-(-outputs // panel) * panel)
        self._weights = self._weights.view(torch.int8)
        self._functions = None if functions is None else _Functions(functions, dtype)

    @property
    def panels(self) -> Panels | None:
        """The packed weights; None without compiled code."""
        return None if self._functions is None else Panels(self._weights, self._steps)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, K] with these indices [R], which must be in range."""
        numbers = rows.long().contiguous()
        return (self._bytes(numbers).float() * self._steps[numbers][:, None]).to(self.dtype)

    def put_rounded(self, first: int, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        """Copy ``numbers`` [R, K] with ``steps`` [R] into the rows from ``first`` on."""
        count, inputs = numbers.shape
        self._steps[first : first + count] = steps
        if self._functions is None:
            self._weights.view(-1, inputs)[first : first + count] = numbers
        else:
            to = self._weights.data_ptr()
            self._functions.pack(numbers.data_ptr(), to, first, count, inputs)

    def take_rounded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers [R, K] and steps [R] of the rows with these indices [R], int64."""
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
        x = x.contiguous()  # a local reference, because the call gets only its address
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
    """Compiled functions for activations of one dtype."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.multiply = function(functions, "tg_multiply_int8", [POINTER] * 5 + [INT] * 5, dtype)
        self.pack = function(functions, "tg_pack_int8", [POINTER] * 2 + [INT] * 3)
        self.take = function(functions, "tg_take_int8", [POINTER] * 3 + [INT] * 2)


class Fp8Matrix(RoundedMatrix):
    """An e4m3 matrix for activations of ``dtype``."""

    number_dtype = torch.float8_e4m3fn

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self._allocate(outputs, inputs, dtype, rows=outputs)
        self._bytes = self._weights.view(outputs, inputs)

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

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide, weights = x.float(), self._bytes.view(torch.float8_e4m3fn)
        at_once = max(1, COPY_ELEMENTS // self.shape[1])  # they stay in the processor's caches
        parts = [F.linear(wide, part.float()) for part in torch.split(weights, at_once)]
        product = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(self._steps)
        return product if bias is None else product.add_(bias)


class RoundedRows:
    """Copy target for some rows of a matrix that rounds its weights."""

    def __init__(self, matrix: RoundedMatrix, first: int, count: int) -> None:
        self._matrix, self._first, self._count = matrix, first, count

    def copy_(self, source: torch.Tensor, /, whole: torch.Tensor | None = None) -> None:
        """Round and store ``source``; if it is columns of ``whole``, with the bits that they get
        when all of ``whole`` is rounded."""
        if tuple(source.shape) != (self._count, self._matrix.shape[1]):
            raise ValueError(f"{list(source.shape)} is not the shape of {self._count} rows")
        self._matrix.put(self._first, source, whole)

    def take_over(self, other: "RoundedRows", /) -> None:
        """Copy the rounded rows of ``other`` unchanged. Rounding them again from bfloat16 would
        give other steps, and other weights than a full update."""
        numbers, steps = other._matrix.take_rounded(other._numbers())
        self._matrix.put_rounded(self._first, numbers, steps)

    def unpacked(self) -> torch.Tensor:
        """Return a copy of the rounded rows."""
        return self._matrix.take(self._numbers())

    def storages(self) -> list[torch.Tensor]:
        """Return the storage tensor that contains these rows and others."""
        return [self._matrix.storage]

    element_dtype = None
    """Single elements can't be changed: they are rounded by their row's largest."""

    is_rounded = True

    def add_bits(self, index: torch.Tensor, difference: torch.Tensor) -> bool:
        """Raise ValueError: single elements can't be changed."""
        raise ValueError("the elements are rounded by their row's largest")

    def _numbers(self) -> torch.Tensor:
        return torch.arange(self._first, self._first + self._count)


def make_int8_matrix(outputs: int, inputs: int, dtype: torch.dtype) -> Int8Matrix:
    """Allocate an int8 matrix for activations of ``dtype``."""
    return Int8Matrix(outputs, inputs, dtype, library())
