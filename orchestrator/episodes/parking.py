"""When does an episode go on that would wait for newer weights? Not later than it is missed.

Episodes that wait here have no turn, so their slots are others'. What they wait for comes by
itself, unless the trainer waits for them: then they go on at once. Of engines it knows nothing.
"""

import asyncio
from collections.abc import Callable


class Parking:
    """The episodes of a run that wait between two turns."""

    def __init__(self, live_version: Callable[[], int], is_starved: Callable[[], bool]) -> None:
        """``is_starved``: whether the trainer waits for a batch that isn't there."""
        self._live_version = live_version
        self._is_starved = is_starved
        self.parked: dict[asyncio.Future[None], int] = {}
        """With the version that was live when each came."""

    async def wait(self) -> None:
        """Return once newer weights are live than now, or the trainer waits for a batch."""
        if self._is_starved():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parked[future] = self._live_version()
        try:
            await future
        finally:
            self.parked.pop(future, None)

    def look(self) -> None:
        """Something has happened: let go on who may."""
        live, is_starved = self._live_version(), self._is_starved()
        for future, version in list(self.parked.items()):
            if (is_starved or live > version) and not future.done():
                future.set_result(None)
