"""Weight matrices and their products: as published, for torch, or packed into panels, for C++.

On a GPU, matrices stay as published. Other layouts are in ``exact_matrix.py`` and
``rounded_matrix.py``. weight_matrix.cpp is faster than torch except where the processor multiplies
tiles of bfloat16 (AMX): at a decode step's size two to five times in float32, and in bfloat16 1.4
to 3.4 times with AVX-512's paired products, and five to twenty times without. A packed matrix sums
each output in one order, so a row has the same bits in every batch; torch's products do not.

Letters in shapes: T tokens, N outputs, K inputs, R rows.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tidegate.kernels.compiled import DTYPES, INT, POINTER, function, library, processor

TILES = "amx_bf16"
"""Processor flag (AMX) with which torch multiplies bfloat16 faster than vector code can."""

COPY_ELEMENTS = 1 << 18
"""Elements converted at a time while packing: 1 MB of float32 stays in the caches."""

ARGUMENTS: dict[str, list[Any]] = {
    "tg_multiply": [POINTER] * 4 + [INT] * 5,
    "tg_pack": [POINTER] * 2 + [INT] * 3,
    "tg_take": [POINTER] * 3 + [INT] * 2,
    "tg_add_bits": [POINTER, INT] + [POINTER] * 2 + [INT] * 2 + [POINTER],
    "tg_add_bits_plain": [POINTER] * 3 + [INT, POINTER],
}


class PackedWeightRows(Protocol):
    """Copy target for some rows of a matrix with a layout of its own."""

    def copy_(self, source: torch.Tensor, /) -> object:
        """Store ``source``, cast to the matrix's dtype."""

    def take_over(self, other: Any, /) -> None:
        """Copy the rows of ``other``, of a matrix with the same layout, bit by bit."""

    def unpacked(self) -> torch.Tensor:
        """Return a copy in the published layout."""

    def storages(self) -> list[torch.Tensor]:
        """Return the storage tensors that contain these rows and others."""

    @property
    def element_dtype(self) -> torch.dtype | None:
        """Dtype of the stored elements if :meth:`add_bits` can change single ones, else None."""

    @property
    def is_rounded(self) -> bool:
        """Whether elements are stored rounded, so that their published bits are lost."""

    def add_bits(self, index: torch.Tensor, difference: torch.Tensor) -> bool | None:
        """As :meth:`PackedMatrix.add_bits`, for these rows; None if nothing was changed, because
        they are not stored so now."""


Rows = torch.Tensor | PackedWeightRows
"""Copy target for some rows of a matrix; a view in a plain one."""


def published(rows: Rows) -> torch.Tensor:
    """Return the rows in their published layout; possibly a copy, not to be written to."""
    return rows if isinstance(rows, torch.Tensor) else rows.unpacked()


def take_over(target: Rows, source: Rows) -> None:
    """Copy the rows ``source`` to ``target``, of matrices with the same layout."""
    if isinstance(target, torch.Tensor):
        target.copy_(published(source))
    else:
        target.take_over(source)


SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype of each element size in bytes."""


def add_bits(rows: Rows, index: torch.Tensor, difference: torch.Tensor, dtype: torch.dtype) -> bool:
    """Add to the bits that elements have in the published ``dtype``, which wrap around.

    The result is that of copying the whole changed tensor. Rows that are stored in a wider dtype
    are narrowed and widened again, which is exact.

    Args:
        rows: the rows to change.
        index: [C], int64, distinct elements of the rows, in row-major order.
        difference: [C], integers of the published dtype's size.
        dtype: published dtype.

    Returns:
        Whether all results are finite.

    Raises:
        ValueError: the stored elements are not those of the published dtype, but rounded.
    """
    if isinstance(rows, torch.Tensor):
        if rows.dtype == dtype and rows.is_contiguous():
            return _add_to(rows, index.to(rows.device), difference.to(rows.device))
    elif rows.element_dtype == dtype:
        is_finite = rows.add_bits(index, difference)
        if is_finite is not None:
            return is_finite
    stored = published(rows)
    elements = stored.to(dtype)
    is_rounded = not isinstance(rows, torch.Tensor) and rows.is_rounded
    is_rounded |= elements.element_size() > stored.element_size()
    if is_rounded or not torch.equal(elements.to(stored.dtype), stored):
        raise ValueError(f"{dtype} elements are stored rounded")
    if elements.data_ptr() == stored.data_ptr():
        elements = elements.clone()
    elements = elements.contiguous()
    are_finite = _add_to(elements, index.to(elements.device), difference.to(elements.device))
    rows.copy_(elements)
    return are_finite


def _add_to(tensor: torch.Tensor, index: torch.Tensor, difference: torch.Tensor) -> bool:
    functions = library() if tensor.device.type == "cpu" and tensor.dtype in DTYPES else None
    if functions is not None:
        name, not_finite = "tg_add_bits_plain", torch.zeros(1, dtype=torch.int64)
        add = function(functions, name, ARGUMENTS[name], tensor.dtype)
        places = tensor.data_ptr(), index.data_ptr(), difference.data_ptr()
        add(*places, index.numel(), not_finite.data_ptr())
        return not bool(not_finite)
    bits = tensor.view(-1).view(SAME_SIZE[tensor.element_size()])
    bits[index] += difference
    return bool(tensor.view(-1)[index].isfinite().all())


def storages(rows: Rows) -> list[torch.Tensor]:
    """Return the storage tensors that contain these rows and others, to move or save them."""
    return [rows] if isinstance(rows, torch.Tensor) else rows.storages()


class Panels(NamedTuple):
    """Packed weights, as weight_matrix.cpp reads them."""

    weights: torch.Tensor
    scales: torch.Tensor | None
    """[N], float32, of int8 weights; else None."""


class Matrix:
    """A weight matrix [N, K] for activations of its dtype."""

    shape: tuple[int, int]
    dtype: torch.dtype
    storage: torch.Tensor
    """All of the matrix's memory, to move or save it; its layout is private."""

    @property
    def panels(self) -> Panels | None:
        """Packed weights, valid while the matrix exists; None without compiled code."""
        return None

    def rows(self, first: int, count: int) -> Rows:
        """Return the copy target of rows ``[first, first + count)``."""
        raise NotImplementedError

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs [T, N] of ``x`` [T, K], with ``bias`` [N]."""
        out = x.new_empty((x.shape[0], self.shape[0]))
        self._multiply(x, out, bias, adds=False)
        return out

    def add_linear_(
        self, total: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Add :meth:`linear` to ``total`` [T, N] in place."""
        self._multiply(x, total, bias, adds=True)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, K] with these indices [R], which must be in range; embeds tokens."""
        raise NotImplementedError

    def unpacked(self) -> torch.Tensor:
        """Return the weights in their published layout, [N, K]; a copy or a view."""
        return self.take(torch.arange(self.shape[0]))

    def _multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, adds: bool
    ) -> None:
        """Write the outputs of ``x`` to ``out``, or add them to it."""
        raise NotImplementedError


class PlainMatrix(Matrix):
    """A matrix in its published layout, multiplied by torch."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.shape = (outputs, inputs)
        self.dtype = dtype
        self.storage = torch.empty(outputs, inputs, dtype=dtype)

    def rows(self, first: int, count: int) -> Rows:
        """Return the copy target of rows ``[first, first + count)``."""
        return self.storage[first : first + count]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs [T, N] of ``x`` [T, K], with ``bias`` [N]."""
        return F.linear(x, self.storage, bias)

    def add_linear_(
        self, total: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Add :meth:`linear` to ``total`` [T, N] in place."""
        total.addmm_(x, self.storage.t())  # one call and one buffer fewer
        if bias is not None:
            total.add_(bias)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, K] with these indices [R], which must be in range."""
        return F.embedding(rows, self.storage)

    def unpacked(self) -> torch.Tensor:
        """Return the weights [N, K]."""
        return self.storage


class PackedMatrix(Matrix):
    """A matrix in panels, multiplied by weight_matrix.cpp; all tensors contiguous, on the CPU."""

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, functions: ctypes.CDLL
    ) -> None:
        def bind(name: str) -> Callable[..., int]:
            return function(functions, name, ARGUMENTS[name], dtype)

        self._multiply_by = bind("tg_multiply")
        self._pack = bind("tg_pack")
        self._take = bind("tg_take")
        self._add_bits = bind("tg_add_bits")
        self.shape = (outputs, inputs)
        self.dtype = dtype
        panel = functions["tg_panel_outputs"]()
        stored = inputs + inputs % 2 if dtype == torch.bfloat16 else inputs
        self.storage = torch.empty(-(-outputs // panel) * panel * stored, dtype=dtype)
        # Padding is multiplied as well, and uninitialised memory may hold denormals or NaN.
        filled_rows = outputs // panel * panel if stored == inputs else 0
        self.storage[filled_rows * stored :] = 0.0

    @property
    def panels(self) -> Panels | None:
        """The packed weights; None without compiled code."""
        return Panels(self.storage, None)

    @property
    def element_dtype(self) -> torch.dtype | None:
        """Dtype of the stored elements if :meth:`add_bits` can change single ones, else None."""
        return self.dtype

    def rows(self, first: int, count: int) -> Rows:
        """Return the copy target of rows ``[first, first + count)``."""
        return _PackedRows(self, first, count)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [R, K] with these indices [R], which must be in range."""
        numbers, inputs = rows.long().contiguous(), self.shape[1]
        out = self.storage.new_empty((numbers.numel(), inputs))
        to, count = out.data_ptr(), numbers.numel()
        self._take(self.storage.data_ptr(), numbers.data_ptr(), to, count, inputs)
        return out

    def pack(self, first: int, source: torch.Tensor) -> None:
        """Pack ``source`` [R, K], of any dtype, into the rows from ``first`` on."""
        inputs = self.shape[1]
        at_once = max(1, COPY_ELEMENTS // inputs // 64) * 64  # whole panels
        for part in torch.split(source.detach(), at_once):
            rows = part.to(self.dtype).contiguous()
            self._pack(rows.data_ptr(), self.storage.data_ptr(), first, rows.shape[0], inputs)
            first += rows.shape[0]

    def add_bits(self, first: int, index: torch.Tensor, difference: torch.Tensor) -> bool | None:
        """Add to the bits of elements of the rows from ``first`` on, which wrap around.

        Args:
            first: first of the rows.
            index: [C], int64, distinct elements of these rows, in row-major order.
            difference: [C], integers of the dtype's size.

        Returns:
            Whether all results are finite; None if nothing was changed, because the elements are
            not stored in :attr:`element_dtype` now.
        """
        not_finite = torch.zeros(1, dtype=torch.int64)
        self._add_bits(
            self.storage.data_ptr(),
            first,
            index.data_ptr(),
            difference.data_ptr(),
            index.numel(),
            self.shape[1],
            not_finite.data_ptr(),
        )
        return not bool(not_finite)

    def _multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, adds: bool
    ) -> None:
        outputs, inputs = self.shape
        x = x.contiguous()  # a local reference, because the call gets only its address
        self._multiply_by(
            x.data_ptr(),
            self.storage.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            outputs,
            inputs,
            adds,
            torch.get_num_threads(),
        )


