"""Objects freed by reference counting alone, without the garbage collector."""

import gc
import logging
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidegate
from tests.orchestrator.core.driver import step
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.core.snapshot_codec import load, save
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.transport.messages import STOP, SamplingParams


def new_core() -> Core:
    """Make a core that trains one rollout at a time and keeps nothing for a crash."""
    policy = BoundedStaleness(max_staleness=0, groups_per_batch=1)
    core = Core(Rules(policy=policy, group_size=1))
    core.handle(ev.TasksOffered())
    core.handle(ev.EngineJoined("a", 0, 4))
    return core


def begin(core: Core) -> Rollout:
    """Start a rollout with a turn."""
    [command] = core.handle(ev.TaskArrived("task"))
    assert isinstance(command, ev.StartEpisode)
    command.rollout.extend([1, 2])
    core.handle(ev.TurnRequested(command.rollout.rollout_id, SamplingParams(max_tokens=2)))
    return command.rollout


def train_one(core: Core, version: int, *, forks: bool) -> "weakref.ref[array[int]]":
    """Train one rollout and publish; return a weak reference to its tokens."""
    rollout = begin(core)
    core.handle(step("a", version - 1, [(core.turns.next_handle - 1, [5], STOP)]))
    if forks:
        [command] = core.handle(ev.RolloutForked(rollout.rollout_id, "asked"))
        assert isinstance(command, ev.StartBranch)
        core.handle(ev.TurnRequested(command.rollout.rollout_id, SamplingParams(max_tokens=2)))
        core.handle(step("a", version - 1, [(core.turns.next_handle - 1, [6], STOP)]))
    core.handle(ev.EpisodeReturned(rollout.rollout_id, 1.0))
    [batch] = core.handle(ev.BatchRequested())
    assert isinstance(batch, ev.HandOver)
    core.handle(ev.BatchTaken())
    core.handle(ev.BatchesTrained((batch.number,)))
    core.handle(ev.VersionPublished(version))
    core.handle(ev.EngineSwapped("a", version))
    return weakref.ref(rollout.filed_token_ids)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Disable the garbage collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("forks", [False, True])
def test_a_rollout_whose_batch_is_no_longer_needed_is_freed_at_once(forks: bool) -> None:
    core = new_core()
    trained = [train_one(core, version, forks=forks) for version in range(1, 5)]
    assert [tokens() is None for tokens in trained] == [True, True, False, False]


@pytest.mark.usefixtures("without_collector")
def test_a_rollout_that_is_given_up_in_its_turn_is_gone_at_once() -> None:
    core = new_core()
    rollout = begin(core)
    core.handle(ev.EpisodeFailed(rollout.rollout_id, "episode_error"))
    tokens = weakref.ref(rollout.filed_token_ids)
    del rollout
    assert tokens() is None


@pytest.mark.usefixtures("without_collector")
def test_what_another_process_continues_from_is_gone_as_soon_once_it_has_been_trained() -> None:
    before = new_core()
    rollout = begin(before)
    before.handle(step("a", 0, [(before.turns.next_handle - 1, [5], STOP)]))
    before.handle(ev.EpisodeReturned(rollout.rollout_id, 1.0))
    core = Core(Rules(policy=before.policy, group_size=1))
    load(save(before), core)
    [group] = core.groups.ended
    tokens = weakref.ref(group.rollouts[0].filed_token_ids)
    del group
    core.handle(ev.BatchRequested())
    core.handle(ev.BatchesCheckpointed(1, 0))
    core.handle(ev.VersionPublished(1))
    core.handle(ev.EngineSwapped("a", 1))
    assert tokens() is None


def test_a_turn_that_a_caller_keeps_has_its_tokens_after_its_rollout() -> None:
    core = new_core()
    rollout = begin(core)
    core.handle(step("a", 0, [(core.turns.next_handle - 1, [5, 6], STOP)]))
    [turn] = rollout.turns
    core.handle(ev.EpisodeReturned(rollout.rollout_id, 1.0))
    assert (turn.number, turn.rollout_id) == (0, rollout.rollout_id)
    del rollout
    assert turn.token_ids.tolist() == [5, 6]
    assert turn.logprobs.tolist() == [-1.0, -1.0]


class Unreadable:
    """A reward that can't be read."""

    def __float__(self) -> float:
        raise OSError("the grader is down")


@pytest.mark.usefixtures("without_collector")
def test_an_episode_whose_reward_is_wrong_is_gone_when_it_has_failed(
    tidegate_serve_sync: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # pytest would keep the logged tracebacks
    failed: list[weakref.ref[tidegate.Episode]] = []

    async def solve(episode: tidegate.Episode, task: int) -> Any:
        episode.append("a")
        await episode.generate(max_tokens=2)
        if task:
            return 1.0
        failed.append(weakref.ref(episode))
        return Unreadable() if len(failed) % 2 else "no number"

    with tidegate_serve_sync(engines=1, says="abc", group_size=1, groups_per_batch=1) as rollouts:
        for batch in rollouts.batches(range(4), episode=solve):
            rollouts.publish({}, batches=[batch])
    assert failed
    assert [episode() for episode in failed] == [None] * len(failed)
