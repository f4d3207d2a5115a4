"""Activity log of episodes for traces: when each waited for a turn, and when it did something else.

The episode runner reports to it; each interval is passed to a callback once it is over. At most
``LANES_MAX`` episodes are logged at a time; others cost one dict lookup per call. It makes no
events, so a replay knows nothing of it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.telemetry.recorder import EpisodeInterval

LANES_MAX = 24
"""Episodes logged at a time: as many timeline rows as a screen shows beside the engines'."""

SEEN_MIN_US = 1_000
"""Shortest logged interval between two turns; shorter ones are invisible on a timeline."""


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class _Page:
    """State of one logged row of an episode."""

    lane: int
    rollout: Rollout
    began_us: int
    since_us: int
    """When its present interval began."""
    trunk: int
    """Rollout id of the row's root, whose end is also the row's end."""
    turns: int = 0
    """Number of turns asked for, including a running one."""
    is_generating: bool = False
    is_parked: bool = False
    doing: list[str] = field(default_factory=list)
    """Named activities that are running, the last of which is shown."""


class EpisodeTracer:
    """Logs episodes on the run's loop, each interval once it is over."""

    def __init__(
        self, tell: Callable[[EpisodeInterval], None], now_us: Callable[[], int] = _monotonic_us
    ) -> None:
        self._tell = tell
        self._now_us = now_us
        self._lanes = list(range(LANES_MAX, 0, -1))
        """Free lanes, the lowest last."""
        self._pages: dict[int, _Page] = {}
        """Logged rows, by rollout id."""

    def begins(self, rollout: Rollout) -> None:
        """Log an episode, if a lane is free."""
        if self._lanes:
            trunk, now_us = rollout.root.rollout_id, self._now_us()
            page = _Page(self._lanes.pop(), rollout, now_us, now_us, trunk)
            self._pages[rollout.rollout_id] = page

    def asks(self, rollout: Rollout, answer: "asyncio.Future[Turn]") -> None:
        """Note that a turn was asked for; ``answer`` is done when the turn has ended."""
        page = self._pages.get(rollout.rollout_id)
        if page is None:
            if rollout.branch_of is None or rollout.root.rollout_id not in self._pages:
                return
            self.begins(rollout)  # a branch runs beside its trunk, so in its own lane
            page = self._pages.get(rollout.rollout_id)
            if page is None:
                return
        self._change(page)
        page.is_generating = True
        page.turns += 1
        answer.add_done_callback(partial(self._answered, page, page.turns))

    def parks(self, rollout: Rollout) -> None:
        """Note that an episode is parked, until it asks for a turn or :meth:`goes_on`."""
        if page := self._pages.get(rollout.rollout_id):
            self._change(page)
            page.is_parked = True

    def goes_on(self, rollout: Rollout) -> None:
        """Note that an episode is no longer parked."""
        if page := self._pages.get(rollout.rollout_id):
            self._change(page)

    def does(self, rollout: Rollout, name: str) -> None:
        """Note that a named activity begins."""
        if page := self._pages.get(rollout.rollout_id):
            if not page.is_generating:
                self._change(page)
            page.doing.append(name)

    def did(self, rollout: Rollout, name: str) -> None:
        """Note that a named activity has ended."""
        page = self._pages.get(rollout.rollout_id)
        if page is None or name not in page.doing:
            return  # the activity began before it was logged
        if not page.is_generating:
            self._change(page)
        page.doing.remove(name)

    def ends(self, rollout: Rollout, outcome: str) -> None:
        """Note that an episode has ended, and its branches with it."""
        if rollout.rollout_id not in self._pages:
            return
        over = [row for row, page in self._pages.items() if page.trunk == rollout.rollout_id]
        for row in over:
            self._close(self._pages.pop(row), outcome)
        self._lanes.sort(reverse=True)

    def _close(self, page: _Page, outcome: str) -> None:
        self._change(page)
        rollout = page.rollout
        about: dict[str, object] = {
            "group": rollout.group_id,
            "turns": page.turns,
            "tokens": len(rollout.token_ids),
            "ended": outcome,
        }
        name = f"rollout {rollout.rollout_id}"
        if rollout.branch_of is not None:
            about["branch of"] = rollout.branch_of.rollout_id
        self._tell(EpisodeInterval(page.lane, name, page.began_us, page.since_us, about))
        self._lanes.append(page.lane)

    def _answered(self, page: _Page, number: int, answer: "asyncio.Future[Turn]") -> None:
        """End the interval of a turn, unless the episode has begun another turn or ended."""
        if page.is_generating and page.turns == number:
            has_turn = not answer.cancelled() and answer.exception() is None
            self._change(page, answer.result() if has_turn else None)

    def _change(self, page: _Page, turn: Turn | None = None) -> None:
        """Log the present interval, and begin the next one."""
        began_us, page.since_us = page.since_us, self._now_us()
        name, about = "tools", dict[str, object]()
        if page.is_generating:
            turn = turn or (page.rollout.turns[-1] if page.rollout.turns else None)
            name, about = _told(turn)
        elif page.is_parked:
            name = "parked"
        elif page.doing:
            name = page.doing[-1]
        is_seen = page.is_generating or page.since_us - began_us >= SEEN_MIN_US
        page.is_generating = page.is_parked = False
        if not is_seen:
            return
        self._tell(EpisodeInterval(page.lane, name, began_us, page.since_us, about))


def _told(turn: Turn | None) -> tuple[str, dict[str, object]]:
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
