"""Losses against a teacher, beside their definitions."""

import pytest
import torch

from tidegate.policies.distillation import reverse_kl_advantages, teacher_kl_losses

ROWS, TOKENS, VOCABULARY = 3, 5, 11


def logits(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator)


def full_kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return KL(first || second) of log-probs over the whole vocabulary."""
    return torch.nn.functional.kl_div(second, first, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_over_the_whole_vocabulary_it_is_the_kl_with_its_gradient(direction: str) -> None:
    student = logits(0).requires_grad_()
    teacher = logits(1).log_softmax(-1)
    top = teacher.topk(VOCABULARY)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    losses = teacher_kl_losses(student, top.indices, top.values, mask, direction=direction)  # type: ignore[arg-type]
    own = student.log_softmax(-1)
    expected = full_kl(own, teacher) if direction == "reverse" else full_kl(teacher, own)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(losses.sum(), student, retain_graph=True)
    (defined,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(gradient, defined, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_with_fewer_tokens_the_others_count_as_one(direction: str, k: int) -> None:
    student, teacher = logits(0), logits(1).log_softmax(-1)
    top = teacher.topk(k)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    losses = teacher_kl_losses(student, top.indices, top.values, mask, direction=direction)  # type: ignore[arg-type]
    own = student.log_softmax(-1)

    def lumped(logprobs: torch.Tensor) -> torch.Tensor:
        probabilities = logprobs.exp()
        kept = probabilities.gather(-1, top.indices)
        rest = probabilities.sum(-1, keepdim=True) - kept.sum(-1, keepdim=True)
        return torch.cat([kept, rest], -1).log()

    pair = (own, teacher) if direction == "reverse" else (teacher, own)
    torch.testing.assert_close(losses, full_kl(*map(lumped, pair)), atol=1e-5, rtol=1e-4)
    assert (losses <= full_kl(*pair) + 1e-5).all()


def test_tokens_outside_the_mask_change_nothing_whatever_they_hold() -> None:
    student = logits(0).requires_grad_()
    top = logits(1).log_softmax(-1).topk(3)
    mask = torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.5
    values = top.values.masked_fill(~mask[..., None], float("nan"))
    losses = teacher_kl_losses(student, top.indices, values, mask)
    assert (losses[~mask] == 0).all()
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    assert gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()


def test_bfloat16_logits_are_compared_in_float32() -> None:
    short = logits(0).bfloat16()
    top = logits(1).log_softmax(-1).topk(3)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    losses = teacher_kl_losses(short, top.indices, top.values, mask)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(
        losses, teacher_kl_losses(short.float(), top.indices, top.values, mask)
    )


def test_advantages_have_in_expectation_the_gradient_of_the_reverse_kl() -> None:
    student = logits(0)[0, 0].requires_grad_()
    teacher = logits(1)[0, 0].log_softmax(-1)
    own = student.log_softmax(-1)
    every = torch.arange(VOCABULARY)[:, None]  # each token as the one that was sampled
    mask = torch.ones(VOCABULARY, 1, dtype=torch.bool)
    advantages = reverse_kl_advantages(own.detach()[every], teacher[every], mask)
    loss = -(own.detach().exp()[:, None] * advantages * own[every]).sum()
    (gradient,) = torch.autograd.grad(loss, student, retain_graph=True)
    (defined,) = torch.autograd.grad(full_kl(own, teacher), student)
    torch.testing.assert_close(gradient, defined, atol=1e-5, rtol=1e-4)


def test_a_discount_adds_what_later_tokens_of_the_row_have() -> None:
    generator = torch.Generator().manual_seed(4)
    behaviour, teacher = -torch.rand(2, ROWS, TOKENS, generator=generator)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[0, 1], teacher[0, 1] = False, float("nan")  # a token of a tool
    found = reverse_kl_advantages(behaviour, teacher, mask, discount=0.5)
    own = torch.where(mask, teacher - behaviour, 0.0)
    for row in range(ROWS):
        for at in range(TOKENS):
            later = sum(0.5 ** (t - at) * float(own[row, t]) for t in range(at, TOKENS))
            assert found[row, at] == pytest.approx(later if mask[row, at] else 0.0, abs=1e-6)


def test_shapes_and_discounts_that_cannot_be_are_refused() -> None:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    with pytest.raises(ValueError, match="discount must be in"):
        reverse_kl_advantages(mask.float(), mask.float(), mask, discount=1.5)
    top = logits(1).topk(3)
    with pytest.raises(ValueError, match=r"must be \[R, T, V\]"):
        teacher_kl_losses(logits(0), top.indices[:, 1:], top.values, mask)
