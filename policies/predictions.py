"""What can a run reach, and how old will its samples be? Closed forms, from a few figures of it.

They know nothing of clocks, engines or policies; the caller has measured, or assumed.

Symbols: B groups per batch of G rollouts each, η ``max_staleness``; L a rollout's length in tokens;
C decode slots over all engines; W_R and W_T the device-seconds that one batch costs rollout and
trainer; N_r and N_t their devices. rho = v_R / v_T, throughput of the rollout over that of the
trainer, both at their peak: above 1 the trainer is what limits. A version is made of one batch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate.errors import ConfigError

GRID_PER_VERSION = 64
"""Points per version at which waiting is added up; the error is about half a point."""

POINTS_MAX = 4096
"""Points in all, 4 ms of work: a run asks after each batch. Longer waits are added up coarsely."""


# ---------------------------------------------------------------- how fast


def work_conserving_batch_s(
    rollout_work_s: float, trainer_work_s: float, *, rollout_devices: int, trainer_devices: int
) -> float:
    """``(W_R + W_T) / (N_r + N_t)``: no policy can make batches in less time each.

    Nobody would ever be idle, so devices would change sides without a loss. Source: conservation
    of work, Kleinrock 1975, "Queueing Systems" I.
    """
    _refuse_negative(rollout_work_s=rollout_work_s, trainer_work_s=trainer_work_s)
    _refuse_none(rollout_devices=rollout_devices, trainer_devices=trainer_devices)
    return (rollout_work_s + trainer_work_s) / (rollout_devices + trainer_devices)


def disaggregated_batch_s(
    rollout_work_s: float, trainer_work_s: float, *, rollout_devices: int, trainer_devices: int
) -> float:
    """``max(W_R / N_r, W_T / N_t)``: the same where each device has its side, as ours have.

    It equals :func:`work_conserving_batch_s` at rho = 1 only, that is ``N_t / N_r = W_T / W_R``.
    Source: the slower of two stages in a row limits, as in any pipeline.
    """
    _refuse_negative(rollout_work_s=rollout_work_s, trainer_work_s=trainer_work_s)
    _refuse_none(rollout_devices=rollout_devices, trainer_devices=trainer_devices)
    return max(rollout_work_s / rollout_devices, trainer_work_s / trainer_devices)


def throughput_ratio(*, rollout_batch_s: float, trainer_batch_s: float) -> float:
    """rho, ``(W_T / N_t) / (W_R / N_r)``: seconds a batch costs the trainer over the rollout's.

    Source: Applied Compute, July 2026, on staleness in asynchronous RL.
    """
    _refuse_none(rollout_batch_s=rollout_batch_s)
    _refuse_negative(trainer_batch_s=trainer_batch_s)
    return trainer_batch_s / rollout_batch_s


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """What one decode step takes: ``fixed_s + row_s * rows``, t(b) = t0 + k b.

    Reading the weights is paid once a step, each running turn's KV by itself.
    """

    fixed_s: float
    row_s: float

    def rows_per_s(self, rows: float) -> float:
        """Throughput with so many turns running: b / t(b)."""
        step_s = self.fixed_s + self.row_s * rows
        return rows / step_s if step_s > 0 else 0.0


def fit_decode_cost(
    *, steps: float, rows: float, rows_squared: float, busy_s: float, rows_busy_s: float
) -> DecodeCost | None:
    """The least-squares line through steps' (rows, seconds), from their sums; None without steps.

    Neither part can be negative. Where all steps had as many rows nothing tells the parts apart,
    and all time counts as per row: the throughput at any width is then that at this one.
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
    """``E[L^2] / 2 E[L]``: tokens that a running rollout has sampled so far, on the mean.

    More than half of E[L], for at any instant long rollouts are the more likely to be seen: the
    inspection paradox. Source: Cox 1962, "Renewal Theory" (the age of the item in use).
    """
    _refuse_none(mean_tokens=mean_tokens)
    return mean_squared_tokens / (2 * mean_tokens)


def abort_cost_s(
    *,
    slots_per_engine: int,
    prompt_tokens: float,
    mean_tokens: float,
    mean_squared_tokens: float,
    prefill_tokens_per_s: float,
) -> float:
    """``C (prompt + E[L^2] / 2 E[L]) / P``: what an update by ``abort`` costs each engine.

    All that runs is prefilled again; C here is one engine's slots. ``keep`` with recomputed KV
    costs the same, ``keep`` with kept KV nothing. Source: AReaL, arXiv 2505.24298, for the
    mechanism; :func:`mean_context_in_flight_tokens` for what it prefills.
    """
    _refuse_none(prefill_tokens_per_s=prefill_tokens_per_s)
    context = prompt_tokens + mean_context_in_flight_tokens(mean_tokens, mean_squared_tokens)
    return slots_per_engine * context / prefill_tokens_per_s


# ---------------------------------------------------------------- how old


def tail_factor(groups: Sequence[Sequence[float]]) -> float:
    """M_tail, ``E[max of a group's L] / E[L]``: how much longer a group takes than a rollout.

    1 where there are no tokens. Source: Applied Compute 2026, "tailness".
    """
    lengths = [tokens for group in groups for tokens in group]
    total = sum(lengths)
    if not total:
        return 1.0
    longest = [max(group) for group in groups if group]
    return (sum(longest) / len(longest)) / (total / len(lengths))


def staleness_in_flight(
    *, slots: float, tail_factor: float, rollouts_per_batch: float, rho: float
) -> float:
    """PQS, ``C M_tail / (B_s max(1, rho))``: versions made while a group is generated.

    By Little's law a rollout lives ``C / B_s`` batches when all C slots are busy; its group's last
    one M_tail times as long. A trainer that limits (rho > 1) makes versions rho times as slowly.

    Source: Applied Compute 2026. It holds for groups consumed as they are completed.
    """
    _refuse_none(rollouts_per_batch=rollouts_per_batch)
    return slots * tail_factor / (rollouts_per_batch * max(1.0, rho))


