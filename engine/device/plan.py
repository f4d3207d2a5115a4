"""Index arrays of one GPU step, built on the host: token ids, positions, KV slots and block tables.

``DeviceRunner`` uploads them in one transfer. Rows of one token come first: attention launches them
separately and splits their context, because each has one query and a long context.

Letters in shapes: R rows of a group, T tokens, B blocks of a row, S output tokens.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.device.devices import CPU
from tidegate.engine.execution.runner import DecodeRows, Row, decode_sizes, sizes_of
from tidegate.engine.execution.step_layout import BlockTables, Range, StepLayout
from tidegate.kernels.attention import Ints
from tidegate.kernels.optional_triton import next_power_of_2
from tidegate.kernels.paged_attention import PagedRows
from tidegate.kernels.rope_write import NO_SLOT

TABLE_BLOCKS_MIN = 16
"""Smallest width of a block table. All widths are powers of two from 16 on, hence multiples of 16:
Triton compiles a kernel once for such strides, and again for other strides."""

SINGLE, SEVERAL = range(2)
"""Kinds of rows: of one token, and of several."""

ALIGNMENT_BYTES = 16
"""Alignment of uploaded arrays; Triton compiles a kernel anew for pointers with less."""

DTYPES: dict[Any, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Upload:
    """A reused pair of buffers, pinned on the host and on the device, for one transfer per step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_unused = True
        """Whether nothing has been sent. Arrays of the same sizes land at the same addresses."""
        self._grow(1 << 16)

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copy the arrays to the device; the returned tensors are valid until the next call."""
        self.is_unused = False
        sizes = [-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays]
        *starts, end = accumulate(sizes, initial=0)
        if end > self._host_buffer.numel():
            self._grow(max(end, 2 * self._host_buffer.numel()))
        host_bytes = self._host_buffer.numpy()
        for start, array in zip(starts, arrays, strict=True):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host_bytes[start : start + array.nbytes] = raw
        self._device_buffer[:end].copy_(self._host_buffer[:end], non_blocking=True)
        return [
            self._device_buffer[start : start + array.nbytes]
            .view(DTYPES[array.dtype])
            .view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _grow(self, nbytes: int) -> None:
        is_pinned = self._device.type != CPU
        self._host_buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._device_buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Rows whose attention is one launch."""

    first_token: int
    end_token: int
    rows: PagedRows


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Index tensors of one step, on the device."""

    token_ids: torch.Tensor
    """Tokens to compute, row after row, [T] int64."""
    positions: torch.Tensor
    """[T], int64, context position of each token."""
    slots: torch.Tensor
    """[T], int64, where keys and values are written: ``block * block_tokens + offset``."""
    output_tokens: torch.Tensor
    """[S], int64: indices of tokens whose next token is sampled, then of tokens to score."""
    groups: Sequence[TokenGroup]
    """Attention groups, in the order of their tokens; together they cover all T."""


class HostPlan:
    """Arrays of one step on the host, with sizes that launches need without reading the device."""

    def __init__(
        self, layout: StepLayout, token_ids: Ints, starts: Ints, tables: Ints, block: int
    ) -> None:
        """``token_ids`` [T], ``starts`` [R] and ``tables`` [R, B] are in the layout's order;
        ``block`` is the number of tokens of a block."""
        positions = starts[layout.row_of_token] + layout.token_indices
        block_indices, offsets = np.divmod(positions, block)
        slots = tables[layout.row_of_token, block_indices] * block + offsets
        self.arrays: list[npt.NDArray[Any]] = [
            token_ids,
            positions,
            slots,
            layout.output_tokens.numpy(),
        ]
        self._ranges = layout.ranges
        self._counts_max: list[int] = []
        is_decoding = layout.outputs_all_tokens and all(layout.sizes.samples)
        self.decode_rows = len(starts) if is_decoding and not any(layout.sizes.scored) else 0
        """Number of rows if each has one token, which is sampled after; 0 if a row differs."""
        for part in layout.ranges:
            self._add_group(part, layout.counts, starts, tables, block)

    def _add_group(
        self, part: Range, counts: Ints, starts: Ints, tables: Ints, block_tokens: int
    ) -> None:
        rows = slice(part.first_row, part.end_row)
        ends = starts[rows] + counts[rows]
        blocks = -(-int(ends.max()) // block_tokens)
        width = max(TABLE_BLOCKS_MIN, next_power_of_2(blocks))
        table = np.zeros((part.end_row - part.first_row, width), np.int32)
        table[:, :blocks] = tables[rows, :blocks]
        offsets = np.concatenate([[0], np.cumsum(counts[rows])])
        self.arrays += [offsets.astype(np.int32), starts[rows].astype(np.int32), table]
        # A power of two, because the grid size is a specialisation too; surplus tiles exit at once.
        self._counts_max.append(next_power_of_2(int(counts[rows].max())))

    @property
    def table_blocks(self) -> int:
        """Width of the block table of a step that only decodes."""
        return int(self.arrays[-1].shape[1])

    def padded(self, rows: int) -> "HostPlan":
        """Return a decode step's plan with further rows, up to ``rows``, that change nothing."""
        more = rows - self.decode_rows
        token_ids, positions, slots, output_tokens, _, starts, table = self.arrays
        made = copy(self)
        made.decode_rows = rows
        made.arrays = [
            np.pad(token_ids, (0, more)),
            np.pad(positions, (0, more)),
            np.pad(slots, (0, more), constant_values=NO_SLOT),
            np.pad(output_tokens, (0, more)),
            np.arange(rows + 1, dtype=np.int32),
            np.pad(starts, (0, more)),
            np.pad(table, ((0, more), (0, 0))),
        ]
        (part,) = self._ranges
        made._ranges = [replace(part, end_row=rows, end_token=rows)]
        return made

    def on_device(self, uploaded: Sequence[torch.Tensor]) -> DevicePlan:
        """Return the plan over ``uploaded``, the copies of ``arrays`` on the device."""
        groups = []
        for number, part in enumerate(self._ranges):
            offsets, starts, tables = uploaded[4 + 3 * number : 7 + 3 * number]
            rows = PagedRows(offsets, starts, tables, self._counts_max[number])
            groups.append(TokenGroup(part.first_token, part.end_token, rows))
        token_ids, positions, slots, output_tokens = uploaded[:4]
        return DevicePlan(token_ids, positions, slots, output_tokens, groups)


