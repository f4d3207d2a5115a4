"""Where does what is shown come from? A run that goes on, or the files of one that has ended.

Both answer the same questions. Answers may take a moment: they are asked for on a thread that
nobody else waits for.
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
"""Rollouts in one list."""

UPDATE_COVERS_US = 3_000_000
"""Of what has a time, an update tells the last three seconds: one that is lost harms nobody."""


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Which rollouts are to be listed."""

    state: str = ""
    """``running``, ``finished``, ``trained``, ``discarded``, ``evaluated``; empty: any."""
    group_id: int | None = None
    skip: int = 0
    is_mixed: bool = False
    """Only those whose tokens two or more versions sampled."""

    @property
    def has_ended_only(self) -> bool:
        """Whether none that goes on can be among them."""
        return self.state in ("trained", "discarded", "evaluated")

    @property
    def goes_on_only(self) -> bool:
        """Whether none that has ended can be among them."""
        return self.state in ("running", "finished")


class Source(Protocol):
    """A run, as it can be looked at."""

    tokenizer: Tokenizer | None
    is_live: bool

    def observe(self, *, is_update: bool = False) -> Observation:
        """All of it; for an update, of what has a time only the last seconds."""

    def rollouts(self, query: RolloutQuery) -> tuple[list[RolloutLine], int]:
        """Some rollouts, and how many there are of the kind."""

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """One of them; None if it is not known, or not any more."""


class LiveSource:
    """A run that goes on."""

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
        """``look`` has something done on the run's loop, and gives back what comes of it."""
        self._notes = notes
        self._look = look
        self._statistics = statistics
        self._now_us = now_us
        self._about = about
        self.tokenizer = tokenizer

    def observe(self, *, is_update: bool = False) -> Observation:
        """As :meth:`Source.observe`."""
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
        """As :meth:`Source.rollouts`: those that go on first, then what ended last."""
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
        """As :meth:`Source.rollout`."""
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
