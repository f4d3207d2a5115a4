"""How does the report's page tell of predictions and of discards? In words and tables.

It takes what is in run.json, and reads no file.
"""

from collections.abc import Mapping
from typing import Any


def forecast_lines(forecast: Mapping[str, Any] | None) -> list[str]:
    """Predicted beside measured staleness; nothing where too little was measured."""
    if forecast is None:
        return []
    return [
        f"Predicted mean {forecast['predicted_staleness']:.2f}, measured "
        f"{forecast['measured_staleness']:.2f}. Throughput of the rollout over the trainer's (rho) "
        f"{forecast['rho']:.2f}; the longest rollout of a group is {forecast['tail_factor']:.2f} "
        f"times the mean; past max_staleness={forecast['saturating_staleness']} nothing is gained. "
        f"A batch every {forecast['batch_s']:.2f} s, where {forecast['attainable_batch_s']:.2f} s "
        f"could be had.",
        "",
        f"**{forecast['advice'][:1].upper()}{forecast['advice'][1:]}.**",
        "",
    ]


def parted_lines(in_flight: float | None, in_queue: float | None) -> list[str]:
    """What of the mean staleness came about where; nothing where that is not known."""
    if in_flight is None or in_queue is None:
        return []
    return [
        f"Since this process began, {in_flight:.2f} of a rollout's staleness came about in flight, "
        f"until its group had ended, and {in_queue:.2f} in the queue.",
        "",
    ]


def discard_lines(discards: Mapping[str, Any], bias: Mapping[str, Any] | None) -> list[str]:
    """What was dropped, by reason, length and task; nothing where nothing was."""
    lines = []
    if discards:
        lines += [
            "| discarded for | rollouts | tokens | mean tokens | of generated | tasks hit most |",
            "|---|---|---|---|---|---|",
            *(_discard_row(reason, each) for reason, each in sorted(discards.items())),
            "",
        ]
    if bias is not None:
        lines += [
            f"Length bias over the last {bias['rollouts']} rollouts: trained "
            f"{bias['mean_trained_tokens']:.1f} tokens on the mean, generated "
            f"{bias['mean_generated_tokens']:.1f}, ratio {bias['ratio']:.2f} (1 is unbiased).",
            "",
        ]
    return lines


def seconds_cell(seconds: float | None) -> str:
    """A short time, on the mean."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def spent_cell(seconds: Mapping[str, float]) -> str:
    """Seconds by name, the most first."""
    most = sorted(seconds.items(), key=lambda pair: -pair[1])
    return "; ".join(f"{name} {spent:.1f} s" for name, spent in most) or "-"


def mismatch_cell(mismatch: Mapping[str, float] | None) -> str:
    """How far batches were from what sampled them."""
    if not mismatch:
        return "-"
    return "; ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in mismatch.items())


def memory_cell(memory_mb: Mapping[str, int] | None, *, sleeps: bool) -> str:
    """High-water marks by phase; ``sleeps``: engines gave memory back while the trainer trained."""
    if not memory_mb:
        return "-"
    marks = "; ".join(f"{phase} {marked} MB" for phase, marked in memory_mb.items())
    return f"{marks} ({'engines asleep' if sleeps else 'all awake'} while training)"


def _discard_row(reason: str, each: Mapping[str, Any]) -> str:
    tasks = ", ".join(f"{task['offer']}:{task['index']} ({_count(task)})" for task in each["tasks"])
    return (
        f"| {reason} | {each['rollouts']} | {each['tokens']} | {each['mean_tokens']:.1f} | "
        f"{each['share_of_generated']:.1%} | {tasks or '-'} |"
    )


def _count(task: Mapping[str, Any]) -> str:
    sure, most = task["at_least"], task["rollouts"]
    return str(most) if sure == most else f"{sure} to {most}"
