"""Routing policies: which engine gets the next turn, chosen from engine names and loads.

The orchestrator's core calls :meth:`RoutingPolicy.choose` for each turn it sends. A policy is
deterministic and immutable, because replaying the core's events must send each turn to the same
engine; all mutable state is in :class:`EngineLoads`, which can be rebuilt from the running turns. A
custom policy is one method::

    class FirstByName(RoutingPolicy):
        def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
            return loads.names[0] if loads.names else None

The cost of a choice must not grow with the number of engines: ask for the least loaded engine, or
for a few by name.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

ENTRIES_PER_NAME = 4
"""Bound on heap entries per engine, outdated ones included. The heap is rebuilt beyond it, which is
a constant amortised cost per change."""

MASK_64 = (1 << 64) - 1


class EngineLoads:
    """Loads and capacities of the engines that may get a turn, with a heap to find the least
    loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Names of the engines that may be chosen, sorted."""
        self._loads: dict[str, float] = {}
        """Turns per unit of capacity, by engine."""
        self._capacities: dict[str, float] = {}
        """Slots times speed, by engine: an engine twice as fast has twice the capacity."""
        self._heap: list[tuple[float, str]] = []
        """Lazy min-heap of (load, name). An entry is valid if it equals the engine's load; each
        engine has at least one valid entry."""

    def __contains__(self, name: str) -> bool:
        return name in self._loads

    def set(self, name: str, turns: int, capacity: float) -> None:
        """Set the load of an engine, and make it eligible."""
        loads, heap = self._loads, self._heap
        if name not in loads:
            insort(self.names, name)
        load = loads[name] = turns / capacity
        self._capacities[name] = capacity
        if heap and heap[0][1] == name:  # usually the engine that was just chosen
            heapreplace(heap, (load, name))
            return
        heappush(heap, (load, name))
        if len(heap) > ENTRIES_PER_NAME * len(loads) + 16:
            self._heap = [(load, name) for name, load in loads.items()]
            heapify(self._heap)

    def discard(self, name: str) -> None:
        """Make an engine ineligible; a no-op if it already is."""
        if self._loads.pop(name, None) is not None:
            del self.names[bisect_left(self.names, name)]
            del self._capacities[name]

    def least(self) -> str | None:
        """Return the least loaded engine, ties broken by name; None if there is none."""
        heap = self._heap
        while heap:
            load, name = heap[0]
            if self._loads.get(name) == load:
                return name
            heappop(heap)
        return None

    def load(self, name: str) -> float:
        """Return an eligible engine's turns per unit of capacity."""
        return self._loads[name]

    def is_near_least(self, name: str, margin_turns: int) -> bool:
        """Return whether an engine has at most ``margin_turns`` turns above the least load.

        False if the engine is not eligible.
        """
        load = self._loads.get(name)
        if load is None:
            return False
        capacity = self._capacities[name]
        # The top entry may be outdated, but no load is below it, and mostly this check suffices.
        if (load - self._heap[0][0]) * capacity <= margin_turns:
            return True
        least = self.least()
        return least is not None and (load - self._loads[least]) * capacity <= margin_turns


class TurnToRoute(NamedTuple):
    """Input of a routing policy: the turn to be routed."""

    number: int
    """Serial number of the turn, unique per turn sent."""
    group_id: int
    """Group of the turn, numbered consecutively; rollouts of one group share their prompt."""
    kv_engine: str | None
    """Engine that sampled this rollout's last tokens and may still hold their KV, or None."""


class RoutingPolicy:
    """Interface of routing policies. Equal arguments must give equal results."""

    __slots__ = ()

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """Return one of ``loads.names``, or None if it is empty."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LeastLoaded(RoutingPolicy):
    """Chooses the engine with the fewest turns per unit of capacity."""

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """Return the least loaded engine; see :meth:`RoutingPolicy.choose`."""
        return loads.least()


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOfTwoChoices(RoutingPolicy):
    """Chooses the less loaded of two engines drawn pseudo-randomly for each turn.

    Use it if several orchestrators share the engines: each counts only its own turns, and if all
    chose the least loaded engine they would all choose the same one. Two choices leave the fullest
    engine ``log log n / log 2`` turns above the mean (Mitzenmacher 2001, theorem 1).
    """

    seed: int = 0
    """Seed of the draws; give each orchestrator a different one."""

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """Return the less loaded of the two drawn engines; see :meth:`RoutingPolicy.choose`."""
        names = loads.names
        if len(names) < 2:
            return loads.least()
        drawn = _splitmix64(turn.number, self.seed)
        first = (drawn & 0xFFFFFFFF) % len(names)
        second = (drawn >> 32) % (len(names) - 1)
        second += second >= first  # differs from the first; all others are equally likely
        return min(names[first], names[second], key=lambda name: (loads.load(name), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAffinity(RoutingPolicy):
    """Keeps a rollout on the engine that holds its KV, unless that engine is much more loaded.

    A rollout stays while the engine that sampled its last tokens has at most ``margin_turns`` turns
    above the least loaded engine's load. Staying saves the prefill of the context, but a fuller
    engine decodes slower. Each turn adds 0.12 ms to a step, so 8 more turns delay a turn of 1,000
    tokens by about 1 s; a prefill of 25,000 tokens takes as long.
    """

    margin_turns: int = 8
    otherwise: RoutingPolicy = field(default_factory=LeastLoaded)
    """Policy for first turns, and for turns whose engine is too full or gone."""

    def __post_init__(self) -> None:
        _check_margin(self.margin_turns)

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """Return the engine with the rollout's KV, or ask ``otherwise``; see
        :meth:`RoutingPolicy.choose`."""
        engine = turn.kv_engine
        if engine is not None and loads.is_near_least(engine, self.margin_turns):
            return engine
        return self.otherwise.choose(loads, turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAffinity(RoutingPolicy):
    """Sends all rollouts of a group to one engine, so their prompt's KV is computed only once.

    Group ``g`` prefers engine ``g mod n`` in name order: groups are numbered consecutively, so this
    spreads them evenly without state. A preferred engine that is more than ``margin_turns`` turns
    above the least loaded one's load (as in :class:`SessionAffinity`) is passed over.
    """

    margin_turns: int = 16
    """Must be at least ``group_size``; otherwise part of each group always goes elsewhere."""
    otherwise: RoutingPolicy = field(default_factory=LeastLoaded)

    def __post_init__(self) -> None:
        _check_margin(self.margin_turns)

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """Return the group's preferred engine, or ask ``otherwise``; see
        :meth:`RoutingPolicy.choose`."""
        names = loads.names
        if names:
            preferred = names[turn.group_id % len(names)]
            if loads.is_near_least(preferred, self.margin_turns):
                return preferred
        return self.otherwise.choose(loads, turn)


def _check_margin(margin_turns: int) -> None:
    if margin_turns < 0:
        raise ValueError(
            f"margin_turns counts turns that a preferred engine may have too many and must be "
            f">= 0 (0: only while no engine is less loaded), got {margin_turns}"
        )


def _splitmix64(number: int, seed: int) -> int:
    """Return 64 pseudo-random bits: splitmix64 (Steele, Lea, Flood 2014, figure 16)."""
    z = (number * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)
