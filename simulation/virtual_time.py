"""Event loop in virtual time: its clock jumps to whatever is scheduled next.

It has no sockets, threads or processes: all that ever happens on it was scheduled on it. So the
same program does the same things in the same order, and one that waits for ever is found out.
"""

import asyncio
import contextlib
import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from tidegate.errors import NothingLeftToHappen, VirtualTimeUp
from tidegate.orchestrator.episodes.contained_tasks import contained_task

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")


FRAMES_SHOWN = 3
"""Of each task that waits: the last is usually asyncio's, and those before it are telling."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with neither selector nor clock; :meth:`time` starts at 0.

    Callbacks due at the same instant run in the order in which they were scheduled.
    """

    def __init__(self, *, limit_s: float = math.inf, tick_s: float | None = None) -> None:
        """``tick_s``: the clock stands only at multiples of it, so that much happens at once."""
        super().__init__()
        self.limit_s = limit_s
        """The clock goes no further."""
        self._tick_s = tick_s
        self._thread = threading.get_ident()
        self._now_s = 0.0
        self._soon: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap of (when, order of scheduling, handle)."""
        self._timers_made = 0
        self.callbacks_run = 0
        self.set_task_factory(contained_task)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Run ``callback`` before the clock moves on."""
        handle = asyncio.Handle(callback, args, self, context)
        self._soon.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run ``callback`` when the clock says ``when``."""
        if self._tick_s is not None:
            when = self._tick_s * math.ceil(when / self._tick_s)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, handle))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run ``callback`` after ``delay`` virtual seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """As :meth:`call_soon`, for code that doesn't know where it runs.

        Raises:
            RuntimeError: another thread calls, but virtual time waits for no thread.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError("virtual time waits for no thread; run this without one in a test")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], Result], *args: *Ts
    ) -> asyncio.Future[Result]:
        """Call ``func`` here and now: it takes no virtual time. So works ``asyncio.to_thread``."""
        future: asyncio.Future[Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to who awaits the future
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        """One round of ``run_forever``: all that is ready, after a jump if nothing is."""
        timers, soon = self._timers, self._soon
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not soon:
            if not timers:
                raise NothingLeftToHappen(waiting=self.waiting())
            if timers[0][0] > self.limit_s:
                raise VirtualTimeUp(limit_s=self.limit_s, waiting=self.waiting())
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            soon.append(heapq.heappop(timers)[2])
        for _ in range(len(soon)):
            handle = soon.popleft()
            if not handle.cancelled():
                self.callbacks_run += 1
                handle._run()

    def waiting(self) -> list[str]:
        """Which tasks are not done, and where each waits."""
        return sorted(_whereabouts(task) for task in asyncio.all_tasks(self))


def _whereabouts(task: "asyncio.Task[Any]") -> str:
    """The task's name, and the innermost functions that it waits in."""
    coroutine: Any = task.get_coro()
    frames: list[str] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return f"{task.get_name()} in {' > '.join(frames[-FRAMES_SHOWN:]) or 'nothing yet'}"


class VirtualTime:
    """An event loop's time, and who lets it pass: as :class:`asyncio.Runner`, but it costs nothing.

    The loop stays from one call to the next, and what runs on it stands still in between.
    """

    def __init__(self, *, limit_s: float = math.inf, tick_s: float | None = None) -> None:
        """``limit_s``: no more virtual seconds than these, for heartbeats alone go on for ever."""
        self.loop = VirtualLoop(limit_s=limit_s, tick_s=tick_s)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.loop.time()

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end.

        Raises:
            NothingLeftToHappen: it waits for what can't come; the message names who waits, where.
            VirtualTimeUp: it took longer than the limit.
        """
        return self.loop.run_until_complete(self.loop.create_task(main, name="main"))

    def sleep(self, seconds: float) -> None:
        """Let so much time pass, from code that isn't async."""
        self.run(asyncio.sleep(seconds))

    def close(self) -> None:
        """Cancel whatever is left. Harmless if repeated."""
        if self.loop.is_closed():
            return
        self.loop.limit_s = math.inf
        tasks = sorted(asyncio.all_tasks(self.loop), key=lambda task: task.get_name())
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(NothingLeftToHappen):
                self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a program; as :func:`asyncio.run`, but time costs nothing.

    Raises:
        NothingLeftToHappen: it waits for what can't come; the message names who waits, and where.
    """
    time = VirtualTime()
    try:
        return time.run(main)
    finally:
        time.close()
