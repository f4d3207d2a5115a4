"""Speculative decoding with real weights: tokens and log-probs equal those without drafts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.external.fake_engine import DrivenEngine, ReportedTurn
from tests.engine.scheduling.test_prefixes_exactly import ROUNDING_NATS
from tests.repeating import make_repeating_model
from tidegate.engine.drafts.draft_model import ModelDrafts
from tidegate.engine.drafts.lookup import LookupDrafts
from tidegate.engine.drafts.rollouts import RolloutDrafts
from tidegate.engine.execution.runner import ModelRunner, Row, StepOutput
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights, load_directory
from tidegate.engine.models.tokenizer import ModelTokenizer
from tidegate.engine.sampling import options
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.scheduling.drafts import DraftSource
from tidegate.engine.scheduling.scheduler import EngineScheduler, StepColumns
from tidegate.engine.scheduling.sequences import EngineLimits, EngineSequence, admit
from tidegate.kernels.native import Native
from tidegate.transport.messages import STOP, SamplingParams, SubmitTurn
from tidegate.transport.sampling import TokenBias

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often repeats itself."""
    return make_repeating_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def weights(model: Path) -> Weights:
    return load_directory(model, ModelConfig.from_directory(model), torch.float32)


def sample(
    weights: Weights, drafts: DraftSource | None, native: Native | None, num_blocks: int
) -> tuple[DrivenEngine, list[ReportedTurn]]:
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
def test_lookup_drafts_change_no_token_and_no_log_prob(
    weights: Weights, code: str, num_blocks: int
) -> None:
    native = native_for(weights.config, torch.float32) if code == "compiled" else None
    if code == "compiled" and native is None:
        pytest.skip("no C++ compiler: engines compute by torch's code here")
    _, plain = sample(weights, None, native, num_blocks)
    engine, speculated = sample(weights, LookupDrafts(), native, num_blocks)
    for reported, expected in zip(speculated, plain, strict=True):
        assert reported.token_ids == expected.token_ids
        assert reported.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING_NATS)
    assert engine.accepted_tokens > 30


def test_rollout_drafts_repeat_earlier_samples_in_fewer_steps(weights: Weights) -> None:
    engine, first = sample(weights, RolloutDrafts(), None, 100)
    before, drafted_before = engine.accepted_tokens, engine.drafted_tokens
    submit_all(engine)
    engine.run()
    again = list(engine.turns.values())[len(first) :]
    for reported, expected in zip(again, first, strict=True):
        assert reported.token_ids == expected.token_ids
        assert reported.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING_NATS)
    accepted = engine.accepted_tokens - before
    assert accepted > 0.8 * (engine.drafted_tokens - drafted_before)
    assert accepted > 200


@pytest.mark.parametrize("num_blocks", [100, 30], ids=["room", "preemptions"])
def test_model_drafts_change_no_token_and_an_equal_model_is_always_accepted(
    weights: Weights, num_blocks: int
) -> None:
    _, plain = sample(weights, None, None, num_blocks)
    for blocks, good in ((100, True), (12, False)):
        small = ModelRunner(weights.config, weights, num_blocks=blocks, block_tokens=4)
        drafts = ModelDrafts(small, 90, small)
        engine, speculated = sample(weights, drafts, None, num_blocks)
        for reported, expected in zip(speculated, plain, strict=True):
            assert reported.token_ids == expected.token_ids
            assert reported.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING_NATS)
        assert engine.drafted_tokens > 0
        assert engine.accepted_tokens == engine.drafted_tokens
        assert not good or engine.accepted_tokens > 150
        assert drafts._cache.free_blocks == blocks


def make_turn(
    tokens: list[int], handle: int, limits: EngineLimits, stop: Sequence[int] = ()
) -> EngineSequence:
    message = SubmitTurn(
        turn=handle,
        token_ids=np.array(tokens, "<i4").tobytes(),
        sampling=SamplingParams(max_tokens=30, seed=handle, stop_token_ids=[*stop]),
    )
    return admit(message, limits, handle, OptionReader(vocab_size=100, max_running_turns=4))


LIMITS = EngineLimits(
    max_running_turns=4,
    max_step_tokens=64,
    num_blocks=400,
    block_tokens=4,
    context_tokens_max=1000,
    vocab_size=100,
)


def small_model(weights: Weights, context_tokens_max: int = 900) -> ModelDrafts:
    runner = ModelRunner(weights.config, weights, num_blocks=300, block_tokens=4)
    return ModelDrafts(runner, context_tokens_max, runner)


@pytest.mark.parametrize("others", [1, 3, 9])
def test_a_turn_that_decoded_elsewhere_gets_drafts_like_a_new_one(
    weights: Weights, others: int
) -> None:
    drafts, turn = small_model(weights), make_turn([3, 1, 4, 1], 7, LIMITS)
    (first,) = drafts.propose([turn], [6])
    turn.append(int(first[0]))
    for _ in range(others):
        turn.append((int(first[1]) + 1) % 50)
    (again,) = drafts.propose([turn], [6])
    fresh = small_model(weights)
    (expected,) = fresh.propose([turn], [6])
    assert again.tolist() == expected.tolist()
    for actual, reference in zip(kv_of(drafts, turn), kv_of(fresh, turn), strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-4, rtol=1e-4)


