"""Upper bounds of efficiency under a hard staleness bound, for any policy.

Notation: η staleness bound, S mean seconds between versions, τ mean training seconds of a batch, s
seconds of a swap, t(b) = step seconds of an engine with b turns, C its slots, N rollouts per batch.

**Window.** A rollout is trained when it has ended, at a hand-over. If that is at trainer version v,
its tokens of versions below v - η are masked. Version v - η went live s after its publish, and the
last batch made into version v + 1 was handed over τ before that publish. The interval between holds
η swaps, so on average engines decode for at most ``W = (η + 1)(S - s) - τ`` seconds in it. What a
rollout can't decode in W seconds before its hand-over is masked, under every policy. The unmasked
part is concave in W, so batches with unequal windows mask more than equal ones.

**Engine time.** A token of an engine with b turns costs ``t(b) / b`` engine-seconds, at least
``t(C) / C``. Decoding u tokens within W seconds costs at least W times the share of an engine that
decodes one turn at rate ``u / W``: shares 1 / b at rates 1 / t(b), linear between, a convex
function of the rate, so no change of rate within W costs less. R engines give ``R (S - s)`` per
batch, less prefills.

**Bound.** Let u(L) be the unmasked tokens of a rollout of L tokens, and c(L) its engine-seconds.
For each λ >= 0, ``E[u] <= λ · budget / N + E[max over u of (u - λ c)]``. The bound is the lowest
value over λ, at the best S >= τ. It lets a policy know all lengths.

``phases``: 1 takes every rollout to end just before a hand-over. A policy that knows no lengths
can't arrange that; with more, ends are spread evenly over S, and W is shorter by the wait.

``batches_per_version``: a version made from k batches that train equally long hands the last one
over later, so τ is a k-th of the version's training time.
"""

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.scheduling.workloads import (
    MACHINES,
    ROLLOUT_MACHINES,
    TRAINER_MACHINES,
    Workload,
)

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

LENGTHS = 400
"""Number of points of the length distribution."""

SPREAD_PHASES = 6
"""Number of phases that stand for evenly spread ends."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Highest possible efficiency of a workload, and the masked share there."""

    efficiency: float
    masked_share: float
    step_s: float


def efficiency_bound(
    workload: Workload, eta: int, *, phases: int = 1, batches_per_version: int = 1
) -> Bound:
    """Return the bound for rollout and training on separate machines and single-turn rollouts."""
    lengths, weights = _lengths(workload)
    mean = float(lengths @ weights)
    costs, rollouts = workload.costs, workload.groups_per_batch * workload.group_size
    scale = mean / workload.mean_tokens
    training_s = workload.training_machine_s / TRAINER_MACHINES * scale
    prefill_s = workload.groups_per_batch * costs.prompt_tokens / costs.prefill_tokens_per_s
    busy_s = rollouts * mean / costs.peak_tokens_per_s + prefill_s
    best = Bound(0.0, 1.0, 0.0)
    shortest_s = max(training_s, (busy_s / ROLLOUT_MACHINES + costs.swap_s) * 0.9)
    for step_s in shortest_s * np.arange(1.0, 1.5, 0.01):
        budget_s = ROLLOUT_MACHINES * (step_s - costs.swap_s) - prefill_s
        whole_s = (eta + 1) * (step_s - costs.swap_s) - training_s / batches_per_version
        windows_s = [whole_s - step_s * (phase + 0.5) / phases for phase in range(phases)]
        if phases == 1:
            windows_s = [whole_s]
        windows_s = [max(each, 1e-3) for each in windows_s]
        unmasked = _unmasked(workload, lengths, weights, windows_s, budget_s / rollouts)
        tokens_per_s = rollouts * unmasked / step_s
        ideal_s = (busy_s + training_s * TRAINER_MACHINES) / MACHINES
        efficiency = tokens_per_s / (rollouts * mean / ideal_s)
        if efficiency > best.efficiency:
            best = Bound(float(efficiency), float(1.0 - unmasked / mean), float(step_s))
    return best


def _unmasked(
    workload: Workload, lengths: Array, weights: Array, windows_s: list[float], budget_s: float
) -> float:
    """Return the most unmasked tokens of a mean rollout with ``budget_s`` engine-seconds each."""
    costs = workload.costs
    turns = np.arange(costs.slots, 0, -1.0)
    rates, shares = 1.0 / np.array([costs.token_s(int(b)) for b in turns]), 1.0 / turns
    cheapest_s = shares[0] / rates[0]
    choices = []
    for window_s in windows_s:
        needed = np.clip(lengths / window_s, None, rates[-1])  # rate that masks as little as it can
        rate = np.minimum(needed[:, None], np.concatenate([rates, rates[-1:]])[None, :])
        unmasked = rate * window_s
        share = np.where(rate < rates[0], rate * cheapest_s, np.interp(rate, rates, shares))
        spent_s = share * window_s + (lengths[:, None] - unmasked) * cheapest_s
        choices.append((unmasked, spent_s))

    def dual(log_price: float) -> float:
        price = math.exp(log_price)
        values = [float((u - price * c).max(axis=1) @ weights) for u, c in choices]
        return price * budget_s + sum(values) / len(values)

    low, high = -5.0, 20.0
    for _ in range(30):
        first, second = low + 0.382 * (high - low), low + 0.618 * (high - low)
        low, high = (low, second) if dual(first) < dual(second) else (first, high)
    return min(dual((low + high) / 2), float(lengths @ weights))


def _lengths(workload: Workload) -> tuple[Array, Array]:
    z = -6.0 + 12.0 * (np.arange(LENGTHS) + 0.5) / LENGTHS
    weights = np.exp(-z * z / 2)
    lengths = np.minimum(workload.cap_tokens, workload.median_tokens * np.exp(workload.sigma * z))
    return lengths, weights / weights.sum()
