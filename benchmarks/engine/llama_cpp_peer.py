"""Peer benchmark: llama.cpp, with all sequences in one batch.

``LLAMA_PYTHON benchmarks/engine/llama_cpp_peer.py MODEL REQUESTS --dtype D`` prints one JSON object
like :mod:`benchmarks.engine.ours`. It runs in its own Python, so it imports nothing of ours; see
README.md. The weights are the same, written as GGUF beside the model. llama.cpp returns logits; the
token is sampled and its log-prob computed with numpy, which counts.
"""

import argparse
import ctypes
import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors import safe_open

PROMPT_TOKENS_PER_BATCH = 1024

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def rotated_as_pairs(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder a projection's rows [heads * D, H] for llama.cpp's rotation of Llama models.

    It turns neighbours 2i and 2i + 1 of a head together; Hugging Face's turns i and i + D / 2.
    """
    halves = weights.reshape(heads, 2, -1, weights.shape[1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(model: Path, dtype: str) -> Path:
    """Write the weights as GGUF; matrices in ``dtype``, vectors in float32, as llama.cpp
    requires."""
    config = json.loads((model / "config.json").read_text())
    path = model / "model.gguf"
    writer = gguf.GGUFWriter(path, config["model_type"])
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rotated = {}
    if config["model_type"] == "llama":
        rotated = {"q_proj": heads, "k_proj": config["num_key_value_heads"]}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
            tensor = tensors.get_tensor(name).float().numpy()
            if heads_of := rotated.get(name.split(".")[-2]):
                tensor = rotated_as_pairs(tensor, heads_of)
            if tensor.ndim == 1 or dtype == "float32":
                writer.add_tensor(gguf_name(name), tensor)
            else:
                kind = gguf.GGMLQuantizationType.BF16
                data = gguf.quants.quantize(tensor, kind)
                writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Llama:
    """A llama.cpp context with one sequence per request."""

    def __init__(self, path: Path, requests: list[Any], dtype: str) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = 256 * -(-sum(len(p) + n for p, n in requests) // 256)
        options.n_batch = options.n_ubatch = PROMPT_TOKENS_PER_BATCH
        options.n_seq_max = len(requests)
        options.n_threads = options.n_threads_batch = 1
        options.kv_unified = True
        if dtype == "float32":
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._batch = llama_cpp.llama_batch_init(PROMPT_TOKENS_PER_BATCH, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._chance = np.random.default_rng(0)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode rows of (token, position, sequence, whether its logits are needed)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode returned {status}")

    def _sample(self, row: int) -> tuple[int, float]:
        """Sample a token at temperature 1; return it with its log-prob."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        logits = np.ctypeslib.as_array(pointer, (self._vocab,))
        largest = logits.max()
        cumulative = np.exp(logits - largest).cumsum()
        total = cumulative[-1]
        token = int(cumulative.searchsorted(self._chance.random() * total, side="right"))
        token = min(token, self._vocab - 1)
        return token, float(logits[token] - largest - np.log(total))

    def run(self, requests: list[Any]) -> int:
        """Prefill all requests in batches, then decode until all have ended."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        prompts = [
            (token, i, sequence, i + 1 == len(prompt))
            for sequence, (prompt, _) in enumerate(requests)
            for i, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for first in range(0, len(prompts), PROMPT_TOKENS_PER_BATCH):
            rows = prompts[first : first + PROMPT_TOKENS_PER_BATCH]
            self._decode(rows)
            ends = [
                (row, sequence) for row, (_, _, sequence, is_last) in enumerate(rows) if is_last
            ]
            last |= {sequence: self._sample(row)[0] for row, sequence in ends}
        tokens, sampled = len(requests), dict.fromkeys(last, 1)
        while last:
            for sequence in [s for s in last if sampled[s] == requests[s][1]]:
                llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
                del last[sequence]
            if not last:
                break
            self._decode(
                [(t, len(requests[s][0]) + sampled[s] - 1, s, True) for s, t in last.items()]
            )
            for row, sequence in enumerate(last):
                last[sequence] = self._sample(row)[0]
                sampled[sequence] += 1
            tokens += len(last)
        return tokens


def main() -> None:
    """Warm up on some of the requests, measure all, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    requests = json.loads(options.requests.read_text())
    llama = Llama(write_gguf(options.model, options.dtype), requests, options.dtype)
    llama.run(requests[: len(requests) // 4])
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    tokens = llama.run(requests)
    measured = {
        "tokens": tokens,
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - wall_s,
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
