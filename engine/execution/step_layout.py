"""How do the rows of a step lie one after another? What their sizes alone say, and their blocks.

Knows no tokens and computes nothing of the model's. Turns that decode, step after step, have the
same sizes each time, and nearly the same blocks: what is made here is good for many steps.

Letters in shapes: R rows, T tokens of all rows, B blocks of a row.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from tidegate.kernels.attention import Ints

CONTEXT_LEVELS = [128 * 4**n for n in range(10)]
QUERY_LEVELS = [1, *(32 * 4**n for n in range(10))]
"""Rows between two levels are padded to each other: beyond the first, at most by a factor of 4.
Below it one more group would cost more in dispatch than the padding does; but rows of one query,
which decode, are a group of their own."""


def padding_kind(tokens: int, end: int) -> int:
    """Number a row so that those of one kind may be padded to each other; decode first."""
    return bisect_left(QUERY_LEVELS, tokens) * (len(CONTEXT_LEVELS) + 1) + bisect_left(
        CONTEXT_LEVELS, end
    )


class RowSizes(NamedTuple):
    """All that a layout follows from; each [R], in the order in which the rows are given."""

    kinds: list[int]
    """Rows of one kind are put together, in the order of kinds."""
    tokens: list[int]
    samples: list[bool]
    """Whether a token is sampled after the last."""
    scored: list[int]
    """So many of the last tokens are scored."""
    adapters: list[str]
    """Each row's, by name; empty: none."""


@dataclass(frozen=True, slots=True)
class Range:
    """Successive rows of one kind, once they are in order."""

    kind: int
    first_row: int
    end_row: int
    first_token: int
    end_token: int

    @property
    def has_single_tokens(self) -> bool:
        """Whether each row has one."""
        return self.end_token - self.first_token == self.end_row - self.first_row


class StepLayout:
    """Where each row's tokens are among a step's."""

    def __init__(self, sizes: RowSizes) -> None:
        self.sizes = sizes
        order = np.argsort(sizes.kinds, kind="stable")
        self.order: list[int] = order.tolist()
        """The rows as they are given, by kind."""
        self.counts: Ints = np.array(sizes.tokens)[order]
        """[R], in order, as all below."""
        firsts = np.cumsum(self.counts) - self.counts
        self.row_of_token: Ints = np.repeat(np.arange(order.size), self.counts)
        """[T]"""
        self.places: Ints = np.arange(self.counts.sum()) - firsts[self.row_of_token]
        """[T], of each token among its row's."""
        self.ranges = _ranges(np.array(sizes.kinds)[order], firsts, self.row_of_token.size)
        lasts = np.empty_like(firsts)
        lasts[order] = firsts + self.counts - 1
        self.asked = torch.from_numpy(_asked(sizes, lasts))
        """The tokens whose hidden states are asked for: to sample after, then those to score."""
        self.asks_all = np.array_equal(self.asked, np.arange(self.row_of_token.size))
        """Whether they are all, in order."""
        self.adapters = _adapters([sizes.adapters[n] for n in self.order], self.row_of_token)
        """Each adapter's tokens, by its name; None: all."""


class BlockTables:
    """The rows' blocks as one array, kept from step to step.

    A row is written anew where its blocks are not those that were written last, whoever's they are.
    """

    def __init__(self) -> None:
        self._array: Ints = np.zeros((0, 0), np.int64)
        self._written: list[list[int]] = []
        """What is in each row of it, before padding."""

    def of(self, tables: Sequence[list[int]]) -> Ints:
        """All of them, [R, B], padded with block 0; good until the next call."""
        rows, blocks = self._array.shape
        widest = max(map(len, tables))
        if len(tables) > rows or widest > blocks:
            # Twice as wide, for contexts grow in every step.
            size = max(len(tables), rows), blocks if widest <= blocks else 2 * widest
            self._array = np.zeros(size, np.int64)
            self._written = [[] for _ in range(size[0])]
        for row, table in enumerate(tables):
            if self._written[row] != table:
                self._array[row, : len(table)] = table
                self._array[row, len(table) :] = 0
                self._written[row] = table.copy()
        return self._array[: len(tables)]


def _ranges(kinds: Ints, firsts: Ints, tokens: int) -> list[Range]:
    """Cut the ordered rows where their kind changes."""
    cuts = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), kinds.size]
    token_cuts = [*firsts[cuts[:-1]].tolist(), tokens]
    return [
        Range(int(kinds[rows[0]]), *rows, *its)
        for rows, its in zip(pairwise(cuts), pairwise(token_cuts), strict=True)
    ]


def _asked(sizes: RowSizes, lasts: Ints) -> Ints:
    """``lasts`` [R] are the last tokens of the rows as they are given."""
    scored = [
        np.arange(last + 1 - count, last + 1)
        for last, count in zip(lasts.tolist(), sizes.scored, strict=True)
        if count
    ]
    return np.concatenate([lasts[np.array(sizes.samples)], *scored])


def _adapters(names: Sequence[str], row_of_token: Ints) -> list[tuple[str, torch.Tensor | None]]:
    used = dict.fromkeys(names)
    if len(used) == 1:
        return [(name, None) for name in used if name]
    found: list[tuple[str, torch.Tensor | None]] = []
    for name in filter(None, used):
        its = np.array([other == name for other in names])
        found.append((name, torch.from_numpy(np.flatnonzero(its[row_of_token]))))
    return found
