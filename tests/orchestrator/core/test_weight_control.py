""":class:`WeightControl`, event by event: messages about weights, pauses and sleep."""

import pytest

from tests.orchestrator.core.control_driver import (
    INIT,
    ControlDriver,
    chunk,
    finish,
    staging,
)
from tidegate.errors import EngineLagging, SleepFailed, WeightsRefused
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core.target_versions import LaggingEngines
from tidegate.transport.messages import (
    Asleep,
    Awake,
    Pause,
    Resume,
    StartWeightUpdate,
    TurnsPaused,
    TurnsResumed,
)
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, Sleep, SleepLevel, Wake

# ---------------------------------------------------------------- a version


def test_no_engine_swaps_before_every_engine_has_staged() -> None:
    run = ControlDriver("a", "b")
    assert run.reserve().version == 1
    assert run.publish(1) == [*staging("a", 1), *staging("b", 1)]
    assert run.is_held
    assert run.staged("a", 1) == []
    assert run.staged("b", 1) == [*finish("a", 1), *finish("b", 1)]
    assert (run.released, run.is_held) == ([1], False)
    assert run.live("a", 1) == []
    assert not run.ended.get(run.call)
    assert run.live("b", 1) == []
    assert run.result(run.call) is None
    assert run.timers == {}


def test_lagging_engines_are_known_by_version_and_phase_at_any_time() -> None:
    run = ControlDriver("a", "b", "c")
    assert run.state.weights.lagging_engines == []
    run.reserve()
    run.publish(1)
    run.staged("c", 1)
    assert run.state.weights.lagging_engines == [
        LaggingEngines(1, "staging", ("a", "b")),
        LaggingEngines(1, "staged", ("c",)),
    ]
    run.staged("a", 1)
    run.staged("b", 1)
    assert run.state.weights.lagging_engines == [LaggingEngines(1, "swapping", ("a", "b", "c"))]
    assert str(run.state.weights.lagging_engines[0]) == "v1 is swapping on a, b, c"


def test_engines_are_sent_finish_only_once_no_crash_can_forget_the_version() -> None:
    run = ControlDriver("a", is_safe=False)
    run.reserve()
    run.publish(1)
    assert run.staged("a", 1) == []
    assert run.released == [1]
    assert run.do(wc.VersionDurable(1)) == finish("a", 1)
    assert run.do(wc.VersionDurable(1)) == []


def test_a_word_to_swap_that_comes_after_a_reconnect_is_not_said() -> None:
    run = ControlDriver("a", is_safe=False)
    run.reserve()
    run.publish(1)
    run.staged("a", 1)
    assert run.join("a") == [("a", INIT), *staging("a", 1)]
    assert run.do(wc.VersionDurable(1)) == []  # what it had staged is gone with its connection
    assert run.staged("a", 1) == finish("a", 1)


def test_an_engine_that_serves_a_version_already_needs_nothing_of_it() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    assert run.join("b", 1) == [("b", INIT)]
    resumed = ControlDriver("late")
    assert resumed.join("a", 5) == [("a", INIT)]
    resumed.released.append(4)
    assert resumed.reserve().version == 5
    assert resumed.publish(5) == staging("late", 5)  # but not to a, which has kept it


def test_a_refusal_is_raised_with_its_reason_and_no_engine_swaps() -> None:
    run = ControlDriver("a", "b")
    run.reserve()
    run.publish(1)
    assert run.staged("a", 1) == []
    assert run.fails("b", 1) == []  # it would refuse again
    with pytest.raises(WeightsRefused, match="engine 'b' refused weights v1: wrong shape"):
        run.result(run.call)
    assert run.state.weights.is_settled
    assert run.released == []
    assert run.join("c") == [("c", INIT)]  # none was ever released: all serve the first


def test_an_engine_that_refuses_what_others_serve_is_no_engine_of_this_run() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    run.join("other model")
    run.fails("other model", 1)
    assert run.refused == {"other model": "wrong shape"}
    assert run.join("other model")[1:] == staging("other model", 1)  # a new process


