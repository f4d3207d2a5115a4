"""Version audit: recomputes an engine's tokens with the weights that their provenance names."""

from collections import defaultdict

import numpy as np

from tests.engine.orchestra import Orchestra, SeenTurn
from tidegate.engine.execution.runner import ModelRunner, Row, RowSampling
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights

BLOCK_TOKENS = 16


def replay(turn: SeenTurn, weights: dict[int, Weights], config: ModelConfig) -> SeenTurn:
    """Recompute a turn, its KV with the weights that its provenance names."""
    blocks = -(-(len(turn.prompt) + len(turn.token_ids)) // BLOCK_TOKENS)
    runner = ModelRunner(
        config, next(iter(weights.values())), num_blocks=blocks, block_tokens=BLOCK_TOKENS
    )
    context = np.array(turn.prompt + turn.token_ids, np.int32)
    requested = turn.sampling
    prefills = {prefill.output_tokens: prefill for prefill in turn.prefills}
    again = SeenTurn(turn.prompt, requested)
    histories: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for index, version in enumerate(turn.versions):
        last = len(turn.prompt) + index - 1
        if index in prefills:
            histories[index] += [(s.version, s.start, s.end) for s in prefills[index].spans]
        else:
            histories[index].append((version, last, last + 1))
    for index, history in histories.items():
        for number, (version, start, end) in enumerate(history):
            runner.weights = weights[version]
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
        again.token_ids += output.token_ids.tolist()
        again.logprobs += output.logprobs.tolist()
    return again


def assert_replays(turn: int, engine: Orchestra, weights: dict[int, Weights]) -> None:
    """Check each token against the weights that its provenance names."""
    seen = engine.turns[turn]
    config = next(iter(weights.values())).config
    again = replay(seen, weights, config)
    assert again.token_ids == seen.token_ids
    np.testing.assert_allclose(again.logprobs, seen.logprobs, atol=1e-4)
