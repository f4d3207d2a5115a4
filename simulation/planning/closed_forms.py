"""Closed forms for a run's throughput and staleness; they take milliseconds to compute.

The forms are those of :mod:`tidegate.policies.predictions`, put together for groups consumed in the
order of admission; time that episodes spend in tools is omitted.
"""

import bisect
from dataclasses import dataclass, replace
from functools import cached_property

from tidegate.engine.scheduling.pauses import ends_turns, lets_finish
from tidegate.policies import predictions
from tidegate.policies.bottlenecks import RunFigures, diagnose, expected_batch_s
from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload, Prediction
from tidegate.transport.message import keeps_kv


def predict(workload: PlanWorkload, candidate: PlanCandidate) -> Prediction:
    """Predict a run's steady state for one choice of settings.

    Time per batch and limit are those of :mod:`tidegate.policies.bottlenecks`.
    """
    forms = _Forms(workload, candidate)
    batch_s = expected_batch_s(forms.figures)
    engines_s, trainer_s = forms.engines_s, forms.trainer_s
    rho = predictions.throughput_ratio(rollout_batch_s=engines_s, trainer_batch_s=trainer_s)
    # Admission is just in time, so no queue grows where the trainer is the slower one, but a batch
    # is generated while the trainer trains on the one before.
    queued = predictions.staleness_from_queue(rho=rho)
    free = max(1.0, forms.in_order_versions(batch_s) + queued)
    allowed = float(candidate.max_staleness)
    diagnosis = diagnose(replace(forms.figures, batch_s=batch_s))
    return Prediction(
        batch_s=batch_s,
        tokens_per_s=forms.batch_tokens / batch_s,
        mean_staleness=allowed if diagnosis.limit == "admission" else min(allowed, free),
        trainer_idle_share=1 - trainer_s / batch_s,
        limit=diagnosis.limit,
        conclusion=diagnosis.conclusion,
    )


@dataclass(frozen=True)
class _Forms:
    workload: PlanWorkload
    candidate: PlanCandidate

    @property
    def rollouts(self) -> float:
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

    @cached_property
    def figures(self) -> RunFigures:
        """Durations while the slower side limits, as the figures of a run."""
        costs, candidate = self.workload.costs, self.candidate
        batch_s = max(self.engines_s, self.trainer_s)
        token_s = self._token_s(batch_s)
        rollout_s = token_s * self.workload.mean_tokens
        rows = self.rollouts * rollout_s / batch_s / candidate.engines
        return RunFigures(
            batch_s=batch_s,
            trainer_s=self.trainer_s,
            publish_s=self.publish_s,
            engines=candidate.engines,
            engine_idle_share=1 - self.engines_s / batch_s,
            full_share=0.0,
            work_s=self.engines_s,
            slots=costs.slots,
            full_rows=costs.slots,
            rows=min(rows, costs.slots),
            cost=predictions.DecodeCost(costs.step_s, costs.running_turn_s),
            rollout_s=rollout_s,
            decode_s=rollout_s,
            queue_s=0.0,
            activity_s=0.0,
            group_s=[token_s * tokens for tokens in self._longest],
            groups_per_batch=candidate.groups_per_batch,
            waits_for_stragglers=True,
            max_staleness=candidate.max_staleness,
        )

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
