"""How are weights published? Waits, with a limit, for what the coordinator wants of every engine.

It waits and times out; which message an engine gets next is the coordinator's to decide.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tidegate.errors import EngineLagging, WeightsRefused
from tidegate.orchestrator import events as ev
from tidegate.orchestrator.waiting import Waiting
from tidegate.orchestrator.weights import WeightCoordinator
from tidegate.transport.messages import Message, UpdateWeights


class Shell(Protocol):
    """What publishing needs of the scheduler."""

    def handle(self, events: Iterable[ev.Event]) -> None:
        """Feed events to the core."""

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages to engines."""

    def when_safe(self, action: Callable[[], None]) -> None:
        """Do this once no crash can undo what has been handled so far."""

    def give_up_engine(self, engine: str, why: str) -> None:
        """Strike an engine that doesn't answer."""


class Publisher:
    """Publishes one version at a time."""

    def __init__(
        self, weights: WeightCoordinator, waiting: Waiting, shell: Shell, *, timeout_s: float
    ) -> None:
        self._weights = weights
        self._waiting = waiting
        self._shell = shell
        self._timeout_s = timeout_s
        self.newest_version = -1
        """That this process has brought to engines; -1: none."""

    async def reserve(self) -> None:
        """Wait until no engine reads what is to be overwritten in the weight channel's buffer.

        It must be followed by :meth:`publish` or :meth:`release`.

        Raises:
            EngineLagging: an engine still read it after ``timeout_s``. It is given up.
            RuntimeError: another publish is under way.
        """
        if self._weights.is_reserved:
            raise RuntimeError("another publish is under way; await it before the next")
        self._weights.is_reserved = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._waiting.until(lambda: self._weights.is_writable)
        except TimeoutError:
            self.release()
            raise self._give_up_laggards() from None
        except asyncio.CancelledError:
            self.release()
            raise

    def release(self) -> None:
        """Nothing will be published in the buffer reserved."""
        self._weights.is_reserved = False

    async def publish(self, version: int, chunks: list[UpdateWeights]) -> None:
        """Bring new weights to every engine; return once all serve them.

        If it fails or is cancelled before every engine has staged them, none will swap.

        Raises:
            EngineLagging: some engine did not, within ``timeout_s``. It is given up.
            WeightsRefused: the weights don't fit the model; the old ones serve on.
        """
        try:
            self._shell.send(self._weights.publish(version, chunks))
            async with asyncio.timeout(self._timeout_s):
                await self._bring(version)
        except TimeoutError:
            raise self._give_up_laggards() from None
        finally:
            self._weights.withdraw()  # does nothing once they were told to swap
            self.release()
            self._shell.send(self._weights.catch_up())

    async def _bring(self, version: int) -> None:
        update = self._weights.update
        assert update is not None
        await self._waiting.until(lambda: not update.staging)
        for engine, why in update.refusals.items():
            raise WeightsRefused(f"engine {engine!r} refused weights v{version}: {why}")
        self.newest_version = version
        self._shell.handle([ev.VersionPublished(version)])
        self._weights.release()
        # Only then: a crash that forgets the version could give its number to other weights.
        self._shell.when_safe(lambda: self._shell.send(self._weights.swaps()))
        await self._waiting.until(lambda: self._weights.is_settled)

    def _give_up_laggards(self) -> EngineLagging:
        """Strike who has not taken the newest version in time; the error that says so."""
        update = self._weights.update
        error = EngineLagging(
            engines=self._weights.engines_behind,
            wanted_version=update.version if update else 0,
            waited_s=self._timeout_s,
            where="; ".join(map(str, self._weights.laggards)),
        )
        for engine in error.engines:
            self._shell.give_up_engine(engine, str(error))
        return error
