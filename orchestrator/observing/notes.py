"""Who is told what happens in a run while it goes on? Its recorder, its dashboard, or both.

It only passes on; what is worth keeping is theirs to know.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.records.trace import TrainerActivity


class RunNotes(Protocol):
    """Takes note of a run. Called from several threads; nothing here may wait long."""

    def rollout(
        self,
        rollout: Rollout,
        *,
        task: object,
        advantage: float | None,
        consumed_version: int | None,
    ) -> None:
        """A rollout has ended without the trainer: discarded, or evaluated."""

    def trained(
        self,
        rows: Sequence[tuple[Rollout, object]],
        *,
        advantages: Sequence[float],
        consumed_version: int,
    ) -> None:
        """The trainer has these rows of a batch, each told with its task."""

    def engine_step(
        self,
        engine: str,
        started_us: int,
        busy_us: int,
        version: int,
        rows: int,
        prefills: int = 0,
    ) -> None:
        """An engine made ``rows`` tokens with ``version``; ``prefills`` turns began in it."""

    def engine_event(self, engine: str, name: str, at_us: int, **args: object) -> None:
        """An instant of an engine's life: staged, swap, paused, resumed, lost."""

    def trainer_interval(
        self, kind: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """What the trainer did; of ``publish``, ``version`` is the one published."""

    def batch(self, metrics: Mapping[str, float]) -> None:
        """The trainer has a batch."""


class NotesOfSeveral:
    """Tells each of them, in order."""

    def __init__(self, several: Sequence[RunNotes]) -> None:
        self._several = tuple(several)

    def rollout(
        self,
        rollout: Rollout,
        *,
        task: object,
        advantage: float | None,
        consumed_version: int | None,
    ) -> None:
        """As :meth:`RunNotes.rollout`."""
        for notes in self._several:
            notes.rollout(
                rollout, task=task, advantage=advantage, consumed_version=consumed_version
            )

    def trained(
        self,
        rows: Sequence[tuple[Rollout, object]],
        *,
        advantages: Sequence[float],
        consumed_version: int,
    ) -> None:
        """As :meth:`RunNotes.trained`."""
        for notes in self._several:
            notes.trained(rows, advantages=advantages, consumed_version=consumed_version)

    def engine_step(
        self,
        engine: str,
        started_us: int,
        busy_us: int,
        version: int,
        rows: int,
        prefills: int = 0,
    ) -> None:
        """As :meth:`RunNotes.engine_step`."""
        for notes in self._several:
            notes.engine_step(engine, started_us, busy_us, version, rows, prefills)

    def engine_event(self, engine: str, name: str, at_us: int, **args: object) -> None:
        """As :meth:`RunNotes.engine_event`."""
        for notes in self._several:
            notes.engine_event(engine, name, at_us, **args)

    def trainer_interval(
        self, kind: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """As :meth:`RunNotes.trainer_interval`."""
        for notes in self._several:
            notes.trainer_interval(kind, started_us, ended_us, version)

    def batch(self, metrics: Mapping[str, float]) -> None:
        """As :meth:`RunNotes.batch`."""
        for notes in self._several:
            notes.batch(metrics)


def notes_of(*some: RunNotes | None) -> RunNotes | None:
    """Those that are there, as one; None if there is none."""
    there = [notes for notes in some if notes is not None]
    if len(there) <= 1:
        return there[0] if there else None
    return NotesOfSeveral(there)
