"""The core keeps adapters' version numbers, and their tokens out of the base's batches."""

import pytest

from tests.orchestrator.core.driver import step
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import encode_event, replay
from tidegate.orchestrator.core.rules import Rules
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.transport.messages import SamplingParams


def new_core() -> Core:
    policy = BoundedStaleness(groups_per_batch=2, max_staleness=1)
    return Core(Rules(policy=policy, group_size=2))


@pytest.fixture
def core() -> Core:
    core = new_core()
    core.handle(ev.EngineJoined("engine-0", 0, 8))
    core.handle(ev.AdapterReleased("critic", 3))
    return core


def turn_of(core: Core, rollout_id: int, **options: object) -> list[ev.Command]:
    core.rollout(rollout_id).extend([7, 8])  # type: ignore[union-attr]
    sampling = SamplingParams(max_tokens=4, adapter="critic", **options)  # type: ignore[arg-type]
    return core.handle(ev.TurnRequested(rollout_id, sampling))


def test_a_training_turn_with_such_an_adapter_is_refused(core: Core) -> None:
    start, _ = core.handle(ev.TaskArrived("task"))
    assert isinstance(start, ev.StartEpisode)
    [refusal] = turn_of(core, start.rollout.rollout_id)
    assert isinstance(refusal, ev.FailTurn)
    assert "no part of the base's batches" in refusal.message
    core.check()


@pytest.mark.parametrize(("asked", "sent"), [(None, 0), (2, 2)])
def test_an_evaluation_turn_follows_the_live_version_unless_it_is_pinned(
    core: Core, asked: int | None, sent: int
) -> None:
    [start] = core.handle(ev.EvaluationRequested("task", 0))
    assert isinstance(start, ev.StartEpisode)
    [submit] = turn_of(core, start.rollout.rollout_id, adapter_version=asked)
    assert isinstance(submit, ev.Submit)
    assert submit.message.sampling.adapter_version == sent
    adapter_step = step("engine-0", 3, [(submit.message.turn, [5], 0)], adapter="critic")
    record = encode_event(adapter_step, core)
    event, _ = replay(record, core)
    assert isinstance(event, ev.StepArrived)
    assert event.adapter == "critic"
    rollout = core.rollout(start.rollout.rollout_id)
    assert rollout is not None
    assert [span.version for span in rollout.turns[0].spans()] == [3]
    assert core.evaluation_ledger.generated == 1
    core.check()
