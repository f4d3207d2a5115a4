"""What are all engines told beside their turns? New weights, pauses; and what do they answer?

It joins the weights' coordinator, the publisher and the pauses, which know nothing of each other.
Engines' turns and steps are not its matter.
"""

from typing import Protocol

from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.core import Core
from tidegate.orchestrator.pausing import Pauses
from tidegate.orchestrator.pausing import Shell as PausesShell
from tidegate.orchestrator.publishing import Publisher
from tidegate.orchestrator.publishing import Shell as PublisherShell
from tidegate.orchestrator.waiting import Waiting
from tidegate.orchestrator.weights import WeightCoordinator
from tidegate.transport.messages import (
    FromEngine,
    InitWeights,
    Paused,
    PauseMode,
    Resumed,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)


class Shell(PublisherShell, PausesShell, Protocol):
    """What control needs of the scheduler."""

    core: Core

    def swapped(self, engine: str, message: WeightsLive) -> None:
        """An engine serves other weights from now on."""

    def staged(self, engine: str, version: int) -> None:
        """An engine holds new weights beside its live ones."""

    def refuse_engine(self, engine: str, why: str) -> None:
        """An engine can't be of this run any more; tell it, and strike it."""


class EngineControl:
    """Weights and pauses of every engine."""

    def __init__(
        self,
        settings: RunSettings,
        init_weights: InitWeights,
        waiting: Waiting,
        shell: Shell,
    ) -> None:
        self._shell = shell
        self._users_mode: PauseMode | None = None
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

    def joined(self, engine: str, version: int) -> None:
        """An engine came, serving ``version``."""
        self._shell.send([*self.pauses.joined(engine), *self.weights.joined(engine, version)])
        self.publisher.advance()

    def left(self, engine: str) -> None:
        """An engine is gone."""
        self.pauses.left(engine)
        self.weights.left(engine)
        self.publisher.advance()

    def heard(self, engine: str, message: FromEngine) -> bool:
        """An engine has answered; False if that is about something else."""
        match message:
            case WeightsStaged(version=version):
                self.weights.staged(engine, version)
                self._shell.staged(engine, version)
            case WeightsLive(version=version):
                self.weights.live(engine, version)
                self._shell.swapped(engine, message)
            case WeightsFailed(version=version, message=why):
                if self.weights.refused(engine, version, why):
                    self._shell.refuse_engine(engine, why)
            case Paused() | Resumed():
                self.pauses.heard(engine, message)
            case _:
                return False
        self._shell.send(self.weights.catch_up(engine))
        self.publisher.advance()
        return True

    async def pause(self, mode: PauseMode | None, *, clear_cache: bool = False) -> None:
        """As the user asks: :meth:`Pauses.pause`; None resumes, as :meth:`Pauses.resume`."""
        self._users_mode = mode
        await self._pause(mode, clear_cache=clear_cache)

    async def stand_still(self, is_still: bool) -> None:
        """As the run itself wants it; afterwards what the user asked for holds again."""
        await self._pause("abort" if is_still else self._users_mode)

    async def _pause(self, mode: PauseMode | None, *, clear_cache: bool = False) -> None:
        try:
            if mode is None:
                await self.pauses.resume()
            else:
                await self.pauses.pause(mode, clear_cache=clear_cache)
        finally:
            self.publisher.advance()  # swaps may have waited for it
