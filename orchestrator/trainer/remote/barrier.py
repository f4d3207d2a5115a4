"""How long does one rank wait for others? Until they have come so far, or are gone for too long.

What they wait for, and who is missing, it is told; it names who it gave up for.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.errors import TrainerLost
from tidegate.orchestrator.trainer.remote.seats import Seats

LOOK_INTERVAL_S = 0.5
"""Between two looks at who is still there."""

BARRIER_TIMEOUT_S = 1800.0
"""For a rank that lives and does not get there: as long as torch.distributed waits."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for whom, in seconds."""

    trainer_s: float
    """For a trainer, or a rank, that has not come yet, or that is to come again."""
    rank_s: float
    """For a rank that is silent."""


class Barrier:
    """Where requests of ranks wait for those of others."""

    def __init__(self, seats: Seats, patience: Patience) -> None:
        self._seats = seats
        self._patience = patience
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Something has changed that may be waited for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self, is_ready: Callable[[], bool], missing: Callable[[], list[int]], *, doing: str
    ) -> None:
        """Return once it is ready.

        Raises:
            TrainerLost: one of the missing ranks is gone, and will not come, as far as can be told.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while not is_ready():
            self._check(missing(), loop.time(), began_s, doing)
            try:
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _check(self, missing: list[int], now_s: float, began_s: float, doing: str) -> None:
        reasons: dict[str, list[int]] = {}
        for rank in missing:
            if why := self._why_lost(rank, now_s, now_s - began_s):
                reasons.setdefault(why, []).append(rank)
        for why, ranks in reasons.items():
            raise TrainerLost(ranks=ranks, world_size=self._seats.world_size, doing=doing, why=why)

    def _why_lost(self, rank: int, now_s: float, waited_s: float) -> str | None:
        silent_s = self._seats.silent_s(rank, now_s)
        if self._seats.is_done(rank):
            return "has done and left"
        if self._seats.has_left(rank):
            return "has failed and left" if waited_s > self._patience.rank_s else None
        if silent_s is None:
            late = waited_s > self._patience.trainer_s
            return f"has not come for {waited_s:.0f} s" if late else None
        if min(silent_s, waited_s) > self._patience.rank_s:  # it may be on its way back
            return f"was not heard for {silent_s:.0f} s"
        if waited_s > BARRIER_TIMEOUT_S:
            return f"lives, but has not got there for {waited_s:.0f} s"
        return None
