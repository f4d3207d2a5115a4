"""Effect of staleness on learning, per sample and per second, on the demo task.

A command that no module imports. It starts the demo as processes, and draws with matplotlib.

    python -m benchmarks.learning                       # 21 runs of the demo: about an hour
    python -m benchmarks.learning --seeds 1 --versions 20
    python -m benchmarks.learning --picture docs/learning.png

Each configuration is trained with the same seeds, from the same models, one run after the other.
Batch rewards are shown over samples and over the trainer's clock.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPEATS_SMOOTHED = 5
"""Batches averaged into a point of the picture; one has 128 rollouts of 16 tasks."""


@dataclass(frozen=True)
class Way:
    """One configuration of the demo."""

    name: str
    options: tuple[str, ...]


TASK = (
    *("--task", "short", "--step-time-s", "0", "--max-running-turns", "16"),
    *("--held-out", "512", "--learning-rate", "3e-4"),
)
"""Options of the task: short sums on unpaced engines, because the question here is what is learned
from how many samples. The demo's own comparison covers time."""

WAYS = (
    Way("sync", ("--mode", "sync")),
    Way("one-step", ("--mode", "one-step")),
    Way("async η=2", ("--mode", "async", "--max-staleness", "2")),
    Way("async η=8", ("--mode", "async", "--max-staleness", "8")),
    Way("one-step, uncorrected", ("--mode", "one-step", "--correction", "none")),
    Way("async η=2, uncorrected", ("--max-staleness", "2", "--correction", "none")),
    Way("async η=8, uncorrected", ("--max-staleness", "8", "--correction", "none")),
)
"""Configurations. A synchronous run has nothing to correct but numerics, so it has no uncorrected
variant."""


@dataclass(frozen=True)
class Curve:
    """Result of one run."""

    way: str
    seed: int
    rewards: list[float]
    """Mean reward of each batch."""
    wall_s: list[float]
    """Time at which the trainer received each batch, from the first one on."""
    reward_after: float
    """Reward on held-out tasks after training."""
    staleness_mean: float


def run(way: Way, seed: int, options: argparse.Namespace) -> Curve:
    """Train once, unless the run exists already."""
    name = f"learning-{way.name.replace(' ', '-')}-seed{seed}-{options.versions}"
    directory: Path = options.runs / name
    if not (directory / "report.md").exists():
        command = [sys.executable, "-m", "examples.async_grpo", *way.options, "--name", name]
        command += ["--seed", str(seed), "--versions", str(options.versions), *TASK]
        subprocess.run(
            [*command, "--runs", str(options.runs)], check=True, stdout=subprocess.DEVNULL
        )
    report = json.loads((directory / "report.json").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Curve(
        way=way.name,
        seed=seed,
        rewards=[row["reward"] for row in rows],
        wall_s=[row["wall_s"] - rows[0]["wall_s"] for row in rows],
        reward_after=report["reward_after"],
        staleness_mean=statistics.fmean(row["staleness_mean"] for row in rows),
    )


def rows_of(curves: list[Curve]) -> Iterator[dict[str, object]]:
    """Yield one row per configuration and figure: medians over seeds, relative to the synchronous
    run."""
    sync = [curve for curve in curves if curve.way == "sync"]
    for way in WAYS:
        ours = [curve for curve in curves if curve.way == way.name]
        yield _row("reward_after", way, ours, sync, lambda curve: curve.reward_after)
        yield _row("wall_s", way, ours, sync, lambda curve: curve.wall_s[-1])
        yield _row("staleness_mean", way, ours, sync, lambda curve: curve.staleness_mean)


def _row(
    name: str, way: Way, ours: list[Curve], sync: list[Curve], of: Callable[[Curve], float]
) -> dict[str, object]:
    values, base = sorted(map(of, ours)), statistics.median(map(of, sync))
    value = statistics.median(values)
    return {
        "name": name,
        "way": way.name,
        "value": round(value, 4),
        "lowest": round(values[0], 4),
        "highest": round(values[-1], 4),
        "unit": "s" if name == "wall_s" else "versions" if name == "staleness_mean" else "reward",
        "peer": "sync",
        "ratio": round(value / base, 3) if base else None,
    }


def draw(path: Path, curves: list[Curve]) -> None:
    """Plot the reward over samples and over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    by_samples, by_time = figure.subplots(1, 2, sharey=True)
    colours = ("#22303c", "#f28e2b", "#2f6f9f", "#c0392b")
    for way in WAYS:
        ours = [curve for curve in curves if curve.way == way.name]
        corrected = way.name.removesuffix(", uncorrected")
        colour = colours[[w.name for w in WAYS].index(corrected)]
        style = "--" if "uncorrected" in way.name else "-"
        versions = range(min(len(curve.rewards) for curve in ours))
        rewards = _smooth([statistics.fmean(c.rewards[v] for c in ours) for v in versions])
        wall_s = [statistics.fmean(c.wall_s[v] for c in ours) for v in versions]
        by_samples.plot(versions, rewards, style, color=colour, lw=1.6, label=way.name)
        by_time.plot(wall_s, rewards, style, color=colour, lw=1.6)
    by_samples.set_xlabel("batches trained (128 rollouts each)")
    by_time.set_xlabel("seconds since the first batch")
    by_samples.set_ylabel(f"reward, mean of {REPEATS_SMOOTHED} batches and all seeds")
    by_samples.legend(frameon=False, fontsize=8.5)
    for axes in (by_samples, by_time):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _smooth(values: list[float]) -> list[float]:
    return [
        statistics.fmean(values[max(0, at - REPEATS_SMOOTHED + 1) : at + 1])
        for at in range(len(values))
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run all configurations, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    curves = []
    for seed in range(options.seeds):
        for way in WAYS:
            curves.append(run(way, seed, options))
            last = curves[-1]
            print(
                f"{way.name}, seed {seed}: held-out reward {last.reward_after:.3f} after "
                f"{last.wall_s[-1]:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    for row in rows_of(curves):
        if options.json:
            print(json.dumps(row, ensure_ascii=False))
        else:
            print(
                f"{row['name']:15} {row['way']:24} {row['value']:>8} "
                f"({row['lowest']} to {row['highest']} {row['unit']})  {row['ratio']} of sync's"
            )
    if options.picture is not None:
        draw(options.picture, curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
