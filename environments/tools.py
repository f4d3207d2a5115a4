"""Tool calls of an episode, executed in a pool's worker processes; arguments in, text out.

    tools = Tools(pool, {"search": "my_tools:search", "python": "my_tools:run"})
    ...
    episode.append(await tools.call("search", {"query": "tides"}, timeout_s=10.0))

Users' episodes call :class:`Tools`. Tools are functions in modules. As many plain functions run at
a time as the pool has processes, and any number of ``async`` ones. Type hints define the arguments.
A tool that hangs, crashes or is called with wrong arguments does not fail the episode: the error
becomes the observation, so that the model can react.
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
"""Processes that may die through no fault of a call before the call is given up."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """Result of a tool call."""

    text: str
    """The tool's result, or the error message for the model."""
    is_error: bool = False


class _ToolFailed(Exception):
    """A tool failed; the message is for the model."""


class Tools:
    """Tool functions by the names that models use."""

    def __init__(self, pool: EnvironmentPool, functions: Mapping[str, str]) -> None:
        """``functions``: tool name -> ``package.module:function``.

        Raises:
            ConfigError: a function's name is not of that form.
        """
        self._pool = pool
        self._functions = {name: checked_name(path) for name, path in functions.items()}

    async def call(self, name: str, arguments: Any, *, timeout_s: float | None = None) -> str:
        """Call a tool; return its result or error as text. Raises only if the pool is closed.

        Args:
            name: name of the tool.
            arguments: arguments by name, as the model gave them; any value.
            timeout_s: limit of the call itself, without the wait for a free process; default is the
                pool's ``call_timeout_s``.
        """
        return (await self.answer(name, arguments, timeout_s=timeout_s)).text

    async def answer(
        self, name: str, arguments: Any, *, timeout_s: float | None = None
    ) -> ToolAnswer:
        """Call a tool, and also return whether it failed; see :meth:`call`."""
        if name not in self._functions:
            known = ", ".join(sorted(self._functions))
            return _error(f"there is no tool {name!r:.80}; the tools are: {known}")
        if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
            return _error(f"{name} takes its arguments by name, as one JSON object")
        limit_s = self._pool.call_timeout_s if timeout_s is None else timeout_s
        try:
            with _record_activity(f"{TOOL} {name}"):
                answer = await self._pool.run(self._call(name, dict(arguments), limit_s))
                if answer.is_error:
                    raise _ToolFailed(answer.text)  # so that traces show the failure
        except _ToolFailed as failed:
            return ToolAnswer(str(failed), is_error=True)
        return answer

    async def describe(self) -> list[dict[str, Any]]:
        """Return the tools' descriptions in the format of OpenAI's API and chat templates.

        Raises:
            ConfigError: a function can't be imported, or can't be a tool.
        """
        return [await self._pool.run(self._describe(name)) for name in self._functions]

    # ------------------------------------------------------------ on the pool's loop

    async def _call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> ToolAnswer:
        call = calls.CallTool(
            call_id=self._pool.next_id(),
            tool=self._functions[name],
            arguments=arguments,
            timeout_s=timeout_s,
        )
        try:
            reply = await self._request(call, timeout_s)
        except ProcessDied as death:
            if death.was_late:
                return _error(f"{name} did not return within {timeout_s:g} s")
            return _error(f"{name} crashed: {death.how.splitlines()[0].split(';')[0]}")
        except (TypeError, ValueError) as error:
            return _error(f"{name}: the arguments can't be sent: {error}")
        if isinstance(reply, calls.CallResult):
            return ToolAnswer(reply.text)
        assert isinstance(reply, calls.CallFailed)
        if reply.is_timeout:
            return _error(f"{name} did not return within {timeout_s:g} s")
        if reply.is_bad_arguments:
            return _error(
                f"{name} was called with wrong arguments: {reply.error.partition(': ')[2]}"
            )
        return _error(f"{name} failed: {reply.error}")

    async def _describe(self, name: str) -> dict[str, Any]:
        call = calls.DescribeTool(call_id=self._pool.next_id(), tool=self._functions[name])
        try:
            reply = await self._request(call, self._pool.call_timeout_s)
        except ProcessDied as death:
            raise ConfigError(
                f"tool {name!r} can't be described, because its process ended: {death.how}"
            ) from None
        if not isinstance(reply, calls.ToolDescription):
            assert isinstance(reply, calls.CallFailed)
            raise ConfigError(f"tool {name!r} can't be described: {reply.error}")
        function = {
            "name": name,
            "description": reply.description,
            "parameters": reply.parameters,
        }
        return {"type": "function", "function": function}

    async def _request(
        self, call: calls.CallTool | calls.DescribeTool, timeout_s: float
    ) -> calls.WorkerReply:
        """Return a process's reply; try another process if one dies through no fault of the call.

        Raises:
            ProcessDied: this call may have killed it, or too many processes died.
        """
        slots = self._pool.tool_slots
        for losses_left in reversed(range(LOSSES_MAX)):
            await slots.acquire()
            try:
                process = self._pool.tool_process()
            except (OSError, RunClosed):
                slots.release()
                raise
            try:
                reply = await process.request(call, timeout_s, when_free=slots.release)
            except ProcessDied as death:
                if death.suspects or not losses_left:
                    raise
                continue
            if isinstance(reply, calls.CallFailed) and reply.is_out_of_memory:
                process.kill("a tool in it ran out of memory")
            return reply
        raise AssertionError("the last loss is raised")


def _record_activity(name: str) -> AbstractContextManager[None]:
    """Record the activity on the episode whose coroutine this is, if there is one."""
    task = asyncio.current_task()
    episode = task.episode if isinstance(task, EpisodeTask) else None
    return nullcontext() if episode is None else episode.activity(name)


def _error(text: str) -> ToolAnswer:
    return ToolAnswer(f"error: {text}", is_error=True)