def test_a_second_swap_asked_of_an_engine_that_has_just_swapped_is_no_refusal() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1)
    run.join("a")  # it reconnects, and is asked anew
    run.staged("a", 1)
    run.live("a", 1)
    assert run.fails("a", 1, "v1 is not staged here") == []
    assert run.result(run.call) is None


def test_weights_that_an_engine_lacks_are_not_taken_for_refused_by_an_earlier_answer() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    run.join("late")  # it stages v1
    run.reserve()
    run.publish(2)
    waiting = run.ask(wc.ReserveRequested)  # all get v3, and with it the request to stop
    run.fails("late", 1, "given up, for v2 was started")
    assert run.fails("late", 2, "given up, for v3 was started") == staging("late", 1)
    run.fails("a", 2, "given up, for v3 was started")
    assert run.result(waiting).version == 3
    run.publish(3)
    assert run.fails("late", 3, "given up, for v1 was started") == []
    assert run.fails("late", 1, "given up, for v3 was started") == []
    assert run.refused == {}
    assert run.state.weights.lagging_engines == [LaggingEngines(3, "staging", ("a", "late"))]


# ---------------------------------------------------------------- waves, and a newer publish


def in_waves(engines: int, wave_engines: int) -> ControlDriver:
    """Publish a version that all engines but the last have staged."""
    names = [str(number) for number in range(engines)]
    run = ControlDriver(*names, wave_engines=wave_engines)
    run.reserve()
    run.publish(1)
    for name in names[:-1]:
        run.staged(name, 1)
    return run


def test_in_waves_a_fixed_number_of_engines_swaps_at_a_time_and_each_swap_lets_the_next_begin() -> (
    None
):
    run = in_waves(engines=5, wave_engines=2)
    assert run.staged("4", 1) == [*finish("0", 1), *finish("1", 1)]
    assert run.live("1", 1) == finish("2", 1)
    assert run.leave("0") == finish("3", 1)
    assert run.fails("2", 1, "its staged weights are gone") == finish("4", 1)
    assert run.refused == {"2": "its staged weights are gone"}
    run.live("3", 1)
    run.live("4", 1)
    assert run.result(run.call) is None


def test_a_newer_version_stops_copies_of_the_older_one_and_waits_for_the_replies() -> None:
    run = ControlDriver("a", "b")
    run.reserve()
    run.publish(1)
    first = run.call
    run.staged("a", 1)
    waiting = run.ask(wc.ReserveRequested)
    assert run.sent[-1] == ("b", StartWeightUpdate(version=2))
    assert waiting not in run.ended
    run.fails("b", 1, "given up, for v2 was started")
    assert run.result(waiting).version == 2
    assert run.publish(2) == [*staging("a", 2), *staging("b", 2)]
    run.staged("a", 2)
    run.staged("b", 2)
    run.live("a", 2)
    run.live("b", 2)
    assert (run.result(first), run.result(run.call)) == (None, None)


def test_a_newer_version_spares_those_that_wait_for_their_wave_the_older_one() -> None:
    run = in_waves(engines=3, wave_engines=1)
    assert run.staged("2", 1) == finish("0", 1)
    assert run.live("0", 1) == finish("1", 1)
    assert run.reserve().version == 2  # the older one continues while the newer one is written
    assert run.publish(2) == [*staging("0", 2), *staging("1", 2), *staging("2", 2)]


def test_an_engine_that_is_late_is_given_up_and_the_others_serve_on() -> None:
    run = ControlDriver("a", "b")
    run.reserve()
    run.publish(1)
    run.staged("a", 1)
    run.fire("")
    with pytest.raises(EngineLagging, match="v1 is staging on b"):
        run.result(run.call)
    assert list(run.given_up) == ["b"]
    assert run.released == []