class HostPlanner:
    """Plans steps; reuses the layout and block tables of the step before."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._layout: StepLayout | None = None
        self._tables = BlockTables()

    def plan(self, rows: Sequence[Row]) -> HostPlan:
        """Build the index arrays of a step with these rows."""
        if isinstance(rows, DecodeRows):
            return self._plan_decodes(rows)
        sizes = sizes_of(rows, [SINGLE if len(row.token_ids) == 1 else SEVERAL for row in rows])
        if self._layout is None or self._layout.sizes != sizes:
            self._layout = StepLayout(sizes)
        ordered = [rows[n] for n in self._layout.order]
        tables = self._tables.of([row.block_table for row in ordered])
        starts = np.array([row.start for row in ordered], np.int64)
        token_ids = np.concatenate([row.token_ids for row in ordered], dtype=np.int64)
        return HostPlan(self._layout, token_ids, starts, tables, self._block_tokens)

    def _plan_decodes(self, rows: DecodeRows) -> HostPlan:
        sizes = decode_sizes(len(rows), SINGLE)
        if self._layout is None or self._layout.sizes != sizes:
            self._layout = StepLayout(sizes)
        tables = self._tables.of(rows.block_tables)
        token_ids, starts = rows.columns.token_ids, rows.columns.positions
        return HostPlan(self._layout, token_ids, starts, tables, self._block_tokens)
