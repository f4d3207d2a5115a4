"""Layout of a step's rows: their order, each token's row, and a padded array of block tables.

A layout depends on the rows' sizes only, and block tables change slowly, so both are reused from
step to step while sequences decode.

Letters in shapes: R rows, T tokens of all rows, B blocks of a row.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from operator import ne
from typing import NamedTuple

import numpy as np
import torch

from tidegate.kernels.attention import Ints

CONTEXT_LEVELS = [128 * 4**n for n in range(10)]
QUERY_LEVELS = [1, *(32 * 4**n for n in range(10))]
"""Limits of context and query lengths, in tokens. Rows between the same limits attend as one group,
padded to its longest: by a factor of 4 at most above the first limits. Below them padding costs
less than dispatching another group. Decode rows, of one query token, are a group of their own."""

AdapterVersion = tuple[str, int]
"""Name and version of a LoRA adapter that has weight versions of its own."""

AdapterKey = str | AdapterVersion
"""The adapter of a row: a name if it is part of the weights, empty for none; or its version."""


def padding_kind(tokens: int, end: int) -> int:
    """Return a number that is equal for rows that may be padded together; decode sorts first."""
    return bisect_left(QUERY_LEVELS, tokens) * (len(CONTEXT_LEVELS) + 1) + bisect_left(
        CONTEXT_LEVELS, end
    )


class RowSizes(NamedTuple):
    """The sizes that a layout depends on; each list is [R], in the order of the step's rows."""

    kinds: list[int]
    """Kind of each row; the layout sorts rows by it."""
    tokens: list[int]
    """Number of tokens of each row."""
    samples: list[bool]
    """Whether a token is sampled after each row."""
    scored: list[int]
    """Number of last tokens to score of each row."""
    adapters: list[AdapterKey]
    """Adapter of each row."""


@dataclass(frozen=True, slots=True)
class Range:
    """Successive rows of one kind, in the layout's order."""

    kind: int
    first_row: int
    end_row: int
    first_token: int
    end_token: int

    @property
    def has_single_tokens(self) -> bool:
        """Whether each row has exactly one token."""
        return self.end_token - self.first_token == self.end_row - self.first_row


class StepLayout:
    """Order of a step's rows, and the row and index of each token."""

    def __init__(self, sizes: RowSizes) -> None:
        self.sizes = sizes
        order = np.argsort(sizes.kinds, kind="stable")
        self.order: list[int] = order.tolist()
        """[R], index of each ordered row in the step's rows, sorted by kind."""
        self.counts: Ints = np.array(sizes.tokens)[order]
        """[R], tokens of each ordered row; the attributes below are in the same order."""
        first_tokens = np.cumsum(self.counts) - self.counts
        self.row_of_token: Ints = np.repeat(np.arange(order.size), self.counts)
        """[T], row of each token."""
        self.token_indices: Ints = np.arange(self.counts.sum()) - first_tokens[self.row_of_token]
        """[T], index of each token within its row."""
        self.ranges = _ranges(np.array(sizes.kinds)[order], first_tokens, self.row_of_token.size)
        last_tokens = np.empty_like(first_tokens)
        last_tokens[order] = first_tokens + self.counts - 1
        self.output_tokens = torch.from_numpy(_output_tokens(sizes, last_tokens))
        """Indices of the tokens whose hidden states are needed: those to sample after,
        then those to score."""
        self.outputs_all_tokens = np.array_equal(
            self.output_tokens, np.arange(self.row_of_token.size)
        )
        """Whether ``output_tokens`` are all tokens, in order."""
        self.adapters = _adapters([sizes.adapters[n] for n in self.order], self.row_of_token)
        """Key and token indices of each adapter in the step; None as indices means all tokens."""


class BlockTables:
    """The rows' block tables as one padded array, reused from step to step.

    A row of the array is rewritten only if its blocks differ from those written last.
    """

    def __init__(self) -> None:
        self._array: Ints = np.zeros((0, 0), np.int64)
        self._written: list[list[int]] = []
        """Blocks in each row of the array, without padding."""

    def of(self, tables: Sequence[list[int]]) -> Ints:
        """Return all tables, [R, B], padded with block 0; valid until the next call."""
        rows, blocks = self._array.shape
        blocks_max = max(map(len, tables))
        if len(tables) > rows or blocks_max > blocks:
            # Twice as wide, because contexts grow in every step.
            size = max(len(tables), rows), blocks if blocks_max <= blocks else 2 * blocks_max
            self._array = np.zeros(size, np.int64)
            self._written = [[] for _ in range(size[0])]
        for row in compress(range(len(tables)), map(ne, tables, self._written)):
            table = tables[row]
            self._array[row, : len(table)] = table
            self._array[row, len(table) :] = 0
            self._written[row] = table.copy()
        return self._array[: len(tables)]


def _ranges(kinds: Ints, first_tokens: Ints, tokens: int) -> list[Range]:
    """Cut the ordered rows where their kind changes."""
    cuts = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), kinds.size]
    token_cuts = [*first_tokens[cuts[:-1]].tolist(), tokens]
    return [
        Range(int(kinds[row_range[0]]), *row_range, *token_range)
        for row_range, token_range in zip(pairwise(cuts), pairwise(token_cuts), strict=True)
    ]


def _output_tokens(sizes: RowSizes, last_tokens: Ints) -> Ints:
    """Return ``StepLayout.output_tokens``; ``last_tokens`` [R] are the rows' last tokens, in the
    step's order."""
    scored = [
        np.arange(last + 1 - count, last + 1)
        for last, count in zip(last_tokens.tolist(), sizes.scored, strict=True)
        if count
    ]
    return np.concatenate([last_tokens[np.array(sizes.samples)], *scored])


def _adapters(
    keys: Sequence[AdapterKey], row_of_token: Ints
) -> list[tuple[AdapterKey, torch.Tensor | None]]:
    distinct = dict.fromkeys(keys)
    if len(distinct) == 1:
        return [(key, None) for key in distinct if key]
    adapters: list[tuple[AdapterKey, torch.Tensor | None]] = []
    for key in distinct:
        if key:
            token_indices = np.array([other == key for other in keys])
            adapters.append((key, torch.from_numpy(np.flatnonzero(token_indices[row_of_token]))))
    return adapters
