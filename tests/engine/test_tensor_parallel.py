"""Does an engine of several ranks sample what one of a single rank samples, by the same numbers?"""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driving import DrivenTurn, drive
from tests.engine.ranked import ranked_engine
from tests.models import make_model_directory
from tidegate.engine.models.served_model import open_model
from tidegate.engine.runner import RowSampling

TOLERANCE_NATS = 1e-4
"""In float32; sums over ranks are added in another order."""

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "kv-heads-shared-out": ("qwen3", 2, {}),
    "kv-head-on-both": ("qwen2", 2, {"tied": False, "num_key_value_heads": 1}),
    "vocabulary-that-does-not-divide": ("qwen3", 2, {"vocab_size": 89, "tied": False}),
    "four-ranks-two-kv-heads": ("qwen3", 4, {"vocab_size": 90}),
    "biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "experts": ("qwen3_moe", 2, {"tied": False}),
    "norms-after-blocks-and-caps": ("gemma2", 2, {}),
}


def make_turns() -> list[DrivenTurn]:
    sampling = RowSampling(0.8, 0, 1.0, 5, 0)
    return [
        DrivenTurn([n % 80 for n in range(seed, seed + length)], sampling, (chunk,))
        for seed, (length, chunk) in enumerate(((1, 1), (17, 64), (40, 13), (5, 3)))
    ]


@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_sample_what_one_alone_does(name: str, tmp_path: Path) -> None:
    model_type, ranks, fields = MODELS[name]
    path = make_model_directory(tmp_path, model_type, **fields)
    alone = make_turns()
    drive(open_model(path, "float32").make_runner(num_blocks=128, block_tokens=8), alone, new_tokens=6)
    together = make_turns()
    with ranked_engine(path, ranks) as engine:
        drive(engine.runner, together, new_tokens=6)

    for one, other in zip(alone, together, strict=True):
        assert one.sampled == other.sampled
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE_NATS)
