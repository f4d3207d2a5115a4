"""Routed experts of the context positions in the KV cache, beside the cache's blocks.

A shared block keeps the routed experts of its positions beside their keys and values, so a turn
that finds its prefix in the prefix cache need not compute the prefix again. Routed experts take
little memory: 384 bytes per position for Qwen3-30B-A3B, whose keys and values take 98,304.

Letters in shapes: N positions of a step, P of a row, L mixture layers, k experts per token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

UINT8_EXPERTS_MAX = 256
"""Largest number of experts whose ids fit a byte."""

Experts = npt.NDArray[np.uint8 | np.uint16]
"""Routed experts [P, L, k]: ids in the order in which the router chose them."""


class Positions(NamedTuple):
    """Context positions ``[start, end)`` of one sequence."""

    block_table: Sequence[int]
    start: int
    end: int


class RoutedExpertsCache:
    """Routed experts of every slot of a KV cache; allocated by the first step that records any."""

    def __init__(self, num_blocks: int, block_tokens: int, num_experts: int) -> None:
        self._slots = num_blocks * block_tokens
        self._block_tokens = block_tokens
        self._dtype = np.uint8 if num_experts <= UINT8_EXPERTS_MAX else np.uint16
        self._experts: Experts = np.empty((0, 0, 0), np.uint8)

    def write(self, slots: npt.NDArray[np.int64], experts: npt.NDArray[Any]) -> None:
        """Store the routed experts [N, L, k] of the positions in KV ``slots`` [N]."""
        if not self._experts.size:
            self._experts = np.zeros((self._slots, *experts.shape[1:]), self._dtype)
        self._experts[slots] = experts

    def read(self, rows: Sequence[Positions]) -> list[Experts]:
        """Return the routed experts [P, L, k] of each row's positions."""
        slots = [self.slots(row) for row in rows]
        ends = np.cumsum([len(part) for part in slots])
        return np.split(self._experts[np.concatenate(slots)], ends[:-1]) if rows else []

    def slots(self, row: Positions) -> npt.NDArray[np.int64]:
        """Return the KV slots [P] of a row's positions."""
        block, offset = np.divmod(np.arange(row.start, row.end), self._block_tokens)
        return np.asarray(row.block_table, np.int64)[block] * self._block_tokens + offset
