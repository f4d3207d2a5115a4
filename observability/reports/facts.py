"""Numbers of a recorded run, read from `run.json` and `metrics.jsonl` of all its processes.

A killed run has the numbers that its last process wrote last, at most a second before its last
batch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tidegate.errors import AuditError
from tidegate.observability.audit.audit import AUDIT_FILE
from tidegate.observability.records.evaluations import (
    EvaluationPoint,
    held_out_name,
    read_evaluations,
)
from tidegate.observability.records.forks import ForkCounts, read_forks
from tidegate.observability.records.run_directories import (
    RUN_FILE,
    has_ended,
    process_directories,
    read_json,
    read_json_lines,
    read_run_file,
)
from tidegate.observability.records.run_files import METRICS_FILE
from tidegate.orchestrator.telemetry.html_tables import html_table, line
from tidegate.transport.printable import printable, printable_values

COMPARED_RUNS_MAX = 20
"""Largest number of other runs that a report compares with."""


@dataclass(frozen=True, slots=True, repr=False)
class Facts:
    """A run in numbers: the keys of report.json."""

    run: str
    model: str
    reward_before: float | None
    """Mean reward on held-out tasks before the first batch: as the owner recorded it, or as
    evaluated then."""
    reward_after: float | None
    """Mean reward on the same tasks at the last evaluation."""
    evaluations: Sequence[EvaluationPoint]
    """All evaluations, in their order."""
    training_reward_start: float | None
    """Mean reward of the first tenth of the trained batches; None if none was recorded."""
    training_reward_end: float | None
    """Mean reward of the last tenth."""
    versions: int
    """Number of published weight versions."""
    mixed_version_share: float
    """Share of trained rollouts whose tokens came from two or more versions."""
    max_staleness: int
    staleness_bound: int | None
    """Bound that the policy guarantees, in versions; None if it guarantees none."""
    mean_staleness: float
    wall_s: float
    """Seconds from the request for the first batch to the end of the last."""
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
    """Training before the run, as the owner recorded it."""
    discarded_rollouts: Mapping[str, int]
    staleness_histogram: Mapping[str, int]
    ledger: Mapping[str, Any]
    evaluation_ledger: Mapping[str, Any]
    audit: Mapping[str, Any] | None
    """Result of `tidegate audit`; None if it was not run."""
    forecast: Mapping[str, Any] | None
    """Predicted and measured staleness, and what limits the run."""
    discards: Mapping[str, Any]
    """For each discard reason, counts, lengths and most affected tasks."""
    length_bias: Mapping[str, Any] | None
    """Mean lengths of recently trained and of recently generated rollouts, and their ratio."""
    context_tokens: int
    """Context tokens that turns started from; 0 if engines don't report them."""
    cached_context_tokens: int
    """Number of ``context_tokens`` whose KV was in a prefix cache and was not computed."""
    draft_tokens: int
    """Draft tokens that engines verified."""
    accepted_draft_tokens: int
    """Draft tokens that were accepted."""
    quantization: str | None
    """Format to which engines quantized the weights; None if they did not."""
    step_time_min_s: float
    """Minimum step time that the run imposed on engines; 0 if it imposed none."""
    mismatch: Mapping[str, float] | None
    """Difference between the trained and the sampling policy, as the owner recorded it."""
    colocated: bool
    """Whether engines slept while the trainer trained."""
    memory_mb: Mapping[str, int] | None
    """Peak memory of trainer and engines together, by phase, as the owner recorded it."""
    staleness_from_generation: float | None
    """Mean staleness that arose while rollouts were generated, in versions. This field and the next
    four are None in older runs."""
    staleness_from_queue: float | None
    """Mean staleness that arose while groups waited for the trainer."""
    straggler_wait_s: float | None
    """Mean seconds from the end of a group's first rollout to the end of its last."""
    weight_swap_stall_s: float | None
    """Mean seconds that a swap of weights stalls an engine's turns."""
    publish_s: float | None
    """Mean seconds that the trainer waited in ``publish`` for its weights to be live."""
    episode_activity_s: Mapping[str, float]
    """Seconds of all episodes by activity: environments, tools, scores, and user-named ones."""
    tool_call_turns: int
    """Number of turns whose text resembles a tool call."""
    parsed_tool_call_turns: int
    """Number of turns whose tool calls were parsed."""
    episode_failures: Sequence[Mapping[str, Any]]
    """Failed episodes by cause, reason and outcome."""
    groups_kept_at_limit: int
    """Groups that the filter rejected after its limit, and that were trained."""
    tasks_drawn: int
    """Different tasks that curricula have given."""
    task_draws: int
    """Times that curricula have given a task."""
    task_replays: int
    """Draws that replayed a hard task."""
    forks: ForkCounts
    """Forks of the rollouts that ended."""
    stuck: Sequence[Mapping[str, Any]]
    """What was without progress at the end, or gave the trainer nothing to learn from."""

    @property
    def rollouts_discarded(self) -> int:
        """Number of discarded rollouts, for whatever reason."""
        return sum(self.discarded_rollouts.values())

    @property
    def forked_share(self) -> float | None:
        """Share of rollouts that forked; None if none has ended."""
        return self.forks.share

    def figures(self) -> dict[str, object]:
        """Return the few figures that a notebook shows first."""
        bound = "none" if self.staleness_bound is None else self.staleness_bound
        return {
            "weight versions": self.versions,
            "rollouts trained": self.rollouts_trained,
            "training reward": _change(self.training_reward_start, self.training_reward_end),
            "held-out reward": _change(self.reward_before, self.reward_after),
            "staleness": f"mean {self.mean_staleness:.2f}, max {self.max_staleness}, bound {bound}",
            "seconds": round(self.wall_s, 1),
            "tokens per second": round(self.tokens_per_s),
            "idle": f"trainer {self.trainer_idle_share:.0%}, engines {self.engine_idle_share:.0%}",
        }

    def __repr__(self) -> str:
        return line("Facts", {"of": self.run, **self.figures()})

    def _repr_html_(self) -> str:
        return html_table(f"Run {self.run}", self.figures())


