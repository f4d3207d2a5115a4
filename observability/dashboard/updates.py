"""How do all viewers of a run get the same frame? It is made once a second, while anybody looks.

A viewer who doesn't keep up misses frames; each tells the last seconds anew, so nothing is lost for
long. Knows bytes and viewers; what is in a frame is :mod:`frames`' business.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from tidegate.errors import TidegateError

INTERVAL_S = 0.95
"""From the beginning of one frame to that of the next: no viewer waits longer than a second."""

REST_SHARE = 0.25
"""Of the interval that nothing is made in, however long a frame took: it is somebody's CPU."""

VIEWERS_MAX = 32
"""A connection each; more than that is no audience."""

log = logging.getLogger("tidegate")


class TooManyViewers(TidegateError):
    """Nobody else can be shown the run now."""

    def __init__(self) -> None:
        super().__init__(f"{VIEWERS_MAX} viewers look at this run already; close one of them")


class Updates:
    """Sends frames to those who look, on the event loop that asks for the first viewer."""

    def __init__(self, make: Callable[[], bytes], *, interval_s: float = INTERVAL_S) -> None:
        """``make`` is called on a thread of its own, never twice at once."""
        self._make = make
        self._interval_s = interval_s
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self.frames_made = 0

    @property
    def num_viewers(self) -> int:
        """Who look now."""
        return len(self._viewers)

    def viewer(self) -> AsyncIterator[bytes]:
        """Frames from now on, until the run is over.

        Raises:
            TooManyViewers: there are as many as there may be.
        """
        if len(self._viewers) >= VIEWERS_MAX:
            raise TooManyViewers
        return self._frames()

    async def _frames(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._viewers.add(queue)  # only now: one who has gone before asks for nothing
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._send(), name="frames")
        try:
            while not self._is_over and (body := await queue.get()) is not None:
                yield body
        finally:
            self._viewers.discard(queue)

    async def _send(self) -> None:
        """While anybody looks; the first frame at once."""
        loop = asyncio.get_running_loop()
        while self._viewers and not self._is_over:
            due_s = loop.time() + self._interval_s
            try:
                body = await asyncio.to_thread(self._make)
            except TidegateError:
                self.end()  # the run is over
                return
            except Exception as error:
                log.error("a frame of the dashboard could not be made", exc_info=error)
                await asyncio.sleep(self._interval_s)
                continue
            self.frames_made += 1
            for queue in self._viewers:
                if queue.empty():
                    queue.put_nowait(body)
            await asyncio.sleep(max(REST_SHARE * self._interval_s, due_s - loop.time()))

    def end(self) -> None:
        """No more comes: viewers' streams end."""
        self._is_over = True
        for queue in self._viewers:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)
