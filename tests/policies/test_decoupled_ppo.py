"""Tests that the ready-made loss is the published one, and robust for asynchronous training."""

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch

from tests.policies.ragged import ROWS, TOKENS, Batch, random_batch
from tidegate.policies.corrections import icepop, mis_sequence, tis_token, veto_mask
from tidegate.policies.objectives import LossDiagnostics, decoupled_ppo_loss, ppo_losses


def tokens(*, target: float, proximal: float, behaviour: float, advantage: float) -> Batch:
    """Return a batch of one token."""
    values = [torch.tensor([x]) for x in (target, proximal, behaviour, advantage)]
    values[0].requires_grad_()
    return values[0], values[1], values[2], values[3], torch.ones(1)


def loss_in_numpy(batch: Batch, clip: float, weight_max: float) -> tuple[float, LossDiagnostics]:
    """Reference in numpy, token by token over the mask."""
    target, proximal, behaviour, advantages, mask = (x.numpy() for x in batch)
    advantages = np.broadcast_to(advantages, mask.shape)[mask]
    u = np.exp(target - proximal)[mask]
    w = np.exp(proximal - behaviour)[mask]
    clipped = np.clip(u, 1 - clip, 1 + clip) * advantages
    used = np.minimum(w, weight_max)
    loss = -np.mean(used * np.minimum(u * advantages, clipped))
    outward = ((u > 1 + clip) & (advantages > 0)) | ((u < 1 - clip) & (advantages < 0))
    return loss, LossDiagnostics(
        ess=w.sum() ** 2 / (len(w) * (w**2).sum()),
        ess_clamped=used.sum() ** 2 / (len(w) * (used**2).sum()),
        kl_k1=-np.log(w).mean(),
        kl_k3=(w - 1 - np.log(w)).mean(),
        clip_fraction=outward.mean(),
        truncated_fraction=(w > weight_max).mean(),
    )


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_diagnostics_agree_with_the_formulas_in_numpy(seed: int) -> None:
    batch = random_batch(seed)

    loss, diagnostics = decoupled_ppo_loss(*batch, clip=0.3, importance_weight_max=1.5)

    expected_loss, expected = loss_in_numpy(batch, clip=0.3, weight_max=1.5)
    assert loss.item() == pytest.approx(expected_loss)
    assert astuple(diagnostics) == pytest.approx(astuple(expected))
    # Otherwise the comparison would prove little.
    assert 0 < diagnostics.clip_fraction < 1
    assert 0 < diagnostics.truncated_fraction < 1


def test_packed_tokens_give_the_loss_of_padded_rows() -> None:
    target, proximal, behaviour, advantages, mask = random_batch(1)
    padded, _ = decoupled_ppo_loss(target, proximal, behaviour, advantages, mask)

    packed, _ = decoupled_ppo_loss(
        target[mask],
        proximal[mask],
        behaviour[mask],
        advantages.expand(ROWS, TOKENS)[mask],
        torch.ones(int(mask.sum())),
    )

    torch.testing.assert_close(packed, padded)


def test_the_gradient_is_that_of_the_loss_and_of_the_target_policy_alone() -> None:
    target, *others = random_batch(2)
    target.requires_grad_()
    proximal, behaviour = (x.requires_grad_() for x in others[:2])

    loss, _ = decoupled_ppo_loss(target, proximal, behaviour, *others[2:])
    torch.autograd.backward(loss)

    assert proximal.grad is None
    assert behaviour.grad is None
    assert torch.autograd.gradcheck(
        lambda logprobs: decoupled_ppo_loss(logprobs, proximal, behaviour, *others[2:])[0], target
    )


def test_staleness_alone_never_clips() -> None:
    """The purpose of decoupling: far from the behaviour policy, the trust region is still
    intact."""
    batch = tokens(target=-1.0, proximal=-1.0, behaviour=-4.0, advantage=1.0)

    loss, diagnostics = decoupled_ppo_loss(*batch)
    torch.autograd.backward(loss)

    assert batch[0].grad is not None
    assert batch[0].grad.tolist() == [pytest.approx(-2.0)]
    assert diagnostics.clip_fraction == 0.0
    assert diagnostics.truncated_fraction == 1.0