def _change(before: float | None, after: float | None) -> str:
    return " to ".join("-" if value is None else f"{value:.3f}" for value in (before, after))


def read_facts(directory: Path) -> Facts:
    """Read a run's numbers.

    Raises:
        AuditError: the run left no statistics, or its files can't be read.
    """
    directory = Path(directory)
    run = printable_values(read_record(directory))
    if run.get("statistics", {}) is None:
        raise AuditError(
            f"{directory / RUN_FILE} has no statistics: the run has not ended, or was killed, "
            f"and had no batch before; `tidegate top {directory}` shows what there is"
        )
    try:
        return _facts(directory, run)
    except AuditError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise AuditError(
            f"{directory / RUN_FILE} is not what this version of Tidegate writes, but of another, "
            f"or damaged: {type(error).__name__} {error}"
        ) from error


def _facts(directory: Path, run: Mapping[str, Any]) -> Facts:
    statistics, settings, extra = run["statistics"], run["settings"], run["extra"]
    values = {**settings, **extra}
    ledger = statistics["ledger"]
    warm_up = values.get("warm_up") or {}
    evaluations = read_evaluations(directory)
    before, after = _held_out_rewards(evaluations)
    training_start, training_end = _training_rewards(directory)
    return Facts(
        run=printable(directory.resolve().name),
        model=run["model"],
        reward_before=values.get("reward_before", before),
        reward_after=values.get("reward_after", after),
        evaluations=evaluations,
        training_reward_start=training_start,
        training_reward_end=training_end,
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
        mode=values.get("mode"),
        pause_mode=values.get("pause_mode"),
        kv_policy=values.get("kv_policy"),
        warm_up=warm_up if isinstance(warm_up, dict) else {"note": warm_up},
        discarded_rollouts=statistics["discarded_rollouts"],
        staleness_histogram=statistics["staleness_histogram"],
        ledger=ledger,
        evaluation_ledger=statistics["evaluation_ledger"],
        audit=read_json(directory / AUDIT_FILE) if (directory / AUDIT_FILE).exists() else None,
        forecast=statistics.get("forecast"),
        discards=statistics.get("discards") or {},
        length_bias=statistics.get("length_bias"),
        context_tokens=statistics.get("context_tokens", 0),
        cached_context_tokens=statistics.get("cached_context_tokens", 0),
        draft_tokens=_over_engines(statistics, "draft_tokens"),
        accepted_draft_tokens=_over_engines(statistics, "accepted_draft_tokens"),
        quantization=values.get("quantization", values.get("quantize")),
        step_time_min_s=values.get("step_time_min_s") or 0.0,
        mismatch=values.get("mismatch"),
        colocated=bool(values.get("colocated")),
        memory_mb=values.get("memory_mb"),
        staleness_from_generation=_mean_of(statistics.get("staleness_from_generation")),
        staleness_from_queue=_mean_of(statistics.get("staleness_from_queue")),
        straggler_wait_s=_ratio(
            statistics.get("straggler_wait_s"), statistics.get("straggler_wait_groups")
        ),
        weight_swap_stall_s=_ratio(
            _over_engines(statistics, "weight_swap_stall_s"),
            _over_engines(statistics, "weight_swaps"),
        ),
        publish_s=_ratio(
            (statistics.get("trainer_activity_s") or {}).get("publish"), statistics.get("publishes")
        ),
        episode_activity_s=statistics.get("episode_activity_s") or {},
        tool_call_turns=statistics.get("tool_call_turns") or 0,
        parsed_tool_call_turns=statistics.get("parsed_tool_call_turns") or 0,
        forks=read_forks(directory),
        episode_failures=statistics.get("episode_failures") or (),
        groups_kept_at_limit=statistics.get("groups_kept_at_limit") or 0,
        tasks_drawn=statistics.get("tasks_drawn") or 0,
        task_draws=statistics.get("task_draws") or 0,
        task_replays=statistics.get("task_replays") or 0,
        stuck=statistics.get("stuck") or (),
    )


