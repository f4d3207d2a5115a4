"""Sampling options: samples follow the options, and reported log-probs follow the samples."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engine.sampling.sampled_by_numpy import distribution
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.sampling.sampling import RowSampling, StepOutput, sample_rows
from tidegate.engine.scheduling.sequences import EngineLimits, EngineSequence, admit
from tidegate.kernels.native import Native, native
from tidegate.transport.messages import SubmitTurn
from tidegate.transport.sampling import LogitsProcessor, SamplingParams, TokenBias

pytestmark = pytest.mark.slow

VOCAB = 23
LIMITS = EngineLimits(
    max_running_turns=64,
    max_step_tokens=64,
    num_blocks=64,
    block_tokens=16,
    context_tokens_max=512,
    vocab_size=VOCAB,
)
READER = OptionReader(vocab_size=VOCAB, max_running_turns=64)

in_both_codes = pytest.mark.parametrize(
    "compiled", [None, native(torch.float32)], ids=["torch", "compiled"]
)


def make_turn(asked: SamplingParams, prompt: list[int], output: list[int] = []) -> EngineSequence:  # noqa: B006
    """Return a turn with this output, as an engine that takes it over has it."""
    message = SubmitTurn(
        turn=1,
        token_ids=np.array(prompt + output, "<i4").tobytes(),
        sampling=asked,
        sampled_before=len(output),
    )
    return admit(message, LIMITS, 0, READER)


def next_sampling(turn: EngineSequence) -> RowSampling:
    """Return the sampling state of the turn's next token."""
    turn.chunk_tokens = turn.length - turn.computed
    sampling = turn.next_row().sampling
    assert sampling is not None
    return sampling


def draw(
    turns: list[EngineSequence], logits: torch.Tensor, compiled: Native | None = None
) -> StepOutput:
    return sample_rows(logits.clone(), [next_sampling(turn) for turn in turns], compiled)


def reported_distribution(
    turn: EngineSequence, logits: torch.Tensor, compiled: Native | None
) -> np.ndarray[Any, Any]:
    """Return the reported distribution of the next token; the turn asks for all log-probs, and for
    the kept tokens."""
    attachments = draw([turn], logits[None], compiled).attachments[0]
    probabilities = np.zeros(VOCAB)
    ids = np.frombuffer(attachments["top_ids"], np.int32)
    probabilities[ids] = np.exp(np.frombuffer(attachments["top_logprobs"], np.float32))
    kept = np.frombuffer(attachments["kept_ids"], np.int32)
    possible = np.flatnonzero(probabilities)
    np.testing.assert_array_equal(kept if len(kept) else np.arange(VOCAB), possible)
    return probabilities


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


TOKENS = st.integers(0, VOCAB - 1)
OPTIONS = st.builds(
    SamplingParams,
    max_tokens=st.just(40),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 3, 9]),
    top_p=st.sampled_from([1.0, 1.0, 0.55, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.35, -0.2]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-2.5, 1.5]), max_size=4).map(
        lambda biases: [TokenBias(token_id, bias) for token_id, bias in biases.items()]
    ),
    min_tokens=st.sampled_from([0, 4, 12]),
    stop_token_ids=st.just([1, 2]),
    top_logprobs=st.just(VOCAB),
    kept_tokens=st.just(True),
    seed=st.integers(0, 2**64 - 1),
)


@in_both_codes
@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    asked=OPTIONS,
    prompt=st.lists(TOKENS, min_size=1, max_size=12),
    output=st.lists(TOKENS, max_size=12),
    seed=st.integers(0, 1000),
)
def test_reported_log_probs_follow_the_formulas(
    compiled: Native | None,
    asked: SamplingParams,
    prompt: list[int],
    output: list[int],
    seed: int,
) -> None:
    logits = random_logits(seed)[0]
    result = reported_distribution(make_turn(asked, prompt, output), logits, compiled)
    expected = distribution(logits.numpy(), asked, prompt, output)
    np.testing.assert_allclose(result, expected, atol=2e-6)


def random_options(random: np.random.Generator) -> SamplingParams:
    """Return random options, each at its default every other time."""
    return SamplingParams(
        max_tokens=40,
        temperature=float(random.choice([0.7, 1.0, 1.5])),
        top_k=int(random.choice([0, 8])),
        top_p=float(random.choice([1.0, 0.9])),
        min_p=float(random.choice([0.0, 0.02])),
        repetition_penalty=float(random.choice([1.0, 1.2])),
        presence_penalty=float(random.choice([0.0, 0.5])),
        frequency_penalty=float(random.choice([0.0, 0.3])),
        logit_bias=[TokenBias(int(random.integers(VOCAB)), 1.0)],
        min_tokens=int(random.choice([0, 9])),
        stop_token_ids=[1, 2],
        top_logprobs=VOCAB,
        kept_tokens=True,
    )


