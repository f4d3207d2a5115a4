""":class:`WeightControl`, event by event: messages about weights, pauses and sleep."""

import pytest

from tests.orchestrator.core.control_driver import (
    AWAKE,
    INIT,
    ControlDriver,
    chunk,
    finish,
    staging,
)
from tidegate.errors import ConfigError, EngineLagging, PublishDropped, SleepFailed, WeightsRefused
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


def test_a_late_joiner_gets_the_newest_version_and_swaps_at_once() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    assert run.join("late") == [("late", INIT), *staging("late", 1)]
    assert run.staged("late", 1) == finish("late", 1)


def test_an_engine_that_serves_a_version_already_needs_nothing_of_it() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    assert run.join("b", 1) == [("b", INIT)]
    resumed = ControlDriver("late")
    assert resumed.join("a", 5) == [("a", INIT)]
    resumed.released.append(4)
    assert resumed.reserve().version == 5
    assert resumed.publish(5) == staging("late", 5)  # but not to a, which has kept it


def test_no_call_waits_for_an_engine_that_is_gone() -> None:
    run = ControlDriver("a", "b")
    run.reserve()
    run.publish(1)
    run.staged("a", 1)
    assert run.leave("b") == finish("a", 1)
    run.live("a", 1)
    assert run.result(run.call) is None


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


def test_a_late_joiner_gets_the_version_released_last_whatever_became_of_those_since() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    assert run.reserve().keep == {1}
    run.publish(2)
    run.fails("a", 2)
    assert run.state.weights.kept_buffers == {1}
    assert run.join("late") == [("late", INIT), *staging("late", 1)]
    assert run.staged("late", 1) == finish("late", 1)
    run.live("late", 1)
    assert run.state.weights.is_settled


def test_so_does_one_that_joins_while_the_next_version_is_written_or_that_waited_for_it() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    assert run.reserve().version == 2
    assert run.join("late") == [("late", INIT), *staging("late", 1)]
    assert run.state.weights.is_writable
    assert run.publish(2) == [*staging("a", 2), *staging("late", 2)]
    assert run.staged("late", 1) == []  # from before the engine learned of the newer one
    assert run.staged("late", 2) == []
    assert run.do(wc.CallCancelled(run.call)) == staging("late", 1)


def test_a_publish_given_up_while_engines_copy_it_waits_for_them_to_let_go() -> None:
    run = ControlDriver("a", "b")
    run.reserve()
    run.publish(1)
    run.staged("a", 1)
    assert run.do(wc.CallCancelled(run.call)) == []
    assert run.state.weights.lagging_engines == [LaggingEngines(1, "staging", ("b",))]
    waiting = run.ask(wc.ReserveRequested)
    assert waiting not in run.ended
    assert run.staged("b", 1) == []
    assert run.result(waiting).version == 1


def test_a_version_given_up_may_be_published_again_and_old_answers_do_not_count_for_it() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1)
    run.do(wc.CallCancelled(run.call))
    run.staged("a", 1)
    run.reserve()
    assert run.publish(1) == staging("a", 1)
    assert run.released == []
    assert run.staged("a", 1) == finish("a", 1)


def test_an_engine_that_refuses_what_others_serve_is_no_engine_of_this_run() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    run.join("other model")
    run.fails("other model", 1)
    assert run.refused == {"other model": "wrong shape"}
    assert run.join("other model")[1:] == staging("other model", 1)  # a new process


def test_answers_about_another_version_change_nothing() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1)
    assert [*run.staged("a", 0), *run.live("a", 0), *run.fails("a", 0)] == []
    assert run.state.weights.lagging_engines == [LaggingEngines(1, "staging", ("a",))]


def test_a_second_swap_asked_of_an_engine_that_has_just_swapped_is_no_refusal() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1)
    run.join("a")  # it reconnects, and is asked anew
    run.staged("a", 1)
    run.live("a", 1)
    assert run.fails("a", 1, "v1 is not staged here") == []
    assert run.result(run.call) is None


