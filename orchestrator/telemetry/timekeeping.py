"""Idle shares of trainer and engines, and the trainer's time by activity.

The trainer's handle marks each change of activity; batch metrics and the forecast read the shares.
Engines' busy time comes from their step messages. The measured window begins when the first batch
is requested and ends with the trainer's last activity, so set-up, warm-up and evaluation don't
count.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidegate.orchestrator.telemetry.recorder import Recorder, TrainerActivity
from tidegate.orchestrator.telemetry.statistics import EngineWork


@dataclass(frozen=True, slots=True)
class Usage:
    """Figures of the window so far."""

    wall_s: float = 0.0
    """Length of the window, in seconds."""
    trainer_idle_share: float = 0.0
    """Share of the window in which the trainer waited for batches."""
    engine_idle_share: float = 0.0
    """Share of the window in which an engine was in no step; the mean over engines."""
    tokens_per_s: float = 0.0
    """Number of sampled tokens per second of the window."""

    @property
    def trainer_busy_s(self) -> float:
        """Seconds of the window in which the trainer trained or published."""
        return self.wall_s * (1 - self.trainer_idle_share)


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class Timekeeper:
    """Measures the trainer's activities, one after the other."""

    def __init__(
        self, recorder: Recorder | None, *, now_us: Callable[[], int] = _monotonic_us
    ) -> None:
        self._recorder = recorder
        self._now_us = now_us
        self._since_us: int | None = None
        """When the present activity began; None before the first batch request."""
        self._spent_us: Counter[TrainerActivity] = Counter()
        self.publishes = 0
        """Number of publishes in the measured time."""
        self._window_us: tuple[int, int] = (0, 0)
        self._first: Mapping[str, EngineWork] = {}
        self._last: Mapping[str, EngineWork] = {}

    def mark(self, ended: TrainerActivity, version: int, engines: Mapping[str, EngineWork]) -> None:
        """Count the time since the last mark as ``ended``. The first mark only opens the window."""
        now_us = self._now_us()
        if self._since_us is None:
            self._window_us, self._first = (now_us, now_us), engines
        else:
            self._spent_us[ended] += now_us - self._since_us
            self.publishes += ended == "publish"
            if self._recorder is not None:
                self._recorder.trainer_interval(ended, self._since_us, now_us, version)
        self._since_us = now_us
        self._window_us, self._last = (self._window_us[0], now_us), engines

    @property
    def is_open(self) -> bool:
        """Whether the window has begun."""
        return self._since_us is not None

    def spent_s(self) -> dict[str, float]:
        """Return the seconds that the trainer has spent in each activity."""
        return {activity: us / 1e6 for activity, us in sorted(self._spent_us.items())}

    def usage(self) -> Usage:
        """Return the figures of the window so far."""
        wall_s = (self._window_us[1] - self._window_us[0]) / 1e6
        if wall_s <= 0:
            return Usage()
        none_yet = EngineWork(0, 0)
        busy_us = tokens = 0
        for name, work in self._last.items():
            before = self._first.get(name, none_yet)
            busy_us += work.busy_us - before.busy_us
            tokens += work.tokens - before.tokens
        engines_s = wall_s * max(1, len(self._last))
        return Usage(
            wall_s=wall_s,
            trainer_idle_share=self._spent_us["wait"] / 1e6 / wall_s,
            engine_idle_share=max(0.0, 1.0 - busy_us / 1e6 / engines_s),
            tokens_per_s=tokens / wall_s,
        )
