"""Forecasts: predicted staleness equals the measured one, and the diagnosis names what limits."""

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import tidegate
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.forecast import (
    Forecaster,
    RunTotals,
    waits_for_stragglers,
    window_groups,
)
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunForecast
from tidegate.orchestrator.telemetry.timekeeping import Usage
from tidegate.policies.asynchrony import (
    BoundedStaleness,
    DeadlinePolicy,
    OneStepOffPolicy,
    Order,
    Unbounded,
)
from tidegate.policies.consumption import Window
from tidegate.policies.rounds import Synchronous, TailPacking
from tidegate.testing import ScriptedEngine, ServeInTests, TurnRequest

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------- on the real scheduler


async def answer(episode: tidegate.Episode, task: str) -> float:
    episode.append(task)
    await episode.generate(max_tokens=200)
    return 1.0


@pytest.mark.parametrize(
    ("max_staleness", "train_s", "slots", "batches_total", "limited_by"),
    [
        (2, 0.5, 16, 16, "admission"),
        (2, 4.0, 16, 16, "the trainer"),
        (6, 0.5, 4, 120, "slots"),  # a few long answers decide over a shorter run
    ],
)
async def test_a_run_is_as_stale_as_was_predicted(
    tidegate_serve: ServeInTests,
    max_staleness: int,
    train_s: float,
    slots: int,
    batches_total: int,
    limited_by: str,
) -> None:
    rng = random.Random(1)
    engines = [ScriptedEngine(max_running_turns=slots, step_s=0.03) for _ in range(2)]

    def says(request: TurnRequest) -> str:
        return "a" * max(1, int(min(100.0, 12 * math.exp(rng.gauss(0, 0.8)))))

    async with tidegate_serve(
        engines=engines,
        says=says,
        max_staleness=max_staleness,
        group_size=4,
        groups_per_batch=6,
    ) as rollouts:
        batches = 0
        async for _ in rollouts.batches(itertools.repeat("?"), episode=answer):
            await asyncio.sleep(train_s)
            await rollouts.publish({})
            batches += 1
            if batches == batches_total:
                break
    statistics = rollouts.statistics()
    forecast = statistics.forecast

    assert forecast is not None
    assert forecast.measured_staleness == pytest.approx(statistics.mean_staleness)
    assert forecast.predicted_staleness == pytest.approx(statistics.mean_staleness, abs=0.3)
    match limited_by:
        case "admission":
            assert forecast.limit == "admission"
            assert forecast.max_useful_staleness > max_staleness
        case "the trainer":
            assert forecast.throughput_ratio > 1
            assert forecast.limit == "trainer"
            assert forecast.batch_interval_s == pytest.approx(
                forecast.attainable_batch_interval_s, rel=0.05
            )
        case "slots":
            assert forecast.throughput_ratio < 1
            assert forecast.limit == "engines"
            assert [change.lever for change in forecast.changes] == ["engines"]


# ---------------------------------------------------------------- by itself


def an_engine(*, steps: int = 1000, rows: int = 8, step_s: float = 0.01) -> EngineStatistics:
    """Make statistics of an engine with equal rows in each step."""
    return EngineStatistics(
        name="engine-0",
        weight_version=0,
        running_turns=rows,
        waiting_turns=0,
        tokens=steps * rows,
        busy_s=steps * step_s,
        max_running_turns=8,
        steps=steps,
        rows=steps * rows,
        rows_squared=steps * rows * rows,
        rows_busy_s=steps * rows * step_s,
    )


def forecast_of(
    *,
    batches: int = 11,
    batch_s: float,
    idle: float,
    ledger: LedgerSnapshot | None = None,
    tokens: int = 40,
    rollout_s: float = 0.55,
    engine: EngineStatistics | None = None,
) -> RunForecast | None:
    """Forecast batches of two rollouts of 40 tokens: 0.1 s of the engine's work each."""
    forecaster = Forecaster()
    for number in range(batches):
        usage = Usage(wall_s=batch_s * (number + 1), trainer_idle_share=idle)
        staleness = np.full(2, min(number, 2))
        forecaster.add_batch(
            np.full(2, tokens if number else 40),
            np.full(2, number),
            staleness,
            np.arange(2),
            began_s=np.full(2, batch_s * number),
            ended_s=np.full(2, batch_s * number + rollout_s),
            trainer_version=number,
            usage=usage,
            engines=[engine or an_engine()],
        )
    return forecaster.forecast(
        RunTotals(ledger=ledger or LedgerSnapshot(generated=80), outstanding_groups_max=3)
    )


