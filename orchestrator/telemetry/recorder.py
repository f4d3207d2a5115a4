"""Interface of objects that record or show a run.

The composition root (``tidegate.runs``) chooses a run's observers by its settings, from
``observability/``; a run that is not observed has none.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tidegate.errors import RecordingFailed
from tidegate.orchestrator.core.events import RunResumed
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.telemetry.off_policy import OffPolicy
from tidegate.orchestrator.telemetry.statistics import RunStatistics

if TYPE_CHECKING:
    import asyncio

    import torch

TrainerActivity = Literal["train", "wait", "publish", "evaluate"]
"""Activity of the trainer between two marks: it trains, waits for a batch, publishes weights, or
waits for an evaluation of ``evaluate_every``."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One decode step of an engine."""

    engine: str
    """Name of the engine."""
    started_us: int
    busy_us: int
    """Duration of the step, in microseconds."""
    version: int
    """Version of the weights that the step used."""
    rows: int
    """Turns that got a token in the step."""
    prefills: int = 0
    """Turns whose context was computed in the step."""


@dataclass(frozen=True, slots=True)
class EpisodeInterval:
    """An episode, or one activity of it, from ``started_us`` to ``ended_us``."""

    lane: int
    """Row of the timeline, counted from 1; episodes of one lane do not overlap."""
    name: str
    """``rollout 12``; within it ``turn v3``, ``tools``, ``parked``."""
    started_us: int
    ended_us: int
    args: Mapping[str, object]


class EpisodeObserver:
    """Is told what episodes do, by the episode runner, on the run's loop and without delay.

    Every method does nothing unless a subclass overrides it. None may raise.
    """

    def began(self, rollout: Rollout) -> None:
        """An episode begins, or begins again; called in its own asyncio task."""

    def turn_started(self, rollout: Rollout, answer: "asyncio.Future[Turn]") -> None:
        """A turn was requested; ``answer`` is done when the turn has ended."""

    def parked(self, rollout: Rollout) -> None:
        """An episode is parked, until :meth:`turn_started` or :meth:`unparked`."""

    def unparked(self, rollout: Rollout) -> None:
        """An episode is no longer parked."""

    def activity(self, rollout: Rollout, name: str) -> AbstractContextManager[object]:
        """Return a context that a named activity runs in."""
        return nullcontext()

    def ended(self, rollout: Rollout, error: BaseException | None) -> None:
        """An episode and its branches have ended; ``error`` is what ended it, None if it
        returned. Also called for episodes that were cancelled before they began."""


class Recorder:
    """Receives what happens in a run. Every method does nothing unless a subclass overrides it.

    Called from several threads; no method may block for long. Times are in microseconds of the
    process's monotonic clock.
    """

    keeps_episodes = False
    """Whether :meth:`episode_interval` is wanted; collecting the intervals costs time."""

    episode_observers: Sequence[EpisodeObserver] = ()
    """Observers of the run's episodes."""

    def rollout(
        self,
        rollout: Rollout,
        *,
        task: object,
        advantage: float | None,
        consumed_version: int | None,
    ) -> None:
        """Record a rollout that ended without the trainer: discarded, or evaluated."""

    def trained(
        self,
        rows: Sequence[tuple[Rollout, object]],
        *,
        advantages: Sequence[float],
        consumed_version: int,
    ) -> None:
        """Record the rows of a batch that the trainer has, each with its task."""

    def engine_step(self, step: EngineStep) -> None:
        """Record a decode step of an engine."""

    def engine_event(self, engine: str, name: str, at_us: int, **args: object) -> None:
        """Record an instant of an engine: staged, swap, paused, resumed, lost."""

    def engine_dtype(self, engine: str, dtype: str) -> None:
        """Record the dtype that an engine computes in, as torch spells it; empty if unknown."""

    def trainer_interval(
        self, kind: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """Record what the trainer did; ``version`` of a ``publish`` is the one published."""

    def episode_interval(self, interval: EpisodeInterval) -> None:
        """Record an episode, or one activity of it."""

    def offered(self, tasks: int | None) -> None:
        """Record that the trainer offers tasks; None if their number is not known."""

    def batch(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a batch that the trainer has."""

    def evaluation(self, figures: Mapping[str, object]) -> None:
        """Record an evaluation: ``name``, ``version``, ``batches`` received before, mean
        ``reward``, ``tasks``, ``failures``, ``seconds``."""

    def trained_lags(self, tokens_by_lag: Mapping[int, int]) -> None:
        """Record the number of trained tokens of a batch by their lag in versions."""

    def off_policy(self, measured: OffPolicy) -> None:
        """Record how far off-policy the trainer found its last batch."""

    def weights(self, version: int, state_dict: "Mapping[str, torch.Tensor]", parts: Any) -> None:
        """Archive published weights, copied before this returns.

        ``parts`` is the :class:`WeightParts` that says what else the version consists of.
        """

    def adapter_weights(
        self, name: str, version: int, tensors: "Mapping[str, torch.Tensor]", parts: Any
    ) -> None:
        """Archive a version of an adapter that counts its own, copied before this returns.

        Called before any engine has the version, so that no token of it is recorded earlier.
        ``parts`` has the adapter's scale, and the version of the weights below it.
        """

    @property
    def failure(self) -> RecordingFailed | None:
        """The first record that the disk refused; None while all was written."""
        return None

    @property
    def wants_statistics(self) -> bool:
        """Whether :meth:`statistics` is wanted now; taking them costs the run's loop time."""
        return False

    def statistics(self, statistics: RunStatistics) -> None:
        """Record the run's current statistics, which remain readable after a crash."""

    def sync(self) -> None:
        """Wait until all that was recorded so far survives a crash of the process.

        Raises:
            RecordingFailed: the disk refused something since the start.
        """

    def finish(self, statistics: RunStatistics, **facts: object) -> None:
        """Record the run's statistics so far, and facts such as ``warm_up``."""

    def close(self) -> None:
        """Write all queued records. Harmless if repeated."""


class RunObservers(Protocol):
    """The recorder and the dashboard of one run, opened and closed with it."""

    @property
    def url(self) -> str | None:
        """Address of the dashboard; None without one."""
        ...

    def open(
        self, resumed: RunResumed | None, on_failure: Callable[[RecordingFailed], None]
    ) -> Recorder | None:
        """Start recording; called once, after the run's resume point is known. Returns None if
        nothing is recorded.

        ``on_failure`` is called from another thread when the disk refuses a record.

        Raises:
            ConfigError: the run directory already holds a run, or the model can't be archived.
        """
        ...

    def open_adapter(
        self, name: str, settings: Any, resumed_batches: int | None
    ) -> Recorder | None:
        """Start recording a trained adapter, by itself as if it were a run; None if nothing is
        recorded.

        Args:
            name: the adapter's name.
            settings: the run's settings, with the adapter's own of batches and staleness.
            resumed_batches: batches that its trainer had before a resume; None for a new adapter.
        """
        ...

    def show(
        self,
        read: Callable[[Callable[[Any], Any]], Any],
        statistics: Callable[[Any], RunStatistics],
        tokenizer: Any,
    ) -> None:
        """Start the dashboard, if there is one.

        Args:
            read: calls a function with the run's scheduler on the run's loop.
            statistics: takes the scheduler, and returns a snapshot of the run.
            tokenizer: turns token ids into text.
        """

    def close(self, error: BaseException | None = None) -> None:
        """Stop the dashboard. Harmless if repeated, and if it was never started.

        ``error``: what ended the run, for the dashboard's viewers; None if it ended normally.
        """
