"""Are guesses invisible but for speed, with real weights and real log-probs?"""

from pathlib import Path

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
from tidegate.engine.rollout_drafts import RolloutDrafts
from tidegate.engine.runner import ModelRunner
from tidegate.engine.weights import Weights, load_directory
from tidegate.kernels.native import Native


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Of a model that often repeats itself."""
    path: Path = make_repeating_model(tmp_path_factory.mktemp("model"))
    return load_directory(path, ModelConfig.from_directory(path), torch.float32)


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
