"""Tests that each correction is the published one, whatever masked positions hold."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.policies.ragged import Array, Ragged, assert_laid_out, ragged
from tidegate.policies import corrections

pytestmark = pytest.mark.slow

Formula = Callable[[Array], Array | float | bool]


def banded(w: Array | float, low: float, high: float) -> Array:
    return np.where((np.asarray(w) >= low) & (np.asarray(w) <= high), w, 0.0)


def geometric(x: Array) -> float:
    return float(np.prod(np.exp(x / len(x))))


BY_TOKEN: dict[str, Formula] = {
    "tis_token": lambda x: np.minimum(np.exp(x), 2.0),
    "mis_token": lambda x: banded(np.exp(x), 0.5, 2.0),
    "icepop": lambda x: banded(np.exp(x), 0.5, 5.0),
}
BY_SEQUENCE: dict[str, Formula] = {
    "tis_sequence": lambda x: min(float(np.prod(np.exp(x))), 2.0),
    "mis_sequence": lambda x: banded(float(np.prod(np.exp(x))), 0.5, 2.0),
    "mis_geometric": lambda x: banded(geometric(x), 0.999, 1.001),
    "geometric_mask": lambda x: 0.999 <= geometric(x) <= 1.001,
    "k3_mask": lambda x: bool(np.mean(np.exp(x) - 1 - x) <= 0.01),
    "veto_mask": lambda x: bool((np.exp(x) >= 1e-4).all()),
}


@pytest.mark.parametrize("name", BY_TOKEN)
@settings(deadline=None)
@given(batch=ragged)
def test_token_corrections_agree_with_numpy(name: str, batch: Ragged) -> None:
    expected = batch.by_token(BY_TOKEN[name])

    for layout in batch.layouts():
        actual = getattr(corrections, name)(layout.lay(batch.values), layout.mask)

        assert_laid_out(actual, expected, layout)


@pytest.mark.parametrize("name", BY_SEQUENCE)
@settings(deadline=None)
@given(batch=ragged)
def test_sequence_corrections_agree_with_numpy(name: str, batch: Ragged) -> None:
    expected = batch.by_token(BY_SEQUENCE[name])

    for layout in batch.layouts():
        log_ratio = layout.lay(batch.values)
        actual = getattr(corrections, name)(log_ratio, layout.mask, row_ids=layout.row_ids)

        assert_laid_out(actual, expected, layout)


def test_k3_is_a_sequences_mean_in_which_opposite_ratios_do_not_cancel() -> None:
    even = torch.full((1, 10), 0.1)  # each token's k3 is 0.005, their sum 0.05
    opposite = torch.tensor([[2.0, -2.0]])

    assert corrections.k3_mask(even, torch.ones(1, 10), k3_max=0.01).all()
    assert not corrections.k3_mask(opposite, torch.ones(1, 2)).any()
    assert corrections.geometric_mask(opposite, torch.ones(1, 2)).all()


@settings(deadline=None)
@given(batch=ragged)
def test_the_dppo_mask_agrees_with_numpy(batch: Ragged) -> None:
    behaviour = [-np.abs(x) for x in batch.like(0)]
    target = [np.minimum(q + x, 0.0) for q, x in zip(behaviour, batch.values, strict=True)]
    advantages = batch.like(1)
    expected = []
    for p, q, a, m in zip(target, behaviour, advantages, batch.masks, strict=True):
        shift = np.exp(p) - np.exp(q)
        outward = ((shift > 0.2) & (a > 0)) | ((shift < -0.2) & (a < 0))
        expected.append((m & ~outward).astype(float))

    for layout in batch.layouts():
        mu, signs = layout.lay(behaviour), layout.lay(advantages)
        actual = corrections.dppo_mask(layout.lay(target) - mu, layout.mask, mu, signs)

        assert_laid_out(actual, expected, layout)


def m2po_one_by_one(x: Array, advantages: Array, limit: float) -> list[bool]:
    """Reference: drop the farthest droppable token, one at a time, until the mean is at the
    limit."""
    keep = [True] * len(x)
    outward = [i for i in range(len(x)) if x[i] * advantages[i] > 0]
    for i in sorted(outward, key=lambda i: -abs(x[i])):
        if np.mean(x[keep] ** 2) <= limit:
            break
        keep[i] = False
        if not any(keep):
            break
    return keep


@settings(deadline=None)
@given(batch=ragged)
def test_the_m2po_mask_agrees_with_dropping_one_token_at_a_time(batch: Ragged) -> None:
    advantages = batch.like(2)
    flat = np.concatenate([a[m] for a, m in zip(advantages, batch.masks, strict=True)])
    keep = iter(m2po_one_by_one(batch.flat(), flat, 0.04))
    expected = [np.array([float(bool(m) and next(keep)) for m in row]) for row in batch.masks]

    for layout in batch.layouts():
        log_ratio, a = layout.lay(batch.values), layout.lay(advantages)

        assert_laid_out(corrections.m2po_mask(log_ratio, layout.mask, a), expected, layout)


EVERY = [*BY_TOKEN, *BY_SEQUENCE, "dppo_mask", "m2po_mask"]


def apply(name: str, log_ratio: Tensor, mask: Tensor, **settings: Any) -> Tensor:
    """Apply any of the corrections to padded rows, with arbitrary behaviour and advantages."""
    extra = {"dppo_mask": [-torch.ones_like(log_ratio)], "m2po_mask": []}.get(name)
    if extra is not None:
        extra.append(torch.ones_like(log_ratio))
    result = getattr(corrections, name)(log_ratio, mask, *(extra or []), **settings)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [-50.0, 50.0, -500.0, 500.0])
def test_one_token_far_away_gets_a_finite_weight(
    name: str, dtype: torch.dtype, log_ratio: float
) -> None:
    result = apply(name, torch.tensor([[log_ratio]], dtype=dtype), torch.ones(1, 1))

    assert 0 <= result.double().item() <= 5


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_where_there_are_no_tokens_nothing_counts(name: str, shape: tuple[int, int]) -> None:
    result = apply(name, torch.full(shape, math.nan), torch.zeros(shape))

    assert result.shape == shape
    assert not result.any()


@pytest.mark.parametrize("name", EVERY)
def test_no_gradient_passes(name: str) -> None:
    log_ratio = torch.zeros(1, 2, requires_grad=True)

    assert not apply(name, log_ratio, torch.ones(1, 2)).requires_grad


def test_the_default_bounds_are_the_published_ones() -> None:
    """Ratios just inside and just outside of each bound, one sequence each."""
    ratios = torch.tensor([[0.49], [0.51], [1.99], [2.01], [4.99], [5.01]], dtype=torch.float64)
    log_ratio, mask = ratios.log(), torch.ones(6, 1)
    within_2 = pytest.approx([0, 0.51, 1.99, 0, 0, 0])

    assert corrections.mis_token(log_ratio, mask).flatten().tolist() == within_2
    assert corrections.mis_sequence(log_ratio, mask).flatten().tolist() == within_2
    assert corrections.icepop(log_ratio, mask).flatten().tolist() == pytest.approx(
        [0, 0.51, 1.99, 2.01, 4.99, 0]
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tis_token", {"weight_max": 0.0}),
        ("tis_sequence", {"weight_max": -1.0}),
        ("mis_token", {"weight_min": 2.0, "weight_max": 2.0}),
        ("mis_sequence", {"weight_min": -0.1}),
        ("mis_geometric", {"weight_max": math.inf}),
        ("geometric_mask", {"weight_min": 1.1, "weight_max": 1.0}),
        ("icepop", {"weight_max": math.nan}),
        ("k3_mask", {"k3_max": 0.0}),
        ("veto_mask", {"weight_min": 0.0}),
        ("dppo_mask", {"shift_max": 1.0}),
        ("m2po_mask", {"second_moment_max": 0.0}),
    ],
)
def test_settings_that_can_not_work_are_refused_by_name(
    name: str, settings: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        apply(name, torch.zeros(1, 1), torch.ones(1, 1), **settings)


@pytest.mark.parametrize("name", EVERY)
def test_a_mask_of_another_shape_is_refused_rather_than_broadcast(name: str) -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\].*\[2, 3\]"):
        apply(name, torch.zeros(2, 3), torch.ones(2, 1))


@pytest.mark.parametrize("name", ["dppo_mask", "m2po_mask"])
def test_one_advantage_per_rollout_must_come_as_a_column(name: str) -> None:
    square = torch.zeros(3, 3)
    extra = [square] if name == "dppo_mask" else []

    assert getattr(corrections, name)(square, square + 1, *extra, torch.ones(3, 1)).all()
    with pytest.raises(ValueError, match=r"advantages\[:, None\]"):
        getattr(corrections, name)(square, square + 1, *extra, torch.ones(3))
