"""How does an episode call a tool that may hang, crash or be called wrongly? As text in, text out.

    tools = Tools(pool, {"search": "my_tools:search", "python": "my_tools:run"})
    ...
    episode.append(await tools.call("search", {"query": "tides"}, timeout_s=10.0))

Tools are functions in modules, called in a pool's processes: as many plain ones at a time as it
has, and any number of ``async`` ones. Their type hints say which arguments they take. Nothing that
goes wrong with a tool is the episode's failure: it becomes the observation, for the model to do
better.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from tidegate.environments import calls
from tidegate.environments.dotted_names import checked_name
from tidegate.environments.pool import EnvironmentPool
from tidegate.environments.worker_process import ProcessDied
from tidegate.errors import ConfigError, RunClosed
from tidegate.orchestrator.episodes.activities import TOOL
from tidegate.orchestrator.episodes.runner import EpisodeTask

LOSSES_MAX = 3
"""Processes that may die around a call without its doing, before it is given up."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What became of a call."""

    text: str
    """The answer, or what went wrong, for the model to read."""
    is_error: bool = False


class Tools:
    """Some functions, by the names that models call them by."""

    def __init__(self, pool: EnvironmentPool, functions: Mapping[str, str]) -> None:
        """``functions``: name -> ``package.module:function``.

        Raises:
            ConfigError: no such function can be imported by another process.
        """
        self._pool = pool
        self._functions = {name: checked_name(path) for name, path in functions.items()}

    async def call(self, name: str, arguments: Any, *, timeout_s: float | None = None) -> str:
        """What the tool answers, or what went wrong, as text. Raises only if the pool is closed.

        Args:
            name: of the tool.
            arguments: by name, as a model gave them; anything.
            timeout_s: for the call itself, not for the wait until it is its turn; left out, the
                pool's ``call_timeout_s``.
        """
        return (await self.answer(name, arguments, timeout_s=timeout_s)).text

    async def answer(
        self, name: str, arguments: Any, *, timeout_s: float | None = None
    ) -> ToolAnswer:
        """The same, and whether it went wrong."""
        if name not in self._functions:
            known = ", ".join(sorted(self._functions))
            return _error(f"there is no tool {name!r:.80}; there are: {known}")
        if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
            return _error(f"{name} takes its arguments by name, as one JSON object")
        limit_s = self._pool.call_timeout_s if timeout_s is None else timeout_s
        with _doing(f"{TOOL} {name}"):
            return await self._pool.run(self._answer(name, dict(arguments), limit_s))

    async def describe(self) -> list[dict[str, Any]]:
        """The tools as chat templates and OpenAI's API want them: names, purposes, JSON schemas.

        Raises:
            ConfigError: a function can't be imported, or is no tool.
        """
        return [await self._pool.run(self._described(name)) for name in self._functions]

    # ------------------------------------------------------------ on the pool's loop

    async def _answer(self, name: str, arguments: dict[str, Any], timeout_s: float) -> ToolAnswer:
        call = calls.UseTool(
            call_id=self._pool.next_id(),
            tool=self._functions[name],
            arguments=arguments,
            timeout_s=timeout_s,
        )
        try:
            reply = await self._reply(call, timeout_s)
        except ProcessDied as death:
            if death.was_late:
                return _error(f"{name} gave no answer in {timeout_s:g} s")
            return _error(f"{name} crashed: {death.how.splitlines()[0].split(';')[0]}")
        except (TypeError, ValueError) as error:
            return _error(f"{name}: the arguments can't be sent: {error}")
        if isinstance(reply, calls.Answered):
            return ToolAnswer(reply.text)
        assert isinstance(reply, calls.Failed)
        if reply.is_timeout:
            return _error(f"{name} gave no answer in {timeout_s:g} s")
        if reply.is_bad_arguments:
            return _error(f"{name} was called wrongly: {reply.error.partition(': ')[2]}")
        return _error(f"{name} failed: {reply.error}")

    async def _described(self, name: str) -> dict[str, Any]:
        call = calls.DescribeTool(call_id=self._pool.next_id(), tool=self._functions[name])
        try:
            reply = await self._reply(call, self._pool.call_timeout_s)
        except ProcessDied as death:
            raise ConfigError(f"tool {name!r} can't be described: {death.how}") from None
        if not isinstance(reply, calls.Described):
            assert isinstance(reply, calls.Failed)
            raise ConfigError(f"tool {name!r} can't be described: {reply.error}")
        function = {
            "name": name,
            "description": reply.description,
            "parameters": reply.parameters,
        }
        return {"type": "function", "function": function}

    async def _reply(
        self, call: calls.UseTool | calls.DescribeTool, timeout_s: float
    ) -> calls.Reply:
        """The answer of a process that lives.

        Raises:
            ProcessDied: this call may have killed it; or too many died.
        """
        places = self._pool.tool_places
        for losses_left in reversed(range(LOSSES_MAX)):
            await places.acquire()
            try:
                process = self._pool.tool_home()
            except (OSError, RunClosed):
                places.release()
                raise
            try:
                reply = await process.ask(call, timeout_s, when_free=places.release)
            except ProcessDied as death:
                if death.suspects or not losses_left:
                    raise
                continue
            if isinstance(reply, calls.Failed) and reply.is_out_of_memory:
                process.kill("a tool in it ran out of memory")
            return reply
        raise AssertionError("the last loss is raised")


def _doing(name: str) -> AbstractContextManager[None]:
    """Of the episode whose coroutine this is, if it is one's."""
    task = asyncio.current_task()
    episode = task.episode if isinstance(task, EpisodeTask) else None
    return nullcontext() if episode is None else episode.doing(name)


def _error(text: str) -> ToolAnswer:
    return ToolAnswer(f"error: {text}", is_error=True)