def test_a_swap_that_is_late_after_its_call_returned_fails_the_next_publish() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1, wait="none")
    run.staged("a", 1)
    run.fire("")  # the version is released: only its swap is late
    assert run.released == [1]
    with pytest.raises(EngineLagging, match="v1 is swapping on a"):
        run.reserve()


# ---------------------------------------------------------------- a rollback


def test_a_rollback_pauses_engines_and_has_them_continue_under_good_weights() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    reserving = run.ask(wc.ReserveRequested, first_bad=1)
    assert run.sent[-1] == ("a", Pause(mode="abort"))
    assert (run.retracted, reserving in run.ended) == ([], False)
    run.hear("a", TurnsPaused(mode="abort"))
    assert run.retracted == [1]
    reserved = run.result(reserving)
    chunks = [chunk(reserved.version)]
    publishing = run.ask(wc.PublishRequested, reserved.version, chunks)
    assert run.staged("a", 2) == finish("a", 2)
    assert run.live("a", 2) == [("a", Resume())]
    assert publishing not in run.ended
    run.hear("a", TurnsResumed())
    assert run.result(publishing) is None


def test_the_end_of_a_policys_pause_resumes_no_engine_with_bad_weights() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    reserving = run.ask(wc.ReserveRequested, first_bad=1)
    run.hear("a", TurnsPaused(mode="abort"))
    reserved = run.result(reserving)
    ending = run.ask(wc.EngineHaltRequested, False)
    assert run.sent[-1] == ("a", Pause(mode="abort"))  # and no Resume
    run.hear("a", TurnsPaused(mode="abort"))
    assert ending in run.ended
    run.ask(wc.PublishRequested, reserved.version, [chunk(2)])
    assert run.staged("a", 2) == finish("a", 2)
    assert run.live("a", 2) == [("a", Resume())]


def test_a_rollback_that_is_cancelled_before_versions_are_taken_back_resumes_engines() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    reserving = run.ask(wc.ReserveRequested, first_bad=1)
    run.do(wc.CallCancelled(reserving))
    assert run.retracted == []
    assert run.sent[-1] == ("a", Resume())


def test_a_cancelled_rollback_resumes_no_engine_that_an_earlier_one_left_with_bad_weights() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    reserving = run.ask(wc.ReserveRequested, first_bad=1)
    run.hear("a", TurnsPaused(mode="abort"))
    assert run.result(reserving).version == 2
    run.do(wc.ReserveAbandoned())  # its write has failed
    again = run.ask(wc.ReserveRequested, first_bad=1)
    run.do(wc.CallCancelled(again))
    assert Resume() not in [message for _, message in run.sent]


def test_engines_resume_after_a_rollback_whose_caller_is_gone_once_its_version_is_live() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    reserving = run.ask(wc.ReserveRequested, first_bad=1)
    run.hear("a", TurnsPaused(mode="abort"))
    reserved = run.result(reserving)
    publishing = run.ask(wc.PublishRequested, reserved.version, [chunk(reserved.version)])
    run.staged("a", 2)
    assert run.live("a", 2) == [("a", Resume())]
    run.do(wc.CallCancelled(publishing))
    run.hear("a", TurnsResumed())
    run.pause("keep")
    assert run.sent[-1] == ("a", Pause(mode="keep"))


# ---------------------------------------------------------------- pauses


def test_a_pause_that_clears_caches_says_so_to_every_engine_and_later_ones_do_not() -> None:
    run = ControlDriver("a", "b")
    clears, plain = Pause(mode="keep", clear_cache=True), Pause(mode="abort")
    first = run.pause("keep", clear_cache=True)
    assert run.sent[-2:] == [("a", clears), ("b", clears)]
    run.hear("a", TurnsPaused(mode="keep"))
    assert first not in run.ended
    run.hear("b", TurnsPaused(mode="keep"))
    assert run.result(first) is None
    assert run.join("late") == [("late", clears), ("late", INIT)]
    run.hear("late", TurnsPaused(mode="keep"))
    run.pause(None)
    assert run.sent[-3:] == [(engine, Resume()) for engine in ("a", "b", "late")]
    for engine in ("a", "b", "late"):
        run.hear(engine, TurnsResumed())
    run.pause("abort")
    assert run.sent[-3:] == [(engine, plain) for engine in ("a", "b", "late")]


