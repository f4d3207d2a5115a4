"""Watchdog thread: names code that blocks the run's event loop, and measures the longest block.

A run starts one :class:`LoopWatch` on its loop. An episode that computes without awaiting stops
every other episode, and the loop's own watchdog. The thread schedules a callback on the loop; if
the callback does not run in time, the thread logs which code is running.
"""

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tidegate.errors import RunBlocked
from tidegate.orchestrator.telemetry.watchdog import Stuck

REPORT_AFTER_S = 2.0
"""Shortest block that is reported. A healthy loop answers in milliseconds; heartbeats are 1 s
apart."""

LIMIT_MIN_S = 30.0
"""Shortest block that ends a run, however short its episode timeout: the machine may be busy."""

CHECK_INTERVAL_S = 0.5
"""Time between two checks of the loop."""

LOCATIONS_LOGGED_MAX = 100
"""Number of code locations that are logged, each once."""

log = logging.getLogger("tidegate")


class LoopWatch:
    """Thread that watches one event loop between :meth:`start` and :meth:`stop`."""

    def __init__(self, *, limit_s: float, on_blocked: Callable[[RunBlocked], None]) -> None:
        """``on_blocked`` is called, on the watching thread, after a block of ``limit_s``."""
        self._limit_s = max(LIMIT_MIN_S, limit_s)
        self._on_blocked = on_blocked
        self._is_stopped = threading.Event()
        self._has_run = False
        """Whether the last scheduled callback has run."""
        self._is_scheduled = False
        self._scheduled_s = 0.0
        """When the callback was last scheduled, on the clock ``time.monotonic()``."""
        self._checks = 0
        """Number of checks since then."""
        self._longest_block_s = 0.0
        self._blocked: Stuck | None = None
        self._logged: set[str] = set()

    def start(self) -> None:
        """Watch the running loop; called on its thread."""
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        # A daemon thread, not joined: it must not keep the program from ending.
        threading.Thread(
            target=self._watch, args=(loop, thread_id), name="tidegate-loop-watch", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop watching. Harmless if repeated, or never started."""
        self._is_stopped.set()
        self._blocked = None

    @property
    def blocked(self) -> Stuck | None:
        """Code that blocks the loop, as of the last check; None if the loop is not blocked."""
        return self._blocked

    @property
    def longest_block_s(self) -> float:
        """Longest time in seconds for which the loop ran nothing else.

        The loop is checked every ``CHECK_INTERVAL_S``, so a block counts from the next check on,
        and shorter ones may be missed.
        """
        waiting = self._is_scheduled and not self._has_run and not self._is_stopped.is_set()
        return max(self._longest_block_s, self._waited_s()) if waiting else self._longest_block_s

    def _waited_s(self) -> float:
        """Return the time since the callback was scheduled, without pauses of the whole process."""
        return min(time.monotonic() - self._scheduled_s, (self._checks + 1) * CHECK_INTERVAL_S)

    def _on_callback(self) -> None:
        self._longest_block_s = max(self._longest_block_s, self._waited_s())
        self._has_run = True

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        blocked_s = 0.0  # counts checks, because a stopped process (SIGSTOP) is not blocked
        while not self._is_stopped.wait(CHECK_INTERVAL_S):
            self._checks += 1
            is_late = self._is_scheduled and not self._has_run
            blocked_s = blocked_s + CHECK_INTERVAL_S if is_late else 0.0
            blocked = (
                _running_code(loop, thread_id, blocked_s) if blocked_s > REPORT_AFTER_S else None
            )
            self._blocked = blocked
            if blocked is not None:
                self._log(blocked)
            if blocked is not None and blocked_s > self._limit_s:
                self._is_stopped.set()
                limit_s = self._limit_s
                self._on_blocked(
                    RunBlocked(task_name=blocked.name, where=blocked.where, limit_s=limit_s)
                )
            if self._has_run or not self._is_scheduled:
                self._has_run, self._is_scheduled = False, True
                self._scheduled_s, self._checks = time.monotonic(), 0
                try:
                    loop.call_soon_threadsafe(self._on_callback)
                except RuntimeError:  # the loop is closed
                    return

    def _log(self, blocked: Stuck) -> None:
        if blocked.where in self._logged or len(self._logged) >= LOCATIONS_LOGGED_MAX:
            return
        self._logged.add(blocked.where)
        log.warning(
            "stuck=loop name=%r waited_s=%.0f where=%r; run blocking code by asyncio.to_thread",
            blocked.name,
            blocked.waited_s,
            blocked.where,
        )


def _running_code(loop: asyncio.AbstractEventLoop, thread_id: int, blocked_s: float) -> Stuck:
    """Return the running task and its code location; both may have just changed."""
    task = asyncio.current_task(loop)
    name = task.get_name() if task is not None else "a callback"
    frame = sys._current_frames().get(thread_id)
    where = _location(frame) if frame is not None else "an unknown location"
    return Stuck("loop", name, where, blocked_s)


_NOT_USER_CODE = (
    str(Path(__file__).parent),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<frozen",
)
"""Path prefixes of code that is never named as the cause: Tidegate, Python and libraries."""


def _location(frame: FrameType) -> str:
    """Return the innermost line that is neither a library's nor ours; else the innermost line."""
    innermost = frame
    found: FrameType | None = frame
    while found is not None:
        if not found.f_code.co_filename.startswith(_NOT_USER_CODE):
            break
        found = found.f_back
    frame = found or innermost
    return f"{frame.f_code.co_qualname} at {frame.f_code.co_filename}:{frame.f_lineno}"
