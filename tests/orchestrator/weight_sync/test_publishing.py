"""New weights reach every engine as asked, whatever happens meanwhile."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import tidegate
from tidegate.errors import (
    ConfigError,
    EngineLagging,
    PublishDropped,
    PublishNeeded,
    WeightsRefused,
)
from tidegate.orchestrator.core.weight_versions import WeightVersions
from tidegate.simulation.run.serve import SimulatedRollouts
from tidegate.testing import ScriptedEngine, ServeInTests
from tidegate.transport import limits

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"group_size": 1, "groups_per_batch": 1, "max_staleness": 1}
LONG = "a long answer, for which an engine with ten tokens a second takes four seconds"


async def one_turn(episode: tidegate.Episode, task: Any) -> float:
    episode.append(str(task))
    await episode.generate(max_tokens=200)
    return 1.0


def weights_of(rollouts: SimulatedRollouts) -> WeightVersions:
    scheduler = rollouts.simulated.scheduler
    assert scheduler is not None
    return scheduler.control.state.weights


def swapping(rollouts: SimulatedRollouts) -> list[str]:
    """Return the engines that were sent a swap and have not swapped yet."""
    late = weights_of(rollouts).lagging_engines
    return [engine for lagging in late if lagging.phase == "swapping" for engine in lagging.engines]


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition every millisecond of virtual time."""
    while not condition():  # noqa: ASYNC110 - in virtual time it costs nothing
        await asyncio.sleep(0.001)


def versions(engines: list[ScriptedEngine]) -> list[int | None]:
    return [engine.weight_version for engine in engines]


# ---------------------------------------------------------------- waves


