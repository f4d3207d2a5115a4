"""Activity log of episodes for traces: when each waited for a turn, and when it did other work.

The episode runner reports to it; a callback gets each interval at its end. At most ``LANES_MAX``
episodes are logged at a time; others cost one dict lookup per call. No event of the core is made,
so replays are not affected.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.telemetry.recorder import EpisodeInterval, EpisodeObserver

LANES_MAX = 24
"""Episodes logged at a time: as many timeline rows as a screen shows beside the engines'."""

INTERVAL_MIN_US = 1_000
"""Shortest logged interval between two turns; shorter ones are invisible on a timeline."""


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class _TracedRow:
    """State of one logged row of an episode."""

    lane: int
    rollout: Rollout
    began_us: int
    since_us: int
    """When its present interval began."""
    root_id: int
    """Rollout id of the row's root, whose end is also the row's end."""
    turns: int = 0
    """Number of turns requested, including a running one."""
    is_generating: bool = False
    is_parked: bool = False
    doing: list[str] = field(default_factory=list)
    """Running named activities; the last one is shown."""


class EpisodeTracer(EpisodeObserver):
    """Logs episodes on the run's loop, each interval once it is over."""

    def __init__(
        self, log: Callable[[EpisodeInterval], None], now_us: Callable[[], int] = _monotonic_us
    ) -> None:
        self._log = log
        self._now_us = now_us
        self._lanes = list(range(LANES_MAX, 0, -1))
        """Numbers of the free lanes (timeline rows), the lowest last."""
        self._rows: dict[int, _TracedRow] = {}
        """Logged rows, by rollout id."""

    @override
    def began(self, rollout: Rollout) -> None:
        """Log an episode, if a lane is free."""
        if self._lanes:
            root_id, now_us = rollout.episode_id, self._now_us()
            row = _TracedRow(self._lanes.pop(), rollout, now_us, now_us, root_id)
            self._rows[rollout.rollout_id] = row

    @override
    def turn_started(self, rollout: Rollout, answer: "asyncio.Future[Turn]") -> None:
        row = self._rows.get(rollout.rollout_id)
        if row is None:
            if rollout.branch_of is None or rollout.episode_id not in self._rows:
                return
            self.began(rollout)  # a branch runs beside its root, so it has its own lane
            row = self._rows.get(rollout.rollout_id)
            if row is None:
                return
        self._change(row)
        row.is_generating = True
        row.turns += 1
        answer.add_done_callback(partial(self._turn_ended, row, row.turns))

    @override
    def parked(self, rollout: Rollout) -> None:
        if row := self._rows.get(rollout.rollout_id):
            self._change(row)
            row.is_parked = True

    @override
    def unparked(self, rollout: Rollout) -> None:
        if row := self._rows.get(rollout.rollout_id):
            self._change(row)

    @override
    @contextlib.contextmanager
    def activity(self, rollout: Rollout, name: str) -> Iterator[None]:
        if row := self._rows.get(rollout.rollout_id):
            if not row.is_generating:
                self._change(row)
            row.doing.append(name)
        try:
            yield
        finally:
            row = self._rows.get(rollout.rollout_id)
            if row is not None and name in row.doing:  # else it began before it was logged
                if not row.is_generating:
                    self._change(row)
                row.doing.remove(name)

    @override
    def ended(self, rollout: Rollout, error: BaseException | None) -> None:
        if rollout.rollout_id not in self._rows:
            return
        outcome = "returned" if error is None else "failed"
        ended = [n for n, row in self._rows.items() if row.root_id == rollout.rollout_id]
        for number in ended:
            self._close(self._rows.pop(number), outcome)
        self._lanes.sort(reverse=True)

    def _close(self, row: _TracedRow, outcome: str) -> None:
        self._change(row)
        rollout = row.rollout
        details: dict[str, object] = {
            "group": rollout.group_id,
            "turns": row.turns,
            "tokens": len(rollout.token_ids),
            "ended": outcome,
        }
        name = f"rollout {rollout.rollout_id}"
        if rollout.branch_of is not None:
            details["branch of"] = rollout.branch_of.rollout_id
        self._log(EpisodeInterval(row.lane, name, row.began_us, row.since_us, details))
        self._lanes.append(row.lane)

    def _turn_ended(self, row: _TracedRow, number: int, answer: "asyncio.Future[Turn]") -> None:
        """End the interval of a turn, unless the episode has begun another turn or ended."""
        if row.is_generating and row.turns == number:
            has_turn = not answer.cancelled() and answer.exception() is None
            self._change(row, answer.result() if has_turn else None)

    def _change(self, row: _TracedRow, turn: Turn | None = None) -> None:
        """Log the present interval, and begin the next one."""
        began_us, row.since_us = row.since_us, self._now_us()
        name, details = "tools", dict[str, object]()
        if row.is_generating:
            turn = turn or (row.rollout.turns[-1] if row.rollout.turns else None)
            name, details = _turn_label(turn)
        elif row.is_parked:
            name = "parked"
        elif row.doing:
            name = row.doing[-1]
        is_logged = row.is_generating or row.since_us - began_us >= INTERVAL_MIN_US
        row.is_generating = row.is_parked = False
        if not is_logged:
            return
        self._log(EpisodeInterval(row.lane, name, began_us, row.since_us, details))


def _turn_label(turn: Turn | None) -> tuple[str, dict[str, object]]:
    """Return a turn's name and details. The name has its versions: viewers colour by name."""
    if turn is None or not turn.runs:
        return "turn", {}
    versions = [run.version for run in turn.runs]
    name = f"turn v{versions[0]}"
    if versions[-1] != versions[0]:
        name += f" to v{versions[-1]}"
    engines = ", ".join(dict.fromkeys(run.engine for run in turn.runs))
    ended = turn.finish_reason or "given up"
    return name, {"tokens": turn.length, "engine": engines, "ended": ended}
