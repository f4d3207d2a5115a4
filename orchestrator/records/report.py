"""What did a run achieve, at what cost, and how does it compare? As JSON, as a page, as a picture.

Reads only what the recorder left in run directories; knows no model and replays nothing.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.errors import AuditError
from tidegate.orchestrator.records.audit import AUDIT_FILE
from tidegate.orchestrator.records.recording import RUN_FILE
from tidegate.orchestrator.records.report_lines import (
    discard_lines,
    forecast_lines,
    memory_cell,
    mismatch_cell,
)
from tidegate.orchestrator.records.run_files import METRICS_FILE, replace_file

REPORT_JSON = "report.json"
REPORT_PAGE = "report.md"
REPORT_PICTURE = "report.png"

COMPARED_RUNS_MAX = 20


@dataclass(frozen=True, slots=True)
class Facts:
    """A finished run in numbers: the keys of report.json."""

    run: str
    model: str
    reward_before: float | None
    """Mean reward on held-out tasks before the first batch."""
    reward_after: float | None
    """The same, measured the same way, after the last."""
    versions: int
    """Weight versions published."""
    mixed_version_share: float
    """Share of trained rollouts whose tokens came from two or more versions."""
    max_staleness: int
    staleness_bound: int | None
    """None: the policy promised none."""
    mean_staleness: float
    wall_s: float
    """From the first batch asked for to the end of the last."""
    batches: int
    rollouts_trained: int
    tokens_trained: int
    tokens_discarded: int
    tokens_per_s: float
    trainer_idle_share: float
    engine_idle_share: float
    mode: str | None
    pause_mode: str | None
    kv_policy: str | None
    warm_up: Mapping[str, object]
    """What was done to the model before, as the run's owner noted it."""
    discarded_rollouts: Mapping[str, int]
    staleness_histogram: Mapping[str, int]
    ledger: Mapping[str, Any]
    evaluation_ledger: Mapping[str, Any]
    audit: Mapping[str, Any] | None
    """What `tidegate audit` found, if it was run."""
    forecast: Mapping[str, Any] | None
    """Predicted beside measured staleness, and what limits the run."""
    discards: Mapping[str, Any]
    """By reason: how long they were, and of which tasks."""
    length_bias: Mapping[str, Any] | None
    """Whether what was trained last is as long as what was generated."""
    prefilled_tokens: int
    """Context that turns started from; 0 where engines don't say."""
    cached_tokens: int
    """Of it, what engines had computed before."""
    drafted_tokens: int
    """Guessed by engines, and verified."""
    accepted_tokens: int
    """Of them, those that were sampled."""
    quantize: str | None
    """What engines rounded weights to."""
    mismatch: Mapping[str, float] | None
    """How far batches were from what sampled them, as the run's owner noted it."""
    colocated: bool
    """Whether engines slept while the trainer trained."""
    memory_mb: Mapping[str, int] | None
    """The most that trainer and engines took together, by phase, as the run's owner noted it."""


def write_report(directory: Path) -> Path:
    """Write report.json, report.md and report.png into a run's directory; returns the page.

    Raises:
        AuditError: the run left no statistics, or its files can't be read.
    """
    # matplotlib takes a second to import, and only reports draw.
    from tidegate.orchestrator.records.report_picture import draw_report

    directory = Path(directory)
    facts = read_facts(directory)
    metrics = read_metrics(directory)
    replace_file(directory / REPORT_JSON, json.dumps(dataclasses.asdict(facts), indent=2).encode())
    draw_report(directory / REPORT_PICTURE, directory, facts, metrics)
    page = directory / REPORT_PAGE
    others = _others(directory.resolve(), facts)
    replace_file(page, "\n".join(_page(facts, others)).encode())
    return page


def read_facts(directory: Path) -> Facts:
    """Gather a finished run's numbers.

    Raises:
        AuditError: the run left no statistics, or its files can't be read.
    """
    directory = Path(directory)
    run = _read_json(directory / RUN_FILE)
    statistics, settings, extra = run["statistics"], run["settings"], run["extra"]
    if statistics is None:
        raise AuditError(f"{directory / RUN_FILE} has no statistics: the run has not ended yet")
    said = {**settings, **extra}
    ledger = statistics["ledger"]
    warm_up = said.get("warm_up") or {}
    return Facts(
        run=directory.resolve().name,
        model=run["model"],
        reward_before=said.get("reward_before"),
        reward_after=said.get("reward_after"),
        versions=statistics["trainer_version"],
        mixed_version_share=statistics["mixed_version_rollouts"]
        / max(1, statistics["trained_rollouts"]),
        max_staleness=statistics["max_staleness_seen"],
        staleness_bound=statistics["staleness_bound"],
        mean_staleness=statistics["mean_staleness"],
        wall_s=statistics["wall_s"],
        batches=statistics["batches"],
        rollouts_trained=statistics["trained_rollouts"],
        tokens_trained=ledger["trained"],
        tokens_discarded=sum(ledger["discarded"].values()),
        tokens_per_s=statistics["tokens_per_s"],
        trainer_idle_share=statistics["trainer_idle_share"],
        engine_idle_share=statistics["engine_idle_share"],
        mode=said.get("mode"),
        pause_mode=said.get("pause_mode"),
        kv_policy=said.get("kv_policy"),
        warm_up=warm_up if isinstance(warm_up, dict) else {"note": warm_up},
        discarded_rollouts=statistics["discarded_rollouts"],
        staleness_histogram=statistics["staleness_histogram"],
        ledger=ledger,
        evaluation_ledger=statistics["evaluation_ledger"],
        audit=_read_json(directory / AUDIT_FILE) if (directory / AUDIT_FILE).exists() else None,
        forecast=statistics.get("forecast"),
        discards=statistics.get("discards") or {},
        length_bias=statistics.get("length_bias"),
        prefilled_tokens=statistics.get("prefilled_tokens", 0),
        cached_tokens=statistics.get("cached_tokens", 0),
        drafted_tokens=_over_engines(statistics, "drafted_tokens"),
        accepted_tokens=_over_engines(statistics, "accepted_tokens"),
        quantize=said.get("quantize"),
        mismatch=said.get("mismatch"),
        colocated=bool(said.get("colocated")),
        memory_mb=said.get("memory_mb"),
    )