def test_a_resume_that_an_engine_confirms_late_does_not_confirm_the_pause_after_it() -> None:
    run = ControlDriver("a")
    run.pause("keep")
    run.hear("a", TurnsPaused(mode="keep"))
    run.do(wc.CallCancelled(run.pause(None)))
    again = run.pause("keep")
    run.hear("a", TurnsResumed())
    assert again not in run.ended
    run.hear("a", TurnsPaused(mode="keep"))
    assert run.result(again) is None


def test_an_engine_that_does_not_pause_in_time_is_given_up() -> None:
    run = ControlDriver("a", "b", pause_timeout_s=5.0)
    pause = run.pause("keep")
    run.hear("a", TurnsPaused(mode="keep"))
    assert run.timers == {pause: 5.0}
    run.fire(pause)
    assert run.given_up == {"b": "it has not paused by mode 'keep' within 5 s"}
    assert run.result(pause) is None


# ---------------------------------------------------------------- sleep


def asleep(run: ControlDriver, *engines: str, level: SleepLevel = 2) -> None:
    """Put all engines to sleep, and have them confirm."""
    call = run.sleep(level, MEMORY_TAGS)
    for engine in engines:
        run.hear(engine, TurnsPaused(mode="abort"))
    for engine in engines:
        [request] = [m.request_id for e, m in run.sent if e == engine and isinstance(m, Sleep)][-1:]
        run.hear(engine, Asleep(request_id=request, tags=list(MEMORY_TAGS), freed_bytes=10))
    assert run.result(call) == 10 * len(engines)


def wakes(run: ControlDriver, engine: str, *, left: list[MemoryTag], lacks: bool) -> None:
    """Have an engine confirm its last order to wake."""
    [request] = [m.request_id for e, m in run.sent if e == engine and isinstance(m, Wake)][-1:]
    run.hear(engine, Awake(request_id=request, tags=left, needs_weights=lacks))


def test_engines_that_wake_without_weights_wait_for_the_trainers_publish_until_all_is_awake() -> (
    None
):
    run = ControlDriver("a")
    run.bring(1, "a")
    asleep(run, "a")
    woken = run.wake("weights")
    before = len(run.sent)
    wakes(run, "a", left=["kv_cache"], lacks=True)
    assert run.result(woken) is None
    assert run.sent[before:] == []
    whole = run.wake(*MEMORY_TAGS)
    wakes(run, "a", left=[], lacks=True)
    assert run.sent[-2:] == staging("a", 1)
    run.staged("a", 1)
    assert run.live("a", 1) == [("a", Resume())]
    run.hear("a", TurnsResumed())
    assert run.result(whole) is None


def test_a_wake_fails_where_weights_that_come_to_nothing_were_the_only_ones() -> None:
    run = ControlDriver("a")
    asleep(run, "a")
    run.wake("weights")
    wakes(run, "a", left=["kv_cache"], lacks=True)
    run.reserve()
    run.publish(1)
    whole = run.wake(*MEMORY_TAGS)
    wakes(run, "a", left=[], lacks=True)
    run.do(wc.CallCancelled(run.call))
    assert run.staged("a", 1) == []
    with pytest.raises(SleepFailed, match="no published weights fit it"):
        run.result(whole)
    assert run.given_up == {}


def test_an_engine_that_does_not_wake_in_time_is_given_up() -> None:
    run = ControlDriver("a", "b")
    asleep(run, "a", "b", level=1)
    call = run.wake(*MEMORY_TAGS)
    wakes(run, "a", left=[], lacks=False)
    run.fire(call)
    assert run.given_up == {"b": "no wake within 60 s"}
    run.hear("a", TurnsResumed())
    assert run.result(call) is None
