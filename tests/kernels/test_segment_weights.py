import math
from collections.abc import Callable

import pytest
import torch

from tidegate.kernels import segment_weights as module
from tidegate.kernels.segment_weights import (
    WeightRule,
    segment_weights,
    segment_weights_reference,
    segment_weights_triton,
)
from tidegate.policies.corrections import mis_geometric, mis_sequence, tis_sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [1, 0, 7, 64, 65, 130, 3, 0]
RULES = {
    "product, truncated": WeightRule(mean=False, outside="truncate", weight_max=1.5),
    "product, dropped": WeightRule(mean=False, outside="drop", weight_min=0.5, weight_max=2.0),
    "mean, truncated": WeightRule(mean=True, outside="truncate", weight_max=1.01),
    "mean, dropped": WeightRule(mean=True, outside="drop", weight_min=0.98, weight_max=1.02),
    "mean, dropped above": WeightRule(mean=True, outside="drop", weight_max=1.0001),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKEN_TILE", 64)


def make_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    log_ratio = 0.1 * torch.randn(sum(LENGTHS), generator=generator)
    mask = torch.rand(sum(LENGTHS), generator=generator) < 0.8
    mask[-3:] = False  # a segment without tokens
    log_ratio[~mask] = torch.nan
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    return log_ratio.to(DEVICE), mask.to(DEVICE), offsets.to(DEVICE)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("function", [segment_weights, segment_weights_triton])
def test_every_token_gets_the_weight_of_its_segment(
    function: Callable[..., torch.Tensor], rule: WeightRule
) -> None:
    case = make_case()

    expected = segment_weights_reference(*case, rule)

    assert 0 < (expected > 0).sum() <= case[1].sum()
    torch.testing.assert_close(function(*case, rule), expected, rtol=1e-6, atol=0)


def test_the_weights_are_those_of_the_policies() -> None:
    log_ratio, mask, offsets = make_case()
    row_ids = torch.repeat_interleave(torch.arange(len(LENGTHS), device=DEVICE), offsets.diff())
    same = {
        "product, truncated": tis_sequence(log_ratio, mask, row_ids=row_ids, weight_max=1.5),
        "product, dropped": mis_sequence(log_ratio, mask, row_ids=row_ids),
        "mean, dropped": mis_geometric(
            log_ratio, mask, row_ids=row_ids, weight_min=0.98, weight_max=1.02
        ),
    }
    for name, expected in same.items():
        weights = segment_weights_triton(log_ratio, mask, offsets, RULES[name])
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


def test_ratios_that_would_overflow_are_truncated_or_dropped() -> None:
    log_ratio = torch.tensor([500.0, 500.0, -500.0], device=DEVICE)
    mask = torch.ones(3, dtype=torch.bool, device=DEVICE)
    offsets = torch.tensor([0, 2, 3], device=DEVICE)

    weights = segment_weights_triton(log_ratio, mask, offsets, RULES["product, truncated"])
    kept = segment_weights_triton(log_ratio, mask, offsets, RULES["product, dropped"])

    assert weights.tolist() == pytest.approx([1.5, 1.5, 0.0])
    assert kept.tolist() == [0.0, 0.0, 0.0]


def test_small_terms_of_a_long_segment_are_not_lost() -> None:
    tokens = 20_000
    log_ratio = torch.full((tokens,), 1e-5, device=DEVICE)
    log_ratio[0], log_ratio[1] = 1000.0, -999.0
    rule = WeightRule(mean=False, outside="truncate", weight_max=100.0)
    offsets = torch.tensor([0, tokens], device=DEVICE)

    weights = segment_weights_triton(log_ratio, log_ratio != 0, offsets, rule)

    assert weights[5].item() == pytest.approx(math.exp(1 + 1e-5 * (tokens - 2)), rel=1e-6)


def test_rules_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'clamp'"):
        WeightRule(mean=True, outside="clamp", weight_max=2.0)
    with pytest.raises(ValueError, match="weight_min=3"):
        WeightRule(mean=True, outside="drop", weight_min=3.0, weight_max=2.0)
    with pytest.raises(ValueError, match="upper bound only"):
        WeightRule(mean=True, outside="truncate", weight_min=0.5, weight_max=2.0)