class _PackedRows:
    def __init__(self, matrix: PackedMatrix, first: int, count: int) -> None:
        self._matrix, self._first, self._count = matrix, first, count

    def copy_(self, source: torch.Tensor, /) -> None:
        if tuple(source.shape) != (self._count, self._matrix.shape[1]):
            raise ValueError(f"{list(source.shape)} is not the shape of {self._count} rows")
        self._matrix.pack(self._first, source)

    def take_over(self, other: PackedWeightRows, /) -> None:
        self.copy_(other.unpacked())

    def add_bits(self, index: torch.Tensor, difference: torch.Tensor) -> bool | None:
        return self._matrix.add_bits(self._first, index, difference)

    @property
    def element_dtype(self) -> torch.dtype | None:
        return self._matrix.element_dtype

    is_rounded = False

    def unpacked(self) -> torch.Tensor:
        return self._matrix.take(torch.arange(self._first, self._first + self._count))

    def storages(self) -> list[torch.Tensor]:
        return [self._matrix.storage]


def make_matrix(
    outputs: int, inputs: int, dtype: torch.dtype, *, is_packed: bool | None = None
) -> Matrix:
    """Allocate a matrix; ``is_packed`` chooses the layout, None the faster one on this machine.

    Without a compiler it is always plain.
    """
    functions = None if is_packed is False else library()
    is_packed = packs(dtype) if is_packed is None else is_packed
    if is_packed and functions is not None:
        return PackedMatrix(outputs, inputs, dtype, functions)
    return PlainMatrix(outputs, inputs, dtype)


def packs(dtype: torch.dtype) -> bool:
    """Whether matrices of ``dtype`` are faster packed on this machine, given a compiler."""
    if dtype == torch.bfloat16:
        return TILES not in processor().split()
    return dtype in DTYPES
