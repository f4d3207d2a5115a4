"""Are the engines paused? Tells every one of them, late joiners too, and hears that it is so.

A pause is a state of the run, not a count: the one asked for last holds, and one resume ends it.
Pauses, resumes and swaps of weights come one after another, never at the same time. What a pause
does to turns is the engines' business; those it ends come back, and wait in engines' queues.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from tidegate.orchestrator.waiting import Waiting
from tidegate.transport.messages import Message, Pause, Paused, PauseMode, Resume, Resumed

log = logging.getLogger("tidegate")


class Shell(Protocol):
    """What pausing needs of the scheduler."""

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages to engines."""

    def give_up_engine(self, engine: str, why: str) -> None:
        """Strike an engine that doesn't answer."""

    def stand_still(self, is_still: bool) -> None:
        """Count no episode's time while engines are paused."""


class Pauses:
    """Pauses all engines, and has them go on."""

    def __init__(
        self,
        waiting: Waiting,
        shell: Shell,
        *,
        is_swapping: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        """``is_swapping``: whether an engine was told to swap weights, and hasn't done so.
        ``timeout_s``: how long an engine may take to stop what it does, or to go on."""
        self._waiting = waiting
        self._shell = shell
        self._is_swapping = is_swapping
        self._timeout_s = timeout_s
        self.mode: PauseMode | None = None
        """As asked for last; None: engines run."""
        self._clears_cache = False
        """Whether engines forget the KV that they keep for later turns."""
        self._engines: set[str] = set()
        self._unconfirmed: set[str] = set()
        """Engines that have not said yet that this is so."""
        self._resumes_due: Counter[str] = Counter()
        """Engine -> resumes it hasn't answered: what it says of pauses before that is old."""
        self._one_at_a_time = asyncio.Lock()

    @property
    def is_changing(self) -> bool:
        """Whether a pause or a resume is under way; no engine is told to swap meanwhile."""
        return self._one_at_a_time.locked()

    def holds(self, engine: str) -> bool:
        """Whether an engine has said that it is paused as was asked for last."""
        is_known = engine in self._engines and engine not in self._unconfirmed
        return self.mode is not None and is_known

    # ------------------------------------------------------------ for the trainer

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Return once no turn runs on any engine, and with ``clear_cache`` no KV waits for one.

        ``wait`` takes as long as the longest turn. An engine that doesn't stop in time, though it
        could, is given up, as one that is silent. If it is cancelled, the pause may hold all the
        same; resume to be sure.
        """
        limit_s = None if mode == "wait" else self._timeout_s
        await self._ask(mode, limit_s, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Return once every engine runs its turns again."""
        await self._ask(None, self._timeout_s)

    async def _ask(
        self, mode: PauseMode | None, limit_s: float | None, *, clear_cache: bool = False
    ) -> None:
        async with self._one_at_a_time:
            await self._waiting.until(lambda: not self._is_swapping())
            if mode is None and self.mode is None:
                return
            self.mode, self._clears_cache = mode, clear_cache
            self._shell.stand_still(mode is not None)
            self._unconfirmed = set(self._engines)
            self._shell.send([out for name in sorted(self._engines) for out in self._word(name)])
            try:
                async with asyncio.timeout(limit_s):
                    await self._waiting.until(lambda: not self._unconfirmed)
            except TimeoutError:
                what = "resumed" if mode is None else f"paused by mode {mode!r}"
                for engine in sorted(self._unconfirmed):
                    why = f"it has not {what} within {limit_s:.0f} s"
                    self._shell.give_up_engine(engine, why)

    def _word(self, engine: str) -> list[tuple[str, Message]]:
        if self.mode is not None:
            return [(engine, Pause(mode=self.mode, clear_cache=self._clears_cache))]
        self._resumes_due[engine] += 1
        return [(engine, Resume())]

    # ------------------------------------------------------------ engines

    def joined(self, engine: str) -> list[tuple[str, Message]]:
        """An engine came, or came back: it knows of no pause, and must before it gets turns."""
        self.left(engine)
        self._engines.add(engine)
        if self.mode is None:
            return []
        self._unconfirmed.add(engine)
        return self._word(engine)

    def left(self, engine: str) -> None:
        """An engine is gone; nobody waits for it any more."""
        self._engines.discard(engine)
        self._unconfirmed.discard(engine)
        self._resumes_due.pop(engine, None)

    def heard(self, engine: str, message: Paused | Resumed) -> None:
        """An engine says that it has done as it was told, if it was."""
        if isinstance(message, Paused):
            if message.mode == self.mode and not self._resumes_due[engine]:
                self._unconfirmed.discard(engine)
        elif self._resumes_due[engine]:
            self._resumes_due[engine] -= 1
            if self.mode is None and not self._resumes_due[engine]:
                self._unconfirmed.discard(engine)
