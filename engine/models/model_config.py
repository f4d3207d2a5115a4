"""Architecture of the model in a directory: config.json, validated field by field.

Refuses, by name, each feature that Tidegate's model code would compute wrongly.
"""

from dataclasses import dataclass
from pathlib import Path

from tidegate.engine.models.config_fields import (
    CLASSIFIERS,
    FAMILIES,
    ConfigFields,
    Family,
    read_architecture,
    read_eos_token_ids,
    read_fields,
)
from tidegate.engine.models.rope_config import Rope, context_tokens_max, read_local_rope, read_rope
from tidegate.errors import ModelError, ModelNotComputed

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Supported activations of the MLP's gate, as config.json spells them."""

SWIGLUOAI = (1.702, 7.0)
"""Factor and limit of gpt-oss's activation that Tidegate computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Rotary embedding and window of some layers' attention."""

    rope: Rope
    window_tokens: int | None = None
    """Number of tokens that a token attends to, itself included; None for all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Properties that differ from layer to layer."""

    attention: AttentionKind
    has_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture-of-experts MLPs of a model."""

    count: int
    per_token: int
    intermediate_size: int
    normalises: bool
    """Whether the router weights of a token's experts are normalised to sum to 1."""
    are_stacked: bool = False
    """Whether experts are published as one tensor per projection, transposed, with biases for
    them and for the router, as gpt-oss's are."""
    local_range: range | None = None
    """Experts computed on this rank; None for all."""

    @property
    def local(self) -> range:
        """Experts computed on this rank."""
        return range(self.count) if self.local_range is None else self.local_range


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of one decoder-only model."""

    architecture: str
    """Architecture as in config.json, e.g. ``Qwen3ForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerShape, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    context_tokens_max: int
    tied_head: bool
    """Whether the LM head is the embedding, which the directory holds once."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    activation: str = "silu"
    """Activation function of the MLP, one of ``ACTIVATIONS`` or ``swigluoai``."""
    norm_adds_one: bool = False
    """Whether norms multiply by 1 + weight, before rounding."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normed before they are added."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Factor of attention scores; None for 1 / sqrt(head_dim)."""
    attention_sinks: bool = False
    """Whether each head has a learned score without a value in its softmax, as in gpt-oss."""
    attention_soft_cap: float | None = None
    """Cap of attention scores s, which become cap * tanh(s / cap); None without."""
    logits_soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens; generation_config.json's if it has any."""
    labels: int = 0
    """Number of outputs of a classification head, which replaces the LM head; 0 without one."""
    pad_token_id: int | None = None
    """Padding token that a classification head skips at a sequence's end."""
    dtype: str = "float32"
    """Dtype of the directory's weights, in torch's spelling."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """Read ``path``/config.json, and generation_config.json if it exists.

        Raises:
            ModelNotComputed: the model needs something that Tidegate does not implement.
            ModelError: a file is missing or damaged, or no implementation can serve the model.
        """
        if not path.is_dir():
            raise ModelError(
                f"{path} is not a directory; give the folder of a Hugging Face model, the one "
                f"that holds config.json and *.safetensors"
            )
        file = path / "config.json"
        architecture = read_architecture(file)
        fields = read_fields(file, _family(architecture))
        refuse_unsupported(file, fields)
        return _build(file, architecture, fields, read_eos_token_ids(path, fields.eos_token_id))


def refuse_unsupported(file: Path, fields: ConfigFields) -> None:
    """Refuse models that neither Tidegate nor transformers can sample for rollouts."""
    if fields.quantization_config is not None:
        method = fields.quantization_config.get("quant_method", "unnamed")
        raise ModelError(
            f"{file} is of a quantised model ({method}); give its float32 or bfloat16 directory"
        )
    if fields.use_bidirectional_attention:
        raise ModelError(
            f"{file} has use_bidirectional_attention=true: its tokens attend to later ones, so "
            "they can't be sampled one by one; serve a causal model"
        )


def _build(
    file: Path, architecture: str, fields: ConfigFields, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    family = _family(architecture)
    heads = fields.num_attention_heads
    gemma = family.is_gemma
    labels = fields.num_labels or len(fields.id2label or ()) or 2  # transformers' default
    _check_sizes(file, fields)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        layers=_layers(file, fields, family),
        num_heads=heads,
        num_kv_heads=fields.num_key_value_heads or heads,
        head_dim=fields.head_dim or family.defaults.get("head_dim") or fields.hidden_size // heads,
        norm_epsilon=fields.rms_norm_eps,
        context_tokens_max=context_tokens_max(file, fields),
        tied_head=fields.tie_word_embeddings and architecture in FAMILIES,
        labels=labels if architecture in CLASSIFIERS else 0,
        pad_token_id=fields.pad_token_id,
        qkv_bias=fields.attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=fields.attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.reads_mlp_bias and fields.mlp_bias,
        qk_norm=family.qk_norm,
        experts=_experts(file, fields, family) if family.has_experts else None,
        activation=_activation(file, fields, family),
        norm_adds_one=gemma,
        post_norms=gemma,
        embedding_scale=fields.hidden_size**0.5 if gemma else 1.0,
        attention_scale=fields.query_pre_attn_scalar**-0.5 if gemma else None,
        attention_sinks=family.is_gpt_oss,
        attention_soft_cap=_attention_soft_cap(file, fields, family),
        logits_soft_cap=fields.final_logit_softcapping if gemma else None,
        eos_token_ids=eos_token_ids,
        dtype=fields.dtype or fields.torch_dtype or "float32",
    )
    _check_heads(file, config)
    return config


def _family(architecture: str) -> Family:
    return FAMILIES.get(architecture) or CLASSIFIERS[architecture]


def _check_sizes(file: Path, fields: ConfigFields) -> None:
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    for name in sizes:
        if getattr(fields, name) < 1:
            raise ModelError(f"{file}: {name} must be at least 1, got {getattr(fields, name)}")


def _check_heads(file: Path, config: ModelConfig) -> None:
    if min(config.num_kv_heads, config.head_dim) < 1:
        raise ModelError(
            f"{file}: num_key_value_heads and head_dim must be at least 1, got "
            f"{config.num_kv_heads} and {config.head_dim}"
        )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelError(
            f"{file}: {config.num_heads} query heads must be a multiple of {config.num_kv_heads} "
            f"KV heads, and head_dim {config.head_dim} even"
        )


# ---------------------------------------------------------------- layers


def _layers(file: Path, fields: ConfigFields, family: Family) -> tuple[LayerShape, ...]:
    window = fields.sliding_window
    if family.sliding == "never" or (family.window_has_switch and not fields.use_sliding_window):
        window = None
    if window is not None and window < 1:
        raise ModelError(f"{file}: sliding_window must be at least 1, got {window}")
    if family.has_local_rope:
        local_rope, global_rope = read_local_rope(file, fields)
    else:
        local_rope = global_rope = read_rope(file, fields)
    slides = _sliding_layers(file, fields, family, window)
    kinds = {
        True: AttentionKind(rope=local_rope, window_tokens=window),
        False: AttentionKind(rope=global_rope),
    }
    return tuple(
        LayerShape(attention=kinds[sliding], has_experts=_has_experts(fields, family, layer))
        for layer, sliding in enumerate(slides)
    )


def _sliding_layers(
    file: Path, fields: ConfigFields, family: Family, window: int | None
) -> list[bool]:
    types = fields.layer_types
    unsupported = sorted(set(types or []) - {"full_attention", "sliding_attention"})
    if unsupported:
        raise ModelNotComputed(
            f"{file} has layers of type {', '.join(unsupported)}; Tidegate's own code computes "
            "full_attention and sliding_attention"
        )
    layers = range(fields.num_hidden_layers)
    if types is not None and family.reads_layer_types:
        slides = [name == "sliding_attention" for name in types]
    elif family.sliding == "pattern":
        slides = [(layer + 1) % fields.sliding_window_pattern != 0 for layer in layers]
    elif family.sliding == "above":
        slides = [window is not None and layer >= fields.max_window_layers for layer in layers]
    else:
        slides = [window is not None for _ in layers]
    if len(slides) != len(layers):
        raise ModelError(
            f"{file} has num_hidden_layers {len(layers)}, but {len(slides)} layer_types; correct "
            "it, or download the model again"
        )
    if any(slides) and window is None:
        raise ModelError(
            f"{file} has layer_types with sliding_attention, but no sliding_window in use; set "
            "sliding_window (and use_sliding_window, if the model has it)"
        )
    if types is not None and [name == "sliding_attention" for name in types] != slides:
        raise ModelNotComputed(
            f"{file} has layer_types {types}, but Tidegate's own code computes {family.model_type} "
            "with other layers only; use vLLM or SGLang engines for this model"
        )
    return slides


# ---------------------------------------------------------------- parts of a layer


def _has_experts(fields: ConfigFields, family: Family, layer: int) -> bool:
    if not family.has_experts or layer in (fields.mlp_only_layers or []):
        return False
    return (layer + 1) % max(1, fields.decoder_sparse_step) == 0


def _experts(file: Path, fields: ConfigFields, family: Family) -> Experts:
    count = fields.num_experts or fields.num_local_experts or 128
    if family.is_gpt_oss:
        return Experts(
            count=count,
            per_token=_experts_per_token(file, fields, count),
            intermediate_size=fields.intermediate_size,
            normalises=True,
            are_stacked=True,
        )
    if fields.moe_intermediate_size < 1:
        raise ModelError(
            f"{file}: moe_intermediate_size must be at least 1, got {fields.moe_intermediate_size}"
        )
    return Experts(
        count=count,
        per_token=_experts_per_token(file, fields, count),
        intermediate_size=fields.moe_intermediate_size,
        normalises=fields.norm_topk_prob,
    )


def _experts_per_token(file: Path, fields: ConfigFields, count: int) -> int:
    if not 1 <= fields.num_experts_per_tok <= count:
        raise ModelError(
            f"{file}: num_experts_per_tok {fields.num_experts_per_tok} must be 1 to {count}, the "
            "number of experts"
        )
    return fields.num_experts_per_tok


def _activation(file: Path, fields: ConfigFields, family: Family) -> str:
    if family.is_gpt_oss:
        return _swigluoai(file, fields)
    activation = fields.hidden_activation or "" if family.is_gemma else fields.hidden_act
    if activation not in ACTIVATIONS:
        raise ModelNotComputed(
            f"{file} has activation {activation!r}; Tidegate computes {', '.join(ACTIVATIONS)}"
        )
    return activation


def _swigluoai(file: Path, fields: ConfigFields) -> str:
    numbers = fields.swiglu_alpha, fields.swiglu_limit
    if numbers != SWIGLUOAI:
        raise ModelNotComputed(
            f"{file} has swiglu_alpha and swiglu_limit {numbers}; Tidegate computes {SWIGLUOAI}"
        )
    return "swigluoai"


def _attention_soft_cap(file: Path, fields: ConfigFields, family: Family) -> float | None:
    cap = fields.attn_logit_softcapping
    if cap is None or family.caps_attention:
        return cap
    if family.is_gemma:  # transformers ignores it here, and the trainer may not
        raise ModelNotComputed(
            f"{file} has attn_logit_softcapping {cap}, which transformers ignores for this model; "
            "without it, Tidegate's own code computes the model"
        )
    return None
