"""Turns reach the right engine and are found there again."""

from tests.orchestrator.core.driver import Driver, step
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.turns import ReleasedVersions
from tidegate.transport.messages import ABORT, RUNNING, STOP, SamplingParams


def driver_with(engines: str, groups: int) -> tuple[Driver, list[Rollout]]:
    """Make a driver with these engines, and rollouts that have asked for nothing yet."""
    driver = Driver(max_staleness=0, groups_per_batch=groups, group_size=1)
    for name in engines:
        driver.join(name)
    driver.fill()
    return driver, list(driver.running.values())


def places(driver: Driver, rollouts: list[Rollout]) -> list[str | None]:
    """Return the engines that turns are on."""
    found = [driver.where(rollout) for rollout in rollouts]
    return [place[0] if place else None for place in found]


def test_turns_are_spread_evenly_over_engines() -> None:
    driver, rollouts = driver_with("bca", 7)
    for rollout in rollouts:
        driver.ask_turn(rollout)
    assert places(driver, rollouts) == ["a", "b", "c", "a", "b", "c", "a"]


def test_an_engine_whose_turn_has_ended_gets_the_next_one() -> None:
    driver, rollouts = driver_with("abc", 4)
    for rollout in rollouts[:3]:
        driver.ask_turn(rollout)
    driver.sample("b", 1, 3, STOP)
    driver.ask_turn(rollouts[3])
    assert places(driver, rollouts) == ["a", None, "c", "b"]


def test_turns_that_end_with_one_step_are_reported_together_before_others_continue() -> None:
    driver, rollouts = driver_with("a", 4)
    for rollout in rollouts:
        driver.ask_turn(rollout)
    rows = [(0, [5], ABORT), (1, [6], STOP), (2, [7], RUNNING), (3, [8], STOP)]
    ended, sent = driver.core.handle(step("a", 0, rows))
    assert ended == ev.EndTurns([rollouts[1].turns[0], rollouts[3].turns[0]])
    assert isinstance(sent, ev.Submit)
    assert (sent.message.session, sent.message.sampled_before) == (rollouts[0].rollout_id + 1, 1)


def test_a_turn_that_is_given_up_is_cancelled_where_it_is_and_leaves_its_place() -> None:
    driver, rollouts = driver_with("ab", 3)
    for rollout in rollouts[:2]:
        driver.ask_turn(rollout)
    assert driver.do(ev.TurnAbandoned(rollouts[1].rollout_id)) == [ev.Cancel("b", 1)]
    driver.ask_turn(rollouts[2])
    assert places(driver, rollouts) == ["a", None, "b"]


def test_a_turn_that_was_sent_on_is_cancelled_where_it_went() -> None:
    driver, rollouts = driver_with("ab", 1)
    driver.ask_turn(rollouts[0])
    driver.leave("a")
    assert places(driver, rollouts) == ["b"]
    assert driver.do(ev.EpisodeFailed(rollouts[0].rollout_id, "episode_error"))[0] == ev.Cancel(
        "b", 1
    )


def test_a_turn_that_waits_for_an_engine_and_is_given_up_is_never_sent() -> None:
    driver, rollouts = driver_with("", 2)
    for rollout in rollouts:
        driver.ask_turn(rollout)
    assert driver.do(ev.TurnAbandoned(rollouts[0].rollout_id)) == []
    driver.join("a")
    assert places(driver, rollouts) == [None, "a"]


def test_an_engine_that_is_behind_gets_turns_only_once_it_has_caught_up() -> None:
    driver, rollouts = driver_with("ab", 3)
    driver.publish()
    driver.swap("a")
    driver.ask_turn(rollouts[0])  # v0 is live still: b serves it
    driver.ask_turn(rollouts[1])
    assert places(driver, rollouts[:2]) == ["a", "b"]
    driver.swap("b")
    driver.leave("b")
    driver.join("b", version=0)
    driver.ask_turn(rollouts[2])
    assert places(driver, rollouts) == ["a", "a", "a"]


