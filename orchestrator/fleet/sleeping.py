"""Which memory of the engines sleeps? Tells every one of them, late joiners too, and hears of it.

Sleep is a state of the run: what was asked for last holds for every engine. It knows nothing of
turns; that engines are paused first, and go on last, is control's matter.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.errors import ConfigError, SleepFailed
from tidegate.orchestrator.waiting import Waiting
from tidegate.transport import sleep_messages
from tidegate.transport.messages import Hello, Message
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepLevel,
    Wake,
)

SleepAnswer = Asleep | Awake | sleep_messages.SleepFailed

log = logging.getLogger("tidegate")


class Shell(Protocol):
    """What sleeping needs of the scheduler."""

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages to engines."""

    def give_up_engine(self, engine: str, why: str) -> None:
        """Strike an engine that doesn't answer."""

    def hello_of(self, engine: str) -> Hello | None:
        """What an engine said of itself; None if it has gone again."""


@dataclass(slots=True)
class _Sleeper:
    """What one engine has said, and was asked last."""

    levels: Sequence[int]
    asleep: set[MemoryTag]
    level: SleepLevel | None = None
    """At which it sleeps; None: it doesn't, or hasn't said so to this process."""
    lacks_weights: bool = False
    has_new_weights: bool = False
    """Whether it was sent weights since it was told to put its own to sleep: they serve."""
    request: int | None = None
    """What it has not answered yet."""
    asked_level: SleepLevel | None = None
    returned_bytes: int = 0
    failure: str | None = None


@dataclass(slots=True)
class Wanted:
    """What is to sleep on every engine."""

    tags: set[MemoryTag] = field(default_factory=set)
    level: SleepLevel = 1


