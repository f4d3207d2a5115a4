"""Elasticity policy: how many engines a run should have, by what a batch costs with each number.

The orchestrator asks it after each batch, with the figures of the batches since the fleet last
changed. The time per batch with other numbers of engines is that of the diagnosis
(:mod:`tidegate.policies.bottlenecks`). Symbols: n engines, b(n) seconds per batch, E and T the
costs of an hour of one engine, and of the trainer and all that waits with it. A batch costs
``c(n) = b(n) (T + n E) / 3600``, and the best n is that of the lowest c.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tidegate.policies.bottlenecks import (
    GAIN_MIN,
    RunFigures,
    are_engines_busy,
    batch_s_by_engines,
    evidence_of,
)

StartEngine = Callable[[str, str], Awaitable[None] | None]
"""Starts an engine, given its name and the address that it must connect to."""

StopEngine = Callable[[str], Awaitable[None] | None]
"""Ends an engine, given its name, and releases its machine."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Decision to have another number of engines."""

    engines_before: int
    engines: int
    because: str
    """Figures that the decision follows from."""

    def __str__(self) -> str:
        return f"from={self.engines_before} to={self.engines} because={self.because!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """Adds and retires engines where that makes batches cheaper, and has lost ones replaced.

    Limits and counts are of engines for training: those kept for evaluations come on top. In doubt
    the policy changes nothing: until ``batches`` batches were measured with the present engines,
    if less than 5 % would be saved, or if what is saved until the next decision would not pay for
    the engines' starts. It adds engines only where the diagnosis finds the present ones busy, and
    retires some only if a batch would be cheaper even with 1.4 times the work. One decision at most
    doubles or halves the engines, because the figures say little about other runs.
    """

    engines_max: int
    engines_min: int = 1
    """Fewest engines; 2 for evaluations of one version without engines kept for them."""
    engine_hour_cost: float = 1.0
    """Cost of an engine's hour, in any unit."""
    trainer_hour_cost: float = 4.0
    """Cost of an hour of the trainer, and of whatever else waits for batches, in the same unit.
    The higher, the more engines are kept so that the trainer waits less."""
    start_s: float = 60.0
    """Seconds from an engine's start until it serves. They are paid and bring nothing."""
    cool_down_s: float = 600.0
    """Least seconds from one change of the fleet, losses included, to the next decision."""
    drain_s: float = 30.0
    """Seconds in which the turns of a retired engine may end where they are; others move."""
    batches: int = 4
    """Number of batches with the present engines that a decision needs."""
    start: StartEngine | None = None
    """Starts an engine elsewhere, in place of the run: on a thread, as a function or coroutine."""
    stop: StopEngine | None = None
    """Ends an engine that ``start`` has started, after it has left or was lost; also at the end."""

    def __post_init__(self) -> None:
        if not 1 <= self.engines_min <= self.engines_max:
            raise ValueError(
                f"Elastic needs 1 <= engines_min <= engines_max, got engines_min="
                f"{self.engines_min}, engines_max={self.engines_max}"
            )
        for name in ("engine_hour_cost", "trainer_hour_cost", "start_s", "cool_down_s", "drain_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Elastic's {name} must be finite and >= 0, got {value}")
        if self.batches < 2:
            raise ValueError(f"Elastic's batches must be >= 2 to measure them, got {self.batches}")
        if (self.start is None) != (self.stop is None):
            raise ValueError("Elastic needs both start and stop, or neither; got one of them")

    def clipped(self, engines: int) -> int:
        """Return the number of engines within the limits that is next to ``engines``."""
        return min(self.engines_max, max(self.engines_min, engines))

    def decide(self, run: RunFigures, *, quiet_s: float) -> Scaling | None:
        """Return what to change; None: nothing.

        Args:
            run: figures of the last batches, all of them with the same ``run.engines`` engines.
            quiet_s: seconds since the fleet last changed.
        """
        if quiet_s < self.cool_down_s:
            return None
        now = run.engines
        lowest, highest = self.clipped(-(-now // 2)), self.clipped(2 * now)
        fewer = range(lowest, min(now, highest + 1))
        more = range(max(now + 1, lowest), highest + 1) if are_engines_busy(run) else ()
        found = [self._cheapest(run, counts) for counts in (fewer, more) if counts]
        best = max((each for each in found if each is not None), default=None)
        return None if best is None else Scaling(now, best[1], best[2])

    def _cheapest(self, run: RunFigures, counts: Sequence[int]) -> tuple[float, int, str] | None:
        """Return the saving per second with the best of these numbers, that number and the
        figures; None if no saving is sure."""
        now, batch_s = run.engines, batch_s_by_engines(run, (run.engines, *counts))
        costs = {
            n: seconds * (self.trainer_hour_cost + n * self.engine_hour_cost) / 3600
            for n, seconds in batch_s.items()
        }
        best = min(counts, key=lambda count: costs[count])
        saved = costs[now] - costs[best]
        if saved < (GAIN_MIN + run.batch_error) * costs[now]:
            return None
        saved_per_s = saved / batch_s[best]
        starts = abs(best - now) * self.engine_hour_cost * self.start_s / 3600
        until_next_s = max(self.cool_down_s, self.batches * batch_s[best])
        if saved_per_s * until_next_s < starts:
            return None
        because = (
            f"{evidence_of(run)}: a batch would take {batch_s[best]:.3g} s instead of "
            f"{batch_s[now]:.3g} s, and cost {costs[best]:.3g} instead of {costs[now]:.3g}"
        )
        return saved_per_s, best, because