def test_rows_of_one_rollout_are_one_rollout() -> None:
    forecaster = Forecaster()
    for number in range(3):
        forecaster.add_batch(
            np.array([30, 40, 10]),
            np.full(3, number),
            np.array([0, 1, 2]),
            np.array([5, 6, 5]),  # the third is forked from the first
            began_s=np.full(3, 0.2 * number),
            ended_s=np.full(3, 0.2 * number + 0.4),
            trainer_version=number,
            usage=Usage(wall_s=0.2 * (number + 1), trainer_idle_share=0.75),
            engines=[an_engine()],
        )
    forecast = forecaster.forecast(
        RunTotals(ledger=LedgerSnapshot(generated=240), outstanding_groups_max=3)
    )
    assert forecast is not None
    assert forecast.tail_factor == pytest.approx(1.0)  # both have 40 tokens
    assert forecast.measured_staleness == pytest.approx(1.5)


def test_what_is_measured_is_set_beside_what_follows_from_it() -> None:
    forecast = forecast_of(batch_s=0.2, idle=0.75)

    assert forecast is not None
    assert forecast.batch_interval_s == pytest.approx(0.2)
    assert forecast.throughput_ratio == pytest.approx(0.5)
    assert forecast.attainable_batch_interval_s == pytest.approx(0.1)
    assert forecast.tail_factor == 1.0
    assert forecast.measured_staleness == pytest.approx((0 + 1 + 2 * 9) / 11)
    assert forecast.predicted_staleness == pytest.approx((0 + 1 + 2 * 9) / 11)
    # A batch stays 0.6 s with its training, and one may come each 0.1 s: six are outstanding.
    assert forecast.max_useful_staleness == 5
    (change,) = forecast.changes
    assert change.lever == "max_staleness"
    assert change.gain == pytest.approx(1.0, abs=0.03)  # a batch each 0.1 s


def test_tokens_that_were_thrown_away_cost_the_rollout_time_but_the_runs_end_does_not() -> None:
    thrown = LedgerSnapshot(generated=280, discarded={"stale": 80, "run_ended": 120})
    forecast = forecast_of(batch_s=0.4, idle=0.5, ledger=thrown)

    assert forecast is not None
    assert forecast.throughput_ratio == pytest.approx(
        0.2 / 0.2
    )  # half of 160 tokens per batch are of no use


def test_one_batch_is_too_few_to_say_anything() -> None:
    assert forecast_of(batches=0, batch_s=1.0, idle=0.5) is None
    assert forecast_of(batches=1, batch_s=1.0, idle=0.5) is None
    assert forecast_of(batches=2, batch_s=1.0, idle=0.5) is not None


def test_nothing_is_said_of_rollouts_without_time_or_tokens() -> None:
    assert forecast_of(batch_s=1.0, idle=0.5, rollout_s=0.0) is None
    assert forecast_of(batch_s=1.0, idle=0.5, tokens=0) is None
    assert forecast_of(batch_s=1.0, idle=0.5, engine=replace(an_engine(), tokens=0)) is None
    unmeasured = replace(an_engine(), full_steps=10_000, full_rows=80_000, full_busy_s=0.0)
    assert forecast_of(batch_s=1.0, idle=0.5, engine=unmeasured) is not None


def test_the_order_of_consumption_is_the_policys() -> None:
    def window(order: Order) -> int | None:
        policy = BoundedStaleness(max_staleness=2, groups_per_batch=4, consumption_order=order)
        return window_groups(policy)

    assert [window(order) for order in ("admission", Window(5), "completion")] == [1, 5, None]
    assert window_groups(Unbounded(groups_per_batch=4, outstanding_groups_limit=8)) is None


