"""How is a finished run told on a page? What was there before, what it added, where tokens went.

Knows its numbers only: no file, no picture.
"""

from tidegate.orchestrator.records.facts import Facts
from tidegate.orchestrator.records.report_lines import (
    discard_lines,
    forecast_lines,
    memory_cell,
    mismatch_cell,
    parted_lines,
    seconds_cell,
    spent_cell,
)


def page_lines(facts: Facts, others: list[Facts], *, picture: str) -> list[str]:
    """Its lines, as Markdown; ``others`` started from the same weights, ``picture`` lies beside."""
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
        ("a group's wait for its last rollout", seconds_cell(facts.group_wait_s)),
        ("episodes' time by what it went to", spent_cell(facts.episode_s)),
        ("a publish; an engine's standstill in it", _publishing(facts)),
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


def _how(facts: Facts) -> str:
    return "; ".join(value or "-" for value in (facts.mode, facts.pause_mode, facts.kv_policy))


def _publishing(facts: Facts) -> str:
    return f"{seconds_cell(facts.publish_s)}; {seconds_cell(facts.standstill_s)}"


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
        *parted_lines(facts.staleness_in_flight, facts.staleness_in_queue),
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
