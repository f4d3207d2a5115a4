"""Log-probs over kept sampling sets."""

import pytest
import torch

from tidegate import kept_logprobs
from tidegate.policies.objectives import exact_on_policy_logprobs

ROWS, TOKENS, VOCAB = 3, 5, 11


def masked(logits: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The same by a masked softmax over the whole vocabulary."""
    return torch.where(kept, logits, -torch.inf).log_softmax(-1)


def sets(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids [R, T], kept [R, T, V] bool, and counts [R, T], 0 in some places."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(VOCAB, (ROWS, TOKENS), generator=generator)
    kept = torch.rand(ROWS, TOKENS, VOCAB, generator=generator) < 0.4
    kept.scatter_(-1, token_ids[..., None], True)
    keeps_all = torch.rand(ROWS, TOKENS, generator=generator) < 0.3
    counts = kept.sum(-1).masked_fill(keeps_all, 0)
    return token_ids, kept | keeps_all[..., None], counts


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("seed", range(5))
def test_log_probs_and_gradients_are_those_of_a_softmax_over_the_kept_tokens(
    seed: int, temperature: float
) -> None:
    token_ids, kept, counts = sets(seed)
    kept_ids = (kept & (counts > 0)[..., None]).nonzero()[:, -1].int()
    logits = torch.randn(ROWS, TOKENS, VOCAB, generator=torch.Generator().manual_seed(9 + seed))
    own, peer = logits.clone().requires_grad_(), logits.clone().requires_grad_()

    result = kept_logprobs(own, token_ids, kept_ids, counts, temperature=temperature)
    expected = masked(peer / temperature, kept).gather(-1, token_ids[..., None])[..., 0]

    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), own), torch.autograd.grad(expected.sum(), peer)
    )
    flat = kept_logprobs(
        logits.flatten(0, 1),
        token_ids.flatten(),
        kept_ids,
        counts.flatten(),
        temperature=temperature,
    )
    torch.testing.assert_close(flat.view(ROWS, TOKENS), result.detach())


def test_a_token_outside_of_its_kept_ones_has_no_probability_and_no_gradient() -> None:
    logits = torch.zeros(1, 4, requires_grad=True)
    ids, counts = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([2])
    assert kept_logprobs(logits, torch.tensor([3]), ids, counts).item() == -torch.inf
    inside = kept_logprobs(logits, torch.tensor([2]), ids, counts)
    assert inside.item() == pytest.approx(-0.6931472)
    (gradient,) = torch.autograd.grad(inside.sum(), logits)
    assert gradient[0].tolist() == [0.0, -0.5, 0.5, 0.0]


def test_shapes_and_counts_that_disagree_are_refused_with_their_values() -> None:
    logits, ids = torch.zeros(2, 4), torch.tensor([1, 2], dtype=torch.int32)
    tokens = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="kept_counts sum to 3, but there are 2 kept_ids"):
        kept_logprobs(logits, tokens, ids, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"logits \[2, 4\], token_ids \[2\] and kept_counts \[1\]"):
        kept_logprobs(logits, tokens, ids, torch.tensor([2]))
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        kept_logprobs(logits, tokens, ids, torch.tensor([1, 1]), temperature=0)


def test_tokens_of_the_trainers_version_have_ratio_one_and_still_a_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.1, -2.5, 0.0]])
    versions = torch.tensor([[4, 3, -1]])
    old = exact_on_policy_logprobs(logprobs, behaviour, versions, trainer_version=4)
    ratio = (logprobs - old).exp()
    assert ratio[0, 0].item() == 1.0
    assert ratio[0, 1].item() == pytest.approx(torch.tensor(0.5).exp().item())
    assert old[0, 2].item() == 0.0
    (gradient,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert gradient[0, 0].item() == 1.0
