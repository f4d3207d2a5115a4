"""Watchdog thread: names code that blocks the run's event loop, and measures the longest block.

A run starts one on its loop. An episode that computes without awaiting stops every other episode,
and with them the loop's own watchdog. The thread schedules a callback on the loop, and if the
callback does not run in time, it logs which code is running.
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

PATIENCE_S = 2.0
"""Delay of a blocked loop. A healthy one answers in milliseconds; heartbeats are 1 s apart."""

LIMIT_MIN_S = 30.0
"""Shortest block that ends a run, however short its episode timeout: the machine may be busy."""

LOOK_INTERVAL_S = 0.5

PLACES_TOLD_MAX = 100
"""Places in code that are logged, each once."""

log = logging.getLogger("tidegate")


class LoopWatch:
    """Thread that watches one event loop between :meth:`start` and :meth:`stop`."""

    def __init__(self, *, limit_s: float, on_dead: Callable[[RunBlocked], None]) -> None:
        """``on_dead`` is called, on the watching thread, after a block of ``limit_s``."""
        self._limit_s = max(LIMIT_MIN_S, limit_s)
        self._on_dead = on_dead
        self._is_over = threading.Event()
        self._is_alive = False
        """Whether the last scheduled callback has run."""
        self._is_asked = False
        self._asked_s = 0.0
        """When it was scheduled, by ``time.monotonic()``."""
        self._looks = 0
        """Number of times that the watching thread has woken up since then."""
        self._longest_block_s = 0.0
        self._blocked: Stuck | None = None
        self._told: set[str] = set()

    def start(self) -> None:
        """Watch the running loop; called on its thread."""
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        # Not joined: it ends by itself, and must not keep a program from ending.
        threading.Thread(
            target=self._watch, args=(loop, thread_id), name="tidegate-loop-watch", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop watching. Harmless if repeated, or never started."""
        self._is_over.set()
        self._blocked = None

    @property
    def blocked(self) -> Stuck | None:
        """Code that blocks the loop, as of the last check; None if the loop is not blocked."""
        return self._blocked

    @property
    def longest_block_s(self) -> float:
        """Longest time in seconds for which the loop ran nothing else.

        The loop is checked every ``LOOK_INTERVAL_S``, so a block counts from the next check on, and
        shorter ones may be missed.
        """
        waiting = self._is_asked and not self._is_alive and not self._is_over.is_set()
        return max(self._longest_block_s, self._waited_s()) if waiting else self._longest_block_s

    def _waited_s(self) -> float:
        """Return the time since the callback was scheduled, without pauses of the whole process."""
        return min(time.monotonic() - self._asked_s, (self._looks + 1) * LOOK_INTERVAL_S)

    def _sign_of_life(self) -> None:
        self._longest_block_s = max(self._longest_block_s, self._waited_s())
        self._is_alive = True

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        blocked_s = 0.0  # counted, not timed: a stopped process is no block
        while not self._is_over.wait(LOOK_INTERVAL_S):
            self._looks += 1
            is_late = self._is_asked and not self._is_alive
            blocked_s = blocked_s + LOOK_INTERVAL_S if is_late else 0.0
            blocked = _name(loop, thread_id, blocked_s) if blocked_s > PATIENCE_S else None
            self._blocked = blocked
            if blocked is not None:
                self._tell(blocked)
            if blocked is not None and blocked_s > self._limit_s:
                self._is_over.set()
                limit_s = self._limit_s
                self._on_dead(RunBlocked(who=blocked.who, where=blocked.where, limit_s=limit_s))
            if self._is_alive or not self._is_asked:
                self._is_alive, self._is_asked = False, True
                self._asked_s, self._looks = time.monotonic(), 0
                try:
                    loop.call_soon_threadsafe(self._sign_of_life)
                except RuntimeError:  # the loop is closed
                    return

    def _tell(self, blocked: Stuck) -> None:
        if blocked.where in self._told or len(self._told) >= PLACES_TOLD_MAX:
            return
        self._told.add(blocked.where)
        log.warning(
            "stuck=loop who=%r waited_s=%.0f where=%r; await asyncio.to_thread for what takes long",
            blocked.who,
            blocked.waited_s,
            blocked.where,
        )


def _name(loop: asyncio.AbstractEventLoop, thread_id: int, blocked_s: float) -> Stuck:
    """Name the running task and its place in the code; a guess, as both may have just changed."""
    task = asyncio.current_task(loop)
    who = task.get_name() if task is not None else "a callback"
    frame = sys._current_frames().get(thread_id)
    where = _place(frame) if frame is not None else "an unknown place"
    return Stuck("loop", who, where, blocked_s)


_NOT_THEIRS = (
    str(Path(__file__).parent),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<frozen",
)
"""Path prefixes of code that is never named as the cause: ours, Python's and libraries'."""


def _place(frame: FrameType) -> str:
    """Return the innermost line that is neither a library's nor ours; else the innermost line."""
    innermost = frame
    found: FrameType | None = frame
    while found is not None:
        if not found.f_code.co_filename.startswith(_NOT_THEIRS):
            break
        found = found.f_back
    shown = found or innermost
    return f"{shown.f_code.co_qualname} at {shown.f_code.co_filename}:{shown.f_lineno}"