def test_the_live_version_rises_with_the_last_engine_and_not_before() -> None:
    driver, _ = driver_with("abc", 1)
    for published, order in enumerate(("abc", "cba", "bac"), 1):
        driver.publish()
        seen = []
        for name in order:
            driver.swap(name)
            seen.append(driver.core.turns.live_version)
        assert seen == [published - 1, published - 1, published]


def test_an_engine_with_an_old_version_of_an_adapter_is_behind_until_it_has_the_newest() -> None:
    versions = ReleasedVersions()
    versions.release(1, ["a"])
    versions.release(2, ["a"])
    assert versions.live_version == 1  # "a" has not swapped yet
    versions.serve("a", 2)
    assert versions.live_version == 2
    versions.join("b", 1)
    assert (versions.live_version, versions.behind) == (2, {"b"})
    versions.serve("b", 2)
    assert versions.behind == set()


def test_turns_that_an_engine_hands_back_stay_there_while_it_is_the_emptiest() -> None:
    driver, rollouts = driver_with("ab", 4)
    for rollout in rollouts:
        driver.ask_turn(rollout)
    for handle in (1, 3):
        driver.sample("b", handle, 2)
    for handle in (1, 3):
        driver.sample("b", handle, 0, ABORT)
    assert places(driver, rollouts) == ["a", "b", "a", "b"]
    assert [rollout.sampled_tokens for rollout in rollouts] == [0, 2, 0, 2]


def test_a_turn_that_was_left_behind_is_given_up_when_its_rollout_asks_for_another() -> None:
    """A call from another event loop fails in the episode while its turn runs."""
    driver, [rollout] = driver_with("a", 1)
    driver.ask_turn(rollout)
    driver.sample("a", 0, 2)
    driver.do(ev.TurnRequested(rollout.rollout_id, SamplingParams(max_tokens=8)))
    driver.sample("a", 1, 3, STOP)
    first, second = rollout.turns
    assert first.finish_reason == "cancelled"
    assert (second.start, second.length) == (first.start + 2, 3)
    driver.return_reward(rollout)
    assert not driver.core.handle(step("a", 0, [(0, [5], ABORT)]))


def test_turns_that_a_draining_engine_hands_back_continue_elsewhere_with_their_tokens() -> None:
    driver, rollouts = driver_with("ab", 3)
    for rollout in rollouts[:2]:
        driver.ask_turn(rollout)
    driver.sample("b", 1, 2)
    assert driver.do(ev.EngineDraining("b")) == []
    driver.ask_turn(rollouts[2])
    assert places(driver, rollouts) == ["a", "b", "a"]
    driver.sample("b", 1, 3)
    driver.sample("b", 1, 0, ABORT)
    assert places(driver, rollouts) == ["a", "a", "a"]
    assert rollouts[1].sampled_tokens == 5
    assert driver.do(ev.EngineLeft("b", is_crash=False)) == []


def test_turns_wait_while_the_only_engine_drains_until_another_joins() -> None:
    driver, rollouts = driver_with("a", 2)
    driver.ask_turn(rollouts[0])
    driver.do(ev.EngineDraining("a"))
    driver.ask_turn(rollouts[1])
    driver.sample("a", 0, 2)
    driver.leave("a")
    assert places(driver, rollouts) == [None, None]
    driver.join("b")
    assert places(driver, rollouts) == ["b", "b"]
    assert rollouts[0].sampled_tokens == 2


def test_a_new_process_of_a_drained_engine_gets_turns() -> None:
    driver, rollouts = driver_with("a", 1)
    driver.do(ev.EngineDraining("a"))
    driver.do(ev.EngineJoined("a", 0, 8, epoch=7))
    driver.ask_turn(rollouts[0])
    assert places(driver, rollouts) == ["a"]


def test_a_swap_that_only_a_hello_reports_frees_the_slots_of_its_batch() -> None:
    driver, [rollout] = driver_with("a", 1)
    driver.solve(rollout)
    driver.do(ev.BatchRequested())
    driver.publish()
    assert driver.core.admissible_groups == 0
    driver.join("a", version=1)  # its weights_live was lost with the connection
    assert (driver.core.turns.live_version, driver.core.admissible_groups) == (1, 1)