def read_record(directory: Path) -> dict[str, Any]:
    """What the recorder left of a run: settings, statistics, what its owner noted.

    Raises:
        AuditError: there is none, or it can't be read.
    """
    return _read_json(Path(directory) / RUN_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise AuditError(f"{path} is missing: is this the directory of a recorded run?") from None
    except (OSError, ValueError) as error:
        raise AuditError(f"{path} can't be read: {error}") from error
    if not isinstance(body, dict):
        raise AuditError(f"{path} is not what Tidegate writes: no object at its top")
    return body


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """A run's line per batch.

    Raises:
        AuditError: they can't be read.
    """
    try:
        lines = (Path(directory) / METRICS_FILE).read_text().splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise AuditError(f"{directory / METRICS_FILE} can't be read: {error}") from error


def _others(directory: Path, facts: Facts) -> list[Facts]:
    """Finished runs beside this one that started from the same weights, newest first."""
    found = []
    for path in directory.parent.glob(f"*/{RUN_FILE}"):
        if path.parent == directory:
            continue
        try:
            other = read_facts(path.parent)
        except (AuditError, KeyError, TypeError):
            continue  # unfinished, or of another version of Tidegate: nothing to compare with
        if other.model == facts.model:
            found.append((path.stat().st_mtime, other))
    found.sort(key=lambda pair: pair[0], reverse=True)
    return [other for _, other in found[:COMPARED_RUNS_MAX]]


# ---------------------------------------------------------------- the page


def _page(facts: Facts, others: list[Facts]) -> list[str]:
    return [
        f"# Run {facts.run}",
        "",
        *_summary(facts),
        "",
        f"![Reward, staleness and timeline]({REPORT_PICTURE})",
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
    """What was there before the run, and what the run added: the two are easily mixed up."""
    lines = []
    if facts.warm_up:
        said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in _flat(facts))
        lines += [
            f"**Before**: the model was warmed up by supervised training ({said}). What it could "
            f"do after that is not this run's merit.",
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
        ("of them over two or more versions", f"{facts.mixed_version_share:.1%}"),
        ("staleness, highest (bound)", f"{facts.max_staleness} ({_bound(facts.staleness_bound)})"),
        ("wall time", f"{facts.wall_s:.1f} s"),
        ("tokens per second", f"{facts.tokens_per_s:.0f}"),
        ("trainer idle", f"{facts.trainer_idle_share:.1%}"),
        ("engines idle", f"{facts.engine_idle_share:.1%}"),
        ("context found in engines' caches", _cached(facts)),
        ("tokens guessed", _guessed(facts)),
        ("engines' weights rounded to", facts.quantize or "-"),
        ("mismatch of trainer and engines", mismatch_cell(facts.mismatch)),
        (
            "memory of all processes at the most",
            memory_cell(facts.memory_mb, sleeps=facts.colocated),
        ),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _over_engines(statistics: Mapping[str, Any], name: str) -> int:
    return sum(engine.get(name, 0) for engine in statistics.get("engines", ()))


def _how(facts: Facts) -> str:
    return "; ".join(value or "-" for value in (facts.mode, facts.pause_mode, facts.kv_policy))


def _guessed(facts: Facts) -> str:
    if not facts.drafted_tokens:
        return "-"
    share = facts.accepted_tokens / facts.drafted_tokens
    return f"{facts.drafted_tokens}, {share:.1%} of them right"


def _cached(facts: Facts) -> str:
    if not facts.prefilled_tokens:
        return "-"
    share = facts.cached_tokens / facts.prefilled_tokens
    sampled = facts.ledger["generated"] + facts.evaluation_ledger["generated"]
    computed = (facts.prefilled_tokens - facts.cached_tokens) / max(1, sampled)
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
    """This run beside those that started from the same weights."""
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
