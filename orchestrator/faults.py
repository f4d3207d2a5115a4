"""What goes wrong in a simulated run, and when? Faults are planned from the seed, before it starts.

Knows when and to whom a fault happens; what it does to an engine is the engine's.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

from tidegate.errors import ConfigError


class FaultKind(StrEnum):
    """What can happen to an engine, or to an episode."""

    CRASH = "crash"
    """The process is gone with all it had, and is started again later, with weights 0."""
    HANG = "hang"
    """It does nothing for a while: neither reads, nor computes, nor sends."""
    SLOW = "slow"
    """Its steps take many times as long for a while."""
    CUT = "cut"
    """The connection breaks; the last frames of each direction are lost."""
    GARBLE = "garble"
    """Some of the frames it sends arrive damaged."""
    LEAVE = "leave"
    """It says goodbye, and is started again later."""
    EPISODE = "episode"
    """Some episodes raise, and some never return."""


ALL_FAULTS = frozenset(FaultKind)
NO_FAULTS: frozenset[FaultKind] = frozenset()

AFTER_SWAP_SHARE = 0.3
"""Of the faults, for a swap is when most is in flight that nobody numbers."""

FAULTS_MAX = 6
"""Per run: enough that they meet each other, and few enough to understand a failure."""

LONGEST_FAULT_S = 3.0
"""Longer than any engine is waited for, so that some are given up and come back."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float | None
    """When; None for one that follows a swap."""
    after_swap: int | None
    """Right after the engine's so many-th swap of weights, counted from 1, while it is announced;
    None for one at a fixed time."""
    kind: FaultKind
    engine: int
    """Its number."""
    lasts_s: float


def parse_faults(words: str) -> frozenset[FaultKind]:
    """Read ``all``, ``none`` or a list such as ``crash,cut``.

    Raises:
        ConfigError: there is no such fault.
    """
    if words in ("all", "none"):
        return ALL_FAULTS if words == "all" else NO_FAULTS
    try:
        return frozenset(FaultKind(word.strip()) for word in words.split(","))
    except ValueError as error:
        known = ", ".join(FaultKind)
        raise ConfigError(f"{error}; faults are all, none, or a list of {known}") from None


def name_faults(kinds: frozenset[FaultKind]) -> str:
    """What :func:`parse_faults` reads."""
    if kinds in (ALL_FAULTS, NO_FAULTS):
        return "all" if kinds else "none"
    return ",".join(sorted(kinds))


def plan_faults(
    kinds: frozenset[FaultKind], *, engines: int, until_s: float, chance: random.Random
) -> list[Fault]:
    """Choose what goes wrong in one run."""
    ours = sorted(kinds - {FaultKind.EPISODE})
    if not ours:
        return []
    faults = []
    for _ in range(chance.randint(1, FAULTS_MAX)):
        after_swap = chance.randint(1, 3) if chance.random() < AFTER_SWAP_SHARE else None
        at_s = round(chance.uniform(0.0, until_s), 4)
        faults.append(
            Fault(
                at_s=None if after_swap else at_s,
                after_swap=after_swap,
                kind=chance.choice(ours),
                engine=chance.randrange(engines),
                lasts_s=round(LONGEST_FAULT_S * chance.random() ** 3, 4),
            )
        )
    return faults