def test_an_answer_to_an_earlier_start_of_a_version_says_nothing_of_the_newest() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    run.reserve()
    run.publish(2)
    waiting = run.ask(wc.ReserveRequested)
    assert run.sent[-1] == ("a", StartWeightUpdate(version=3))
    run.do(wc.CallCancelled(waiting))  # the writing fails; v1 serves on
    assert run.fails("a", 2, "given up, for v3 was started") == []
    run.reserve()
    assert run.publish(3) == staging("a", 3)
    assert run.state.weights.lagging_engines == [LaggingEngines(3, "staging", ("a",))]
    assert run.staged("a", 3) == finish("a", 3)


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


def test_a_version_whose_successor_could_not_be_written_is_dropped() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1)
    waiting = run.ask(wc.ReserveRequested)
    run.fails("a", 1, "given up, for v2 was started")
    assert run.result(waiting).version == 2
    run.do(wc.ReserveAbandoned())
    with pytest.raises(PublishDropped, match="v1 were replaced"):
        run.result(run.call)


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


def test_a_publish_that_fails_after_its_call_returned_is_raised_by_the_next_one_once() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1, wait="none")
    assert run.result(run.call) is None
    run.fails("a", 1)
    with pytest.raises(WeightsRefused, match="wrong shape"):
        run.reserve()
    assert run.reserve().version == 2  # 1 was given away


def test_a_swap_that_is_late_after_its_call_returned_fails_the_next_publish() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1, wait="none")
    run.staged("a", 1)
    run.fire("")  # the version is released: only its swap is late
    assert run.released == [1]
    with pytest.raises(EngineLagging, match="v1 is swapping on a"):
        run.reserve()


def test_a_part_of_unknown_weights_is_refused() -> None:
    run = ControlDriver("a")
    run.released.append(7)  # by a process before this one
    with pytest.raises(WeightsRefused, match="continues with another process's weights"):
        run.reserve(is_part=True)


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


def test_a_rollback_whose_weights_are_refused_leaves_engines_paused_for_the_next_one() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    reserving = run.ask(wc.ReserveRequested, first_bad=1)
    run.hear("a", TurnsPaused(mode="abort"))
    assert run.result(reserving).version == 2
    publishing = run.ask(wc.PublishRequested, 2, [chunk(2)])
    assert run.fails("a", 2) == []
    with pytest.raises(WeightsRefused):
        run.result(publishing)
    run.pause(None)
    assert run.sent[-1] == ("a", Pause(mode="abort"))


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_after_a_rollback_that_came_to_nothing_the_next_whole_version_resumes_engines(
    is_cancelled: bool,
) -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    reserving = run.ask(wc.ReserveRequested, first_bad=1)
    run.hear("a", TurnsPaused(mode="abort"))
    assert run.result(reserving).version == 2
    publishing = run.ask(wc.PublishRequested, 2, [chunk(2)])
    if is_cancelled:
        run.do(wc.CallCancelled(publishing))
    run.fails("a", 2)
    run.state.shared.take_failure()
    reserved = run.reserve()
    run.ask(wc.PublishRequested, reserved.version, [chunk(reserved.version)], "none")
    run.staged("a", reserved.version)
    assert run.live("a", reserved.version) == [("a", Resume())]


def test_a_rollback_takes_up_the_number_of_a_version_that_was_given_up() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    assert run.reserve().version == 2
    run.ask(wc.PublishRequested, 2, [chunk(2)])
    run.fails("a", 2)
    run.state.shared.take_failure()
    reserving = run.ask(wc.ReserveRequested, first_bad=1)
    run.hear("a", TurnsPaused(mode="abort"))
    assert run.result(reserving).version == 2
    run.ask(wc.PublishRequested, 2, [chunk(2)])
    run.staged("a", 2)
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


def test_no_engine_is_sent_finish_during_a_pause_nor_a_pause_during_a_swap() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1)
    first = run.pause("keep")
    assert run.staged("a", 1) == []
    assert run.hear("a", TurnsPaused(mode="keep")) == finish("a", 1)
    assert run.result(first) is None
    resume = run.pause(None)
    assert run.sent[-1:] == finish("a", 1)
    assert run.live("a", 1) == [("a", Resume())]
    run.hear("a", TurnsResumed())
    assert run.result(resume) is None


