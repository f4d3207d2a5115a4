"""What are all engines told beside their turns: weights, pauses, sleep? And what do they answer?

It joins the weights' coordinator, the publisher, the pauses and the sleeps, which know nothing of
each other. Engines' turns and steps are not its matter.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from tidegate.errors import ConfigError, SleepFailed
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.fleet.pausing import Pauses
from tidegate.orchestrator.fleet.pausing import Shell as PausesShell
from tidegate.orchestrator.fleet.sleeping import Shell as SleepsShell
from tidegate.orchestrator.fleet.sleeping import Sleeps
from tidegate.orchestrator.waiting import Waiting
from tidegate.orchestrator.weights.publishing import Publisher
from tidegate.orchestrator.weights.publishing import Shell as PublisherShell
from tidegate.orchestrator.weights.weights import NONE, WeightCoordinator
from tidegate.transport import sleep_messages
from tidegate.transport.messages import (
    Asleep,
    Awake,
    FromEngine,
    InitWeights,
    Paused,
    PauseMode,
    Resumed,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

ONLY_PARTS = (
    "engines that forget their weights can't have them again, for only parts of a set were "
    "published so far; publish a whole state dict once, or sleep at level 1"
)
NO_WEIGHTS = "it has forgotten its weights, and none were published that it could take"


class Shell(PublisherShell, PausesShell, SleepsShell, Protocol):
    """What control needs of the run."""

    @property
    def core(self) -> Core:
        """The run's."""

    def swapped(self, engine: str, message: WeightsLive) -> None:
        """An engine serves other weights from now on."""

    def staged(self, engine: str, version: int) -> None:
        """An engine holds new weights beside its live ones."""

    def refuse_engine(self, engine: str, why: str) -> None:
        """An engine can't be of this run any more; tell it, and strike it."""


