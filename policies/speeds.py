"""Relative engine speeds, declared by the user or estimated from the engines' steps.

Routing weighs an engine's slots by its speed: twice as fast, twice the turns. Estimates derive from
step events alone, never from a clock, because routing must be replayable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite

ROWS_WORTH_A_STEP = 64
"""Fixed cost of a step in turns: reading the weights takes as long as this many turns, t(b) = 8 ms
+ 0.12 ms * b. Without it, an engine with more turns would seem faster and get even more."""

US_PER_ROW_NOMINAL = 125
"""Microseconds per turn of an engine with speed 1: 16 ms for 64 turns."""

SMOOTHING = 1 / 32
"""Weight of a new step in the moving average; small, because a few long prefills must not divert
all turns."""


class EngineSpeeds:
    """Interface of speed estimators. The base class gives all engines speed 1."""

    __slots__ = ()

    def first(self, name: str, others: Sequence[float]) -> float:
        """Return the speed of an engine that has just joined, given the speeds of ``others``."""
        return 1.0

    def after_step(self, speed: float, *, rows: int, tokens: int, busy_us: int) -> float:
        """Return the new speed of an engine after a step of ``rows`` turns and ``tokens``
        tokens."""
        return speed


@dataclass(frozen=True, slots=True)
class DeclaredSpeeds(EngineSpeeds):
    """Speeds declared by the user; engines not named have speed 1."""

    by_name: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, speed in self.by_name.items():
            if not (isfinite(speed) and speed > 0):
                raise ValueError(
                    f"the speed of engine {name!r} must be a number > 0 (2.0: twice as fast as an "
                    f"engine that isn't named), got {speed}"
                )

    def first(self, name: str, others: Sequence[float]) -> float:
        """Return the declared speed, or 1; see :meth:`EngineSpeeds.first`."""
        return self.by_name.get(name, 1.0)


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds(EngineSpeeds):
    """Estimates an engine's speed from its work per second, independent of its number of turns.

    A step of ``b`` turns counts as ``64 + b`` units of work, and units per second are smoothed
    exponentially. A new engine starts with the mean speed of the others.
    """

    def first(self, name: str, others: Sequence[float]) -> float:
        """Return the mean of ``others``, or 1; see :meth:`EngineSpeeds.first`."""
        return fsum(others) / len(others) if others else 1.0

    def after_step(self, speed: float, *, rows: int, tokens: int, busy_us: int) -> float:
        """Return the smoothed speed; see :meth:`EngineSpeeds.after_step`."""
        if not tokens or busy_us <= 0:
            return speed  # the step only ended turns, or the engine does not time its steps
        pieces = (ROWS_WORTH_A_STEP + rows) * tokens / rows
        return speed + SMOOTHING * (pieces * US_PER_ROW_NOMINAL / busy_us - speed)
