"""The Grafana dashboard in the repository against the metric catalogue."""

import json
import re
from pathlib import Path
from typing import Any

from tidegate.observability.metrics.catalogue import METRICS

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "examples" / "grafana" / "tidegate.json"


def exported() -> set[str]:
    """Return all names of time series in a scrape."""
    names = {metric.name for metric in METRICS}
    histograms = {metric.name for metric in METRICS if metric.kind == "histogram"}
    return names | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def test_every_expression_names_metrics_and_labels_that_exist() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    for panel in panels():
        for target in panel["targets"]:
            named = re.findall(r"\btidegate_\w+", target["expr"])
            assert named, panel["title"]
            assert set(named) <= exported(), panel["title"]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_rates_are_taken_of_counters_only() -> None:
    counts = {metric.name for metric in METRICS if metric.kind == "counter"}
    counts |= exported() - {metric.name for metric in METRICS}
    for panel in panels():
        for target in panel["targets"]:
            rated = set(re.findall(r"rate\((\w+)", target["expr"]))
            assert rated <= counts, panel["title"]


def test_grafana_panels_do_not_overlap_and_have_unique_ids() -> None:
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels()]
    assert len(set(places)) == len(places)
    assert all(each["gridPos"]["x"] + each["gridPos"]["w"] <= 24 for each in panels())
    assert len({each["id"] for each in panels()}) == len(panels())
