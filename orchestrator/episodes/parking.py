"""Parking: episodes that wait between two turns until newer weights are live.

The episode runner parks them, and the scheduler calls :meth:`Parking.resume_due` after events. A
parked episode has no turn, so its slots are free for other rollouts. If the trainer waits for a
batch, all parked episodes continue at once, because no weights come without rollouts.
"""

import asyncio
from collections import Counter
from collections.abc import Callable


class Parking:
    """Parked episodes of a run."""

    def __init__(self, live_version: Callable[[], int], is_starved: Callable[[], bool]) -> None:
        """``is_starved`` returns whether the trainer waits for a batch."""
        self._live_version = live_version
        self._is_starved = is_starved
        self.parked: dict[asyncio.Future[None], int] = {}
        """Futures of parked rows, with the version that was live when each parked."""
        self.rows: Counter[int] = Counter()
        """Number of parked rows of each episode, by rollout id."""
        self._last_state = (-1, False)
        """(live version, whether the trainer waits) when ``resume_due`` last resumed episodes."""

    @property
    def can_get_newer_weights(self) -> bool:
        """Whether newer weights may come without the rollouts that would park."""
        return not self._is_starved()

    async def wait(self, rollout_id: int) -> None:
        """Return once weights newer than now are live, or the trainer waits for a batch."""
        if not self.can_get_newer_weights:
            return
        self.resume_due()  # changes so far concern only rows parked before
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parked[future] = self._live_version()
        self.rows[rollout_id] += 1
        try:
            await future
        finally:
            self.parked.pop(future, None)
            self.rows[rollout_id] -= 1
            if not self.rows[rollout_id]:
                del self.rows[rollout_id]

    def resume_due(self) -> None:
        """Resume the episodes that may continue; mostly none, with thousands parked."""
        live, is_starved = now = self._live_version(), self._is_starved()
        if now == self._last_state:
            return
        self._last_state = now
        for future, version in list(self.parked.items()):
            if (is_starved or live > version) and not future.done():
                future.set_result(None)
