"""A pause holds on all engines, and turns that it ended continue where they were."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import tidegate
from tidegate.errors import ConfigError
from tidegate.testing import ScriptedEngine, ServeInTests, VirtualTime

SMALL: dict[str, Any] = {"group_size": 1, "groups_per_batch": 1, "max_staleness": 1}
SAID = "abcdefghijklmnopqrstuvwxyz"


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition every millisecond of virtual time."""
    while not condition():  # noqa: ASYNC110 - in virtual time it costs nothing
        await asyncio.sleep(0.001)


def tokens(engines: list[ScriptedEngine]) -> int:
    return sum(engine.tokens for engine in engines)


class Asked:
    """Collects the turns of an evaluation."""

    def __init__(self) -> None:
        self.turns: list[tidegate.GeneratedTurn] = []

    async def solve(self, episode: tidegate.Episode, task: Any) -> float:
        episode.append(str(task))
        self.turns.append(await episode.generate(max_tokens=40))
        return 1.0


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
async def test_no_turn_runs_after_a_pause_until_it_is_lifted(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine], mode: Any
) -> None:
    asked, engines = Asked(), [tidegate_engine(step_s=0.1), tidegate_engine(step_s=0.03)]
    async with tidegate_serve(engines=engines, says=SAID, **SMALL) as rollouts:
        evaluation = asyncio.create_task(rollouts.evaluate(range(30), episode=asked.solve))
        await until(lambda: all(engine.tokens > 20 for engine in engines))
        await rollouts.pause(mode)
        assert rollouts.statistics().pause_mode == mode
        before, ended = tokens(engines), len(asked.turns)
        await asyncio.sleep(60.0)
        assert (tokens(engines), len(asked.turns)) == (before, ended)
        assert (ended > 0) == (mode == "wait")
        assert rollouts.statistics().stuck == ()
        await rollouts.resume()
        assert rollouts.statistics().pause_mode is None
        assert (await evaluation).failures == 0
    assert {turn.text for turn in asked.turns} == {SAID}


async def test_aborted_turns_wait_with_their_tokens_and_continue_from_there(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    asked, engine = Asked(), tidegate_engine()
    async with tidegate_serve(engines=[engine], says=SAID, **SMALL) as rollouts:
        evaluation = asyncio.create_task(rollouts.evaluate(["?"], episode=asked.solve))
        await until(lambda: engine.tokens >= 5)
        await rollouts.pause("abort")
        had = engine.tokens
        await rollouts.resume()
        await evaluation
    assert [request.said for request in engine.requests] == ["", SAID[:had]]
    assert asked.turns[0].text == SAID


async def test_weights_are_published_during_a_pause_and_serve_after_it(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    asked, engines = Asked(), [tidegate_engine(step_s=0.1), tidegate_engine(step_s=0.1)]
    async with tidegate_serve(
        engines=engines, says=SAID, pause_mode="wait", engines_per_update_wave=1, **SMALL
    ) as rollouts:
        evaluation = asyncio.create_task(rollouts.evaluate(range(2), episode=asked.solve))
        await until(lambda: all(engine.tokens >= 5 for engine in engines))
        await rollouts.pause("keep")
        before = tokens(engines)
        assert await rollouts.publish({}) == 1
        assert tokens(engines) == before
        await rollouts.resume()
        await evaluation
    for turn in asked.turns:
        assert [span.version for span in turn.spans] == [0, 1]


async def test_to_resume_what_runs_does_nothing_and_unknown_modes_are_refused(
    tidegate_serve: ServeInTests,
) -> None:
    async with tidegate_serve() as rollouts:
        await rollouts.resume()
        unknown: Any = "freeze"
        with pytest.raises(ConfigError, match="'abort', 'keep' or 'wait', got 'freeze'"):
            await rollouts.pause(unknown)


def test_a_trainer_that_is_not_async_pauses_and_resumes_as_well(
    tidegate_serve_sync: Callable[..., tidegate.SyncRollouts], tidegate_virtual_time: VirtualTime
) -> None:
    asked = Asked()
    with tidegate_serve_sync(says=SAID, **SMALL) as rollouts:
        for _ in rollouts.batches(range(4), episode=asked.solve):
            rollouts.pause()
            before = rollouts.statistics().ledger.generated
            tidegate_virtual_time.sleep(600.0)
            assert rollouts.statistics().ledger.generated == before
            rollouts.publish({}, wait="staged")
            rollouts.resume()
        assert rollouts.statistics().trained_rollouts == 4
