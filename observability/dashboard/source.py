"""Data sources of the dashboard: the interface :class:`Source`, and the source of a live run.

The app calls a source from worker threads, because an answer may take a moment. :mod:`recorded`
implements it for a run's files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from tokenizers import Tokenizer

from tidegate.observability.dashboard.live import EndedRollout, LiveRecorder
from tidegate.observability.dashboard.snapshots import (
    DashboardSnapshot,
    RolloutLine,
    find_rollout,
    group_lines,
    rollout_lines,
    unconsumed_rollouts,
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
    def is_ended_only(self) -> bool:
        """Whether the state excludes rollouts that the trainer has not received."""
        return self.state in ("trained", "discarded", "evaluated")

    @property
    def is_unconsumed_only(self) -> bool:
        """Whether the state excludes rollouts that are over."""
        return self.state in ("running", "finished")


class Source(Protocol):
    """A run that the dashboard can show."""

    tokenizer: Tokenizer | None
    is_live: bool

    def observe(self, *, is_update: bool = False) -> DashboardSnapshot:
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
        recorder: LiveRecorder,
        *,
        read_state: "Callable[[Callable[[Scheduler], object]], object]",
        statistics: Callable[[Scheduler], RunStatistics],
        now_us: Callable[[], int],
        about: Mapping[str, object],
        tokenizer: Tokenizer | None,
    ) -> None:
        """``read_state`` calls a function of the scheduler on the run's loop."""
        self._recorder = recorder
        self._read_state = read_state
        self._statistics = statistics
        self._now_us = now_us
        self._about = about
        self.tokenizer = tokenizer

    def observe(self, *, is_update: bool = False) -> DashboardSnapshot:
        """Return a snapshot of the run as of now; see :meth:`Source.observe`."""
        now_us = self._now_us()
        collected = self._recorder.collected(now_us - UPDATE_COVERS_US if is_update else 0)

        def take_snapshot(scheduler: Scheduler) -> DashboardSnapshot:
            return DashboardSnapshot(
                statistics=self._statistics(scheduler),
                collected=collected,
                groups=group_lines(scheduler.core),
                about=self._about,
                at_us=now_us,
            )

        snapshot = self._read_state(take_snapshot)
        assert isinstance(snapshot, DashboardSnapshot)
        return snapshot

    def rollouts(self, query: RolloutQuery) -> tuple[list[RolloutLine], int]:
        """List rollouts: outstanding ones, then ended ones, newest first; see :class:`Source`."""
        lines: list[RolloutLine] = []
        total = 0
        if not query.is_ended_only:

            def list_unconsumed(scheduler: Scheduler) -> tuple[list[RolloutLine], int]:
                found = unconsumed_rollouts(
                    scheduler.core, state=query.state, group_id=query.group_id
                )
                found = [pair for pair in found if _matches_mixed(pair[0], query)]
                page = found[query.skip : query.skip + LISTED_MAX]
                return rollout_lines((rollout, group.task) for rollout, group in page), len(found)

            result = self._read_state(list_unconsumed)
            assert isinstance(result, tuple)
            lines, total = result
        if query.is_unconsumed_only:
            return lines, total
        ended = [each for each in self._recorder.ended if _matches(each, query)]
        skip = max(0, query.skip - total)
        for each in islice(ended, skip, skip + LISTED_MAX - len(lines)):
            pair = [(each.rollout, each.task)]
            lines += rollout_lines(pair, trainer_version=each.consumed_version)
        return lines, total + len(ended)

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """Return a copy of one rollout; see :meth:`Source.rollout`."""
        for each in self._recorder.ended:
            if each.rollout.rollout_id == rollout_id:
                return as_recorded(each.snapshot())
        found = self._read_state(lambda scheduler: find_rollout(scheduler.core, rollout_id))
        return None if found is None else as_recorded(found)  # type: ignore[arg-type]


def _matches(ended: EndedRollout, query: RolloutQuery) -> bool:
    rollout = ended.rollout
    is_of_group = query.group_id is None or rollout.group_id == query.group_id
    is_in_state = query.state in ("", str(rollout.state))
    return is_of_group and is_in_state and _matches_mixed(rollout, query)


def _matches_mixed(rollout: Rollout, query: RolloutQuery) -> bool:
    return not query.is_mixed or rollout.oldest_version != rollout.newest_version
