import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.engine.model_config import ModelConfig, RopeScaling
from tidegate.errors import ModelError

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
QWEN2 = QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "head_dim": None}
LLAMA = QWEN2 | {"architectures": ["LlamaForCausalLM"]}


def read(path: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None) -> Any:
    (path / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_directory(path)


def test_every_field_of_a_config_is_taken_over(tmp_path: Path) -> None:
    fields = QWEN3 | {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 7,
        "dtype": "bfloat16",
    }

    assert read(tmp_path, fields) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        norm_epsilon=1e-5,
        rope_theta=1e6,
        rope_scaling=None,
        context_tokens_max=4096,
        tied_head=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        eos_token_ids=(7,),
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("fields", "head_dim"),
    [(QWEN2, 16), (LLAMA, 16), (QWEN3 | {"head_dim": None}, 128), (LLAMA | {"head_dim": 24}, 24)],
)
def test_a_config_without_head_dim_means_what_its_architecture_says(
    tmp_path: Path, fields: dict[str, Any], head_dim: int
) -> None:
    assert read(tmp_path, fields).head_dim == head_dim


@pytest.mark.parametrize(
    ("fields", "biases"),
    [
        (QWEN2, (True, False, False)),
        (LLAMA, (False, False, False)),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        (QWEN3 | {"attention_bias": True}, (True, True, False)),
    ],
)
def test_each_architecture_has_its_own_biases(
    tmp_path: Path, fields: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    config = read(tmp_path, fields)

    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases


def test_rope_is_read_from_old_and_new_fields_alike(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    scaling |= {"original_max_position_embeddings": 64}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    older = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}

    for fields in (old, older, new):
        config = read(tmp_path, LLAMA | fields)
        assert config.rope_theta == 5e5
        assert config.rope_scaling == RopeScaling(
            kind="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=2.0,
            original_context_tokens=64,
        )


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (7, None, (7,)),
        (7, {"eos_token_id": [8, 9]}, (8, 9)),
        (7, {"temperature": 0.6}, (7,)),
        (None, None, ()),
    ],
)
def test_tokens_that_end_an_answer_are_those_of_the_generation_config_if_it_names_any(
    tmp_path: Path, in_config: Any, in_generation_config: Any, expected: tuple[int, ...]
) -> None:
    config = read(tmp_path, QWEN3 | {"eos_token_id": in_config}, in_generation_config)

    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, Qwen2"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "0.5"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_attention_heads": 5}, "5 query heads"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, QWEN3 | change)


def test_a_sliding_window_that_is_switched_off_is_no_obstacle(tmp_path: Path) -> None:
    fields = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

    assert read(tmp_path, QWEN2 | fields).num_layers == 2


def test_a_missing_or_damaged_directory_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a directory"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 96, "hid')
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="vocab_size"):
        ModelConfig.from_directory(tmp_path)
