"""Drives a core whose turns are placed by rules of a test's choice, by numbered steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tests.orchestrator.core.driver import Driver
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.placement import Placement, PlacementRules
from tidegate.policies.staleness import StalenessPolicy
from tidegate.policies.stragglers import EngineView, Move, Stragglers


@dataclass(frozen=True, slots=True)
class MovesAnything(Stragglers):
    """No sensible policy: it moves a good part of all turns at every step, also where it can't."""

    check_steps: int = 1

    def moves(self, engines: Sequence[EngineView]) -> list[Move]:
        return [
            Move(engine.name, turn.handle, engines[(turn.handle + turn.tokens) % len(engines)].name)
            for engine in engines
            for turn in engine.turns
            if (turn.handle * 7 + turn.tokens * 5 + len(engine.name)) % 3 == 0
        ]


def place_by(core: Core, rules: PlacementRules) -> None:
    """Before anything has happened to ``core``."""
    core.turns.placement = Placement(core.turns.engines, rules)


class PlacedDriver(Driver):
    """A driver whose engines count their steps, as real ones do."""

    def __init__(self, rules: PlacementRules, policy: StalenessPolicy, group_size: int) -> None:
        self._steps: Counter[str] = Counter()
        self.busy_us: dict[str, int] = {}
        """Of each step of an engine; 0 for those that don't measure."""
        super().__init__(policy=policy, group_size=group_size, placement=rules)

    def do(self, event: ev.Event) -> list[ev.Command]:
        if isinstance(event, ev.StepArrived):
            seq, busy_us = self._steps[event.engine], self.busy_us.get(event.engine, 0)
            event = msgspec.structs.replace(event, seq=seq, busy_us=busy_us)
            self._steps[event.engine] += 1
        return super().do(event)
