from tidegate.orchestrator.weights import Outgoing, WeightCoordinator
from tidegate.transport.messages import (
    FinishWeightUpdate,
    InitWeights,
    StartWeightUpdate,
    UpdateWeights,
)

INIT = InitWeights(channel="shm")
CHUNK = UpdateWeights(version=1, location="segment", tensors=[])
FINISH = FinishWeightUpdate(version=1, pause_mode="keep", kv_policy="recompute")


def coordinator(*engines: str) -> WeightCoordinator:
    made = WeightCoordinator(INIT, pause_mode="keep", kv_policy="recompute")
    for engine in engines:
        assert made.joined(engine, 0) == [(engine, INIT)]
    return made


def staging(engine: str) -> Outgoing:
    return [(engine, StartWeightUpdate(version=1)), (engine, CHUNK)]


def test_no_engine_swaps_before_every_engine_has_staged() -> None:
    weights = coordinator("a", "b")
    assert weights.publish(1, [CHUNK]) == [*staging("a"), *staging("b")]
    assert weights.staged("a", 1) == []
    assert weights.staged("b", 1) == []
    assert weights.release() == [("a", FINISH), ("b", FINISH)]
    weights.live("a", 1)
    assert (weights.is_settled, weights.engines_behind) == (False, ["b"])
    weights.live("b", 1)
    assert weights.is_settled


def test_a_late_joiner_gets_the_newest_version_and_swaps_at_once() -> None:
    weights = coordinator("a")
    weights.publish(1, [CHUNK])
    weights.staged("a", 1)
    weights.release()
    weights.live("a", 1)
    assert weights.joined("late", 0) == [("late", INIT), *staging("late")]
    assert not weights.is_settled  # it reads the buffer still
    assert weights.staged("late", 1) == [("late", FINISH)]


def test_an_engine_that_comes_with_the_newest_version_needs_nothing() -> None:
    weights = coordinator("a")
    weights.publish(1, [CHUNK])
    assert weights.joined("b", 1) == [("b", INIT)]


def test_nobody_waits_for_an_engine_that_is_gone() -> None:
    weights = coordinator("a", "b")
    weights.publish(1, [CHUNK])
    weights.staged("a", 1)
    weights.left("b")
    assert weights.release() == [("a", FINISH)]
    weights.live("a", 1)
    assert weights.is_settled


def test_a_refusal_is_kept_with_its_reason_and_nobody_swaps() -> None:
    weights = coordinator("a", "b")
    weights.publish(1, [CHUNK])
    weights.staged("a", 1)
    assert not weights.refused("b", 1, "wrong shape")
    assert weights.update is not None
    assert weights.update.refusals == {"b": "wrong shape"}
    weights.withdraw()
    assert weights.is_settled
    assert weights.joined("c", 0) == [("c", INIT)]  # nothing to bring it


def test_a_publish_given_up_while_engines_stage_still_waits_for_them_to_let_go() -> None:
    weights = coordinator("a", "b")
    weights.publish(1, [CHUNK])
    weights.staged("a", 1)
    weights.withdraw()
    assert weights.engines_behind == ["b"]  # it reads the buffer
    assert weights.staged("b", 1) == []
    assert weights.is_settled


def test_an_engine_that_joins_while_the_buffer_is_written_waits_for_what_is_written() -> None:
    weights = coordinator("a")
    weights.publish(1, [CHUNK])
    weights.staged("a", 1)
    weights.release()
    weights.live("a", 1)
    weights.is_reserved = True  # version 2 is being written over version 1
    assert weights.joined("late", 0) == [("late", INIT)]
    two = UpdateWeights(version=2, location="segment", tensors=[])
    assert ("late", two) in weights.publish(2, [two])


def test_an_engine_that_refuses_what_others_serve_is_no_engine_of_this_run() -> None:
    weights = coordinator("a")
    weights.publish(1, [CHUNK])
    weights.staged("a", 1)
    weights.release()
    weights.live("a", 1)
    weights.joined("other model", 0)
    assert weights.refused("other model", 1, "wrong shape")


def test_answers_about_another_version_change_nothing() -> None:
    weights = coordinator("a")
    weights.publish(1, [CHUNK])
    assert weights.staged("a", 0) == []
    weights.live("a", 0)
    weights.refused("a", 0, "late news")
    assert weights.engines_behind == ["a"]
