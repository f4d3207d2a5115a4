"""Everything without progress is named, and nothing else."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models

from tests.orchestrator.core.control_driver import ControlDriver
from tests.orchestrator.core.driver import Driver
from tidegate.errors import RunBlocked
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.episodes.runner import ENDED_REMEMBERED, EpisodeLeakTracker
from tidegate.orchestrator.fleet.fleet import Fleet
from tidegate.orchestrator.scheduler import loop_watch
from tidegate.orchestrator.scheduler.run_watch import RunWatch
from tidegate.orchestrator.settings.config import FleetSettings, SamplingSettings
from tidegate.orchestrator.telemetry.watchdog import STUCK_MAX, Stuck, Watchdog
from tidegate.policies.rounds import OverSampling
from tidegate.policies.staleness import StalenessPolicy
from tidegate.simulation.engine.spec import EngineCosts, SimulatedEngineSpec, hello_of
from tidegate.simulation.run.virtual_time import run_in_virtual_time
from tidegate.transport.messages import (
    STOP,
    EngineHeartbeat,
    Message,
    encode,
)

SPEC = SimulatedEngineSpec(costs=EngineCosts(slots=4))

STUCK_AFTER_S = 60.0

WAIT_S = 60.0
"""Timeout far above any duration here: reaching it is a failure."""


def a_round(watchdog: Watchdog, now_s: float, **progress: int) -> list[Stuck]:
    """Check engines with the given progress in one round."""
    watchdog.begin(now_s)
    for who, done in progress.items():
        if watchdog.is_stuck("engine", who, done):
            watchdog.report("engine", who, f"as far as {done}")
    return watchdog.end()


def test_a_thing_without_progress_for_the_time_allowed_is_reported_once_with_its_wait() -> None:
    watchdog = Watchdog(60.0)
    assert a_round(watchdog, 100.0, a=0) == []
    assert a_round(watchdog, 159.0, a=0) == []
    assert a_round(watchdog, 160.0, a=0) == [Stuck("engine", "a", "as far as 0", 60.0)]
    assert a_round(watchdog, 175.0, a=0) == []
    assert watchdog.stuck == (Stuck("engine", "a", "as far as 0", 75.0),)


def test_what_gets_on_or_is_gone_is_stuck_no_more_and_may_be_named_again() -> None:
    watchdog = Watchdog(60.0)
    for now_s in (0.0, 60.0):
        a_round(watchdog, now_s, a=0, b=0)
    assert [stuck.name for stuck in watchdog.stuck] == ["a", "b"]
    assert a_round(watchdog, 75.0, a=1) == []
    assert watchdog.stuck == ()
    assert a_round(watchdog, 134.0, a=1, b=0) == []
    assert [stuck.name for stuck in a_round(watchdog, 135.0, a=1)] == ["a"]


def test_some_things_may_take_longer_than_others() -> None:
    watchdog = Watchdog(10.0)
    found = []
    for now_s in (0.0, 49.0, 50.0):
        watchdog.begin(now_s)
        found.append([watchdog.is_stuck("trainer", "x", 0, 5.0), watchdog.is_stuck("turn", 7, 0)])
        watchdog.end()
    assert found == [[False, False], [False, True], [True, True]]


def test_of_very_many_the_longest_are_kept() -> None:
    watchdog = Watchdog(1.0)
    for now_s in range(2 * STUCK_MAX):
        a_round(watchdog, float(now_s), **{f"e{n}": 0 for n in range(now_s + 1)})
    assert [stuck.name for stuck in watchdog.stuck] == [f"e{n}" for n in range(STUCK_MAX)]


# ---------------------------------------------------------------- a run


class Watched:
    """A core, a fleet and weight control, watched on a virtual clock."""

    def __init__(self, policy: StalenessPolicy | None) -> None:
        self.driver = Driver(max_staleness=1, groups_per_batch=1, group_size=1, policy=policy)
        self.fleet = Fleet(
            FleetSettings(
                heartbeat_interval_s=1.0,
                engine_timeout_s=1e9,
                orchestrator_timeout_s=1e9,
                credit_steps=8,
            ),
            lambda peer, message: True,
        )
        self.weights = ControlDriver()
        self.leaks = EpisodeLeakTracker()
        self.watch = RunWatch(
            self.driver.core,
            self.fleet,
            self.weights.state,
            self.leaks,
            stuck_after_s=STUCK_AFTER_S,
        )

    def join(self, engine: str) -> None:
        self.driver.join(engine)
        self.weights.join(engine)
        self.hear(engine, hello_of(engine, 1, SPEC))

    def hear(self, engine: str, message: Message) -> None:
        self.fleet.receive([(engine.encode(), encode(message))], 0.0)

    def ask_turns(self, **options: Any) -> None:
        """Start the groups that may start, and a turn of each."""
        self.driver.fill()
        for rollout in list(self.driver.running.values()):
            self.driver.ask_turn(rollout, **options)

    def sample(self, engine: str, handle: int, finish: int = 0) -> None:
        self.driver.sample(engine, handle, 1, finish)
        self.fleet.engines[engine].tokens += 1

    @property
    def stuck(self) -> list[tuple[str, str]]:
        return [(stuck.kind, stuck.name) for stuck in self.watch.stuck]


def watched(
    story: "Callable[[Watched], object]",
    policy: StalenessPolicy | None = None,
) -> Watched:
    """Run a story under a watchdog, in virtual time."""
    run = Watched(policy)

    async def report_twice() -> None:
        watching = asyncio.create_task(run.watch.run())
        try:
            result = story(run)
            if asyncio.iscoroutine(result):
                await result
        finally:
            watching.cancel()

    run_in_virtual_time(report_twice())
    return run


async def long() -> None:
    """Sleep longer than anything but the trainer may take."""
    await asyncio.sleep(1.3 * STUCK_AFTER_S)


def test_an_engine_that_makes_no_step_is_named_and_not_each_of_its_turns() -> None:
    async def story(run: Watched) -> None:
        run.join("engine-0")
        run.ask_turns()
        await long()

    run = watched(story)
    (stuck,) = run.watch.stuck
    assert (stuck.kind, stuck.name) == ("engine", "engine-0")
    assert stuck.where.startswith("no step of its 2 turns has arrived")
    assert STUCK_AFTER_S <= stuck.waited_s <= 1.3 * STUCK_AFTER_S


def test_a_turn_without_tokens_on_an_engine_that_makes_steps_is_named_with_its_place() -> None:
    async def story(run: Watched) -> None:
        run.join("engine-0")
        run.ask_turns(max_tokens=1000)
        for _ in range(20):
            run.sample("engine-0", 1)
            await asyncio.sleep(STUCK_AFTER_S / 10)

    run = watched(story)
    (stuck,) = run.watch.stuck
    assert (stuck.kind, stuck.name) == ("turn", "rollout 0")
    assert stuck.where.startswith("its turn 1 (handle 0) on engine-0 has 0 tokens")


def test_turns_that_an_engine_has_no_room_for_yet_are_not_stuck() -> None:
    async def story(run: Watched) -> None:
        run.join("engine-0")
        run.ask_turns(max_tokens=1000)
        beat = EngineHeartbeat(
            weight_version=0, running_turns=1, waiting_turns=1, free_blocks=0, sent_us=0
        )
        run.hear("engine-0", beat)
        for _ in range(20):
            run.sample("engine-0", 1)
            await asyncio.sleep(STUCK_AFTER_S / 10)

    assert watched(story).stuck == []


def test_turns_for_which_there_is_no_engine_are_one_thing_that_is_stuck() -> None:
    async def story(run: Watched) -> None:
        run.ask_turns()
        await long()

    run = watched(story)
    (stuck,) = run.watch.stuck
    assert str(stuck).startswith("no engine (engine): no progress for 6")
    assert "2 turns wait for an engine that serves v0 or newer; connected: none" in stuck.where


def test_an_episode_in_its_own_code_is_named_with_its_turn_and_the_beginning_of_its_task() -> None:
    async def story(run: Watched) -> None:
        run.join("engine-0")
        run.driver.do(ev.TaskArrived("a question of many words, " * 100))
        (rollout,) = run.driver.running.values()
        run.driver.ask_turn(rollout)
        run.sample("engine-0", 0, STOP)
        await long()

    run = watched(story)
    (stuck,) = run.watch.stuck
    assert (stuck.kind, stuck.name) == ("episode", "rollout 0")
    assert stuck.where.startswith("after turn 1 its episode neither requests another nor returns")
    assert "task 'a question of many" in stuck.where
    assert len(stuck.where) < 200


def test_a_publish_is_named_with_its_phase_and_the_engines_it_waits_for() -> None:
    async def story(run: Watched) -> None:
        for engine in ("engine-0", "engine-1", "engine-2"):
            run.join(engine)
        run.weights.reserve()
        run.weights.publish(1)
        run.weights.staged("engine-1", 1)
        await long()

    run = watched(story)
    assert {(stuck.kind, stuck.name, stuck.where) for stuck in run.watch.stuck} == {
        ("publish", "v1 staging", "v1 is staging on engine-0, engine-2"),
        ("publish", "v1 staged", "v1 is staged on engine-1"),
    }


def test_a_trainer_that_holds_its_batches_while_all_else_is_done_is_named_after_longer() -> None:
    async def story(run: Watched) -> None:
        run.join("engine-0")
        run.driver.fill()
        for rollout in list(run.driver.running.values()):
            run.driver.return_reward(rollout)
        run.driver.do(ev.BatchRequested())
        await asyncio.sleep(4 * STUCK_AFTER_S)
        assert run.stuck == []
        await asyncio.sleep(2 * STUCK_AFTER_S)

    run = watched(story)
    (stuck,) = run.watch.stuck
    assert stuck.kind == "trainer"
    held = "holds 1 groups that are in no published version (batches that no publish has named: 1)"
    assert f"{held}; 1 are buffered" in stuck.where


def test_a_trainer_for_whose_publish_generation_is_paused_is_named_though_groups_run() -> None:
    async def story(run: Watched) -> None:
        run.join("engine-0")
        run.driver.fill()
        run.driver.return_reward(next(iter(run.driver.running.values())))
        run.driver.do(ev.BatchRequested())
        for rollout in run.driver.running.values():
            run.driver.ask_turn(rollout)
        await asyncio.sleep(6 * STUCK_AFTER_S)

    run = watched(story, OverSampling(groups_per_batch=1, factor=2.0))
    assert run.driver.core.running_groups == 1
    (stuck,) = [stuck for stuck in run.watch.stuck if stuck.kind == "trainer"]
    assert "0 are buffered, and generation is paused until it publishes" in stuck.where


def test_an_iterator_that_gives_no_task_while_the_trainer_waits_is_named() -> None:
    async def story(run: Watched) -> None:
        run.join("engine-0")
        run.driver.do(ev.BatchRequested())
        await long()

    assert watched(story).stuck == [("tasks", "the iterator of tasks")]


def test_a_run_in_which_everything_gets_on_is_left_alone() -> None:
    async def story(run: Watched) -> None:
        run.join("engine-0")
        handle = 0
        for _ in range(8):
            run.driver.fill()
            for rollout in list(run.driver.running.values()):
                run.driver.ask_turn(rollout)
                await asyncio.sleep(STUCK_AFTER_S / 2)
                run.sample("engine-0", handle, STOP)
                handle += 1
                await asyncio.sleep(STUCK_AFTER_S / 2)
                run.driver.return_reward(rollout)
            run.driver.do(ev.BatchRequested())
            run.driver.publish()
            run.driver.swap("engine-0")
            assert run.stuck == []

    assert watched(story).stuck == []


def test_episodes_that_cannot_be_ended_or_are_kept_after_their_end_are_named() -> None:
    kept: list[Episode] = []

    async def story(run: Watched) -> None:
        run.leaks.uncancelled.add(17)
        for index in range(ENDED_REMEMBERED):
            kept.append(an_episode(index))
            run.leaks.ended.append(weakref.ref(kept[-1]))
        await long()

    run = watched(story)
    assert sorted(run.stuck) == [
        ("episode", "rollout 17"),
        ("memory", "episodes that have ended"),
    ]
    said = " ".join(stuck.where for stuck in run.watch.stuck)
    assert f"{ENDED_REMEMBERED} of the last {ENDED_REMEMBERED} are still referenced" in said


def test_episodes_in_reference_cycles_are_collected_and_not_reported() -> None:
    async def story(run: Watched) -> None:
        for index in range(ENDED_REMEMBERED):
            episode = an_episode(index)
            episode.agents["itself"] = episode
            run.leaks.ended.append(weakref.ref(episode))
        await long()

    gc.disable()
    try:
        assert watched(story).stuck == []
    finally:
        gc.enable()


def an_episode(index: int) -> Episode:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    model = ModelFiles(Path("nowhere"), tokenizer, ())
    defaults = SamplingSettings(max_tokens=1, temperature=1.0, seed=0)
    return Episode(Rollout(index, 0, index), model, cast(Any, None), defaults)


def test_what_is_stuck_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story(run: Watched) -> None:
        run.driver.do(ev.BatchRequested())
        await asyncio.sleep(10 * STUCK_AFTER_S)

    with caplog.at_level(logging.WARNING, "tidegate"):
        watched(story)
    (record,) = caplog.records
    assert record.getMessage() == (
        "stuck=tasks name='the iterator of tasks' waited_s=60 "
        "where='2 groups may start, but it yields no task'"
    )


# ---------------------------------------------------------------- the loop itself


def keep_the_loop(over: threading.Event) -> None:
    """Block the loop, as no episode should."""
    over.wait(WAIT_S)


async def test_the_longest_block_of_the_loop_is_measured_while_it_lasts_and_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_watch, "CHECK_INTERVAL_S", 0.02)
    watch = loop_watch.LoopWatch(limit_s=WAIT_S, on_blocked=lambda error: None)
    seen: list[float] = []
    over = threading.Event()

    def read_stuck() -> None:
        while watch.longest_block_s < 0.2:
            pass
        seen.append(watch.longest_block_s)
        over.set()

    watch.start()
    threading.Thread(target=read_stuck, daemon=True).start()
    keep_the_loop(over)  # the figure grows while the loop is blocked
    for _ in range(3):  # the loop says that it is alive
        await asyncio.sleep(0)
    longest = watch.longest_block_s
    watch.stop()
    assert longest >= seen[0] >= 0.2
    assert watch.longest_block_s == longest


async def test_code_that_keeps_the_loop_is_named_by_its_task_and_line_and_ends_the_run_at_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_watch, "REPORT_AFTER_S", 0.1)
    monkeypatch.setattr(loop_watch, "LIMIT_MIN_S", 0.3)
    monkeypatch.setattr(loop_watch, "CHECK_INTERVAL_S", 0.02)
    over, errors = threading.Event(), list[RunBlocked]()

    def on_blocked(error: RunBlocked) -> None:
        assert watch.blocked is not None
        errors.append(error)
        over.set()

    async def rude() -> None:
        keep_the_loop(over)

    watch = loop_watch.LoopWatch(limit_s=0.2, on_blocked=on_blocked)
    with caplog.at_level(logging.WARNING, "tidegate"):
        watch.start()
        await asyncio.create_task(rude(), name="rollout 7")
    watch.stop()
    (error,) = errors
    assert error.task_name == "rollout 7"
    assert error.where.startswith(f"keep_the_loop at {__file__}:")
    assert "asyncio.to_thread" in str(error)
    reported = [r.getMessage() for r in caplog.records if "name='rollout 7'" in r.getMessage()]
    assert len(reported) == 1
    assert "stuck=loop" in reported[0]
    assert "keep_the_loop at" in reported[0]
    assert watch.blocked is None
