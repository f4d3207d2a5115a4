"""How does asyncio code run in no time at all? On an event loop whose clock jumps to what is next.

It knows no sockets, threads or processes: all that ever happens on it was scheduled on it. So the
same program does the same things in the same order, and one that waits for ever is found out.
"""

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from tidegate.errors import NothingLeftToHappen

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with neither selector nor clock; :meth:`time` starts at 0.

    Callbacks due at the same instant run in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._soon: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap of (when, order of scheduling, handle)."""
        self._timers_made = 0
        self.callbacks_run = 0

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
    ) -> NoReturn:
        """Refuse: a thread takes real time, and this loop does not wait for it."""
        raise RuntimeError("threads have no place in virtual time; use call_soon")

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], object], *args: *Ts
    ) -> NoReturn:
        """Refuse: a thread takes real time, and this loop does not wait for it."""
        raise RuntimeError("threads have no place in virtual time; await asyncio.sleep instead")

    def _run_once(self) -> None:
        """One round of ``run_forever``: all that is ready, after a jump if nothing is."""
        timers, soon = self._timers, self._soon
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not soon:
            if not timers:
                raise NothingLeftToHappen(waiting=self.waiting())
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
    """The task's name, and the innermost frame of ours that it waits in."""
    coroutine: Any = task.get_coro()
    where = "not started"
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
        coroutine = coroutine.cr_await
    return f"{task.get_name()} in {where}"


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a program on a loop of its own; as :func:`asyncio.run`, but time costs nothing.

    Raises:
        NothingLeftToHappen: it waits for what can't come; the message names who waits, and where.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(loop.create_task(main, name="main"))
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in tasks:
        task.cancel()
    if tasks:
        with contextlib.suppress(NothingLeftToHappen):
            loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(loop.shutdown_asyncgens())
