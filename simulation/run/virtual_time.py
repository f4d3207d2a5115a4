"""Event loop in virtual time: its clock jumps to the next scheduled timer.

The loop has no sockets, threads or processes, so a program runs the same callbacks in the same
order each time, and a program that waits forever is detected.
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
"""Number of innermost frames shown of a waiting task. The last is usually asyncio's own."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop without a selector and without a real clock; :meth:`time` starts at 0.

    Callbacks due at the same instant run in the order in which they were scheduled.
    """

    def __init__(self, *, limit_s: float = math.inf, tick_s: float | None = None) -> None:
        """Create the loop; timers are rounded up to multiples of ``tick_s``, so that many coincide.

        ``limit_s``: :class:`VirtualTimeUp` is raised instead of advancing the clock beyond it.
        """
        super().__init__()
        self.limit_s = limit_s
        """Latest virtual time, in seconds."""
        self._tick_s = tick_s
        self._thread = threading.get_ident()
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """Heap of (due time, order of scheduling, handle)."""
        self._timers_made = 0
        self._servers: list[asyncio.Future[Any]] = []
        """What servers wait for; without it their tasks would be freed, as asyncio holds none."""
        self.callbacks_run = 0
        self.set_task_factory(contained_task)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now_s

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Run ``callback`` before the clock advances."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run ``callback`` at the virtual time ``when``."""
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
        """Run ``callback`` as :meth:`call_soon` does; only the loop's own thread may call.

        Raises:
            RuntimeError: another thread calls, whose real time can't be ordered in virtual time.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "another thread called the event loop, but virtual time can't wait for threads; "
                "run this code without a thread in the test"
            )
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], Result], *args: *Ts
    ) -> asyncio.Future[Result]:
        """Call ``func`` now on this thread, in no virtual time, so ``asyncio.to_thread`` works."""
        future: asyncio.Future[Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the future hands the error to its waiter
            future.set_exception(error)
        return future

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """Wait until cancelled, because no client can connect where there are no sockets.

        A program that serves HTTP beside what a test calls directly runs here, too.
        """
        self._servers.append(self.create_future())
        return await self._servers[-1]

    def _run_once(self) -> None:
        """Run all ready callbacks; advance the clock to the next timer first if there are none."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise NothingLeftToHappen(waiting=self.waiting())
            if timers[0][0] > self.limit_s:
                raise VirtualTimeUp(limit_s=self.limit_s, waiting=self.waiting())
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                self.callbacks_run += 1
                handle._run()

    def waiting(self) -> list[str]:
        """Return a line for each task that is not done, with the frames in which the task waits."""
        return sorted(_format_task(task) for task in asyncio.all_tasks(self))


def _format_task(task: "asyncio.Task[Any]") -> str:
    coroutine: Any = task.get_coro()
    frames: list[str] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return f"{task.get_name()} in {' > '.join(frames[-FRAMES_SHOWN:]) or 'nothing yet'}"


class VirtualTime:
    """Runner of a :class:`VirtualLoop`, like :class:`asyncio.Runner`, for sync and async code.

    The loop is kept from one call to the next. Tasks on the loop run only during a call.
    """

    def __init__(self, *, limit_s: float = math.inf, tick_s: float | None = None) -> None:
        """Create the loop; ``limit_s`` ends a run in which only heartbeats continue."""
        self.loop = VirtualLoop(limit_s=limit_s, tick_s=tick_s)

    @property
    def now_s(self) -> float:
        """Virtual time since the start, in seconds."""
        return self.loop.time()

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end.

        Raises:
            NothingLeftToHappen: the coroutine waits, and nothing is scheduled that could wake any
                task; the message names the waiting tasks.
            VirtualTimeUp: the limit of virtual time was reached.
        """
        return self.loop.run_until_complete(self.loop.create_task(main, name="main"))

    def sleep(self, seconds: float) -> None:
        """Advance virtual time by ``seconds``, from sync code."""
        self.run(asyncio.sleep(seconds))

    def close(self) -> None:
        """Cancel all tasks and close the loop. Harmless if repeated."""
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
    """Run a coroutine in virtual time, as :func:`asyncio.run` does in real time.

    Raises:
        NothingLeftToHappen: the coroutine waits, and nothing is scheduled that could wake any task;
            the message names the waiting tasks.
    """
    time = VirtualTime()
    try:
        return time.run(main)
    finally:
        time.close()
