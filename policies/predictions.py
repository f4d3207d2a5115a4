"""Closed-form predictions of a run's throughput and staleness from a few measured figures.

The planning simulation and the run's staleness forecast call them; all inputs are measured or
assumed by the caller.

Symbols: B groups per batch of G rollouts each, η ``max_staleness``; L a rollout's length in tokens;
C decode slots over all engines; W_R and W_T the device-seconds that one batch costs rollout and
trainer; N_r and N_t their devices. rho = v_R / v_T, rollout throughput over trainer throughput,
both at their peak. Each version is made from one batch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate.errors import ConfigError

GRID_PER_VERSION = 64
"""Grid points per version of the waiting-time integral; the error is about half a point."""

POINTS_MAX = 4096
"""Maximum number of grid points, 4 ms of work, because a run predicts after each batch. Longer
waits use a coarser grid."""


# ---------------------------------------------------------------- throughput


def throughput_ratio(*, rollout_batch_s: float, trainer_batch_s: float) -> float:
    """Return rho, ``(W_T / N_t) / (W_R / N_r)``: trainer seconds per batch over rollout seconds.

    Source: Applied Compute, July 2026, on staleness in asynchronous RL.
    """
    _check_positive(rollout_batch_s=rollout_batch_s)
    _check_not_negative(trainer_batch_s=trainer_batch_s)
    return trainer_batch_s / rollout_batch_s


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Linear cost of one decode step: ``fixed_s + row_s * rows``, t(b) = t0 + k b.

    Reading the weights is paid once per step; reading the KV is paid per running turn.
    """

    fixed_s: float
    row_s: float

    def rows_per_s(self, rows: float) -> float:
        """Return the throughput with ``rows`` running turns, b / t(b), in tokens per second."""
        step_s = self.fixed_s + self.row_s * rows
        return rows / step_s if step_s > 0 else 0.0


def fit_decode_cost(
    *, steps: float, rows: float, rows_squared: float, busy_s: float, rows_busy_s: float
) -> DecodeCost | None:
    """Return the least-squares line through steps' (rows, seconds), or None without steps.

    Neither part is negative. If all steps had equally many rows, the two parts cannot be separated,
    and all time counts as per row: the throughput at any width is then the measured one.
    """
    if steps <= 0 or rows <= 0 or busy_s <= 0:
        return None
    spread = steps * rows_squared - rows * rows
    if spread <= 1e-9 * rows * rows:
        return DecodeCost(0.0, busy_s / rows)
    row_s = max(0.0, (steps * rows_busy_s - rows * busy_s) / spread)
    fixed_s = (busy_s - row_s * rows) / steps
    return DecodeCost(fixed_s, row_s) if fixed_s > 0 else DecodeCost(0.0, busy_s / rows)


def mean_context_in_flight_tokens(mean_tokens: float, mean_squared_tokens: float) -> float:
    """Return ``E[L^2] / 2 E[L]``: mean number of tokens that a running rollout has sampled so far.

    It exceeds half of E[L], because at any instant long rollouts are more likely to be running: the
    inspection paradox. Source: Cox 1962, "Renewal Theory" (the age of the item in use).
    """
    _check_positive(mean_tokens=mean_tokens)
    return mean_squared_tokens / (2 * mean_tokens)


def abort_cost_s(
    *,
    slots_per_engine: int,
    prompt_tokens: float,
    mean_tokens: float,
    mean_squared_tokens: float,
    prefill_tokens_per_s: float,
) -> float:
    """Return ``C (prompt + E[L^2] / 2 E[L]) / P``: seconds an ``abort`` update costs an engine.

    All running turns are prefilled again; C here is one engine's slots. ``keep`` with recomputed KV
    costs the same, ``keep`` with kept KV nothing. Source: AReaL, arXiv 2505.24298, for the
    mechanism; :func:`mean_context_in_flight_tokens` for the prefilled context.
    """
    _check_positive(prefill_tokens_per_s=prefill_tokens_per_s)
    context = prompt_tokens + mean_context_in_flight_tokens(mean_tokens, mean_squared_tokens)
    return slots_per_engine * context / prefill_tokens_per_s


# ---------------------------------------------------------------- staleness


def tail_factor(groups: Sequence[Sequence[float]]) -> float:
    """Return M_tail, ``E[max of a group's L] / E[L]``: group length over rollout length.

    1 if there are no tokens. Source: Applied Compute 2026, "tailness".
    """
    lengths = [tokens for group in groups for tokens in group]
    total = sum(lengths)
    if not total:
        return 1.0
    longest = [max(group) for group in groups if group]
    return (sum(longest) / len(longest)) / (total / len(lengths))


