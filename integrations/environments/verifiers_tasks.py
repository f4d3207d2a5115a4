"""Adapter for tasksets of verifiers 0.4: one prompt, one answer, scored by the task's rewards.

A pool's worker processes create it by name and call it as an :class:`Environment`.

    pool.environment(
        "tidegate.integrations.environments.verifiers_tasks:Verifiers",
        taskset="my_tasks:Arithmetic", settings={"split": "train"},
    )

A task is an index into the taskset; for any other task, the group's seed is the index. Only tasks
with a single scored answer are supported. Harnesses with agents, tools or containers run with
verifiers' own runner, through the gateway.
"""

import inspect
import itertools
import json
from functools import cache
from typing import Any

from tidegate.environments.dotted_names import imported
from tidegate.environments.environment import Observation, chat
from tidegate.integrations.environments.packages import package


class Verifiers:
    """One task of a taskset of verifiers 0.4 (``verifiers.v1``), as an environment of one step."""

    def __init__(self, taskset: str, *, settings: dict[str, Any] | None = None) -> None:
        """``taskset``: ``module:Class`` or an installed one's id; ``settings``: for its config."""
        self._vf = package("verifiers.v1", distribution="verifiers")
        self._tasks = _tasks(taskset, json.dumps(settings or {}, sort_keys=True))

    def reset(self, *, seed: int, task: Any) -> Observation:
        """Return the task's prompt."""
        is_index = isinstance(task, int) and not isinstance(task, bool)
        self._task = self._tasks.at(task if is_index else seed)
        _refuse_unsupported(self._task)
        self._messages: list[Any] = []
        data = self._task.data
        if data.system_prompt is not None:
            self._messages.append(self._vf.SystemMessage(content=data.system_prompt))
        if isinstance(data.prompt, str):
            self._messages.append(self._vf.UserMessage(content=data.prompt))
        else:
            self._messages += data.prompt or ()
        return chat(message.model_dump(exclude_none=True) for message in self._messages)

    async def step(self, action: str) -> Observation:
        """Score the answer, and end the episode."""
        trace = self._trace(action)
        await self._task.score(trace)
        return Observation("", reward=trace.reward, done=True)

    def close(self) -> None:
        """Do nothing."""

    def _trace(self, action: str) -> Any:
        """Return the trace that verifiers would have recorded of this conversation."""
        traces = package("verifiers.v1.trace", distribution="verifiers")
        messages = [*self._messages, self._vf.AssistantMessage(content=action)]
        nodes = [
            self._vf.MessageNode(
                parent=index - 1 if index else None,
                message=message,
                sampled=index == len(messages) - 1,
            )
            for index, message in enumerate(messages)
        ]
        task = traces.TraceTask(
            type=type(self._task).__name__,
            data=self._task.data,
            key=self._task.key,
            hash=self._task.hash,
        )
        agent = self._vf.AgentInfo(config=self._vf.AgentConfig())
        trace = self._vf.Trace(task=task, agent=agent, nodes=nodes)
        trace.is_completed = trace.ok = True
        return trace


class _Tasks:
    """Tasks of a taskset, read as far as they were requested."""

    def __init__(self, taskset: Any) -> None:
        self._rest = iter(taskset)
        self._read: list[Any] = []
        self._is_bounded = taskset.bounded

    def at(self, index: int) -> Any:
        if self._is_bounded:
            self._read += self._rest
            return self._read[index % len(self._read)]
        self._read += itertools.islice(self._rest, max(0, index + 1 - len(self._read)))
        return self._read[index]


@cache
def _tasks(name: str, settings: str) -> _Tasks:
    """Return the taskset, cached per process because loading may take long."""
    vf = package("verifiers.v1", distribution="verifiers")
    loaders = package("verifiers.v1.utils.loaders", distribution="verifiers")
    generic = package("verifiers.v1.utils.generic", distribution="verifiers")
    taskset: Any = imported(name) if ":" in name else loaders.taskset_class(name)
    config = generic.concrete_type(taskset, vf.TasksetConfig) or vf.TasksetConfig
    return _Tasks(taskset(config(**{"id": name, **json.loads(settings)})))


def _refuse_unsupported(task: Any) -> None:
    kind = type(task)
    needs = [
        f"{function.__name__}() reads a runtime"
        for function in (*task.hooks("reward"), *task.hooks("metric"))
        if (parameter := inspect.signature(function).parameters.get("runtime")) is not None
        and parameter.default is parameter.empty
    ]
    if task.NEEDS_CONTAINER:
        needs.append("it needs a container")
    if kind.toolsets(task.config):
        needs.append("it has tools")
    if needs:
        raise NotImplementedError(
            f"verifiers' task {kind.__name__} is not scored by one answer alone: "
            f"{'; '.join(needs)}. Run it with verifiers' own runner, through tidegate.Gateway"
        )
