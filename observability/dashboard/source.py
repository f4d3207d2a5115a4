"""Data sources of the dashboard: the interface :class:`Source`, and the source of a live run.

The app calls a source from worker threads, because an answer may take a moment. :mod:`recorded`
implements it for a run's files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from tidegate.observability.dashboard.rollout_queries import RolloutQuery, contains
from tidegate.observability.metrics.live import CollectedData, LiveRecorder
from tidegate.observability.metrics.snapshots import (
    RolloutLine,
    RunSnapshot,
    adapter_lines,
    find_rollout,
    group_lines,
    rollout_line,
    task_text,
    unconsumed_rollouts,
)
from tidegate.observability.records.trajectories import (
    RecordedRollout,
    RolloutSnapshot,
    as_recorded,
    snapshot_rollout,
)
from tidegate.observability.reports.story import (
    RunContext,
    Story,
    Subject,
    story_of,
)
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.telemetry.statistics import RunStatistics

LISTED_MAX = 200
"""Limit of rollouts in one list."""

SEARCHED_MAX = 2_000
"""Limit of outstanding rollouts that a list reads, oldest first: their lines are made on the run's
loop, in about 5 ms."""

SEARCHED_TOKENS_MAX = 4_096
"""Limit of the tokens of an outstanding rollout that a search reads: 32 MB for 2,000 rollouts."""

UPDATE_COVERS_US = 3_000_000
"""Time that an update covers: 3 s, so that a viewer may miss two updates without a gap."""


@dataclass(frozen=True, slots=True)
class RolloutList:
    """One page of the rollouts that match a query."""

    lines: Sequence[RolloutLine]
    """At most :data:`LISTED_MAX`."""
    total: int
    """Number of all matches."""
    note: str = ""
    """Note on rollouts that were not searched; empty if all were."""


class Source(Protocol):
    """A run that the dashboard can show."""

    tokenizer: Tokenizer | None
    is_live: bool

    @property
    def bound(self) -> int | None:
        """Bound of staleness that the run guarantees, in versions; None if it guarantees none."""

    def observe(self, *, is_update: bool = False) -> RunSnapshot:
        """Return a snapshot; for an update, time-stamped data of the last seconds only."""

    def rollouts(self, query: RolloutQuery) -> RolloutList:
        """Return one page of the rollouts that match a query."""

    def timeline(self, start_us: int, end_us: int) -> CollectedData | None:
        """Return a finer timeline of a range; None if there is none."""

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """Return one rollout; None if it is unknown or no longer kept."""

    def story(self, subject: Subject) -> Story | None:
        """Return what happened to a rollout, group or batch; None if it is unknown."""


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

    @property
    def bound(self) -> int | None:
        """Bound of staleness now: an adaptive policy changes it; see :class:`Source`."""
        bound = self._read_state(lambda scheduler: scheduler.core.policy.guaranteed_bound)
        assert bound is None or isinstance(bound, int)
        return bound

    def observe(self, *, is_update: bool = False) -> RunSnapshot:
        """Return a snapshot of the run as of now; see :meth:`Source.observe`."""
        now_us = self._now_us()
        collected = self._recorder.collected(now_us - UPDATE_COVERS_US if is_update else 0)

        def take_snapshot(scheduler: Scheduler) -> RunSnapshot:
            return RunSnapshot(
                statistics=self._statistics(scheduler),
                collected=collected,
                groups=group_lines(scheduler.core),
                adapters=adapter_lines(scheduler.core, self._recorder.adapter_rewards),
                about=self._about,
                at_us=now_us,
            )

        snapshot = self._read_state(take_snapshot)
        assert isinstance(snapshot, RunSnapshot)
        return snapshot

    def timeline(self, start_us: int, end_us: int) -> CollectedData | None:
        """Return None: a viewer has all slices of a running run already."""
        return None

    def rollouts(self, query: RolloutQuery) -> RolloutList:
        """List rollouts: outstanding ones, then ended ones, newest first; see :class:`Source`."""
        found: list[RolloutLine] = []
        notes = []
        if not query.is_ended_only:
            candidates = self._read_state(lambda scheduler: _unconsumed(scheduler, query))
            assert isinstance(candidates, _Candidates)
            found += [line for line in candidates.lines if self._is_found(line, candidates, query)]
            if candidates.left_out:
                notes.append(f"{candidates.left_out} younger outstanding rollouts omitted")
        if not query.is_unconsumed_only:
            for each in self._recorder.ended:
                line = rollout_line(each.rollout, each.task, trainer_version=each.consumed_version)
                if query.matches(line) and self._contains(each.rollout.token_ids, each.task, query):
                    found.append(line)
            notes += ["ended rollouts: the newest only"] if self._recorder.has_dropped else []
        page = query.ordered(found)[query.skip : query.skip + LISTED_MAX]
        return RolloutList(page, len(found), "; ".join(notes))

    def _is_found(self, line: RolloutLine, found: "_Candidates", query: RolloutQuery) -> bool:
        if not query.matches(line):
            return False
        token_ids, task = found.texts.get(line.rollout_id, ((), ""))
        return self._contains(token_ids, task, query)

    def _contains(self, token_ids: Sequence[int], task: object, query: RolloutQuery) -> bool:
        if query.task and not contains(task_text(task), query.task):
            return False
        if not query.text:
            return True
        return self.tokenizer is not None and contains(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=False), query.text
        )

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """Return a copy of one rollout; see :meth:`Source.rollout`."""
        for each in self._recorder.ended:
            if each.rollout.rollout_id == rollout_id:
                return as_recorded(each.snapshot())
        found = self._read_state(lambda scheduler: find_rollout(scheduler.core, rollout_id))
        return None if found is None else as_recorded(found)  # type: ignore[arg-type]

    def story(self, subject: Subject) -> Story | None:
        """Return a story from the rollouts in memory; see :meth:`Source.story`."""
        settings = self._about.get("settings")
        run = RunContext.of(
            settings if isinstance(settings, Mapping) else {},
            bound=self.bound,
            is_resumed=bool(self._about.get("resumed_batches")),
        )
        return story_of(subject, run, rollout=self.rollout, rows_where=self._rows_where)

    def _rows_where(self, column: str, value: int) -> list[RecordedRollout]:
        """Return copies of the known rows of a group, outstanding or over, or those of a batch."""
        if column == "consumed_version":
            ended = [e for e in reversed(self._recorder.ended) if e.consumed_version == value]
            return [as_recorded(each.snapshot()) for each in ended]

        def outstanding(scheduler: Scheduler) -> list[RolloutSnapshot]:
            found = unconsumed_rollouts(scheduler.core, state="", group_id=value)
            return [
                snapshot_rollout(rollout, task=group.task, advantage=None, consumed_version=None)
                for rollout, group in found
            ]

        rows = self._read_state(outstanding)
        assert isinstance(rows, list)
        ended = [each for each in self._recorder.ended if each.rollout.group_id == value]
        return [as_recorded(row) for row in (*rows, *(each.snapshot() for each in ended))]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Outstanding rollouts, read on the run's loop and searched on the dashboard's thread."""

    lines: list[RolloutLine]
    texts: Mapping[int, tuple[Sequence[int], object]]
    """Copy of the tokens, and the task, by rollout; empty if the query searches neither."""
    left_out: int


def _unconsumed(scheduler: Scheduler, query: RolloutQuery) -> _Candidates:
    found = unconsumed_rollouts(scheduler.core, state=query.state, group_id=query.group_id)
    read = found[:SEARCHED_MAX]
    texts: dict[int, tuple[Sequence[int], object]] = {}
    if query.reads_tokens:
        texts = {r.rollout_id: (r.token_ids[:SEARCHED_TOKENS_MAX], g.task) for r, g in read}
    lines = [rollout_line(rollout, group.task) for rollout, group in read]
    return _Candidates(lines, texts, len(found) - len(read))