def test_a_batch_waits_for_stragglers_in_any_order_unless_the_policy_gives_them_up() -> None:
    def waits(deadline_policy: DeadlinePolicy) -> bool:
        return waits_for_stragglers(
            BoundedStaleness(
                max_staleness=2,
                groups_per_batch=4,
                consumption_order="completion",
                deadline_policy=deadline_policy,
            )
        )

    assert waits("wait")
    assert not any([waits("mask"), waits("split"), waits("drop")])
    assert waits_for_stragglers(BoundedStaleness(max_staleness=2, groups_per_batch=4))
    assert waits_for_stragglers(Synchronous(groups_per_batch=4))
    assert waits_for_stragglers(OneStepOffPolicy(groups_per_batch=4))
    assert not waits_for_stragglers(TailPacking(groups_per_batch=4))
    assert not waits_for_stragglers(Unbounded(groups_per_batch=4, outstanding_groups_limit=8))


def test_a_tools_stragglers_are_as_long_as_they_are_however_long_all_rollouts_queue() -> None:
    forecaster = Forecaster()
    engine = replace(an_engine(), waiting_turns_s=200 * 10.0)  # 8,000 tokens: 200 rollouts
    for number in range(8):
        forecaster.add_batch(
            np.full(2, 40),
            np.full(2, number),
            np.zeros(2, int),
            np.arange(2),
            began_s=np.zeros(2),
            ended_s=np.array([0.4 + 10 + 1, 0.4 + 10 + 9]),  # decoding, queues, tools
            trainer_version=number,
            usage=Usage(wall_s=0.2 * (number + 1), trainer_idle_share=0.75),
            engines=[engine],
        )
    totals = RunTotals(ledger=LedgerSnapshot(generated=640), outstanding_groups_max=3)
    forecast = forecaster.forecast(totals)
    assert forecast is not None
    assert "groups 1.7 times as long as rollouts" in forecast.advice  # 9.4 s and 5.4 s


# ---------------------------------------------------------------- the last batches alone

TOTALS = RunTotals(ledger=LedgerSnapshot(generated=80), outstanding_groups_max=3)


def measured_fleet() -> tuple[Forecaster, Callable[..., None]]:
    """Return a forecaster, and a function that adds a batch of two rollouts of 40 tokens."""
    forecaster, at_s, steps, number = Forecaster(), 0.0, 0, 0

    def add(batch_s: float, *names: str, idle: float = 0.5, restarted: bool = False) -> None:
        nonlocal at_s, steps, number
        at_s, steps, number = at_s + batch_s, steps + 10, number + 1
        waited_s.append(waited_s[-1] + idle * batch_s)
        forecaster.add_batch(
            np.full(2, 40),
            np.full(2, number),
            np.zeros(2, int),
            np.arange(2),
            began_s=np.full(2, at_s),
            ended_s=np.full(2, at_s + batch_s),
            trainer_version=number,
            usage=Usage(wall_s=at_s, trainer_idle_share=waited_s[-1] / at_s),
            engines=[
                replace(an_engine(steps=1 if restarted else steps), name=name) for name in names
            ],
        )

    waited_s = [0.0]
    return forecaster, add


def test_the_last_batches_are_measured_without_those_before() -> None:
    forecaster, add = measured_fleet()
    for _ in range(4):
        add(10.0, "a", "b", idle=0.9)
    for _ in range(3):
        add(1.0, "a", "b", idle=0.2)
    run = forecaster.measure_last(3, TOTALS)
    assert run is not None
    assert run.engines == 2
    assert run.batch_s == pytest.approx(1.0)
    assert run.trainer_s == pytest.approx(0.8)
    assert run.rollout_s == pytest.approx(1.0)
    assert run.engine_idle_share == pytest.approx(1 - 0.1)  # ten steps of 10 ms a second
    assert run.decode_s == pytest.approx(3 * 10 * 8 * 2 * 0.01 / (3 * 2 * 10 * 8 / 40))


@pytest.mark.parametrize("change", ["joined", "left", "restarted"])
def test_nothing_is_measured_across_a_change_of_the_engines(change: str) -> None:
    forecaster, add = measured_fleet()
    for _ in range(4):
        add(1.0, "a", "b")
    assert forecaster.measure_last(3, TOTALS) is not None
    names = {"joined": ("a", "b", "c"), "left": ("a",), "restarted": ("a", "b")}[change]
    add(1.0, *names, restarted=change == "restarted")
    for _ in range(2):
        add(1.0, *names)
        assert forecaster.measure_last(3, TOTALS) is None
    add(1.0, *names)
    assert forecaster.measure_last(3, TOTALS) is not None
