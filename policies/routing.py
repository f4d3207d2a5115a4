"""Which engine gets the next turn? A choice among names and loads, the same for the same history.

It knows no engine, no clock and no chance: a core that lives through its events again must send
each turn where it went before. So a policy is a frozen object that keeps nothing, and whatever
changes is in :class:`EngineLoads`, which can be made anew from the turns that are there. A policy
of one's own is one method::

    class FirstByName(Routing):
        def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
            return loads.names[0] if loads.names else None

What it costs must not grow with the engines: so ask for the least loaded, or for a few by name.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

ENTRIES_PER_NAME = 4
"""The heap keeps outdated entries until they come up; beyond this many it is made anew, which so
costs a constant per change."""

MASK_64 = (1 << 64) - 1


class EngineLoads:
    """The engines that may get a turn: how many they have, and how many they are good for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Sorted."""
        self._loads: dict[str, float] = {}
        """Turns per unit of capacity."""
        self._capacities: dict[str, float] = {}
        """Slots, times speed: an engine twice as fast is good for twice the turns."""
        self._heap: list[tuple[float, str]] = []
        """An entry counts while its load is the name's; each name has at least one that does."""

    def __contains__(self, name: str) -> bool:
        return name in self._loads

    def set(self, name: str, turns: int, capacity: float) -> None:
        """This name may be chosen, and has this load now."""
        loads, heap = self._loads, self._heap
        if name not in loads:
            insort(self.names, name)
        load = loads[name] = turns / capacity
        self._capacities[name] = capacity
        if heap and heap[0][1] == name:  # outdated by this one: mostly it was chosen
            heapreplace(heap, (load, name))
            return
        heappush(heap, (load, name))
        if len(heap) > ENTRIES_PER_NAME * len(loads) + 16:
            self._heap = [(load, name) for name, load in loads.items()]
            heapify(self._heap)

    def discard(self, name: str) -> None:
        """This name may not be chosen any more; nothing happens if it couldn't be."""
        if self._loads.pop(name, None) is not None:
            del self.names[bisect_left(self.names, name)]
            del self._capacities[name]

    def least(self) -> str | None:
        """The least loaded name, of equal loads the first; None if there is none."""
        heap = self._heap
        while heap:
            load, name = heap[0]
            if self._loads.get(name) == load:
                return name
            heappop(heap)
        return None

    def load(self, name: str) -> float:
        """Turns per unit of capacity of one that may be chosen."""
        return self._loads[name]

    def is_near_least(self, name: str, margin_turns: int) -> bool:
        """Whether it has at most so many turns more than if it were as loaded as the least.

        False for one that may not be chosen.
        """
        load = self._loads.get(name)
        if load is None:
            return False
        capacity = self._capacities[name]
        # The first entry may be outdated, but no load is below it: that is mostly all one needs.
        if (load - self._heap[0][0]) * capacity <= margin_turns:
            return True
        least = self.least()
        return least is not None and (load - self._loads[least]) * capacity <= margin_turns


class TurnToRoute(NamedTuple):
    """What a policy may know of the turn that it finds an engine for."""

    number: int
    """Another one for each turn that is sent."""
    group_id: int
    """The rollouts of one group share their prompt; groups are numbered one by one."""
    kv_engine: str | None
    """Which engine sampled this rollout's last tokens, and may have their KV still."""


class Routing:
    """The contract: an engine for a turn. Equal arguments must give equal answers."""

    __slots__ = ()

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """One of ``loads.names``; None if there is none."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LeastLoaded(Routing):
    """The engine with the fewest turns for its capacity."""

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """See :meth:`Routing.choose`."""
        return loads.least()


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOfTwoChoices(Routing):
    """The less loaded of two engines drawn for each turn.

    For several orchestrators over the same engines: each knows only its own turns, and where all
    went for the least loaded they would all choose the same one. Two choices leave the fullest
    engine ``log log n / log 2`` turns above the mean (Mitzenmacher 2001, theorem 1).
    """

    seed: int = 0
    """Another one for each orchestrator."""

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """See :meth:`Routing.choose`."""
        names = loads.names
        if len(names) < 2:
            return loads.least()
        drawn = _mixed(turn.number, self.seed)
        first = (drawn & 0xFFFFFFFF) % len(names)
        second = (drawn >> 32) % (len(names) - 1)
        second += second >= first  # another than the first, all equally likely
        return min(names[first], names[second], key=lambda name: (loads.load(name), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAffinity(Routing):
    """A rollout goes on where its KV is, unless that engine has far more turns than another.

    The rule: it stays while the engine that sampled its last tokens has at most ``margin_turns``
    turns more than if it were as loaded as the least loaded one. Staying saves the prefill of the
    context, and costs slower tokens: at 0.12 ms per turn in a step, eight turns more make 1,000
    tokens slower by a second; 25,000 tokens can be prefilled meanwhile.
    """

    margin_turns: int = 8
    otherwise: Routing = field(default_factory=LeastLoaded)
    """Where first turns go, and those whose engine is too full or gone."""

    def __post_init__(self) -> None:
        _check_margin(self.margin_turns)

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """See :meth:`Routing.choose`."""
        engine = turn.kv_engine
        if engine is not None and loads.is_near_least(engine, self.margin_turns):
            return engine
        return self.otherwise.choose(loads, turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAffinity(Routing):
    """The rollouts of a group go to one engine, which so has their prompt's KV only once.

    Group ``g`` is at home on engine ``g mod n`` by name: groups are numbered one by one, so that
    spreads them evenly, and nothing has to be remembered. A home with more than ``margin_turns``
    turns too many (counted as :class:`SessionAffinity` does) is passed over.
    """

    margin_turns: int = 16
    """Not less than the rollouts of a group, or some of them always go elsewhere."""
    otherwise: Routing = field(default_factory=LeastLoaded)

    def __post_init__(self) -> None:
        _check_margin(self.margin_turns)

    def choose(self, loads: EngineLoads, turn: TurnToRoute) -> str | None:
        """See :meth:`Routing.choose`."""
        names = loads.names
        if names:
            home = names[turn.group_id % len(names)]
            if loads.is_near_least(home, self.margin_turns):
                return home
        return self.otherwise.choose(loads, turn)


def _check_margin(margin_turns: int) -> None:
    if margin_turns < 0:
        raise ValueError(
            f"margin_turns counts turns that a preferred engine may have too many and must be "
            f">= 0 (0: only while no engine is less loaded), got {margin_turns}"
        )


def _mixed(number: int, seed: int) -> int:
    """64 bits that look random: splitmix64 (Steele, Lea, Flood 2014, figure 16)."""
    z = (number * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)
