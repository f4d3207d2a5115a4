"""Streams are pushed by engines' steps: over the real scheduler, and engines in virtual time."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tidegate.orchestrator.fleet.pending_futures import PendingFutures
from tidegate.serving.openai.active_requests import ActiveRequest, ActiveRequests
from tidegate.serving.openai.model_info import VersionLabels
from tidegate.serving.openai.outputs import (
    Output,
    OutputReader,
    OutputTokenizer,
    StopConditions,
)
from tidegate.serving.openai.requests import Prompt
from tidegate.serving.openai.response_bodies import running_outputs
from tidegate.simulation.engine.scripted import ScriptedEngine, files_of
from tidegate.simulation.run.serve import ServeInTests, SimulatedRollouts

SAID = "There is a tide in the affairs of men."
MODEL = files_of(Path("any model"))
STEP_S = 0.1


def stop_conditions(*stop_strings: str, also: str = "") -> StopConditions:
    ids = {*MODEL.stop_token_ids, *MODEL.tokenizer.encode(also).ids}
    return StopConditions(frozenset(ids), frozenset(MODEL.stop_token_ids), stop_strings)


class Serving:
    """Requests of a simulated run, and their streams."""

    def __init__(self, rollouts: SimulatedRollouts) -> None:
        assert rollouts.simulated.scheduler is not None
        self.requests = ActiveRequests(rollouts.simulated.scheduler.handle)
        self.subscribed = rollouts.simulated.scheduler.engines._pending.new_tokens

    def begin(self, stops: StopConditions, choices: int = 1) -> ActiveRequest:
        options = {"max_tokens": 100, "stop_token_ids": sorted(stops.stop_token_ids)}
        return self.requests.begin("r", [(Prompt([1, 2, 3]), options)] * choices)

    @staticmethod
    async def parts(request: ActiveRequest, stops: StopConditions) -> AsyncIterator[Output]:
        tokenizer, labels = OutputTokenizer(MODEL.encoder), VersionLabels()
        readers = [
            OutputReader(each, stops, tokenizer, labels, each.index) for each in request.choices
        ]
        async for output in running_outputs(readers):
            yield output
        await request.wait()  # raises what a choice has failed with


@asynccontextmanager
async def serving(
    serve: ServeInTests, engines: list[ScriptedEngine], says: str = SAID
) -> AsyncIterator[Serving]:
    async with serve(engines=engines, says=says, group_size=1, groups_per_batch=1) as rollouts:
        yield Serving(rollouts)


async def test_a_stream_has_each_token_when_its_step_arrives(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    stops, now_s = stop_conditions(), asyncio.get_running_loop().time
    async with serving(tidegate_serve, [tidegate_engine(step_s=STEP_S)]) as served:
        request = served.begin(stops)
        came = [(now_s(), part) async for part in served.parts(request, stops)]
        assert not served.subscribed
    *texts, last = [part.text for _, part in came]
    assert (texts, last) == (list(SAID), "")
    assert came[-1][1].finish_reason == "stop"
    begun_s = came[0][0]  # a frame takes up to 1 ms, which is rounded off
    steps = [round((at_s - begun_s) / STEP_S, 1) for at_s, _ in came]
    assert steps == list(range(len(SAID) + 1))


async def test_a_reader_that_is_slow_gets_what_came_meanwhile_as_one_part(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    stops = stop_conditions()
    async with serving(tidegate_serve, [tidegate_engine(step_s=STEP_S)]) as served:
        request, texts = served.begin(stops), []
        async for part in served.parts(request, stops):
            texts.append(part.text)
            await asyncio.sleep(10.5 * STEP_S)
            assert len(served.subscribed) == (not request.choices[0].ended.done())
    assert "".join(texts) == SAID
    assert [len(text) for text in texts] == [1, 10, 11, 10, 6]


async def test_a_stream_continues_on_another_engine_after_a_crash(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    stops = stop_conditions()
    dying = tidegate_engine(crashes_at_token=5, restart_s=math.inf)
    async with serving(tidegate_serve, [dying, tidegate_engine()]) as served:
        request, text = served.begin(stops, choices=2), ["", ""]
        ends = []
        async for part in served.parts(request, stops):
            text[part.index] += part.text
            ends += [part.finish_reason] if part.finish_reason is not None else []
        assert dying.tokens == 5
        assert not served.subscribed
    assert (text, ends) == ([SAID] * 2, ["stop"] * 2)


async def test_an_abort_ends_the_stream_with_the_tokens_that_it_has(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    stops = stop_conditions()
    async with serving(tidegate_serve, [tidegate_engine()]) as served:
        request, parts = served.begin(stops), []
        async for part in served.parts(request, stops):
            parts.append(part)
            if len(parts) == 3:
                request.abort()
        assert not served.subscribed
    assert [part.text for part in parts] == [*SAID[:3], ""]
    assert parts[-1].finish_reason == "abort"


async def test_a_stream_sends_nothing_of_the_stop_token_that_ends_it(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    stops = stop_conditions(also="f")
    async with serving(tidegate_serve, [tidegate_engine()]) as served:
        request = served.begin(stops)
        text = "".join([part.text async for part in served.parts(request, stops)])
    assert text == SAID[: SAID.index("f")]


async def test_a_stream_holds_back_what_may_begin_a_stop_string(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    stops = stop_conditions("man")
    async with serving(tidegate_serve, [tidegate_engine()]) as served:
        request = served.begin(stops)
        texts = [part.text async for part in served.parts(request, stops)]
    assert texts == ["", "", *SAID[:-2], SAID[-2:]]


def test_a_turn_that_is_over_leaves_its_rows_next_turn_subscribed() -> None:
    async def check() -> None:
        pending, loop = PendingFutures(), asyncio.get_running_loop()
        first, second = loop.create_future(), loop.create_future()
        pending.subscribe(7, asyncio.Event(), first)
        first.set_result(None)  # its callbacks run after the next turn has begun
        pending.subscribe(7, event := asyncio.Event(), second)
        await asyncio.sleep(0)
        assert pending.new_tokens == {7: event}
        second.cancel()
        await asyncio.sleep(0)
        assert pending.new_tokens == {}

    asyncio.run(check())
