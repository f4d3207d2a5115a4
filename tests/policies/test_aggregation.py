"""Tests that means weigh tokens as promised, padded or packed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.policies.ragged import Ragged, assert_laid_out, ragged
from tidegate.policies.aggregation import (
    Sequences,
    mean_by_prompt,
    mean_by_sequence,
    mean_by_token,
)


@settings(deadline=None)
@given(ragged)
def test_the_three_means_agree_with_numpy(batch: Ragged) -> None:
    groups = np.arange(len(batch.masks)) % 2 + 7
    pooled = [
        np.concatenate([x for x, g in zip(batch.tokens, groups, strict=True) if g == group])
        for group in np.unique(groups)
    ]
    of_rows = [x.mean() for x in batch.tokens if len(x)]
    of_prompts = [x.mean() for x in pooled if len(x)]

    for layout in batch.layouts():
        values, mask, row_ids = layout.lay(batch.values), layout.mask, layout.row_ids
        by_token = mean_by_token(values, mask)
        by_sequence = mean_by_sequence(values, mask, row_ids=row_ids)
        by_prompt = mean_by_prompt(values, mask, torch.tensor(groups), row_ids=row_ids)

        assert by_token.item() == pytest.approx(batch.flat().mean() if of_rows else 0.0)
        assert by_sequence.item() == pytest.approx(np.mean(of_rows) if of_rows else 0.0)
        assert by_prompt.item() == pytest.approx(np.mean(of_prompts) if of_rows else 0.0)


def test_micro_batches_add_up_when_given_the_whole_batchs_count() -> None:
    torch.manual_seed(0)
    values, mask, groups = torch.randn(4, 3), torch.rand(4, 3) < 0.7, torch.tensor([0, 0, 1, 1])
    halves = (slice(0, 2), slice(2, 4))

    by_token = sum(
        mean_by_token(values[h], mask[h], tokens_in_batch=int(mask.sum())) for h in halves
    )
    by_sequence = sum(mean_by_sequence(values[h], mask[h], sequences_in_batch=4) for h in halves)
    by_prompt = sum(
        mean_by_prompt(values[h], mask[h], groups[h], prompts_in_batch=2) for h in halves
    )

    torch.testing.assert_close(by_token, mean_by_token(values, mask))
    torch.testing.assert_close(by_sequence, mean_by_sequence(values, mask))
    torch.testing.assert_close(by_prompt, mean_by_prompt(values, mask, groups))


def test_the_means_pass_on_gradients_but_none_to_what_is_no_token() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    values = torch.randn(2, 2, dtype=torch.float64).where(mask, torch.nan).requires_grad_()

    torch.autograd.backward(mean_by_sequence(values, mask))

    assert values.grad is not None
    assert values.grad.tolist() == [[0.5, 0.0], [0.25, 0.25]]
    assert torch.autograd.gradcheck(
        lambda x: mean_by_prompt(x, mask, torch.tensor([1, 1])),
        values.detach().nan_to_num().requires_grad_(),
    )


@settings(deadline=None)
@given(ragged)
def test_a_sequences_value_lands_on_its_last_token(batch: Ragged) -> None:
    per_row = np.arange(1.0, len(batch.masks) + 1)
    expected = []
    for value, mask in zip(per_row, batch.masks, strict=True):
        row = np.zeros(len(mask))
        if mask.any():
            row[np.flatnonzero(mask)[-1]] = value
        expected.append(row)

    for layout in batch.layouts():
        sequences = Sequences(layout.mask, layout.row_ids)

        assert_laid_out(sequences.at_last_token(torch.tensor(per_row)), expected, layout)


def test_interleaved_sequences_are_distinguished() -> None:
    row_ids = torch.tensor([1, 0, 1, 0, 1])
    sequences = Sequences(torch.tensor([1, 1, 0, 1, 1]), row_ids)

    assert sequences.sum(torch.tensor([1.0, 10.0, 99.0, 20.0, 2.0])).tolist() == [30.0, 3.0]
    assert sequences.positions().tolist() == [0, 0, 0, 1, 1]


def test_a_long_sum_in_float32_keeps_its_digits() -> None:
    """In float32 2^24 + 1 is 2^24: a running sum would lose every one of these."""
    values = torch.ones(1, 1001)
    values[0, 0] = 2.0**24

    assert Sequences(torch.ones(1, 1001)).sum(values).item() == 2.0**24 + 1000


@pytest.mark.parametrize("rows", [0, 2])
def test_sequences_without_positions_have_a_mean_of_zero(rows: int) -> None:
    mask = torch.zeros(rows, 0, dtype=torch.bool)

    assert mean_by_sequence(torch.zeros(rows, 0), mask) == 0
    assert Sequences(mask).mean(torch.zeros(rows, 0)).tolist() == [0.0] * rows


def test_layouts_and_denominators_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="need row_ids"):
        Sequences(torch.ones(3))
    with pytest.raises(ValueError, match=r"shape \[3\], got \[2\]"):
        Sequences(torch.ones(3), torch.zeros(2))
    with pytest.raises(ValueError, match="each of the 2 sequences"):
        mean_by_prompt(torch.zeros(2, 1), torch.ones(2, 1), torch.zeros(3))
    with pytest.raises(ValueError, match="sequences_in_batch"):
        mean_by_sequence(torch.zeros(1, 1), torch.ones(1, 1), sequences_in_batch=0)
