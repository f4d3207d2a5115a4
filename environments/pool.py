"""Pool of worker processes that hold environments, and the handles that episodes use.

    with EnvironmentPool(processes=4, call_timeout_s=30.0) as pool:
        episode = environment_episode(pool.environment("my_games:Guess", size=100), max_turns=8)
        async with tidegate.serve(…) as rollouts:
            async for batch in rollouts.batches(tasks, episode=episode):
                …

The pool has a thread and an event loop of its own, so it can be used from any loop or thread. When
a process dies, the environment that caused it fails. The process's other environments are replayed
in another process: reset with the same seed and task, given the same actions, and checked for the
same observations.
"""

import asyncio
import hashlib
import itertools
import os
import sys
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import uvloop

from tidegate.environments import calls
from tidegate.environments.dotted_names import checked_name
from tidegate.environments.environment import Observation
from tidegate.environments.loop_thread import LoopThread
from tidegate.environments.started_worker import LocalWorkers, WorkersFactory
from tidegate.environments.worker_process import ProcessDied, WorkerProcess
from tidegate.errors import (
    ConfigError,
    EnvironmentCrashed,
    EnvironmentFailed,
    EnvironmentHung,
    NotRepeatable,
    RunClosed,
)

DEATHS_MAX = 3
"""Processes that may die under one environment, for any reason, before the environment fails.
Without the limit, replays could continue for ever."""


class PooledEnvironment:
    """Handle of one environment in a pool; created by ``EnvironmentPool.environment``."""

    def __init__(self, pool: "EnvironmentPool", factory: str, arguments: dict[str, Any]) -> None:
        self._pool = pool
        self._factory = factory
        self._arguments = arguments
        self._process: WorkerProcess | None = None
        self._id = 0
        self._seed = 0
        self._task: Any = None
        self._history: list[tuple[str, bytes]] = []
        """Each action with the digest of its observation, starting with the reset; for replays."""
        self._deaths = 0
        self._holds_slot = False
        self._is_closed = False

    async def reset(self, *, seed: int, task: Any) -> Observation:
        """Create the environment in a process and reset it.

        Raises:
            EnvironmentFailed: it raised; :class:`EnvironmentHung` if it timed out,
                :class:`EnvironmentCrashed` if its process died.
            ConfigError: ``task`` or the arguments are not plain data.
        """
        return await self._pool.run(self._reset(seed, task))

    async def step(self, action: str) -> Observation:
        """Pass an action to the environment.

        Raises:
            EnvironmentFailed: as for ``reset``; :class:`NotRepeatable` if a replay in another
                process gave different observations.
        """
        return await self._pool.run(self._step(action))

    def close(self) -> None:
        """Close the environment soon. Never fails or blocks, and may be called again."""
        try:
            self._pool.submit(self._close())
        except RunClosed:
            return  # closing the pool closes its environments

    # ------------------------------------------------------------ on the pool's event loop

    async def _reset(self, seed: int, task: Any) -> Observation:
        if self._is_closed:
            raise RunClosed(
                f"environment {self._factory} is closed; create another one with pool.environment()"
            )
        if self._history:
            raise EnvironmentFailed(
                environment=self._factory,
                doing="reset",
                why="it was already reset; create another environment",
            )
        self._seed, self._task = seed, task
        await self._pool.acquire_slot()
        self._holds_slot = True
        if self._is_closed:
            self._release()
            raise RunClosed(f"environment {self._factory} was closed before its reset")
        return await self._request_with_replay("reset", lambda: self._request("", is_reset=True))

    async def _step(self, action: str) -> Observation:
        doing = f"step {len(self._history)}"
        if self._is_closed or not self._history:
            raise EnvironmentFailed(
                environment=self._factory, doing=doing, why="it is not open; reset it first"
            )
        return await self._request_with_replay(doing, lambda: self._request(action))

    async def _request_with_replay(
        self, doing: str, request: Callable[[], Awaitable[Observation]]
    ) -> Observation:
        """Return the observation of ``request``; if the process dies, replay in another one."""
        while True:
            try:
                if self._history and (self._process is None or self._process.is_dead):
                    await self._replay()
                return await request()
            except ProcessDied as death:
                self._deaths += 1
                kind = EnvironmentHung if death.was_late else EnvironmentCrashed
                if death.suspects == 1 or self._deaths >= DEATHS_MAX:
                    raise kind(
                        environment=self._factory,
                        doing=doing,
                        why=f"its {self._process_name} ended: {death.how}",
                    ) from None

    async def _replay(self) -> None:
        history, self._history = self._history, []
        try:
            for number, (action, digest) in enumerate(history):
                await self._request(action, is_reset=number == 0)
                if self._history[-1][1] != digest:
                    raise NotRepeatable(
                        environment=self._factory,
                        doing=f"step {number}" if number else "reset",
                        why=f"replayed with the same seed ({self._seed}) and actions after its "
                        f"process died, it returned another observation; derive all of its "
                        f"randomness from the seed, or give it a pool of its own",
                    )
        finally:
            self._history = history
        self._pool.count_replay()

    async def _request(self, action: str, *, is_reset: bool = False) -> Observation:
        timeout_s = self._pool.call_timeout_s
        call: calls.CreateEnvironment | calls.StepEnvironment
        if is_reset:
            self._attach()
            call = calls.CreateEnvironment(
                call_id=self._pool.next_id(),
                environment_id=self._id,
                factory=self._factory,
                arguments=self._arguments,
                seed=self._seed,
                task=self._task,
                timeout_s=timeout_s,
            )
        else:
            call = calls.StepEnvironment(
                call_id=self._pool.next_id(),
                environment_id=self._id,
                action=action,
                timeout_s=timeout_s,
            )
        assert self._process is not None
        try:
            reply = await self._process.request(call, timeout_s)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"environment {self._factory}: its task, arguments and actions must be plain data "
                f"that can be sent to another process: {error}"
            ) from None
        return self._record(action, reply)

    def _record(self, action: str, reply: calls.WorkerReply) -> Observation:
        if isinstance(reply, calls.CallFailed):
            self._fail(reply)
        assert isinstance(reply, calls.ObservationReply)
        observation = Observation(
            reply.text, reply.reward, reply.done, reply.truncated, reply.messages
        )
        body = msgspec.msgpack.encode(observation)
        self._history.append((action, hashlib.blake2b(body, digest_size=8).digest()))
        return observation

    def _fail(self, reply: calls.CallFailed) -> None:
        doing = f"step {len(self._history)}" if self._history else "reset"
        if reply.is_timeout:
            why = f"no reply within {self._pool.call_timeout_s:g} s"
            raise EnvironmentHung(environment=self._factory, doing=doing, why=why)
        if reply.is_out_of_memory and self._process is not None:
            # The process's other environments would fail next, so they are replayed in another
            # process.
            self._process.kill("an environment in it ran out of memory")
        raise EnvironmentFailed(
            environment=self._factory, doing=doing, why=f"{reply.error}\n{reply.traceback}".rstrip()
        )

    def _attach(self) -> None:
        self._detach()
        self._process = self._pool.environment_process()
        self._process.environments += 1
        self._id = self._pool.next_id()

    def _detach(self) -> None:
        if self._process is not None:
            self._process.environments -= 1
            self._process = None

    @property
    def _process_name(self) -> str:
        return "process" if self._process is None else self._process.name

    async def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        process = self._process
        try:
            if process is not None and not process.is_dead:
                timeout_s = self._pool.call_timeout_s
                call_id = self._pool.next_id()
                await process.request(
                    calls.CloseEnvironment(
                        call_id=call_id, environment_id=self._id, timeout_s=timeout_s
                    ),
                    timeout_s,
                )
        except ProcessDied:
            pass
        finally:
            self._release()

    def _release(self) -> None:
        self._detach()
        if self._holds_slot:
            self._holds_slot = False
            self._pool.release_slot()


