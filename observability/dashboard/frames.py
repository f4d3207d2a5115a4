"""Frames of the dashboard: conversion of an observation into compact JSON for the page.

The app sends :func:`frame` once a second, and :func:`about` once. Rows are lists with the order of
named columns. Pure functions; page/ draws the figures.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.observability.dashboard.source import RolloutList
from tidegate.observability.metrics.live import CollectedData
from tidegate.observability.metrics.snapshots import AdapterLine, RolloutLine, RunSnapshot
from tidegate.observability.metrics.timeline import Slice
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
    return {
        "at_us": snapshot.at_us,
        "is_over": snapshot.is_over,
        "run": {name: _plain(getattr(s, name)) for name in SCALARS},
        "ledger": _ledger(s.ledger),
        "evaluation_ledger": _ledger(s.evaluation_ledger),
        "staleness": _pairs(s.staleness_histogram),
        "in_flight": _pairs(s.staleness_from_generation),
        "in_queue": _pairs(s.staleness_from_queue),
        "lags": _pairs(collected.token_lags),
        "discards": [
            [reason, d.rollouts, d.tokens, _plain(d.mean_tokens), _plain(d.share_of_generated)]
            for reason, d in s.discards.items()
        ],
        "forks": {
            "rollouts": collected.forks.rollouts,
            "forked": collected.forks.forked,
            "rows": list(collected.forks.rows_by_reason.items()),
        },
        "length_bias": _length_bias(s),
        "forecast": _forecast(s),
        "off_policy": {
            "ess": _plain(collected.off_policy.effective_sample_size),
            "kl": _plain(collected.off_policy.mismatch_kl),
            "k3": _plain(collected.off_policy.k3),
            "chi2": _plain(collected.off_policy.chi2),
            "by_lag": [
                [lag, *(_plain(values.get(name)) for name in BY_LAG)]
                for lag, values in sorted(collected.off_policy.by_lag.items())
            ],
        },
        "trainer_activity_s": {
            kind: _plain(seconds) for kind, seconds in collected.trainer_activity_s.items()
        },
        "episode_activity_s": {
            name: _plain(seconds) for name, seconds in s.episode_activity_s.items()
        },
        "stuck": [str(each) for each in s.stuck],
        "scaling": s.scaling,
        "engines": _engines(s),
        "groups": [
            [g.group_id, g.rollouts, g.running, g.oldest_possible_version] for g in snapshot.groups
        ],
        "adapters": [
            [_plain(getattr(line, name)) for name in AdapterLine.__slots__]
            for line in snapshot.adapters[:ADAPTERS_SHOWN_MAX]
        ],
        "adapters_total": len(snapshot.adapters),
        "batches": [[_plain(b.get(name)) for name in BATCH_COLUMNS] for b in collected.batches],
        "evaluations": [
            [point.name, point.version, _plain(point.reward)] for point in collected.evaluations
        ],
        "timeline": timeline(snapshot.collected),
    }


def timeline(collected: CollectedData) -> dict[str, Any]:
    """Return the timeline: slices by engine, marks, and the trainer's activities."""
    return {
        "slice_us": collected.slice_us,
        "engines": {name: _slices(slices) for name, slices in collected.slices.items()},
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
        "rows": [[_plain(getattr(line, name)) for name in columns] for line in found.lines],
    }


def _slices(slices: Sequence[Slice]) -> list[list[int]]:
    return [[s.number, s.version, s.decode_us, s.prefill_us] for s in slices]


def _ledger(ledger: LedgerSnapshot) -> dict[str, Any]:
    return {
        "generated": ledger.generated,
        "trained": ledger.trained,
        "buffered": ledger.buffered,
        "in_flight": ledger.in_flight,
        "discarded": dict(ledger.discarded),
        "error": ledger.error,
    }


def _length_bias(s: RunStatistics) -> dict[str, Any] | None:
    bias = s.length_bias
    if bias is None:
        return None
    return {
        "ratio": _plain(bias.ratio),
        "generated": _plain(bias.mean_generated_tokens),
        "trained": _plain(bias.mean_trained_tokens),
        "rollouts": bias.rollouts,
        "survival": [[tokens, _plain(share)] for tokens, share in bias.survival.items()],
    }


def _forecast(s: RunStatistics) -> dict[str, Any] | None:
    if s.forecast is None:
        return None
    names = s.forecast.__slots__
    return {name: _plain(getattr(s.forecast, name)) for name in names}


def _engines(s: RunStatistics) -> list[list[Any]]:
    return [
        [
            e.name,
            e.weight_version,
            e.running_turns,
            e.waiting_turns,
            e.max_running_turns,
            e.tokens,
            _plain(e.busy_s),
            int(e.is_alive),
            e.state,
        ]
        for e in s.engines
    ]


def _pairs(counts: Mapping[int, int]) -> list[list[int]]:
    return [[value, count] for value, count in sorted(counts.items())]


def _plain(value: Any) -> Any:
    """Round floats to five digits, more than a curve shows; NaN and infinity become null."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
