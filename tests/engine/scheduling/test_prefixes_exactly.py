"""Prefix sharing with real weights changes speed only, whatever happens to turns."""

import pytest

from tests.engine.crowd import MODES, POLICIES, run_crowd
from tests.engine.external.fake_engine import DrivenEngine, ReportedTurn
from tests.engine.orchestra import Models
from tests.engine.replaying import assert_reproduced, model_runner
from tidegate.transport.messages import KvPolicy, PauseMode

pytestmark = pytest.mark.slow

ROUNDING_NATS = 2e-5
"""Difference between two batches of the same float32 numbers; four times the most seen
in 20,000 tokens."""


def make_engine(models: Models, *, shares_prefixes: bool = True) -> DrivenEngine:
    return DrivenEngine(
        models.weights,
        shares_prefixes=shares_prefixes,
        max_running_turns=6,
        max_step_tokens=24,
        num_blocks=36,  # six turns of up to 15 blocks: most steps preempt, or wait for room
        block_tokens=4,
    )


@pytest.mark.parametrize("seed", range(4))
def test_pauses_and_preemptions_give_the_same_tokens_with_and_without_shared_prefixes(
    models: Models, seed: int
) -> None:
    has_sessions = seed % 2 == 1
    shared = run_crowd(make_engine(models), seed, swaps=False, has_sessions=has_sessions)
    alone = run_crowd(make_engine(models, shares_prefixes=False), seed, swaps=False)

    assert alone.cached_tokens == 0
    assert shared.cached_tokens > 100
    assert len(shared.asked) > 8
    for one, other in zip(shared.asked, alone.asked, strict=True):
        assert shared.tokens(one) == alone.tokens(other)
        assert shared.logprobs(one) == pytest.approx(alone.logprobs(other), abs=ROUNDING_NATS)


@pytest.mark.parametrize("seed", range(4))
def test_replaying_the_provenance_reproduces_every_token(models: Models, seed: int) -> None:
    crowd = run_crowd(make_engine(models), seed, swaps=True, has_sessions=seed % 2 == 1)

    assert crowd.cached_tokens > 50
    versions = [
        version for reported in crowd.engine.turns.values() for version in reported.versions
    ]
    assert set(versions) == {0, 1}
    weights = dict(enumerate(models.weights))
    for reported in crowd.engine.turns.values():
        assert_reproduced(reported, weights, model_runner, tolerance_nats=ROUNDING_NATS)


# ---------------------------------------------------------------- new weights


def fresh_answer(models: Models, prompt: list[int], *, version: int) -> ReportedTurn:
    """Return the output of an engine that never had other weights or turns."""
    engine = DrivenEngine(models.weights[version:], num_blocks=64, block_tokens=4)
    turn = engine.submit(prompt, 8)
    engine.run()
    return engine.turns[turn]


def assert_same(reported: ReportedTurn, expected: ReportedTurn) -> None:
    assert reported.token_ids == expected.token_ids
    assert reported.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING_NATS)


PROMPT = [(7 * n) % 96 for n in range(37)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_policy", POLICIES)
def test_after_a_swap_a_cached_prompt_gives_the_output_of_a_fresh_engine(
    models: Models, mode: PauseMode, kv_policy: KvPolicy
) -> None:
    engine = DrivenEngine(models.weights, num_blocks=64, block_tokens=4)
    before = [engine.submit(PROMPT, 8) for _ in range(3)]
    for _ in range(7):
        engine.step()
    engine.request_swap(1, mode, kv_policy)
    after = [engine.submit(PROMPT, 8) for _ in range(3)]
    engine.run()

    old, new = (fresh_answer(models, PROMPT, version=version) for version in (0, 1))
    assert abs(old.logprobs[0] - new.logprobs[0]) > 100 * ROUNDING_NATS
    for turn in after:
        assert_same(engine.turns[turn], new)
    for turn in before:
        count = engine.turns[turn].versions.count(0)
        assert engine.turns[turn].token_ids[:count] == old.token_ids[:count]


@pytest.mark.parametrize("kv_policy", POLICIES)
def test_a_pause_and_swap_in_mid_prefill_leave_no_stale_kv(
    models: Models, kv_policy: KvPolicy
) -> None:
    engine = DrivenEngine(models.weights, num_blocks=64, block_tokens=4)
    straddler = engine.submit(PROMPT, 8)
    engine.step()
    engine.step()
    engine.scheduler.pause("keep")
    engine.request_swap(1, "keep", kv_policy)
    engine.settle()
    engine.scheduler.resume()
    late = [engine.submit(PROMPT, 8) for _ in range(2)]
    engine.run()
    later = engine.submit(PROMPT, 8)
    engine.run()

    expected = fresh_answer(models, PROMPT, version=1)
    for turn in (*late, later):
        assert_same(engine.turns[turn], expected)
    assert engine.turns[later].prefills[0].cached_tokens == 36
    if kv_policy == "recompute":
        assert_same(engine.turns[straddler], expected)
    else:
        assert engine.turns[straddler].prefills[0].spans[0].version == 0
