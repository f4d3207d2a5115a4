"""Broadcast of dashboard updates: one frame per second, sent to every open connection.

The app's Server-Sent Events route (`/api/updates`) iterates over :meth:`Updates.viewer`. Frames are
made only while there are viewers. A slow viewer misses frames; no data is lost, because each frame
covers the last seconds. The content of a frame comes from :mod:`frames`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from tidegate.errors import TidegateError

INTERVAL_S = 0.95
"""Seconds from one frame's start to the next; below 1 s, so that no viewer waits longer."""

PAUSE_SHARE = 0.25
"""Share of the interval in which no frame is made, however long the last one took."""

VIEWERS_MAX = 32
"""Largest number of open dashboard connections; further ones are refused."""

log = logging.getLogger("tidegate")


class TooManyViewers(TidegateError):
    """The dashboard has :data:`VIEWERS_MAX` open connections."""

    def __init__(self) -> None:
        super().__init__(f"{VIEWERS_MAX} dashboard connections are open already; close one")


class Updates:
    """Sends frames to all viewers, from a task on the event loop of the first one."""

    def __init__(self, make_frame: Callable[[], bytes], *, interval_s: float = INTERVAL_S) -> None:
        """``make_frame`` returns an encoded frame; it is called on a thread, never concurrently."""
        self._make_frame = make_frame
        self._interval_s = interval_s
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self.last: bytes | None = None
        """Data that viewers get after the last frame, as event ``ended``; None if nothing."""

    @property
    def num_viewers(self) -> int:
        """Number of open dashboard connections."""
        return len(self._viewers)

    def viewer(self) -> AsyncIterator[bytes]:
        """Return an iterator of frames, from now until the run is over.

        Raises:
            TooManyViewers: the limit is reached.
        """
        if len(self._viewers) >= VIEWERS_MAX:
            raise TooManyViewers
        return self._frames()

    async def _frames(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._viewers.add(
            queue
        )  # on the first iteration, so that a client that left before is not counted
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._send(), name="frames")
        try:
            while not self._is_over and (body := await queue.get()) is not None:
                yield body
        finally:
            self._viewers.discard(queue)

    async def _send(self) -> None:
        """Make and send frames while there are viewers, the first one at once."""
        loop = asyncio.get_running_loop()
        while self._viewers and not self._is_over:
            due_s = loop.time() + self._interval_s
            try:
                body = await asyncio.to_thread(self._make_frame)
            except TidegateError:
                self.end()  # the run is over
                return
            except Exception as error:
                log.error("a frame of the dashboard could not be made", exc_info=error)
                await asyncio.sleep(self._interval_s)
                continue
            for queue in self._viewers:
                if queue.empty():
                    queue.put_nowait(body)
            await asyncio.sleep(max(PAUSE_SHARE * self._interval_s, due_s - loop.time()))

    def end(self, last: bytes | None = None) -> None:
        """End all viewers' streams; ``last`` is what they get at their end."""
        self._is_over = True
        self.last = self.last or last
        for queue in self._viewers:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)
