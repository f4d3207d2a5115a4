"""A recorded run in Python and notebooks: its numbers, trajectories, metrics and plots.

Users call :func:`open_run`. polars, pandas, datasets and matplotlib are imported when asked for.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import pyarrow as pa

from tidegate.errors import AuditError, ConfigError
from tidegate.observability.records.evaluations import EvaluationPoint, read_evaluations
from tidegate.observability.records.trajectories import (
    SCHEMA,
    RecordedRollout,
    read_trajectories,
    recorded_batches,
)
from tidegate.observability.reports.facts import Facts, read_facts, read_metrics, read_record
from tidegate.orchestrator.telemetry.html_tables import html_table, line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TableFormat = Literal["polars", "pandas", "datasets", "arrow"]
"""Type of a returned table; each but ``arrow`` needs the package of its name."""


class RecordedRun:
    """A run's directory, read anew by each call, so that a running run can be followed."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        read_record(self.directory)

    @property
    def facts(self) -> Facts:
        """The run in numbers, as in report.json.

        Raises:
            AuditError: the run has recorded no batch yet, or a file can't be read.
        """
        return read_facts(self.directory)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run's last process, by flat name."""
        return dict(read_record(self.directory)["settings"])

    @property
    def evaluations(self) -> list[EvaluationPoint]:
        """All evaluations, in their order."""
        return read_evaluations(self.directory)

    def rollouts(self) -> Iterator[RecordedRollout]:
        """Yield the recorded rollouts one by one, in the order in which they ended."""
        return read_trajectories(self.directory)

    def trajectories(
        self, format: TableFormat = "polars", *, columns: Sequence[str] | None = None
    ) -> Any:
        """Return the recorded rollouts as a table, one row each, with token ids and log-probs.

        Args:
            format: ``polars`` or ``pandas`` (a data frame), ``datasets`` (Hugging Face's), or
                ``arrow`` (a pyarrow table).
            columns: names of the columns to read; all if None.

        Raises:
            ConfigError: there is no such format or column, or its package is not installed.
            AuditError: a file can't be read.
        """
        names = SCHEMA.names if columns is None else list(columns)
        if unknown := [name for name in names if name not in SCHEMA.names]:
            raise ConfigError(
                f"trajectories have no column {unknown[0]!r}; they have {', '.join(SCHEMA.names)}"
            )
        read = list(dict.fromkeys(["rollout_id", *names]))  # distinguished by id over resumes
        schema = pa.schema([SCHEMA.field(name) for name in read])
        batches = [
            batch.select(read).cast(schema) for batch in recorded_batches(self.directory, read)
        ]
        return _as(format, pa.Table.from_batches(batches, schema=schema).select(names))

    def metrics(self, format: TableFormat = "polars") -> Any:
        """Return the figures of all batches as a table, one row each; see :meth:`trajectories`."""
        rows = read_metrics(self.directory)
        names = dict.fromkeys(name for row in rows for name in row)
        return _as(format, pa.table({name: [row.get(name) for row in rows] for name in names}))

    def plot(self) -> "Figure":
        """Return the report's picture: rewards, staleness, and an excerpt of the timeline."""
        from tidegate.observability.reports.pictures import report_figure

        return report_figure(self.directory, self.facts, read_metrics(self.directory))

    def plot_metrics(self, *names: str, over: str = "version") -> "Figure":
        """Return a picture of figures of the batches, one below the other.

        Raises:
            ConfigError: no batch has a figure of this name.
        """
        from tidegate.observability.reports.pictures import metrics_figure

        rows = read_metrics(self.directory)
        known = dict.fromkeys(name for row in rows for name in row)
        for name in (*names, over):
            if name not in known:
                raise ConfigError(f"no batch has a figure {name!r}; there are {', '.join(known)}")
        if not names:
            raise ConfigError("plot_metrics() needs at least one name, such as 'reward'")
        return metrics_figure(rows, names, over=over)

    def report(self) -> Path:
        """Write report.md, report.json and report.png; return the page's path."""
        from tidegate.observability.reports.report import write_report

        return write_report(self.directory)

    def _figures(self) -> dict[str, object]:
        try:
            facts = self.facts
        except AuditError:
            return {"batches": 0}
        return {"batches": facts.batches, **facts.figures()}

    def __repr__(self) -> str:
        return line("RecordedRun", {"of": self.directory, **self._figures()})

    def _repr_html_(self) -> str:
        return html_table(f"Run {self.directory}", self._figures())


def open_run(directory: Path | str) -> RecordedRun:
    """Open a run's directory, of a run that has ended or still runs.

        run = tidegate.open_run("runs/demo")
        run.trajectories("polars", columns=["task", "reward", "staleness"])
        run.plot()

    Raises:
        AuditError: the directory has no recorded run.
    """
    return RecordedRun(directory)


def _as(format: TableFormat, table: pa.Table) -> Any:
    if format == "arrow":
        return table
    if format not in get_args(TableFormat):
        raise ConfigError(f"a format is {', '.join(get_args(TableFormat))}; got {format!r}")
    try:
        package = importlib.import_module(format)
    except ImportError:
        raise ConfigError(f"{format} is not installed: pip install {format}") from None
    match format:
        case "polars":
            return package.from_arrow(table)
        case "pandas":
            return table.to_pandas()
        case _:
            return package.Dataset(table)
