"""Tiny random Hugging Face model directories for tests, created on the fly.

Biases and norm weights are random too, so code that omits one produces other tokens.
"""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS_TOKEN = "<|end|>"
EOS_TOKEN_ID = 0
"""Id of the end token. The other ids are the printable characters: id 1 is the space, id 95 the
tilde."""

CONTEXT_TOKENS_MAX = 512
"""``max_position_embeddings`` of every directory made here."""

_GEMMA = {
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 20,
    "final_logit_softcapping": 8.0,
}

_WIDE_ATTENTION = {"num_key_value_heads": 4, "head_dim": 64}
"""Keys and values of 16 tokens take more memory than the states, so blocks have 16 tokens."""

_GATED_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,  # the fourth is attention
    **_WIDE_ATTENTION,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # Larger weights make float32's noise grow from layer to layer, in transformers alone too.
    "initializer_range": 0.05,
}

HYBRID_TYPES = ("qwen3_next", "qwen3_5_text", "falcon_h1", "nemotron_h")
"""Model types with recurrent layers beside attention that are served."""

FIELDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},  # not hidden_size / num_attention_heads, as in real Qwen3
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "mistral": {"sliding_window": 20},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 3.0},
    "qwen3_next": _GATED_DELTA_NET
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": _GATED_DELTA_NET,
    "falcon_h1": {
        **_WIDE_ATTENTION,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "initializer_range": 0.05,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        **_WIDE_ATTENTION,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "initializer_range": 0.05,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
    },
    "gemma3_text": _GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 3},
}
"""Config fields by model type that tests need: windows shorter than their contexts, active caps."""


def make_model_directory(
    path: Path,
    architecture: str = "qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tied: bool = True,
    vocab_size: int = 96,
    shards: int = 1,
    **config_fields: Any,
) -> Path:
    """Write config.json, safetensors and tokenizer.json of a random model; return ``path``.

    ``architecture`` is a model type; ``config_fields`` replace those of its config. Two layers of
    64 hidden, 4 query and 2 KV heads. Files are as ``save_pretrained`` writes them.
    """
    model = make_model(architecture, seed=seed, tied=tied, vocab_size=vocab_size, **config_fields)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.save_pretrained(path)
    if shards > 1:
        _cut_into_shards(path, shards)
    _save_tokenizer(path, vocab_size)
    return path


def make_model(
    architecture: str,
    *,
    seed: int = 0,
    tied: bool = True,
    vocab_size: int = 96,
    labels: int = 0,
    **fields: Any,
) -> Any:
    """Make a random transformers model of a model type, in float32 and eval mode.

    ``labels`` replaces the LM head by a classification head of this many labels.
    """
    import transformers

    values = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
    }
    values |= FIELDS.get(architecture, {}) | fields
    auto: Any = transformers.AutoModelForCausalLM
    if labels:
        auto = transformers.AutoModelForSequenceClassification
        values["num_labels"] = labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(transformers.AutoConfig.for_model(architecture, **values))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


IMAGE_MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
"""Special tokens of an image model's tokenizer, from id 96 on."""

IMAGE_PAD_ID = 100

SEEING_TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen2.5-VL's, without a default system message."""


def make_image_model_directory(path: Path, *, seed: int = 0, **text_fields: Any) -> Path:
    """Write a random Qwen2.5-VL that reads 8 x 8 pixels per token; return ``path``.

    Its tokenizer has one token per printable character, as those of text models, and
    :data:`IMAGE_MARKS`.
    """
    import transformers
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    processing: Any = image_processing_pil_qwen2_vl
    text = {
        "vocab_size": 102,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
        },
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": (text | text_fields)["hidden_size"],
        "initializer_range": 0.2,
    }
    configs: Any = transformers.Qwen2_5_VLConfig
    config = configs(
        text_config=text | text_fields,
        vision_config=vision,
        image_token_id=IMAGE_PAD_ID,
        video_token_id=101,
        vision_start_token_id=98,
        vision_end_token_id=99,
        tie_word_embeddings=False,
        eos_token_id=EOS_TOKEN_ID,
    )
    models: Any = transformers.Qwen2_5_VLForConditionalGeneration
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models(config).save_pretrained(path)
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    processing.Qwen2VLImageProcessorPil(patch_size=4, size=sizes).save_pretrained(path)
    _save_tokenizer(path, 96, IMAGE_MARKS)
    (path / "chat_template.jinja").write_text(SEEING_TEMPLATE)
    return path


def data_url(seed: int, width: int = 24, height: int = 16, kind: str = "png") -> str:
    """Return a picture of random pixels as a ``data:`` URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _cut_into_shards(path: Path, shards: int) -> None:
    single = path / "model.safetensors"
    state = load_file(single)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(state.items())[shard::shards])
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    single.unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _save_tokenizer(path: Path, vocab_size: int, marks: Sequence[str] = ()) -> None:
    """Write a tokenizer with one token per printable character; further ids are unused names."""
    words = [EOS_TOKEN, *map(chr, range(32, 127))]
    words += [f"<|{number}|>" for number in range(len(words), vocab_size)]
    vocab = {word: number for number, word in enumerate(words[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([EOS_TOKEN, *marks])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Added tokens of Qwen's tokenizers that are not special."""


def byte_level_tokenizer(*marks: str, splits_digits: bool = False) -> Tokenizer:
    """Make a tokenizer of Qwen's kind: bytes and some merges, with added tokens of both kinds.

    ``marks``: added tokens beside Qwen's. ``splits_digits``: as SmolLM2's.
    """
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("Ã", "©"), ("{", '"'), ('"', ":")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={w: n for n, w in enumerate(words)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if splits_digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (*QWEN_MARKS, *marks)])
    return tokenizer
