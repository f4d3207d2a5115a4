"""Moved turns keep their tokens, versions and priority."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from tests.orchestrator.core.driver import PROMPT, step
from tests.orchestrator.core.placed_driver import MovesAnything, PlacedDriver, place_by
from tests.orchestrator.core.test_core_by_chance import ORDERS, AnyRun
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.placement import PlacementRules
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.snapshot_codec import digest
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.migration import EvenOut, LongTailLane
from tidegate.policies.routing import PowerOfTwoChoices, PrefixAffinity, SessionAffinity
from tidegate.policies.speeds import DeclaredSpeeds, MeasuredSpeeds
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.faults.scenario import Scenario, draw_scenario
from tidegate.simulation.run.simulation import Simulation, SimulationReport
from tidegate.transport.messages import ABORT, STOP, SamplingParams, SubmitTurn

pytestmark = pytest.mark.slow

PLAIN = PlacementRules()
LANE = PlacementRules(
    migration_policy=LongTailLane(min_tokens=4, engines=1, slots=2, check_steps=1)
)


def driver_with(rules: PlacementRules, engines: str, groups: int) -> PlacedDriver:
    policy = BoundedStaleness(max_staleness=0, groups_per_batch=groups)
    driver = PlacedDriver(rules, policy, group_size=1)
    for name in engines:
        driver.join(name)
    driver.fill()
    return driver


def rollouts_of(driver: PlacedDriver) -> list[Rollout]:
    return list(driver.running.values())


def move(driver: PlacedDriver, rollout: Rollout, to: str) -> list[ev.Command]:
    """Move any turn, as a step would."""
    commands = driver.core.turns.move(rollout.turns[-1], to)
    for command in commands:
        driver._act(command)
    return commands


def engine_of(driver: PlacedDriver, rollout: Rollout) -> str | None:
    place = driver.where(rollout)
    return place[0] if place else None


# ---------------------------------------------------------------- one move


def test_a_turn_continues_elsewhere_from_its_tokens_and_with_its_priority() -> None:
    driver = driver_with(PLAIN, "ab", 2)
    rollout = rollouts_of(driver)[1]
    driver.ask_turn(rollout, max_tokens=8)
    driver.sample("a", 0, 3)
    sampled = rollout.turns[-1].token_ids.tolist()
    message = SubmitTurn(
        turn=1,
        token_ids=rollout.token_ids.tobytes(),
        sampling=SamplingParams(max_tokens=5),
        priority=1,
        sampled_before=3,
        session=rollout.rollout_id + 1,
    )
    assert move(driver, rollout, "b") == [ev.Cancel("a", 0), ev.Submit("b", message)]
    driver.sample("b", 1, 2, STOP)
    turn = rollout.turns[-1]
    assert [(s.engine, s.start, s.end) for s in turn.spans()] == [("a", 0, 3), ("b", 3, 5)]
    assert rollout.token_ids.tolist()[:6] == PROMPT + sampled
    assert turn.finish_reason == "stop"


def test_a_turn_stays_where_it_is_unless_it_can_continue_there() -> None:
    driver = driver_with(PLAIN, "abc", 2)
    first, second = rollouts_of(driver)
    driver.ask_turn(first, max_tokens=4)
    assert move(driver, first, "a") == []
    assert move(driver, first, "never there") == []
    driver.publish()
    driver.swap("a")
    assert move(driver, first, "b") == []  # its weights are older
    driver.swap("b")
    driver.swap("c")
    driver.sample("a", 0, 4)  # as many as were asked for: its end is on its way
    assert move(driver, first, "b") == []
    driver.sample("a", 0, 0, STOP)
    assert move(driver, first, "b") == []
    driver.leave("c")
    driver.join("c", version=0)
    driver.ask_turn(second)
    assert move(driver, second, "c") == []  # too old for any turn
    assert len(move(driver, second, "b")) == 2


# ---------------------------------------------------------------- a lane for long turns


def test_turns_begin_outside_of_the_lane_and_move_there_once_they_are_long() -> None:
    driver = driver_with(LANE, "abc", 4)
    rollouts = rollouts_of(driver)
    for rollout in rollouts:
        driver.ask_turn(rollout, max_tokens=40)
    assert [engine_of(driver, r) for r in rollouts] == ["b", "c", "b", "c"]
    for _ in range(3):  # each engine examines all turns once in three of its steps
        for handle in (0, 2):
            driver.sample("b", handle, 2)
    assert [engine_of(driver, r) for r in rollouts] == ["a", "c", "a", "c"]
    for handle in (1, 3):
        driver.sample("c", handle, 20)
        driver.sample("c", handle, 1)
    assert [engine_of(driver, r) for r in rollouts] == ["a", "c", "a", "c"]  # it is full


def test_a_long_turn_that_is_handed_back_goes_to_the_lane_at_once() -> None:
    driver = driver_with(LANE, "ab", 1)
    (rollout,) = rollouts_of(driver)
    driver.ask_turn(rollout, max_tokens=40)
    driver.do(step("b", 0, [(0, [1, 2, 3, 4], ABORT)]))
    assert engine_of(driver, rollout) == "a"


def test_the_lane_serves_all_turns_when_no_other_engine_is_there() -> None:
    driver = driver_with(LANE, "ab", 2)
    first, second = rollouts_of(driver)
    driver.ask_turn(first)
    driver.leave("b")
    driver.ask_turn(second)
    assert [engine_of(driver, r) for r in (first, second)] == ["a", "a"]


# ---------------------------------------------------------------- routing and speeds


def test_a_rollouts_next_turn_goes_where_its_last_one_was() -> None:
    driver = driver_with(PlacementRules(routing_policy=SessionAffinity(margin_turns=1)), "ab", 3)
    first, second, third = rollouts_of(driver)
    for rollout in (first, second):
        driver.ask_turn(rollout)
    driver.sample("b", 1, 2, STOP)
    driver.ask_turn(third)
    driver.sample("a", 0, 2, STOP)
    driver.ask_turn(second)
    assert engine_of(driver, second) == "b"  # with one turn more than the other


def test_the_rollouts_of_a_group_go_to_one_engine() -> None:
    rules = PlacementRules(routing_policy=PrefixAffinity(margin_turns=3))
    policy = BoundedStaleness(max_staleness=0, groups_per_batch=2)
    driver = PlacedDriver(rules, policy, group_size=3)
    for name in "ab":
        driver.join(name)
    driver.fill()
    for rollout in rollouts_of(driver):
        driver.ask_turn(rollout)
    assert [engine_of(driver, r) for r in rollouts_of(driver)] == list("aaabbb")


def test_an_engine_three_times_as_fast_gets_three_times_the_turns() -> None:
    rules = PlacementRules(speeds=DeclaredSpeeds({"b": 3.0}))
    driver = driver_with(rules, "ab", 24)
    for rollout in rollouts_of(driver):
        driver.ask_turn(rollout)
    turns = [engine_of(driver, rollout) for rollout in rollouts_of(driver)]
    assert (turns.count("a"), turns.count("b")) == (6, 18)


def test_what_speeds_are_learned_from_is_in_the_journal() -> None:
    rules = PlacementRules(speeds=MeasuredSpeeds())
    driver = driver_with(rules, "ab", 20)
    driver.busy_us = {"a": 30_000, "b": 10_000}
    rollouts = rollouts_of(driver)
    for rollout in rollouts[:4]:
        driver.ask_turn(rollout, max_tokens=1000)
    for _ in range(100):
        driver.sample("a", 0, 1)
        driver.sample("b", 1, 1)
    for rollout in rollouts[4:]:
        driver.ask_turn(rollout)
    turns = [engine_of(driver, rollout) for rollout in rollouts]
    assert turns.count("b") > 2 * turns.count("a")
    again = driver.new_core()
    for record in driver.records:
        replay(record, again)
    assert digest(again) == digest(driver.core)
    speeds = [[e.speed for e in core.turns.engines.values()] for core in (again, driver.core)]
    assert speeds[0] == speeds[1]
    assert speeds[0][1] == pytest.approx(3 * speeds[0][0], rel=0.1)


# ---------------------------------------------------------------- any history

ANY_RULES = [
    PlacementRules(migration_policy=MovesAnything()),
    PlacementRules(routing_policy=PowerOfTwoChoices(seed=9), migration_policy=MovesAnything()),
    PlacementRules(
        routing_policy=SessionAffinity(otherwise=PrefixAffinity()),
        migration_policy=LongTailLane(min_tokens=2, engines=2, slots=2, check_steps=1),
    ),
    PlacementRules(migration_policy=EvenOut(gap_turns=2, check_steps=1)),
    PlacementRules(speeds=DeclaredSpeeds({"engine-0": 3.0}), migration_policy=MovesAnything()),
    PlacementRules(speeds=MeasuredSpeeds()),
]


class AnyMovingRun(AnyRun):
    """The same state machine with moving turns; its resumes show that a replay moves them alike."""

    @initialize(
        rules=st.sampled_from(ANY_RULES),
        size=st.integers(1, 3),
        eta=st.integers(0, 3),
        batch=st.integers(1, 3),
        consumption_order=st.sampled_from(ORDERS),
        deadline_policy=st.sampled_from(("wait", "mask", "drop")),
    )
    def start(self, rules: PlacementRules, size: int, **policy: Any) -> None:
        eta, batch = policy.pop("eta"), policy.pop("batch")
        if policy["consumption_order"] == "admission":
            policy["deadline_policy"] = "wait"
        self.policy = BoundedStaleness(max_staleness=eta, groups_per_batch=batch, **policy)
        self.driver = PlacedDriver(rules, self.policy, group_size=size)
        self.driver.join("engine-0")
        self.engines_made = 1
        self.batch_requests = 0
        self.has_rolled_back = False
        self.discarded_rows = {}


AnyMovingRun.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAnyMovingRun = AnyMovingRun.TestCase


class MovingSimulation(Simulation):
    """Simulated run with given placement rules."""

    def __init__(self, scenario: Scenario, rules: PlacementRules) -> None:
        super().__init__(scenario)
        self._rules = rules

    def _new_scheduler(self) -> Scheduler:
        scheduler = super()._new_scheduler()
        place_by(scheduler.core, self._rules)
        return scheduler


def simulate_by(rules: PlacementRules, seed: int) -> SimulationReport:
    return MovingSimulation(draw_scenario(seed), rules).run()


@pytest.mark.parametrize("rules", ANY_RULES, ids=range(len(ANY_RULES)))
def test_moved_tokens_are_those_that_the_tagged_weights_sample_whatever_goes_wrong(
    rules: PlacementRules,
) -> None:
    """The simulation checks the ledger after each event, and each trained token by its tags."""
    reports = [simulate_by(rules, seed) for seed in range(12)]
    assert [str(report.failure) for report in reports if report.failure] == []
    if rules.migration_policy is not None:
        assert any(CoverageMark.MOVED in report.coverage for report in reports)
    assert reports[3] == simulate_by(rules, 3)
