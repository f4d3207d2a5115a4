"""Heartbeat task: gives up silent engines, and ends a run that has been without any for too long.

The scheduler runs it. :meth:`Fleet.tick` decides which engines are silent.
"""

import asyncio
from collections.abc import Callable, Iterable

from tidegate.errors import EngineLost
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.fleet.fleet import Fleet


class Heartbeats:
    """Calls the fleet once per heartbeat interval."""

    def __init__(
        self,
        fleet: Fleet,
        handle: Callable[[Iterable[ev.Event]], None],
        on_silent: Callable[[str], None],
        *,
        interval_s: float,
        join_timeout_s: float,
    ) -> None:
        """``handle`` feeds events to the core; ``on_silent`` gets the names of engines that were
        given up; ``join_timeout_s``: how long a run without any engine waits for one."""
        self._fleet = fleet
        self._handle = handle
        self._on_silent = on_silent
        self._interval_s = interval_s
        self._join_timeout_s = join_timeout_s
        self._no_engine_since_s: float | None = None

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            EngineLost: the run had no engine for too long.
        """
        loop = asyncio.get_running_loop()
        while True:
            silent = self._fleet.tick(loop.time())
            self._handle(silent)
            for event in silent:
                if isinstance(event, ev.EngineLeft):
                    self._on_silent(event.engine)
            self._check_engines_left(loop.time())
            await asyncio.sleep(self._interval_s)

    def _check_engines_left(self, now_s: float) -> None:
        if self._fleet.engines:
            self._no_engine_since_s = None
        elif self._no_engine_since_s is None:
            self._no_engine_since_s = now_s
        elif now_s - self._no_engine_since_s > self._join_timeout_s:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._fleet.departed.items())
            why = f"none has come since ({reasons or 'none ever joined'})"
            raise EngineLost(f"no engine is left, and {why}")
