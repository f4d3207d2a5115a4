"""Frames of the dashboard: conversion of an observation into compact JSON for the page.

The app sends :func:`frame` once a second, and :func:`about` once. Rows are lists with the order of
named columns. Pure functions; page/ draws the figures.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tidegate.observability.dashboard.source import RolloutList
from tidegate.observability.metrics.live import CollectedData
from tidegate.observability.metrics.snapshots import AdapterLine, RolloutLine, RunSnapshot
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.off_policy import BY_LAG
from tidegate.orchestrator.telemetry.statistics import RunStatistics

BATCH_COLUMNS = (
    "version",
    "wall_s",
    "reward",
    "staleness_mean",
    "staleness_max",
    "mixed_version_share",
    "tokens_per_s",
    "effective_sample_size",
    "mismatch_kl",
)
"""Metrics of a batch that the page draws as curves."""

SCALARS = (
    "wall_s",
    "trainer_version",
    "live_version",
    "admissible_groups",
    "running_groups",
    "buffered_groups",
    "training_groups",
    "batches",
    "trained_rollouts",
    "mixed_version_rollouts",
    "max_staleness_seen",
    "staleness_bound",
    "mean_staleness",
    "trainer_idle_share",
    "engine_idle_share",
    "tokens_per_s",
    "pause_mode",
    "asleep",
    "staging_version",
    "publish_failure",
    "context_tokens",
    "cached_context_tokens",
    "mean_staleness_from_generation",
    "mean_staleness_from_queue",
    "mean_straggler_wait_s",
    "straggler_wait_groups",
    "mean_weight_swap_stall_s",
    "batch_callback_errors",
)
"""Fields of `RunStatistics` that the page shows as single values."""


ADAPTERS_SHOWN_MAX = 500
"""Limit of trained adapters in a frame, in the order of their names."""


def frame(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return all of an observation that the page shows."""
    s, collected = snapshot.statistics, snapshot.collected
    off_policy = collected.off_policy
    shown = {
        "at_us": snapshot.at_us,
        "is_over": snapshot.is_over,
        "run": {name: getattr(s, name) for name in SCALARS},
        "ledger": _ledger(s.ledger),
        "evaluation_ledger": _ledger(s.evaluation_ledger),
        "staleness": _pairs(s.staleness_histogram),
        "in_flight": _pairs(s.staleness_from_generation),
        "in_queue": _pairs(s.staleness_from_queue),
        "lags": _pairs(collected.token_lags),
        "discards": [
            [reason, d.rollouts, d.tokens, d.mean_tokens, d.share_of_generated]
            for reason, d in s.discards.items()
        ],
        "forks": {
            "rollouts": collected.forks.rollouts,
            "forked": collected.forks.forked,
            "rows": list(collected.forks.rows_by_reason.items()),
        },
        "length_bias": _length_bias(s),
        "forecast": {n: getattr(s.forecast, n) for n in s.forecast.__slots__}
        if s.forecast
        else None,
        "off_policy": {
            "ess": off_policy.effective_sample_size,
            "kl": off_policy.mismatch_kl,
            "k3": off_policy.k3,
            "chi2": off_policy.chi2,
            "by_lag": [
                [lag, *(values.get(name) for name in BY_LAG)]
                for lag, values in sorted(off_policy.by_lag.items())
            ],
        },
        "trainer_activity_s": dict(collected.trainer_activity_s),
        "episode_activity_s": dict(s.episode_activity_s),
        "stuck": [str(each) for each in s.stuck],
        "scaling": s.scaling,
        "engines": _engines(s),
        "adapters": [
            [getattr(line, name) for name in AdapterLine.__slots__]
            for line in snapshot.adapters[:ADAPTERS_SHOWN_MAX]
        ],
        "adapters_total": len(snapshot.adapters),
        "batches": [[b.get(name) for name in BATCH_COLUMNS] for b in collected.batches],
        "evaluations": [[p.name, p.version, p.reward] for p in collected.evaluations],
    }
    groups = [
        [g.group_id, g.rollouts, g.running, g.oldest_possible_version] for g in snapshot.groups
    ]
    return {**plain(shown), "groups": groups, "timeline": timeline(collected)}


def timeline(collected: CollectedData) -> dict[str, Any]:
    """Return the timeline: slices by engine, marks, and the trainer's activities."""
    return {
        "slice_us": collected.slice_us,
        "engines": {
            name: [[s.number, s.version, s.decode_us, s.prefill_us] for s in slices]
            for name, slices in collected.slices.items()
        },
        "marks": [[m.engine, m.name, m.at_us, m.version] for m in collected.marks],
        "trainer": [[a.kind, a.started_us, a.ended_us, a.version] for a in collected.trainer],
    }


def about(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return what the page receives only once."""
    return {
        "about": dict(snapshot.about),
        "batch_columns": BATCH_COLUMNS,
        "adapter_columns": AdapterLine.__slots__,
        "by_lag_columns": tuple(BY_LAG),
    }


def rollout_list(found: RolloutList) -> dict[str, Any]:
    """Return a list of rollouts, with the columns of :class:`RolloutLine`."""
    columns = RolloutLine.__slots__
    return {
        "columns": columns,
        "total": found.total,
        "note": found.note,
        "rows": plain([[getattr(line, name) for name in columns] for line in found.lines]),
    }


def _ledger(ledger: LedgerSnapshot) -> dict[str, Any]:
    return {**dataclasses.asdict(ledger), "error": ledger.error}


def _length_bias(s: RunStatistics) -> dict[str, Any] | None:
    bias = s.length_bias
    if bias is None:
        return None
    return {
        "ratio": bias.ratio,
        "generated": bias.mean_generated_tokens,
        "trained": bias.mean_trained_tokens,
        "rollouts": bias.rollouts,
        "survival": [[tokens, share] for tokens, share in bias.survival.items()],
    }


def _engines(s: RunStatistics) -> list[list[Any]]:
    return [
        [
            e.name,
            e.weight_version,
            e.running_turns,
            e.waiting_turns,
            e.max_running_turns,
            e.tokens,
            e.busy_s,
            int(e.is_alive),
            e.state,
        ]
        for e in s.engines
    ]


def _pairs(counts: Mapping[int, int]) -> list[list[int]]:
    return [[value, count] for value, count in sorted(counts.items())]


def plain(value: Any) -> Any:
    """Round floats to five digits, more than a curve shows, also within lists and dictionaries; NaN
    and infinity become null."""
    match value:
        case float():
            return float(f"{value:.5g}") if math.isfinite(value) else None
        case dict():
            return {name: plain(each) for name, each in value.items()}
        case list():
            return [plain(each) for each in value]
    return value
