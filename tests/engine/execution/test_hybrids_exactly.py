"""Recurrent states beside attention: preempted, shared and swapped turns, computed again by tag."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typing_extensions import override

from tests.engine.crowd import run_crowd
from tests.engine.external.fake_engine import FakeEngine, ReportedTurn
from tests.engine.replaying import BLOCK_TOKENS, assert_reproduced
from tests.models import HYBRID_TYPES, make_model_directory
from tidegate.engine.execution.fallback import FallbackRunner
from tidegate.engine.models.fallback_weights import FallbackWeights, load_fallback

pytestmark = pytest.mark.slow


class HybridEngine(FakeEngine):
    """Scheduler over a model of transformers; version n is the n-th of its weights."""

    def __init__(
        self, weights: Sequence[FallbackWeights], *, max_running_turns: int, num_blocks: int
    ) -> None:
        self._weights = weights
        super().__init__(
            vocab_size=96,
            block_tokens=4,
            max_running_turns=max_running_turns,
            max_step_tokens=24,
            num_blocks=num_blocks,
        )

    @override
    def _make_runner(self) -> FallbackRunner:
        limits = self.limits
        return FallbackRunner(
            self._weights[0], num_blocks=limits.num_blocks, block_tokens=limits.block_tokens
        )

    @override
    def _swap_weights(self, version: int) -> None:
        assert isinstance(self.runner, FallbackRunner)
        self.runner.swap(self._weights[version])


def load(model_type: str, directory: Path, *, versions: int) -> list[FallbackWeights]:
    paths = [
        make_model_directory(directory / str(seed), model_type, seed=seed)
        for seed in range(versions)
    ]
    return [load_fallback(path, torch.float32) for path in paths]


def assert_as_alone(turn: ReportedTurn, weights: Sequence[FallbackWeights]) -> None:
    assert_reproduced(
        turn,
        dict(enumerate(weights)),
        lambda of, blocks: FallbackRunner(of, num_blocks=blocks, block_tokens=BLOCK_TOKENS),
    )


@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_preempted_turns_that_share_states_sample_as_if_alone(
    model_type: str, tmp_path: Path
) -> None:
    weights = load(model_type, tmp_path, versions=1)
    # Two groups of three turns of up to 10 blocks, 5 of them shared: 40 where there are 24.
    engine = HybridEngine(weights, max_running_turns=6, num_blocks=24)
    prompts = [[first, *range(1, 21)] for first in (30, 31)]
    turns = [engine.submit(prompt, 18, seed=seed) for prompt in prompts for seed in range(3)]
    engine.run()

    reported = [engine.turns[turn] for turn in turns]
    prefills = [prefill for turn in reported for prefill in turn.prefills]
    assert len(prefills) > len(turns)  # some turns read their contexts again
    assert sum(prefill.cached_tokens for prefill in prefills) > 0
    for turn in reported:
        assert_as_alone(turn, weights)


@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_states_that_several_versions_made_are_those_that_the_provenance_names(
    model_type: str, tmp_path: Path
) -> None:
    weights = load(model_type, tmp_path, versions=2)
    engine = HybridEngine(weights, max_running_turns=6, num_blocks=36)
    crowd = run_crowd(engine, 50 + HYBRID_TYPES.index(model_type), swaps=True)

    assert crowd.cached_tokens > 0
    assert engine.recomputed_turns > 0  # kept turns with kv_policy=recompute, in mid-block mostly
    versions = [version for turn in engine.turns.values() for version in turn.versions]
    assert set(versions) == {0, 1}
    for turn in engine.turns.values():
        assert_as_alone(turn, weights)


@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_recompute_continues_from_the_state_at_the_end_of_a_block(
    model_type: str, tmp_path: Path
) -> None:
    weights = load(model_type, tmp_path, versions=2)
    engine = HybridEngine(weights, max_running_turns=2, num_blocks=36)
    turn = engine.submit([30, 1, 2, 3, 4], 12)
    engine.step()
    engine.step()  # version 0 has read 6 positions: a block, and half of the next
    engine.request_swap(1, "keep", "keep")
    engine.step()  # and version 1 the 7th
    engine.request_swap(0, "keep", "recompute")
    engine.run()

    reported = engine.turns[turn]
    assert (reported.versions, engine.recomputed_turns) == ([0, 0, 1, *[0] * 9], 1)
    assert [(s.version, s.start, s.end) for s in reported.prefills[1].spans] == [(0, 0, 8)]
    assert_as_alone(reported, weights)