@pytest.mark.parametrize("masked", [-math.inf, math.nan, 1e30])
def test_what_stands_under_the_mask_changes_neither_loss_nor_gradient(masked: float) -> None:
    target, proximal, behaviour, advantages, mask = random_batch(3)
    expected, _ = decoupled_ppo_loss(target, proximal, behaviour, advantages, mask)
    dirty = [torch.where(mask, x, masked) for x in (target, proximal, behaviour)]
    dirty[0].requires_grad_()

    loss, diagnostics = decoupled_ppo_loss(dirty[0], dirty[1], dirty[2], advantages, mask)
    torch.autograd.backward(loss)

    assert loss.item() == expected.item()
    assert dirty[0].grad is not None
    assert (dirty[0].grad[~mask] == 0).all()
    assert all(math.isfinite(value) for value in astuple(diagnostics))


def test_a_batch_that_is_all_masked_has_no_loss_and_a_gradient_of_zeros() -> None:
    target, proximal, behaviour, advantages, mask = random_batch(4)
    target.requires_grad_()

    loss, diagnostics = decoupled_ppo_loss(
        target, proximal, behaviour, advantages, torch.zeros_like(mask)
    )
    torch.autograd.backward(loss)

    assert loss.item() == 0.0
    assert target.grad is not None
    assert (target.grad == 0).all()
    assert diagnostics == LossDiagnostics(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("log_weight", [-50.0, 50.0])
@pytest.mark.parametrize("log_ratio", [-50.0, 50.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_log_ratios_of_fifty_stay_finite(
    log_weight: float, log_ratio: float, advantage: float
) -> None:
    batch = tokens(
        target=log_weight + log_ratio, proximal=log_weight, behaviour=0.0, advantage=advantage
    )

    loss, diagnostics = decoupled_ppo_loss(*batch)
    torch.autograd.backward(loss)

    assert math.isfinite(loss.item())
    assert batch[0].grad is not None
    assert torch.isfinite(batch[0].grad).all()
    assert all(math.isfinite(value) for value in astuple(diagnostics))
    assert diagnostics.ess == pytest.approx(1.0)  # 1 for a single token, whatever its weight


def test_micro_batches_with_the_whole_batchs_count_add_up_to_its_loss() -> None:
    batch = random_batch(5)
    whole, _ = decoupled_ppo_loss(*batch)
    count = int(batch[4].sum())

    halves = [
        decoupled_ppo_loss(*(x[rows] for x in batch), tokens_in_batch=count)[0]
        for rows in (slice(0, 1), slice(1, ROWS))
    ]

    torch.testing.assert_close(halves[0] + halves[1], whole)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": 1.0}, "clip"),
        ({"importance_weight_max": 0.0}, "importance_weight_max"),
        ({"tokens_in_batch": 0}, "tokens_in_batch"),
    ],
)
def test_settings_that_can_not_work_are_refused_by_name(
    settings: dict[str, float], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        decoupled_ppo_loss(*random_batch(0), **settings)  # type: ignore[arg-type]


def test_any_correction_can_be_the_weight() -> None:
    target, proximal, behaviour, advantages, mask = random_batch(6)
    log_w = proximal - behaviour
    truncated, masked = tis_token(log_w, mask, weight_max=1.5), icepop(log_w, mask)
    combined = mis_sequence(log_w, mask, weight_min=0.1, weight_max=10) * veto_mask(log_w, mask)

    by_default = decoupled_ppo_loss(*random_batch(6), importance_weight_max=1.5)
    assert decoupled_ppo_loss(*random_batch(6), weight=truncated) == by_default
    for weight in (masked, combined):
        loss, diagnostics = decoupled_ppo_loss(*random_batch(6), weight=weight)
        expected = weight * ppo_losses(target, proximal, advantages, mask)
        torch.testing.assert_close(loss, expected[mask].mean())
        used = weight[mask].numpy()
        assert diagnostics.ess_clamped == pytest.approx(
            used.sum() ** 2 / (len(used) * (used**2).sum())
        )


def test_a_weight_that_masks_everything_leaves_no_loss_and_no_effective_sample() -> None:
    loss, diagnostics = decoupled_ppo_loss(*random_batch(7), weight=torch.zeros(ROWS, TOKENS))

    assert loss == 0
    assert diagnostics.ess_clamped == 0
    assert diagnostics.truncated_fraction == 1


def test_tensors_of_other_shapes_are_refused_rather_than_broadcast() -> None:
    square, row = torch.zeros(3, 3), torch.zeros(2)
    with pytest.raises(ValueError, match=r"advantages\[:, None\]"):
        decoupled_ppo_loss(square, square, square, torch.zeros(3), torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"'behaviour_logprobs': \[3\]"):
        decoupled_ppo_loss(row, row, torch.zeros(3), row, torch.ones(2))
    with pytest.raises(ValueError, match=r"'weight': \[4\]"):
        decoupled_ppo_loss(*random_batch(0), weight=torch.ones(ROWS))