def chi_square_sigmas(counts: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any]) -> float:
    """Return the deviation of counts from expectation in sigmas; rare tokens are pooled."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = float((np.square(observed - expected) / expected).sum())
    degrees = len(expected) - 1
    assert degrees >= 2
    # Wilson & Hilferty 1931: the cube root of chi-square over its degrees is almost normal.
    spread = 2 / (9 * degrees)
    return float(((chi_square / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


@in_both_codes
@pytest.mark.parametrize("seed", range(12))
def test_samples_follow_the_reported_log_probs(seed: int, compiled: Native | None) -> None:
    """Over 20,000 draws; options and draws come from the seed, so it passes always or never."""
    random = np.random.default_rng(seed)
    asked = random_options(random)
    prompt, output = random.integers(VOCAB, size=(2, 8)).tolist()
    logits = random_logits(seed)[0] / 3
    turn = make_turn(asked, prompt, output)
    probabilities = reported_distribution(turn, logits, compiled)
    counts = np.zeros(VOCAB)
    one = next_sampling(turn)
    for first in range(0, 20_000, 2_000):
        rows = [
            RowSampling(one.temperature, one.top_k, one.top_p, first + n, one.index, one.options)
            for n in range(2_000)
        ]
        drawn = sample_rows(logits.repeat(2_000, 1), rows, compiled)
        np.add.at(counts, drawn.token_ids, 1)
        result = np.exp(drawn.logprobs)
        np.testing.assert_allclose(result, probabilities[drawn.token_ids], atol=1e-6)

    assert not counts[probabilities == 0].any()
    assert chi_square_sigmas(counts, probabilities) < 4


@in_both_codes
@pytest.mark.parametrize("seed", range(8))
def test_transformers_own_processors_give_the_same_distribution(
    seed: int, compiled: Native | None
) -> None:
    random = np.random.default_rng(seed)
    bias = {
        int(t): float(b) for t, b in zip(random.integers(VOCAB, size=3), (-1, 0.5, 2), strict=True)
    }
    asked = SamplingParams(
        max_tokens=40,
        temperature=0.8,
        top_k=12,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.25,
        logit_bias=[TokenBias(token_id, value) for token_id, value in bias.items()],
        min_tokens=20,
        stop_token_ids=[1, 2],
        top_logprobs=VOCAB,
        kept_tokens=True,
    )
    prompt, output = random.integers(VOCAB, size=(2, 10)).tolist()
    logits = random_logits(seed)
    stops = torch.tensor([1, 2])
    reference: Any = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()]),
            MinNewTokensLengthLogitsProcessor(len(prompt), asked.min_tokens, stops, device="cpu"),
            RepetitionPenaltyLogitsProcessor(asked.repetition_penalty),
            TemperatureLogitsWarper(asked.temperature),
            MinPLogitsWarper(asked.min_p),
            TopKLogitsWarper(asked.top_k),
            TopPLogitsWarper(asked.top_p),
        ]
    )
    expected = reference(torch.tensor([prompt + output]), logits.clone()).softmax(-1)[0]
    result = reported_distribution(make_turn(asked, prompt, output), logits[0], compiled)
    np.testing.assert_allclose(result, expected.numpy(), atol=2e-6)


def asking_for_everything(seed: int, **others: Any) -> SamplingParams:
    options: dict[str, Any] = {
        "max_tokens": 30,
        "temperature": 0.9,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": [TokenBias(3, 2.0)],
        "min_tokens": 25,
        "stop_token_ids": [1],
        "top_logprobs": 4,
        "raw_logprobs": True,
        "seed": seed,
    }
    return SamplingParams(**(options | others))


def continue_sampling(
    turns: list[EngineSequence], steps: int, start: int = 0, compiled: Native | None = None
) -> list[list[Any]]:
    """Return the output of ``steps`` steps of each turn; logits are random, and each turn's own."""
    result: list[list[Any]] = [[] for _ in turns]
    for step in range(start, start + steps):
        logits = torch.cat([random_logits(1000 * turn.sampling.seed + step) for turn in turns])
        output = draw(turns, logits, compiled)
        for row, turn in enumerate(turns):
            token_id = int(output.token_ids[row])
            result[row].append((token_id, float(output.logprobs[row]), output.attachments.get(row)))
            turn.append(token_id)
    return result


def test_a_turn_that_is_moved_is_sampled_as_if_it_had_stayed() -> None:
    stayed = continue_sampling([make_turn(asking_for_everything(7), [5, 3, 5])], 24)[0]
    for moved_after in (1, 10, 23):
        output = [token_id for token_id, *_ in stayed[:moved_after]]
        asked = asking_for_everything(7, max_tokens=30 - moved_after)
        moved = make_turn(asked, [5, 3, 5], output)
        assert (
            continue_sampling([moved], 24 - moved_after, start=moved_after)[0]
            == stayed[moved_after:]
        )


