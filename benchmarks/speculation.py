"""Speculative decoding: CPU time saved with each source of draft tokens, and the cost of failing.

``python -m benchmarks.speculation [--json]`` prints ``name, value, unit, peer, ratio``. Scheduler
and model (:mod:`benchmarks.small_model`, in float32) run in this process, on one thread, without
the wire. The peer is the same engine without drafts, alternately; values are medians of CPU time.
``accepted``: the share of verified draft tokens that were accepted. A command that no module
imports. Built on ``engine/drafts/`` and the engine's scheduler.

``repeats``: a model that mostly repeats itself, so its context predicts what comes. ``again``:
prompts that were sampled before, by slightly different weights; greedy. ``random``: a model that
never repeats itself, which shows the cost of failing drafts. The draft model is the first two
layers of the large one.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import process_time

import numpy as np
import torch

from benchmarks.small_model import BLOCK_TOKENS, RUNS, VOCAB, load, show_table
from benchmarks.table import Row, compared
from tidegate.engine.drafts.draft_model import ModelDrafts
from tidegate.engine.drafts.lookup import LookupDrafts
from tidegate.engine.drafts.rollouts import RolloutDrafts
from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.scheduling.drafts import DraftSource
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.transport.messages import SamplingParams, SubmitTurn

DRAFT_LAYERS = 2
BLOCKS = 1024
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
CONCURRENT = (1, 8)

KEPT = 0.02
"""Scale of the layers' output in the model that repeats itself."""

CHANGED = 0.01
"""Relative change of weights between two samples of a prompt."""

LIMITS = EngineLimits(
    max_running_turns=max(CONCURRENT),
    max_step_tokens=1024,
    num_blocks=BLOCKS,
    block_tokens=BLOCK_TOKENS,
    context_tokens_max=PROMPT_TOKENS + OUTPUT_TOKENS,
    vocab_size=VOCAB,
)


@dataclass(slots=True)
class Spent:
    """Cost of a set of turns."""

    cpu_s: float
    tokens: int
    drafted: int
    accepted: int


class Engine:
    """Scheduler and model, without a wire."""

    def __init__(self, weights: Weights, drafts: DraftSource | None) -> None:
        self.runner = make_runner(weights)
        self._scheduler = EngineScheduler(LIMITS, drafts=drafts, shares_prefixes=False)
        self._handles = count()

    def run(self, turns: int, temperature: float) -> Spent:
        """Sample that many turns at once, with the same prompts in every call."""
        for number in range(turns):
            chance = np.random.default_rng(number)
            prompt = chance.integers(0, VOCAB, PROMPT_TOKENS).astype("<i4")
            sampling = SamplingParams(
                max_tokens=OUTPUT_TOKENS, temperature=temperature, seed=number
            )
            handle = next(self._handles)
            message = SubmitTurn(turn=handle, token_ids=prompt.tobytes(), sampling=sampling)
            self._scheduler.submit(message)
        spent = Spent(0.0, 0, 0, 0)
        started = process_time()
        while rows := self._scheduler.plan():
            columns = self._scheduler.complete(self.runner.step(rows))
            if columns is not None:
                spent.tokens += len(columns.token_ids) // 4
                spent.drafted += columns.drafted_tokens
                spent.accepted += columns.accepted_tokens
        spent.cpu_s = process_time() - started
        return spent


def make_runner(weights: Weights) -> ModelRunner:
    """Create a runner with the fastest available code."""
    native = native_for(weights.config, torch.float32)
    return ModelRunner(
        weights.config, weights, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, native=native
    )


def measure(
    name: str,
    weights: Weights,
    source: Callable[[], DraftSource],
    *,
    temperature: float,
    before: Weights | None = None,
) -> Iterator[Row]:
    """Sample with and without drafts; ``before``: weights that sampled the prompts once before."""
    for turns in CONCURRENT:
        rates: dict[bool, list[float]] = {True: [], False: []}
        spent = Spent(0.0, 0, 0, 0)
        for _ in range(RUNS):
            for has_drafts in (True, False):
                engine = Engine(before or weights, source() if has_drafts else None)
                if before is not None:
                    engine.run(turns, temperature)
                    engine.runner.swap(weights)
                one = engine.run(turns, temperature)
                rates[has_drafts].append(one.tokens / one.cpu_s)
                spent = one if has_drafts else spent
        accepted = 100 * spent.accepted / max(1, spent.drafted)
        yield Row(f"{name}/{turns}/accepted", accepted, "%")
        ours, peer = (statistics.median(rates[has_drafts]) for has_drafts in (True, False))
        yield compared(f"{name}/{turns}/tokens_per_cpu_s", "1/s", ours, peer)


def rows(directory: Path) -> Iterator[Row]:
    """Return the whole table."""
    repeats = load(directory / "repeats", kept=KEPT)
    small = load(directory / "draft", kept=KEPT, layers=DRAFT_LAYERS)
    anything = load(directory / "random")
    changed = load(directory / "changed", changed=CHANGED)

    def by_model() -> DraftSource:
        return ModelDrafts(make_runner(small), LIMITS.context_tokens_max)

    yield from measure("lookup/repeats", repeats, LookupDrafts, temperature=0.9)
    yield from measure("draft/repeats", repeats, by_model, temperature=0.9)
    yield from measure("rollouts/again", changed, RolloutDrafts, temperature=0.0, before=anything)
    yield from measure("lookup/random", anything, LookupDrafts, temperature=1.0)


if __name__ == "__main__":
    show_table(__doc__, rows)
