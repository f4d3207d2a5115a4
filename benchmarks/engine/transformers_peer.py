"""Peer benchmark: `transformers`, with a static batch or continuous batching.

``python -m benchmarks.engine.transformers_peer static|continuous MODEL REQUESTS`` prints one JSON
object like :mod:`benchmarks.engine.ours`. Tokens are sampled at temperature 1 from the raw
distribution; only requested tokens count, though a static batch runs until its longest answer ends.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.engine.shapes import Request, load


def static(model: Any, requests: Sequence[Request]) -> int:
    """Run one left-padded ``generate`` call for all requests."""
    width = max(len(one.prompt) for one in requests)
    ids = torch.tensor([[0] * (width - len(one.prompt)) + one.prompt for one in requests])
    mask = torch.tensor(
        [[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in requests]
    )
    ids, mask = ids.to(model.device), mask.to(model.device)
    longest = max(one.output_tokens for one in requests)
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        min_new_tokens=longest,
        max_new_tokens=longest,
    )
    return sum(one.output_tokens for one in requests)


def continuous(model: Any, requests: Sequence[Request]) -> int:
    """Run transformers' continuous batching over a paged cache."""
    classes: Any = transformers
    config = classes.GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    batching = classes.ContinuousBatchingConfig(return_logprobs=True)  # sized by a GPU's memory
    if model.device.type == "cpu":
        blocks = sum(-(-(len(one.prompt) + one.output_tokens) // 16) + 1 for one in requests)
        batching = classes.ContinuousBatchingConfig(
            return_logprobs=True, num_blocks=blocks, max_batch_tokens=1024, use_cuda_graph=False
        )
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching
    ) as manager:
        for number, one in enumerate(requests):
            manager.add_request(
                one.prompt, request_id=str(number), max_new_tokens=one.output_tokens
            )
        tokens = ended = 0
        while ended < len(requests):
            result = manager.get_result(timeout=1.0)
            if result is not None and result.is_finished():
                tokens += len(result.generated_tokens)
                ended += 1
    return tokens


MODES: dict[str, Callable[[Any, Sequence[Request]], int]] = {
    "static": static,
    "continuous": continuous,
}


def main() -> None:
    """Warm up on some of the requests, measure all, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("model", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    attention = "paged|sdpa" if options.mode == "continuous" else "sdpa"
    classes: Any = transformers.AutoModelForCausalLM
    model = classes.from_pretrained(
        options.model, dtype="auto", attn_implementation=attention, local_files_only=True
    )
    model.to(options.device).eval()
    requests, run = load(options.requests.read_text()), MODES[options.mode]
    run(model, requests[: -(-len(requests) // 4)])
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    tokens = run(model, requests)
    measured = {
        "tokens": tokens,
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - wall_s,
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
