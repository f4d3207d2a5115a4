"""Speeds and lengths measured in a finished run, read from its directory to plan the next one."""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError
from tidegate.observability.records.run_directories import RUN_FILE
from tidegate.observability.records.trajectories import read_trajectories
from tidegate.observability.reports.facts import Facts, read_facts, read_record
from tidegate.policies.predictions import DecodeCost, fit_decode_cost
from tidegate.simulation.engine.spec import EngineCosts
from tidegate.simulation.planning.closed_forms import predict
from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload, Prediction

NO_PREFILL = 1e12
"""Prefill speed in tokens/s: unlimited, because the measured step times include prefills."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Workload, settings and measured figures of a finished run, for a plan."""

    workload: PlanWorkload
    candidate: PlanCandidate
    """The run's own settings, which a plan compares with others."""
    measured: Prediction
    """Figures measured in the run."""
    unaccounted_slowdown: float
    """Real time per token divided by the engines' step time per token. ``workload.costs`` is
    already multiplied by this ratio."""
    advice: str
    """The run's own diagnosis; empty if it recorded none."""


def measured_run(directory: Path) -> MeasuredRun:
    """Read the workload, the engines and the trainer of a finished run from its directory.

    Raises:
        AuditError: the run left no statistics, or its files can't be read.
        ConfigError: too little was measured, or the run's policy was not bounded staleness.
    """
    facts = read_facts(directory)
    record = read_record(directory)
    settings, statistics = record["settings"], record["statistics"]
    groups, turns = _groups(directory)
    engines = [each for each in statistics["engines"] if each.get("steps")]
    if not engines or not groups or facts.wall_s <= 0 or facts.trainer_idle_share >= 1:
        raise ConfigError(
            f"{directory / RUN_FILE} has too few figures to plan from; record a run of several "
            f"batches with this version of Tidegate"
        )
    forecast = facts.forecast or {}
    is_trainer_bound = forecast.get("limit") == "trainer"
    # If the trainer limits, its idle time is batch hand-over, so it counts as trainer time.
    trainer_s = facts.wall_s * (1.0 if is_trainer_bound else 1 - facts.trainer_idle_share)
    measured_workload = PlanWorkload(
        groups=groups,
        costs=_costs(engines, statistics["engines"]),
        trainer_tokens_per_s=facts.tokens_trained / trainer_s,
        turns=turns,
    )
    candidate = PlanCandidate(
        max_staleness=_setting(settings, "max_staleness", directory),
        groups_per_batch=_setting(settings, "groups_per_batch", directory),
        engines=len(engines),
        pause_mode=settings["pause_mode"],
        kv_policy=settings["kv_policy"],
    )
    measured = _measured(facts)
    # If the trainer limits, batch times do not show how slow the engines are.
    slowdown = (
        1.0
        if is_trainer_bound
        else _unaccounted_slowdown(measured_workload, candidate, measured.batch_s)
    )
    return MeasuredRun(
        _slowed(measured_workload, slowdown),
        candidate,
        measured,
        slowdown,
        forecast.get("advice", "") if "limit" in forecast else "",
    )


UNACCOUNTED_SLOWDOWN_MAX = 64.0
"""Upper limit of the search for the unaccounted slowdown; at this factor, over 98 % of the time is
outside engine steps."""


def _unaccounted_slowdown(
    workload: PlanWorkload, candidate: PlanCandidate, batch_s: float
) -> float:
    """Return the factor on step times at which the plan predicts the run's measured batch time.

    Time outside the steps is spent in tools, in messages, and by engines that wait for a processor.
    The factor spreads this time evenly over all tokens.
    """
    low, high = 1.0, 1.0
    while (
        predict(_slowed(workload, high), candidate).batch_s < batch_s
        and high < UNACCOUNTED_SLOWDOWN_MAX
    ):
        low, high = high, 2 * high
    for _ in range(12):
        middle = (low + high) / 2
        is_quick = predict(_slowed(workload, middle), candidate).batch_s < batch_s
        low, high = (middle, high) if is_quick else (low, middle)
    return high


def _slowed(workload: PlanWorkload, slowdown: float) -> PlanWorkload:
    costs = workload.costs
    slowed = replace(
        costs, step_s=slowdown * costs.step_s, running_turn_s=slowdown * costs.running_turn_s
    )
    return replace(workload, costs=slowed)


def _measured(facts: Facts) -> Prediction:
    return Prediction(
        batch_s=facts.wall_s / max(1, facts.batches),
        tokens_per_s=facts.tokens_trained / facts.wall_s,
        mean_staleness=facts.mean_staleness,
        trainer_idle_share=facts.trainer_idle_share,
    )


def _setting(settings: dict[str, Any], name: str, directory: Path) -> int:
    value = settings.get(name)
    if not isinstance(value, int):
        raise ConfigError(
            f"{directory} records no {name}, got {value!r}; only bounded staleness can be "
            f"planned from"
        )
    return value


def _groups(directory: Path) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return the sampled tokens of each trained rollout by group, and the mean turns per
    rollout."""
    lengths: dict[int, list[int]] = defaultdict(list)
    turns = rollouts = 0
    for rollout in read_trajectories(directory):
        if rollout.consumed_version is None:
            continue
        lengths[rollout.group_id].append(sum(turn.length for turn in rollout.turns))
        turns += len(rollout.turns)
        rollouts += 1
    whole = tuple(tuple(group) for group in lengths.values() if sum(group))
    return whole, max(1, round(turns / max(1, rollouts)))


def _costs(measured: list[dict[str, Any]], every: list[dict[str, Any]]) -> EngineCosts:
    names = ("steps", "rows", "rows_squared", "busy_s", "rows_busy_s")
    sums = {name: sum(float(engine[name]) for engine in measured) for name in names}
    cost = fit_decode_cost(**sums) or DecodeCost(0.0, 0.0)
    per_row = sum(engine["tokens"] for engine in measured) / max(1.0, sums["rows"])
    return EngineCosts(
        slots=max(1, round(sum(each["max_running_turns"] for each in every) / len(every))),
        step_s=cost.fixed_s / per_row,
        running_turn_s=cost.row_s / per_row,
        prefill_tokens_per_s=NO_PREFILL,
        swap_s=0.0,
        prompt_tokens=0,
        group_size=1,
    )
