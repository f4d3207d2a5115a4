"""Tests that every formula computes in float32 for inputs of shorter types."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tidegate.policies import (
    advantages,
    aggregation,
    corrections,
    diagnostics,
    distillation,
    kept_tokens,
    objectives,
)

Formula = Callable[..., Any]
MODULES = (advantages, aggregation, corrections, diagnostics, distillation, kept_tokens, objectives)
FORMULAS: list[Formula] = [
    formula
    for module in MODULES
    for name, formula in vars(module).items()
    if inspect.isfunction(formula)
    and formula.__module__ == module.__name__
    and not name.startswith("_")
    and "Tensor" in str(inspect.signature(formula))
    and name not in ("refuse_shapes", "token_lags")  # compute no floats
]
ROWS, TOKENS = 3, 700


def _floats(formula: Formula) -> dict[str, Tensor]:
    """Return one bfloat16 input for each argument of the formula that takes floats.

    Sums of 700 tokens pass 256, and ratios lie within 2 % of 1, where bfloat16 shows.
    """
    torch.manual_seed(0)
    behaviour = -torch.rand(ROWS, TOKENS) * 3
    log_ratio = torch.randn(ROWS, TOKENS) * 0.005 + 5e-4
    per_rollout = formula.__module__.endswith("advantages") and "mask" not in _names(formula)
    drawn = {
        "logprobs": behaviour + log_ratio,
        "proximal_logprobs": behaviour,
        "behaviour_logprobs": behaviour - log_ratio,
        "teacher_logprobs": behaviour[..., None] - 3
        if "teacher_ids" in _names(formula)
        else behaviour,
        "log_ratio": log_ratio,
        "log_weights": log_ratio.flatten(),
        "advantages": torch.tensor([[1.3], [-0.7], [0.9]]),
        "values": torch.rand(TOKENS if "segment_ids" in _names(formula) else (ROWS, TOKENS)),
        "rewards": torch.rand(TOKENS) if per_rollout else torch.rand(ROWS, TOKENS),
        "weight": log_ratio.exp(),
        "generated_tokens": torch.randint(1, 200, (ROWS,)).float(),
        "logits": torch.randn(ROWS, TOKENS, 8),
    }
    return {name: drawn[name].bfloat16() for name in _names(formula) if name in drawn}


def _others(formula: Formula) -> dict[str, Any]:
    """Return the formula's required arguments that hold no floats."""
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[1, 500:] = False
    rollouts = ROWS if "mask" in _names(formula) else TOKENS
    known = {
        "mask": mask,
        "loss_mask": mask,
        "group_ids": torch.zeros(rollouts, dtype=torch.int64),
        "segment_ids": torch.zeros(TOKENS, dtype=torch.int64),
        "segments": 1,
        "weight_versions": torch.full((ROWS, TOKENS), 3),
        "trainer_version": 4,
        "is_trained": torch.tensor([True, False, True]),
        "token_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64),
        "teacher_ids": torch.zeros(ROWS, TOKENS, 1, dtype=torch.int64),
        "kept_ids": torch.arange(3).repeat(ROWS * TOKENS),
        "kept_counts": torch.full((ROWS, TOKENS), 3),
    }
    return {name: known[name] for name in _names(formula) if name in known}


def _names(formula: Formula) -> list[str]:
    return list(inspect.signature(formula).parameters)


def _results(result: Any) -> Iterator[Any]:
    """Yield the tensors and numbers of a result."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = dataclasses.astuple(result)
    if isinstance(result, tuple):
        for part in result:
            yield from _results(part)
    else:
        yield result


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_a_formula_of_bfloat16_is_that_of_the_same_numbers_in_float32(formula: Formula) -> None:
    floats, others = _floats(formula), _others(formula)
    assert floats, "give the formula's arguments numbers in _floats"

    def computed(dtype: torch.dtype) -> tuple[list[Any], list[Tensor | None]]:
        inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in floats.items()}
        results = list(_results(formula(**inputs, **others)))
        losses = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
        if losses:
            torch.autograd.backward(losses[0].float().sum())
        return results, [x.grad for x in inputs.values()]

    (short, short_grads), (long, long_grads) = computed(torch.bfloat16), computed(torch.float32)

    for short_result, long_result in zip(short, long, strict=True):
        assert type(short_result) is type(long_result)
        if isinstance(long_result, Tensor):
            assert short_result.dtype == long_result.dtype
            assert torch.equal(short_result, long_result)
        else:
            assert short_result == long_result
    for short_grad, long_grad in zip(short_grads, long_grads, strict=True):
        if long_grad is not None:
            assert short_grad is not None
            assert torch.equal(short_grad, long_grad.bfloat16())
