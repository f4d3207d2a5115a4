"""Episode intervals in traces: turns, tools and parking, nested as viewers require."""

import asyncio
import json
from pathlib import Path

from tests.observability.trace_events import hold_to_the_format
from tidegate.observability.records.trace import Trace, read_trace, trace_lines
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode_tracer import LANES_MAX, EpisodeTracer
from tidegate.orchestrator.telemetry.recorder import EngineStep, EpisodeInterval
from tidegate.transport.messages import SamplingParams


class Watch:
    """An EpisodeTracer with a clock set by the test."""

    def __init__(self) -> None:
        self.now_us = 0
        self.reported: list[EpisodeInterval] = []
        self.tracer = EpisodeTracer(self.reported.append, now_us=lambda: self.now_us)

    def ask(self, rollout: Rollout) -> "asyncio.Future[Turn]":
        rollout.turns.append(Turn(rollout, SamplingParams(max_tokens=4)))
        answer: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self.tracer.turn_started(rollout, answer)
        return answer

    async def answer(
        self, answer: "asyncio.Future[Turn]", rollout: Rollout, *versions: int
    ) -> None:
        turn = rollout.turns[-1]
        for version in versions:
            turn.append(5, -1.0, version, "engine-0")
        turn.finish_reason = "stop"
        answer.set_result(turn)
        await asyncio.sleep(0)  # runs its callbacks

    @property
    def intervals(self) -> list[tuple[int, str, int, int]]:
        return [(i.lane, i.name, i.started_us, i.ended_us) for i in self.reported]


async def test_an_episodes_turns_tools_and_parking_are_inside_its_interval() -> None:
    watch, rollout = Watch(), Rollout(7, 3, 0)
    watch.tracer.began(rollout)
    watch.now_us = 500  # too short to be recorded
    answer = watch.ask(rollout)
    watch.now_us = 10_000
    await watch.answer(answer, rollout, 1, 1)
    watch.now_us = 40_000
    watch.tracer.parked(rollout)
    watch.now_us = 90_000
    watch.tracer.unparked(rollout)
    answer = watch.ask(rollout)
    watch.now_us = 95_000
    await watch.answer(answer, rollout, 1, 2)
    watch.now_us = 99_000
    watch.tracer.ended(rollout, None)
    assert watch.intervals == [
        (1, "turn v1", 500, 10_000),
        (1, "tools", 10_000, 40_000),
        (1, "parked", 40_000, 90_000),
        (1, "turn v1 to v2", 90_000, 95_000),
        (1, "tools", 95_000, 99_000),
        (1, "rollout 7", 0, 99_000),
    ]
    assert watch.reported[3].args == {"tokens": 2, "engine": "engine-0", "ended": "stop"}
    assert watch.reported[-1].args == {"group": 3, "turns": 2, "tokens": 4, "ended": "returned"}


async def test_a_branch_has_its_own_lane() -> None:
    watch, trunk, branch = Watch(), Rollout(1, 0, 0), Rollout(2, 0, 0)
    branch.branch_of, trunk.branches = trunk, (branch,)
    watch.tracer.began(trunk)
    answers = [watch.ask(trunk), watch.ask(branch)]
    watch.now_us = 5_000
    await watch.answer(answers[1], branch, 0)
    watch.now_us = 6_000
    await watch.answer(answers[0], trunk, 0)
    watch.tracer.ended(trunk, None)
    assert watch.intervals == [
        (2, "turn v0", 0, 5_000),
        (1, "turn v0", 0, 6_000),
        (1, "rollout 1", 0, 6_000),
        (2, "tools", 5_000, 6_000),
        (2, "rollout 2", 0, 6_000),
    ]


async def test_a_lane_is_reused_after_its_episode_and_episodes_without_a_lane_are_skipped() -> None:
    watch = Watch()
    rollouts = [Rollout(number, 0, 0) for number in range(LANES_MAX + 1)]
    for rollout in rollouts:
        watch.tracer.began(rollout)
    watch.ask(rollouts[-1])
    watch.tracer.ended(rollouts[-1], None)
    assert watch.reported == []
    watch.tracer.ended(rollouts[4], ValueError())
    watch.tracer.began(Rollout(99, 0, 0))
    watch.tracer.ended(Rollout(99, 0, 0), None)
    assert [(i.lane, i.name) for i in watch.reported] == [(5, "rollout 4"), (5, "rollout 99")]


async def test_an_abandoned_turn_ends_when_its_episode_continues_or_ends() -> None:
    watch, rollout = Watch(), Rollout(7, 3, 0)
    watch.tracer.began(rollout)
    watch.ask(rollout)
    watch.now_us = 2_000
    late = watch.ask(rollout)
    watch.now_us = 3_000
    watch.tracer.ended(rollout, ValueError())
    late.cancel()
    await asyncio.sleep(0)  # arrives after the end, and changes nothing
    assert watch.intervals == [
        (1, "turn", 0, 2_000),
        (1, "turn", 2_000, 3_000),
        (1, "rollout 7", 0, 3_000),
    ]


def test_episodes_read_back_from_a_valid_chrome_trace(tmp_path: Path) -> None:
    trace, path = Trace(), tmp_path / "trace.json"
    trace.engine_step(EngineStep("engine-0", started_us=0, busy_us=500, version=0, rows=7))
    trace.trainer_interval("wait", 0, 600, 0)
    trace.instant("engine-0", "swap", 400, {"version": 1})
    children = [
        EpisodeInterval(1, "turn v0", 0, 600, {}),
        EpisodeInterval(1, "tools", 600, 900, {}),
    ]
    whole = EpisodeInterval(1, "rollout 0", 0, 1_000, {"turns": 1})
    trace.episodes += [*children, whole]
    trace.write(path)
    hold_to_the_format(json.loads(path.read_text())["traceEvents"])
    again = read_trace(path)
    assert list(again.episodes) == [whole, *children]  # an enclosing interval comes first
    assert set(again.tracks) == {"engine-0", "trainer"}
    assert "  episodes (1): tools 30%, turn 60%" in trace_lines(tmp_path)
