"""Who starts a simulated engine again? The machine it runs on, which also lets it fail.

It knows processes, links and faults; not turns or weights.
"""

import asyncio
from collections.abc import Callable

from tidegate.orchestrator.faults import Fault, FaultKind
from tidegate.orchestrator.scenario import Scenario
from tidegate.orchestrator.simulated_engine import SimulatedEngine, hello_of
from tidegate.orchestrator.simulated_staging import WeightBuffer
from tidegate.orchestrator.simulated_truth import Truth
from tidegate.orchestrator.simulated_wire import SimulatedRouter

SLOWNESS = 20.0
"""Steps of a slow engine take so many times as long."""

RESTART_S = 0.1
"""At least so long passes between one process and the next."""

NOTICE_S = 0.02
"""So long after a crash the orchestrator is told, where it has started the process itself."""


class EngineHost:
    """One engine name, and the processes that bear it one after another."""

    def __init__(
        self,
        number: int,
        *,
        scenario: Scenario,
        router: SimulatedRouter,
        buffer: WeightBuffer,
        truth: Truth,
        on_exit: Callable[[str, str], None],
    ) -> None:
        self.name = f"engine-{number}"
        self._scenario = scenario
        self._loop: asyncio.AbstractEventLoop = router.loop
        self._buffer = buffer
        self._truth = truth
        self._on_exit = on_exit
        self._chance = scenario.chance("engine", number)
        self._epoch = 0
        self._swaps = 0
        self._faults: list[Fault] = []
        self.link = router.link(self.name, latency_s=scenario.latency_s, chance=self._chance)
        self.engine = self._new_engine()

    def start(self) -> None:
        """Start the first process."""
        self.engine.start()

    def plan(self, fault: Fault) -> None:
        """Have something go wrong when it is due."""
        if fault.at_s is None:
            self._faults.append(fault)
        else:
            self._loop.call_at(fault.at_s, self._suffer, fault)

    def _swapped(self) -> None:
        self._swaps += 1
        for fault in self._faults:
            if fault.after_swap == self._swaps:
                self._loop.call_soon(self._suffer, fault)

    def _suffer(self, fault: Fault) -> None:
        """Let something go wrong now."""
        engine, lasts_s = self.engine, fault.lasts_s
        match fault.kind:
            case FaultKind.CRASH:
                self._crash(lasts_s)
            case FaultKind.HANG:
                engine.hang()
                self._loop.call_later(lasts_s, engine.wake)
            case FaultKind.SLOW:
                engine.slowness = SLOWNESS
                self._loop.call_later(lasts_s, setattr, engine, "slowness", 1.0)
            case FaultKind.CUT:
                self.link.cut(lasts_s)
            case FaultKind.GARBLE:
                self.link.garble(1 + int(lasts_s))
            case FaultKind.LEAVE:
                engine.end("asked to leave")

    def _crash(self, lasts_s: float) -> None:
        if not self.engine.is_alive:
            return
        self.engine.kill()
        if self._chance.random() < 0.5:  # else only its silence tells
            self._loop.call_later(NOTICE_S, self._on_exit, self.name, "crashed")
        self._loop.call_later(RESTART_S + lasts_s, self._restart)

    def _ended(self) -> None:
        self._loop.call_later(RESTART_S, self._restart)

    def _restart(self) -> None:
        self.engine = self._new_engine()
        self.engine.start()

    def _new_engine(self) -> SimulatedEngine:
        self._epoch += 1
        return SimulatedEngine(
            hello_of(self.name, self._epoch, self._scenario.costs),
            link=self.link,
            loop=self._loop,
            costs=self._scenario.costs,
            buffer=self._buffer,
            chance=self._chance,
            truth=self._truth,
            on_swap=self._swapped,
            on_end=self._ended,
        )
