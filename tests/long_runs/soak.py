"""Soak test: checks that a long run leaks no memory, asyncio tasks, threads or file descriptors.

``python -m tests.long_runs.soak [--minutes 30] [--json]`` trains the demo's model with real engine
processes, journal and records included, and samples every process every few seconds. It fits a line
over the last two thirds, when caches and pools are full: ``name, value, unit, limit, holds`` report
the line's gain.
"""

import argparse
import asyncio
import gc
import itertools
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil
import torch

import tidegate
from examples.calculator import Episode, Task, solve, tasks
from examples.grpo import load_trainer, train_step
from examples.tiny_model import make_model
from tests.long_runs.checks import Row, show

SAMPLE_INTERVAL_S = 5.0
WARM_SHARE = 1 / 3
"""Share of the samples, from the start, that the fit excludes."""
MEMORY_GAIN_MAX = 0.02
"""Maximum gain of memory, as a share of its mean."""
COUNT_GAIN_MAX = 0.02
ERRORS_OF_SLOPE = 3.0
"""Gain in standard errors below which a count only fluctuates."""
WEIGHTS_KEPT = 4
"""Versions kept on disk; all of them, kept for audits, would be gigabytes here."""


class Samples:
    """Time series of counts, by name."""

    def __init__(self) -> None:
        self._counts: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._loops: set[asyncio.AbstractEventLoop] = set()

    def watch_loop(self) -> None:
        self._loops.add(asyncio.get_running_loop())

    def take(self) -> None:
        now_s = time.monotonic()
        trainer = psutil.Process()
        engines = [p for p in trainer.children() if "tidegate.engine.worker" in p.cmdline()]
        for name, process in [("trainer", trainer), *((engine_name(p), p) for p in engines)]:
            with process.oneshot():
                self.add(f"{name}_rss_mb", now_s, process.memory_info().rss / 1e6)
                self.add(f"{name}_fds", now_s, process.num_fds())
                self.add(f"{name}_threads", now_s, process.num_threads())
        tasks = [task for loop in self._loops for task in asyncio.all_tasks(loop)]
        lasting = [task for task in tasks if not task.get_name().startswith("rollout ")]
        # admission bounds rollout tasks
        self.add("asyncio_tasks_but_rollouts", now_s, len(lasting))
        self.add("python_objects", now_s, len(gc.get_objects()))

    def series(self) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """Yield each name's (time, count), without the first third."""
        for name, points in self._counts.items():
            yield name, points[int(len(points) * WARM_SHARE) :]

    def add(self, name: str, at_s: float, count: float) -> None:
        self._counts[name].append((at_s, count))


def engine_name(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[command.index("--engine") + 1]


@dataclass(frozen=True, slots=True)
class Fit:
    mean: float
    gain: float
    """Gain from the first sample to the last."""
    gain_error: float
    """Standard error of the gain."""
    spread: float
    """Largest minus smallest count."""


def fit(points: list[tuple[float, float]]) -> Fit:
    times, counts = zip(*points, strict=True)
    middle, mean = fmean(times), fmean(counts)
    width = sum((t - middle) ** 2 for t in times)
    slope = sum((t - middle) * (c - mean) for t, c in points) / width if width else 0.0
    rest = sum((c - mean - slope * (t - middle)) ** 2 for t, c in points)
    error = (rest / max(1, len(points) - 2) / width) ** 0.5 if width else 0.0
    span_s = times[-1] - times[0]
    return Fit(mean, slope * span_s, error * span_s, max(counts) - min(counts))


def rows(samples: Samples) -> list[Row]:
    """Return the gain of each count over the last two thirds."""
    table = []
    for name, points in samples.series():
        line = fit(points)
        share = line.gain / max(line.mean, 1e-9)
        if name.endswith("_rss_mb"):
            limit, holds = f"±{MEMORY_GAIN_MAX:.0%}", abs(share) <= MEMORY_GAIN_MAX
        elif name == "python_objects":
            limit, holds = "", True  # only reported, to find what grows
        else:
            limit = f"<= +{COUNT_GAIN_MAX:.0%}, or {ERRORS_OF_SLOPE:.0f} standard errors"
            noise = ERRORS_OF_SLOPE * line.gain_error
            holds = line.gain <= max(COUNT_GAIN_MAX * line.mean, noise)
        table.append(Row(f"{name}_gain", share, f"of {line.mean:.4g}", limit, holds))
        table.append(Row(f"{name}_spread", line.spread / max(line.mean, 1e-9), "of the mean"))
    return table


# ------------------------------------------------------------------------- the run


async def train(options: argparse.Namespace, directory: Path, samples: Samples) -> list[Row]:
    samples.watch_loop()
    ends_s = time.monotonic() + 60 * options.minutes

    async def solve_watched(episode: Episode, task: Task) -> float:
        samples.watch_loop()  # the run's own event loop
        return await solve(episode, task)

    async with tidegate.serve(
        model=options.model,
        engines=options.engines,
        max_running_turns=16,
        group_size=8,
        groups_per_batch=8,
        run_directory=directory,
        journal=True,
    ) as rollouts:
        model, optimizer = load_trainer(options.model, 3e-4)
        sampler = Sampler(samples)
        async for batch in rollouts.batches(tasks("train", 0), episode=solve_watched):
            train_step(model, optimizer, batch)
            await rollouts.ack(rollouts.state_dict())
            version = await rollouts.publish(model.state_dict())
            shutil.rmtree(directory / "weights" / f"v{version - WEIGHTS_KEPT:05d}", True)
            if time.monotonic() > ends_s:
                break
        sampler.stop()
        statistics = rollouts.statistics()
    error = statistics.ledger.error
    per_batch = journal_bytes(directory) / max(1, statistics.batches)
    return [
        Row("batches", statistics.batches, "batches"),
        Row("tokens_generated", statistics.ledger.generated, "tokens"),
        Row("ledger_error", error, "tokens", "0", error == 0),
        Row("journal_bytes_per_batch", per_batch, "bytes"),
    ]


def journal_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("journal.db*"))


class Sampler:
    """Takes samples from a thread of its own until stopped."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in itertools.count():
            self._samples.take()
            if self._is_over.wait(SAMPLE_INTERVAL_S):
                return


def main() -> int:
    parser = argparse.ArgumentParser(description="Train for long, and see what grows.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--model", type=Path, default=Path("runs/model-0"), help="made if missing")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_model(options.model)
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="tidegate-soak-") as directory:
        table = asyncio.run(train(options, Path(directory) / "run", samples))
    table += rows(samples)
    return show(table, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
