"""Report of a run: Markdown page, JSON and picture, written from the files in its directory.

``tidegate report`` and the examples call :func:`write_report`. It replays nothing; see `audit/` for
that.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.observability.facts import Facts, read_facts, read_metrics, runs_beside
from tidegate.observability.run_files import replace_file
from tidegate.transport.printable import printable


def forecast_lines(forecast: Mapping[str, Any] | None) -> list[str]:
    """Return predicted and measured staleness, and the advice; empty without a forecast, and for
    runs recorded before its fields had these names."""
    if forecast is None or "throughput_ratio" not in forecast:
        return []
    return [
        f"Predicted mean {forecast['predicted_staleness']:.2f}, measured "
        f"{forecast['measured_staleness']:.2f}. Throughput of the rollout over the trainer's (rho) "
        f"{forecast['throughput_ratio']:.2f}; the longest rollout of a group is "
        f"{forecast['tail_factor']:.2f} times the mean; past "
        f"max_staleness={forecast['max_useful_staleness']} nothing is gained. A batch every "
        f"{forecast['batch_interval_s']:.2f} s, where "
        f"{forecast['attainable_batch_interval_s']:.2f} s is attainable.",
        "",
        f"**{forecast['advice'][:1].upper()}{forecast['advice'][1:]}.**",
        "",
    ]


def parted_lines(in_flight: float | None, in_queue: float | None) -> list[str]:
    """Return the split of the mean staleness by where it came from; empty if unknown."""
    if in_flight is None or in_queue is None:
        return []
    return [
        f"Since this process began, {in_flight:.2f} of a rollout's mean staleness arose in flight, "
        f"before its group had ended, and {in_queue:.2f} in the queue.",
        "",
    ]


def discard_lines(discards: Mapping[str, Any], bias: Mapping[str, Any] | None) -> list[str]:
    """Return a table of discards by reason, with lengths and tasks, and the length bias."""
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
    """Format a mean duration."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def spent_cell(seconds: Mapping[str, float]) -> str:
    """Format seconds by activity, largest first."""
    most = sorted(seconds.items(), key=lambda pair: -pair[1])
    return "; ".join(f"{name} {spent:.1f} s" for name, spent in most) or "-"


def mismatch_cell(mismatch: Mapping[str, float] | None) -> str:
    """Format the mismatch between the trained and the sampling policy."""
    if not mismatch:
        return "-"
    return "; ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in mismatch.items())


def memory_cell(memory_mb: Mapping[str, int] | None, *, sleeps: bool) -> str:
    """Format peak memory by phase; ``sleeps``: engines freed memory while the trainer trained."""
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


def page_lines(facts: Facts, others: list[Facts], *, picture: str) -> list[str]:
    """Return the page's Markdown lines.

    Args:
        facts: the run.
        others: runs that started from the same weights.
        picture: file name of the picture, relative to the page.
    """
    return [
        f"# Run {facts.run}",
        "",
        *_summary(facts),
        "",
        f"![Reward, staleness and timeline]({picture})",
        "",
        "## Results",
        "",
        *_results(facts),
        "",
        "## Staleness",
        "",
        *_staleness(facts),
        "",
        "## Where every token went",
        "",
        *_ledger(facts),
        "",
        *discard_lines(facts.discards, facts.length_bias),
        "## Audit",
        "",
        *_audit(facts),
        "",
        *_comparison(facts, others),
    ]


def _summary(facts: Facts) -> list[str]:
    """Separate the effect of a warm-up before the run from the gain of the run itself."""
    lines = []
    if facts.warm_up:
        said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in _flat(facts))
        lines += [
            f"**Before**: the model was warmed up by supervised training ({said}). Its skill "
            f"after the warm-up is not a result of this run.",
            "",
        ]
    if facts.reward_before is not None and facts.reward_after is not None:
        gain = facts.reward_after - facts.reward_before
        lines.append(
            f"**What RL added**: mean reward on held-out tasks went from "
            f"{facts.reward_before:.3f} to {facts.reward_after:.3f} ({gain:+.3f}), over "
            f"{facts.versions} weight versions in {facts.wall_s:.1f} s."
        )
    else:
        lines.append(
            f"{facts.versions} weight versions in {facts.wall_s:.1f} s. No reward on held-out "
            f"tasks was noted before and after."
        )
    return lines


def _flat(facts: Facts) -> list[tuple[str, str]]:
    return [
        (name, f"{value:.3g}" if isinstance(value, float) else str(value))
        for name, value in facts.warm_up.items()
    ]