async def test_every_token_of_a_rollout_says_its_own_version_in_the_midst_of_waves(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engines = [tidegate_engine(step_s=0.1) for _ in range(2)]
    spans: dict[str, list[tuple[str, int]]] = {}

    async def solve(episode: tidegate.Episode, task: str) -> float:
        episode.append(task)
        turn = await episode.generate(max_tokens=40)
        spans[task] = [(span.engine, span.version) for span in turn.spans]
        return 1.0

    async with tidegate_serve(
        engines=engines, says=LONG, engines_per_update_wave=1, **SMALL
    ) as rollouts:
        evaluation = asyncio.create_task(rollouts.evaluate(["a", "b"], episode=solve))
        await until(lambda: all(engine.tokens >= 10 for engine in engines))
        await rollouts.publish({})
        await evaluation
    assert sorted(spans.values()) == [
        [("engine-0", 0), ("engine-0", 1)],
        [("engine-1", 0), ("engine-1", 1)],
    ]


async def test_an_engine_that_hangs_in_its_wave_is_given_up_and_the_others_continue(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engines = [tidegate_engine() for _ in range(3)]
    async with tidegate_serve(
        engines=engines, engines_per_update_wave=1, weight_update_timeout_s=5.0, **SMALL
    ) as rollouts:
        publish = asyncio.create_task(rollouts.publish({}))
        await until(lambda: swapping(rollouts) == ["engine-0"])
        engines[0].hang(20.0)
        with pytest.raises(EngineLagging, match="swapping on engine-0") as caught:
            await publish
        assert caught.value.engines == ["engine-0"]
        await until(lambda: versions(engines)[1:] == [1, 1])
        assert rollouts.version == 1


# ---------------------------------------------------------------- a second publish during the first


async def test_a_publish_while_another_is_staged_takes_its_place_and_both_return(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engines = [tidegate_engine(staging_s=1.0), tidegate_engine(staging_s=3.0)]
    async with tidegate_serve(engines=engines, **SMALL) as rollouts:
        seen = set(versions(engines))
        first = asyncio.create_task(rollouts.publish({}))
        await asyncio.sleep(2.0)  # one engine has staged it
        second = asyncio.create_task(rollouts.publish({}))
        while not first.done():
            seen.update(versions(engines))
            await asyncio.sleep(0.01)
        assert (await first, await second) == (1, 2)
        assert 1 not in seen  # no engine ever swapped to the first
        assert versions(engines) == [2, 2]
        assert rollouts.version == rollouts.statistics().trainer_version == 2


async def test_a_refusal_of_the_newer_weights_is_raised_by_both_calls(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(staging_s=1.0, refuses_publishes=2)
    async with tidegate_serve(engines=[engine], **SMALL) as rollouts:
        first = asyncio.create_task(rollouts.publish({}))
        await asyncio.sleep(0.5)
        results = await asyncio.gather(first, rollouts.publish({}), return_exceptions=True)
        assert [type(result) for result in results] == [WeightsRefused, WeightsRefused]
        assert (engine.weight_version, rollouts.version) == (0, 0)


async def test_an_older_call_raises_that_the_newer_weights_could_not_be_written(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(staging_s=1.0)
    async with tidegate_serve(engines=[engine], **SMALL) as rollouts:
        first = asyncio.create_task(rollouts.publish({}))
        await asyncio.sleep(0.5)
        no_tensor: Any = {"lm_head.weight": "not a tensor"}
        with pytest.raises(Exception, match=r"lm_head|str"):
            await rollouts.publish(no_tensor)
        with pytest.raises(PublishDropped, match="v1 were replaced"):
            await first
        assert engine.weight_version == 0
        assert await rollouts.publish({}) == 2


# ---------------------------------------------------------------- until when a publish waits


async def test_a_publish_may_return_when_it_is_staged_and_is_live_soon_after(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engines = [tidegate_engine(step_s=0.1, staging_s=1.0) for _ in range(2)]
    async with tidegate_serve(engines=engines, says=LONG, pause_mode="wait", **SMALL) as rollouts:
        evaluation = asyncio.create_task(rollouts.evaluate(range(2), episode=one_turn))
        await until(lambda: all(engine.tokens for engine in engines))
        assert await rollouts.publish({}, wait="staged") == 1
        statistics = rollouts.statistics()
        assert (statistics.trainer_version, statistics.live_version) == (1, 0)
        assert versions(engines) == [0, 0]
        await evaluation
        await until(lambda: versions(engines) == [1, 1])


async def test_a_publish_may_return_at_once_and_its_number_is_taken(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(staging_s=5.0)
    loop = asyncio.get_running_loop()
    async with tidegate_serve(engines=[engine], **SMALL) as rollouts:
        began_s = loop.time()
        assert await rollouts.publish({}, wait="none") == 1
        assert loop.time() == began_s
        statistics = rollouts.statistics()
        assert (statistics.staging_version, statistics.trainer_version) == (1, 0)
        assert await rollouts.publish({}) == 2
        assert rollouts.statistics().staging_version is None
        assert engine.weight_version == 2


async def test_what_a_publish_in_the_background_failed_of_is_raised_by_the_next_one_once(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(refuses_publishes=1)
    async with tidegate_serve(engines=[engine], **SMALL) as rollouts:
        assert await rollouts.publish({}, wait="none") == 1
        await until(lambda: rollouts.statistics().publish_failure is not None)
        assert "refused weights v1" in str(rollouts.statistics().publish_failure)
        with pytest.raises(WeightsRefused, match="refused weights v1"):
            await rollouts.publish({})
        assert rollouts.statistics().publish_failure is None
        assert await rollouts.publish({}) == 2  # 1 was given away


async def test_the_error_of_a_publish_in_the_background_is_raised_to_the_waiter_for_a_batch(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(staging_s=1.0, refuses_publishes=1)
    async with tidegate_serve(engines=[engine], says="a", **SMALL) as rollouts:
        batches = rollouts.batches(itertools.count(), episode=one_turn)
        await anext(batches)
        await rollouts.publish({}, wait="none")
        with pytest.raises(WeightsRefused, match="refused weights v1"):
            await anext(batches)


async def test_no_batch_is_handed_over_between_a_publish_and_its_certainty(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(staging_s=5.0)
    loop = asyncio.get_running_loop()
    async with tidegate_serve(engines=[engine], says="a", **SMALL) as rollouts:
        batches = rollouts.batches(itertools.count(), episode=one_turn)
        assert (await anext(batches)).trainer_version == 0
        await until(lambda: rollouts.statistics().buffered_groups == 1)
        published_s = loop.time()
        await rollouts.publish({}, wait="none")
        second = await anext(batches)
        assert loop.time() - published_s >= 5.0
        assert (second.trainer_version, second.staleness.tolist()) == (1, [1])
        await until(lambda: rollouts.statistics().training_groups == 1)  # the second's


async def test_a_batch_that_can_not_fill_says_so_after_a_publish_in_the_background_too(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(staging_s=1.0)
    settings = {**SMALL, "max_staleness": 0}
    async with tidegate_serve(engines=[engine], says="a", **settings) as rollouts:
        batches = rollouts.batches(itertools.count(), episode=one_turn)
        await anext(batches)
        await rollouts.publish({}, wait="none")
        await anext(batches)
        with pytest.raises(PublishNeeded):
            await anext(batches)


async def test_a_run_that_has_ended_gives_up_no_engine_for_a_version_it_did_not_stage(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    slow = tidegate_engine(staging_s=60.0)
    async with tidegate_serve(engines=[slow], weight_update_timeout_s=5.0, **SMALL) as rollouts:
        scheduler = rollouts.simulated.scheduler
        assert scheduler is not None
        await rollouts.publish({}, wait="none")
    await asyncio.sleep(6.0)
    assert [*scheduler.fleet.engines] == ["engine-0"]


async def test_there_are_three_things_to_wait_for(tidegate_serve: ServeInTests) -> None:
    async with tidegate_serve() as rollouts:
        unknown: Any = "swapped"
        with pytest.raises(ConfigError, match="'live', 'staged' or 'none', got 'swapped'"):
            await rollouts.publish({}, wait=unknown)
        assert await rollouts.publish({}) == 1


async def test_weights_that_no_message_holds_are_refused_to_their_caller_and_the_next_ones_come(
    tidegate_serve: ServeInTests,
    tidegate_engine: type[ScriptedEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(limits.FRAME_BYTES_MAX_BY_KIND, "update_weights", 70_000)
    engines = [tidegate_engine(), tidegate_engine()]
    async with tidegate_serve(engines=engines, **SMALL) as rollouts:
        assert await rollouts.publish({}) == 1
        with pytest.raises(WeightsRefused, match="the names and offsets of 1000 tensors take"):
            await rollouts.publish({f"{n:0100}": torch.zeros(1) for n in range(1000)})
        assert await rollouts.publish({}) == 2
        assert versions(engines) == [2, 2]
        assert (await rollouts.evaluate(range(4), episode=one_turn)).failures == 0


async def test_a_reservation_whose_caller_is_cancelled_as_it_gets_it_is_free_for_the_next(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    async with tidegate_serve(engines=[tidegate_engine()], says=LONG, **SMALL) as rollouts:
        assert rollouts.simulated.scheduler is not None
        control = rollouts.simulated.scheduler.control
        await control.reserve()
        waiting = asyncio.create_task(control.reserve())
        await asyncio.sleep(0)
        control.release()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await control.reserve()).version == 1
        control.release()
