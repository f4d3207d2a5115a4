"""The cost of one engine does not grow with the number of engines."""

import sys
from types import FrameType
from typing import Any

from tidegate.testing import ScriptedEngine, ServeInTests


class Calls:
    """Counts calls of Python functions, which do not depend on the machine's load."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event == "call"

    def __enter__(self) -> "Calls":
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


async def calls_per_engine(
    serve: ServeInTests, scripted: type[ScriptedEngine], engines: int
) -> float:
    async with serve(
        engines=[scripted() for _ in range(engines)],
        group_size=1,
        groups_per_batch=1,
        max_staleness=1,
    ) as rollouts:
        await rollouts.publish({})
        with Calls() as calls:
            await rollouts.publish({})
    return calls.count / engines


async def test_a_publish_takes_as_many_steps_for_each_of_200_engines_as_of_20(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    few = await calls_per_engine(tidegate_serve, tidegate_engine, 20)
    many = await calls_per_engine(tidegate_serve, tidegate_engine, 200)
    assert many < 1.3 * few, (few, many)
