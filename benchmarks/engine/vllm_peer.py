"""Peer benchmark: vLLM's CPU build, in process.

``VLLM_PYTHON benchmarks/engine/vllm_peer.py MODEL REQUESTS`` prints one JSON object like
:mod:`benchmarks.engine.ours`. It runs in its own Python, so it imports nothing of ours; see
README.md. Processed log-probs are returned, and prefix caching is off.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """Warm up on some of the requests, measure all, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    requests = json.loads(options.requests.read_text())
    engine = LLM(
        model=str(options.model),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_model_len=1024,
        max_num_seqs=len(requests),
        enforce_eager=True,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
    )

    def run(count: int) -> int:
        chosen = requests[:count]
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in chosen],
            [
                SamplingParams(
                    temperature=1.0,
                    max_tokens=length,
                    ignore_eos=True,
                    logprobs=0,
                    seed=None,
                    detokenize=False,
                )
                for _, length in chosen
            ],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    run(len(requests) // 4)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    tokens = run(len(requests))
    measured = {
        "tokens": tokens,
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - wall_s,
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
