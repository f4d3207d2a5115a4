"""Composition of a run's observers from its settings: its recorder and its dashboard.

The composition root (``tidegate.runs``) creates :class:`Observers`; the run opens and closes it.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python
from tokenizers import Tokenizer
from typing_extensions import override

from tidegate.errors import ConfigError, RecordingFailed
from tidegate.observability.records.run_directories import (
    ADAPTERS,
    RUN_FILE,
    directory_name,
    next_part,
)
from tidegate.orchestrator.core.events import RunResumed
from tidegate.orchestrator.core.rules import describe, record_of
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.orchestrator.telemetry.recorder import Recorder
from tidegate.orchestrator.telemetry.statistics import RunStatistics

# Imported on use: with pyarrow they take 0.2 s, which a run without records should not pay.
if TYPE_CHECKING:
    from tidegate.observability.dashboard.dashboard import Dashboard
    from tidegate.observability.metrics.live import LiveRecorder
    from tidegate.observability.progress import ProgressDisplay
    from tidegate.observability.records.recording import RunRecorder
    from tidegate.observability.spans import Spans

POLICIES = {
    "staleness_policy",
    "group_filter",
    "failure_policy",
    "routing_policy",
    "engine_speeds",
    "migration_policy",
    "elasticity",
}
"""Settings that may be user-defined objects; they are recorded in words, not as JSON."""

FAILURE_SHOWN_MAX = 300
"""Limit of the text of the error that ended a run, in characters, on the dashboard."""

log = logging.getLogger("tidegate")


def _forwarded(method: Callable[..., None]) -> Any:
    """Return a method of :class:`RecorderGroup` that calls ``method`` of each of its recorders."""
    name = method.__name__

    def call_all(group: "RecorderGroup", *arguments: Any, **keywords: Any) -> None:
        for recorder in group.recorders:
            getattr(recorder, name)(*arguments, **keywords)

    return call_all


class RecorderGroup(Recorder):
    """Recorder that forwards every call to several recorders, in order."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self.recorders = tuple(recorders)
        self.keeps_episodes = any(recorder.keeps_episodes for recorder in recorders)
        self.episode_observers = [each for r in recorders for each in r.episode_observers]

    rollout = _forwarded(Recorder.rollout)
    trained = _forwarded(Recorder.trained)
    engine_step = _forwarded(Recorder.engine_step)
    engine_event = _forwarded(Recorder.engine_event)
    engine_dtype = _forwarded(Recorder.engine_dtype)
    trainer_interval = _forwarded(Recorder.trainer_interval)
    episode_interval = _forwarded(Recorder.episode_interval)
    offered = _forwarded(Recorder.offered)
    batch = _forwarded(Recorder.batch)
    evaluation = _forwarded(Recorder.evaluation)
    trained_lags = _forwarded(Recorder.trained_lags)
    off_policy = _forwarded(Recorder.off_policy)
    weights = _forwarded(Recorder.weights)
    adapter_weights = _forwarded(Recorder.adapter_weights)
    statistics = _forwarded(Recorder.statistics)
    sync = _forwarded(Recorder.sync)
    finish = _forwarded(Recorder.finish)
    close = _forwarded(Recorder.close)

    @property
    @override
    def failure(self) -> RecordingFailed | None:
        failures = (recorder.failure for recorder in self.recorders)
        return next((failure for failure in failures if failure is not None), None)

    @property
    @override
    def wants_statistics(self) -> bool:
        return any(recorder.wants_statistics for recorder in self.recorders)


