"""Entries of an attachment by context position, beside the blocks of the KV cache.

A shared block keeps the entries of its positions beside their keys and values, so a turn that finds
its prefix in the prefix cache need not compute the prefix again. They take little memory: the
experts of Qwen3-30B-A3B are 384 bytes per position, its keys and values 98,304.

Letters in shapes: N positions of a step, P of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Entries = npt.NDArray[np.uint8 | np.uint16]
"""[P, *shape], of the dtypes that an attachment by position may have."""


class Positions(NamedTuple):
    """Context positions ``[start, end)`` of one sequence."""

    block_table: Sequence[int]
    start: int
    end: int


class PositionCache:
    """An entry for every slot of a KV cache; allocated by the first step that records any."""

    def __init__(self, num_blocks: int, block_tokens: int, value_max: int) -> None:
        """``value_max``: largest value of an entry."""
        self._num_slots = num_blocks * block_tokens
        self._block_tokens = block_tokens
        self._dtype = np.min_scalar_type(max(value_max, 0))
        self._entries: Entries = np.empty(0, np.uint8)

    def write(self, slots: npt.NDArray[np.int64], entries: npt.NDArray[Any]) -> None:
        """Store the entries [N, *shape] of the positions in KV ``slots`` [N]."""
        if not self._entries.size:
            self._entries = np.zeros((self._num_slots, *entries.shape[1:]), self._dtype)
        self._entries[slots] = entries

    def read(self, rows: Sequence[Positions]) -> list[Entries]:
        """Return the entries [P, *shape] of each row's positions."""
        slots = [self._slots_of(row) for row in rows]
        ends = np.cumsum([len(part) for part in slots])
        return np.split(self._entries[np.concatenate(slots)], ends[:-1]) if rows else []

    def _slots_of(self, row: Positions) -> npt.NDArray[np.int64]:
        block, offset = np.divmod(np.arange(row.start, row.end), self._block_tokens)
        return np.asarray(row.block_table, np.int64)[block] * self._block_tokens + offset