class EngineControl:
    """Weights, pauses and sleep of every engine."""

    def __init__(
        self,
        settings: RunSettings,
        init_weights: InitWeights,
        waiting: Waiting,
        shell: Shell,
    ) -> None:
        self._shell = shell
        self._waiting = waiting
        self._timeout_s = settings.weights_timeout_s
        self._users_mode: PauseMode | None = None
        self._sleeping_mode: PauseMode | None = None
        """What engines were paused by to sleep; None while none are to."""
        self._stands_still = False
        self._slept_version = -1
        """The newest released when engines were put to sleep: later ones wake their weights."""
        self._one_sleep_at_a_time = asyncio.Lock()
        self.weights = WeightCoordinator(
            init_weights,
            pause_mode=settings.pause_mode,
            kv_policy=settings.kv_policy,
            wave_engines=settings.update_wave,
        )
        self.pauses = Pauses(
            waiting,
            shell,
            is_swapping=lambda: self.weights.is_swapping,
            timeout_s=settings.engine_timeout_s,
        )
        self.publisher = Publisher(
            self.weights,
            waiting,
            shell,
            next_version=lambda: shell.core.next_version,
            may_swap=lambda: not self.pauses.is_changing,
            timeout_s=settings.weights_timeout_s,
        )
        self.sleeps = Sleeps(
            waiting,
            shell,
            may_sleep=lambda e: self.pauses.holds(e) and not self.weights.is_on_its_way(e),
            timeout_s=settings.weights_timeout_s,
        )

    # ------------------------------------------------------------ engines

    def joined(self, engine: str, version: int) -> None:
        """An engine came, serving ``version``."""
        paused = self.pauses.joined(engine)
        self.sleeps.joined(engine)
        live = NONE if self.sleeps.lacks_weights(engine) else version
        are_asleep = self.sleeps.has_weights_asleep(engine)
        self._shell.send([*paused, *self.weights.joined(engine, live, are_asleep=are_asleep)])
        self._advance(engine)

    def left(self, engine: str) -> None:
        """An engine is gone."""
        self.pauses.left(engine)
        self.weights.left(engine)
        self.sleeps.left(engine)
        self._advance(engine)

    def heard(self, engine: str, message: FromEngine) -> bool:
        """An engine has answered; False if that is about something else."""
        match message:
            case WeightsStaged() | WeightsLive() | WeightsFailed():
                self._heard_of_weights(engine, message)
            case Paused() | Resumed():
                self.pauses.heard(engine, message)
            case Asleep() | Awake() | sleep_messages.SleepFailed():
                self.sleeps.heard(engine, message)
                self._note_weights(engine)
            case _:
                return False
        if self._sleeping_mode is None or not self.sleeps.lacks_weights(engine):
            self._shell.send(self.weights.catch_up(engine))  # else the trainer is about to publish
        self._advance(engine)
        return True

    def _note_weights(self, engine: str) -> None:
        """Whether its weights sleep, or lack: then no part of a set can be laid over them."""
        are_asleep = self.sleeps.has_weights_asleep(engine)
        self.weights.slept(engine, are_asleep=are_asleep)
        if self.sleeps.lacks_weights(engine):
            self.weights.lost(engine)

    def _heard_of_weights(
        self, engine: str, message: WeightsStaged | WeightsLive | WeightsFailed
    ) -> None:
        version = message.version
        match message:
            case WeightsStaged():
                self.weights.staged(engine, version)
                self._shell.staged(engine, version)
            case WeightsLive():
                self.weights.live(engine, version)
                self.sleeps.weights_came(engine, are_new=version > self._slept_version)
                self._note_weights(engine)
                self._shell.swapped(engine, message)
            case WeightsFailed(message=why):
                if self.weights.refused(engine, version, why):
                    self._shell.refuse_engine(engine, why)

    def _advance(self, only: str | None = None) -> None:
        """Do what is due; ``only``: since something has changed of that engine, and of no other."""
        self.sleeps.advance(only)
        self.publisher.advance()  # and has others look at what they wait for

    # ------------------------------------------------------------ pauses

    async def pause(self, mode: PauseMode | None, *, clear_cache: bool = False) -> None:
        """As the user asks: :meth:`Pauses.pause`; None resumes, as :meth:`Pauses.resume`.

        While engines sleep it counts once they are awake.
        """
        self._users_mode = mode
        await self._pause(clear_cache=clear_cache)

    async def stand_still(self, is_still: bool) -> None:
        """As the run itself wants it; afterwards what the user asked for holds again."""
        self._stands_still = is_still
        await self._pause()

    async def _pause(self, *, clear_cache: bool = False) -> None:
        mode = "abort" if self._stands_still else self._sleeping_mode or self._users_mode
        try:
            if mode is None:
                await self.pauses.resume()
            else:
                await self.pauses.pause(mode, clear_cache=clear_cache)
        finally:
            self._advance()  # swaps may have waited for it

    # ------------------------------------------------------------ sleep

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag], mode: PauseMode) -> int:
        """As :meth:`Sleeps.sleep`, with engines paused first, and no weights on their way."""
        self.sleeps.refuse_unless_all_can(level)
        if level == 2 and "weights" in tags and not self.weights.can_be_forgotten:
            raise ConfigError(ONLY_PARTS)
        async with self._one_sleep_at_a_time:
            self._sleeping_mode = mode
            await self._pause()
            weights = self.weights
            while weights.is_reserved or not weights.is_settled:
                await self._waiting.until(lambda: weights.is_settled and not weights.is_reserved)
            weights.is_reserved = True  # no publish begins meanwhile
            self._slept_version = self.publisher.newest_version
            try:
                return await self.sleeps.sleep(level, tags)
            finally:
                weights.is_reserved = False
                self.publisher.advance()

    async def wake(self, tags: Iterable[MemoryTag] | None) -> None:
        """As :meth:`Sleeps.wake`. Once all is awake, engines go on, if nothing else pauses them.

        Those that have forgotten their weights get the ones released last, if no newer came.
        """
        async with self._one_sleep_at_a_time:
            await self.sleeps.wake(MEMORY_TAGS if tags is None else tags)
            if self.sleeps.asleep or self._sleeping_mode is None:
                return
            await self._bring_weights()
            self._sleeping_mode = None
            await self._pause()

    async def _bring_weights(self) -> None:
        """To engines that have none."""
        lacking = self.sleeps.without_weights
        for engine in lacking:
            self._shell.send(self.weights.catch_up(engine))
        if any(not self.weights.is_on_its_way(engine) for engine in lacking):
            raise SleepFailed(what="wake", failures=dict.fromkeys(lacking, NO_WEIGHTS))
        self.publisher.advance()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._waiting.until(lambda: not self.sleeps.without_weights)
        except TimeoutError:
            for engine in self.sleeps.without_weights:
                why = f"no weights within {self._timeout_s:.0f} s of waking"
                self._shell.give_up_engine(engine, why)