class Observers:
    """Recorder, dashboard and progress that a run's settings ask for: its :class:`RunObservers`."""

    def __init__(self, settings: RunSettings) -> None:
        """Bind the dashboard's address if the settings have one. Starts nothing.

        Raises:
            ConfigError: the address is in use or refused, or a package is missing.
        """
        self._settings = settings
        self._dashboard: Dashboard | None = None
        self._live: LiveRecorder | None = None
        self._spans: Spans | None = None
        self._progress: ProgressDisplay | None = None
        self._resumed: RunResumed | None = None
        self._on_failure: Callable[[RecordingFailed], None] = lambda failure: None
        if settings.records.dashboard_address is not None:
            from tidegate.observability.dashboard import dashboard

            address, directory = settings.records.dashboard_address, settings.records.run_directory
            self._dashboard = dashboard.Dashboard(address, directory=directory)
        if settings.records.opentelemetry:
            _import_spans()

    @property
    def url(self) -> str | None:
        """Address of the dashboard; None without one."""
        return self._dashboard.url if self._dashboard is not None else None

    def open(
        self, resumed: RunResumed | None, on_failure: Callable[[RecordingFailed], None]
    ) -> Recorder | None:
        """Start the recorder, and the dashboard's memory; see :meth:`RunObservers.open`."""
        self._resumed, self._on_failure = resumed, on_failure
        recorders: list[Recorder] = []
        if self._settings.records.opentelemetry:
            spans = _import_spans()
            self._spans = spans.Spans()
            recorders.append(spans.TrainerSpans(self._spans, model=self._settings.model.name))
        if (recorder := self._recorder(resumed, on_failure)) is not None:
            recorders.append(recorder)
        if self._dashboard is not None:
            self._live = self._live_recorder(resumed)
            recorders.append(self._live)
        if self._settings.records.progress:
            from tidegate.observability.progress import ProgressDisplay

            self._progress = ProgressDisplay(
                groups_per_batch=self._settings.staleness.make_policy().groups_per_batch,
                batches=0 if resumed is None else resumed.batches,
            )
            recorders.insert(0, self._progress)  # its close() must not depend on another's success
        return _together(recorders)

    def open_adapter(
        self, name: str, settings: RunSettings, resumed_batches: int | None
    ) -> Recorder | None:
        """Start the recorder of a trained adapter; see :meth:`RunObservers.open_adapter`."""
        recorders: list[Recorder] = []
        if self._spans is not None:
            recorders.append(_import_spans().TrainerSpans(self._spans, adapter=name))
        if (directory := self._settings.records.run_directory) is not None:
            directory = directory / ADAPTERS / directory_name(name)
            # Records may be there, of a process before a resume or of an earlier training.
            if (directory / RUN_FILE).exists():
                directory = next_part(directory)
            recorders.append(
                self._new_recorder(directory, settings, resumed_batches, self._on_failure)
            )
        if self._live is not None:
            from tidegate.observability.metrics.live import LiveAdapterRecorder

            recorders.append(LiveAdapterRecorder(self._live, name))
        return _together(recorders)

    def show(
        self,
        read: Callable[[Callable[[Scheduler], Any]], Any],
        statistics: Callable[[Scheduler], RunStatistics],
        tokenizer: Tokenizer,
    ) -> None:
        """Start the dashboard's server and the progress; see :meth:`RunObservers.show`."""
        self._show_dashboard(read, statistics, tokenizer)
        if self._progress is not None:
            self._progress.show(self._heading(), lambda: read(statistics))

    def _show_dashboard(
        self,
        read: Callable[[Callable[[Scheduler], Any]], Any],
        statistics: Callable[[Scheduler], RunStatistics],
        tokenizer: Tokenizer,
    ) -> None:
        if self._dashboard is None or self._live is None:
            return
        from tidegate.observability.dashboard.comparisons import ComparableRuns
        from tidegate.observability.dashboard.source import LiveSource
        from tidegate.observability.metrics.live import monotonic_us

        source = LiveSource(
            self._live,
            read_state=read,
            statistics=statistics,
            now_us=monotonic_us,
            about=_about(self._settings, self._resumed),
            tokenizer=tokenizer,
        )
        self._dashboard.start(source, ComparableRuns(self._settings.records.run_directory))
        log.info("run=shown url=%s", self._dashboard.url)

    def close(self, error: BaseException | None = None) -> None:
        """Stop the dashboard and the progress; see :meth:`RunObservers.close`."""
        if self._progress is not None:
            self._progress.hide()
        if self._dashboard is not None:
            self._dashboard.close(failure="" if error is None else _in_words(error))

    def _heading(self) -> str:
        """Return the lines that the progress display begins with: the run's directory and the
        dashboard's URL."""
        fleet, records = self._settings.fleet, self._settings.records
        return (
            f"model: {self._settings.model}; engines: {fleet.engines_started}, starting\n"
            f"records: {records.run_directory or 'none (run_directory is not set)'}\n"
            f"dashboard: {self.url or 'none (dashboard_address is not set)'}"
        )

    def _recorder(
        self, resumed: RunResumed | None, on_failure: Callable[[RecordingFailed], None]
    ) -> "RunRecorder | None":
        """A resumed run's records go into a directory of their own, inside the run's."""
        directory = self._settings.records.run_directory
        if directory is None:
            return None
        if resumed is not None:
            directory = next_part(directory)
        batches = None if resumed is None else resumed.batches
        return self._new_recorder(directory, self._settings, batches, on_failure)

    @staticmethod
    def _new_recorder(
        directory: Path,
        settings: RunSettings,
        resumed_batches: int | None,
        on_failure: Callable[[RecordingFailed], None],
    ) -> "RunRecorder":
        from tidegate.observability.records.recording import RunRecorder

        return RunRecorder(
            directory,
            settings=_settings_as_json(settings),
            model=settings.model,
            archive_weights=settings.records.archive_weights,
            resumed_batches=resumed_batches,
            on_failure=on_failure,
        )

    def _live_recorder(self, resumed: RunResumed | None) -> "LiveRecorder":
        """Create the dashboard's memory; a resumed run's curves continue from its records."""
        from tidegate.observability.metrics.live import LiveRecorder
        from tidegate.observability.records.evaluations import read_evaluations
        from tidegate.observability.reports.facts import read_batches

        recorder = LiveRecorder()
        if resumed is not None and self._settings.records.run_directory is not None:
            directory = self._settings.records.run_directory
            points = [p for p in read_evaluations(directory) if p.batches <= resumed.batches]
            recorder.recall(read_batches(directory, batches=resumed.batches), points)
        return recorder


