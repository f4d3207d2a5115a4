"""Closed forms for a run's throughput and staleness; they take milliseconds to compute.

The forms are those of :mod:`tidegate.policies.predictions`, put together for groups consumed in the
order of admission; time that episodes spend in tools is left out. :mod:`simulated` takes longer and
assumes less.
"""

import bisect
from dataclasses import dataclass
from functools import cached_property

from tidegate.policies import predictions
from tidegate.simulation.planning.situation import PlanCandidate, PlanWorkload, Prediction

HALVINGS = 30
"""Of the interval that the time of a batch is looked for in: to a billionth of it."""


def predict(situation: PlanWorkload, choice: PlanCandidate) -> Prediction:
    """What this choice brings, by closed forms.

    A batch takes as long as the slowest of three: the engines with all slots busy, the trainer, or
    admission: (η + 1) batches are outstanding at most, each from its start until the version made
    from it is live, so by Little's law ``T = stay(T) / (η + 1)``.
    """
    forms = _Forms(situation, choice)
    engines_s, trainer_s = forms.engines_s, forms.trainer_s
    slowest_s = max(engines_s, trainer_s)
    admission_s = forms.admission_s(slowest_s)
    batch_s = max(slowest_s, admission_s)
    rho = predictions.throughput_ratio(rollout_batch_s=engines_s, trainer_batch_s=trainer_s)
    free = forms.in_order_versions(batch_s) + predictions.staleness_in_queue(rho=rho)
    allowed = float(choice.max_staleness)
    is_held_back = rho > 1 or admission_s >= slowest_s
    return Prediction(
        batch_s=batch_s,
        tokens_per_s=forms.batch_tokens / batch_s,
        mean_staleness=allowed if is_held_back else min(allowed, free),
        trainer_idle_share=1 - trainer_s / batch_s,
        limit="admission"
        if admission_s > slowest_s
        else ("trainer" if trainer_s >= engines_s else "engines"),
    )


@dataclass(frozen=True)
class _Forms:
    situation: PlanWorkload
    choice: PlanCandidate

    @property
    def rollouts(self) -> float:
        """Of a batch."""
        return self.choice.groups_per_batch * self.situation.group_size

    @cached_property
    def batch_tokens(self) -> float:
        """Of a batch, on the mean."""
        return self.rollouts * self.situation.mean_tokens

    @property
    def engines_s(self) -> float:
        """A batch, with all slots busy, and the standstill of one update."""
        costs = self.situation.costs
        prefill_s = self.choice.groups_per_batch * costs.prompt_tokens / costs.prefill_tokens_per_s
        work_s = self.batch_tokens / costs.peak_tokens_per_s + prefill_s
        return work_s / self.choice.engines + self.pause_s

    @property
    def trainer_s(self) -> float:
        """A batch, and the publish, which returns when all engines have swapped."""
        speed = self.situation.trainer_tokens_per_s * self.choice.trainers
        return self.batch_tokens / speed + self.publish_s

    @property
    def publish_s(self) -> float:
        """What ``abort`` throws away is computed again after the swap, and nobody waits for it."""
        return self.situation.costs.swap_s if self.choice.pause_mode == "abort" else self.pause_s

    @cached_property
    def pause_s(self) -> float:
        """What one update costs each engine."""
        costs, situation = self.situation.costs, self.situation
        if self.choice.pause_mode == "wait":
            return costs.swap_s + self._drain_s()
        if self.choice.pause_mode == "keep" and self.choice.kv_policy == "keep":
            return costs.swap_s
        return costs.swap_s + predictions.abort_cost_s(
            slots_per_engine=self._running_rows,
            prompt_tokens=costs.prompt_tokens,
            mean_tokens=situation.mean_tokens,
            mean_squared_tokens=situation.mean_squared_tokens,
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
        )

    @property
    def _running_rows(self) -> int:
        """At most: slots, or as many rollouts as may be outstanding."""
        outstanding = (self.choice.max_staleness + 1) * self.rollouts / self.choice.engines
        return max(1, min(self.situation.costs.slots, round(outstanding)))

    def _drain_s(self) -> float:
        """Until the longest of those that run has ended, less what they produce meanwhile.

        What is left of one that runs is longer than x with probability E[(L - x)+] / E[L]
        (Cox 1962, the residual life); the longest of C of them is ``∫ 1 - (1 - p(x))^C dx``.
        """
        costs, rows = self.situation.costs, self._running_rows
        lengths = sorted(tokens for group in self.situation.groups for tokens in group)
        total, at, left = float(sum(lengths)), 0, float(sum(lengths))
        longest = 0.0
        for index, length in enumerate(lengths):  # E[(L - x)+] is a line between two lengths
            above = len(lengths) - index
            middle = max(0.0, left - above * (length - at) / 2) / total
            longest += (length - at) * (1 - (1 - min(1.0, middle)) ** rows)
            left -= above * (length - at)
            at = length
        mean = predictions.mean_context_in_flight_tokens(
            self.situation.mean_tokens, self.situation.mean_squared_tokens
        )
        drain_s = costs.step_s * longest + costs.running_turn_s * rows * mean
        return max(0.0, drain_s - rows * mean / costs.peak_tokens_per_s)

    def admission_s(self, slowest_s: float) -> float:
        """The T at which a batch's stay is (η + 1) T; ``slowest_s`` where it is shorter there."""
        places = self.choice.max_staleness + 1
        if self._stay_s(slowest_s) <= places * slowest_s:
            return slowest_s
        low, high = slowest_s, slowest_s
        while self._stay_s(high) > places * high:
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            is_short = self._stay_s(middle) > places * middle
            low, high = (middle, high) if is_short else (low, middle)
        return high

    def _stay_s(self, batch_s: float) -> float:
        """From admission until what was made of a batch is live.

        A publish lets in a whole batch at once, so it starts as one, and goes when its last group
        has ended and every batch before it has.
        """
        slots = self.situation.costs.slots * self.choice.engines
        queued = max(0.0, self.rollouts - slots) * self.situation.mean_tokens
        queue_s = queued / (self.choice.engines * self.situation.costs.peak_tokens_per_s)
        return batch_s * self.in_order_versions(batch_s) + queue_s + self.trainer_s

    def in_order_versions(self, batch_s: float) -> float:
        """From a batch's start until order lets it go, where one is made every ``batch_s``."""
        per_token = self._token_s(batch_s) / batch_s
        longest = self._longest

        def share_done(versions: float) -> float:
            done = bisect.bisect_right(longest, versions / per_token) / len(longest)
            return float(done**self.choice.groups_per_batch)

        return predictions.staleness_in_order(
            share_done, (longest[-1] + 1) * per_token, groups_per_batch=1, window_groups=1
        )

    @cached_property
    def _longest(self) -> list[int]:
        """Of each group, the shortest first."""
        return sorted(max(group) for group in self.situation.groups)

    def _token_s(self, batch_s: float) -> float:
        """A token of each running turn, as many as run where a batch is made every ``batch_s``."""
        costs = self.situation.costs
        pause_s = min(self.pause_s, 0.9 * batch_s)
        rate = self.batch_tokens / (self.choice.engines * (batch_s - pause_s))
        free = 1 - rate * costs.running_turn_s
        rows = rate * costs.step_s / free if free > 0 else costs.slots
        running = max(1.0, min(float(costs.slots), rows))
        step_s = costs.step_s + costs.running_turn_s * running
        return step_s * batch_s / (batch_s - pause_s)
