"""Stand-in for ``tidegate.serve`` in tests: the same client handles over a simulated run.

Made by the pytest plugin's ``tidegate_serve``. Batches are real tensors, and the scheduler and its
errors are the real ones, so a trainer needs no change. Only time, engines and weights are
simulated. Built on ``run.py``, and on ``orchestrator/trainer/rollouts.py`` for the handles.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from typing_extensions import override

from tidegate.orchestrator.settings.config import RunSettings
from tidegate.orchestrator.telemetry.timekeeping import Timekeeper
from tidegate.orchestrator.trainer.batch_metrics import OnBatch
from tidegate.orchestrator.trainer.rollouts import Rollouts, SyncRollouts
from tidegate.orchestrator.trainer.run import Run, RunParts
from tidegate.simulation.engine.scripted import Says, ScriptedEngine
from tidegate.simulation.run.run import RunPlan, SimulatedRun, run_plan
from tidegate.simulation.run.virtual_time import VirtualTime

ANY_MODEL = "any model"


class SimulatedRollouts(Rollouts):
    """:class:`Rollouts` in virtual time."""

    def __init__(self, plan: RunPlan, time: VirtualTime, on_batch: OnBatch | None = None) -> None:
        super().__init__(plan.settings, _refuse_parts, on_batch=on_batch)
        self._time = time
        self.simulated = SimulatedRun(plan, time)
        self.is_sync = False
        """Whether a :class:`SimulatedSyncRollouts` owns the rollouts and advances virtual time."""

    @override
    def _make_run(self) -> Run:
        self._timekeeper = Timekeeper(None, now_us=lambda: round(self._time.now_s * 1e6))
        return cast(Run, self.simulated)

    @override
    async def _enter(self) -> None:
        if self.is_sync and self._time.loop.is_running():
            raise RuntimeError(
                "serve_sync would wait for the event loop that it is called on; use serve in an "
                "async test, and serve_sync in one that isn't"
            )
        if not self.is_sync and not self._time.loop.is_running():
            raise RuntimeError(
                "a simulated run must be entered on the loop of its virtual time: in the async "
                "test itself (async fixtures have another event loop), or in a coroutine passed to "
                "tidegate_virtual_time.run()"
            )
        await super()._enter()

    @override
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.simulated.end()
        await super().__aexit__(kind, error, traceback)


class SimulatedSyncRollouts(SyncRollouts):
    """:class:`SyncRollouts` in virtual time, which passes only while a call blocks."""

    def __init__(self, plan: RunPlan, time: VirtualTime, on_batch: OnBatch | None = None) -> None:
        rollouts = SimulatedRollouts(plan, time, on_batch)
        rollouts.is_sync = True
        super().__init__(rollouts)
        self.simulated = rollouts.simulated


def _refuse_parts(settings: RunSettings) -> RunParts:
    raise RuntimeError("a simulated run can't create the parts of a real run")


class ServeInTests:
    """Stands in for ``tidegate.serve`` and, by :attr:`sync`, for ``tidegate.serve_sync``."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.runs: list[SimulatedRun] = []
        """Runs made by this object, in order of creation."""

    def __call__(
        self,
        *,
        model: Path | str = ANY_MODEL,
        engines: int | Sequence[ScriptedEngine] = 1,
        says: Says = None,
        on_batch: Any = None,
        **settings: Any,
    ) -> SimulatedRollouts:
        """Make a simulated run for an async trainer, as :func:`tidegate.serve` makes a real one.

        ``model``: a model directory, whose tokenizer is used; any other value selects a byte-level
        tokenizer. ``engines``: the number of engines, or one :class:`ScriptedEngine` for each.
        ``says``: the script of the model's output. ``settings``: settings of the run, by name.

        Raises:
            ConfigError: a setting is unknown, out of range, or not available in simulated runs.
        """
        plan = run_plan(model=model, engines=engines, says=says, **settings)
        rollouts = SimulatedRollouts(plan, self._time, on_batch)
        self.runs.append(rollouts.simulated)
        return rollouts

    def sync(
        self,
        *,
        model: Path | str = ANY_MODEL,
        engines: int | Sequence[ScriptedEngine] = 1,
        says: Says = None,
        on_batch: Any = None,
        **settings: Any,
    ) -> SimulatedSyncRollouts:
        """Make a simulated run for a sync trainer, as :func:`tidegate.serve_sync` makes a real one.

        Arguments and errors are those of calling the object itself.
        """
        plan = run_plan(model=model, engines=engines, says=says, **settings)
        rollouts = SimulatedSyncRollouts(plan, self._time, on_batch)
        self.runs.append(rollouts.simulated)
        return rollouts

    def story(self) -> str:
        """Return the newest run's engine states and last messages, for a failed test's report."""
        return "\n".join(self.runs[-1].story) if self.runs else ""
