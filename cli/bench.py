"""Command `tidegate bench`: a few figures of this machine, without anything but the package.

The benchmarks beside other frameworks are programs of the repository's `benchmarks/`.
"""

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tidegate.cli.conventions import echo, progress
from tidegate.errors import EngineLost

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode

PROMPT_TOKENS, ANSWER_TOKENS, AT_ONCE = 32, 64, 32
ROLLOUTS = 256
"""Rollouts of one round of the engine and of the wire."""
GROUP_SIZE, GROUPS_PER_BATCH, BATCHES = 8, 32, 8
"""Work of one round of the scheduler."""
VOCAB_SIZE = 512


class Figure(NamedTuple):
    """A measured figure: the median of some rounds, with the lowest and the highest."""

    name: str
    unit: str
    values: list[float]
    peer: str = ""
    ratio: float | None = None
    """Figure over the peer's, both medians of alternating rounds."""

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        spread = f"{min(self.values):,.0f} to {max(self.values):,.0f}"
        beside = f"; {self.ratio:.1f} times {self.peer}" if self.ratio is not None else ""
        return f"{self.name:<10}{self.median:>8,.0f} {self.unit} ({spread}){beside}"

    def row(self) -> str:
        """Return the figure as a line of JSON."""
        shown = {"name": self.name, "value": self.median, "unit": self.unit}
        return json.dumps({**shown, "peer": self.peer, "ratio": self.ratio})


def bench(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of which medians are shown.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Measure scheduler, wire, and the engine beside `transformers`, within two minutes."""
    # Before torch is imported: engine and `transformers` get one thread each.
    os.environ["OMP_NUM_THREADS"] = "1"
    from tidegate.engine.models.quiet_transformers import quiet_transformers

    with progress("measuring the scheduler") as show, tempfile.TemporaryDirectory() as directory:
        figures = [_scheduler(rounds)]
        show("starting an engine")
        with quiet_transformers():
            figures += _engine(_random_model(Path(directory)), rounds, show)
    for figure in figures:
        echo(figure.row() if as_json else figure)


async def answer(episode: "Episode", task: list[int]) -> float:
    """Sample one turn of a fixed length; the reward means nothing."""
    episode.append(task)
    await episode.generate(stop_token_ids=[])
    return 1.0


def _prompts(seed: int) -> list[list[int]]:
    """Return the prompts of a round; those of other rounds differ, so that no prefix is cached."""
    chance = random.Random(seed)
    return [chance.choices(range(VOCAB_SIZE), k=PROMPT_TOKENS) for _ in range(ROLLOUTS)]


def _scheduler(rounds: int) -> Figure:
    """Measure rollouts per CPU-second of the orchestrator over simulated engines in the same
    process, whose own CPU time counts too: their steps are joined, so it is little."""
    from tidegate.simulation.engine.spec import EngineCosts
    from tidegate.simulation.planning.simulated import WARM_UP_VERSIONS_MIN, simulate
    from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload

    group = (ANSWER_TOKENS,) * GROUP_SIZE
    costs = EngineCosts(prompt_tokens=PROMPT_TOKENS, slots=AT_ONCE)
    workload = PlanWorkload(groups=(group,), costs=costs, trainer_tokens_per_s=1e6)
    candidate = PlanCandidate(max_staleness=0, groups_per_batch=GROUPS_PER_BATCH, engines=4)
    values = []
    for _ in range(rounds + 1):  # the first one warms up
        started_s = time.process_time()
        simulate(workload, candidate, versions=BATCHES - WARM_UP_VERSIONS_MIN)
        cpu_s = time.process_time() - started_s
        values.append(BATCHES * GROUPS_PER_BATCH * GROUP_SIZE / cpu_s)
    return Figure("scheduler", "rollouts per CPU-second, without a wire", values[1:])


def _engine(model: Path, rounds: int, show: Callable[[str], None]) -> list[Figure]:
    """Measure an engine process beside `transformers`, and the orchestrator's CPU time for it."""
    import tidegate

    wire, ours, theirs = [], [], []
    peer = _Transformers(model)
    with tidegate.serve_sync(
        model=model,
        engines=1,
        max_tokens=ANSWER_TOKENS,
        max_running_turns=AT_ONCE,
    ) as rollouts:
        for number in range(rounds + 1):  # the first one warms up
            show(f"round {number} of {rounds}: the engine, then transformers")
            tasks = _prompts(number)
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            failures = rollouts.evaluate(tasks, episode=answer).failures
            if failures:
                raise EngineLost(f"{failures} of {ROLLOUTS} turns failed; the log says why")
            wire.append(ROLLOUTS / (time.process_time() - cpu_s))
            ours.append(ROLLOUTS * ANSWER_TOKENS / (time.perf_counter() - wall_s))
            theirs.append(peer.tokens_per_s(tasks[:AT_ONCE]))
    ratio = statistics.median(ours[1:]) / statistics.median(theirs[1:])
    unit = "tokens per second of an engine with one thread"
    return [
        Figure("wire", "rollouts per CPU-second of this process, sampled by another", wire[1:]),
        Figure("engine", unit, ours[1:], "transformers", ratio),
    ]


class _Transformers:
    """`generate` of `transformers` on one thread, for prompts and answers of one length."""

    def __init__(self, model: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        torch.set_num_threads(1)
        classes: Any = transformers
        loaded = classes.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        self._model = loaded.eval()

    def tokens_per_s(self, prompts: list[list[int]]) -> float:
        """Sample once for all prompts together, which is its fastest way."""
        started_s = time.perf_counter()
        token_ids = self._torch.tensor(prompts)
        self._model.generate(
            token_ids,
            attention_mask=self._torch.ones_like(token_ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=ANSWER_TOKENS,
            max_new_tokens=ANSWER_TOKENS,
        )
        return len(prompts) * ANSWER_TOKENS / (time.perf_counter() - started_s)


def _random_model(directory: Path) -> Path:
    """Write a small model with random weights and a tokenizer of bytes."""
    import transformers

    from tidegate.simulation.engine.scripted import files_of

    classes: Any = transformers
    config = classes.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    classes.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    files_of(Path("none")).tokenizer.save(str(directory / "tokenizer.json"))
    return directory
