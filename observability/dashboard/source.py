"""Data sources of the dashboard: the interface :class:`Source`, and the source of a live run.

The app calls a source from worker threads, because an answer may take a moment. :mod:`recorded`
implements it for a run's files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from tokenizers import Tokenizer

from tidegate.observability.dashboard.live import Ended, LiveNotes, Noted
from tidegate.observability.dashboard.observation import (
    Observation,
    RolloutLine,
    find_rollout,
    going_on,
    group_lines,
    rollout_lines,
)
from tidegate.observability.trajectories import RecordedRollout, as_recorded
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.telemetry.statistics import RunStatistics

Result = TypeVar("Result")

LISTED_MAX = 200
"""Limit of rollouts in one list."""

UPDATE_COVERS_US = 3_000_000
"""Time that an update covers: 3 s, so that a viewer may miss two updates without a gap."""


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Filter and offset of a list of rollouts."""

    state: str = ""
    """``running``, ``finished``, ``trained``, ``discarded`` or ``evaluated``; empty for any."""
    group_id: int | None = None
    """Only rollouts of this group; None for any."""
    skip: int = 0
    """Number of matching rollouts to skip."""
    is_mixed: bool = False
    """Only rollouts whose tokens were sampled by two or more versions."""

    @property
    def has_ended_only(self) -> bool:
        """Whether the state excludes rollouts that the trainer has not received."""
        return self.state in ("trained", "discarded", "evaluated")

    @property
    def goes_on_only(self) -> bool:
        """Whether the state excludes rollouts that are over."""
        return self.state in ("running", "finished")


class Source(Protocol):
    """A run that the dashboard can show."""

    tokenizer: Tokenizer | None
    is_live: bool

    def observe(self, *, is_update: bool = False) -> Observation:
        """Return a snapshot; for an update, time-stamped data of the last seconds only."""

    def rollouts(self, query: RolloutQuery) -> tuple[list[RolloutLine], int]:
        """Return up to :data:`LISTED_MAX` matching rollouts, and the number of all matches."""

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """Return one rollout; None if it is unknown or no longer kept."""


class LiveSource:
    """Source of a running run: reads the scheduler's state on the run's event loop."""

    is_live = True

    def __init__(
        self,
        notes: LiveNotes,
        *,
        look: "Callable[[Callable[[Scheduler], object]], object]",
        statistics: Callable[[Scheduler], RunStatistics],
        now_us: Callable[[], int],
        about: Mapping[str, object],
        tokenizer: Tokenizer | None,
    ) -> None:
        """``look`` calls a function with the scheduler on the run's loop; returns its result."""
        self._notes = notes
        self._look = look
        self._statistics = statistics
        self._now_us = now_us
        self._about = about
        self.tokenizer = tokenizer

    def observe(self, *, is_update: bool = False) -> Observation:
        """Return a snapshot of the run as of now; see :meth:`Source.observe`."""
        now_us = self._now_us()
        noted = self._notes.noted(now_us - UPDATE_COVERS_US if is_update else 0)

        def observed(scheduler: Scheduler) -> Observation:
            return Observation(
                statistics=self._statistics(scheduler),
                noted=noted,
                groups=group_lines(scheduler.core),
                about=self._about,
                at_us=now_us,
            )

        seen = self._look(observed)
        assert isinstance(seen, Observation)
        return seen

    def rollouts(self, query: RolloutQuery) -> tuple[list[RolloutLine], int]:
        """List rollouts: outstanding ones, then ended ones, newest first; see :class:`Source`."""
        lines: list[RolloutLine] = []
        total = 0
        if not query.has_ended_only:

            def listed(scheduler: Scheduler) -> tuple[list[RolloutLine], int]:
                found = going_on(scheduler.core, state=query.state, group_id=query.group_id)
                found = [pair for pair in found if _is_as_mixed(pair[0], query)]
                some = found[query.skip : query.skip + LISTED_MAX]
                return rollout_lines((rollout, group.task) for rollout, group in some), len(found)

            answer = self._look(listed)
            assert isinstance(answer, tuple)
            lines, total = answer
        if query.goes_on_only:
            return lines, total
        ended = [each for each in self._notes.ended if _is_meant(each, query)]
        skip = max(0, query.skip - total)
        for each in islice(ended, skip, skip + LISTED_MAX - len(lines)):
            pair = [(each.rollout, each.task)]
            lines += rollout_lines(pair, trainer_version=each.consumed_version)
        return lines, total + len(ended)

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """Return a copy of one rollout; see :meth:`Source.rollout`."""
        for each in self._notes.ended:
            if each.rollout.rollout_id == rollout_id:
                return as_recorded(each.snapshot())
        found = self._look(lambda scheduler: find_rollout(scheduler.core, rollout_id))
        return None if found is None else as_recorded(found)  # type: ignore[arg-type]


def _is_meant(ended: Ended, query: RolloutQuery) -> bool:
    rollout = ended.rollout
    is_of_group = query.group_id is None or rollout.group_id == query.group_id
    is_in_state = query.state in ("", str(rollout.state))
    return is_of_group and is_in_state and _is_as_mixed(rollout, query)


def _is_as_mixed(rollout: Rollout, query: RolloutQuery) -> bool:
    return not query.is_mixed or rollout.oldest_version != rollout.newest_version


__all__ = ["LISTED_MAX", "LiveSource", "Noted", "RolloutQuery", "Source"]
