import pytest

from tests.orchestrator.core.driver import PROMPT, Driver
from tidegate.errors import ConfigError, TidegateError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.rollout import RolloutState
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.consumption import Window
from tidegate.policies.rounds import TailPacking
from tidegate.policies.staleness import StalenessPolicy
from tidegate.transport.messages import ABORT, LENGTH, STOP


def finish_group(driver: Driver, group_id: int, tokens: int = 3) -> None:
    for rollout in [r for r in driver.running.values() if r.group_id == group_id]:
        driver.solve(rollout, tokens)


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize(("eta", "groups"), [(0, 2), (1, 4), (4, 10)])
def test_so_many_groups_may_be_outstanding_as_the_bound_allows(eta: int, groups: int) -> None:
    driver = Driver(max_staleness=eta, groups_per_batch=2)
    driver.join("a")
    assert driver.fill() == groups


def test_a_batch_in_training_holds_its_places_until_its_version_is_live_everywhere() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=2)
    driver.join("a")
    driver.join("b")
    driver.fill()
    finish_group(driver, 0)
    finish_group(driver, 1)
    driver.do(ev.BatchRequested())
    assert (len(driver.batches), driver.fill()) == (1, 0)  # handed over
    driver.publish()
    assert driver.fill() == 0  # published, and not yet served
    driver.swap("a")
    assert driver.fill() == 0  # `b` would still sample old tokens
    driver.swap("b")
    assert driver.fill() == 2


def test_a_task_that_was_not_requested_is_refused() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1)
    driver.fill()
    with pytest.raises(TidegateError, match="1 groups outstanding of 1 allowed"):
        driver.core.handle(ev.TaskArrived("one too many"))


def test_negative_staleness_is_refused_with_its_value() -> None:
    with pytest.raises(ConfigError, match="got -1"):
        BoundedStaleness(max_staleness=-1, groups_per_batch=8)


# ---------------------------------------------------------------- consumption


def test_the_last_batch_is_smaller_when_tasks_run_out_and_then_batches_end() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=2)
    driver.join("a")
    driver.do(ev.TaskArrived("only one"))
    driver.do(ev.TasksExhausted())
    driver.do(ev.BatchRequested())
    finish_group(driver, 0)
    assert [len(batch.groups) for batch in driver.batches] == [1]
    assert driver.do(ev.BatchRequested()) == [ev.EndBatches(0)]


def test_publishing_twice_for_one_batch_ages_what_waits_and_the_second_gate_drops_it() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.fill()
    finish_group(driver, 0)
    finish_group(driver, 1)
    driver.do(ev.BatchRequested())
    driver.publish_and_swap()
    driver.publish_and_swap()
    commands = driver.do(ev.BatchRequested())  # group 1 is of version 0, the trainer at version 2
    assert commands[-1] == ev.RequeueTask(task=1, key=TaskKey(0, 1))
    assert dict(driver.core.ledger.discarded) == {"stale": 3}
    assert driver.fill() > 0


# ---------------------------------------------------------------- rollouts that fail


def test_a_rollout_that_fails_is_discarded_and_its_group_continues_without_it() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=3)
    driver.join("a")
    driver.fill()
    first, second, third = driver.running.values()
    driver.do(ev.BatchRequested())
    driver.fail(first)
    driver.solve(second)
    driver.solve(third)
    assert [r.index for r in driver.batches[0].groups[0].kept] == [1, 2]
    assert dict(driver.core.discarded_rollouts) == {"episode_error": 1}


def test_a_group_with_nothing_left_to_compare_is_dropped_and_its_place_refilled() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=2)
    driver.join("a")
    driver.fill()
    first, second = driver.running.values()
    driver.solve(first, tokens=5)
    driver.fail(second)
    assert dict(driver.core.ledger.discarded) == {"group_too_small": 5, "episode_error": 0}
    assert first.state is RolloutState.DISCARDED
    assert driver.fill() == 1


def test_tokens_that_arrive_for_a_turn_given_up_are_counted_as_cancelled() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 2)
    late = driver.engines["a"].turns[handle]
    driver.fail(rollout)  # the episode timed out while its turn was running
    driver.engines["a"].turns[handle] = late
    driver.sample("a", handle, 3)
    assert dict(driver.core.ledger.discarded) == {"episode_error": 2, "cancelled": 3}


# ---------------------------------------------------------------- turns


def test_an_aborted_turn_continues_from_its_tokens_with_what_is_left_of_its_budget() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 3, ABORT)
    ((again, submitted),) = driver.engines["a"].turns.items()
    assert again != handle
    assert submitted.token_ids == rollout.token_ids.tobytes()
    assert (submitted.sampled_before, submitted.sampling.max_tokens) == (3, 5)
    driver.publish_and_swap()
    driver.sample("a", again, 5, LENGTH)
    turn = rollout.turns[0]
    assert (turn.length, turn.finish_reason) == (8, "length")
    assert [(s.version, s.start, s.end, s.kv_label) for s in turn.spans()] == [
        (0, 0, 3, "fresh"),
        (1, 3, 8, "fresh"),
    ]


def test_a_reconnected_engine_is_sent_its_turns_anew_and_drops_the_old_ones() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    _, old = driver.begin_turn()
    driver.sample("a", old, 2)
    commands = driver.do(ev.EngineJoined("a", 0, 4))
    assert commands[0] == ev.Cancel("a", old)
    ((new, submitted),) = driver.engines["a"].turns.items()
    assert new != old
    assert submitted.sampled_before == 2


