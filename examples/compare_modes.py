"""Text comparison of training runs that differ in their staleness bound.

``async_grpo`` calls it once it has trained in every mode. Figures come from the runs' directories,
as in ``tidegate compare``; ratios are relative to the first run.
"""

import statistics
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path

from transformers import AutoTokenizer

from tidegate.observability.records.trajectories import read_trajectories
from tidegate.observability.records.weight_archive import weights_path
from tidegate.observability.reports.comparison import ComparedRun
from tidegate.observability.reports.facts import Facts

BATCHES_SMOOTHED = 3
"""Number of batches averaged into the reward at one time: the mean reward of a single batch of 128
rollouts of 16 tasks varies by .04."""
TIMES_SHOWN = 8
"""Number of rows of reward over time; the slowest run spans them."""
CELL_WIDTH = 10
LABEL_WIDTH = 46

Point = tuple[float, float]


def reward_over_time(run: ComparedRun) -> list[Point]:
    """Return (seconds, reward) per batch: seconds since the first request for a batch, reward
    averaged over the latest batches."""
    rows = [row for row in run.metrics if row.get("reward") is not None]
    rewards = [row["reward"] for row in rows]
    return [
        (row["wall_s"], statistics.fmean(rewards[max(0, at - BATCHES_SMOOTHED + 1) : at + 1]))
        for at, row in enumerate(rows)
        if at + 1 >= min(BATCHES_SMOOTHED, len(rows))
    ]


def seconds_to_reward(run: ComparedRun, reward: float) -> float | None:
    """Return when the reward over time first reached this value; None if it never did."""
    return next((at_s for at_s, seen in reward_over_time(run) if seen >= reward), None)


def comparison_text(runs: Sequence[ComparedRun], *, target: float, slots: int) -> list[str]:
    """Return the lines of a table with one column per run.

    Args:
        runs: the first is the baseline of the others' times.
        target: reward whose time is shown.
        slots: decode slots of all engines of a run together.
    """
    facts = [run.facts for run in runs]
    to_target = [seconds_to_reward(run, target) for run in runs]
    walls = [each.wall_s for each in facts]
    lines = [
        _row("", [run.name for run in runs]),
        _row("staleness bound, in versions", [_plain(each.staleness_bound) for each in facts]),
        _row("engines paced to steps of at least", [_paced(e.step_time_min_s) for e in facts]),
        _row("rollouts trained", [str(each.rollouts_trained) for each in facts]),
        _row("seconds", [f"{wall_s:.1f}" for wall_s in walls]),
        _row("  speedup", _ratios(walls)),
        _row(f"seconds to a reward of {target:.2f}", [_seconds(at_s) for at_s in to_target]),
        _row("  speedup", _ratios(to_target)),
        _row("held-out reward before", [_reward(each.reward_before) for each in facts]),
        _row("held-out reward after", [_reward(each.reward_after) for each in facts]),
        _row("  standard error, at most", [_reward(_standard_error(each)) for each in facts]),
        _row("tokens per second", [f"{each.tokens_per_s:.0f}" for each in facts]),
        _row("trainer idle", [f"{each.trainer_idle_share:.0%}" for each in facts]),
        _row("engines idle (in no step)", [f"{each.engine_idle_share:.0%}" for each in facts]),
    ]
    if all(each.step_time_min_s for each in facts):
        idle = [1 - each.tokens_per_s * each.step_time_min_s / slots for each in facts]
        lines.append(_row("decode slots idle (without a turn)", [f"{s:.0%}" for s in idle]))
    lines += [
        _row("rollouts of two or more versions", [f"{e.mixed_version_share:.1%}" for e in facts]),
        _row("staleness, mean", [f"{each.mean_staleness:.2f}" for each in facts]),
        "",
        f"reward over time (mean of {BATCHES_SMOOTHED} batches; = after a run's end)",
    ]
    return [*lines, *_time_rows(runs)]


def publish_text(directory: Path) -> list[str]:
    """Return a line about the size of a run's first version in its archive."""
    sizes = [file.stat().st_size for file in weights_path(directory, 1).glob("*.safetensors")]
    return [f"the first version that was trained takes {sum(sizes) / 1e6:.1f} MB of the archive"]


def sample_text(directory: Path, model: str) -> list[str]:
    """Return a held-out task of a run, and what ``model`` sampled for it before and after."""
    evaluated = [each for each in read_trajectories(directory) if each.state == "evaluated"]
    same = [each for each in evaluated if each.task == evaluated[0].task]
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    lines = [f"a held-out task, before and after: {same[0].task}"]
    for each in (same[0], same[-1]):
        start = each.turns[0].start
        lines.append(f"  reward {each.reward:.2f}: {tokenizer.decode(each.token_ids[start:])!r}")
    return lines


def _time_rows(runs: Sequence[ComparedRun]) -> list[str]:
    last_s = max(run.facts.wall_s for run in runs)
    times = [last_s * (row + 1) / TIMES_SHOWN for row in range(TIMES_SHOWN)]
    curves = [reward_over_time(run) for run in runs]
    return [
        _row(
            f"  after {at_s:.0f} s",
            [_at(curve, at_s, run.facts.wall_s) for curve, run in zip(curves, runs, strict=True)],
        )
        for at_s in times
    ]


def _standard_error(facts: Facts) -> float | None:
    """Return the standard error of the reward after, if each reward is 0 or 1; of rewards in
    between it is lower."""
    reward = facts.reward_after
    tasks = max((each.tasks for each in facts.evaluations), default=0)
    return sqrt(reward * (1 - reward) / tasks) if reward is not None and tasks else None


def _at(curve: Sequence[Point], at_s: float, end_s: float) -> str:
    """Return the last reward of a curve by this time, as text."""
    seen = [reward for when_s, reward in curve if when_s <= at_s]
    if not seen:
        return "-"
    return f"{'=' if at_s > end_s else ''}{seen[-1]:.2f}"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)


def _ratios(seconds: Sequence[float | None]) -> list[str]:
    first = seconds[0]
    return ["-" if not first or not each else f"{first / each:.2f}x" for each in seconds]


def _paced(step_time_min_s: float) -> str:
    return f"{1e3 * step_time_min_s:g} ms" if step_time_min_s else "-"


def _optional(form: str) -> Callable[[float | None], str]:
    return lambda value: "-" if value is None else format(value, form)


_plain, _seconds, _reward = _optional("d"), _optional(".1f"), _optional(".3f")
