"""Who sees what a run does: its records, its dashboard, both, or nobody?

It makes them as the settings ask. What they are told is for those who tell; see
:mod:`tidegate.orchestrator.observing.notes`.
"""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tidegate.errors import ConfigError
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.core.events import Resumed
from tidegate.orchestrator.core.rules import record_of, say
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.statistics import RunStatistics

# Who is neither recorded nor watched pays for neither: with pyarrow they take 0.2 s to import.
if TYPE_CHECKING:
    from tidegate.orchestrator.observing.dashboard import Dashboard
    from tidegate.orchestrator.observing.live import LiveNotes
    from tidegate.orchestrator.observing.source import LiveSource
    from tidegate.orchestrator.records.recording import RunRecorder

POLICIES = {"policy", "group_filter", "routing", "engine_speeds", "stragglers"}
"""Settings that may be objects of the user's."""


def recorder_of(settings: RunSettings, *, is_resumed: bool) -> "RunRecorder | None":
    """None where nothing is to be written down.

    A resumed run's records go into a directory of their own, inside the run's.
    """
    directory = settings.run_directory
    if directory is None:
        return None
    if is_resumed:
        directory = next(
            d for n in itertools.count(1) if not (d := directory / f"part-{n}").exists()
        )
    from tidegate.orchestrator.records.recording import RunRecorder

    return RunRecorder(directory, settings=_settings_said(settings), model=settings.model)


def live_notes_of(settings: RunSettings, resumed: Resumed | None) -> "LiveNotes":
    """A resumed run's curves go on, where its directory has what came before."""
    from tidegate.orchestrator.observing.earlier import earlier_batches
    from tidegate.orchestrator.observing.live import LiveNotes

    notes = LiveNotes()
    if resumed is not None and settings.run_directory is not None:
        notes.recall(earlier_batches(settings.run_directory, batches=resumed.batches))
    return notes


def dashboard_of(settings: RunSettings) -> "Dashboard | None":
    """Nobody asked for one: None."""
    if settings.dashboard is None:
        return None
    from tidegate.orchestrator.observing.dashboard import Dashboard

    return Dashboard(settings.dashboard, directory=settings.run_directory)


def source_of(
    settings: RunSettings,
    live: "LiveNotes",
    *,
    look: Callable[[Callable[[Scheduler], Any]], Any],
    statistics: Callable[[Scheduler], RunStatistics],
    tokenizer: Tokenizer,
) -> "LiveSource":
    """What the dashboard shows of a run that goes on. ``look`` has something read in its loop."""
    from tidegate.orchestrator.observing.live import monotonic_us
    from tidegate.orchestrator.observing.source import LiveSource

    return LiveSource(
        live,
        look=look,
        statistics=statistics,
        now_us=monotonic_us,
        about=_about(settings),
        tokenizer=tokenizer,
    )


def _settings_said(settings: RunSettings) -> dict[str, Any]:
    """All of them, as JSON has them."""
    said = settings.model_dump(mode="json", exclude=POLICIES)
    try:
        said["rules"] = say(record_of(settings.rules()))
    except ConfigError:  # without a journal they need not be written down
        said["rules"] = repr(settings.rules())
    return said


def _about(settings: RunSettings) -> dict[str, object]:
    """What of a run doesn't change, for its dashboard."""
    directory = settings.run_directory
    return {
        "name": directory.resolve().name if directory is not None else settings.model.name,
        "model": str(settings.model),
        "is_live": True,
        "is_whole": True,
        "settings": _settings_said(settings),
    }
