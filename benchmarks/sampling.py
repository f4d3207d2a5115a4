"""CPU cost of each sampling option per row of logits, against plain sampling.

``python -m benchmarks.sampling [--json]`` prints ``name, value, unit, peer, ratio``: CPU time of a
thread to sample a row of logits, in batches of 32 turns of 700 tokens, at two vocabulary sizes.
Probabilities fall as ``rank ** -1.5``, so that a top-p of 0.9 keeps some 60 tokens. Each option's
peer is the same batch without options, measured alternately; values are medians. The row
``plain_beside_kernel`` compares plain sampling with a call of ``kernels/sampling.py`` alone, on
arrays (temperature, top-k, top-p, random numbers) that were made before the measurement.
"""

import gc
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

import numpy as np
import torch

from benchmarks.table import Row, compared, main, medians
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.sampling.sampling import RowSampling, sample_rows
from tidegate.kernels.sampling import sample
from tidegate.transport.messages import SubmitTurn
from tidegate.transport.sampling import LogitsProcessor, SamplingParams, TokenBias

ROWS = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 500, 200
VOCABULARIES = (8_192, 151_936)
RUNS = 9

OPTIONS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
    },
    "logit_bias": {"logit_bias": [TokenBias(n, 1.0) for n in range(100)]},
    "min_tokens": {"min_tokens": 900, "stop_token_ids": [1, 2]},
    "top_logprobs_5": {"top_logprobs": 5},
    "raw_logprobs": {"raw_logprobs": True},
    "allowed_tokens": {
        "logits_processors": [
            LogitsProcessor("allowed_tokens", {"token_ids": list(range(100))}).to_str()
        ]
    },
}


class Batch:
    """Turns with the same options, and random logits for them."""

    def __init__(self, vocab_size: int, options: dict[str, Any], askers: int = ROWS) -> None:
        random = np.random.default_rng(0)
        reader = OptionReader(vocab_size=vocab_size, max_running_turns=64)
        ranks = 1 + np.stack([random.permutation(vocab_size) for _ in range(ROWS)])
        self._logits = torch.from_numpy(-1.5 * np.log(ranks)).float()
        self._rows = []
        for seed in range(ROWS):
            sampling = SamplingParams(**({"max_tokens": 1000} | (options if seed < askers else {})))
            tokens = np.zeros(PROMPT_TOKENS + 1000, np.int32)
            known = PROMPT_TOKENS + OUTPUT_TOKENS
            tokens[:known] = random.zipf(1.3, known) % vocab_size
            message = SubmitTurn(
                turn=seed,
                token_ids=tokens[:known].tobytes(),
                sampling=sampling,
                sampled_before=OUTPUT_TOKENS,
            )
            row_options = reader.read(message, tokens)
            self._rows.append(RowSampling(1.0, 0, sampling.top_p, seed, OUTPUT_TOKENS, row_options))

    def us_per_row(self) -> float:
        """Return the CPU time to sample a row, without copying the logits."""
        logits = self._logits.clone()
        return _us(lambda: sample_rows(logits, self._rows))

    def kernel_us_per_row(self) -> float:
        """Return the CPU time of the kernel alone, without options."""
        ones, zeros = np.ones(ROWS, np.float32), np.zeros(ROWS, np.int64)
        uniforms = np.linspace(0, 0.99, ROWS)
        return _us(lambda: sample(self._logits, ones, zeros, ones, uniforms))


def _us(work: Callable[[], object]) -> float:
    began_s = process_time()
    work()
    return (process_time() - began_s) / ROWS * 1e6


def rows_of(vocab_size: int) -> Iterator[Row]:
    """Measure all options at one vocabulary size."""
    plain = Batch(vocab_size, {})
    batches = {name: Batch(vocab_size, options) for name, options in OPTIONS.items()}
    batches["penalties_of_1_row"] = Batch(vocab_size, OPTIONS["penalties"], askers=1)
    for name, batch in {"plain": plain, **batches}.items():
        runs = RUNS * (10 if vocab_size < 50_000 else 1)
        peer, value = medians(runs, plain.us_per_row, batch.us_per_row)
        yield compared(f"{name}_{vocab_size}", "us/row", value, peer)
    peer, value = medians(RUNS, plain.kernel_us_per_row, plain.us_per_row)
    yield compared(f"plain_beside_kernel_{vocab_size}", "us/row", value, peer)


def rows() -> Iterator[Row]:
    """Measure all."""
    torch.set_num_threads(1)
    gc.disable()
    with torch.inference_mode():
        for vocab_size in VOCABULARIES:
            yield from rows_of(vocab_size)


if __name__ == "__main__":
    main(__doc__, rows)
