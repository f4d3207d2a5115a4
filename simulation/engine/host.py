"""Machine of a simulated engine: starts its processes one after another, and injects its faults."""

import math
import random
from collections.abc import Callable

from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.engine.coarse import CoarseEngine, CoarseEngineSpec
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.engine import SimulatedEngine
from tidegate.simulation.engine.spec import SimulatedEngineSpec, hello_of
from tidegate.simulation.faults.faults import Fault, FaultKind

SLOWNESS = 20.0
"""Factor by which the steps of a slow engine take longer."""

STAGING_DELAY_S = 10.0
"""Additional time that a lagging engine takes to copy weights, in seconds."""

RESTART_S = 0.1
"""Minimum time between the end of one engine process and the start of the next, in seconds."""

NOTICE_S = 0.02
"""Delay of the exit report of a crashed engine that the orchestrator has started, in seconds."""


class EngineHost:
    """Starts the processes of one engine name one after another, and injects its faults."""

    def __init__(
        self,
        name: str,
        spec: SimulatedEngineSpec,
        *,
        context: SimulationContext,
        latency_s: float,
        chance: random.Random,
        on_exit: Callable[[str, str], None] = lambda engine, why: None,
        on_drain: Callable[[str, float], None] = lambda engine, within_s: None,
    ) -> None:
        """Create the host; ``on_exit`` is called with a crashed engine's name and the reason,
        ``on_drain`` with an engine that the run is to drain, and the time for it in seconds."""
        self.name = name
        self._spec = spec
        self._context = context
        self._loop = context.loop
        self._on_exit = on_exit
        self._on_drain = on_drain
        self.must_end_idle = False
        """Whether the engine must have handed back its turns when it gets ``Shutdown``, because
        nothing but drains was planned for it."""
        self._chance = chance
        self._epoch = 0
        self._swaps = 0
        self._is_stopped = False
        self._faults: list[Fault] = []
        self.link = context.router.link(name, latency_s=latency_s, chance=chance)
        self.engine: SimulatedEngine | None = None
        """Newest engine process; None before the first one is started."""

    def __str__(self) -> str:
        return str(self.engine or f"{self.name}: not started yet")

    def start(self) -> None:
        """Start the first process, unless a planned fault delays the start."""
        if not any(fault.kind is FaultKind.LATE for fault in self._faults):
            self._restart()

    def plan(self, fault: Fault) -> None:
        """Schedule a fault for its time or weight swap. Call this before :meth:`start`."""
        self._faults.append(fault)
        if not fault.after_swap:
            self._loop.call_at(fault.at_s, self._inject, fault)

    # ------------------------------------------------------------ reports of the engine process

    def swapped(self) -> None:
        """Count one reported weight swap, and inject the faults due after this number of swaps."""
        self._swaps += 1
        for fault in self._faults:
            if fault.after_swap == self._swaps:
                self._loop.call_soon(self._inject, fault)

    def stepped(self, tokens: int) -> None:
        """Ignore the tokens of a step; :class:`EngineOwner` requires the method."""

    def shut_down(self, running_turns: int) -> None:
        """Record that the engine process got ``Shutdown`` while it ran this many turns."""
        assert not (running_turns and self.must_end_idle), (
            f"{self.name} was told to end while it ran {running_turns} turns"
        )

    def ended(self) -> None:
        """Start the next process after the engine process has ended by itself."""
        self._loop.call_later(RESTART_S, self._restart)

    # ------------------------------------------------------------ fault injection

    def _inject(self, fault: Fault) -> None:
        """Inject one fault now, if the engine is in a state that the fault applies to."""
        if self.engine is None:
            if fault.kind is FaultKind.LATE:
                self._context.coverage.record(CoverageMark.LATE)
                self._restart()
        elif fault.kind in (FaultKind.CUT, FaultKind.STALL, FaultKind.GARBLE):
            self._inject_wire_fault(fault)
        elif self.engine.is_alive:
            self._inject_engine_fault(self.engine, fault)

    def _inject_wire_fault(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.CUT:
                self.link.cut(fault.lasts_s)
            case FaultKind.STALL:
                self.link.stall(fault.lasts_s)
            case FaultKind.GARBLE:
                self.link.garble(1 + int(fault.lasts_s))

    def _inject_engine_fault(self, engine: SimulatedEngine, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.CRASH:
                self.crash(fault.lasts_s, is_noticed=self._chance.random() < 0.5)
            case FaultKind.HANG:
                engine.hang()
                self._loop.call_later(fault.lasts_s, engine.wake)
            case FaultKind.SLOW:
                self._context.coverage.record(CoverageMark.SLOWED)
                engine.slowness = SLOWNESS
                self._loop.call_later(fault.lasts_s, setattr, engine, "slowness", 1.0)
            case FaultKind.LEAVE:
                self._context.coverage.record(CoverageMark.LEFT)
                engine.end("asked to leave")
            case FaultKind.DRAIN:
                self._on_drain(self.name, fault.lasts_s)
            case FaultKind.REFUSE:
                engine.staging.refusals_due += 1
            case FaultKind.LAG:
                engine.staging.delay_s = STAGING_DELAY_S
                self._loop.call_later(fault.lasts_s, setattr, engine.staging, "delay_s", 0.0)

    def crash(self, lasts_s: float, *, is_noticed: bool, is_clean: bool = False) -> None:
        """Kill the engine process, and start another one if ``lasts_s`` is finite.

        ``is_noticed``: the orchestrator has started the process itself and gets an exit report;
        otherwise only the engine's silence shows the crash. ``is_clean``: frames that the engine
        sent before the crash still arrive.
        """
        if self.engine is None or not self.engine.is_alive:
            return
        self._context.coverage.record(CoverageMark.CRASHED)
        self.engine.kill(is_clean=is_clean)
        if is_noticed:
            self._loop.call_later(NOTICE_S, self._on_exit, self.name, "crashed")
        if math.isfinite(lasts_s):
            self._loop.call_later(RESTART_S + lasts_s, self._restart)

    def stop(self) -> None:
        """Kill the engine process and start no other one."""
        self._is_stopped = True
        if self.engine is not None:
            self.engine.kill()

    def _restart(self) -> None:
        if self._is_stopped:
            return
        self._epoch += 1
        is_coarse = isinstance(self._spec, CoarseEngineSpec)
        engine_class = CoarseEngine if is_coarse else SimulatedEngine
        self.engine = engine_class(
            hello_of(self.name, self._epoch, self._spec),
            self._spec,
            context=self._context,
            link=self.link,
            chance=self._chance,
            owner=self,
        )
        self.engine.start()
