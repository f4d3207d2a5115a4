"""User-defined tasksets of verifiers; imported in a Python that has verifiers."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def is_right(self, task: SumData, trace: Any) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def is_short(self, trace: Any) -> float:
        return float(not trace.last_reply.startswith("5"))


class SumsConfig(vf.TasksetConfig):
    limit: int = 5


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        for left in range(self.config.limit):
            data = SumData(
                system_prompt="Only the number.", prompt=f"{left} + 1 =", answer=str(left + 1)
            )
            yield Sum(data, self.config.task)


class Boxed(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    NEEDS_CONTAINER = True

    @vf.reward
    async def tests_pass(self, runtime: Any) -> float:
        return 1.0


class Contained(vf.Taskset[Boxed, vf.TasksetConfig]):
    def load(self) -> Iterator[Boxed]:
        yield Boxed(vf.TaskData(prompt="build it"), self.config.task)
