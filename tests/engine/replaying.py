"""Version audit: recomputes an engine's tokens with the weights that their provenance names."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from tests.engine.external.fake_engine import ReportedTurn
from tests.engine.orchestra import Orchestra, SeenTurn
from tidegate.engine.execution.runner import ModelRunner, Row, RowSampling, Runner
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.weights.weight_store import WeightStore

BLOCK_TOKENS = 16

W = TypeVar("W", bound=WeightStore)


def model_runner(weights: Weights, blocks: int) -> ModelRunner:
    """Return a runner of Tidegate's own code."""
    return ModelRunner(weights.config, weights, num_blocks=blocks, block_tokens=BLOCK_TOKENS)


def assert_reproduced(
    turn: SeenTurn | ReportedTurn,
    weights: Mapping[int, W],
    make_runner: Callable[[W, int], Runner],
    *,
    tolerance_nats: float = 1e-4,
) -> None:
    """Recompute a turn, its KV with the weights that its provenance names, and compare.

    ``make_runner`` takes weights and a number of blocks of ``BLOCK_TOKENS``.
    """
    blocks = -(-(len(turn.prompt) + len(turn.token_ids)) // BLOCK_TOKENS)
    runner = make_runner(next(iter(weights.values())), blocks)
    context = np.array(turn.prompt + turn.token_ids, np.int32)
    requested = turn.sampling
    prefills = {prefill.output_tokens: prefill for prefill in turn.prefills}
    histories: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for index, version in enumerate(turn.versions):
        last = len(turn.prompt) + index - 1
        if index in prefills:
            histories[index] += [(s.version, s.start, s.end) for s in prefills[index].spans]
        else:
            histories[index].append((version, last, last + 1))
    token_ids: list[int] = []
    logprobs: list[float] = []
    for index, history in histories.items():
        for number, (version, start, end) in enumerate(history):
            runner.swap(weights[version])
            sampling = None
            if number == len(history) - 1:
                sampling = RowSampling(
                    temperature=requested.temperature,
                    top_k=requested.top_k,
                    top_p=requested.top_p,
                    seed=requested.seed,
                    index=turn.sampled_before + index,
                )
            row = Row(context[start:end], start, list(range(blocks)), sampling)
            output = runner.step([row])
        token_ids += output.token_ids.tolist()
        logprobs += output.logprobs.tolist()
    assert token_ids == turn.token_ids
    np.testing.assert_allclose(logprobs, turn.logprobs, atol=tolerance_nats)


def assert_replays(turn: int, engine: Orchestra, weights: dict[int, Weights]) -> None:
    """Check each token against the weights that its provenance names."""
    assert_reproduced(engine.turns[turn], weights, model_runner)