def _held_out_rewards(
    evaluations: Sequence[EvaluationPoint],
) -> tuple[float | None, float | None]:
    """Return the mean reward before the first batch, and at the last evaluation after it."""
    name = held_out_name(evaluations)
    points = [point for point in evaluations if point.name == name]
    before = next((point.reward for point in points if not point.batches), None)
    after = next((point.reward for point in reversed(points) if point.batches), None)
    return before, after


def _training_rewards(directory: Path) -> tuple[float | None, float | None]:
    """Return the mean reward of the first and of the last tenth of the batches."""
    if not (directory / METRICS_FILE).exists():
        return None, None
    rewards = [row["reward"] for row in read_batches(directory) if "reward" in row]
    if not rewards:
        return None, None
    tenth = max(1, len(rewards) // 10)
    return fmean(rewards[:tenth]), fmean(rewards[-tenth:])


def read_record(directory: Path) -> dict[str, Any]:
    """Return a run's ``run.json``, merged over its processes.

    Settings are the last process's. Statistics cover the whole run: the core's counts continue over
    a resume, and counts that each process starts at 0 are added up here.

    Raises:
        AuditError: the file is missing, or can't be read.
    """
    first, *later = process_directories(Path(directory))
    runs = [read_run_file(first)]
    # A process may have been killed before it wrote the file.
    runs += [read_run_file(part) for part in later if (part / RUN_FILE).exists()]
    if len(runs) == 1:
        return {**runs[0], "is_final": has_ended(runs[0])}
    extras = [run.get("extra") or {} for run in runs]
    try:
        return {
            **runs[-1],
            "statistics": _over_processes([run["statistics"] for run in runs]),
            "extra": {name: value for extra in extras for name, value in extra.items()},
            "is_final": has_ended(runs[-1]),
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise AuditError(
            f"a {RUN_FILE} of {directory} is not what this version of Tidegate writes, but of "
            f"another, or damaged: {type(error).__name__} {error}"
        ) from error


_SUMMED = (
    "wall_s",
    "context_tokens",
    "cached_context_tokens",
    "straggler_wait_groups",
    "straggler_wait_s",
    "publishes",
    "batch_callback_errors",
    "tool_call_turns",
    "parsed_tool_call_turns",
)
"""Statistics that begin at 0 in each process."""

_SUMMED_BY_KEY = (
    "staleness_from_generation",
    "staleness_from_queue",
    "episode_activity_s",
    "trainer_activity_s",
)
"""Mappings whose values begin at 0 in each process."""

_AVERAGED_OVER_TIME = ("trainer_idle_share", "engine_idle_share", "tokens_per_s")
"""Means over a process's ``wall_s``; merged with those weights."""


def _over_processes(statistics_of_processes: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Merge the statistics of a run's processes; None if none recorded any."""
    recorded = [statistics for statistics in statistics_of_processes if statistics is not None]
    if not recorded:
        return None
    merged = dict(recorded[-1])
    wall_s = sum(statistics["wall_s"] for statistics in recorded)
    for name in _AVERAGED_OVER_TIME:
        total = sum(statistics[name] * statistics["wall_s"] for statistics in recorded)
        merged[name] = total / wall_s if wall_s else 0.0
    for name in _SUMMED:
        merged[name] = sum(statistics.get(name) or 0 for statistics in recorded)
    for name in _SUMMED_BY_KEY:
        counts: Counter[str] = Counter()
        for statistics in recorded:
            counts.update(statistics.get(name) or {})
        merged[name] = dict(counts)
    merged["engines_before"] = [
        engine for statistics in recorded[:-1] for engine in statistics.get("engines", ())
    ]
    merged["forecast"] = next(
        (statistics["forecast"] for statistics in reversed(recorded) if statistics.get("forecast")),
        None,
    )
    return merged


def read_metrics(directory: Path, *, stops_at_damage: bool = False) -> list[dict[str, Any]]:
    """Return a run's ``metrics.jsonl`` rows, one per batch, over all of its processes.

    A batch that was trained again after a resume is returned once. A line that a crash cut short is
    omitted. ``stops_at_damage``: skip the rest of a process's file after a line that can't be read.

    Raises:
        AuditError: the run has no such file, or a complete line of it can't be read.
    """
    rows: list[dict[str, Any]] = []
    for part in process_directories(Path(directory)):
        if part != directory and not (part / METRICS_FILE).exists():
            continue
        rows_of_part = read_json_lines(part / METRICS_FILE, stops_at_damage=stops_at_damage)
        if part != directory and rows_of_part:
            rows = _before_resume(rows, part, rows_of_part)
        rows += rows_of_part
    return rows


def read_batches(directory: Path, *, batches: int | None = None) -> list[dict[str, float]]:
    """Return the numeric figures of a run's first ``batches``, or of all recorded ones if None.

    The dashboard's curves show them; users may have added fields of other types.
    """
    lines = read_metrics(directory, stops_at_damage=True)  # show what is readable
    return [
        {name: value for name, value in line.items() if isinstance(value, int | float)}
        for line in lines
        if "version" in line
    ][:batches]


def resumed_batches(directory: Path) -> list[int]:
    """Return, for each resume of the run, the number of batches that it continued from."""
    parts = [
        part for part in process_directories(Path(directory))[1:] if (part / RUN_FILE).exists()
    ]
    counts = [read_run_file(part).get("resumed_batches") for part in parts]
    return [count for count in counts if isinstance(count, int)]


def _before_resume(
    rows: list[dict[str, Any]], part: Path, next_rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the ``rows`` of batches in the checkpoint that ``part``'s process resumed from."""
    run = read_run_file(part) if (part / RUN_FILE).exists() else {}
    batches = run.get("resumed_batches")
    if isinstance(batches, int):
        return rows[:batches]
    first = next_rows[0].get("version", 0)
    return [line for line in rows if line.get("version", 0) < first]


def runs_beside(directory: Path, facts: Facts) -> list[Facts]:
    """Return the facts of finished runs of the same model in the parent directory, newest first."""
    found = []
    for path in directory.parent.glob(f"*/{RUN_FILE}"):
        if path.parent == directory:
            continue
        try:
            other = read_facts(path.parent)
        except (AuditError, KeyError, TypeError):
            continue  # unfinished, or written by another version of Tidegate
        if other.model == facts.model:
            found.append((path.stat().st_mtime, other))
    found.sort(key=lambda pair: pair[0], reverse=True)
    return [other for _, other in found[:COMPARED_RUNS_MAX]]


def _mean_of(histogram: Mapping[str, int] | None) -> float | None:
    """Return the histogram's mean; None if it is missing or empty."""
    if not histogram:
        return None
    return sum(int(value) * count for value, count in histogram.items()) / sum(histogram.values())


def _ratio(total: float | None, count: int | None) -> float | None:
    return total / count if total is not None and count else None


def _over_engines(statistics: Mapping[str, Any], name: str) -> Any:
    engines = [*statistics.get("engines_before", ()), *statistics.get("engines", ())]
    return sum(engine.get(name, 0) for engine in engines)
