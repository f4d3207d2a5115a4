"""Trained adapters in the dashboard, the metrics, `tidegate top` and the report."""

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.trainer.test_adapters_served import CONFIG, random_adapter
from tests.orchestrator.trainer.test_training_adapters import train
from tidegate.observability.dashboard.terminal import WatchedRun, screen
from tidegate.observability.reports.report import write_report

pytestmark = pytest.mark.wire


def by_name(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    columns, rows = state["adapter_columns"], state["frame"]["adapters"]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


def top(state: Any) -> str:
    console = Console(width=160, file=StringIO())
    with console.capture() as shown:
        console.print(screen(state))
    return shown.get()


def values_of(scrape: str) -> dict[tuple[str, str, str], float]:
    """Return the values of metrics by adapter: by name, adapter and account."""
    return {
        (sample.name, sample.labels["adapter"], sample.labels.get("account", "")): sample.value
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
        if "adapter" in sample.labels
    }


async def test_each_trained_adapter_is_shown_live_and_recorded_with_its_own_figures(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model", "qwen2")
    directory = tmp_path / "run"
    async with tidegate.serve(
        model=model,
        engines=1,
        group_size=2,
        run_directory=directory,
        dashboard_address="127.0.0.1:0",
    ) as rollouts:
        solver = await rollouts.train_adapter("solver", max_staleness=1, groups_per_batch=2)
        critic = await rollouts.train_adapter("critic", max_staleness=0, groups_per_batch=1)
        for each in (solver, critic):
            await each.publish(random_adapter(model, 9), config=CONFIG)
        trained = [await train(solver, model, batches=3), await train(critic, model, batches=2)]
        assert rollouts.dashboard_url is not None
        async with httpx.AsyncClient(base_url=rollouts.dashboard_url, timeout=60) as http:
            state = (await http.get("/api/state")).json()
            metrics = (await http.get("/metrics")).text
    shown, values = by_name(state), values_of(metrics)
    assert list(shown) == ["critic", "solver"]
    for name, batches, bound in (("solver", trained[0], 1), ("critic", trained[1], 0)):
        line = shown[name]
        assert line["trainer_version"] == line["batches"] == len(batches)
        assert line["staleness_bound"] == bound
        assert line["trained_rollouts"] == sum(len(batch.rewards) for batch in batches)
        assert line["reward"] == pytest.approx(float(batches[-1].rewards.mean()))
        accounts = ("trained", "buffered", "in_flight", "discarded")
        assert line["generated_tokens"] == sum(line[f"{account}_tokens"] for account in accounts)
        assert values["tidegate_adapter_trainer_version", name, ""] == len(batches)
        assert values["tidegate_adapter_batches_total", name, ""] == len(batches)
        assert values["tidegate_adapter_tokens", name, "trained"] == line["trained_tokens"] > 0
        assert values["tidegate_adapter_staleness_bound_versions", name, ""] == bound
        assert name in top(state)
    recorded = dict(WatchedRun.find(directory).fetch_state())
    for name, line in by_name(recorded).items():
        for figure in ("trainer_version", "batches", "trained_rollouts", "reward"):
            assert line[figure] == pytest.approx(shown[name][figure], rel=1e-4)
        assert name in top(recorded)
    page = await asyncio.to_thread(write_report, directory)
    assert "## Trained adapters" in page.read_text()
    assert "| solver | 3 | 3 |" in page.read_text()
    json.dumps(recorded)
