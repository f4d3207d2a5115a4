"""Tests that the diagnostics measure what they say, and separate staleness from engine faults."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.policies.ragged import Array, Ragged, ragged, ragged_with_tokens
from tidegate.policies.corrections import mis_token, tis_token
from tidegate.policies.diagnostics import (
    effective_sample_size,
    measure_mismatch,
    measure_mismatch_by_lag,
    token_lags,
)


def ess(w: Array) -> float:
    return float(w.sum() ** 2 / (len(w) * (w**2).sum())) if w.any() else 0.0


def mismatch_in_numpy(rows: list[Array], used: list[Array]) -> dict[str, float]:
    """Reference in numpy, from each row's log-ratios and weights, tokens only."""
    rows, used = [x for x in rows if len(x)], [u for u in used if len(u)]
    x, weights = np.concatenate(rows), np.concatenate(used)
    w = np.exp(x)
    return {
        "tokens": len(x),
        "ess": ess(w),
        "ess_clamped": ess(weights),
        "k1": np.mean(-x),
        "k2": np.mean(x**2 / 2),
        "k3": np.mean(np.expm1(x) - x),
        "chi2_token": np.mean(np.expm1(2 * x)),
        "chi2_seq": np.mean([np.expm1(2 * r.sum()) for r in rows]),
        "ppl_ratio": np.exp(np.mean([-r.mean() for r in rows])),
        "masked_share_token": np.mean(weights == 0),
        "masked_share_seq": np.mean([(u == 0).all() for u in used]),
    }


def close(expected: dict[str, float]) -> object:
    """With an absolute tolerance too, because k3 and chi2 are differences of numbers near 1."""
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(batch=ragged_with_tokens)
def test_the_mismatch_agrees_with_numpy(batch: Ragged) -> None:
    kept = [np.where((np.exp(x) >= 0.5) & (np.exp(x) <= 2), np.exp(x), 0) for x in batch.tokens]
    plain = mismatch_in_numpy(batch.tokens, [np.exp(x) for x in batch.tokens])
    masked = mismatch_in_numpy(batch.tokens, kept)

    for layout in batch.layouts():
        log_ratio, mask, row_ids = layout.lay(batch.values), layout.mask, layout.row_ids
        weight = mis_token(log_ratio, mask)

        assert asdict(measure_mismatch(log_ratio, mask, row_ids=row_ids)) == close(plain)
        with_weight = measure_mismatch(log_ratio, mask, row_ids=row_ids, weight=weight)
        assert asdict(with_weight) == close(masked)


@settings(deadline=None)
@given(batch=ragged)
def test_each_lag_bucket_is_the_mismatch_of_its_tokens_alone(batch: Ragged) -> None:
    trainer_version = 30
    rng = np.random.default_rng(0)
    lags = [rng.choice([0, 1, 4, 5, 8, 30], size=len(m)) for m in batch.masks]
    borders = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, 16), (17, None)]
    expected = []
    for low, high in borders:
        inside = [
            (g >= low) & (g <= (high or 30 if low else 0)) & m
            for g, m in zip(lags, batch.masks, strict=True)
        ]
        rows = [x[i] for x, i in zip(batch.values, inside, strict=True)]
        if any(i.any() for i in inside):
            expected.append((low, high, mismatch_in_numpy(rows, [np.exp(x) for x in rows])))

    for layout in batch.layouts():
        versions = layout.lay([30.0 - g for g in lags]).nan_to_num(nan=-1).int()
        buckets = measure_mismatch_by_lag(
            layout.lay(batch.values),
            layout.mask,
            versions,
            trainer_version=trainer_version,
            row_ids=layout.row_ids,
        )

        assert [(b.lag_min, b.lag_max) for b in buckets] == [
            (low, high) for low, high, _ in expected
        ]
        for bucket, (_, _, values) in zip(buckets, expected, strict=True):
            assert asdict(bucket.mismatch) == close(values)


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 0)])
def test_no_tokens_count_as_on_policy(shape: tuple[int, int]) -> None:
    nothing, mask = torch.full(shape, math.nan), torch.zeros(shape)

    mismatch = measure_mismatch(nothing, mask, weight=torch.zeros(shape))

    assert (mismatch.tokens, mismatch.ess, mismatch.ppl_ratio, mismatch.k3) == (0, 1.0, 1.0, 0.0)
    assert measure_mismatch_by_lag(nothing, mask, nothing, trainer_version=0) == ()


@pytest.mark.parametrize("log_ratio", [-50.0, 50.0])
def test_one_token_far_away_has_finite_diagnostics(log_ratio: float) -> None:
    x, mask = torch.tensor([[log_ratio]]), torch.ones(1, 1)

    mismatch = measure_mismatch(x, mask, weight=tis_token(x, mask))

    assert mismatch.ess == mismatch.ess_clamped == 1.0
    assert all(math.isfinite(value) for value in asdict(mismatch).values())


def test_a_chi_square_too_large_for_a_float_is_infinite_rather_than_an_error() -> None:
    mismatch = measure_mismatch(torch.full((1, 100), 50.0), torch.ones(1, 100))

    assert mismatch.chi2_seq == math.inf
    assert mismatch.chi2_token == pytest.approx(math.exp(100))


def test_the_effective_sample_size_of_weights_that_overflow_is_still_their_share() -> None:
    assert effective_sample_size(torch.tensor([1000.0, 1000.0, 0.0, -1000.0])) == 0.5


@pytest.mark.parametrize(("version", "why"), [(-1, "got -1"), (4, "to the trainer's, 3; got 4")])
def test_a_token_without_a_version_or_from_the_future_is_refused(version: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        token_lags(torch.tensor([3, version]), torch.ones(2), trainer_version=3)
