"""Closed forms for a run's throughput and staleness; they take milliseconds to compute.

The forms are those of :mod:`tidegate.policies.predictions`, put together for groups consumed in the
order of admission; time that episodes spend in tools is omitted.
"""

import bisect
from dataclasses import dataclass
from functools import cached_property

from tidegate.engine.scheduling.pauses import ends_turns, lets_finish
from tidegate.policies import predictions
from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload, Prediction
from tidegate.transport.message import keeps_kv

HALVINGS = 30
"""Bisection steps for the batch time: they narrow its interval to a billionth."""


def predict(workload: PlanWorkload, candidate: PlanCandidate) -> Prediction:
    """Predict a run's steady state for one choice of settings, by closed forms.

    A batch takes as long as the slowest of three: the engines with all slots busy, the trainer, or
    admission. At most (η + 1) batches are outstanding, each from its start until its trained
    version is live, so by Little's law ``T = stay(T) / (η + 1)``.
    """
    forms = _Forms(workload, candidate)
    engines_s, trainer_s = forms.engines_s, forms.trainer_s
    slowest_s = max(engines_s, trainer_s)
    admission_s = forms.admission_s(slowest_s)
    batch_s = max(slowest_s, admission_s)
    rho = predictions.throughput_ratio(rollout_batch_s=engines_s, trainer_batch_s=trainer_s)
    # Admission is just in time, so no queue grows where the trainer is the slower one, but a batch
    # is generated while the trainer trains on the one before.
    queued = predictions.staleness_from_queue(rho=rho)
    free = max(1.0, forms.in_order_versions(batch_s) + queued)
    allowed = float(candidate.max_staleness)
    return Prediction(
        batch_s=batch_s,
        tokens_per_s=forms.batch_tokens / batch_s,
        mean_staleness=allowed if admission_s > slowest_s else min(allowed, free),
        trainer_idle_share=1 - trainer_s / batch_s,
        limit="admission"
        if admission_s > slowest_s
        else ("trainer" if trainer_s >= engines_s else "engines"),
    )


