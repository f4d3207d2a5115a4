"""How does a weight matrix lie in memory, and how is a step multiplied by it?

As published, for torch; or packed, for weight_matrix.cpp, which is faster than torch but where the
processor multiplies tiles of bfloat16 (AMX): at a decode step's size two to five times in float32,
and in bfloat16 1.4 to 3.4 times where it adds up pairs of products (AVX-512) and five to twenty
where it has nothing for them. What it is for is not known here.

A packed matrix computes each of its outputs in one order of additions, whatever tokens are beside:
rows of a product are the same bits in every batch. torch's are not.

Letters in shapes: T tokens, N outputs, K inputs.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tidegate.kernels.compiled import DTYPES, INT, POINTER, function, library, processor

TILES = "amx_bf16"
"""With these torch multiplies bfloat16 faster than vectors can."""

COPY_ELEMENTS = 1 << 18
"""Converted at once while packing, about: 1 MB of float32 stays in the caches."""

ARGUMENTS: dict[str, list[Any]] = {
    "tg_multiply": [POINTER] * 4 + [INT] * 5,
    "tg_pack": [POINTER] * 2 + [INT] * 3,
    "tg_take": [POINTER] * 3 + [INT] * 2,
}


class HiddenRows(Protocol):
    """Some rows of a matrix that lie in an order of its own."""

    def copy_(self, source: torch.Tensor, /) -> object:
        """Put ``source`` there, cast to the matrix's dtype."""

    def take_over(self, other: Any, /) -> None:
        """Put there what ``other`` holds, rows of a matrix made like theirs: to the bit."""

    def unpacked(self) -> torch.Tensor:
        """A copy, as published."""

    def storages(self) -> list[torch.Tensor]:
        """All the memory that they lie in, with others."""


Rows = torch.Tensor | HiddenRows
"""Where some rows of a matrix go; in a plain one, a view of it."""


def published(rows: Rows) -> torch.Tensor:
    """What lies there, as it was published. Maybe a copy, not to be written to."""
    return rows if isinstance(rows, torch.Tensor) else rows.unpacked()


def take_over(target: Rows, source: Rows) -> None:
    """Put into ``target`` what lies in ``source``, rows of a matrix made like its own."""
    if isinstance(target, torch.Tensor):
        target.copy_(published(source))
    else:
        target.take_over(source)


def storages(rows: Rows) -> list[torch.Tensor]:
    """All the memory that they lie in, with others: for whoever moves or saves that."""
    return [rows] if isinstance(rows, torch.Tensor) else rows.storages()


class Panels(NamedTuple):
    """Weights as weight_matrix.cpp multiplies activations of the matrix's dtype by them."""

    weights: torch.Tensor
    scales: torch.Tensor | None
    """[N], float32, of weights in int8."""


