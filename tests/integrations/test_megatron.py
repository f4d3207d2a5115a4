"""Parts of Hugging Face tensors from the state dicts of Megatron-core's ranks."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.megatron_layout import Sizes, State, megatron_state
from tests.models import make_model_directory
from tidegate.errors import ConfigError, WeightsRefused
from tidegate.integrations.megatron import MegatronRanks, hugging_face_parts
from tidegate.orchestrator.weight_sync.state_dict import own_parts, tensors_of, without_shards
from tidegate.orchestrator.weight_sync.tensor_parts import joined

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4}


def checkpoint(path: Path, architecture: str, **fields: Any) -> tuple[State, Any]:
    """Write a random model; return its tensors and config."""
    directory = make_model_directory(
        path / "model", architecture, dtype="bfloat16", vocab_size=90, **fields
    )
    state = load_file(directory / "model.safetensors")
    return state, transformers.AutoConfig.from_pretrained(directory)


def rejoined(whole: State, config: Any, sizes: Sizes, **layout: Any) -> State:
    """Return the tensors that the parts of all ranks make."""
    parts = []
    for rank in range(sizes.world):
        state = megatron_state(whole, config, sizes, rank, **layout)
        place = sizes.ranks(rank, config.num_hidden_layers)
        parts += own_parts(hugging_face_parts(state, config, place), rank=rank)
    return tensors_of(joined(parts))


def assert_same(got: State, wanted: State) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


@pytest.mark.parametrize("engine", [True, False], ids=["transformer_engine", "local"])
@pytest.mark.parametrize(("tensor", "pipeline"), list(itertools.product([1, 2, 4], [1, 2])))
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {"tied": False} | WIDE),
        ("qwen2", {"tied": True}),  # its two key-value heads are fewer than four ranks
        ("qwen3", {"tied": False}),
    ],
)
def test_parts_of_a_dense_models_ranks_join_to_its_checkpoint_bit_for_bit(
    tmp_path: Path,
    architecture: str,
    fields: dict[str, Any],
    tensor: int,
    pipeline: int,
    engine: bool,
) -> None:
    whole, config = checkpoint(tmp_path, architecture, **fields)
    sizes = Sizes(tensor=tensor, pipeline=pipeline, data=2, expert_tensor=tensor)
    assert_same(rejoined(whole, config, sizes, engine=engine), whole)


@pytest.mark.parametrize("engine", [True, False], ids=["grouped", "sequential"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(tensor=t, pipeline=p, data=2, expert=e, expert_tensor=t)
        for t, e, p in itertools.product([1, 2, 4], [1, 2], [1, 2])
    ]
    + [Sizes(tensor=2, data=1, expert=2, expert_tensor=1)],
    ids=str,
)
def test_parts_of_a_mixtures_ranks_join_to_its_checkpoint_bit_for_bit(
    tmp_path: Path, sizes: Sizes, engine: bool
) -> None:
    whole, config = checkpoint(tmp_path, "qwen3_moe", tied=False)
    assert_same(rejoined(whole, config, sizes, engine=engine), whole)


def test_each_part_is_sent_by_one_rank_and_padding_by_none(tmp_path: Path) -> None:
    whole, config = checkpoint(tmp_path, "qwen3_moe", tied=False)
    sizes = Sizes(tensor=4, data=2, expert=2, expert_tensor=4)
    sent = 0
    for rank in range(sizes.world):
        place = sizes.ranks(rank, config.num_hidden_layers)
        parts = hugging_face_parts(megatron_state(whole, config, sizes, rank), config, place)
        sent += sum(part.tensor.numel() for part in parts.values())
        # 90 tokens in 256 rows: the third and fourth rank hold no token.
        assert ("lm_head.weight" in parts) is (place.data_rank == 0 and place.tensor_rank < 2)
    assert sent == sum(tensor.numel() for tensor in whole.values())


def test_a_wrappers_prefixes_are_left_out(tmp_path: Path) -> None:
    whole, config = checkpoint(tmp_path, "llama", tied=False)
    state = megatron_state(whole, config, Sizes(), 0)
    wrapped = {f"module.module.{name}": tensor for name, tensor in state.items()}
    parts = hugging_face_parts(wrapped, config, MegatronRanks())
    assert_same(tensors_of(joined(own_parts(parts, rank=0))), whole)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mtp.layers.0.eh_proj.weight", "'mtp.layers.0.eh_proj.weight' has no known"),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "shared_experts"),
        ("decoder.layers.0.mlp.experts.weight1", "experts.weight1' has no known"),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias0", "bias0' has no known"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight0", "weight0' has no known"),  # dense
        ("decoder.layers.0.mlp.router.expert_bias", "expert_bias' has no known"),
        ("decoder.layers.0.linear_fc1.weight", "'decoder.layers.0.linear_fc1.weight' has no"),
        ("decoder.layers.2.mlp.router.weight", r"layer 2, from 0, of 2; pass first_layer=model"),
        ("output_layer.weight", r"8 rows on each of 1 ranks, and config a vocabulary of 90"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "4 heads, 2 key-value heads and 16"),
    ],
)
def test_a_tensor_that_the_names_cannot_place_is_refused_by_name(
    tmp_path: Path, name: str, says: str
) -> None:
    _, config = checkpoint(tmp_path, "llama", tied=False)
    with pytest.raises(WeightsRefused, match=says):
        hugging_face_parts({name: torch.zeros(8, 64)}, config, MegatronRanks())


def test_a_tensor_of_a_subclass_is_refused(tmp_path: Path) -> None:
    class Float8Tensor(torch.Tensor):
        pass

    _, config = checkpoint(tmp_path, "llama", tied=False)
    rounded = torch.zeros(8, 64).as_subclass(Float8Tensor)
    with pytest.raises(WeightsRefused, match="is a Float8Tensor, whose elements may be rounded"):
        hugging_face_parts({"decoder.final_layernorm.weight": rounded}, config, MegatronRanks())


def test_an_output_layer_of_its_own_is_refused_if_the_config_ties_it(tmp_path: Path) -> None:
    whole, config = checkpoint(tmp_path, "llama", tied=False)
    config.tie_word_embeddings = True
    state = megatron_state(whole, config, Sizes(), 0)
    state["output_layer.weight"] = state["embedding.word_embeddings.weight"]
    with pytest.raises(WeightsRefused, match="share_embeddings_and_output_weights=True"):
        hugging_face_parts(state, config, MegatronRanks())


def test_another_model_type_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    _, config = checkpoint(tmp_path, "gemma2")
    with pytest.raises(WeightsRefused, match="'gemma2' are unknown, only those of llama"):
        hugging_face_parts({}, config, MegatronRanks())


def test_ranks_of_another_stage_do_not_join(tmp_path: Path) -> None:
    whole, config = checkpoint(tmp_path, "llama", tied=False)
    sizes = Sizes(pipeline=2)
    parts = []
    for rank in range(2):
        place = replace(sizes.ranks(rank, 2), first_layer=0)
        state = megatron_state(whole, config, sizes, rank)
        parts += own_parts(hugging_face_parts(state, config, place), rank=rank)
    with pytest.raises(WeightsRefused, match="contradict each other"):
        joined(parts)


def test_a_publish_that_is_not_sharded_refuses_shards(tmp_path: Path) -> None:
    whole, config = checkpoint(tmp_path, "llama", tied=False)
    parts = hugging_face_parts(megatron_state(whole, config, Sizes(), 0), config, MegatronRanks())
    with pytest.raises(ConfigError, match="pass sharded=True on every rank"):
        without_shards(parts)
