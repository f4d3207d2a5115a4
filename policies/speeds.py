"""How fast is each engine beside the others? Told by the user, or learned from its steps.

A speed weighs an engine's slots when turns are routed: twice as fast, twice the turns. It must
follow from the events alone, as all that routing rests on; no clock is read here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite

ROWS_WORTH_A_STEP = 64
"""Reading the weights takes a step as long as so many turns in it do: t(b) = 8 ms + 0.12 ms * b.
Without it, an engine would seem the faster the more turns it has, and get ever more."""

US_PER_ROW_NOMINAL = 125
"""16 ms for 64 turns: an engine like that has speed 1."""

SMOOTHING = 1 / 32
"""Weight of a new step: some steps with long prefills must not chase all turns away."""


class EngineSpeeds:
    """The contract: all engines alike, unless a subclass knows better."""

    __slots__ = ()

    def first(self, name: str, others: Sequence[float]) -> float:
        """Of an engine that has just come, beside ``others``."""
        return 1.0

    def after_step(self, speed: float, *, rows: int, tokens: int, busy_us: int) -> float:
        """Of an engine that had ``speed`` before a step of so many turns and tokens."""
        return speed


@dataclass(frozen=True, slots=True)
class DeclaredSpeeds(EngineSpeeds):
    """What the user says of the engines; those not named have speed 1."""

    by_name: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, speed in self.by_name.items():
            if not (isfinite(speed) and speed > 0):
                raise ValueError(
                    f"the speed of engine {name!r} must be a number > 0 (2.0: twice as fast as an "
                    f"engine that isn't named), got {speed}"
                )

    def first(self, name: str, others: Sequence[float]) -> float:
        """See :meth:`EngineSpeeds.first`."""
        return self.by_name.get(name, 1.0)


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds(EngineSpeeds):
    """What an engine does per second of work, whatever the number of turns it has.

    A step of ``b`` turns is taken for ``64 + b`` pieces of work, and the pieces per second are
    smoothed. Who comes is taken for as fast as the others are on average, until it has shown.
    """

    def first(self, name: str, others: Sequence[float]) -> float:
        """See :meth:`EngineSpeeds.first`."""
        return fsum(others) / len(others) if others else 1.0

    def after_step(self, speed: float, *, rows: int, tokens: int, busy_us: int) -> float:
        """See :meth:`EngineSpeeds.after_step`."""
        if not tokens or busy_us <= 0:
            return speed  # it told only of ends, or doesn't measure its steps
        pieces = (ROWS_WORTH_A_STEP + rows) * tokens / rows
        return speed + SMOOTHING * (pieces * US_PER_ROW_NOMINAL / busy_us - speed)