class Matrix(Protocol):
    """A weight matrix [N, K]. What it is multiplied by has its dtype."""

    shape: tuple[int, int]
    dtype: torch.dtype
    storage: torch.Tensor
    """All of its memory, for whoever moves or saves that; what lies where is the matrix's own."""

    @property
    def panels(self) -> Panels | None:
        """Where they are, for as long as it lives; None where others multiply by it."""

    def rows(self, first: int, count: int) -> Rows:
        """Where the rows ``[first, first + count)`` go."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs [T, N] of ``x`` [T, K], with ``bias`` [N]."""

    def add_linear_(
        self, total: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Add :meth:`linear` to ``total`` [T, N]."""

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows [R, K] by their numbers [R], in range: what embeds tokens."""

    def unpacked(self) -> torch.Tensor:
        """As published: [N, K]. Maybe a copy, not to be written to."""


class PlainMatrix:
    """One that lies as published, and is multiplied by torch."""

    panels = None

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.shape = (outputs, inputs)
        self.dtype = dtype
        self.storage = torch.empty(outputs, inputs, dtype=dtype)

    def rows(self, first: int, count: int) -> Rows:
        """Where the rows ``[first, first + count)`` go."""
        return self.storage[first : first + count]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs [T, N] of ``x`` [T, K], with ``bias`` [N]."""
        return F.linear(x, self.storage, bias)

    def add_linear_(
        self, total: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Add :meth:`linear` to ``total`` [T, N]."""
        total.addmm_(x, self.storage.t())  # one call and one buffer fewer
        if bias is not None:
            total.add_(bias)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows [R, K] by their numbers [R], in range."""
        return F.embedding(rows, self.storage)

    def unpacked(self) -> torch.Tensor:
        """As published: [N, K]."""
        return self.storage


class PackedMatrix:
    """One in panels, multiplied by weight_matrix.cpp. All tensors are contiguous, on the CPU."""

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, functions: ctypes.CDLL
    ) -> None:
        def found(name: str) -> Callable[..., int]:
            return function(functions, name, ARGUMENTS[name], dtype)

        self._multiply_by = found("tg_multiply")
        self._pack = found("tg_pack")
        self._take = found("tg_take")
        self.shape = (outputs, inputs)
        self.dtype = dtype
        panel = functions["tg_panel_outputs"]()
        stored = inputs + inputs % 2 if dtype == torch.bfloat16 else inputs
        self.storage = torch.empty(-(-outputs // panel) * panel * stored, dtype=dtype)
        # What fills panels up is multiplied as well, and garbage may be slow numbers, or none.
        filled_rows = outputs // panel * panel if stored == inputs else 0
        self.storage[filled_rows * stored :] = 0.0

    @property
    def panels(self) -> Panels | None:
        """Where its weights are."""
        return Panels(self.storage, None)

    def rows(self, first: int, count: int) -> Rows:
        """Where the rows ``[first, first + count)`` go."""
        return _PackedRows(self, first, count)

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
        """Some rows [R, K] by their numbers [R], in range."""
        numbers, inputs = rows.long().contiguous(), self.shape[1]
        out = self.storage.new_empty((numbers.numel(), inputs))
        to, count = out.data_ptr(), numbers.numel()
        self._take(self.storage.data_ptr(), numbers.data_ptr(), to, count, inputs)
        return out

    def unpacked(self) -> torch.Tensor:
        """As published: [N, K]."""
        return self.take(torch.arange(self.shape[0]))

    def pack(self, first: int, source: torch.Tensor) -> None:
        """Put ``source`` [R, K], of any dtype, into the rows from ``first`` on."""
        inputs = self.shape[1]
        at_once = max(1, COPY_ELEMENTS // inputs // 64) * 64  # whole panels
        for part in torch.split(source.detach(), at_once):
            rows = part.to(self.dtype).contiguous()
            self._pack(rows.data_ptr(), self.storage.data_ptr(), first, rows.shape[0], inputs)
            first += rows.shape[0]

    def _multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, adds: bool
    ) -> None:
        outputs, inputs = self.shape
        x = x.contiguous()  # held while it is read: its address alone holds nothing
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

    def take_over(self, other: HiddenRows, /) -> None:
        self.copy_(other.unpacked())

    def unpacked(self) -> torch.Tensor:
        return self._matrix.take(torch.arange(self._first, self._first + self._count))

    def storages(self) -> list[torch.Tensor]:
        return [self._matrix.storage]


def make_matrix(
    outputs: int, inputs: int, dtype: torch.dtype, *, is_packed: bool | None = None
) -> Matrix:
    """Make room for a matrix; packed where that is faster, unless it is told.

    Also where ``is_packed`` is asked for there must be a compiler.
    """
    functions = None if is_packed is False else library()
    is_packed = packs(dtype) if is_packed is None else is_packed
    if is_packed and functions is not None:
        return PackedMatrix(outputs, inputs, dtype, functions)
    return PlainMatrix(outputs, inputs, dtype)


def packs(dtype: torch.dtype) -> bool:
    """Whether matrices of ``dtype`` had better be packed on this machine, for one that can."""
    if dtype == torch.bfloat16:
        return TILES not in processor().split()
    return dtype in DTYPES
