"""What do the tests run on? Tiny random Hugging Face model directories, made on the spot.

Biases and norm weights are random too, so that code which forgets one gives other tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

EOS_TOKEN = "<|end|>"
EOS_TOKEN_ID = 0
"""The other ids are the printable characters: id 1 is the space, id 95 the tilde."""

CONTEXT_TOKENS_MAX = 512
"""``max_position_embeddings`` of every directory made here."""


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

    ``architecture`` is ``llama``, ``qwen2`` or ``qwen3``; ``config_fields`` replace those of its
    config. Two layers of 64 hidden, 4 query and 2 KV heads.
    """
    model = make_model(architecture, seed=seed, tied=tied, vocab_size=vocab_size, **config_fields)
    model = model.to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    _save_tensors(path, state, shards)
    _save_tokenizer(path, vocab_size)
    return path


def make_model(
    architecture: str, *, seed: int = 0, tied: bool = True, vocab_size: int = 96, **fields: Any
) -> Any:
    """Make a random transformers model, in float32 and eval mode."""
    import transformers

    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture]
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
    if architecture == "qwen3":
        values["head_dim"] = 32  # not hidden_size / num_attention_heads, as in real Qwen3
    config = getattr(transformers, f"{prefix}Config")(**(values | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _save_tensors(path: Path, state: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(state.items())[shard::shards])
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _save_tokenizer(path: Path, vocab_size: int) -> None:
    """One token per printable character; further ids are names nobody writes."""
    words = [EOS_TOKEN, *map(chr, range(32, 127))]
    words += [f"<|{number}|>" for number in range(len(words), vocab_size)]
    vocab = {word: number for number, word in enumerate(words[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([EOS_TOKEN])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
