import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.engine.models.model_config import AttentionKind, Experts, LayerShape, ModelConfig
from tidegate.engine.models.rope_config import Rope, RopeScaling
from tidegate.errors import ModelError, ModelNotComputed

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
MISTRAL = QWEN2 | {"architectures": ["MistralForCausalLM"]}
MOE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"]}
_SILENT = {name: QWEN3[name] for name in QWEN3 if name not in ("head_dim", "num_key_value_heads")}
GEMMA2 = _SILENT | {"architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = _SILENT | {"architectures": ["Gemma3ForCausalLM"]}
GEMMA3_OF_SIX = GEMMA3 | {"num_hidden_layers": 6}

ORIGINAL = "original_max_position_embeddings"
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0}


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
        layers=2 * (LayerShape(attention=AttentionKind(rope=Rope(theta=1e6))),),
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        norm_epsilon=1e-5,
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


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (7, None, (7,)),
        (7, {"eos_token_id": [8, 9]}, (8, 9)),
        (7, {"temperature": 0.6}, (7,)),
        (None, None, ()),
    ],
)
def test_stop_tokens_come_from_the_generation_config_if_it_has_any(
    tmp_path: Path, in_config: Any, in_generation_config: Any, expected: tuple[int, ...]
) -> None:
    config = read(tmp_path, QWEN3 | {"eos_token_id": in_config}, in_generation_config)

    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, Mistral"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by layer type"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"hidden_act": "relu"}, "relu"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": 2 * ["full_attention"]},
            "computes mistral with other layers only",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0},
            r"swiglu_limit \(1.702, 5.0\)",
        ),
    ],
)
def test_configs_that_need_the_transformers_fallback_are_named(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelNotComputed, match=words):
        read(tmp_path, QWEN3 | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn needs a factor"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta must be above 1, got 1.0"),
        ({"rope_parameters": {"rope_theta": -1e6}}, "rope_theta must be above 1, got -1000000.0"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, r"got \(1.0, 1.0\)"),
        ({"rope_scaling": LLAMA3_ROPE | {ORIGINAL: -8}}, "must have tokens, got -8"),
        ({"rope_scaling": YARN_ROPE | {"beta_fast": 0.5}}, "beta_fast not the lower"),
        ({"rope_scaling": YARN_ROPE | {"beta_slow": -1.0}}, "above 0, beta_fast"),
        (
            {"rope_scaling": YARN_ROPE | {"attention_factor": -1.0}},
            "attention_factor must be above",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window in use"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers 2, but 1 layer_types"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window .* got 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "quantization_config": {"quant_method": "mxfp4"},
            },
            r"mxfp4\); give its float32 or bfloat16 directory",
        ),
        ({"use_bidirectional_attention": True}, "attend to later ones"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 5}, "5 query heads"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5 must be 1 to 4",
        ),
    ],
)
def test_unservable_models_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words) as refusal:
        read(tmp_path, QWEN3 | change)

    assert not isinstance(refusal.value, ModelNotComputed)


WINDOW = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (LLAMA | WINDOW, (None, None, None, None)),
        (QWEN2 | WINDOW | {"max_window_layers": 3}, (None, None, None, 7)),
        (QWEN2 | WINDOW, (None, None, None, None)),
        (QWEN2 | WINDOW | {"use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
        (MISTRAL | WINDOW | {"use_sliding_window": False}, (7, 7, 7, 7)),
        (MISTRAL | WINDOW | {"sliding_window": None}, (None, None, None, None)),
        (MISTRAL, (4096, 4096)),
        (MOE | WINDOW, (7, 7, 7, 7)),
        (MOE, (None, None)),
        (GEMMA2 | WINDOW, (7, None, 7, None)),
        (GEMMA3 | WINDOW | {"sliding_window_pattern": 3}, (7, 7, None, 7)),
        (GEMMA3 | WINDOW, (7, 7, 7, 7)),
        (GEMMA2 | {"layer_types": ["full_attention", "sliding_attention"]}, (None, 4096)),
    ],
)
def test_each_architecture_has_windows_where_its_config_class_has_them(
    tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = read(tmp_path, fields)

    assert tuple(layer.attention.window_tokens for layer in config.layers) == windows


def test_layers_with_experts_are_those_that_the_config_makes_sparse(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    fields |= {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 11}

    config = read(tmp_path, MOE | fields)

    assert [layer.has_experts for layer in config.layers] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert config.experts == Experts(count=5, per_token=3, intermediate_size=11, normalises=False)


def test_what_a_gemma_leaves_out_means_what_its_config_class_says(tmp_path: Path) -> None:
    gemma2 = read(tmp_path, GEMMA2)
    gemma3 = read(tmp_path, GEMMA3)

    assert (gemma2.attention_soft_cap, gemma2.logits_soft_cap) == (50.0, 30.0)
    assert (gemma3.attention_soft_cap, gemma3.logits_soft_cap) == (None, None)
    for config in (gemma2, gemma3):
        assert (config.head_dim, config.num_kv_heads, config.tied_head) == (256, 4, True)
        assert (config.embedding_scale, config.attention_scale) == (8.0, 1 / 16)
        assert config.activation == "gelu_pytorch_tanh"
    ropes = {layer.attention.rope for layer in read(tmp_path, GEMMA3_OF_SIX).layers}
    assert ropes == {Rope(theta=10_000.0), Rope(theta=1_000_000.0)}


def test_yarn_stretches_the_context_where_it_says_what_it_stretches(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    known = read(tmp_path, QWEN3 | {"rope_scaling": yarn | {ORIGINAL: 32_768}})
    unknown = read(tmp_path, QWEN3 | {"rope_scaling": yarn, "max_position_embeddings": 4096})

    assert known.context_tokens_max == 131_072
    assert unknown.context_tokens_max == 4096
    rope = unknown.layers[0].attention.rope
    assert rope.scaling == RopeScaling(kind="yarn", factor=4.0, original_context_tokens=4096)
    assert rope.amplitude == pytest.approx(1.1386294)


def test_a_missing_or_damaged_directory_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is not a directory"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 96, "hid')
    with pytest.raises(ModelError, match=r"config\.json is not the config"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="vocab_size"):
        ModelConfig.from_directory(tmp_path)
