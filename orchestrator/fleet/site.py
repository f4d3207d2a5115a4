"""Who starts a run's engines, and how do they reach it? A site: this machine, or Ray's.

It decides nothing about turns or weights. An engine, once started, joins over the wire like any
other, whoever started it; so a site needs to start, end and tell of ends, and no more.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tidegate.orchestrator.fleet.processes import LocalEngines
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.transport.security import OrchestratorKeys, read_orchestrator_keys

OnExit = Callable[[str, str], None]
"""Told the name of each engine that ends, and why it did; on the run's loop."""


class Engines(Protocol):
    """The engines that a run has started, and starts again when they die."""

    may_restart: bool
    """An engine that never got ready is not tried again: its settings are wrong."""

    @property
    def are_gone(self) -> bool:
        """Whether none runs, and none will be started again."""
        ...

    def start(self) -> None:
        """Start all of them; they join when they have loaded the model."""
        ...

    def kill(self, name: str) -> None:
        """Kill an engine that doesn't answer; it is started again as any."""
        ...

    def kill_all(self) -> None:
        """The last resort, from any thread."""
        ...

    def stop(self) -> None:
        """End all of them and wait for it."""
        ...


class Site(Protocol):
    """Where a run's engines are."""

    @property
    def address(self) -> str | None:
        """Where the run listens for them; None is a private ipc socket."""
        ...

    @property
    def keys(self) -> OrchestratorKeys | None:
        """Whom it lets in."""
        ...

    def engines(self, address: str, logs: Path, *, on_exit: OnExit) -> Engines:
        """To be started; called on the run's loop, which listens at ``address``."""
        ...


class ThisMachine:
    """Engines are processes beside the run's."""

    def __init__(self, settings: RunSettings) -> None:
        """Reads the keys, if there are to be some.

        Raises:
            ConfigError: they can't be read.
        """
        self._settings = settings
        self.address = settings.fleet.address
        self.keys = (
            None if settings.fleet.keys is None else read_orchestrator_keys(settings.fleet.keys)
        )

    def engines(self, address: str, logs: Path, *, on_exit: OnExit) -> Engines:
        """Started by command line."""
        return LocalEngines(self._settings, address, logs, on_exit=on_exit)
