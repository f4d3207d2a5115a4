from tidegate.orchestrator.weights.weights import Laggards, Outgoing, WeightCoordinator
from tidegate.transport.messages import (
    FinishWeightUpdate,
    InitWeights,
    StartWeightUpdate,
    UpdateWeights,
)

INIT = InitWeights(channel="shm")


def chunk(version: int) -> UpdateWeights:
    return UpdateWeights(version=version, location="segment", tensors=[])


def staging(engine: str, version: int) -> Outgoing:
    return [(engine, StartWeightUpdate(version=version)), (engine, chunk(version))]


def finish(engine: str, version: int) -> Outgoing:
    word = FinishWeightUpdate(version=version, pause_mode="keep", kv_policy="recompute")
    return [(engine, word)]


def coordinator(*engines: str) -> WeightCoordinator:
    made = WeightCoordinator(INIT, pause_mode="keep", kv_policy="recompute")
    for engine in engines:
        assert made.joined(engine, 0) == [(engine, INIT)]
    return made


def bring(weights: WeightCoordinator, version: int, *engines: str) -> None:
    """Publish a version to the end."""
    weights.publish(version, [chunk(version)])
    for engine in engines:
        weights.staged(engine, version)
    weights.release()
    weights.swaps()
    for engine in engines:
        weights.live(engine, version)
    assert weights.is_settled


def test_no_engine_swaps_before_every_engine_has_staged() -> None:
    weights = coordinator("a", "b")
    assert weights.publish(1, [chunk(1)]) == [*staging("a", 1), *staging("b", 1)]
    weights.staged("a", 1)
    assert weights.swaps() == []
    weights.staged("b", 1)
    assert weights.swaps() == []
    weights.release()
    assert weights.swaps() == [*finish("a", 1), *finish("b", 1)]
    assert weights.swaps() == []
    weights.live("a", 1)
    assert (weights.is_settled, weights.engines_behind) == (False, ["b"])
    weights.live("b", 1)
    assert weights.is_settled


def test_who_waits_for_what_can_be_told_at_any_time() -> None:
    weights = coordinator("a", "b", "c")
    assert weights.laggards == []
    weights.publish(1, [chunk(1)])
    weights.staged("c", 1)
    assert weights.laggards == [
        Laggards(1, "staging", ("a", "b")),
        Laggards(1, "staged", ("c",)),
    ]
    weights.staged("a", 1)
    weights.staged("b", 1)
    weights.release()
    weights.swaps()
    assert weights.laggards == [Laggards(1, "swapping", ("a", "b", "c"))]
    assert str(weights.laggards[0]) == "v1 is swapping on a, b, c"


def test_a_late_joiner_gets_the_newest_version_and_swaps_at_once() -> None:
    weights = coordinator("a")
    bring(weights, 1, "a")
    assert weights.joined("late", 0) == [("late", INIT), *staging("late", 1)]
    assert not weights.is_settled
    weights.staged("late", 1)
    assert weights.swaps() == finish("late", 1)


def test_an_engine_that_serves_a_version_already_needs_nothing_of_it() -> None:
    weights = coordinator("a")
    bring(weights, 1, "a")
    assert weights.joined("b", 1) == [("b", INIT)]
    resumed = coordinator("late")
    assert resumed.joined("a", 5) == [("a", INIT)]
    assert resumed.publish(5, [chunk(5)]) == staging("late", 5)  # but not to a, which has kept it


def test_nobody_waits_for_an_engine_that_is_gone() -> None:
    weights = coordinator("a", "b")
    weights.publish(1, [chunk(1)])
    weights.staged("a", 1)
    weights.left("b")
    weights.release()
    assert weights.swaps() == finish("a", 1)
    weights.live("a", 1)
    assert weights.is_settled


def test_a_word_to_swap_that_comes_after_a_reconnect_is_not_said() -> None:
    weights = coordinator("a")
    weights.publish(1, [chunk(1)])
    weights.staged("a", 1)
    weights.release()  # the word is due, but waits for the journal
    assert weights.joined("a", 0) == [("a", INIT), *staging("a", 1)]
    assert weights.swaps() == []  # what it had staged is gone with its connection
    weights.staged("a", 1)
    assert weights.swaps() == finish("a", 1)


def test_a_refusal_is_kept_with_its_reason_and_nobody_swaps() -> None:
    weights = coordinator("a", "b")
    weights.publish(1, [chunk(1)])
    weights.staged("a", 1)
    assert not weights.refused("b", 1, "wrong shape")
    assert weights.catch_up() == []  # it would refuse again
    assert weights.update is not None
    assert weights.update.refusals == {"b": "wrong shape"}
    weights.withdraw()
    assert weights.is_settled
    assert weights.swaps() == weights.catch_up() == []
    assert weights.joined("c", 0) == [("c", INIT)]  # none was ever released: all serve the first


