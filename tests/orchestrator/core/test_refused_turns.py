"""Turns refused after they had begun: none of their tokens is trained on."""

from array import array

import pytest

from tests.orchestrator.core.driver import PROMPT, Driver
from tidegate.orchestrator.core import events as ev
from tidegate.transport.messages import SamplingParams


def refuse(driver: Driver, handle: int) -> list[ev.Command]:
    """Have the engine refuse the turn."""
    del driver.engines["a"].turns[handle]
    return driver.do(ev.TurnRejected("a", handle, "a processor raised"))


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_its_tokens_leave_the_context_and_are_counted_as_refused(steps: int) -> None:
    """Tokens of many equal steps too, which are filed together later."""
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    rollout, handle = driver.begin_turn()
    for _ in range(steps):
        driver.sample("a", handle, 1)
    commands = refuse(driver, handle)

    assert commands == [ev.FailTurn(rollout.turns[0], "a processor raised")]
    assert (rollout.token_ids, rollout.sampled_tokens) == (array("i", PROMPT), 0)
    assert len(rollout.logprobs) == len(PROMPT)
    assert rollout.turns[0].spans() == []
    ledger = driver.core.ledger.snapshot()
    assert (ledger.generated, ledger.in_flight) == (steps, 0)
    assert ledger.discarded == {"refused": steps}


def test_an_episode_that_continues_after_a_refusal_trains_on_what_came_later_only() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 5)
    refuse(driver, handle)
    driver.solve(rollout, tokens=3)
    driver.do(ev.BatchRequested())

    [batch] = driver.batches
    [row] = batch.groups[0].kept
    assert [turn.length for turn in row.turns] == [0, 3]
    assert row.token_ids[: 2 * len(PROMPT)] == array("i", PROMPT * 2)
    ledger = driver.core.ledger.snapshot()
    assert (ledger.trained, ledger.discarded) == (3, {"refused": 5})


def test_a_resumed_run_knows_of_a_refusal_too() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    _, handle = driver.begin_turn()
    driver.sample("a", handle, 5)
    refuse(driver, handle)
    for snapshot in (False, True):
        driver.die_and_resume(0, snapshot=snapshot)  # compares the states
    assert driver.core.ledger.discarded == {"refused": 5}


def test_what_an_evaluation_is_refused_is_in_its_own_ledger() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.do(ev.EvaluationRequested("held out", 0))
    [rollout] = driver.running.values()
    driver.do(ev.TurnRequested(rollout.rollout_id, SamplingParams(max_tokens=8)))
    [handle] = driver.engines["a"].turns
    driver.sample("a", handle, 2)
    refuse(driver, handle)
    assert driver.core.ledger.generated == 0
    assert driver.core.evaluation_ledger.discarded == {"refused": 2}
