"""What is known of a finished run? Its numbers, gathered from what the recorder left.

Knows no page and no picture: those who draw or compare ask it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.errors import AuditError
from tidegate.orchestrator.records.audit import AUDIT_FILE
from tidegate.orchestrator.records.recording import RUN_FILE
from tidegate.orchestrator.records.run_files import METRICS_FILE

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
    staleness_in_flight: float | None
    """Of the mean staleness, the part of sampling; this and the next four: None of older runs."""
    staleness_in_queue: float | None
    """The part of waiting for the trainer."""
    group_wait_s: float | None
    """From a group's first end of an episode to its last, on the mean."""
    standstill_s: float | None
    """Of an engine, for a swap of weights, on the mean."""
    publish_s: float | None
    """From a publish to its weights being live, as the trainer waited for it, on the mean."""
    episode_s: Mapping[str, float]
    """Of all episodes, in environments, tools, scores and what they named."""


def read_facts(directory: Path) -> Facts:
    """Gather a finished run's numbers.

    Raises:
        AuditError: the run left no statistics, or its files can't be read.
    """
    directory = Path(directory)
    run = _read_json(directory / RUN_FILE)
    if run.get("statistics", {}) is None:
        raise AuditError(
            f"{directory / RUN_FILE} has no statistics: the run has not ended, or was killed; "
            f"`tidegate top {directory}` shows what there is"
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
        staleness_in_flight=_mean_of(statistics.get("staleness_in_flight")),
        staleness_in_queue=_mean_of(statistics.get("staleness_in_queue")),
        group_wait_s=_per(statistics.get("group_wait_s"), statistics.get("waited_groups")),
        standstill_s=_per(
            _over_engines(statistics, "standstill_s"), _over_engines(statistics, "swaps")
        ),
        publish_s=_per(
            (statistics.get("trainer_s") or {}).get("publish"), statistics.get("publishes")
        ),
        episode_s=statistics.get("episode_s") or {},
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


def runs_beside(directory: Path, facts: Facts) -> list[Facts]:
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


def _mean_of(histogram: Mapping[str, int] | None) -> float | None:
    """Nothing was counted, or nobody counted: None."""
    if not histogram:
        return None
    return sum(int(value) * n for value, n in histogram.items()) / sum(histogram.values())


def _per(total: float | None, count: int | None) -> float | None:
    return total / count if total is not None and count else None


def _over_engines(statistics: Mapping[str, Any], name: str) -> Any:
    return sum(engine.get(name, 0) for engine in statistics.get("engines", ()))
