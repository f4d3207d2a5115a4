"""When does an episode go on that would wait for newer weights? Not later than it is missed.

Episodes that wait here have no turn, so their slots are others'. What they wait for comes by
itself, unless the trainer waits for them: then they go on at once. Of engines it knows nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Callable


class Parking:
    """The episodes of a run that wait between two turns."""

    def __init__(self, live_version: Callable[[], int], is_starved: Callable[[], bool]) -> None:
        """``is_starved``: whether the trainer waits for a batch that isn't there."""
        self._live_version = live_version
        self._is_starved = is_starved
        self.parked: dict[asyncio.Future[None], int] = {}
        """With the version that was live when each came."""
        self.rows: Counter[int] = Counter()
        """How many rows of an episode are among them, by its rollout."""
        self._seen = (-1, False)
        """The live version, and whether the trainer waits, that everybody here knows of."""

    @property
    def is_of_use(self) -> bool:
        """Whether newer weights may come without those who would wait for them."""
        return not self._is_starved()

    async def wait(self, rollout_id: int) -> None:
        """Return once newer weights are live than now, or the trainer waits for a batch."""
        if not self.is_of_use:
            return
        self.look()  # what has changed unseen is for those who came before
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

    def look(self) -> None:
        """Something has happened: let go on who may. Mostly nobody may, and thousands wait."""
        live, is_starved = now = self._live_version(), self._is_starved()
        if now == self._seen:
            return
        self._seen = now
        for future, version in list(self.parked.items()):
            if (is_starved or live > version) and not future.done():
                future.set_result(None)