def _results(facts: Facts) -> list[str]:
    rows = [
        ("mode; pause mode; KV policy", _how(facts)),
        ("reward before", _number(facts.reward_before)),
        ("reward after", _number(facts.reward_after)),
        ("weight versions published", str(facts.versions)),
        ("rollouts trained", f"{facts.rollouts_trained} in {facts.batches} batches"),
        ("share with two or more versions", f"{facts.mixed_version_share:.1%}"),
        ("staleness, highest (bound)", f"{facts.max_staleness} ({_bound(facts.staleness_bound)})"),
        ("wall time", f"{facts.wall_s:.1f} s"),
        ("tokens per second", f"{facts.tokens_per_s:.0f}"),
        ("trainer idle", f"{facts.trainer_idle_share:.1%}"),
        ("engines idle", f"{facts.engine_idle_share:.1%}"),
        ("a group's wait for its last rollout", seconds_cell(facts.straggler_wait_s)),
        ("episodes' time by activity", spent_cell(facts.episode_activity_s)),
        ("mean publish; mean stall of an engine per swap", _publishing(facts)),
        ("context found in engines' caches", _cached(facts)),
        ("draft tokens verified", _guessed(facts)),
        ("engines' weights quantized to", facts.quantization or "-"),
        ("engines paced to a step time of", _paced(facts)),
        ("mismatch of trainer and engines", mismatch_cell(facts.mismatch)),
        (
            "peak memory of all processes",
            memory_cell(facts.memory_mb, sleeps=facts.colocated),
        ),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _how(facts: Facts) -> str:
    return "; ".join(value or "-" for value in (facts.mode, facts.pause_mode, facts.kv_policy))


def _publishing(facts: Facts) -> str:
    return f"{seconds_cell(facts.publish_s)}; {seconds_cell(facts.weight_swap_stall_s)}"


def _guessed(facts: Facts) -> str:
    if not facts.draft_tokens:
        return "-"
    share = facts.accepted_draft_tokens / facts.draft_tokens
    return f"{facts.draft_tokens}, {share:.1%} accepted"


def _paced(facts: Facts) -> str:
    if not facts.step_time_min_s:
        return "-"
    return f"{1e3 * facts.step_time_min_s:g} ms at least (step_time_min_s)"


def _cached(facts: Facts) -> str:
    if not facts.context_tokens:
        return "-"
    share = facts.cached_context_tokens / facts.context_tokens
    sampled = facts.ledger["generated"] + facts.evaluation_ledger["generated"]
    computed = (facts.context_tokens - facts.cached_context_tokens) / max(1, sampled)
    return f"{share:.1%}; {computed:.2f} tokens computed for each one sampled"


def _bound(bound: int | None) -> str:
    return "none" if bound is None else str(bound)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _staleness(facts: Facts) -> list[str]:
    bound = facts.staleness_bound
    kept = bound is None or facts.max_staleness <= bound
    return [
        "Versions between the trainer at consumption and the oldest weights that sampled a "
        "rollout's tokens.",
        "",
        f"Mean {facts.mean_staleness:.2f}, highest {facts.max_staleness}, bound "
        f"{_bound(bound)}: {'kept' if kept else '**BROKEN**'}.",
        "",
        *parted_lines(facts.staleness_from_generation, facts.staleness_from_queue),
        *forecast_lines(facts.forecast),
        "| staleness | rollouts |",
        "|---|---|",
        *(f"| {value} | {count} |" for value, count in facts.staleness_histogram.items()),
    ]


def _ledger(facts: Facts) -> list[str]:
    ledger = facts.ledger
    rows = [("generated", ledger["generated"]), ("trained", ledger["trained"])]
    rows += [("still buffered", ledger["buffered"]), ("still in flight", ledger["in_flight"])]
    rows += [(f"discarded: {reason}", n) for reason, n in sorted(ledger["discarded"].items())]
    error = ledger["generated"] - sum(count for _, count in rows[1:])
    lines = ["| tokens | |", "|---|---|", *(f"| {name} | {count} |" for name, count in rows)]
    lines += [f"| unaccounted for | {error} |", ""]
    lines.append(
        f"Evaluation, apart from this: {facts.evaluation_ledger['generated']} tokens. "
        + (
            "Rollouts discarded: "
            + ", ".join(f"{n} {reason}" for reason, n in sorted(facts.discarded_rollouts.items()))
            + "."
            if facts.discarded_rollouts
            else "No rollout was discarded."
        )
    )
    return lines


def _audit(facts: Facts) -> list[str]:
    if facts.audit is None:
        return ["Not audited yet: `tidegate audit` this directory, then `tidegate report` it."]
    return [f"- {line}" for line in facts.audit["lines"]]


def _comparison(facts: Facts, others: list[Facts]) -> list[str]:
    if not others:
        return []
    head = (
        "| run | mode; pause; KV | wall s | trainer idle | engines idle | reward | staleness | "
        "over 2+ versions |"
    )
    lines = ["## Beside other runs from the same weights", "", head, "|---" * 8 + "|"]
    for each in (facts, *others):
        name = f"**{each.run}**" if each is facts else each.run
        lines.append(
            f"| {name} | {_how(each)} | {each.wall_s:.1f} | {each.trainer_idle_share:.1%} | "
            f"{each.engine_idle_share:.1%} | {_number(each.reward_before)} to "
            f"{_number(each.reward_after)} | "
            f"{each.max_staleness} of {_bound(each.staleness_bound)} | "
            f"{each.mixed_version_share:.1%} |"
        )
    return [*lines, ""]


REPORT_JSON = "report.json"
REPORT_PAGE = "report.md"
REPORT_PICTURE = "report.png"


def write_report(directory: Path) -> Path:
    """Write report.json, report.md and report.png into a run's directory; return the page's path.

    Raises:
        AuditError: the run left no statistics, or its files can't be read.
    """
    # matplotlib takes a second to import, and only reports draw.
    from tidegate.observability.report_picture import draw_report

    directory = Path(directory)
    facts = read_facts(directory)
    metrics = read_metrics(directory)
    replace_file(directory / REPORT_JSON, json.dumps(dataclasses.asdict(facts), indent=2).encode())
    draw_report(directory / REPORT_PICTURE, directory, facts, metrics)
    page = directory / REPORT_PAGE
    others = runs_beside(directory.resolve(), facts)
    lines = page_lines(facts, others, picture=REPORT_PICTURE)
    replace_file(page, "\n".join(printable(line, keeps="\n") for line in lines).encode())
    return page
