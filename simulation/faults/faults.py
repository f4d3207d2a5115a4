"""Injected faults of a simulated run, planned from its seed before it starts.

Faults have a kind, a time and an engine; unusual trainers and episodes are settings of the
scenario.
"""

import random
from enum import StrEnum

import msgspec

from tidegate.errors import ConfigError


class FaultKind(StrEnum):
    """Kinds of faults: of engines, connections, weights, trainers and episodes."""

    CRASH = "crash"
    """The process ends with all its state, and is started again later, at weight version 0."""
    HANG = "hang"
    """The engine neither reads, computes nor sends for a while."""
    SLOW = "slow"
    """The engine's steps take many times as long for a while."""
    LEAVE = "leave"
    """The engine sends a goodbye, ends, and is started again later."""
    DRAIN = "drain"
    """The run has the engine leave, at once or within some time; another process joins later."""
    LATE = "late"
    """The engine's first process is started only when the run is well under way."""
    CUT = "cut"
    """The connection breaks; the last frames of each direction are lost."""
    STALL = "stall"
    """Frames of one or both directions of the connection are held back, and then all arrive."""
    GARBLE = "garble"
    """Some of the frames that the engine sends arrive damaged."""
    REFUSE = "refuse"
    """The engine refuses the next weights that it is sent."""
    LAG = "lag"
    """The engine takes longer to copy weights than short weight timeouts allow."""
    PRESSURE = "pressure"
    """All engines have little memory for KV: they preempt turns, or hand them back."""
    EPISODE = "episode"
    """Some episodes raise, some request a turn that no engine can serve or that ends every engine,
    and some never return."""
    GIVE_UP = "give_up"
    """Some episodes stop waiting for their turn, and continue with the tokens sampled so far."""
    TRAINER = "trainer"
    """The trainer cancels publishes, stops waiting for batches and asks again, offers new tasks
    before the previous ones are done, and publishes twice in a row."""


SCENARIO_FAULTS = frozenset(
    {FaultKind.PRESSURE, FaultKind.EPISODE, FaultKind.GIVE_UP, FaultKind.TRAINER}
)
"""Faults that apply to the whole run, not to one engine at one time."""

WEIGHT_FAULTS = frozenset({FaultKind.REFUSE, FaultKind.LAG})

ALL_FAULTS = frozenset(FaultKind)
NO_FAULTS: frozenset[FaultKind] = frozenset()

AFTER_SWAP_SHARE = 0.3
"""Share of faults that are placed right after a weight swap, when the most messages without a
sequence number are in flight."""

DRAIN_SHARE = 0.3
"""Share of runs in which engines are drained, beside the other faults."""

DRAINS_MAX = 3
"""Most drains of one run."""

FAULTS_MAX = 6
"""Most faults of one run: enough that they overlap, and few enough to understand a failure."""

LONGEST_FAULT_S = 3.0
"""Longest duration of a fault, in seconds: longer than engine timeouts, so that some engines are
given up and come back."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One planned fault."""

    kind: FaultKind
    engine: int = 0
    """Number of the engine that the fault is injected into."""
    at_s: float = 0.0
    """Virtual time of the fault, in seconds; unused if ``after_swap`` is set."""
    after_swap: int = 0
    """Number of the engine's weight swap, from 1, that the fault follows while the announcement of
    the swap is on its way; 0 for a fault at a fixed time."""
    lasts_s: float = 0.0
    """Duration of the fault, in virtual seconds; of a drain, the time that the engine's turns have
    to end."""


def parse_faults(text: str) -> frozenset[FaultKind]:
    """Read ``all``, ``none`` or a list such as ``crash,cut``.

    Raises:
        ConfigError: there is no such fault.
    """
    if text in ("all", "none"):
        return ALL_FAULTS if text == "all" else NO_FAULTS
    try:
        return frozenset(FaultKind(word.strip()) for word in text.split(","))
    except ValueError as error:
        known = ", ".join(FaultKind)
        raise ConfigError(f"{error}; faults are all, none, or a list of {known}") from None


def name_faults(kinds: frozenset[FaultKind]) -> str:
    """Return the kinds as text that :func:`parse_faults` reads back."""
    if kinds in (ALL_FAULTS, NO_FAULTS):
        return "all" if kinds else "none"
    return ",".join(sorted(kinds))


def plan_faults(
    kinds: frozenset[FaultKind], *, engines: int, until_s: float, chance: random.Random
) -> list[Fault]:
    """Draw the faults of one run, at times before ``until_s`` or right after weight swaps."""
    engine_faults = sorted(kinds - SCENARIO_FAULTS - {FaultKind.DRAIN})
    if not engine_faults:
        return []
    faults = []
    for _ in range(chance.randint(1, FAULTS_MAX)):
        kind = chance.choice(engine_faults)
        after_swap = chance.randint(1, 3) if chance.random() < AFTER_SWAP_SHARE else 0
        if kind is FaultKind.LATE:
            after_swap = 0
        at_s = round(chance.uniform(0.0, until_s), 4)
        faults.append(
            Fault(
                kind=kind,
                engine=chance.randrange(engines),
                at_s=0.0 if after_swap else at_s,
                after_swap=after_swap,
                lasts_s=round(LONGEST_FAULT_S * chance.random() ** 3, 4),
            )
        )
    return faults


def plan_drains(
    kinds: frozenset[FaultKind], *, engines: int, until_s: float, chance: random.Random
) -> list[Fault]:
    """Draw the drains of one run, at times before ``until_s`` or right after weight swaps."""
    if FaultKind.DRAIN not in kinds or chance.random() >= DRAIN_SHARE:
        return []
    drains = []
    for _ in range(chance.randint(1, DRAINS_MAX)):
        is_after_swap = chance.random() < AFTER_SWAP_SHARE
        drain = Fault(
            kind=FaultKind.DRAIN,
            engine=chance.randrange(engines),
            at_s=0.0 if is_after_swap else round(chance.uniform(0.0, until_s), 4),
            after_swap=chance.randint(1, 3) if is_after_swap else 0,
            lasts_s=chance.choice((0.0, 0.0, round(LONGEST_FAULT_S * chance.random() ** 3, 4))),
        )
        drains.append(drain)
    return drains
