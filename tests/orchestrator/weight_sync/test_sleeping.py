"""All engines sleep and wake as the trainer asks, whatever happens meanwhile."""

import asyncio
from typing import Any

import pytest

from tests.orchestrator.weight_sync.test_pausing import SAID, SMALL, Asked, tokens, until
from tidegate.errors import ConfigError, SleepFailed
from tidegate.testing import ScriptedEngine, ServeInTests

GIB = 1 << 30


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
async def test_no_turn_runs_while_engines_sleep_and_all_continue_when_they_wake(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine], mode: Any
) -> None:
    asked, engines = Asked(), [tidegate_engine(step_s=0.1), tidegate_engine(step_s=0.03)]
    async with tidegate_serve(engines=engines, says=SAID, **SMALL) as rollouts:
        evaluation = asyncio.create_task(rollouts.evaluate(range(30), episode=asked.solve))
        await until(lambda: all(engine.tokens > 20 for engine in engines))
        assert await rollouts.sleep(mode=mode) == 4 * GIB
        statistics = rollouts.statistics()
        assert (statistics.asleep, statistics.pause_mode) == (("weights", "kv_cache"), mode)
        before = tokens(engines)
        await asyncio.sleep(70.0)  # longer than anybody may be silent, or stuck
        await rollouts.resume()  # lifts the user's own pause, of which there is none
        assert tokens(engines) == before
        assert rollouts.statistics().stuck == ()
        await rollouts.wake()
        assert (rollouts.statistics().asleep, rollouts.statistics().pause_mode) == ((), None)
        assert (await evaluation).failures == 0
    assert {turn.text for turn in asked.turns} == {SAID}


async def test_frozen_turns_whose_kv_slept_are_reported_as_computed_again(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    asked, engine = Asked(), tidegate_engine(step_s=0.1)
    async with tidegate_serve(engines=[engine], says=SAID, kv_policy="keep", **SMALL) as rollouts:
        evaluation = asyncio.create_task(rollouts.evaluate(["?"], episode=asked.solve))
        await until(lambda: engine.tokens >= 5)
        await rollouts.sleep(mode="keep")
        await rollouts.wake(["weights"])
        await rollouts.publish({})
        await rollouts.wake()
        await evaluation
    assert [(span.version, span.kv_label) for span in asked.turns[0].spans] == [
        (0, "fresh"),
        (1, "fresh"),
    ]


async def test_a_trainer_wakes_the_weights_publishes_and_then_wakes_the_kv_cache(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    asked, engines = Asked(), [tidegate_engine(), tidegate_engine()]
    async with tidegate_serve(
        engines=engines, says=SAID, engines_per_update_wave=1, **SMALL
    ) as rollouts:
        await rollouts.publish({})
        await rollouts.sleep(2)
        await rollouts.wake(["weights"])
        assert rollouts.statistics().asleep == ("kv_cache",)
        assert await rollouts.publish({}) == 2
        assert [engine.weight_version for engine in engines] == [2, 2]
        await rollouts.wake(["kv_cache"])
        assert (await rollouts.evaluate(range(4), episode=asked.solve)).failures == 0


async def test_a_publish_alone_wakes_discarded_weights_and_runs_no_turn(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    asked, engines = Asked(), [tidegate_engine(), tidegate_engine(staging_s=2.0)]
    async with tidegate_serve(
        engines=engines, says=SAID, engines_per_update_wave=1, **SMALL
    ) as rollouts:
        await rollouts.publish({})
        await rollouts.sleep(2)
        await rollouts.publish({})
        assert rollouts.statistics().asleep == ("kv_cache",)
        evaluation = asyncio.create_task(rollouts.evaluate(range(4), episode=asked.solve))
        await asyncio.sleep(20.0)
        assert tokens(engines) == 0
        await rollouts.wake()
        assert (await evaluation).failures == 0


async def test_an_engine_that_comes_while_others_sleep_is_brought_up_to_date_and_put_to_sleep(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    asked, engines = Asked(), [tidegate_engine(), tidegate_engine(joins_at_s=5.0)]
    async with tidegate_serve(engines=engines, says=SAID, **SMALL) as rollouts:
        await rollouts.publish({})
        await rollouts.sleep()
        evaluation = asyncio.create_task(rollouts.evaluate(range(4), episode=asked.solve))
        await until(lambda: engines[1].weight_version == 1)
        engines[0].crash()  # another process takes its place
        await asyncio.sleep(20.0)
        assert (tokens(engines), rollouts.statistics().asleep) == (0, ("weights", "kv_cache"))
        assert [engine.weight_version for engine in engines] == [1, 1]
        assert [engine.asleep for engine in engines] == [["weights", "kv_cache"]] * 2
        await rollouts.wake()
        assert (await evaluation).failures == 0


async def test_what_the_user_paused_stays_paused_after_a_sleep(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    async with tidegate_serve(engines=[tidegate_engine()], **SMALL) as rollouts:
        await rollouts.pause("keep")
        await rollouts.sleep(mode="abort", tags=["kv_cache"])
        await rollouts.wake()
        assert rollouts.statistics().pause_mode == "keep"
        await rollouts.wake()  # harmless
        await rollouts.resume()


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ({"level": 3}, "level must be 1 (offload weights) or 2 (discard them), got 3"),
        ({"mode": "nap"}, "got 'nap'"),
        ({"tags": ["weights", "dreams"]}, "got ['weights', 'dreams']"),
        ({"tags": "weights"}, "got 'weights'"),
        ({"tags": []}, "got []"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused_and_nothing_sleeps(
    tidegate_serve: ServeInTests,
    tidegate_engine: type[ScriptedEngine],
    asked: dict[str, Any],
    reported: str,
) -> None:
    async with tidegate_serve(engines=[tidegate_engine()], **SMALL) as rollouts:
        with pytest.raises(ConfigError) as refused:
            await rollouts.sleep(**asked)
        assert reported in str(refused.value)
        assert rollouts.statistics().pause_mode is None


async def test_engines_that_cannot_sleep_are_named_and_continue(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(sleep_levels=(1,))
    async with tidegate_serve(engines=[engine], **SMALL) as rollouts:
        with pytest.raises(ConfigError, match="engine-0 can't sleep at level 2"):
            await rollouts.sleep(2)
        assert rollouts.statistics().pause_mode is None


async def test_an_engine_that_finds_no_memory_to_wake_in_is_named_and_can_be_woken_later(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    asked, engines = Asked(), [tidegate_engine(), tidegate_engine(refuses_wakes=1)]
    async with tidegate_serve(engines=engines, says=SAID, **SMALL) as rollouts:
        await rollouts.sleep()
        with pytest.raises(SleepFailed) as failed:
            await rollouts.wake()
        assert failed.value.failures == {"engine-1": "out of memory, as its author wants it"}
        assert [engine.asleep for engine in engines] == [[], ["weights", "kv_cache"]]
        assert rollouts.statistics().pause_mode == "abort"
        await rollouts.wake()
        assert (await rollouts.evaluate(range(4), episode=asked.solve)).failures == 0
