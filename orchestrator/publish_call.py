"""How does one call to publish go, from a state dict to engines? Reserve, write, bring.

It runs on the run's loop, so that a caller that gives up at any instant leaves nothing reserved;
and what is being written then is written to its end, for nobody else may write there before.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from tidegate.errors import ConfigError
from tidegate.orchestrator import events as ev
from tidegate.orchestrator.publishing import PublishWait
from tidegate.orchestrator.run import Run
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.transport.messages import UpdateWeights

if TYPE_CHECKING:
    import torch


class PublishCall:
    """One set of weights on its way."""

    def __init__(
        self, run: Run, state_dict: "Mapping[str, torch.Tensor]", wait: PublishWait
    ) -> None:
        """Checks what is asked for.

        Raises:
            ConfigError: there is no such thing to wait for.
        """
        if wait not in get_args(PublishWait):
            raise ConfigError(f"publish waits until 'live', 'staged' or 'none', got wait={wait!r}")
        self._run = run
        self.state_dict = state_dict
        self._wait: PublishWait = wait
        self.version = -1
        """-1 until one is reserved."""
        self._has_returned = False

    @property
    def may_be_served(self) -> bool:
        """Whether an engine may serve it, or will unless that fails behind the caller's back."""
        scheduler = self._run.scheduler
        if scheduler is None or self.version < 0:
            return False
        return self._has_returned or scheduler.published_version >= self.version

    async def run(self, scheduler: Scheduler) -> int:
        """Bring the weights to the engines; their version.

        Raises:
            EngineLagging, WeightsRefused, PublishDropped: as :meth:`Publisher.publish`.
        """
        version = await scheduler.reserve_version()
        try:
            chunks = await self._written(version, scheduler.kept_version)
        except BaseException:
            scheduler.release_version()
            raise
        self.version = version
        await scheduler.publish(version, chunks, self._wait)
        self._has_returned = True
        return version

    async def _written(self, version: int, kept_version: int | None) -> list[UpdateWeights]:
        """Have a thread put the weights where engines can read them."""
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(None, self._write, version, kept_version)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await writing
            raise

    def _write(self, version: int, kept_version: int | None) -> list[UpdateWeights]:
        from tidegate.orchestrator.batches import named_buffers  # torch: not for who only audits

        buffers = named_buffers(self.state_dict)
        return self._run.channel.write(version, buffers, keep=kept_version)


class RollbackCall(PublishCall):
    """Good weights that take the place of bad ones."""

    def __init__(
        self, run: Run, state_dict: "Mapping[str, torch.Tensor]", *, first_bad: int
    ) -> None:
        """``first_bad``: from this version on, what was published is bad."""
        super().__init__(run, state_dict, "live")
        if first_bad < 1:
            raise ConfigError(
                f"first_bad={first_bad}: version 0 is the model directory's, and what is published "
                f"counts from 1; there is nothing before it to roll back to"
            )
        self._first_bad = first_bad

    async def run(self, scheduler: Scheduler) -> int:
        """Bring the weights to the engines, paused meanwhile; their version.

        Aborted, so that no turn goes on from KV that bad weights computed.
        """
        await scheduler.control.stand_still(True)
        scheduler.handle([ev.VersionRetracted(self._first_bad)])
        version = await super().run(scheduler)
        await scheduler.control.stand_still(False)
        return version
