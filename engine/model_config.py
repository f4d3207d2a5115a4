"""What shape has the model in this directory? Read from config.json, checked field by field.

It knows nothing of tensors, nor of transformers: it refuses whatever our model code would compute
wrongly, by name, so that no model runs nearly right.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tidegate.errors import ModelError

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""The architectures we compute, as config.json spells them, and their model types."""

QWEN3_HEAD_DIM = 128
"""What a Qwen3 config without ``head_dim`` means; in the others it is hidden_size / heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How a rotary embedding is stretched beyond the context it was trained on."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    """The last three matter to ``llama3`` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model's shape."""

    architecture: str
    """As in config.json, e.g. ``Qwen3ForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    context_tokens_max: int
    tied_head: bool
    """The LM head is the embedding; the directory holds it once."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer; generation_config.json's if it names any."""
    dtype: str
    """What the directory's weights are stored in, as torch spells it."""

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """Read ``path``/config.json, and generation_config.json if it is there.

        Raises:
            ModelError: either is missing or damaged, or asks for something we don't compute.
        """
        if not path.is_dir():
            raise ModelError(
                f"{path} is not a directory; give the folder of a Hugging Face model, the one "
                f"that holds config.json and *.safetensors"
            )
        file = path / "config.json"
        fields = _read(file, _ConfigFields)
        architecture = _architecture(file, fields)
        _refuse_what_we_do_not_compute(file, fields)
        return _build(file, path, fields, architecture)


class _ConfigFields(msgspec.Struct):
    """The fields of config.json that we read; the names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    architectures: list[str] | None = None
    model_type: str | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _GenerationFields(msgspec.Struct):
    """The one field of generation_config.json that we read."""

    eos_token_id: int | list[int] | None = None


class _RopeFields(msgspec.Struct):
    """``rope_parameters``, or the older ``rope_scaling``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    partial_rotary_factor: float = 1.0


_Fields = TypeVar("_Fields", bound=msgspec.Struct)


def _read(file: Path, fields: type[_Fields]) -> _Fields:
    try:
        return msgspec.json.decode(file.read_bytes(), type=fields)
    except OSError as error:
        raise ModelError(
            f"{file} can't be read ({error.strerror}); a Hugging Face model directory has one"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is damaged or not a model's config: {error}") from error


def _architecture(file: Path, fields: _ConfigFields) -> str:
    """Find out which of our architectures this is; the model type decides where none is named."""
    named = fields.architectures or [
        name for name, kind in MODEL_TYPES.items() if kind == fields.model_type
    ]
    known = [name for name in named if name in MODEL_TYPES]
    if not known:
        found = ", ".join(named) or fields.model_type or "no architecture"
        raise ModelError(f"{file} names {found}; this engine runs {', '.join(sorted(MODEL_TYPES))}")
    return known[0]


def _refuse_what_we_do_not_compute(file: Path, fields: _ConfigFields) -> None:
    if fields.hidden_act != "silu":
        raise ModelError(f"{file} asks for hidden_act {fields.hidden_act!r}; only silu is computed")
    if fields.quantization_config is not None:
        method = fields.quantization_config.get("quant_method", "unnamed")
        raise ModelError(
            f"{file} is of a quantised model ({method}); give its float32 or bfloat16 directory"
        )
    other_layers = sorted(set(fields.layer_types or []) - {"full_attention"})
    slides = fields.use_sliding_window and fields.sliding_window is not None
    if other_layers or (slides and fields.layer_types is None):
        raise ModelError(
            f"{file} asks for {', '.join(other_layers) or 'sliding_window attention'}; only full "
            f"attention is computed"
        )


def _build(file: Path, path: Path, fields: _ConfigFields, architecture: str) -> ModelConfig:
    kind = MODEL_TYPES[architecture]
    heads = fields.num_attention_heads
    kv_heads = fields.num_key_value_heads or heads
    rope = _rope(file, fields)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, kind),
        norm_epsilon=fields.rms_norm_eps,
        rope_theta=rope.rope_theta or fields.rope_theta or 10_000.0,
        rope_scaling=_rope_scaling(file, rope),
        context_tokens_max=fields.max_position_embeddings,
        tied_head=fields.tie_word_embeddings,
        qkv_bias=kind == "qwen2" or fields.attention_bias,
        output_bias=kind != "qwen2" and fields.attention_bias,
        mlp_bias=kind == "llama" and fields.mlp_bias,
        qk_norm=kind == "qwen3",
        eos_token_ids=_eos_token_ids(path, fields),
        dtype=fields.dtype or fields.torch_dtype or "float32",
    )
    _check_sizes(file, config)
    return config


def _head_dim(fields: _ConfigFields, kind: str) -> int:
    if fields.head_dim is not None:
        return fields.head_dim
    if kind == "qwen3":
        return QWEN3_HEAD_DIM
    return fields.hidden_size // max(1, fields.num_attention_heads)


def _check_sizes(file: Path, config: ModelConfig) -> None:
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "context_tokens_max",
    )
    for name in sizes:
        if getattr(config, name) < 1:
            raise ModelError(f"{file}: {name} must be at least 1, got {getattr(config, name)}")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelError(
            f"{file}: {config.num_heads} query heads must be a multiple of {config.num_kv_heads} "
            f"KV heads, and head_dim {config.head_dim} even"
        )


def _rope(file: Path, fields: _ConfigFields) -> _RopeFields:
    """Read the rotary embedding's fields, from wherever this version of the format has them."""
    raw = fields.rope_parameters or fields.rope_scaling or {}
    try:
        return msgspec.convert(raw, _RopeFields)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: rope parameters {raw} make no sense: {error}") from error


def _rope_scaling(file: Path, rope: _RopeFields) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if rope.partial_rotary_factor != 1.0:
        raise ModelError(
            f"{file} rotates {rope.partial_rotary_factor} of each head; only 1.0 is computed"
        )
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelError(
            f"{file} asks for rope type {kind!r}; this engine computes default, linear and llama3"
        )
    return RopeScaling(
        kind="linear" if kind == "linear" else "llama3",
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_context_tokens=rope.original_max_position_embeddings,
    )


def _eos_token_ids(path: Path, fields: _ConfigFields) -> tuple[int, ...]:
    file = path / "generation_config.json"
    found = _read(file, _GenerationFields).eos_token_id if file.exists() else None
    if found is None:
        found = fields.eos_token_id
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
