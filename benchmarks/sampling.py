"""Speed of the engine with each sampling option, beside the same turns without any.

``python -m benchmarks.sampling [--json]`` prints ``name, value, unit, peer, ratio``: tokens per
second of a worker's CPU time for rounds of 128 turns of 200 tokens by the tiny model, 32 at a time,
over the wire. The peer is the same round without options, by the same worker, alternately; values
are medians. ``top_p_kept_tokens`` also sends the tokens that top-p left. JSON is an array that does
not end, so that all answers are of the same length.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.ours import Driver, driven
from benchmarks.engine.shapes import SHAPES, Request, make_directory, requests
from benchmarks.table import Row, compared, main, medians
from tests.models import byte_level_tokenizer
from tidegate.transport.sampling import LogitsProcessor, SamplingParams, TokenBias

TURNS = 128
RUNNING_TURNS = 32
OUTPUT_TOKENS = 200
RUNS = 9
STOP_TOKEN = 2
ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": OUTPUT_TOKENS}


def _processor(name: str, **arguments: Any) -> dict[str, Any]:
    return {"logits_processors": [LogitsProcessor(name, arguments).to_str()]}


OPTIONS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_p_kept_tokens": {"top_p": 0.9, "kept_tokens": True},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "penalties": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
    },
    "logit_bias": {"logit_bias": [TokenBias(n, 1.0) for n in range(100)]},
    "min_tokens": {"min_tokens": OUTPUT_TOKENS, "stop_token_ids": [1, STOP_TOKEN]},
    "stop_strings": {"stop_strings": ["a stop string that is never written"]},
    "top_logprobs_5": {"top_logprobs": 5},
    "raw_logprobs": {"raw_logprobs": True},
    "allowed_tokens": _processor("allowed_tokens", token_ids=list(range(100))),
    "bad_words": _processor("bad_words", words=["never written"]),
    "json_schema": {"stop_token_ids": [STOP_TOKEN]} | _processor("json_schema", schema=ENDLESS),
}


def tokens_per_second(driver: Driver, turns: list[Request], options: dict[str, Any]) -> float:
    """Have all turns answered with these options; return tokens per second of CPU time."""
    before, cpu_before_s = driver.tokens, driver.cpu_s()
    for seed, turn in enumerate(turns):
        sampling = SamplingParams(max_tokens=turn.output_tokens, seed=seed, **options)
        driver.submit(turn.prompt, sampling)
        driver.open_turns += 1
    driver.read_answers()
    return (driver.tokens - before) / (driver.cpu_s() - cpu_before_s)


def rows() -> Iterator[Row]:
    """Measure each option."""
    shape = SHAPES["tiny"]
    turns = [Request(one.prompt, OUTPUT_TOKENS) for one in requests(shape, TURNS)]
    with tempfile.TemporaryDirectory() as directory:
        model = make_directory(Path(directory), shape, "float32")
        byte_level_tokenizer().save(str(model / "tokenizer.json"))
        with driven(model, RUNNING_TURNS, "cpu") as driver:
            for name, options in OPTIONS.items():
                tokens_per_second(driver, turns, options)  # once for what is compiled first
                ours = partial(tokens_per_second, driver, turns, options)
                value, peer = medians(RUNS, ours, partial(tokens_per_second, driver, turns, {}))
                yield compared(name, "tokens/CPU-s", value, peer)


if __name__ == "__main__":
    main(__doc__, rows)
