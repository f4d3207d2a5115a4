"""Throughput of scoring given tokens, against plain forward passes of transformers.

``python -m benchmarks.scoring [--json]`` prints ``name, value, unit, peer, ratio``: tokens scored
per CPU-second of one thread, medians of alternating rounds. Ours goes through the engine's
scheduler in chunks, all sequences at once; the peer is a forward pass, log_softmax and gather, a
sequence at a time. ``group`` is eight answers per prompt, scored from the prompt's end on: ours
computes a prompt once. Random weights in float32, without the wire.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.engine.shapes import SHAPES, make_directory
from benchmarks.table import Row, compared, main, medians
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.transport.scoring import ScoreResult, ScoreTokens

ROUNDS = 3
MODELS = {"tiny": 64, "small": 8}
"""Number of sequences scored with each model; the whole takes a minute."""

GROUP = 8
SEQUENCE_TOKENS = 256
PROMPT_TOKENS = 160
BLOCK_TOKENS = 16

Sequences = list[tuple[list[int], int]]
"""Token ids of each sequence, and the first position to score."""


def ours(path: Path, sequences: Sequences) -> Callable[[], list[Any]]:
    """Return a function that scores with the engine, weights loaded and cache empty."""
    model = open_model(path, "float32")
    limits = EngineLimits(
        max_running_turns=64,
        max_step_tokens=1024,
        num_blocks=64 * SEQUENCE_TOKENS // BLOCK_TOKENS + 64,
        block_tokens=BLOCK_TOKENS,
        context_tokens_max=model.context_tokens_max,
        vocab_size=model.vocab_size,
    )
    runner = model.make_runner(num_blocks=limits.num_blocks, block_tokens=BLOCK_TOKENS)

    def score() -> list[Any]:
        scheduler = EngineScheduler(limits, scoring=model.scoring)
        for number, (tokens, start) in enumerate(sequences):
            column = np.array(tokens, "<i4").tobytes()
            scheduler.score(ScoreTokens(request_id=number, token_ids=column, start=start))
        while rows := scheduler.plan():
            scheduler.complete(runner.step(rows))
        reported = [a for a in scheduler.take_replies() if isinstance(a, ScoreResult)]
        ordered = sorted(reported, key=lambda answer: answer.request_id)
        return [np.frombuffer(answer.logprobs, "<f4") for answer in ordered]

    return score


def theirs(path: Path, sequences: Sequences) -> Callable[[], list[Any]]:
    """Return a function that scores with transformers."""
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def score() -> list[Any]:
        reported = []
        for tokens, start in sequences:
            ids = torch.tensor([tokens])
            logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
            reported.append(logprobs.gather(1, ids[0, start:, None])[:, 0].numpy())
        return reported

    return score


def rows() -> Iterator[Row]:
    """Measure every model and workload."""
    torch.set_num_threads(1)
    gc.disable()
    chance = np.random.default_rng(0)
    for name, count in MODELS.items():
        vocab = SHAPES[name].fields["vocab_size"]

        def drawn(tokens: int, vocab: int = vocab) -> list[int]:
            ids: list[int] = chance.integers(3, vocab, tokens).tolist()
            return ids

        prompts = [drawn(PROMPT_TOKENS) for _ in range(count // GROUP)]
        answer_tokens = SEQUENCE_TOKENS - PROMPT_TOKENS
        workloads: dict[str, Sequences] = {
            "whole": [(drawn(SEQUENCE_TOKENS), 1) for _ in range(count)],
            "group": [
                (prompt + drawn(answer_tokens), PROMPT_TOKENS)
                for prompt in prompts
                for _ in range(GROUP)
            ],
        }
        with tempfile.TemporaryDirectory() as directory:
            path = make_directory(Path(directory), SHAPES[name], "float32")
            for workload, sequences in workloads.items():
                yield _measured(f"scoring_{name}_{workload}", path, sequences)


def _measured(name: str, path: Path, sequences: Sequences) -> Row:
    peers = [ours(path, sequences), theirs(path, sequences)]
    for mine, other in zip(*(score() for score in peers), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-3)  # otherwise it was not the same work
    tokens = sum(len(ids) - start for ids, start in sequences)

    def rate(score: Callable[[], list[Any]]) -> float:
        began_s = process_time()
        score()
        return tokens / (process_time() - began_s)

    value, peer = medians(ROUNDS, *(partial(rate, score) for score in peers))
    return compared(name, "tokens/cpu-s", value, peer)


if __name__ == "__main__":
    main(__doc__, rows)
