"""Progress of a run in the terminal, drawn with rich: a live table, or one plain line per batch.

``serve(progress=True)`` and ``tidegate run`` add a :class:`ProgressDisplay` to the run's recorders.
It writes to standard error, so that standard output holds results only. It reads
:class:`RunStatistics` after each batch.
"""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from tidegate.orchestrator.telemetry.recorder import Recorder
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.transport.printable import printable

REDRAWS_PER_S = 2.0
"""Redraws of the live table; each takes statistics on the run's loop, about a millisecond."""


class ProgressDisplay(Recorder):
    """Shows a run while it runs, and a summary when it ends, however it ends.

    Args:
        groups_per_batch: converts a number of tasks into a number of batches.
        batches: number of batches before a resume; 0 for a new run.
        console: the rich console to print to; standard error if None.
    """

    def __init__(
        self, *, groups_per_batch: int, batches: int = 0, console: Console | None = None
    ) -> None:
        self._groups_per_batch = groups_per_batch
        self._batches = batches
        self._batches_total: int | None = None
        self._batches_shown = 0
        """Number of batches since this process began."""
        self._rewards: tuple[float, ...] = ()
        """Mean rewards of the first batch and of the last; empty before the first."""
        self._evaluations: dict[str, tuple[Mapping[str, Any], ...]] = {}
        """Figures of the first evaluation of each name, and of the last if there are several."""
        self._read: Callable[[], RunStatistics] | None = None
        self._statistics: RunStatistics | None = None
        """The last snapshot; None until the run has started."""
        self._console = console or Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._lock = threading.Lock()
        """Guards the start and the end of the live table, which several threads may request."""

    # ------------------------------------------------------------ called by the run's observers

    def show(self, heading: str, read: Callable[[], RunStatistics]) -> None:
        """Print ``heading``, and start the live table in a terminal. ``read`` takes a snapshot."""
        self._say(heading)
        self._read = read
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        with self._lock:
            self._live = Live(
                console=self._console,
                get_renderable=self._table,
                refresh_per_second=REDRAWS_PER_S,
                redirect_stdout=sys.stdout.isatty(),  # else the program's results go to a file
            )
            self._live.start()

    def hide(self) -> None:
        """Stop the live table; its last state stays on the screen. Harmless if repeated."""
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._read = None

    @override
    def offered(self, tasks: int | None) -> None:
        if tasks is None:
            self._batches_total = None
        else:
            self._batches_total = -(-tasks // self._groups_per_batch)

    @override
    def batch(self, metrics: Mapping[str, float]) -> None:
        self._batches += 1
        self._batches_shown += 1
        self._rewards = (*self._rewards[:1], metrics["reward"])
        if self._live is None:
            self._say(
                f"batch {self._number()}  reward {metrics['reward']:.3f}  "
                f"v{metrics['version']:.0f}  {metrics['tokens_per_s']:.0f} tok/s  "
                f"staleness mean {metrics['staleness_mean']:.2f} max "
                f"{metrics['staleness_max']:.0f}  idle trainer "
                f"{metrics['trainer_idle_share']:.0%} engines {metrics['engine_idle_share']:.0%}"
                f"{self._stuck_names()}"
            )

    @override
    def evaluation(self, figures: Mapping[str, Any]) -> None:
        name = str(figures["name"])
        self._evaluations[name] = (*self._evaluations.get(name, ())[:1], figures)
        failures = f", {figures['failures']} failed" if figures["failures"] else ""
        self._say(
            f"evaluation {figures['name']}  reward {figures['reward']:.3f}  v{figures['version']}  "
            f"{figures['tasks']} tasks{failures}  {figures['seconds']:.1f} s"
        )

    @override
    def statistics(self, statistics: RunStatistics) -> None:
        self._statistics = statistics

    @override
    def finish(self, statistics: RunStatistics, **facts: object) -> None:
        self._statistics = statistics

    @override
    def close(self) -> None:
        """Print the summary, if the run had started."""
        self.hide()
        statistics, self._statistics = self._statistics, None
        if statistics is not None:
            self._say(summary(statistics, self._rewards, self._evaluations))

    # ------------------------------------------------------------ drawing

    def _say(self, text: str) -> None:
        is_log = not self._console.is_terminal  # whose lines are not broken
        self._console.print(Text(printable(text, keeps="\n")), soft_wrap=is_log)

    def _number(self) -> str:
        total = self._batches_total
        return f"{self._batches}/{total}" if total is not None else str(self._batches)

    def _stuck_names(self) -> str:
        """Return the names of what is stuck, as of the last snapshot, for the end of a line; the
        log has the rest."""
        stuck = () if self._statistics is None else self._statistics.stuck
        return f"  stuck: {', '.join(each.name for each in stuck)}" if stuck else ""

    def _table(self) -> Group | Text:
        """Return the live table; rich's thread calls it for each redraw."""
        read = self._read
        if read is not None:
            with contextlib.suppress(Exception):  # the run has not started yet, or has ended
                self._statistics = read()
        s = self._statistics
        if s is None or not s.engines:
            return Text("waiting for engines, which import torch and load the model")
        table = Table.grid(padding=(0, 3))
        reward = f"{self._rewards[-1]:.3f}" if self._rewards else "-"
        table.add_row("batch", self._number(), "reward", reward)
        table.add_row("tokens/s", f"{s.tokens_per_s:.0f}", "time", self._time(s))
        table.add_row(
            "staleness",
            f"mean {s.mean_staleness:.2f}, max {s.max_staleness_seen}, bound {_bound(s)}",
            "mixed versions",
            f"{s.mixed_version_share:.0%} of rollouts",
        )
        table.add_row(
            "weights", f"trainer v{s.trainer_version}, engines {_versions(s)}", "groups", _groups(s)
        )
        table.add_row(
            "idle",
            f"trainer {s.trainer_idle_share:.0%}, engines {s.engine_idle_share:.0%}",
            "discarded",
            f"{sum(s.discarded_rollouts.values())} rollouts",
        )
        stuck = [Text(printable(str(each)), style="bold") for each in s.stuck]
        if not self._batches_total:
            return Group(table, *stuck)
        bar = Table.grid(expand=True)  # a bar by itself doesn't end its line
        bar.add_row(ProgressBar(total=self._batches_total, completed=self._batches))
        return Group(bar, table, *stuck)

    def _time(self, statistics: RunStatistics) -> str:
        """Return the time since the first batch was requested, and about how much is left."""
        elapsed = f"{statistics.wall_s:.0f} s"
        if not self._batches_total or not self._batches_shown:
            return elapsed
        batches_left = max(0, self._batches_total - self._batches)
        left_s = statistics.wall_s / self._batches_shown * batches_left
        return f"{elapsed}, about {left_s:.0f} s left"


def summary(
    statistics: RunStatistics,
    rewards: Sequence[float],
    evaluations: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    """Return a run's outcome in one line: batches, rewards, staleness, speed, idle shares.

    ``rewards`` and ``evaluations`` have the first and the last, the latter by their names.
    """
    s = statistics
    if not s.batches:
        reasons = ", ".join(f"{n} as {why}" for why, n in s.discarded_rollouts.items() if n)
        discarded = f"ended before the first batch; rollouts discarded: {reasons or 'none'}"
        return "; ".join([discarded, *map(str, s.stuck)])
    parts = [
        f"{s.batches} batches, v{s.trainer_version}, {s.wall_s:.0f} s",
        f"{s.trained_rollouts} rollouts trained, {sum(s.discarded_rollouts.values())} discarded",
    ]
    if rewards:
        parts.append(f"reward {rewards[0]:.3f} in the first batch, {rewards[-1]:.3f} in the last")
    for name, each in evaluations.items():
        shown = ", ".join(f"{end['reward']:.3f} at v{end['version']}" for end in each)
        parts.append(f"{name} {shown}")
    parts += [
        f"staleness max {s.max_staleness_seen} of bound {_bound(s)}",
        f"{s.tokens_per_s:.0f} tok/s",
        f"idle: trainer {s.trainer_idle_share:.0%}, engines {s.engine_idle_share:.0%}",
    ]
    return "ended: " + "; ".join([*parts, *map(str, s.stuck)])


def _bound(statistics: RunStatistics) -> str:
    bound = statistics.staleness_bound
    return "none" if bound is None else str(bound)


def _versions(statistics: RunStatistics) -> str:
    """Return the number of engines that serve each weight version, such as ``2 at v4, 1 lost``."""
    states = Counter(
        "lost" if not e.is_alive else f"at v{e.weight_version}" if e.state == "serving" else e.state
        for e in statistics.engines
    )
    return ", ".join(f"{engines} {state}" for state, engines in states.items()) or "-"


def _groups(statistics: RunStatistics) -> str:
    s = statistics
    return f"{s.running_groups} running, {s.buffered_groups} buffered"
