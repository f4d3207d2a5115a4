"""Interface of engine launchers, and the launcher of processes on this machine.

`trainer/run.py` starts and ends engines through it; the run's settings select the launcher, and
integrations/ray has one for Ray actors. All engines join over the wire, so a launcher only starts
and ends engines, and reports their ends.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tidegate.orchestrator.fleet.processes import LocalEngines
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.transport.security import OrchestratorKeys, read_orchestrator_keys

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