def test_the_oldest_group_has_the_highest_priority_and_evaluation_comes_first() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.fill()
    driver.do(ev.EvaluationRequested("held out", 0))
    for rollout in list(driver.running.values()):
        driver.ask_turn(rollout)
    priorities = [turn.priority for turn in driver.engines["a"].turns.values()]
    assert priorities == [0, 1, -1]


def test_evaluation_is_never_trained_and_has_a_ledger_of_its_own() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.do(ev.EvaluationRequested("held out", 0))
    (rollout,) = driver.running.values()
    driver.solve(rollout, tokens=6)
    assert rollout.state is RolloutState.EVALUATED
    assert driver.core.ledger.generated == 0
    assert driver.core.evaluation_ledger.generated == 6
    assert driver.core.outstanding_groups == 0


def test_late_tokens_of_an_evaluation_are_in_its_own_ledger() -> None:
    driver = Driver()
    driver.join("a")
    driver.do(ev.EvaluationRequested("look", 0))
    (rollout,) = driver.running.values()
    driver.ask_turn(rollout)
    (handle,) = driver.engines["a"].turns
    driver.sample("a", handle, 2)
    driver.do(ev.TurnAbandoned(rollout.rollout_id))
    driver.engines["a"].turns[handle] = None  # type: ignore[assignment]  # it has not heard yet
    driver.sample("a", handle, 3, STOP)
    assert driver.core.ledger.generated == 0
    assert driver.core.evaluation_ledger.generated == 5
    assert driver.core.evaluation_ledger.discarded["cancelled"] == 3


def test_ending_a_run_settles_every_token() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=2)
    driver.join("a")
    driver.fill()
    finish_group(driver, 0)
    driver.ask_turn(next(iter(driver.running.values())))
    (handle,) = driver.engines["a"].turns
    driver.sample("a", handle, 2)
    driver.do(ev.RunEnded())
    ledger = driver.core.ledger.snapshot()
    assert (ledger.in_flight, ledger.buffered) == (0, 0)
    assert ledger.discarded == {"run_ended": 8}
    assert {r.state for r in driver.recorded} == {RolloutState.DISCARDED}


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_prompt_is_in_the_context_once_after_two_kills_around_an_episode_that_diverges(
    snapshot: bool,
) -> None:
    driver = Driver(group_size=1, groups_per_batch=1)
    driver.join("engine-0")
    driver.fill()
    rollout = next(iter(driver.running.values()))
    driver.ask_turn(rollout)
    driver.die_and_resume(0, snapshot=snapshot)
    rollout = driver.running[rollout.rollout_id]
    # It appends the same prompt, then asks for another turn; its process dies before the event.
    driver.do(ev.RolloutCut(rollout.rollout_id, 0, len(PROMPT), "went_another_way"))
    driver.die_and_resume(0, snapshot=snapshot)
    rollout = driver.running[rollout.rollout_id]
    driver.ask_turn(rollout)
    assert rollout.token_ids.tolist() == PROMPT


def handed_rows(batch: ev.HandOver) -> list[tuple[int, list[int]]]:
    return [(group.group_id, [row.rollout_id for row in group.kept]) for group in batch.groups]


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        BoundedStaleness(max_staleness=3, groups_per_batch=2, consumption_order=Window(4)),
        BoundedStaleness(
            max_staleness=3,
            groups_per_batch=2,
            consumption_order="completion",
            deadline_policy="split",
        ),
        TailPacking(groups_per_batch=2, factor=2.0),
        BoundedStaleness(max_staleness=3, groups_per_batch=2, consumption_order="completion"),
    ],
    ids=["window", "split", "tail packing", "completion"],
)
def test_an_undone_batch_is_handed_over_again_as_it_was_whatever_has_ended_since(
    policy: StalenessPolicy, snapshot: bool
) -> None:
    driver = Driver(policy=policy)
    driver.join("engine-0")
    driver.fill()
    for group_id in (2, 1):
        finish_group(driver, group_id)
    driver.do(ev.BatchRequested())
    driver.do(ev.BatchRequested())
    for rollout in list(driver.running.values()):
        driver.solve(rollout)
    before = [handed_rows(batch) for batch in driver.batches]
    assert {group_id for group_id, _ in before[0]} == {1, 2}
    driver.die_and_resume(0, snapshot=snapshot)
    driver.fill()
    for rollout in list(driver.running.values()):
        driver.solve(rollout)
    for _ in before:
        driver.do(ev.BatchRequested())
    assert [handed_rows(batch) for batch in driver.batches] == before


def test_from_an_undone_batch_that_has_lost_a_group_on_the_policy_selects_anew() -> None:
    driver = Driver(max_staleness=3, groups_per_batch=1, group_size=1)
    driver.join("engine-0")
    driver.fill()
    finish_group(driver, 0)
    driver.do(ev.BatchRequested())
    driver.publish_and_swap()
    finish_group(driver, 1)  # sampled by the weights that are lost
    driver.do(ev.BatchRequested())
    driver.die_and_resume(0, snapshot=False)
    assert driver.core.ledger.discarded["rolled_back"] > 0
    driver.fill()
    for rollout in list(driver.running.values()):
        driver.solve(rollout)
    for _ in range(2):
        driver.do(ev.BatchRequested())
    assert [batch.groups[0].group_id for batch in driver.batches] == [0, 2]
    assert not driver.core.handed.undone
