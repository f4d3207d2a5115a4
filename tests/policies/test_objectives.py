"""Tests that each objective and its gradient are the published ones, per token."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.policies.ragged import (
    ROWS,
    TOKENS,
    Array,
    Ragged,
    assert_laid_out,
    ragged,
    random_batch,
)
from tidegate.policies.aggregation import mean_by_sequence
from tidegate.policies.objectives import (
    aipo_losses,
    cispo_losses,
    gspo_losses,
    interpolated_proximal_logprobs,
    ppo_losses,
)


@settings(deadline=None)
@given(batch=ragged)
def test_losses_by_token_agree_with_numpy(batch: Ragged) -> None:
    old, advantages = [x - 1 for x in batch.like(0)], batch.like(1)
    target = [q + x for q, x in zip(old, batch.values, strict=True)]

    def expected(formula: Callable[[Array, Array, Array], Array]) -> list[Array]:
        rows = zip(target, old, advantages, batch.masks, strict=True)
        return [np.where(m, formula(p, np.exp(p - q), a), 0.0) for p, q, a, m in rows]

    ppo = expected(lambda _, u, a: -np.minimum(u * a, np.clip(u, 0.8, 1.3) * a))
    cispo = expected(lambda p, w, a: -np.clip(w, 0.5, 3) * a * p)
    aipo = expected(lambda p, w, a: -np.minimum(w, 2) * a * p)
    for layout in batch.layouts():
        p, q, a = (layout.lay(rows) for rows in (target, old, advantages))
        mask = layout.mask

        assert_laid_out(ppo_losses(p, q, a, mask, clip_high=0.3), ppo, layout)
        assert_laid_out(cispo_losses(p, q, a, mask, weight_min=0.5, weight_max=3), cispo, layout)
        assert_laid_out(aipo_losses(p, q, a, mask), aipo, layout)


@settings(deadline=None)
@given(batch=ragged)
def test_gspo_agrees_with_numpy_sequence_by_sequence(batch: Ragged) -> None:
    old, advantages = batch.like(0), np.random.default_rng(1).normal(size=len(batch.masks))
    target = [q + x for q, x in zip(old, batch.values, strict=True)]
    objective = []
    for x, a in zip(batch.tokens, advantages, strict=True):
        if len(x):
            s = np.exp(x.mean())
            objective.append(-min(s * a, np.clip(s, 1 - 3e-4, 1 + 4e-4) * a))

    for layout in batch.layouts():
        p, q = layout.lay(target), layout.lay(old)
        on_tokens = layout.lay(
            [np.full(len(m), a) for m, a in zip(batch.masks, advantages, strict=True)]
        )
        losses = gspo_losses(p, q, on_tokens, layout.mask, row_ids=layout.row_ids)
        loss = mean_by_sequence(losses, layout.mask, row_ids=layout.row_ids)

        assert loss.item() == pytest.approx(np.mean(objective) if objective else 0.0)


def test_the_gradients_of_ppo_and_gspo_are_those_of_their_losses() -> None:
    target, proximal, _, advantages, mask = random_batch(8)
    target.requires_grad_()
    row_ids = torch.arange(ROWS)[:, None].expand(ROWS, TOKENS)[mask]
    per_token = advantages.expand(ROWS, TOKENS)[mask]

    def packed_gspo(x: Tensor) -> Tensor:
        ones = torch.ones_like(x)
        return gspo_losses(x, proximal[mask], per_token, ones, row_ids=row_ids, clip_low=0.1)

    assert torch.autograd.gradcheck(lambda x: ppo_losses(x, proximal, advantages, mask), target)
    assert torch.autograd.gradcheck(
        lambda x: gspo_losses(x, proximal, advantages, mask, clip_high=0.5), target
    )
    assert torch.autograd.gradcheck(packed_gspo, target.detach()[mask].requires_grad_())


def test_the_gradient_of_cispo_is_the_clipped_weight_times_the_advantage() -> None:
    target, _, behaviour, advantages, mask = random_batch(9)
    target.requires_grad_()

    cispo_losses(target, behaviour, advantages, mask, weight_max=1.5).sum().backward()  # type: ignore[no-untyped-call]

    weight = (target.detach() - behaviour).exp().clamp(max=1.5)
    assert target.grad is not None
    torch.testing.assert_close(target.grad, torch.where(mask, -weight * advantages, 0.0))


@settings(deadline=None)
@given(batch=ragged)
def test_the_interpolated_proximal_policy_agrees_with_the_papers_formula(batch: Ragged) -> None:
    behaviour = batch.like(0)
    target = [q + x for q, x in zip(behaviour, batch.values, strict=True)]
    versions = [np.arange(len(m)) % 4 for m in batch.masks]
    expected = []
    for p, q, v, m in zip(target, behaviour, versions, batch.masks, strict=True):
        share = 1 / (6 - v)  # the weights being made are version 6
        expected.append(np.where(m, share * q + (1 - share) * p, 0.0))

    for layout in batch.layouts():
        ours = interpolated_proximal_logprobs(
            layout.lay(target),
            layout.lay(behaviour),
            layout.lay([x.astype(float) for x in versions]).nan_to_num(nan=-1).int(),
            layout.mask,
            trainer_version=5,
        )

        assert_laid_out(ours, expected, layout)


def test_a_fresh_token_has_its_behaviour_policy_for_a_proximal_one() -> None:
    target = torch.tensor([-1.0], requires_grad=True)
    versions = torch.tensor([3])

    proximal = interpolated_proximal_logprobs(
        target, torch.tensor([-2.0]), versions, torch.ones(1), trainer_version=3
    )

    assert proximal.tolist() == [-2.0]
    assert not proximal.requires_grad


LOSSES = [ppo_losses, gspo_losses, cispo_losses, aipo_losses]


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("log_ratio", [-500.0, -50.0, 50.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_one_token_far_away_has_a_finite_loss_and_gradient(
    losses: Callable[..., Tensor], log_ratio: float, advantage: float
) -> None:
    target = torch.tensor([[log_ratio]], requires_grad=True)

    loss = losses(target, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1))
    torch.autograd.backward(loss)

    assert math.isfinite(loss.item())
    assert target.grad is not None
    assert math.isfinite(target.grad.item())


@pytest.mark.parametrize("losses", LOSSES)
def test_only_the_target_policy_gets_a_gradient(losses: Callable[..., Tensor]) -> None:
    target, other, advantages = torch.zeros(3, 1, 2).requires_grad_().unbind()

    loss = losses(target, other, advantages + 1, torch.ones(1, 2)).sum()

    reached = torch.autograd.grad(loss, [target, other, advantages], allow_unused=True)
    assert [gradient is not None for gradient in reached] == [True, False, False]


@pytest.mark.parametrize("losses", LOSSES)
def test_masked_rows_have_no_loss_and_no_gradient(losses: Callable[..., Tensor]) -> None:
    target = torch.full((2, 3), math.nan, requires_grad=True)
    garbage = torch.full((2, 3), math.nan)

    loss = losses(target, garbage, garbage, torch.zeros(2, 3))
    torch.autograd.backward(loss.sum())

    assert loss.tolist() == torch.zeros(2, 3).tolist()
    assert target.grad is not None
    assert not target.grad.any()


@pytest.mark.parametrize("losses", LOSSES)
def test_every_loss_refuses_one_advantage_per_rollout(losses: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"advantages\[:, None\]"):
        losses(*[torch.zeros(3, 3)] * 2, torch.zeros(3), torch.ones(3, 3))


@pytest.mark.parametrize("losses", [ppo_losses, gspo_losses])
@pytest.mark.parametrize("settings", [{"clip_low": 1.0}, {"clip_high": 0.0}])
def test_clips_that_can_not_work_are_refused(
    losses: Callable[..., Tensor], settings: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match="clip_low"):
        losses(*[torch.zeros(1, 1)] * 4, **settings)


def test_weight_bounds_that_can_not_work_are_refused() -> None:
    with pytest.raises(ValueError, match="weight_min=2"):
        cispo_losses(*[torch.zeros(1, 1)] * 4, weight_min=2, weight_max=1)
    with pytest.raises(ValueError, match="weight_max=0"):
        aipo_losses(*[torch.zeros(1, 1)] * 4, weight_max=0)
