"""Who holds hundreds of environments? A few processes, which may hang or die without hurting a run.

    with EnvironmentPool(processes=4, call_timeout_s=30.0) as pool:
        episode = environment_episode(pool.environment("my_games:Guess", size=100), max_turns=8)
        async with tidegate.serve(…) as rollouts:
            async for batch in rollouts.batches(tasks, episode=episode):
                …

The pool has a thread with an event loop of its own, so it can be used from any loop or thread, and
a busy one doesn't make a punctual environment late. It knows no models and no episodes.
"""

import asyncio
import concurrent.futures
import itertools
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvloop

from tidegate.errors import ConfigError, RunClosed
from tidegate.orchestrator.environments.dotted_names import checked_name
from tidegate.orchestrator.environments.pooled_environment import PooledEnvironment
from tidegate.orchestrator.environments.started_worker import LocalWorkers, Workers
from tidegate.orchestrator.environments.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tidegate.orchestrator.cluster.ray_places import RayPlaces

CLOSE_GRACE_S = 2.0
"""For environments to be closed when the pool is; then their processes are killed."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool holds, and what became of its processes."""

    processes: int
    """Running."""
    environments: int
    """Open."""
    processes_lost: int
    """Died or killed since the beginning."""
    begun_again: int
    """Environments that lost their process and were brought to where they had been in another."""


class EnvironmentPool:
    """Worker processes, started as they are needed."""

    def __init__(
        self,
        *,
        processes: int | None = None,
        environments_max: int = 1024,
        call_timeout_s: float = 60.0,
        memory_bytes: int | None = None,
        python: str | Path = sys.executable,
        on_ray: "RayPlaces | None" = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            processes: at most; left out, one per core. Environments that compute share them;
                those that block on something else want more, or ``async`` methods.
            environments_max: open at once; whoever wants one more waits.
            call_timeout_s: for one reset, step or close. A process that is silent for longer is
                killed, and its other environments are begun again in another.
            memory_bytes: address space of each process (RLIMIT_AS).
            python: the interpreter; one of another virtual environment where packages need
                versions that this one must not have. It needs ``tidegate`` (``pip install
                --no-deps``) and ``msgspec``.
            on_ray: has Ray find places for the processes on its nodes, where packages and
                ``python`` are under the same paths; say how many ``processes`` then.

        Raises:
            ConfigError: a number is not above zero, there is no such interpreter, or no Ray.
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
            raise ConfigError(f"python must be an interpreter's path, got {str(python)!r}")
        if on_ray is not None and processes is None:
            raise ConfigError("say how many processes Ray is to find places for: processes=…")
        self._workers = _workers(str(python), memory_bytes, on_ray)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._processes: list[WorkerProcess] = []
        self._ids = itertools.count(1)
        self._places = asyncio.Semaphore(environments_max)
        self.tool_places = asyncio.Semaphore(self._processes_max)
        """Held while a tool computes, so that a call waits for no one process but for any."""
        self._open = 0
        self._lost = 0
        self._begun_again = 0

    def environment(self, factory: str, /, **arguments: Any) -> "Callable[[], PooledEnvironment]":
        """What makes environments in the pool, for ``environment_episode``.

        Args:
            factory: ``package.module:name`` of a class or function that makes one.
            arguments: plain data, given to it.

        Raises:
            ConfigError: no such name can be imported by another process.
        """
        checked_name(factory)
        return lambda: PooledEnvironment(self, factory, arguments)

    def statistics(self) -> PoolStatistics:
        """How things stand; from any thread."""
        running = sum(not process.is_dead for process in list(self._processes))
        return PoolStatistics(running, self._open, self._lost, self._begun_again)

    # ------------------------------------------------------------ its thread

    def submit(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Have something run on the pool's loop. For the pool's own classes."""
        with self._starting:
            if self._is_closed:
                work.close()
                raise RunClosed("the environment pool is closed; nothing more can be asked of it")
            if self._loop is None:
                self._loop = uvloop.new_event_loop()
                # Processes die with the thread that started them: it lives as long as the pool.
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="environments", daemon=True
                )
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The same, awaited on the caller's loop; cancelling this cancels that."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Close all environments and end all processes; who waits gets ``RunClosed``. Blocks for
        two seconds at most. Harmless if repeated."""
        with self._starting:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        if self._loop is None or self._thread is None:
            self._workers.close()
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._workers.close()

    async def _shut_down(self) -> None:
        closing = [process.close(CLOSE_GRACE_S) for process in self._processes]
        await asyncio.gather(*closing)
        await asyncio.sleep(0)  # what was submitted last has begun
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    # ------------------------------------------------------------ on its loop

    def next_id(self) -> int:
        """A number that no call and no environment has."""
        return next(self._ids)

    async def take_place(self) -> None:
        """Wait until another environment may be open."""
        await self._places.acquire()
        self._open += 1

    def give_place(self) -> None:
        """One is open no more."""
        self._open -= 1
        self._places.release()

    def count_again(self) -> None:
        """One was begun again in another process."""
        self._begun_again += 1

    def home(self) -> WorkerProcess:
        """The process for one more environment: that with the fewest.

        Raises:
            RunClosed: the pool is closed.
            OSError: none runs, and none could be started.
        """
        return self._least(lambda process: (process.environments, process.queued))

    def tool_home(self) -> WorkerProcess:
        """The process for a tool's call: one with nothing to do, if there is one."""
        return self._least(lambda process: (process.queued, process.environments))

    def _least(self, burden: Callable[[WorkerProcess], tuple[int, int]]) -> WorkerProcess:
        if self._is_closed:
            raise RunClosed("the environment pool is closed")
        running = [process for process in self._processes if not process.is_dead]
        self._lost += len(self._processes) - len(running)
        self._processes = running
        least = min(running, key=burden, default=None)
        if least is not None and (burden(least)[0] == 0 or len(running) >= self._processes_max):
            return least
        with suppress(OSError):
            started = WorkerProcess(self._workers.start())
            self._processes.append(started)
            return started
        if least is None:
            raise OSError("no process for environments could be started; too many run, perhaps")
        return least


def _workers(python: str, memory_bytes: int | None, on_ray: "RayPlaces | None") -> Workers:
    if on_ray is None:
        return LocalWorkers(python, memory_bytes)
    from tidegate.orchestrator.cluster.ray_environments import RayWorkers

    return RayWorkers(python, memory_bytes, on_ray)