CLOSE_GRACE_S = 2.0
"""Longest time in seconds for environments to close with the pool; then their processes are killed.
"""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of a pool's processes and environments."""

    processes: int
    """Number of running worker processes."""
    environments: int
    """Number of open environments, in all processes."""
    processes_lost: int
    """Processes that died or were killed since the start."""
    replayed: int
    """Environments that lost their process and were replayed in another one."""


class EnvironmentPool(LoopThread):
    """Worker processes for environments and tools, started as needed. Close it, or use ``with``."""

    def __init__(
        self,
        *,
        processes: int | None = None,
        environments_max: int = 1024,
        call_timeout_s: float = 60.0,
        memory_bytes: int | None = None,
        python: str | Path = sys.executable,
        pass_variables: Collection[str] = (),
        workers: WorkersFactory = LocalWorkers,
    ) -> None:
        """Check the settings; processes are started with the first environment or tool call.

        Args:
            processes: largest number; one per core by default. Computing environments share
                processes; blocking ones need more processes, or ``async`` methods.
            environments_max: largest number of open environments; further ones wait.
            call_timeout_s: limit of one reset, step or close. A process that exceeds it is killed,
                and its other environments are replayed in another one.
            memory_bytes: address space of each process (RLIMIT_AS).
            python: the interpreter, for example of another virtual environment if packages need
                conflicting versions. It needs ``tidegate`` (``pip install --no-deps``) and
                ``msgspec``.
            pass_variables: names of environment variables to pass on although their names or values
                resemble secrets (``HF_TOKEN``, for example). Other such variables are not passed
                on, because code written by a model may run there.
            workers: called once as ``workers(python, memory_bytes, pass_variables)``; the result
                starts the worker processes. The default starts them on this machine;
                ``tidegate.ray_workers(places)`` places them on the nodes of a Ray cluster, where
                packages and ``python`` must have the same paths. Any other than the default needs
                ``processes``.

        Raises:
            ConfigError: a number is not above zero, there is no such interpreter, or ``workers``
                refuses.
        """
        self._processes_max = processes if processes is not None else os.cpu_count() or 1
        self.call_timeout_s = call_timeout_s
        for name, value in (
            ("processes", self._processes_max),
            ("environments_max", environments_max),
            ("call_timeout_s", call_timeout_s),
            ("memory_bytes", 1 if memory_bytes is None else memory_bytes),
        ):
            if not value > 0:
                raise ConfigError(f"{name} must be above zero, got {value}")
        if not os.access(python, os.X_OK):
            raise ConfigError(f"python must be the path of an interpreter, got {str(python)!r}")
        if isinstance(pass_variables, str):
            raise ConfigError(
                f"pass_variables must be a collection of names, got {pass_variables!r:.100}"
            )
        if workers is not LocalWorkers and processes is None:
            raise ConfigError(
                "processes must be set if workers is: its default is the number of cores of this "
                "machine, but the worker processes run on others"
            )
        super().__init__("environment pool", uvloop.new_event_loop)
        self._workers = workers(str(python), memory_bytes, tuple(pass_variables))
        self._processes: list[WorkerProcess] = []
        self._ids = itertools.count(1)
        self._slots = asyncio.Semaphore(environments_max)
        self.tool_slots = asyncio.Semaphore(self._processes_max)
        """Held while a tool computes, so that a call waits for any process to be free."""
        self._open = 0
        self._lost = 0
        self._replays = 0

    def environment(self, factory: str, /, **arguments: Any) -> "Callable[[], PooledEnvironment]":
        """Return a function that creates environments in the pool, for ``environment_episode``.

        Args:
            factory: ``package.module:name`` of a class or function that returns an environment.
            arguments: plain data, passed to it.

        Raises:
            ConfigError: the name is not of that form.
        """
        checked_name(factory)
        return lambda: PooledEnvironment(self, factory, arguments)

    def statistics(self) -> PoolStatistics:
        """Return the present counts; callable from any thread."""
        running = sum(not process.is_dead for process in list(self._processes))
        return PoolStatistics(running, self._open, self._lost, self._replays)

    def close(self) -> None:
        """Close all environments and end all processes. Blocks for at most :data:`CLOSE_GRACE_S`.

        Pending calls raise ``RunClosed``. May be called again.
        """
        was_closed = self._is_closed
        super().close()
        if not was_closed:
            self._workers.close()

    async def _shut_down(self) -> None:
        closing = [process.close(CLOSE_GRACE_S) for process in self._processes]
        await asyncio.gather(*closing)
        await asyncio.sleep(0)  # let coroutines that were just submitted start
        await super()._shut_down()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.close)

    # ------------------------------------------------------------ on the pool's event loop

    def next_id(self) -> int:
        """Return a new number for a call or an environment."""
        return next(self._ids)

    async def acquire_slot(self) -> None:
        """Wait until another environment may be open."""
        await self._slots.acquire()
        self._open += 1

    def release_slot(self) -> None:
        """Report that an open environment was closed."""
        self._open -= 1
        self._slots.release()

    def count_replay(self) -> None:
        """Count an environment that was replayed in another process."""
        self._replays += 1

    def environment_process(self) -> WorkerProcess:
        """Return the process with the fewest environments, starting one if allowed and useful.

        Raises:
            RunClosed: the pool is closed.
            OSError: no process runs, and none could be started.
        """
        return self._least_loaded(lambda process: (process.environments, process.queued))

    def tool_process(self) -> WorkerProcess:
        """Return the process for a tool's call: an idle one if possible."""
        return self._least_loaded(lambda process: (process.queued, process.environments))

    def _least_loaded(self, load: Callable[[WorkerProcess], tuple[int, int]]) -> WorkerProcess:
        if self._is_closed:
            raise RunClosed("the environment pool is closed")
        running = [process for process in self._processes if not process.is_dead]
        self._lost += len(self._processes) - len(running)
        self._processes = running
        least = min(running, key=load, default=None)
        if least is not None and (load(least)[0] == 0 or len(running) >= self._processes_max):
            return least
        with suppress(OSError):
            started = WorkerProcess(self._workers.start())
            self._processes.append(started)
            return started
        if least is None:
            raise OSError(
                "can't start a worker process for environments: the system is out of processes, "
                "memory or file descriptors; lower `processes`, or raise the limit (ulimit -u, -n)"
            )
        return least
