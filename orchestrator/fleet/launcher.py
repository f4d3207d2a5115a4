"""Interface of engine launchers, and the launchers of local processes and of the user's functions.

`trainer/run.py` starts and ends engines through it; the run's settings select the launcher, and
integrations/ray has one for Ray actors. All engines join over the wire, so a launcher only starts
and ends engines, and reports their ends.
"""

import asyncio
import inspect
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from tidegate.orchestrator.fleet.processes import LocalEngines, engine_number
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.policies.elasticity import StartEngine, StopEngine
from tidegate.transport.security import OrchestratorKeys, read_orchestrator_keys

CALLS_AT_ONCE_MAX = 8
"""Most calls of a user's functions at once: starts of machines mostly wait for a cloud."""

log = logging.getLogger("tidegate")

OnExit = Callable[[str, str], None]
"""Called on the run's loop with the name of each engine that ends, and the reason."""


class Engines(Protocol):
    """Engines that a run has started, and restarts when they die."""

    may_restart: bool
    """Whether engines that die are restarted: engines that were never ready have wrong settings."""

    @property
    def are_gone(self) -> bool:
        """Whether all engines have ended for good: none will be restarted."""
        ...

    def start(self) -> None:
        """Start all engines; they join when they have loaded the model."""
        ...

    @property
    def names(self) -> list[str]:
        """Names of the engines of the run's model that run or will be restarted, by number."""
        ...

    def add(self, count: int) -> list[str]:
        """Start more engines of the run's model; return their names: the lowest unused numbers."""
        ...

    def retire(self, name: str) -> None:
        """Don't restart an engine that was asked to end; kill it if it does not end in time.

        Its end is not reported. Harmless for engines that this launcher has not started.
        """
        ...

    def lost(self, name: str) -> None:
        """Take in that an engine has left the run unasked. Harmless for engines of others."""
        ...

    def kill(self, name: str) -> None:
        """Kill an engine that does not answer; it is restarted like any other."""
        ...

    def kill_all(self) -> None:
        """Kill all engines, as a last resort, from any thread."""
        ...

    def stop(self) -> None:
        """End all engines, and wait until they have ended."""
        ...


class EngineLauncher(Protocol):
    """Starts a run's engines on one machine or cluster."""

    @property
    def address(self) -> str | None:
        """Address at which the run listens for engines; None for a private ipc socket."""
        ...

    @property
    def keys(self) -> OrchestratorKeys | None:
        """CURVE keys of the run and of the peers that it accepts; None without encryption."""
        ...

    def engines(self, address: str, logs: Path, *, on_exit: OnExit) -> Engines:
        """Return engines that are not started yet; called on the run's loop."""
        ...


class LocalEngineLauncher:
    """Launcher whose engines are processes on this machine."""

    def __init__(self, settings: RunSettings) -> None:
        """Read the keys, if the settings name some.

        Raises:
            ConfigError: the keys can't be read.
        """
        self._settings = settings
        self.address = settings.fleet.listen_address
        self.keys = (
            None
            if settings.fleet.curve_key_directory is None
            else read_orchestrator_keys(settings.fleet.curve_key_directory)
        )

    def engines(self, address: str, logs: Path, *, on_exit: OnExit) -> Engines:
        """Return engines to be started by command line."""
        return LocalEngines(self._settings, address, logs, on_exit=on_exit)


class CalledEngines:
    """Engines that functions of the user start and stop, on threads. Use it on the run's loop."""

    def __init__(
        self,
        start: StartEngine,
        stop: StopEngine,
        address: str,
        *,
        count: int,
        known: Iterable[str],
        on_exit: OnExit,
    ) -> None:
        """``count``: engines to begin with. ``known``: engines of the run that is resumed, which
        are expected to reconnect."""
        self._start_engine, self._stop_engine = start, stop
        self._address = address
        self._count = count
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._names = {name for name in known if name.removeprefix("engine-").isdecimal()}
        self._calls: dict[str, Future[None]] = {}
        """Last call for each engine, so that a stop waits for the start before it."""
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE_MAX, thread_name_prefix="engines")
        self.may_restart = False

    @property
    def are_gone(self) -> bool:
        """Return False: another engine can always be started."""
        return False

    def start(self) -> None:
        """Start as many engines as the run begins with."""
        self.add(self._count - len(self._names))

    @property
    def names(self) -> list[str]:
        """Names of the engines that were started and not lost or retired since, by number."""
        return sorted(self._names, key=engine_number)

    def add(self, count: int) -> list[str]:
        """Start more engines; return their names: the lowest unused numbers."""
        unused = (f"engine-{n}" for n in itertools.count())
        names = list(itertools.islice((n for n in unused if n not in self._names), max(0, count)))
        for name in names:
            self._names.add(name)
            self._call(name, partial(self._start_engine, name, self._address))
        return names

    def retire(self, name: str) -> None:
        """Stop an engine that has left. Harmless for engines that were not started here."""
        if name in self._names:
            self._names.discard(name)
            self._call(name, partial(self._stop_engine, name))

    lost = kill = retire

    def _call(self, name: str, function: Callable[[], Awaitable[None] | None]) -> None:
        before = self._calls.get(name)

        def call() -> None:
            if before is not None:
                before.exception()  # waits for its end
            try:
                if inspect.isawaitable(result := function()):
                    asyncio.run(_awaited(result))
            except Exception as error:
                log.error("engine=%s could not be started or stopped", name, exc_info=error)
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._failed, name, repr(error))

        self._calls[name] = self._threads.submit(call)

    def _failed(self, name: str, why: str) -> None:
        if name in self._names:
            self._on_exit(name, why)

    def kill_all(self) -> None:
        """Stop all engines, and wait for nothing."""
        for name in self.names:
            self.retire(name)

    def stop(self) -> None:
        """Stop all engines, and wait until the user's functions have returned."""
        self.kill_all()
        self._threads.shutdown()


async def _awaited(result: Awaitable[None]) -> None:
    await result