def test_what_an_engine_says_of_a_pause_before_a_resume_does_not_count() -> None:
    run = ControlDriver("a")
    first = run.pause("wait")
    run.do(wc.CallCancelled(first))
    resume = run.pause(None)
    again = run.pause("wait")
    run.hear("a", TurnsPaused(mode="wait"))
    assert resume not in run.ended
    run.hear("a", TurnsResumed())
    assert run.result(resume) is None
    assert again not in run.ended
    run.hear("a", TurnsPaused(mode="wait"))
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


def test_engines_sleep_once_they_are_paused_and_no_weights_are_on_their_way() -> None:
    run = ControlDriver("a")
    run.reserve()
    run.publish(1)
    call = run.sleep(1, ["kv_cache"])
    assert run.sent[-1] == ("a", Pause(mode="abort"))
    run.staged("a", 1)
    assert run.hear("a", TurnsPaused(mode="abort")) == finish("a", 1)
    assert run.live("a", 1) == [("a", Sleep(request_id=0, level=1, tags=["kv_cache"]))]
    run.hear("a", Asleep(request_id=0, tags=["kv_cache"], freed_bytes=7))
    assert run.result(call) == 7
    assert run.state.sleeps.asleep == ("kv_cache",)


def test_a_publish_waits_until_engines_sleep() -> None:
    run = ControlDriver("a")
    call = run.sleep(1, ["kv_cache"])
    run.hear("a", TurnsPaused(mode="abort"))
    waiting = run.ask(wc.ReserveRequested)
    assert (call in run.ended, waiting in run.ended) == (False, False)
    run.hear("a", Asleep(request_id=0, tags=["kv_cache"], freed_bytes=7))
    assert run.result(waiting).version == 1


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


def test_weights_that_come_to_nothing_while_engines_wake_are_followed_by_those_released_last() -> (
    None
):
    run = ControlDriver("a")
    run.bring(1, "a")
    asleep(run, "a")
    run.wake("weights")
    wakes(run, "a", left=["kv_cache"], lacks=True)
    run.reserve()
    run.publish(2)
    whole = run.wake(*MEMORY_TAGS)
    wakes(run, "a", left=[], lacks=True)
    run.do(wc.CallCancelled(run.call))
    assert run.staged("a", 2) == staging("a", 1)
    run.staged("a", 1)
    run.live("a", 1)
    run.hear("a", TurnsResumed())
    assert run.result(whole) is None
    assert run.given_up == {}


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


def test_an_engine_that_joins_while_others_sleep_is_put_to_sleep() -> None:
    run = ControlDriver("a")
    run.bring(1, "a")
    asleep(run, "a", level=1)
    assert run.join("late", 1) == [("late", Pause(mode="abort")), ("late", INIT)]
    assert run.hear("late", TurnsPaused(mode="abort")) == [
        ("late", Sleep(request_id=1, level=1, tags=list(MEMORY_TAGS)))
    ]


def test_a_level_that_an_engine_can_not_sleep_at_is_refused() -> None:
    run = ControlDriver("a")
    run.join("b", 0, wc.EngineMemory(levels=(1,), asleep=(), needs_weights=False))
    with pytest.raises(ConfigError, match="b can't sleep at level 2"):
        run.result(run.sleep(2, ["weights"]))


def test_an_engine_that_does_not_wake_in_time_is_given_up() -> None:
    run = ControlDriver("a", "b")
    asleep(run, "a", "b", level=1)
    call = run.wake(*MEMORY_TAGS)
    wakes(run, "a", left=[], lacks=False)
    run.fire(call)
    assert run.given_up == {"b": "no wake within 60 s"}
    run.hear("a", TurnsResumed())
    assert run.result(call) is None


def test_a_wake_that_is_cancelled_leaves_the_next_one_to_continue() -> None:
    run = ControlDriver("a")
    asleep(run, "a", level=1)
    first, second = run.wake(*MEMORY_TAGS), run.wake(*MEMORY_TAGS)
    run.do(wc.CallCancelled(first))
    wakes(run, "a", left=[], lacks=False)
    run.hear("a", TurnsResumed())
    assert run.result(second) is None
    assert run.join("late", 0, AWAKE) == [("late", INIT)]
