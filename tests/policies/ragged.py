"""Test data of the formulas: rows of tokens of any lengths, laid out padded or packed.

Rows come from hypothesis, or from a seed. In hypothesis's, masked positions hold NaN in every
layout, so a formula that lets them through fails.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
ROWS, TOKENS = 4, 7
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Layout:
    """One layout of the rows as tensors."""

    mask: Tensor
    row_ids: Tensor | None
    lay: Callable[[list[Array]], Tensor]
    """Lay one array per row out in the mask's shape, with NaN at masked positions."""


@dataclass(frozen=True)
class Ragged:
    """Rows of log-ratios, some positions of which are tokens."""

    values: list[Array]
    masks: list[NDArray[np.bool_]]

    @property
    def tokens(self) -> list[Array]:
        """Tokens of each row."""
        return [x[m] for x, m in zip(self.values, self.masks, strict=True)]

    def flat(self) -> Array:
        """Return the tokens of all rows."""
        return np.concatenate(self.tokens)

    def like(self, seed: int) -> list[Array]:
        """Return other numbers for the same positions."""
        rng = np.random.default_rng(seed)
        return [rng.normal(size=len(x)) for x in self.values]

    def layouts(self) -> Iterator[Layout]:
        """Yield the padded layout, then the packed one."""
        longest = max(len(m) for m in self.masks)
        mask = torch.zeros(len(self.masks), longest, dtype=torch.bool)
        for row, m in enumerate(self.masks):
            mask[row, : len(m)] = torch.tensor(m)

        def pad(rows: list[Array]) -> Tensor:
            out = torch.full(mask.shape, math.nan, dtype=torch.float64)
            for row, x in enumerate(rows):
                out[row, : len(x)] = torch.tensor(x)
            return out.where(mask, math.nan)

        yield Layout(mask, None, pad)
        packed = torch.tensor(np.concatenate(self.masks))
        row_ids = torch.tensor(np.repeat(np.arange(len(self.masks)), [len(m) for m in self.masks]))
        yield Layout(
            packed,
            row_ids,
            lambda rows: torch.tensor(np.concatenate(rows)).where(packed, math.nan),
        )

    def by_token(self, per_row: Callable[[Array], Array | float | bool]) -> list[Array]:
        """Apply a formula to each row's tokens; 0 at masked positions."""
        rows = []
        for x, m in zip(self.values, self.masks, strict=True):
            row = np.zeros(len(x))
            if m.any():
                row[m] = per_row(x[m])
            rows.append(row)
        return rows


def assert_laid_out(actual: Tensor, expected: list[Array], layout: Layout) -> None:
    """Compare with one array per row; masked positions must be 0."""
    wanted = layout.lay(expected).where(layout.mask, 0.0)
    assert actual.shape == layout.mask.shape
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-9, atol=1e-12)


thousandths = st.one_of(
    st.integers(-2, 2), st.integers(-900, 900), st.sampled_from([-50_000, -9_000, 9_000, 50_000])
)
"""Thousandths of a nat. No sum of them is within rounding error of the log of a bound, so both
implementations decide alike."""

rows = st.lists(st.tuples(thousandths, st.booleans()), min_size=1, max_size=5)


def _ragged(drawn: list[list[tuple[int, bool]]]) -> Ragged:
    return Ragged(
        values=[np.array([x / 1000 for x, _ in row]) for row in drawn],
        masks=[np.array([m for _, m in row]) for row in drawn],
    )


ragged = st.lists(rows, min_size=1, max_size=4).map(_ragged)
"""1 to 4 rows of 1 to 5 positions, any or all of which may be masked."""

ragged_with_tokens = ragged.filter(lambda batch: any(m.any() for m in batch.masks))


def random_batch(seed: int) -> Batch:
    """Return target, proximal, behaviour, advantages and mask; off-policy enough to reach every
    branch."""
    torch.manual_seed(seed)
    behaviour = -torch.rand(ROWS, TOKENS, dtype=torch.float64) * 3
    proximal = behaviour + 0.8 * torch.randn(ROWS, TOKENS, dtype=torch.float64)
    target = proximal + 0.4 * torch.randn(ROWS, TOKENS, dtype=torch.float64)
    advantages = torch.randn(ROWS, 1, dtype=torch.float64)
    mask = torch.rand(ROWS, TOKENS) < 0.7
    return target, proximal, behaviour, advantages, mask
