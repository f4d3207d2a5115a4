from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tidegate.kernels.sampling import (
    DRAW_BLOCK,
    RANKED_FIRST,
    RANKED_GROWTH,
    UNIFORM_MAX,
    draw,
    sample,
    weigh,
)

VOCABULARIES = [1, 5, DRAW_BLOCK - 1, DRAW_BLOCK, DRAW_BLOCK + 1, 3 * DRAW_BLOCK, 1500]
GRAINS = 2**14
"""Probabilities that are multiples of 2^-14 add up exactly, so the right answer is known."""


def grainy_probabilities(vocab: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return random multiples of a grain per token: about half are zero, the last is not."""
    random = np.random.default_rng(vocab)
    chances = random.random(vocab) ** 4 * (random.random(vocab) < 0.5)
    chances[[vocab // 2, -1]] = 1.0
    return random.multinomial(GRAINS, chances / chances.sum())


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_uniform_number_draws_the_token_whose_interval_holds_it(vocab: int) -> None:
    grains = grainy_probabilities(vocab)
    uniforms = (np.arange(0, GRAINS, 7) + 0.5) / GRAINS
    probabilities = torch.from_numpy(grains / GRAINS).float().expand(len(uniforms), -1)

    tokens = draw(probabilities, torch.from_numpy(uniforms))

    expected = np.repeat(np.arange(vocab), grains)[np.arange(0, GRAINS, 7)]
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_token_of_probability_zero_is_never_drawn_not_even_at_the_ends(vocab: int) -> None:
    grains = grainy_probabilities(vocab)
    edges = np.cumsum(grains)[:-1] / GRAINS
    uniforms = np.concatenate([[0.0, 5e-324, 1e-20, UNIFORM_MAX], edges, np.nextafter(edges, 0)])
    # Not quite normalised, as float32 softmaxes are.
    for total in (1.0, 1.0 - 1e-6, 1.0 + 1e-6):
        row = torch.from_numpy(grains / GRAINS * total).float()
        tokens = draw(row.expand(len(uniforms), -1), torch.from_numpy(uniforms))
        assert (grains[tokens.numpy()] > 0).all()


def columns(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.float32]],
    np.ndarray[tuple[int], np.dtype[np.int64]],
    np.ndarray[tuple[int], np.dtype[np.float32]],
]:
    return (
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int64),
        np.full(rows, top_p, np.float32),
    )


def processed_logprobs(logits: torch.Tensor, *options: npt.NDArray[Any]) -> torch.Tensor:
    """Return the log-probabilities [S, V] of the distribution sampled from."""
    distribution = weigh(logits, *options)
    return distribution.logprobs(torch.arange(logits.shape[-1]).expand(logits.shape))


def kept(logits: list[float], *, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    logprobs = processed_logprobs(torch.tensor([logits]), *columns(1, top_k=top_k, top_p=top_p))
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-6)
    return torch.isfinite(logprobs[0]).nonzero().flatten().tolist()


def test_a_top_p_that_takes_hundreds_of_tokens_is_found_among_all() -> None:
    vocab, random = 20 * RANKED_FIRST, np.random.default_rng(0)
    logits = random.normal(size=(6, vocab)) * np.array([0.1, 5, 0.01, 5, 0.1, 1])[:, None]
    top_p = np.array([0.9, 0.9, 0.5, 0.1, 1.0, 0.999], np.float32)
    top_k = np.array([0, 0, RANKED_FIRST, 0, 700, 1500], np.int64)
    ones = np.ones(6, np.float32)

    logprobs = processed_logprobs(torch.from_numpy(logits).float(), ones, top_k, top_p)

    for n in range(6):
        ranked = np.sort(logits[n])[::-1][: top_k[n] or None]
        mass = np.cumsum(np.exp(ranked - ranked[0]))
        expected = 1 + int((mass < top_p[n] * mass[-1]).sum()) if top_p[n] < 1 else len(ranked)
        assert torch.isfinite(logprobs[n]).sum() == expected
        row = slice(n, n + 1)
        alone = processed_logprobs(
            torch.from_numpy(logits[row]).float(), ones[row], top_k[row], top_p[row]
        )
        assert torch.equal(logprobs[row], alone)
    first, second, third, *_ = torch.isfinite(logprobs).sum(-1).tolist()
    assert first > RANKED_GROWTH * RANKED_FIRST > RANKED_FIRST > second
    assert third < RANKED_FIRST


def test_top_p_of_one_keeps_tokens_too_unlikely_to_change_the_sum() -> None:
    assert kept([0.0, -40.0, -80.0], top_k=3, top_p=1.0) == [0, 1, 2]


def test_tokens_that_tie_with_the_last_one_kept_are_kept_too() -> None:
    assert kept([2.0, 1.0, 1.0, 0.0], top_k=2) == [0, 1, 2]


def test_rows_limit_their_own_tokens_and_leave_the_others_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    temperature = np.array([1.0, 0.5, 0.0, 2.0], np.float32)
    top_k = np.array([0, 5, 5, 0], np.int64)
    top_p = np.array([1.0, 1.0, 0.5, 0.8], np.float32)

    together = processed_logprobs(logits, temperature, top_k, top_p)

    for n in range(4):
        one = slice(n, n + 1)
        alone = processed_logprobs(logits[one], temperature[one], top_k[one], top_p[one])
        assert torch.equal(together[one], alone)
    plain = torch.log_softmax(logits[2], -1)
    assert torch.allclose(together[2], plain, atol=1e-6)  # greedy: unlimited
    assert torch.isfinite(together).sum(-1).tolist()[:3] == [50, 5, 50]


@pytest.mark.parametrize("power", [0.8, 1.5])
def test_log_probs_of_a_large_vocabulary_are_exact_to_float32(power: float) -> None:
    """Terms that are small beside the largest add up: a sum that loses them is off by 1e-4."""
    random = np.random.default_rng(0)
    ranks = 1 + np.stack([random.permutation(151_936) for _ in range(3)])
    logits = torch.from_numpy(-power * np.log(ranks)).float()
    uniforms = random.random(3)

    tokens, logprobs = sample(logits, *columns(3), uniforms)
    alone = [sample(logits[n : n + 1], *columns(1), uniforms[n : n + 1]) for n in range(3)]

    exact = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(logprobs.double(), exact.gather(-1, tokens[:, None])[:, 0], atol=2e-6)
    assert torch.allclose(processed_logprobs(logits, *columns(3)).double(), exact, atol=2e-6)
    assert torch.equal(torch.cat([logprob for _, logprob in alone]), logprobs)
    assert torch.equal(torch.cat([token for token, _ in alone]), tokens)


def test_a_temperature_near_zero_overflows_nothing() -> None:
    logits = torch.tensor([[30.0, -20.0, 29.0]])

    tokens, logprobs = sample(logits, *columns(1, temperature=1e-38), np.array([UNIFORM_MAX]))

    assert tokens.tolist() == [0]
    assert logprobs.tolist() == [0.0]


def test_logits_that_are_not_numbers_give_logprobs_that_are_not_either() -> None:
    logits = torch.full((1, 700), torch.nan)

    tokens, logprobs = sample(logits, *columns(1), np.array([0.5]))

    assert 0 <= tokens.item() < 700
    assert logprobs.isnan().all()


def test_a_rows_set_is_the_same_whatever_temperature_its_companions_have() -> None:
    # Beside a large logit, small ones stay distinct only while nothing is subtracted from them.
    row = torch.tensor([[1000.0, 1e-5, 2e-5, 3e-5, 4e-5]])
    alone = processed_logprobs(row, np.ones(1, np.float32), np.array([3]), np.ones(1, np.float32))
    together = processed_logprobs(
        row.repeat(2, 1), np.array([1.0, 0.5], np.float32), np.array([3, 0]), np.ones(2, np.float32)
    )
    assert torch.equal(alone[0], together[0])
