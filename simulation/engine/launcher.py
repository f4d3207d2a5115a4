"""Launcher of simulated engines: starts hosts' processes, and lets them end, in virtual time."""

import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from tidegate.orchestrator.fleet.processes import engine_number
from tidegate.simulation.engine.engine import EngineHost

Host = TypeVar("Host", bound=EngineHost)


class SimulatedEngines(Generic[Host]):
    """Engines of a simulated run, by the hosts that start them again when they crash."""

    def __init__(
        self, hosts: dict[str, Host], make_host: Callable[[str], Host], *, start_s: float
    ) -> None:
        """``make_host`` makes the host of an added engine, which serves after ``start_s``."""
        self.hosts = hosts
        """Hosts of all engines so far, by name."""
        self._make_host = make_host
        self._start_s = start_s
        self._retired: set[str] = set()
        self.may_restart = True

    @property
    def are_gone(self) -> bool:
        """Whether all engines have ended, and none starts again."""
        return not self.names

    def start(self) -> None:
        """Start the first engines."""
        for host in self.hosts.values():
            host.start()

    @property
    def names(self) -> list[str]:
        """Names of the engines that run or will start again, by number."""
        here = (name for name in self.hosts.keys() - self._retired if not self._is_gone(name))
        return sorted(here, key=engine_number)

    def _is_gone(self, name: str) -> bool:
        """Whether the engine has ended for good by itself."""
        return name in self.hosts and self.hosts[name].is_gone

    def add(self, count: int) -> list[str]:
        """Start more engines; return their names: the lowest unused numbers."""
        unused = (n for n in map("engine-{}".format, itertools.count()) if n not in self.names)
        names = list(itertools.islice((n for n in unused if not self._is_gone(n)), count))
        for name in names:
            if name not in self.hosts:
                self.hosts[name] = self._make_host(name)
            self._retired.discard(name)
            self.hosts[name].begin_again(self._start_s)
        return names

    def retire(self, name: str) -> None:
        """Start no further process of an engine that was asked to leave."""
        if name in self.hosts:
            self._retired.add(name)
            self.hosts[name].retire()

    def lost(self, name: str) -> None:
        """Do nothing: the host starts the engine again, or not."""

    def kill(self, name: str) -> None:
        """Do nothing: an engine that hangs does so for as long as its faults say."""

    def kill_all(self) -> None:
        """Kill all processes, and start no other ones."""
        for host in self.hosts.values():
            host.stop()

    stop = kill_all
