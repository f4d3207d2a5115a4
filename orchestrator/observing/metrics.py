"""Which figures of a run does a monitoring system get, under which names, in which units?

The whole catalogue: docs/observing.md shows it, the Grafana dashboard draws it, and nothing else is
exported. It knows no exposition format.
"""

from tidegate.orchestrator.observing.metric import Metric
from tidegate.orchestrator.observing.staleness_metrics import STALENESS
from tidegate.orchestrator.observing.time_metrics import ENGINES, TIMES
from tidegate.orchestrator.observing.token_metrics import ROLLOUTS, TOKENS

METRICS: tuple[Metric, ...] = (*TOKENS, *ROLLOUTS, *STALENESS, *TIMES, *ENGINES)


def metric_lines() -> list[str]:
    """The catalogue as a table, for the documentation."""
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for each in METRICS:
        labels = ", ".join(each.labels) or "-"
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.help} |")
    return lines
