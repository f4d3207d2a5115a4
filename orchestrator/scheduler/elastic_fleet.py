"""Carries out a run's elasticity policy: starts, retires and replaces the engines of the run.

The policy decides by the figures of each batch, which the trainer's handle gives; this module
holds the number of engines that is wanted, and has :meth:`EngineSide.scale` bring it about. The
journal has the engines that joined and left, so a resumed run wants as many as it had.
"""

import asyncio
import logging

from tidegate.errors import EngineStartFailed
from tidegate.orchestrator.fleet.pending_futures import PendingFutures
from tidegate.orchestrator.scheduler.engine_side import EngineSide
from tidegate.policies.bottlenecks import RunFigures
from tidegate.policies.elasticity import Elastic

log = logging.getLogger("tidegate")


class ElasticFleet:
    """Number of a run's engines for training that is wanted, and the task that brings it about."""

    def __init__(
        self, policy: Elastic, engines: EngineSide, pending: PendingFutures, *, wanted: int
    ) -> None:
        self.policy = policy
        self._engines = engines
        self._pending = pending
        self.wanted = policy.clipped(wanted)
        """Number of engines for training that is wanted."""
        self.decision = ""
        """Last decision with its figures; empty before the first."""
        self._changed_s = asyncio.get_running_loop().time()
        """When the fleet changed last, on the loop's clock."""

    def decide(self, run: RunFigures | None) -> None:
        """Ask the policy, after a batch; ``run`` is None where too little is known. Nothing is
        decided while engines are to come or to go."""
        if run is None or run.engines != self.wanted or self._missing:
            return
        quiet_s = asyncio.get_running_loop().time() - self._changed_s
        scaling = self.policy.decide(run, quiet_s=quiet_s)
        if scaling is not None:
            self.wanted, self.decision = scaling.engines, str(scaling)
            log.info("event=scale %s", scaling)
            self._pending.notify()

    async def run(self) -> None:
        """Start and retire engines until cancelled. Call it once the first engines have joined."""
        while True:
            await self._pending.until(lambda: bool(self._missing))
            self._note_change()
            try:
                await self._engines.scale(self.wanted + self._engines.reserved, self.policy.drain_s)
            except EngineStartFailed as error:
                log.warning("event=scale_failed to=%d because=%r", self.wanted, str(error))
                await asyncio.sleep(max(1.0, self.policy.cool_down_s))
            self._note_change()

    @property
    def _missing(self) -> int:
        """Number of engines to start; negative: to retire."""
        launched = self._engines.launched
        started = 0 if launched is None else len(launched.names)
        return self.wanted + self._engines.reserved - started

    def _note_change(self) -> None:
        self._changed_s = asyncio.get_running_loop().time()
