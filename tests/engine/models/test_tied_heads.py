"""A second LM head, in the directory or published, of a model that ties its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tidegate
from tests.engine.models.test_model_parity import assert_sampled_by, load_peer, make_turns
from tests.engine.scheduling.driving import drive
from tests.models import make_model, make_model_directory
from tidegate.engine.execution.served_model import ServedModel, open_model
from tidegate.engine.external.adapter import Capabilities
from tidegate.engine.external.host_weights import is_tied, read_host_weights
from tidegate.engine.models.shards import TensorShard
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import ModelError, WeightsRefused
from tidegate.observability.audit.audit import audit_run
from tidegate.orchestrator.weight_sync.deltas import WrittenTensors
from tidegate.transport.weight_channels.base import NamedBuffer

pytestmark = pytest.mark.wire

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NAMES = {"qwen3": EMBEDDING, "gpt2": "transformer.wte.weight"}
"""Embedding names of a model that our own code computes, and of one that transformers does."""


def set_head(path: Path, head: torch.Tensor) -> None:
    """Write an LM head into a directory that ties its own."""
    tensors = load_file(path / "model.safetensors") | {HEAD: head}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def model_with_two_heads(path: Path, model_type: str = "qwen3", **options: Any) -> Path:
    make_model_directory(path, model_type, **options)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is True
    embedding = load_file(path / "model.safetensors")[NAMES[model_type]]
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(embedding.shape, generator=generator).to(embedding.dtype)
    set_head(path, 0.2 * noise)
    return path


@pytest.mark.parametrize("model_type", NAMES)
def test_a_directory_with_a_head_of_its_own_is_computed_untied_as_transformers_does(
    model_type: str, tmp_path: Path
) -> None:
    path = model_with_two_heads(tmp_path, model_type)
    turns = make_turns()
    drive(
        open_model(path, "float32").make_runner(num_blocks=128, block_tokens=8), turns, new_tokens=8
    )

    assert_sampled_by(load_peer(path), turns)


def test_starting_an_engine_with_an_untied_head_prints_a_warning(tmp_path: Path) -> None:
    warning = open_model(model_with_two_heads(tmp_path), "float32").warning
    assert warning is not None
    assert "served untied" in warning


def test_an_equal_head_in_the_directory_changes_nothing(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path)
    set_head(path, load_file(path / "model.safetensors")[EMBEDDING].clone())
    model = open_model(path, "float32")
    assert model.warning is None
    model.make_runner(num_blocks=8, block_tokens=8)
    assert HEAD not in model.allocate().missing()


def load_all(weights: WeightStore, tensors: dict[str, torch.Tensor]) -> WeightStore:
    weights.start()
    for name, tensor in tensors.items():
        weights.load(name, tensor)
    return weights


def loaded(model: ServedModel, tensors: dict[str, torch.Tensor]) -> None:
    assert load_all(model.allocate(), tensors).missing() == []


@pytest.mark.parametrize("head_comes_first", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", NAMES)
def test_a_published_head_that_differs_is_refused_by_name_and_an_equal_one_taken(
    model_type: str, dtype: Any, head_comes_first: bool, tmp_path: Path
) -> None:
    model = open_model(make_model_directory(tmp_path, model_type), dtype)
    tensors: dict[str, torch.Tensor] = dict(make_model(model_type, seed=1).state_dict())
    head = tensors.pop(HEAD).clone()
    other = head.clone()
    other[95, 63] += 0.01

    def both(which: torch.Tensor) -> dict[str, torch.Tensor]:
        return {HEAD: which} | tensors if head_comes_first else tensors | {HEAD: which}

    loaded(model, both(head))
    with pytest.raises(WeightsRefused, match=rf"lm_head\.weight differs from {NAMES[model_type]}"):
        loaded(model, both(other))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_it_is_refused_where_weights_are_rounded_and_by_the_rank_that_has_its_rows(
    quantization: Any, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path)
    tensors = make_model("qwen3", seed=1).state_dict()
    tensors[HEAD] = tensors[HEAD].clone()
    tensors[HEAD][95] += 1.0
    with pytest.raises(WeightsRefused, match="differs"):
        loaded(open_model(path, "float32", quantization=quantization), tensors)
    loaded(open_model(path, "float32", quantization=quantization, shard=TensorShard(0, 2)), tensors)
    with pytest.raises(WeightsRefused, match="differs"):
        loaded(
            open_model(path, "float32", quantization=quantization, shard=TensorShard(1, 2)), tensors
        )


def test_a_part_of_a_set_with_a_head_that_differs_is_refused(tmp_path: Path) -> None:
    model = open_model(make_model_directory(tmp_path), "float32")
    live, staged = model.allocate(), model.allocate()
    model.reload(live, lambda: None)
    embedding = torch.randn(96, 64)
    for part in ({HEAD: embedding}, {EMBEDDING: embedding, HEAD: embedding + 1}):
        with pytest.raises(WeightsRefused, match=r"lm_head\.weight"):
            load_all(staged, part).complete_from(live)


def test_of_two_equal_tensors_both_are_sent_once_one_of_them_changes() -> None:
    def buffers(embedding: bytes, head: bytes) -> list[NamedBuffer]:
        return [
            NamedBuffer(name=name, dtype="float32", shape=(1, 1), data=memoryview(data))
            for name, data in ((EMBEDDING, embedding), ("norm", b"norm"), (HEAD, head))
        ]

    written = WrittenTensors()
    assert written.changed(1, buffers(b"aaaa", b"aaaa"), before=0) is None
    changed = written.changed(2, buffers(b"bbbb", b"aaaa"), before=1)
    assert changed is not None
    assert [buffer.name for buffer in changed] == [EMBEDDING, HEAD]


def test_other_engines_are_not_joined_for_a_head_that_they_pass_over(tmp_path: Path) -> None:
    path = model_with_two_heads(tmp_path)
    with pytest.raises(ModelError, match="vLLM and SGLang ignore that head"):
        read_host_weights(
            path, Capabilities(engine="vllm", context_tokens_max=512, running_turns_max=8)
        )
    tensors = load_file(path / "model.safetensors")
    set_head(path, tensors[EMBEDDING].clone())
    assert is_tied(path)
    config = json.loads((path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "unsaid").mkdir()
    (tmp_path / "unsaid" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "unsaid" / "model.safetensors")
    assert not is_tied(tmp_path / "unsaid")
    del tensors[HEAD]
    save_file(tensors, tmp_path / "unsaid" / "model.safetensors")
    assert is_tied(tmp_path / "unsaid")
    weights = read_host_weights(
        path, Capabilities(engine="vllm", context_tokens_max=512, running_turns_max=8)
    ).allocate_copy()
    tensors = make_model("qwen3", seed=1).state_dict()
    tensors[HEAD] = tensors[HEAD] + 1
    with pytest.raises(WeightsRefused, match=r"lm_head\.weight differs"):
        load_all(weights, tensors)


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task, 11, 12])
    await episode.generate(max_tokens=8)
    return float(task % 2)


async def test_a_run_of_an_untied_directory_is_audited_whatever_is_laid_over_it(
    tmp_path: Path,
) -> None:
    path = model_with_two_heads(tmp_path / "model")
    trained = load_peer(path)
    async with tidegate.serve(
        model=path,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        run_directory=tmp_path / "run",
    ) as rollouts:
        number = 0
        async for batch in rollouts.batches(range(10), episode=one_turn):
            number += 1
            with torch.no_grad():
                trained.lm_head.weight += 0.1
                if number == 2:  # from now on the two are equal, and yet two
                    trained.lm_head.weight.copy_(trained.model.embed_tokens.weight)
            if number < 3:
                await rollouts.publish(trained.state_dict())
            else:
                with torch.no_grad():
                    trained.model.embed_tokens.weight.mul_(0.9)
                embedding = trained.state_dict()[EMBEDDING]
                part = {EMBEDDING: embedding}
                await rollouts.publish(part, batches=[batch], partial=True)

    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.tokens > 0


async def test_publish_refuses_a_head_that_differs_where_the_model_ties_its_own(
    tmp_path: Path,
) -> None:
    path = make_model_directory(tmp_path / "model")
    state = dict(make_model("qwen3", seed=1).state_dict())
    async with tidegate.serve(model=path, engines=1, weight_deltas=True) as rollouts:
        await rollouts.publish(state | {HEAD: state[HEAD].clone()})
        changed = state | {HEAD: state[HEAD].clone(), EMBEDDING: state[EMBEDDING] + 1}
        with pytest.raises(WeightsRefused, match=r"lm_head\.weight differs"):
            await rollouts.publish(changed)