def kv_of(drafts: ModelDrafts, turn: EngineSequence) -> list[torch.Tensor]:
    """Return the draft model's KV of a turn's tokens, layer by layer."""
    positions = np.arange(turn.length)
    blocks = np.array(drafts._states[turn.handle].blocks)[positions // 4]
    return [cache[blocks, :, :, positions % 4] for cache in drafts._runner.cache_tensors()[:-1]]


def test_a_draft_ends_before_a_stop_token(weights: Weights) -> None:
    (whole,) = small_model(weights).propose([make_turn([3, 1, 4, 1], 7, LIMITS)], [6])
    for position in (0, 3):
        stop = int(whole[position])
        drafts, turn = small_model(weights), make_turn([3, 1, 4, 1], 7, LIMITS, [stop])
        for _ in range(2):  # the second time from the KV of the first
            (draft,) = drafts.propose([turn], [6])
            assert draft.tolist() == whole[: whole.tolist().index(stop)].tolist()


@pytest.mark.parametrize("lost", ["memory", "weights"])
def test_kv_that_is_gone_or_of_other_weights_is_computed_again(weights: Weights, lost: str) -> None:
    drafts, turn = small_model(weights), make_turn([3, 1, 4, 1], 7, LIMITS)
    (expected,) = drafts.propose([turn], [6])
    for cache in drafts._runner.cache_tensors()[:-1]:
        cache.zero_()
    if lost == "memory":
        drafts.forget_kv()
    else:
        weights.draft_version += 1
    (again,) = drafts.propose([turn], [6])
    assert again.tolist() == expected.tolist()


def test_a_turn_too_long_for_the_draft_model_does_not_stop_drafts_of_others(
    weights: Weights,
) -> None:
    drafts = small_model(weights, context_tokens_max=700)
    long, short = make_turn([5] * 690, 0, LIMITS), make_turn([3, 1, 4, 1], 1, LIMITS)
    nothing, draft = drafts.propose([long, short], [16, 4])
    assert (len(nothing), len(draft)) == (0, 4)


class TightRunner(ModelRunner):
    """Runner that is out of memory in its third step."""

    steps = 0

    def step(self, rows: Sequence[Row]) -> StepOutput:
        self.steps += 1
        if self.steps == 3:
            torch.empty(1 << 54)
        return super().step(rows)


def test_a_draft_model_without_memory_proposes_nothing_and_later_continues(
    weights: Weights,
) -> None:
    runner = TightRunner(weights.config, weights, num_blocks=100, block_tokens=4)
    drafts, turn = ModelDrafts(runner, 900, runner), make_turn([3, 1, 4, 1], 7, LIMITS)
    assert [len(draft) for draft in drafts.propose([turn], [6])] == [0]
    assert [len(draft) for draft in drafts.propose([turn], [6])] == [6]


LETTER_Z = ord("z") - 31
"""Token of the letter z, in :mod:`tests.models`."""


def reported_with_options(
    model: Path, weights: Weights, drafts: DraftSource | None
) -> list[StepColumns]:
    """Return the output of a turn with all options that drafts support."""
    engine = DrivenEngine([weights], num_blocks=40, max_step_tokens=40, context_tokens_max=90)
    reader = OptionReader(
        vocab_size=engine.limits.vocab_size,
        max_running_turns=4,
        tokenizer=ModelTokenizer(model),
    )
    scheduler = EngineScheduler(engine.limits, options=reader, drafts=drafts)
    requested = SamplingParams(
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
    scheduler.submit(SubmitTurn(turn=0, token_ids=prompt, sampling=requested))
    reported = []
    while rows := scheduler.plan():
        columns = scheduler.complete(engine.runner.step(rows))
        assert columns is not None
        reported.append(columns)
    return reported


def test_sampling_options_apply_to_each_draft_token(model: Path, weights: Weights) -> None:
    plain = reported_with_options(model, weights, None)
    speculated = reported_with_options(model, weights, LookupDrafts())
    assert len(speculated) < len(plain) == 31
    assert (plain[-1].finish, speculated[-1].finish) == (bytes([STOP]), bytes([STOP]))

    def joined(reported: list[StepColumns], column: str) -> bytes:
        return b"".join(getattr(step, column) for step in reported)

    def details(reported: list[StepColumns], column: str) -> list[float]:
        kind = "<i4" if column == "top_ids" else "<f4"
        all_of_it = b"".join(
            each.values for step in reported for each in step.attachments if each.name == column
        )
        return [float(value) for value in np.frombuffer(all_of_it, kind)]

    assert joined(speculated, "token_ids") == joined(plain, "token_ids")
    for column in ("raw_logprobs", "top_ids", "top_logprobs"):
        expected = details(plain, column)
        assert len(expected) == (31 if column == "raw_logprobs" else 62)
        assert details(speculated, column) == pytest.approx(expected, abs=ROUNDING_NATS)


def test_attachments_of_draft_tokens_fit_into_a_step_message(
    model: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "TOP_LOGPROBS_BYTES_MAX", 4 * 3 * 2 * 8)
    reported = reported_with_options(model, weights, LookupDrafts())
    sizes = [
        each.length for step in reported for each in step.attachments if each.name == "top_ids"
    ]
    assert max(sizes) == 3  # of two tokens each, for one turn of four
