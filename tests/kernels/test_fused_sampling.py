from dataclasses import replace

import numpy as np
import pytest
import torch

from tidegate.kernels import fused_sampling as module
from tidegate.kernels.fused_sampling import (
    SamplingColumns,
    fused_sample_triton,
)
from tidegate.kernels.sampling import sample
from tidegate.kernels.uniforms import uniforms

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 256


def fused_sample_reference(
    logits: torch.Tensor, columns: SamplingColumns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of :func:`fused_sample_triton`, row by row in float64. Slow and obviously right."""
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    for row, uniform in enumerate(columns.uniforms.tolist()):
        row_logprobs = _processed(logits[row], columns, row)
        cumulative = row_logprobs.exp().cumsum(-1)
        last = int(row_logprobs.isfinite().nonzero()[-1])
        token = min(int((cumulative <= uniform * cumulative[-1]).sum()), last)
        if columns.temperature[row] == 0:
            token = int(row_logprobs.argmax())
        tokens[row], logprobs[row] = token, row_logprobs[token]
    return tokens, logprobs


def _processed(logits: torch.Tensor, columns: SamplingColumns, row: int) -> torch.Tensor:
    """Return one row's log-probabilities after all options, -inf for excluded tokens. [V]"""
    logits, vocab = logits.double(), len(logits)
    if (temperature := float(columns.temperature[row])) == 0:
        return torch.log_softmax(logits, -1)
    logits = logits / temperature
    cutoff = logits.amax() + columns.min_p[row].double().log()
    logits = logits.masked_fill(logits < cutoff, -torch.inf)
    ranked = logits.sort(descending=True).values[: int(columns.top_k[row]) or vocab]
    probabilities = torch.softmax(ranked, -1)
    if (top_p := float(columns.top_p[row])) < 1:
        ranked = ranked[probabilities.cumsum(-1) - probabilities < top_p]
    return torch.log_softmax(logits.masked_fill(logits < ranked[-1], -torch.inf), -1)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that a vocabulary that is quick to interpret has several."""
    monkeypatch.setattr(module, "VOCAB_TILE", TILE)


def make_columns(rows: int, **given: float) -> SamplingColumns:
    """Return the defaults of an unlimited draw, with the given values for all rows."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    numbers = uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.uint64))
    return SamplingColumns(
        temperature=torch.full((rows,), values["temperature"], device=DEVICE),
        top_k=torch.full((rows,), int(values["top_k"]), dtype=torch.int64, device=DEVICE),
        top_p=torch.full((rows,), values["top_p"], device=DEVICE),
        min_p=torch.full((rows,), values["min_p"], device=DEVICE),
        uniforms=torch.from_numpy(numbers).to(DEVICE),
    )


def make_logits(rows: int, vocab: int, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (spread * torch.randn(rows, vocab, generator=generator)).to(DEVICE)


def assert_drawn_alike(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    tokens, logprobs = fused_sample_triton(logits, columns)
    expected_tokens, expected_logprobs = fused_sample_reference(logits, columns)
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    return tokens


@pytest.mark.parametrize("vocab", [1, 2, 33, TILE - 1, TILE, TILE + 1, 3 * TILE, 5 * TILE + 9])
def test_without_limits_a_draw_inverts_the_whole_distribution(vocab: int) -> None:
    assert_drawn_alike(make_logits(4, vocab), make_columns(4))


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 10_000},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.1},
    ],
    ids=str,
)
def test_each_limit_and_all_together_leave_what_the_reference_leaves(
    given: dict[str, float],
) -> None:
    assert_drawn_alike(make_logits(2, TILE + 5), make_columns(2, **given))


def test_rows_with_different_options_share_a_launch() -> None:
    columns = make_columns(4)
    columns.temperature.copy_(torch.tensor([1.0, 0.0, 0.5, 2.0]))
    columns.top_k.copy_(torch.tensor([0, 4, 7, 0]))
    columns.top_p.copy_(torch.tensor([1.0, 0.5, 1.0, 0.8]))

    assert_drawn_alike(make_logits(4, 300), columns)


def test_a_draw_is_the_one_that_the_cpu_engine_makes() -> None:
    rows, vocab = 8, 200
    logits = make_logits(rows, vocab)
    columns = make_columns(rows, top_k=40, top_p=0.9, temperature=0.8)

    expected, expected_logprobs = sample(
        logits.cpu(),
        columns.temperature.cpu().numpy(),
        columns.top_k.cpu().numpy(),
        columns.top_p.cpu().numpy(),
        columns.uniforms.cpu().numpy(),
    )

    tokens, logprobs = fused_sample_triton(logits, columns)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("top_p", "kept"), [(0.70, {0}), (0.74, {0, 1, 2})])
def test_tokens_that_tie_with_the_last_one_kept_are_kept_and_counted_once(
    top_p: float, kept: set[int]
) -> None:
    # 0.0 and -0.0 tie. Of the two that top_k leaves the first has 73 %; of all three, 58 %.
    logits = torch.tensor([[1.0, 0.0, -0.0, -5.0]], device=DEVICE).expand(5, -1).contiguous()
    columns = make_columns(5, top_k=2, top_p=top_p)
    columns.uniforms.copy_(torch.arange(5) / 5)

    tokens = assert_drawn_alike(logits, columns)

    assert set(tokens.tolist()) == kept


def test_the_ends_of_the_unit_interval_draw_tokens_that_may_be() -> None:
    logits = make_logits(2, 3 * TILE)
    logits[:, :5] = -torch.inf
    logits[:, -5:] = -torch.inf
    columns = make_columns(2)
    columns.uniforms.copy_(torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))

    tokens, logprobs = fused_sample_triton(logits, columns)

    assert logprobs.isfinite().all()
    assert tokens.tolist() == [5, 3 * TILE - 6]


def test_a_row_draws_the_same_whatever_rows_are_beside_it() -> None:
    logits = make_logits(5, 200)
    columns = make_columns(5, top_p=0.9)

    together = fused_sample_triton(logits, columns)

    one = SamplingColumns(*(getattr(columns, name)[3:4] for name in SamplingColumns.__slots__))
    alone = fused_sample_triton(logits[3:4], one)
    assert torch.equal(alone[0], together[0][3:4])
    assert torch.equal(alone[1], together[1][3:4])


@pytest.mark.filterwarnings("ignore:overflow")  # which is what it is about: numpy's, interpreting
def test_a_temperature_near_zero_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[30.0, -20.0, 29.0]], device=DEVICE)

    tokens, logprobs = fused_sample_triton(logits, make_columns(1, temperature=1e-38))

    assert (tokens.tolist(), logprobs.tolist()) == ([0], [0.0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, interpreting
def test_a_nan_logit_gives_a_nan_log_prob() -> None:
    logits = make_logits(2, 300)
    logits[0, 7] = torch.nan
    logits[1, 280] = torch.nan

    tokens, logprobs = fused_sample_triton(logits, make_columns(2))

    assert logprobs.isnan().all()
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_columns_that_do_not_fit_are_refused() -> None:
    logits, columns = make_logits(2, 40), make_columns(2)

    with pytest.raises(ValueError, match=r"top_k must be torch.int64 with one entry for each of 2"):
        fused_sample_triton(logits, replace(columns, top_k=columns.top_k.int()))
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        fused_sample_triton(logits.bfloat16(), columns)
