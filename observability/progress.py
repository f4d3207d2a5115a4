"""Terminal progress of a training loop, drawn with rich: a live table, or one line per batch.

Users' and the examples' training loops call :meth:`RunProgress.batch`, which takes the run's
statistics. There is no thread, so sync and async code can use it.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.transport.printable import printable

LINE_WIDTH_MAX = 160


class RunProgress:
    """Progress of one run. Use it in ``with`` or ``async with``; call :meth:`batch` for each batch.

        with RunProgress(rollouts.statistics, batches_total=40) as progress:
            for batch in rollouts.batches(...):
                ...
                progress.batch({"reward": batch.rewards.mean().item()})

    Args:
        statistics: returns a snapshot of the run.
        batches_total: number of batches, if known; a progress bar needs it.
        console: the rich console to print to; standard output if None.
    """

    def __init__(
        self,
        statistics: Callable[[], RunStatistics],
        *,
        batches_total: int | None = None,
        console: Console | None = None,
    ) -> None:
        self._statistics = statistics
        self._batches_total = batches_total
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._batches = 0
        self._live = (
            Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        )

    def batch(self, metrics: Mapping[str, float]) -> None:
        """Show the statistics after a train step; of ``metrics``, ``reward`` and ``loss``."""
        self._batches += 1
        statistics = self._statistics()
        if self._live is not None:
            self._live.update(self._table(statistics, metrics), refresh=True)
        else:
            self.say(self._line(statistics, metrics))

    def say(self, text: str) -> None:
        """Print a line above the live table."""
        self._console.print(Text(printable(text, keeps="\n")), soft_wrap=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exception: object) -> None:
        self.__exit__()

    def _step(self) -> str:
        total = f"/{self._batches_total}" if self._batches_total else ""
        return f"{self._batches}{total}"

    def _line(self, statistics: RunStatistics, metrics: Mapping[str, float]) -> str:
        s = statistics
        return (
            f"step {self._step()}  {_metrics(metrics)}  {s.tokens_per_s:.0f} tok/s  "
            f"staleness {s.mean_staleness:.2f} max {s.max_staleness_seen}/{s.staleness_bound}  "
            f"v{s.trainer_version} engines {_versions(s)}  "
            f"idle trainer {s.trainer_idle_share:.0%} engines {s.engine_idle_share:.0%}"
        )[:LINE_WIDTH_MAX]

    def _table(self, statistics: RunStatistics, metrics: Mapping[str, float]) -> Group:
        s = statistics
        table = Table.grid(padding=(0, 3))
        table.add_row("step", self._step(), "measured", _metrics(metrics))
        table.add_row("tokens/s", f"{s.tokens_per_s:.0f}", "wall time", f"{s.wall_s:.0f} s")
        table.add_row(
            "staleness",
            f"mean {s.mean_staleness:.2f}, max {s.max_staleness_seen}, bound {s.staleness_bound}",
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
        if not self._batches_total:
            return Group(table)
        bar = Table.grid(expand=True)  # a bar by itself doesn't end its line
        bar.add_row(ProgressBar(total=self._batches_total, completed=self._batches))
        return Group(bar, table)


def _metrics(metrics: Mapping[str, float]) -> str:
    parts = [f"{name} {metrics[name]:.3f}" for name in ("reward", "loss") if name in metrics]
    return "  ".join(parts) or "-"


def _versions(statistics: RunStatistics) -> str:
    engines = statistics.engines
    return " ".join(f"v{e.weight_version}" if e.is_alive else "lost" for e in engines) or "-"


def _groups(statistics: RunStatistics) -> str:
    s = statistics
    return f"{s.running_groups} running, {s.buffered_groups} buffered"
