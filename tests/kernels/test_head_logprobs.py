import pytest
import torch

from tidegate.kernels import head_logprobs as module
from tidegate.kernels.head_logprobs import (
    TOKEN_TILE,
    VOCAB_TILE,
    head_logprobs_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def head_logprobs_reference(
    hidden: torch.Tensor,
    head: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Reference of :func:`head_logprobs_triton` in torch. Slow and obviously right."""
    logits = hidden.float() @ head.float().t()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return torch.log_softmax(logits / temperature, -1).gather(-1, token_ids[:, None]).squeeze(-1)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts, so that a vocabulary that is quick to interpret has two."""
    monkeypatch.setattr(module, "VOCAB_PART", 2 * VOCAB_TILE)


def make_case(
    tokens: int, vocab: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    hidden = 2 * torch.randn(tokens, width, generator=generator)
    head = torch.randn(vocab, width, generator=generator)
    token_ids = torch.randint(0, vocab, (tokens,), generator=generator)
    return hidden.to(DEVICE, dtype), head.to(DEVICE, dtype), token_ids.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "vocab", "width"),
    [
        (1, 1, 16),
        (3, VOCAB_TILE - 1, 48),
        (TOKEN_TILE, VOCAB_TILE, 64),
        (TOKEN_TILE + 1, 2 * VOCAB_TILE + 1, 100),
        (5, 5 * VOCAB_TILE + 7, 33),
    ],
)
def test_logprobs_are_those_of_the_whole_softmax(
    tokens: int, vocab: int, width: int, dtype: torch.dtype
) -> None:
    case = make_case(tokens, vocab, width, dtype)

    expected = head_logprobs_reference(*case)

    actual = head_logprobs_triton(*case)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_temperature_and_soft_cap_change_the_distribution_in_that_order(
    temperature: float, soft_cap: float | None
) -> None:
    case = make_case(4, 300, 32)

    expected = head_logprobs_reference(*case, temperature=temperature, soft_cap=soft_cap)

    actual = head_logprobs_triton(*case, temperature=temperature, soft_cap=soft_cap)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=5e-5)


def test_a_tokens_log_prob_does_not_depend_on_the_tokens_beside_it() -> None:
    hidden, head, token_ids = make_case(TOKEN_TILE + 5, 300, 32)

    together = head_logprobs_triton(hidden, head, token_ids)

    apart = head_logprobs_triton(hidden[2:9], head, token_ids[2:9])
    assert torch.equal(apart, together[2:9])


def test_no_tokens_give_no_log_probs() -> None:
    hidden, head, token_ids = make_case(0, 300, 32)

    assert head_logprobs_triton(hidden, head, token_ids).shape == (0,)


def test_invalid_scoring_shapes_are_refused() -> None:
    hidden, head, token_ids = make_case(3, 20, 16)

    with pytest.raises(ValueError, match="must be > 0, got 0"):
        head_logprobs_triton(hidden, head, token_ids, temperature=0)
    with pytest.raises(ValueError, match=r"for each of 3, got \[2\]"):
        head_logprobs_triton(hidden, head, token_ids[:2])
    with pytest.raises(ValueError, match=r"got \[3, 16\] and \[20, 15\]"):
        head_logprobs_triton(hidden, head[:, :15], token_ids)
