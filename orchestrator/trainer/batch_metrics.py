"""Metrics of a batch, for ``metrics.jsonl`` and the user's ``on_batch`` callback.

:class:`BatchHandle` computes them for each batch that it hands to the trainer.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tidegate.errors import ConfigError
from tidegate.orchestrator.telemetry.rows import RowsOfRollouts
from tidegate.orchestrator.telemetry.timekeeping import Usage

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch

OnBatch = Callable[[Mapping[str, float]], object]
"""User's callback, called with each batch's metrics on the trainer's thread, before the trainer
gets the batch. Exceptions of the callback are logged and counted; the trainer still gets the batch.
"""


def check_callback(on_batch: object) -> None:
    """Check a callback when the run starts, because its later exceptions are only logged.

    Raises:
        ConfigError: the callback can't be called, or is async.
    """
    if not callable(on_batch) or inspect.iscoroutinefunction(on_batch):
        raise ConfigError(
            f"on_batch must be a sync function that takes a batch's metrics, because it is called "
            f"on the trainer's thread; got {on_batch!r:.80}"
        )


def batch_metrics(batch: "Batch", usage: Usage) -> dict[str, float]:
    """Return a batch's metrics: its line of metrics.jsonl, and the callback's argument."""
    staleness = batch.staleness.numpy()
    versions, is_trained = batch.weight_versions.numpy(), batch.loss_mask.numpy()
    lags = batch.trainer_version - versions[is_trained]
    newest = versions.max(1) if versions.size else batch.trainer_version - staleness
    rows = RowsOfRollouts(batch.rollout_ids.numpy())
    rewards, tokens = rows.first(batch.rewards.numpy()), rows.added(is_trained.sum(1))
    staleness, newest = rows.highest(staleness), rows.highest(newest)
    oldest = batch.trainer_version - staleness
    mixed = newest > oldest
    reused = rows.first(batch.uses.numpy()) > 1 if len(batch.uses) else mixed[:0]
    return {
        "version": batch.trainer_version,
        "reward": _mean(rewards),
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "rollouts": len(rewards),
        "sampled_tokens": int(is_trained.sum()),
        "rollout_tokens_mean": _mean(tokens),
        "staleness_mean": _mean(staleness),
        "staleness_p50": _quantile(staleness, 0.5),
        "staleness_p99": _quantile(staleness, 0.99),
        "staleness_max": float(staleness.max(initial=0)),
        "token_lag_mean": _mean(lags),
        "token_lag_max": float(lags.max(initial=0)),
        "mixed_version_share": _mean(mixed),
        "reused_share": _mean(reused),
        "version_span_max": float((newest - oldest).max(initial=0)),
        "trainer_idle_share": usage.trainer_idle_share,
        "engine_idle_share": usage.engine_idle_share,
        "tokens_per_s": usage.tokens_per_s,
        "wall_s": round(usage.wall_s, 3),
    }


def tokens_by_lag(batch: "Batch") -> dict[int, int]:
    """Return the number of trained tokens of a batch for each lag, in versions."""
    packed = batch.packed
    versions = packed.weight_versions.numpy()[packed.loss_mask.numpy()]
    if not versions.size:
        return {}
    oldest = int(versions.min())
    counts = np.bincount(versions - oldest)  # for few versions ten times as fast as np.unique
    max_lag = batch.trainer_version - oldest
    return {max_lag - newer: int(n) for newer, n in reversed(list(enumerate(counts))) if n}


def _mean(values: "np.ndarray[tuple[int, ...], np.dtype[Any]]") -> float:
    return float(values.mean()) if values.size else 0.0


def _quantile(values: "np.ndarray[tuple[int, ...], np.dtype[Any]]", share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = np.sort(values)
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)]) if values.size else 0.0