def _import_spans() -> ModuleType:
    try:
        from tidegate.observability import spans
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is missing: pip install 'tidegate[opentelemetry]'"
        ) from None
    return spans


def _together(recorders: Sequence[Recorder]) -> Recorder | None:
    """Return one recorder for all; None if there are none."""
    if len(recorders) > 1:
        return RecorderGroup(recorders)
    return recorders[0] if recorders else None


def _settings_as_json(settings: RunSettings) -> dict[str, Any]:
    """Return all settings as JSON values by flat name, the policies in words."""
    items = settings.by_flat_name().items()
    values = {name: to_jsonable_python(value) for name, value in items if name not in POLICIES}
    try:
        values["rules"] = describe(record_of(settings.rules()))
    except (
        ConfigError
    ):  # a run without a journal may have policies that can't be written as records
        values["rules"] = repr(settings.rules())
    return values


def _in_words(error: BaseException) -> str:
    """Return an error in one line, or that the user interrupted the run."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return " ".join(f"{type(error).__name__}: {error}".split())[:FAILURE_SHOWN_MAX]


def _about(settings: RunSettings, resumed: RunResumed | None) -> dict[str, object]:
    """Return the constant facts of a run that the dashboard shows."""
    directory = settings.records.run_directory
    return {
        "name": directory.resolve().name if directory is not None else settings.model.name,
        "model": str(settings.model),
        "directory": None if directory is None else str(directory),
        "resumed_batches": [] if resumed is None else [resumed.batches],
        "is_live": True,
        "is_whole": True,
        "settings": _settings_as_json(settings),
    }
