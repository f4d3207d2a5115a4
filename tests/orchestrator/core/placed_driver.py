"""Test driver whose turns are placed by given rules, and whose engines number their steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tests.orchestrator.core.driver import Driver
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.placement import Placement, PlacementRules
from tidegate.policies.migration import EngineView, MigrationPolicy, Move
from tidegate.policies.staleness import StalenessPolicy


@dataclass(frozen=True, slots=True)
class MovesAnything(MigrationPolicy):
    """Migration policy that moves many turns at every step, also where they can't go."""

    check_steps: int = 1

    def moves(self, engines: Sequence[EngineView]) -> list[Move]:
        return [
            Move(engine.name, turn.handle, engines[(turn.handle + turn.tokens) % len(engines)].name)
            for engine in engines
            for turn in engine.turns
            if (turn.handle * 7 + turn.tokens * 5 + len(engine.name)) % 3 == 0
        ]


def place_by(core: Core, rules: PlacementRules) -> None:
    """Set the placement rules of a new ``core``."""
    core.turns.placement = Placement(core.turns.engines, rules)


class PlacedDriver(Driver):
    """Driver whose engines number their steps, as real ones do."""

    def __init__(self, rules: PlacementRules, policy: StalenessPolicy, group_size: int) -> None:
        self._steps: Counter[str] = Counter()
        self.busy_us: dict[str, int] = {}
        """Time of each engine's steps; 0 for engines that don't measure it."""
        super().__init__(policy=policy, group_size=group_size, placement=rules)

    def do(self, event: ev.Event) -> list[ev.Command]:
        if isinstance(event, ev.StepArrived):
            seq, busy_us = self._steps[event.engine], self.busy_us.get(event.engine, 0)
            event = msgspec.structs.replace(event, seq=seq, busy_us=busy_us)
            self._steps[event.engine] += 1
        return super().do(event)
