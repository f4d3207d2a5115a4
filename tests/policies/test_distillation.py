"""Losses against a teacher, beside their definitions and beside what other packages compute.

TRL and the Tinker cookbook are installed by `make test-trl` and `make test-tinker`.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tidegate.policies.distillation import reverse_kl_advantages, teacher_kl_losses

ROWS, TOKENS, VOCABULARY = 3, 5, 11


def logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator)


def full_kl(first: Tensor, second: Tensor) -> Tensor:
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


def trls_gkd(student: Tensor, teacher: Tensor, mask: Tensor, beta: int) -> Tensor:
    gkd: Any = pytest.importorskip("trl.experimental.gkd", reason="make test-trl")
    labels = torch.zeros(ROWS, TOKENS, dtype=torch.long).masked_fill(~mask, -100)
    loss: Tensor = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, 0.7)
    return loss


def trls_distillation(student: Tensor, teacher: Tensor, mask: Tensor, beta: int) -> Tensor:
    trl: Any = pytest.importorskip("trl.trainer.distillation_trainer", reason="make test-trl")
    head = torch.eye(VOCABULARY)  # of models whose hidden states are their logits
    loss: Tensor
    loss, _, _ = trl._chunked_divergence_loss(
        student, teacher, head, head, mask, beta, temperature=0.7
    )
    return loss


@pytest.mark.filterwarnings("ignore")  # TRL's packages warn in many ways
@pytest.mark.parametrize("trls", [trls_gkd, trls_distillation])
@pytest.mark.parametrize(("beta", "direction"), [(0, "forward"), (1, "reverse")])
def test_over_the_whole_vocabulary_it_is_trls_loss_with_its_gradient(
    trls: Callable[..., Tensor], beta: int, direction: Literal["reverse", "forward"]
) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    mask = torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.5
    theirs = trls(student, teacher, mask, beta)
    values, ids = (teacher / 0.7).log_softmax(-1).topk(VOCABULARY)
    losses = teacher_kl_losses(student, ids, values, mask, direction=direction, temperature=0.7)
    same_with_gradient(losses.sum() / mask.sum(), theirs, student)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("alpha", "direction"), [(0.0, "forward"), (1.0, "reverse")])
def test_with_fewer_tokens_it_is_the_loss_with_a_tail_of_trls_sdft(
    alpha: float, direction: Literal["reverse", "forward"]
) -> None:
    sdft: Any = pytest.importorskip("trl.experimental.sdft.loss_utils", reason="make test-trl")
    student, teacher = logits(0).requires_grad_(), logits(1)
    theirs = sdft.compute_topk_self_distillation_loss(
        student,
        teacher,
        distillation_topk=3,
        distillation_alpha=alpha,
        distillation_add_tail=True,
    )
    ids = student.topk(3).indices  # TRL chooses by the student's probabilities
    values = teacher.log_softmax(-1).gather(-1, ids)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    ours = teacher_kl_losses(student, ids, values, mask, direction=direction)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    same_with_gradient(ours.sum(), theirs.sum(), student)


def same_with_gradient(ours: Tensor, theirs: Tensor, student: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(each, student)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_with_fewer_tokens_the_others_count_as_one(direction: str, k: int) -> None:
    student, teacher = logits(0), logits(1).log_softmax(-1)
    top = teacher.topk(k)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    losses = teacher_kl_losses(student, top.indices, top.values, mask, direction=direction)  # type: ignore[arg-type]
    own = student.log_softmax(-1)

    def lumped(logprobs: Tensor) -> Tensor:
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


@pytest.mark.filterwarnings("ignore")  # the cookbook's packages warn in many ways
@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_advantages_are_those_of_the_tinker_cookbook(discount: float) -> None:
    cookbook: Any = pytest.importorskip(
        "tinker_cookbook.distillation.train_on_policy", reason="make test-tinker"
    )
    tinker: Any = pytest.importorskip("tinker")
    generator = torch.Generator().manual_seed(4)
    behaviour, teacher = -torch.rand(2, ROWS, TOKENS, generator=generator)
    mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.7

    def datum(row: int) -> Any:
        columns = {
            "target_tokens": torch.arange(TOKENS),
            "logprobs": behaviour[row],
            "mask": mask[row].float(),
            "advantages": torch.ones(TOKENS),
        }
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(range(TOKENS))),
            loss_fn_inputs={k: tinker.TensorData.from_torch(v) for k, v in columns.items()},
        )

    def client(row: int) -> Any:
        async def logprobs() -> list[float | None]:
            return [None, *teacher[row].tolist()]

        return SimpleNamespace(compute_logprobs=lambda _: SimpleNamespace(coroutine=logprobs))

    rows, clients = [*map(datum, range(ROWS))], [*map(client, range(ROWS))]
    asyncio.run(cookbook.incorporate_kl_penalty(rows, clients, [0] * ROWS, 0.3, discount))
    theirs = torch.stack([row.loss_fn_inputs["advantages"].to_torch() for row in rows])
    ours = 1 + 0.3 * reverse_kl_advantages(behaviour, teacher, mask, discount=discount)
    torch.testing.assert_close(ours[mask], theirs[mask])


def test_shapes_and_discounts_that_cannot_be_are_refused() -> None:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    with pytest.raises(ValueError, match="discount must be in"):
        reverse_kl_advantages(mask.float(), mask.float(), mask, discount=1.5)
    top = logits(1).topk(3)
    with pytest.raises(ValueError, match=r"must be \[R, T, V\]"):
        teacher_kl_losses(logits(0), top.indices[:, 1:], top.values, mask)