@in_both_codes
def test_a_rows_sample_does_not_depend_on_other_rows_options(
    compiled: Native | None,
) -> None:
    plain = SamplingParams(max_tokens=30, seed=2)
    askers = [
        asking_for_everything(1),
        plain,
        asking_for_everything(3, temperature=0.0, min_p=0.5),
        SamplingParams(max_tokens=30, seed=4, top_logprobs=2),
        SamplingParams(max_tokens=30, seed=5, min_p=0.1, temperature=0.3),
    ]
    together = continue_sampling([make_turn(asked, [4, 4, 9]) for asked in askers], 12, 0, compiled)
    for asked, result in zip(askers, together, strict=True):
        assert continue_sampling([make_turn(asked, [4, 4, 9])], 12, 0, compiled) == [result]
    assert [attachments for *_, attachments in together[1]] == [None] * 12


@in_both_codes
@pytest.mark.parametrize("edits", [True, False])
def test_raw_log_probs_are_those_of_the_model_whatever_is_sampled_from(
    edits: bool, compiled: Native | None
) -> None:
    asked = SamplingParams(max_tokens=5, top_k=3, temperature=0.3, raw_logprobs=True)
    turn = make_turn(asking_for_everything(1, temperature=0.3) if edits else asked, [4, 4, 9])
    logits = random_logits(0)
    output = draw([turn], logits, compiled)
    raw = np.frombuffer(output.attachments[0]["raw_logprobs"], np.float32)
    plain = torch.log_softmax(logits, -1)[0, output.token_ids[0]]
    np.testing.assert_allclose(raw, [plain.item()], rtol=1e-6)
    assert abs(raw[0] - output.logprobs[0]) > 0.1


@in_both_codes
def test_likeliest_tokens_come_in_order_and_excluded_ones_have_no_probability(
    compiled: Native | None,
) -> None:
    turn = make_turn(SamplingParams(max_tokens=5, top_k=3, top_logprobs=5), [4])
    logits = random_logits(3)
    attachments = draw([turn], logits, compiled).attachments[0]
    logprobs = np.frombuffer(attachments["top_logprobs"], np.float32)
    best = torch.topk(logits[0], 3)
    assert np.frombuffer(attachments["top_ids"], np.int32)[:3].tolist() == best.indices.tolist()
    np.testing.assert_allclose(logprobs[:3], torch.log_softmax(best.values, -1), atol=1e-6)
    assert np.isneginf(logprobs[3:]).all()
    assert "raw_logprobs" not in attachments


@in_both_codes
def test_rows_of_one_turn_are_each_banned_by_their_own_index(compiled: Native | None) -> None:
    asked = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=[6], temperature=0.0)
    first = next_sampling(make_turn(asked, [1, 2], []))
    drafted = [replace(first, index=index) for index in (3, 2, 4, 0)]
    logits = torch.zeros(4, VOCAB)
    logits[:, 6], logits[:, 7] = 5.0, 4.0
    assert sample_rows(logits, drafted, compiled).token_ids.tolist() == [6, 7, 6, 7]


@in_both_codes
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_masked_rows_are_drawn_from_what_is_allowed_and_report_the_models_own_log_prob(
    compiled: Native | None, temperature: float
) -> None:
    allowed = [0, 3, 21, 22]
    asked = SamplingParams(
        max_tokens=9,
        temperature=temperature,
        logits_processors=[LogitsProcessor("allowed_tokens", {"token_ids": allowed}).to_str()],
        top_logprobs=VOCAB,
        kept_tokens=True,
        raw_logprobs=True,
    )
    logits = random_logits(3)[0]
    turn = make_turn(asked, [1, 2])
    expected = np.zeros(VOCAB)
    expected[allowed] = torch.softmax(logits[allowed] / temperature, -1).numpy()
    np.testing.assert_allclose(reported_distribution(turn, logits, compiled), expected, atol=2e-6)
    output = draw([turn], logits[None], compiled)
    raw = np.frombuffer(output.attachments[0]["raw_logprobs"], np.float32)
    own = torch.log_softmax(logits, -1)[int(output.token_ids[0])].item()
    assert raw.tolist() == pytest.approx([own], abs=1e-5)


def test_options_that_change_nothing_are_no_options() -> None:
    for asked in itertools.chain.from_iterable(
        [SamplingParams(max_tokens=5, top_p=p, temperature=t) for p in (0.5, 1.0)] for t in (0.0, 1)
    ):
        assert make_turn(asked, [1]).sampling.options is None