@dataclass(frozen=True)
class _Forms:
    workload: PlanWorkload
    candidate: PlanCandidate

    @property
    def rollouts(self) -> float:
        """Rollouts per batch."""
        return self.candidate.groups_per_batch * self.workload.group_size

    @cached_property
    def batch_tokens(self) -> float:
        """Mean sampled tokens per batch."""
        return self.rollouts * self.workload.mean_tokens

    @property
    def engines_s(self) -> float:
        """Seconds that the engines need for a batch with all slots busy, plus one weight update."""
        costs = self.workload.costs
        prefill_s = (
            self.candidate.groups_per_batch * costs.prompt_tokens / costs.prefill_tokens_per_s
        )
        work_s = self.batch_tokens / costs.peak_tokens_per_s + prefill_s
        return work_s / self.candidate.engines + self.pause_s

    @property
    def trainer_s(self) -> float:
        """Seconds to train a batch and publish; a publish returns once all engines have swapped."""
        speed = self.workload.trainer_tokens_per_s * self.candidate.trainers
        return self.batch_tokens / speed + self.publish_s

    @property
    def publish_s(self) -> float:
        """Seconds that a publish takes; KV lost to ``abort`` is computed after the publish
        returns."""
        return self.workload.costs.swap_s if ends_turns(self.candidate.pause_mode) else self.pause_s

    @cached_property
    def pause_s(self) -> float:
        """Seconds of work that one weight update costs each engine."""
        costs, workload = self.workload.costs, self.workload
        if lets_finish(self.candidate.pause_mode):
            return costs.swap_s + self._drain_s()
        if keeps_kv(self.candidate.pause_mode, self.candidate.kv_policy):
            return costs.swap_s
        return costs.swap_s + predictions.abort_cost_s(
            slots_per_engine=self._running_rows,
            prompt_tokens=costs.prompt_tokens,
            mean_tokens=workload.mean_tokens,
            mean_squared_tokens=workload.mean_squared_tokens,
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
        )

    @property
    def _running_rows(self) -> int:
        """Maximum running rollouts per engine: its slots, or its share of outstanding rollouts."""
        outstanding = (self.candidate.max_staleness + 1) * self.rollouts / self.candidate.engines
        return max(1, min(self.workload.costs.slots, round(outstanding)))

    def _drain_s(self) -> float:
        """Return the seconds lost until the longest running rollout ends, net of useful decoding.

        A running rollout's remaining length exceeds x with probability p(x) = E[(L - x)+] / E[L]
        (Cox 1962, the residual life). The longest of C remaining lengths has the mean
        ``∫ 1 - (1 - p(x))^C dx``.
        """
        costs, rows = self.workload.costs, self._running_rows
        lengths = sorted(tokens for group in self.workload.groups for tokens in group)
        total, position, left = float(sum(lengths)), 0, float(sum(lengths))
        longest = 0.0
        for index, length in enumerate(lengths):  # E[(L - x)+] is linear between two lengths
            above = len(lengths) - index
            middle = max(0.0, left - above * (length - position) / 2) / total
            longest += (length - position) * (1 - (1 - min(1.0, middle)) ** rows)
            left -= above * (length - position)
            position = length
        mean = predictions.mean_context_in_flight_tokens(
            self.workload.mean_tokens, self.workload.mean_squared_tokens
        )
        drain_s = costs.step_s * longest + costs.running_turn_s * rows * mean
        return max(0.0, drain_s - rows * mean / costs.peak_tokens_per_s)

    def admission_s(self, slowest_s: float) -> float:
        """Return the batch time T at which a batch's stay is (η + 1) T, at least ``slowest_s``."""
        outstanding = self.candidate.max_staleness + 1
        if self._stay_s(slowest_s) <= outstanding * slowest_s:
            return slowest_s
        low, high = slowest_s, slowest_s
        while self._stay_s(high) > outstanding * high:
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            is_short = self._stay_s(middle) > outstanding * middle
            low, high = (middle, high) if is_short else (low, middle)
        return high

    def _stay_s(self, batch_s: float) -> float:
        """Return the seconds from a batch's admission until its trained version is live.

        A publish admits a whole batch at once. The batch is released when its last group and
        all earlier batches have ended.
        """
        slots = self.workload.costs.slots * self.candidate.engines
        queued = max(0.0, self.rollouts - slots) * self.workload.mean_tokens
        queue_s = queued / (self.candidate.engines * self.workload.costs.peak_tokens_per_s)
        return batch_s * self.in_order_versions(batch_s) + queue_s + self.trainer_s

    def in_order_versions(self, batch_s: float) -> float:
        """Return the versions from a batch's start until its release in order of admission.

        A version is published every ``batch_s`` seconds.
        """
        per_token = self._token_s(batch_s) / batch_s
        longest = self._longest

        def share_done(versions: float) -> float:
            done = bisect.bisect_right(longest, versions / per_token) / len(longest)
            return float(done**self.candidate.groups_per_batch)

        return predictions.staleness_in_order(
            share_done, (longest[-1] + 1) * per_token, groups_per_batch=1, window_groups=1
        )

    @cached_property
    def _longest(self) -> list[int]:
        """Tokens of each group's longest rollout, in ascending order."""
        return sorted(max(group) for group in self.workload.groups)

    def _token_s(self, batch_s: float) -> float:
        """Return the seconds per token of a running turn, if a batch is made every ``batch_s``."""
        costs = self.workload.costs
        pause_s = min(self.pause_s, 0.9 * batch_s)
        rate = self.batch_tokens / (self.candidate.engines * (batch_s - pause_s))
        free = 1 - rate * costs.running_turn_s
        rows = rate * costs.step_s / free if free > 0 else costs.slots
        running = max(1.0, min(float(costs.slots), rows))
        step_s = costs.step_s + costs.running_turn_s * running
        return step_s * batch_s / (batch_s - pause_s)
