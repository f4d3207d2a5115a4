"""A turn that crashes every engine it is sent to is refused, and costs no other turn its tokens."""

from tests.orchestrator.core.driver import Driver
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.orchestrator.core.turns import CONSECUTIVE_LOSSES_MAX, LOSSES_TOTAL_MAX


def asked(driver: Driver, *, tokens: int = 8) -> list[Rollout]:
    """Ask for a turn of each rollout; return the rollouts."""
    rollouts = list(driver.running.values())
    for rollout in rollouts:
        driver.ask_turn(rollout, tokens)
    return rollouts


def driver_with(engines: str, groups: int = 1) -> Driver:
    driver = Driver(max_staleness=0, groups_per_batch=groups, group_size=1)
    for name in engines:
        driver.join(name)
    driver.fill()
    return driver


def lose(driver: Driver, engine: str) -> list[ev.Command]:
    del driver.engines[engine]
    return driver.do(ev.EngineLeft(engine))


def refused(commands: list[ev.Command]) -> list[ev.FailTurn]:
    return [command for command in commands if isinstance(command, ev.FailTurn)]


def test_a_turn_with_which_three_engines_were_lost_is_refused_by_name_and_sent_to_no_other() -> (
    None
):
    driver = driver_with("abcd")
    [rollout] = asked(driver)
    for name in "abc"[: CONSECUTIVE_LOSSES_MAX - 1]:
        assert not refused(lose(driver, name))
    [reported] = refused(lose(driver, "c"))
    assert reported.turn is rollout.turns[-1]
    assert reported.message.startswith(
        "3 engines were lost with this turn, the last 3 of them before"
    )
    assert "It has 3 tokens of context and max_tokens=8" in reported.message
    assert driver.where(rollout) is None
    assert driver.engines["d"].turns == {}


def test_an_engine_that_leaves_on_request_or_for_its_weights_costs_its_turns_nothing() -> None:
    driver = driver_with("a")
    [rollout] = asked(driver)
    for _ in range(2 * LOSSES_TOTAL_MAX):
        del driver.engines["a"]
        driver.do(ev.EngineLeft("a", is_crash=False))
        driver.join("a")
    assert driver.where(rollout) is not None
    assert rollout.turns[-1].losses == 0


def test_tokens_in_between_clear_a_turn_but_not_for_ever() -> None:
    driver = driver_with("a")
    [rollout] = asked(driver, tokens=100)
    for _ in range(LOSSES_TOTAL_MAX - 1):
        place = driver.where(rollout)
        assert place is not None
        driver.sample(*place, 2)
        assert not refused(lose(driver, "a"))
        driver.join("a")
    place = driver.where(rollout)
    assert place is not None
    driver.sample(*place, 2)
    [reported] = refused(lose(driver, "a"))
    assert reported.message.startswith(f"{LOSSES_TOTAL_MAX} engines were lost with this turn")


def test_the_one_that_ends_engines_is_found_and_the_turns_beside_it_continue() -> None:
    """One engine, restarted each time, crashes whenever it gets the third turn."""
    driver = driver_with("a", groups=6)
    rollouts = asked(driver)
    deadly, ended = rollouts[2], []
    for _ in range(20):
        if driver.where(deadly) is not None:
            ended += refused(lose(driver, "a"))
            driver.join("a")
            continue
        for rollout in rollouts:
            place = None if rollout is deadly else driver.where(rollout)
            if place is not None and not rollout.sampled_tokens:
                driver.sample(*place, 1)
    assert [reported.turn for reported in ended] == [deadly.turns[-1]]
    assert all(rollout.sampled_tokens for rollout in rollouts if rollout is not deadly)


def test_losses_and_the_suspect_that_is_out_are_saved_and_restored() -> None:
    driver = driver_with("a", groups=3)
    asked(driver)
    for _ in range(CONSECUTIVE_LOSSES_MAX - 1):
        lose(driver, "a")
        driver.join("a")
    assert len(driver.engines["a"].turns) == 1
    other = driver_with("", groups=3)
    load(save(driver.core), other.core)
    assert digest(other.core) == digest(driver.core)
    left = ev.EngineLeft("a")
    assert len(refused(other.core.handle(left))) == 1
    driver.core.handle(left)
    assert digest(other.core) == digest(driver.core)


def test_engines_that_ended_with_the_orchestrator_cost_their_turns_nothing() -> None:
    driver = driver_with("a")
    asked(driver)
    for epoch in range(1, CONSECUTIVE_LOSSES_MAX + 2):
        [rollout] = driver.core.running_rollouts
        driver.do(ev.RunResumed(0, driver.core.tasks.offer))
        commands = driver.do(ev.EngineJoined("a", 0, 4, epoch=epoch))
        assert not refused(commands)
        assert rollout.turns[-1].losses == 0