def staleness_in_queue(*, rho: float, queue_batches: float = 1.0) -> float:
    """IQS, ``rho`` if rho < 1 else ``(2q + rho - 1) / 2rho``: versions made while a group waits.

    q is how many batches the queue holds before the oldest is dropped. It counts the batch that is
    being trained. Source: Applied Compute 2026.
    """
    _refuse_negative(rho=rho, queue_batches=queue_batches)
    return rho if rho < 1 else (2 * queue_batches + rho - 1) / (2 * rho)


def staleness_in_order(
    share_done: Callable[[float], float],
    longest_versions: float,
    *,
    groups_per_batch: int,
    window_groups: int | None = None,
) -> float:
    """Versions from a group's start until order lets it go: PQS where order matters.

    Group k goes once it has ended and no group W or more places before it still runs, so
    ``D = max(X_k, max over i >= W of (X_{k-i} - i / B))`` with X the versions a group takes, and
    B groups start per version: ``E[D] = ∫ 1 - F(d) prod_{i >= W} F(d + i / B) dd``.

    Args:
        share_done: F, the share of groups that take at most so many versions.
        longest_versions: F is 1 from there on.
        groups_per_batch: B.
        window_groups: W; 1 is the order of admission, None the order of completion.

    Source: resequencing behind infinitely many servers, Harrus & Plateau 1982, "Queueing analysis
    of a reordering issue", here with arrivals at equal distances.
    """
    _refuse_none(groups_per_batch=groups_per_batch)
    groups = max(1.0, longest_versions * groups_per_batch)  # that start while the longest runs
    stride = max(1, min(math.ceil(GRID_PER_VERSION / groups_per_batch), int(POINTS_MAX / groups)))
    merged = math.ceil(groups / POINTS_MAX)
    step = merged / (groups_per_batch * stride)
    points = math.ceil(longest_versions / step)
    logs = [_log(share_done((point + 0.5) * step)) for point in range(points)]
    if window_groups is None:
        return step * sum(-math.expm1(log) for log in logs)
    behind = [0.0] * (points + stride)
    for point in reversed(range(points)):  # of this group and all before it
        behind[point] = merged * logs[point] + behind[point + stride]
    skip = math.ceil(window_groups / merged) * stride
    skipped = itertools.chain(behind[skip:], itertools.repeat(0.0))
    return step * sum(-math.expm1(log + others) for log, others in zip(logs, skipped, strict=False))


def saturating_staleness(in_flight: float, in_queue: float) -> int:
    """``ceil(PQS + IQS)``: the η past which nothing is gained, for the bound is never met.

    Source: as :func:`mean_staleness`.
    """
    _refuse_negative(in_flight=in_flight, in_queue=in_queue)
    return math.ceil(in_flight + in_queue - 1e-9)


def mean_staleness(*, allowed: float | None, free: float, rho: float) -> float | None:
    """``min(allowed, PQS + IQS)``: the mean staleness once a run is under way.

    ``free`` is PQS + IQS, what it is without a limit; ``allowed`` is :func:`allowed_staleness`,
    None without a limit. Where rho > 1 the queue grows until admission limits, or for ever: None.

    Source: Applied Compute 2026 for ``free``; :func:`allowed_staleness` for the rest.
    """
    if rho > 1:
        return allowed
    return free if allowed is None else min(allowed, free)


def allowed_staleness(*, outstanding_groups_max: float, groups_per_version: float) -> float:
    """``O / g - 1``: the mean staleness while admission limits.

    O groups are outstanding then and each version releases g: by Little's law a group stays
    O / g versions, of which the last is its own training. With ``O = (η + 1) B`` and a publish
    after each batch it is η, exactly, in whatever order groups are consumed.

    Source: Little 1961, "A proof for the queuing formula L = λW".
    """
    _refuse_none(groups_per_version=groups_per_version)
    return max(0.0, outstanding_groups_max / groups_per_version - 1)


def mean_staleness_so_far(
    *, allowed: float | None, free: float, rho: float, first_version: int, last_version: int
) -> float:
    """The mean over the versions trained at of ``min(v, allowed, free + v max(0, rho - 1))``.

    A run starts fresh: nothing at version v is older than v versions. Where rho > 1 each version
    leaves rho - 1 batches in the queue, and each of these is a version's wait for what comes next.
    """
    growth = max(0.0, rho - 1)
    limit = math.inf if allowed is None else allowed
    total, versions = 0.0, last_version - first_version + 1
    for version in range(first_version, last_version + 1):
        now = min(version, limit, free + version * growth)
        total += now
        if now == limit or (now == free and not growth):  # so it stays
            return (total + now * (last_version - version)) / versions
    return total / versions


def staleness_from_latency(
    *,
    rollout_latency_s: float,
    train_step_s: float,
    rollout_devices: float = 1.0,
    trainer_devices: float = 1.0,
) -> float:
    """``K = (rollout latency / train step) (N_roll / N_train)``: the steady lag, up to units.

    A first guess, where only times are known. Source: Huang 2026, "Is frontier async RL solved?".
    """
    _refuse_none(train_step_s=train_step_s, trainer_devices=trainer_devices)
    return rollout_latency_s / train_step_s * (rollout_devices / trainer_devices)


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def _refuse_none(**values: float) -> None:
    """Insist on what is divided by."""
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} must be > 0, got {value}")


def _refuse_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ConfigError(f"{name} must be >= 0, got {value}")
