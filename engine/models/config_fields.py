"""Fields of config.json, and their defaults for each supported architecture.

A field that config.json omits has the default of the architecture's config class in transformers.
These defaults differ: Gemma ties its head, Llama does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tidegate.errors import ModelError, ModelNotComputed

Sliding = Literal["never", "always", "above", "pattern"]
"""Layers with a sliding window if ``layer_types`` is absent: none, all, those from
``max_window_layers`` on, or all but each ``sliding_window_pattern``-th."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of an architecture that config.json does not state."""

    model_type: str
    defaults: dict[str, Any]
    """Values of config.json's fields if they are absent."""
    sliding: Sliding
    window_has_switch: bool = False
    """Whether ``sliding_window`` is ignored without ``use_sliding_window``."""
    reads_layer_types: bool = False
    qkv_bias: bool | None = None
    """Whether query, key and value have biases; None takes ``attention_bias``."""
    output_bias: bool | None = None
    """Whether the output projection has a bias; None takes ``attention_bias``."""
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    has_experts: bool = False
    is_gemma: bool = False
    """Norms scale by 1 + weight, block outputs are normed too, embeddings are scaled, and queries
    are scaled by ``query_pre_attn_scalar``."""
    caps_attention: bool = False
    has_local_rope: bool = False
    """Whether layers with a window have a rotary embedding of their own."""
    is_gpt_oss: bool = False
    """Attention has sinks, routers and experts have biases, and the experts' activation is
    ``swigluoai``."""


_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

FAMILIES = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
        sliding="never",
        reads_mlp_bias=True,
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        sliding="always",
        qkv_bias=False,
        output_bias=False,
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
        sliding="above",
        window_has_switch=True,
        reads_layer_types=True,
        qkv_bias=True,
        output_bias=False,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        sliding="above",
        window_has_switch=True,
        reads_layer_types=True,
        qk_norm=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
        sliding="always",
        window_has_switch=True,
        qk_norm=True,
        has_experts=True,
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        defaults=_GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        sliding="pattern",
        reads_layer_types=True,
        is_gemma=True,
        caps_attention=True,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        defaults=_GEMMA | {"max_position_embeddings": 131_072, "rope_theta": 1_000_000.0},
        sliding="pattern",
        reads_layer_types=True,
        qk_norm=True,
        is_gemma=True,
        has_local_rope=True,
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
        },
        sliding="pattern",
        reads_layer_types=True,
        has_experts=True,
        is_gpt_oss=True,
    ),
}
"""Causal language models that Tidegate implements, by architecture."""

CLASSIFIERS = {
    f"{name}ForSequenceClassification": FAMILIES[f"{name}ForCausalLM"]
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2")
}
"""The same with a classification head, for example a reward model's."""


class ConfigFields(msgspec.Struct):
    """Fields of config.json that the engine reads, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    rope_theta: float | None = None
    rope_local_base_freq: float | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    sliding_window_pattern: int = 6
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    use_bidirectional_attention: bool | None = None
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    num_labels: int | None = None
    id2label: dict[str, str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _Naming(msgspec.Struct):
    """Fields that name the architecture."""

    architectures: list[str] | None = None
    model_type: str | None = None


class _GenerationFields(msgspec.Struct):
    """The field of generation_config.json that is read."""

    eos_token_id: int | list[int] | None = None


def read_architecture(file: Path) -> str:
    """Return the supported architecture that config.json names, else the one of its model type.

    Raises:
        ModelNotComputed: it names no supported architecture.
        ModelError: the file is missing or damaged.
    """
    naming = _read(file, _Naming)
    names = naming.architectures or [
        name for name, family in FAMILIES.items() if family.model_type == naming.model_type
    ]
    known = [name for name in names if name in FAMILIES or name in CLASSIFIERS]
    if not known:
        generation = ", ".join(names) or naming.model_type or "no architecture"
        supported = ", ".join([*sorted(FAMILIES), *sorted(CLASSIFIERS)])
        raise ModelNotComputed(
            f"{file} names {generation}; Tidegate's own code computes {supported}"
        )
    return known[0]


def read_fields(file: Path, family: Family) -> ConfigFields:
    """Read config.json with the defaults of ``family``.

    Raises:
        ModelError: the file is missing or damaged.
    """
    return _read(file, ConfigFields, family.defaults)


def read_eos_token_ids(directory: Path, in_config: int | list[int] | None) -> tuple[int, ...]:
    """Return the EOS tokens: generation_config.json's if it has any, else config.json's."""
    file = directory / "generation_config.json"
    generation = _read(file, _GenerationFields) if file.exists() else None
    ids = (
        in_config
        if generation is None or generation.eos_token_id is None
        else generation.eos_token_id
    )
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


_Fields = TypeVar("_Fields", bound=msgspec.Struct)


def _read(file: Path, fields: type[_Fields], defaults: Mapping[str, Any] = {}) -> _Fields:
    try:
        raw = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        return msgspec.convert({**defaults, **raw}, fields)
    except OSError as error:
        raise ModelError(
            f"{file} can't be read ({error.strerror}); give the directory of a Hugging Face model, "
            "which has one"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{file} is not the config of a Hugging Face model ({error}); correct it, or download "
            "the model again"
        ) from error