def test_a_late_joiner_gets_the_version_released_last_whatever_became_of_those_since() -> None:
    weights = coordinator("a")
    bring(weights, 1, "a")
    assert weights.kept_version == 1
    weights.publish(2, [chunk(2)])
    weights.refused("a", 2, "wrong shape")
    weights.withdraw()
    assert weights.kept_version == 1
    assert weights.joined("late", 0) == [("late", INIT), *staging("late", 1)]
    weights.staged("late", 1)
    assert weights.swaps() == finish("late", 1)
    weights.live("late", 1)
    assert weights.is_settled


def test_so_does_one_that_joins_while_the_next_version_is_written_or_that_waited_for_it() -> None:
    weights = coordinator("a")
    bring(weights, 1, "a")
    weights.is_reserved = True  # version 2 is being written beside version 1
    assert weights.joined("late", 0) == [("late", INIT), *staging("late", 1)]
    assert weights.is_writable
    assert weights.publish(2, [chunk(2)]) == [*staging("a", 2), *staging("late", 2)]
    assert weights.engines_behind == ["a", "late"]
    weights.staged("late", 1)  # from before it was told of the newer one
    assert weights.swaps() == []
    weights.staged("late", 2)
    weights.withdraw()
    assert weights.catch_up() == staging("late", 1)


def test_a_publish_given_up_while_engines_copy_it_waits_for_them_to_let_go() -> None:
    weights = coordinator("a", "b")
    weights.publish(1, [chunk(1)])
    weights.staged("a", 1)
    weights.withdraw()
    assert weights.engines_behind == ["b"]
    assert not weights.is_writable
    weights.staged("b", 1)
    assert weights.is_settled
    assert weights.is_writable
    assert weights.swaps() == []


def test_a_version_given_up_may_be_published_again_and_old_answers_do_not_count_for_it() -> None:
    weights = coordinator("a")
    weights.publish(1, [chunk(1)])
    weights.withdraw()
    weights.staged("a", 1)
    assert weights.publish(1, [chunk(1)]) == staging("a", 1)
    weights.release()
    assert weights.swaps() == []
    weights.staged("a", 1)
    assert weights.swaps() == finish("a", 1)


def test_an_engine_that_refuses_what_others_serve_is_no_engine_of_this_run() -> None:
    weights = coordinator("a")
    bring(weights, 1, "a")
    weights.joined("other model", 0)
    assert weights.refused("other model", 1, "wrong shape")
    weights.left("other model")
    assert weights.joined("other model", 0)[1:] == staging("other model", 1)  # a new process


def test_answers_about_another_version_change_nothing() -> None:
    weights = coordinator("a")
    weights.publish(1, [chunk(1)])
    weights.staged("a", 0)
    weights.live("a", 0)
    assert not weights.refused("a", 0, "late news")
    assert weights.engines_behind == ["a"]


# ---------------------------------------------------------------- waves, and a newer publish


def in_waves(engines: int, wave_engines: int) -> WeightCoordinator:
    """A version that all of them have staged, and that is released."""
    made = WeightCoordinator(
        INIT, pause_mode="keep", kv_policy="recompute", wave_engines=wave_engines
    )
    names = [str(number) for number in range(engines)]
    for name in names:
        made.joined(name, 0)
    made.publish(1, [chunk(1)])
    for name in names:
        made.staged(name, 1)
    made.release()
    return made


def test_in_waves_so_many_are_told_at_a_time_and_each_that_swaps_makes_room() -> None:
    weights = in_waves(engines=5, wave_engines=2)
    assert weights.swaps() == [*finish("0", 1), *finish("1", 1)]
    assert weights.swaps() == []
    weights.live("1", 1)
    assert weights.swaps() == finish("2", 1)
    weights.left("0")
    assert weights.swaps() == finish("3", 1)
    assert weights.refused("2", 1, "its staged weights are gone")
    assert weights.swaps() == finish("4", 1)
    assert weights.holdups == ["3", "4"]  # who waits for others holds nobody up
    weights.live("3", 1)
    weights.live("4", 1)
    assert (weights.is_settled, weights.is_swap_due) == (True, False)


def test_a_newer_version_tells_those_that_copy_the_older_one_to_stop_and_waits_for_their_word() -> (
    None
):
    weights = coordinator("a", "b")
    weights.publish(1, [chunk(1)])
    weights.staged("a", 1)
    assert weights.supersede(2) == [("b", StartWeightUpdate(version=2))]
    assert not weights.is_writable
    assert not weights.refused("b", 1, "given up, for v2 was started")
    assert weights.is_writable
    assert weights.publish(2, [chunk(2)]) == [*staging("a", 2), *staging("b", 2)]


def test_a_newer_version_spares_those_that_wait_for_their_wave_the_older_one() -> None:
    weights = in_waves(engines=3, wave_engines=1)
    assert weights.swaps() == finish("0", 1)
    weights.live("0", 1)
    assert weights.supersede(2) == []  # it is released, and goes on while the newer one is written
    assert weights.is_writable
    assert weights.swaps() == finish("1", 1)
    assert weights.publish(2, [chunk(2)]) == [
        *staging("0", 2),
        *staging("1", 2),
        *staging("2", 2),
    ]
    assert weights.swaps() == []
