"""Report of a run: Markdown page, JSON and picture, written from the files in its directory.

``tidegate report`` and the examples call :func:`write_report`. It reads ``run.json``,
``metrics.jsonl`` and ``trace.json`` through :mod:`facts`, and draws with matplotlib. It replays no
token; `audit/` does.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.errors import AuditError
from tidegate.observability.records.forks import ForkCounts
from tidegate.observability.records.run_directories import adapter_directories
from tidegate.observability.records.run_files import replace_file
from tidegate.observability.reports.comparison import markdown_table
from tidegate.observability.reports.facts import Facts, read_facts, read_metrics, runs_beside
from tidegate.transport.printable import printable


def _forecast(forecast: Mapping[str, Any] | None) -> list[str]:
    """Return predicted and measured staleness, and the diagnosis; empty without a forecast, and for
    runs recorded before it had one."""
    if forecast is None or "limit" not in forecast:
        return []
    return [
        f"Predicted mean {forecast['predicted_staleness']:.2f}, measured "
        f"{forecast['measured_staleness']:.2f}. Rollout over trainer throughput (rho) "
        f"{forecast['throughput_ratio']:.2f}; the longest rollout of a group is "
        f"{forecast['tail_factor']:.2f} times the mean. A batch takes "
        f"{forecast['batch_interval_s']:.2f} s; {forecast['attainable_batch_interval_s']:.2f} s is "
        f"attainable.",
        "",
        f"**{forecast['advice'][:1].upper()}{forecast['advice'][1:]}.**",
        "",
    ]


def _origins(generation: float | None, queue: float | None) -> list[str]:
    if generation is None or queue is None:
        return []
    return [
        f"Since this process began, {generation:.2f} of the mean staleness came from generation "
        f"(before a rollout's group had ended) and {queue:.2f} from the queue.",
        "",
    ]


def _discards(discards: Mapping[str, Any], bias: Mapping[str, Any] | None) -> list[str]:
    """Return a table of discards by reason, with lengths and tasks, and the length bias."""
    lines = []
    if discards:
        heading = ("discard reason", "rollouts", "tokens", "mean tokens", "share of generated")
        rows = (_discard_row(reason, row) for reason, row in sorted(discards.items()))
        lines += [*markdown_table((*heading, "most affected tasks"), rows), ""]
    if bias is not None:
        lines += [
            f"Length bias over the last {bias['rollouts']} rollouts: trained "
            f"{bias['mean_trained_tokens']:.1f} tokens on average, generated "
            f"{bias['mean_generated_tokens']:.1f}, ratio {bias['ratio']:.2f} (1 is unbiased).",
            "",
        ]
    return lines


def _failures(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    if not failures:
        return []
    columns = ("cause", "reason", "retried", "rewarded", "discarded")
    return [
        "Failed episodes by cause: `policy` is the model, `infrastructure` are tools, graders and "
        "engines, `code` is the episode function.",
        "",
        *markdown_table(columns, ([each[name] for name in columns] for each in failures)),
        "",
    ]


def _stuck(stuck: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for each in stuck:
        about = f"**{each['name'][:1].upper()}{each['name'][1:]}** (stuck: {each['kind']})"
        lines += [f"{about}: {each['where']}.", ""]
    return lines


def _tasks(facts: Facts) -> list[str]:
    lines = []
    if facts.task_draws:
        lines += [
            f"The curriculum gave {facts.tasks_drawn} tasks {facts.task_draws} times; "
            f"{facts.task_replays} of these draws replayed a hard task.",
            "",
        ]
    if facts.groups_kept_at_limit:
        lines += [
            f"{facts.groups_kept_at_limit} groups that the filter rejects were trained, because it "
            f"had dropped drops_per_batch_max groups since the batch before.",
            "",
        ]
    return lines


def fork_lines(forks: ForkCounts) -> list[str]:
    """Return how many rollouts forked, and why; empty if none did."""
    if not forks.forked:
        return []
    reasons = "; ".join(f"{count} {reason}" for reason, count in forks.rows_by_reason.items())
    return [
        f"{forks.forked} of {forks.rollouts} rollouts ({forks.share:.1%}) forked, into "
        f"{sum(forks.rows_by_reason.values())} branches: {reasons}.",
        "",
    ]


def _seconds_cell(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def _activities_cell(seconds: Mapping[str, float]) -> str:
    largest_first = sorted(seconds.items(), key=lambda pair: -pair[1])
    return "; ".join(f"{name} {spent:.1f} s" for name, spent in largest_first) or "-"


def _mismatch_cell(mismatch: Mapping[str, float] | None) -> str:
    if not mismatch:
        return "-"
    return "; ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in mismatch.items())


def _memory_cell(facts: Facts) -> str:
    """Format peak memory by phase: engines that sleep hold none."""
    if not facts.memory_mb:
        return "-"
    peaks = "; ".join(f"{phase} {peak_mb} MB" for phase, peak_mb in facts.memory_mb.items())
    return f"{peaks} ({'engines asleep' if facts.colocated else 'all awake'} while training)"


def _discard_row(reason: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    tasks = ", ".join(f"{task['offer']}:{task['index']} ({_count(task)})" for task in row["tasks"])
    mean, share = f"{row['mean_tokens']:.1f}", f"{row['share_of_generated']:.1%}"
    return reason, row["rollouts"], row["tokens"], mean, share, tasks or "-"


def _count(task: Mapping[str, Any]) -> str:
    count_min, count_max = task["at_least"], task["rollouts"]
    return str(count_max) if count_min == count_max else f"{count_min} to {count_max}"


ADAPTER_COLUMNS = (
    *("adapter", "versions", "batches", "training reward, first and last tenth"),
    *("staleness: mean, highest (bound)", "2+ versions", "tokens trained", "audit"),
)


def _adapter_table(adapters: Sequence[Facts]) -> list[str]:
    if not adapters:
        return []
    rows = (
        (
            *(each.run, each.versions, each.batches),
            f"{_number(each.training_reward_start)}; {_number(each.training_reward_end)}",
            f"{each.mean_staleness:.2f}, {each.max_staleness} ({_bound(each.staleness_bound)})",
            f"{each.mixed_version_share:.1%}",
            *(each.ledger["trained"], _audit_cell(each)),
        )
        for each in adapters
    )
    return ["## Trained adapters", "", *markdown_table(ADAPTER_COLUMNS, rows), ""]


def _audit_cell(facts: Facts) -> str:
    if facts.audit is None:
        return "-"
    verdict = str(facts.audit["verdict"])
    return "**disagrees**" if verdict == "DISAGREES" else verdict


def page_lines(
    facts: Facts, others: list[Facts], *, picture: str, adapters: Sequence[Facts] = ()
) -> list[str]:
    """Return the page's Markdown lines.

    Args:
        facts: the run.
        others: runs of the same model.
        adapters: the adapters that the run trained.
        picture: file name of the picture, relative to the page.
    """
    return [
        f"# Run {facts.run}",
        "",
        *_summary(facts),
        "",
        *_stuck(facts.stuck),
        f"![Reward, staleness and timeline]({picture})",
        "",
        "## Results",
        "",
        *_results(facts),
        "",
        *_evaluations(facts),
        "## Staleness",
        "",
        *_staleness(facts),
        "",
        "## Token ledger",
        "",
        *_ledger(facts),
        "",
        *_discards(facts.discards, facts.length_bias),
        *_tasks(facts),
        *fork_lines(facts.forks),
        *_failures(facts.episode_failures),
        *_adapter_table(adapters),
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
        description = ", ".join(
            f"{name.replace('_', ' ')} {f'{v:.3g}' if isinstance(v, float) else v}"
            for name, v in facts.warm_up.items()
        )
        lines += [
            f"**Before**: the model was warmed up by supervised training ({description}). Its "
            f"skill after the warm-up is not a result of this run.",
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
            f"tasks was recorded before and after."
        )
    return lines


def _results(facts: Facts) -> list[str]:
    rows = [
        ("mode", facts.mode or "-"),
        ("pause mode; KV policy", f"{facts.pause_mode or '-'}; {facts.kv_policy or '-'}"),
        (
            "training reward, first and last tenth of the batches",
            f"{_number(facts.training_reward_start)}; {_number(facts.training_reward_end)}",
        ),
        ("held-out reward before", _number(facts.reward_before)),
        ("held-out reward after", _number(facts.reward_after)),
        ("weight versions published", str(facts.versions)),
        ("rollouts trained", f"{facts.rollouts_trained} in {facts.batches} batches"),
        ("share with two or more versions", f"{facts.mixed_version_share:.1%}"),
        ("staleness, highest (bound)", f"{facts.max_staleness} ({_bound(facts.staleness_bound)})"),
        ("wall time", f"{facts.wall_s:.1f} s"),
        ("tokens per second", f"{facts.tokens_per_s:.0f}"),
        ("trainer idle", f"{facts.trainer_idle_share:.1%}"),
        ("engines idle", f"{facts.engine_idle_share:.1%}"),
        ("mean wait of a group for its last rollout", _seconds_cell(facts.straggler_wait_s)),
        ("episodes' time by activity", _activities_cell(facts.episode_activity_s)),
        ("turns that resemble tool calls, parsed", _tool_calls_cell(facts)),
        ("mean time of a publish; mean engine stall per swap", _publish_cell(facts)),
        ("prefilled tokens found in cache", _cache_cell(facts)),
        ("draft tokens verified", _drafts_cell(facts)),
        ("engines' weights quantized to", facts.quantization or "-"),
        ("minimum step time of engines", _pacing_cell(facts)),
        ("mismatch of trainer and engines", _mismatch_cell(facts.mismatch)),
        ("peak memory of all processes", _memory_cell(facts)),
    ]
    return markdown_table(("", ""), [row for row in rows if row[1].strip("-; ")])


def _evaluations(facts: Facts) -> list[str]:
    if not facts.evaluations:
        return []
    rows = (
        (each.name, each.version, f"{each.reward:.3f}", each.tasks, each.failures)
        for each in facts.evaluations
    )
    heading = ("name", "version", "mean reward", "tasks", "failed")
    return ["## Evaluations", "", *markdown_table(heading, rows), ""]


def _tool_calls_cell(facts: Facts) -> str:
    if not facts.tool_call_turns:
        return "-"
    cell = f"{facts.parsed_tool_call_turns} of {facts.tool_call_turns}"
    return cell if facts.parsed_tool_call_turns else f"**{cell}**"


def _modes_cell(facts: Facts) -> str:
    modes = (facts.mode, facts.pause_mode, facts.kv_policy)
    return "; ".join(value for value in modes if value) or "-"


def _rewards_cell(facts: Facts) -> str:
    """Return the held-out rewards before and after; those of training where none was recorded."""
    held_out = facts.reward_before, facts.reward_after
    if held_out != (None, None):
        return " to ".join(map(_number, held_out))
    training = facts.training_reward_start, facts.training_reward_end
    return "-" if training == (None, None) else f"{' to '.join(map(_number, training))} (training)"


def _publish_cell(facts: Facts) -> str:
    return f"{_seconds_cell(facts.publish_s)}; {_seconds_cell(facts.weight_swap_stall_s)}"


def _drafts_cell(facts: Facts) -> str:
    if not facts.draft_tokens:
        return "-"
    share = facts.accepted_draft_tokens / facts.draft_tokens
    return f"{facts.draft_tokens}, {share:.1%} accepted"


def _pacing_cell(facts: Facts) -> str:
    if not facts.step_time_min_s:
        return "-"
    return f"{1e3 * facts.step_time_min_s:g} ms (step_time_min_s)"


def _cache_cell(facts: Facts) -> str:
    if not facts.context_tokens:
        return "-"
    share = facts.cached_context_tokens / facts.context_tokens
    sampled = facts.ledger["generated"] + facts.evaluation_ledger["generated"]
    computed = (facts.context_tokens - facts.cached_context_tokens) / max(1, sampled)
    return f"{share:.1%}; {computed:.2f} tokens prefilled per sampled token"


def _bound(bound: int | None) -> str:
    return "none" if bound is None else str(bound)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _staleness(facts: Facts) -> list[str]:
    bound = facts.staleness_bound
    is_within_bound = bound is None or facts.max_staleness <= bound
    return [
        "Trainer version at consumption minus the oldest version that sampled a trained token of "
        "the rollout.",
        "",
        f"Mean {facts.mean_staleness:.2f}, highest {facts.max_staleness}, bound "
        f"{_bound(bound)}: {'kept' if is_within_bound else '**EXCEEDED**'}.",
        "",
        *_origins(facts.staleness_from_generation, facts.staleness_from_queue),
        *_forecast(facts.forecast),
        *markdown_table(("staleness", "rollouts"), facts.staleness_histogram.items()),
    ]


def _ledger(facts: Facts) -> list[str]:
    ledger = facts.ledger
    rows = [("generated", ledger["generated"]), ("trained", ledger["trained"])]
    rows += [("still buffered", ledger["buffered"]), ("still in flight", ledger["in_flight"])]
    rows += [(f"discarded: {reason}", n) for reason, n in sorted(ledger["discarded"].items())]
    error = ledger["generated"] - sum(count for _, count in rows[1:])
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(facts.discarded_rollouts.items()))
    return [
        *markdown_table(("tokens", ""), [*rows, ("unaccounted for", error)]),
        "",
        f"Evaluation tokens, not included above: {facts.evaluation_ledger['generated']}. "
        + (f"Rollouts discarded: {reasons}." if reasons else "No rollout was discarded."),
    ]


def _audit(facts: Facts) -> list[str]:
    if facts.audit is None:
        return ["Not audited yet: `tidegate audit` this directory, then `tidegate report` it."]
    return [f"- {line}" for line in facts.audit["lines"]]


def _comparison(facts: Facts, others: list[Facts]) -> list[str]:
    if not others:
        return []
    heading = ("run", "mode; pause; KV", "wall s", "trainer idle", "engines idle", "reward")
    rows = (
        (
            f"**{run.run}**" if run is facts else run.run,
            _modes_cell(run),
            f"{run.wall_s:.1f}",
            f"{run.trainer_idle_share:.1%}",
            f"{run.engine_idle_share:.1%}",
            _rewards_cell(run),
            f"{run.max_staleness} of {_bound(run.staleness_bound)}",
            f"{run.mixed_version_share:.1%}",
        )
        for run in (facts, *others)
    )
    table = markdown_table((*heading, "staleness", "2+ versions"), rows)
    return ["## Comparison with other runs of the same model", "", *table, ""]


REPORT_JSON = "report.json"
REPORT_PAGE = "report.md"
REPORT_PICTURE = "report.png"


def _adapters(directory: Path) -> list[Facts]:
    """Return the facts of the adapters that the run trained, without those that left none."""
    found = []
    for path in adapter_directories(directory):
        with contextlib.suppress(AuditError):
            found.append(read_facts(path))
    return found


def write_report(directory: Path) -> Path:
    """Write report.json, report.md and report.png into a run's directory; return the page's path.

    Raises:
        AuditError: the run left no statistics, or its files can't be read.
    """
    # matplotlib takes a second to import, and only reports draw.
    from tidegate.observability.reports.pictures import report_figure

    directory = Path(directory)
    facts = read_facts(directory)
    metrics = read_metrics(directory)
    replace_file(directory / REPORT_JSON, json.dumps(dataclasses.asdict(facts), indent=2).encode())
    report_figure(directory, facts, metrics).savefig(directory / REPORT_PICTURE, dpi=110)
    page = directory / REPORT_PAGE
    others = runs_beside(directory.resolve(), facts)
    adapters = _adapters(directory)
    lines = page_lines(facts, others, picture=REPORT_PICTURE, adapters=adapters)
    replace_file(page, "\n".join(printable(line, keeps="\n") for line in lines).encode())
    return page