def staleness_from_generation(
    *, slots: float, tail_factor: float, rollouts_per_batch: float, rho: float
) -> float:
    """Return PQS, ``C M_tail / (B_s max(1, rho))``: versions made while a group is generated.

    By Little's law a rollout lasts ``C / B_s`` batches if all C slots are busy; its group's last
    rollout lasts M_tail times as long. If the trainer is slower (rho > 1), versions come
    rho times as slowly. It holds for completion order. Source: Applied Compute 2026.
    """
    _check_positive(rollouts_per_batch=rollouts_per_batch)
    return slots * tail_factor / (rollouts_per_batch * max(1.0, rho))


def staleness_from_queue(*, rho: float, queue_batches: float = 1.0) -> float:
    """Return IQS, ``rho`` if rho < 1 else ``(2q + rho - 1) / 2rho``: versions while a group waits.

    q is how many batches the queue holds before the oldest is dropped. The batch in training is
    counted. Source: Applied Compute 2026.
    """
    _check_not_negative(rho=rho, queue_batches=queue_batches)
    return rho if rho < 1 else (2 * queue_batches + rho - 1) / (2 * rho)


def staleness_in_order(
    share_done: Callable[[float], float],
    longest_versions: float,
    *,
    groups_per_batch: int,
    window_groups: int | None = None,
) -> float:
    """Return the mean versions from a group's start until consumption order releases it.

    Group k is released once it has ended and no group W or more places before it still runs, so ``D
    = max(X_k, max over i >= W of (X_{k-i} - i / B))`` with X the versions a group takes, and B
    groups start per version: ``E[D] = ∫ 1 - F(d) prod_{i >= W} F(d + i / B) dd``. It replaces PQS
    (:func:`staleness_from_generation`) where groups are not consumed in completion order.

    Args:
        share_done: F, the share of groups that take at most this many versions.
        longest_versions: F is 1 from there on.
        groups_per_batch: B.
        window_groups: W; 1 is the order of admission, None the order of completion.

    Source: resequencing behind infinitely many servers, Harrus & Plateau 1982, "Queueing analysis
    of a reordering issue", here with arrivals at equal distances.
    """
    _check_positive(groups_per_batch=groups_per_batch)
    # Number of groups that start while the longest one runs.
    groups = max(1.0, longest_versions * groups_per_batch)
    stride = max(1, min(math.ceil(GRID_PER_VERSION / groups_per_batch), int(POINTS_MAX / groups)))
    merged = math.ceil(groups / POINTS_MAX)
    step = merged / (groups_per_batch * stride)
    points = math.ceil(longest_versions / step)
    logs = [_log(share_done((point + 0.5) * step)) for point in range(points)]
    if window_groups is None:
        return step * sum(-math.expm1(log) for log in logs)
    suffix_log = [0.0] * (points + stride)
    for point in reversed(range(points)):  # sums over this group and all earlier ones
        suffix_log[point] = merged * logs[point] + suffix_log[point + stride]
    window_points = math.ceil(window_groups / merged) * stride
    earlier_logs = itertools.chain(suffix_log[window_points:], itertools.repeat(0.0))
    return step * sum(
        -math.expm1(log + earlier_log) for log, earlier_log in zip(logs, earlier_logs, strict=False)
    )


def allowed_staleness(*, outstanding_groups_max: float, groups_per_version: float) -> float:
    """Return ``O / g - 1``: the mean staleness while admission is the limit.

    O groups are outstanding and each version releases g groups: by Little's law a group stays O / g
    versions, the last of which is its own training. With ``O = (η + 1) B`` and a publish after each
    batch it is exactly η, in whatever order groups are consumed.

    Source: Little 1961, "A proof for the queuing formula L = λW".
    """
    _check_positive(groups_per_version=groups_per_version)
    return max(0.0, outstanding_groups_max / groups_per_version - 1)


def mean_staleness_so_far(
    *,
    allowed: float | None,
    free: float,
    rho: float,
    first_version: int,
    last_version: int,
    eager_versions: int | None = None,
) -> float:
    """Return the mean over trained versions of ``min(v, allowed, free + v max(0, rho - 1))``.

    This is the warm-up: nothing at version v is older than v versions. If rho > 1, each version
    adds rho - 1 batches to the queue, and each queued batch delays later ones by one version.
    ``eager_versions``: version from which admission is just in time, so that nothing is queued;
    None: never.
    """
    growth = max(0.0, rho - 1)
    limit = math.inf if allowed is None else allowed
    total, versions = 0.0, last_version - first_version + 1
    for version in range(first_version, last_version + 1):
        if eager_versions is not None and version >= eager_versions:
            growth, eager_versions = 0.0, None
        staleness = min(version, limit, free + version * growth)
        total += staleness
        if eager_versions is not None:
            continue
        if staleness == limit or (staleness == free and not growth):  # constant from here on
            return (total + staleness * (last_version - version)) / versions
    return total / versions


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} must be > 0, got {value}")


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ConfigError(f"{name} must be >= 0, got {value}")