class Sleeps:
    """Puts engines to sleep, and wakes them."""

    def __init__(
        self,
        waiting: Waiting,
        shell: Shell,
        *,
        may_sleep: Callable[[str], bool],
        timeout_s: float,
    ) -> None:
        """``may_sleep``: whether an engine runs no turn, and no weights are on their way to it."""
        self._waiting = waiting
        self._shell = shell
        self._may_sleep = may_sleep
        self._timeout_s = timeout_s
        self.wanted = Wanted()
        self._engines: dict[str, _Sleeper] = {}
        self._requests = 0

    @property
    def asleep(self) -> tuple[MemoryTag, ...]:
        """What sleeps on all engines, or is about to."""
        return tuple(tag for tag in MEMORY_TAGS if tag in self.wanted.tags)

    @property
    def without_weights(self) -> list[str]:
        """Engines that need a whole update before they can serve."""
        return sorted(name for name, engine in self._engines.items() if engine.lacks_weights)

    def lacks_weights(self, name: str) -> bool:
        """Whether an engine is one of these."""
        engine = self._engines.get(name)
        return engine is not None and engine.lacks_weights

    def has_weights_asleep(self, name: str) -> bool:
        """Whether an engine's weights sleep."""
        engine = self._engines.get(name)
        return engine is not None and "weights" in engine.asleep

    # ------------------------------------------------------------ for the trainer

    def refuse_unless_all_can(self, level: SleepLevel) -> None:
        """Raise ConfigError if an engine can't sleep at this level."""
        unable = sorted(n for n, engine in self._engines.items() if level not in engine.levels)
        if unable:
            raise ConfigError(
                f"{', '.join(unable)} can't sleep at level {level}: it said so when it joined. "
                f"Tidegate's own engines can, vLLM with --enable-sleep-mode, SGLang with "
                f"--enable-memory-saver (level 1: and --enable-weights-cpu-backup); else pause()"
            )

    async def sleep(self, level: SleepLevel, tags: Iterable[MemoryTag]) -> int:
        """Return once this sleeps on every engine; by how many bytes less they count together.

        Raises:
            SleepFailed: some engine can't. The others sleep.
        """
        deeper = max(level, self.wanted.level) if "weights" in self.wanted.tags else level
        self.wanted = Wanted(self.wanted.tags | set(tags), deeper)
        for engine in self._engines.values():
            engine.returned_bytes, engine.has_new_weights = 0, False
        await self._carry_out("sleep")
        return sum(engine.returned_bytes for engine in self._engines.values())

    async def wake(self, tags: Iterable[MemoryTag]) -> None:
        """Return once this is awake on every engine.

        Raises:
            SleepFailed: some engine has no memory for it. The others are awake.
        """
        self.wanted = Wanted(self.wanted.tags - set(tags), self.wanted.level)
        await self._carry_out("wake")

    async def _carry_out(self, what: str) -> None:
        for engine in self._engines.values():
            engine.failure = None
        self.advance()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._waiting.until(lambda: not self._unsettled)
        except TimeoutError:
            for name in self._unsettled:
                self._shell.give_up_engine(name, f"no {what} within {self._timeout_s:.0f} s")
        failures = {n: e.failure for n, e in self._engines.items() if e.failure is not None}
        if failures:
            raise SleepFailed(what=what, failures=failures)

    @property
    def _unsettled(self) -> list[str]:
        """Engines that are not as wanted, and have not said why."""
        return sorted(
            name
            for name, engine in self._engines.items()
            if engine.request is not None or (engine.failure is None and self._word(engine))
        )

    # ------------------------------------------------------------ engines

    def joined(self, name: str) -> None:
        """An engine came, or came back: what it says of itself holds."""
        self.left(name)
        hello = self._shell.hello_of(name)
        if hello is None:
            return
        self._engines[name] = _Sleeper(
            hello.sleep_levels, set(hello.asleep), lacks_weights=hello.lacks_weights
        )
        if self.wanted.tags and self.wanted.level not in hello.sleep_levels:
            log.warning("engine=%s joined while others sleep, and can't", name)

    def left(self, name: str) -> None:
        """An engine is gone; nobody waits for it any more."""
        self._engines.pop(name, None)
        self._note_new_weights()

    def advance(self, only: str | None = None) -> None:
        """Tell engines what they can do now; to be called whenever one or its weights changed.

        With ``only`` just that one is looked at, while none is to sleep: each publish has each of a
        thousand engines say twice that something has changed.
        """
        told: list[tuple[str, Message]] = []
        for name in sorted(self._engines) if only is None or self.wanted.tags else (only,):
            engine = self._engines.get(name)
            if engine is None or engine.request is not None or engine.failure is not None:
                continue
            word = self._word(engine)
            if isinstance(word, Wake) or (word is not None and self._may_sleep(name)):
                engine.request, engine.asked_level = word.request, self.wanted.level
                self._requests += 1
                told.append((name, word))
        if told:
            self._shell.send(told)

    def _word(self, engine: _Sleeper) -> Sleep | Wake | None:
        """What an engine is to do next, if it isn't as wanted."""
        wanted = self.wanted
        if extra := engine.asleep - wanted.tags:
            return Wake(request=self._requests, tags=_in_order(extra))
        tags = wanted.tags - {"weights"} if engine.has_new_weights else wanted.tags
        if not tags or wanted.level not in engine.levels:
            return None
        if tags == engine.asleep and engine.level == wanted.level:
            return None
        return Sleep(request=self._requests, level=wanted.level, tags=_in_order(tags))

    def heard(self, name: str, message: SleepAnswer) -> None:
        """An engine says that it has done as it was told, or that it can't."""
        engine = self._engines.get(name)
        if engine is None or message.request != engine.request:
            return  # of a conversation that is over
        engine.request = None
        match message:
            case Asleep(tags=tags, returned_bytes=returned):
                engine.asleep, engine.level = set(tags), engine.asked_level
                engine.returned_bytes += returned
            case Awake(tags=tags, lacks_weights=lacks):
                engine.asleep, engine.lacks_weights = set(tags), lacks
            case sleep_messages.SleepFailed(message=why):
                log.warning("engine=%s can't sleep or wake: %s", name, why)
                engine.failure = why

    def weights_came(self, name: str, *, are_new: bool) -> None:
        """An engine serves weights that it was sent: new ones, or those that others had before."""
        engine = self._engines.get(name)
        if engine is not None:
            engine.asleep.discard("weights")
            engine.lacks_weights = False
            engine.has_new_weights |= are_new
            self._note_new_weights()

    def _note_new_weights(self) -> None:
        """Where all engines have new weights, who joins need not put its own to sleep."""
        if "weights" not in self.wanted.tags or not self._engines:
            return
        if all(engine.has_new_weights for engine in self._engines.values()):
            self.wanted.tags.discard("weights")


def _in_order(tags: Iterable[MemoryTag]) -> list[MemoryTag]:
    return [tag for tag in MEMORY_TAGS if tag in set(tags)]
