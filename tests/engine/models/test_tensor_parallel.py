"""Tensor parallelism: parity with a single rank, and all-or-none swaps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.engine.orchestra import named_buffers
from tests.engine.ranks.ranked import RankedEngine, ranked_engine
from tests.engine.scheduling.driving import DrivenTurn, drive
from tests.engine.weights.test_staging import answers
from tests.models import make_model_directory
from tidegate.engine.execution.runner import Row, RowSampling, Runner
from tidegate.engine.execution.served_model import ServedModel, open_model
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Quantization, fill_from_directory
from tidegate.engine.models.shards import TensorShard
from tidegate.engine.ranks.ranks import Ranks
from tidegate.engine.sampling.scoring import RowScoring
from tidegate.engine.weights.staging import Live
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import ConfigError
from tidegate.kernels.weight_matrix import published
from tidegate.transport.messages import (
    Adapter,
    Message,
    StartWeightUpdate,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.weight_channels import sender
from tidegate.transport.weight_channels.base import NamedBuffer

pytestmark = pytest.mark.slow

TOLERANCE_NATS = 1e-4
"""In float32; sums over ranks are added in another order."""

TAUGHT = Adapter(name="taught", scale=0.5)

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "kv-heads-shared-out": ("qwen3", 2, {}),
    "kv-head-on-both": ("qwen2", 2, {"tied": False, "num_key_value_heads": 1}),
    "vocabulary-that-does-not-divide": ("qwen3", 2, {"vocab_size": 89, "tied": False}),
    "four-ranks-two-kv-heads": ("qwen3", 4, {"vocab_size": 90}),
    "biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "experts": ("qwen3_moe", 2, {"tied": False}),
    "norms-after-blocks-and-caps": ("gemma2", 2, {}),
}


def make_turns(adapters: Sequence[str] = ("",)) -> list[DrivenTurn]:
    sampling = RowSampling(0.8, 0, 1.0, 5, 0)
    return [
        DrivenTurn(
            [n % 80 for n in range(seed, seed + length)],
            sampling,
            (chunk,),
            adapter=adapters[seed % len(adapters)],
        )
        for seed, (length, chunk) in enumerate(((1, 1), (17, 64), (40, 13), (5, 3)))
    ]


def one_rank(path: Path, quantization: Quantization | None = None) -> Runner:
    model = open_model(path, "float32", quantization=quantization)
    return model.make_runner(num_blocks=128, block_tokens=8)


def assert_alike(alone: list[DrivenTurn], together: list[DrivenTurn]) -> None:
    for one, other in zip(alone, together, strict=True):
        assert one.sampled == other.sampled
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE_NATS)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_sample_what_one_alone_does(name: str, tmp_path: Path) -> None:
    model_type, ranks, fields = MODELS[name]
    path = make_model_directory(tmp_path, model_type, **fields)
    alone, together = make_turns(), make_turns()
    drive(one_rank(path), alone, new_tokens=6)
    with ranked_engine(path, ranks) as engine:
        drive(engine.runner, together, new_tokens=6)
    assert_alike(alone, together)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_its_slice_of_the_rounded_whole_to_the_bit_also_of_parts_laid_over_it(
    name: str, quantization: Quantization, tmp_path: Path
) -> None:
    model_type, ranks, fields = MODELS[name]
    paths = [
        make_model_directory(tmp_path / str(seed), model_type, seed=seed, **fields)
        for seed in (0, 1)
    ]
    whole = two_versions(open_model(paths[0], "float32", quantization=quantization), paths)
    for number in range(ranks):
        shard = TensorShard(number, ranks)
        model = open_model(paths[0], "float32", quantization=quantization, shard=shard)
        for tensor, place in two_versions(model, paths)._copy_targets.items():
            if "_proj" not in tensor:
                continue
            for mine in place.targets:  # none, of other ranks' experts
                [its] = whole._copy_targets[tensor].targets
                assert torch.equal(published(mine), place.cut(published(its))), tensor


def two_versions(model: ServedModel, paths: list[Path]) -> WeightStore:
    """The first layer of the second directory, laid over the first directory."""
    before, after = model.allocate(), model.allocate()
    fill_from_directory(before, paths[0])
    after.start()
    for name, tensor in read_tensors(paths[1]):
        if ".layers.0." in name:
            after.load(name, tensor)
    after.complete_from(before)
    return after


def test_ranks_together_score_given_tokens_as_transformers_does(tmp_path: Path) -> None:
    import transformers

    path = make_model_directory(tmp_path, "qwen3", vocab_size=89)
    tokens = np.arange(20, dtype=np.int32)
    scoring = RowScoring(19, "logprobs", tokens[1:], top_logprobs=3)
    with ranked_engine(path) as engine:
        [score] = engine.runner.step([Row(tokens[:-1], 0, [5, 3, 1], None, scoring)]).scores

    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logprobs = peer.eval()(torch.from_numpy(tokens[None, :-1]).long()).logits[0].log_softmax(-1)
    expected = logprobs.gather(-1, torch.from_numpy(tokens[1:, None]).long()).squeeze(-1)
    assert score.logprobs == pytest.approx(expected.numpy(), abs=TOLERANCE_NATS)
    assert score.top_ids is not None
    assert score.top_ids.tolist() == logprobs.topk(3, -1).indices.tolist()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_two_deterministic_ranks_give_a_turn_the_same_bits_in_every_batch(
    quantization: Quantization | None, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path, "qwen3")
    together = make_turns()
    alone = [make_turns()[n] for n in range(len(together))]
    with ranked_engine(path, deterministic=True, quantization=quantization) as engine:
        drive(engine.runner, together, new_tokens=4)
        for turn in alone:
            turn.chunks = (2,)
            drive(engine.runner, [turn], new_tokens=4)
    assert [turn.logprobs for turn in together] == [turn.logprobs for turn in alone]


# ---------------------------------------------------------------- new weights


def stage(
    engine: RankedEngine,
    version: int,
    model: list[NamedBuffer],
    adapter: dict[str, torch.Tensor] | None = None,
) -> list[Message]:
    """Stage an update on all ranks, optionally with an adapter."""
    buffers = [
        NamedBuffer(name, "float32", tuple(tensor.shape), tensor.numpy().data.cast("B"))
        for name, tensor in (adapter or {}).items()
    ]
    channel = sender("shm")
    try:
        engine.staging.init(channel.init())
        live = Live(version - 1, engine.runner.weights)
        engine.staging.start(StartWeightUpdate(version=version), live)
        [update] = channel.write(version, [*model, *buffers])
        parts = [(None, update.tensors[: len(model)]), (TAUGHT, update.tensors[len(model) :])]
        for number, (of, specs) in enumerate(parts if adapter else parts[:1]):
            engine.staging.update(
                replace(update, tensors=specs, adapter=of, is_last=number == bool(adapter))
            )
        return answers(engine.staging)
    finally:
        channel.close()


def swap(engine: RankedEngine, version: int) -> None:
    engine.runner.swap(engine.staging.swap(version, engine.runner.weights))


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_all_ranks_compute_with_new_weights_from_the_swap_on(
    model_type: str, tmp_path: Path
) -> None:
    paths = [make_model_directory(tmp_path / str(seed), model_type, seed=seed) for seed in (0, 1)]
    old, new, before, after = (make_turns() for _ in range(4))
    drive(one_rank(paths[0]), old, new_tokens=3)
    drive(one_rank(paths[1]), new, new_tokens=3)
    with ranked_engine(paths[0]) as engine:
        [reported] = stage(engine, 1, named_buffers(paths[1]))
        assert isinstance(reported, WeightsStaged)
        drive(engine.runner, before, new_tokens=3)  # staged is not live
        swap(engine, 1)
        drive(engine.runner, after, new_tokens=3)
    assert_alike(old, before)
    assert_alike(new, after)


def test_what_one_rank_has_no_room_for_is_staged_on_none(tmp_path: Path) -> None:
    paths = [make_model_directory(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    alone, together = make_turns(), make_turns()
    drive(one_rank(paths[0]), alone, new_tokens=3)
    with ranked_engine(paths[0], lacks_room=True) as engine:
        [reported] = stage(engine, 1, named_buffers(paths[1]))
        assert isinstance(reported, WeightsFailed)
        assert "rank 1: " in reported.message
        assert not engine.staging.is_staged(1)
        drive(engine.runner, together, new_tokens=3)  # the old ones serve on, on both
    assert_alike(alone, together)


def test_each_rank_adds_its_part_of_an_adapter(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen3")
    tensors = _random_adapter(path)
    bare, alone, together = make_turns(), make_turns(["", "taught"]), make_turns(["", "taught"])
    runner = one_rank(path)
    drive(runner, bare, new_tokens=6)
    runner.weights.adapters = {"taught": runner.weights.make_adapter(tensors, TAUGHT.scale)}
    drive(runner, alone, new_tokens=6)
    with ranked_engine(path) as engine:
        [reported] = stage(engine, 1, named_buffers(path), tensors)
        assert isinstance(reported, WeightsStaged)
        swap(engine, 1)
        drive(engine.runner, together, new_tokens=6)
    assert_alike(alone, together)
    assert bare[0].logprobs == alone[0].logprobs
    assert bare[1].logprobs != pytest.approx(alone[1].logprobs, abs=0.01)


def _random_adapter(path: Path) -> dict[str, torch.Tensor]:
    """Return an adapter of every projection of the first layer."""
    noise = torch.Generator().manual_seed(0)
    tensors = {}
    for buffer in named_buffers(path):
        if ".layers.0." in buffer.name and "_proj" in buffer.name:
            name = buffer.name.removesuffix(".weight")
            rows, columns = buffer.shape
            tensors[f"{name}.lora_A.weight"] = torch.randn(3, columns, generator=noise)
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 3, generator=noise)
    return tensors


# ---------------------------------------------------------------- what can't be


def test_a_model_that_ranks_cannot_share_evenly_is_refused_with_its_numbers(
    tmp_path: Path,
) -> None:
    config = ModelConfig.from_directory(make_model_directory(tmp_path))
    with pytest.raises(ConfigError, match="has 4 query heads and 2 KV heads, which can't be split"):
        TensorShard(0, 3).local(config)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gpt2", r"tensor_parallel_size=2: .* leave tensor_parallel_size out"),
        ("gpt_oss", "GptOssForCausalLM is served by one rank only"),
    ],
)
def test_models_that_one_rank_only_computes_are_refused(
    model_type: str, why: str, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path, model_type)
    with pytest.raises(ConfigError, match=why):
        open_model(path, "auto", shard=TensorShard(0, 2))


def test_sums_that_depend_on_the_batch_are_refused_where_bits_must_not() -> None:
    with pytest.raises(ConfigError, match="set tensor_parallel_size to 2 or 1"):
        Ranks(3, is_deterministic=True)
