"""Are guesses invisible but for speed, with real weights and real log-probs?"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.fake_engine import DrivenEngine, ToldTurn
from tests.engine.test_prefixes_exactly import ROUNDING_NATS
from tests.repeating import make_repeating_model
from tidegate.engine.drafts import DraftSource
from tidegate.engine.lookup_drafts import LookupDrafts
from tidegate.engine.model import native_for
from tidegate.engine.model_config import ModelConfig
from tidegate.engine.model_drafts import ModelDrafts
from tidegate.engine.options import OptionReader
from tidegate.engine.rollout_drafts import RolloutDrafts
from tidegate.engine.runner import ModelRunner
from tidegate.engine.scheduler import Scheduler, StepColumns
from tidegate.engine.tokenizer import ModelTokenizer
from tidegate.engine.weights import Weights, load_directory
from tidegate.kernels.native import Native
from tidegate.transport.messages import STOP, SamplingParams, SubmitTurn
from tidegate.transport.sampling import TokenBias


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that often repeats itself."""
    return make_repeating_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def weights(model: Path) -> Weights:
    return load_directory(model, ModelConfig.from_directory(model), torch.float32)


def sample(
    weights: Weights, drafts: DraftSource | None, native: Native | None, num_blocks: int
) -> tuple[DrivenEngine, list[ToldTurn]]:
    engine = DrivenEngine(
        [weights],
        drafts=drafts,
        native=native,
        num_blocks=num_blocks,
        max_step_tokens=40,
        context_tokens_max=90,
    )
    submit_all(engine)
    engine.run()
    return engine, list(engine.turns.values())


def submit_all(engine: DrivenEngine) -> None:
    for seed in range(6):
        engine.submit([3, 1, 4, 1, seed], 60, seed=seed, temperature=seed % 2)


@pytest.mark.parametrize("code", ["torch", "compiled"])
@pytest.mark.parametrize("num_blocks", [100, 30], ids=["room", "preemptions"])
def test_looked_up_guesses_change_no_token_and_no_log_prob(
    weights: Weights, code: str, num_blocks: int
) -> None:
    native = native_for(weights.config, torch.float32) if code == "compiled" else None
    if code == "compiled" and native is None:
        pytest.skip("no C++ compiler: engines compute by torch's code here")
    _, plain = sample(weights, None, native, num_blocks)
    engine, guessed = sample(weights, LookupDrafts(), native, num_blocks)
    for told, expected in zip(guessed, plain, strict=True):
        assert told.token_ids == expected.token_ids
        assert told.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING_NATS)
    assert engine.accepted_tokens > 30


def test_earlier_samples_of_a_prompt_are_said_again_in_fewer_steps(weights: Weights) -> None:
    engine, first = sample(weights, RolloutDrafts(), None, 100)
    before, drafted_before = engine.accepted_tokens, engine.drafted_tokens
    submit_all(engine)
    engine.run()
    again = list(engine.turns.values())[len(first) :]
    for told, expected in zip(again, first, strict=True):
        assert told.token_ids == expected.token_ids
        assert told.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING_NATS)
    accepted = engine.accepted_tokens - before
    assert accepted > 0.8 * (engine.drafted_tokens - drafted_before)
    assert accepted > 200


@pytest.mark.parametrize("num_blocks", [100, 30], ids=["room", "preemptions"])
def test_a_draft_models_guesses_change_no_token_and_one_that_is_as_good_is_always_right(
    weights: Weights, num_blocks: int
) -> None:
    _, plain = sample(weights, None, None, num_blocks)
    for blocks, good in ((100, True), (12, False)):
        small = ModelRunner(weights.config, weights, num_blocks=blocks, block_tokens=4)
        drafts = ModelDrafts(small, context_tokens_max=90)
        engine, guessed = sample(weights, drafts, None, num_blocks)
        for told, expected in zip(guessed, plain, strict=True):
            assert told.token_ids == expected.token_ids
            assert told.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING_NATS)
        assert engine.drafted_tokens > 0
        assert engine.accepted_tokens == engine.drafted_tokens
        assert not good or engine.accepted_tokens > 150
        assert drafts._cache.free_blocks == blocks


LETTER_Z = ord("z") - 31
"""Its token, in :mod:`tests.models`."""


def told_with_options(
    model: Path, weights: Weights, drafts: DraftSource | None
) -> list[StepColumns]:
    """What an engine says of a turn with all the options that are guessed for."""
    engine = DrivenEngine([weights], num_blocks=40, max_step_tokens=40, context_tokens_max=90)
    reader = OptionReader(
        vocab_size=engine.limits.vocab_size,
        max_running_turns=4,
        tokenizer=ModelTokenizer(model),
    )
    scheduler = Scheduler(engine.limits, options=reader, drafts=drafts)
    asked = SamplingParams(
        max_tokens=60,
        seed=5,
        min_p=0.01,
        min_tokens=30,
        logit_bias=[TokenBias(LETTER_Z, 3.0)],
        stop_strings=["zz"],
        raw_logprobs=True,
        top_logprobs=2,
    )
    prompt = np.array([3, 4, 5, LETTER_Z], "<i4").tobytes()
    scheduler.submit(SubmitTurn(turn=0, token_ids=prompt, sampling=asked))
    told = []
    while rows := scheduler.plan():
        columns = scheduler.complete(engine.runner.step(rows))
        assert columns is not None
        told.append(columns)
    return told


def test_options_of_guessed_tokens_take_effect_one_by_one(model: Path, weights: Weights) -> None:
    plain = told_with_options(model, weights, None)
    guessed = told_with_options(model, weights, LookupDrafts())
    assert len(guessed) < len(plain) == 31
    assert (plain[-1].finish, guessed[-1].finish) == (bytes([STOP]), bytes([STOP]))

    def joined(told: list[StepColumns], column: str) -> bytes:
        return b"".join(getattr(step, column) for step in told)

    def details(told: list[StepColumns], column: str) -> list[float]:
        kind = "<i4" if column == "top_ids" else "<f4"
        all_of_it = b"".join(getattr(detail, column) for step in told for detail in step.details)
        return [float(value) for value in np.frombuffer(all_of_it, kind)]

    assert joined(guessed, "token_ids") == joined(plain, "token_ids")
    for column in ("raw_logprobs", "top_ids", "top_logprobs"):
        expected = details(plain, column)
        assert len(expected) == (31 if column == "raw_logprobs" else 62)
        assert details(guessed, column) == pytest.approx(expected, abs=ROUNDING_NATS)
