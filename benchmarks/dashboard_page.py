"""Memory and update time of the dashboard's page in a real Chromium, during a full run.

``TIDEGATE_CHROMIUM=PATH python -m benchmarks.dashboard_page [--json]`` prints ``name, value, unit,
peer, ratio``; it needs playwright. The run has 100 simulated engines and 10,000 outstanding
rollouts; the peer is the limit for the page. A command that no module imports. Built on
``benchmarks.instrumentation``'s run and playwright.

    page_heap_mb: highest JavaScript heap, uncollected garbage included
    page_process_mb: memory (PSS) of the process that renders the page; beside it, that of an empty
        page
    page_update_s: median time between two drawn updates
    page_draw_ms: main-thread time of the page per update
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tidegate
from benchmarks.instrumentation import work_of
from benchmarks.orchestrator.subject import WEIGHTS, settings_for, solve, wait_for_engines
from benchmarks.table import Row, compared, show

BATCHES = 5
PAGE_VIEWS = 25
"""Number of updates to wait for; one arrives each second."""
MEMORY_MAX_MB = 200.0
UPDATE_MAX_S = 1.0
UPDATE_TIMEOUT_MS = 60_000

NEXT_UPDATE = "seen => Number(document.body.dataset.frames ?? 0) > seen"


def renderer_mb(browser_pid: int) -> float:
    """Return the memory of the browser's largest renderer process; the others show no page."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid=,args="], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    rows = [line.split(maxsplit=2) for line in listed]
    of = {int(pid): int(parent) for pid, parent, *_ in rows}

    def is_ours(pid: int) -> bool:
        while pid in of and pid != browser_pid:
            pid = of[pid]
        return pid == browser_pid

    ours = [int(row[0]) for row in rows if "--type=renderer" in row[2] and is_ours(int(row[0]))]
    return max((shared_out_mb(pid) for pid in ours), default=0.0)


def shared_out_mb(pid: int) -> float:
    """Return a process's proportional set size (PSS) in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the system doesn't report the memory of process {pid}")


def view_page(url: str) -> None:
    """Run the browser; print a line of figures for each update."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["TIDEGATE_CHROMIUM"], args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable")
        empty_mb = renderer_mb(os.getpid())
        page.goto(url)
        for _ in range(PAGE_VIEWS):
            seen = int(page.evaluate("Number(document.body.dataset.frames ?? 0)"))
            page.wait_for_function(NEXT_UPDATE, arg=seen, timeout=UPDATE_TIMEOUT_MS)
            metrics = devtools.send("Performance.getMetrics")["metrics"]
            reported = {each["name"]: each["value"] for each in metrics}
            frames = int(page.evaluate("Number(document.body.dataset.frames)"))
            figures = {
                "frames": frames,
                "at_s": reported["Timestamp"],
                "heap_mb": reported["JSHeapUsedSize"] / 2**20,
                "task_s": reported["TaskDuration"],
                "process_mb": renderer_mb(os.getpid()),
                "empty_mb": empty_mb,
                "cells": page.locator("#groups button").count(),
            }
            print(json.dumps(figures), flush=True)
        browser.close()


def measured_views() -> list[dict[str, Any]]:
    """Return the browser's figures for a full run."""
    work = work_of("full")
    with (
        settings_for(work) as settings,
        tidegate.serve_sync(**settings, dashboard_address="127.0.0.1:0") as rollouts,
    ):
        wait_for_engines(rollouts, work.engines)
        batches = rollouts.batches(itertools.count(), episode=solve)
        next(batches)
        rollouts.publish(WEIGHTS)
        command = [sys.executable, "-m", "benchmarks.dashboard_page", "--view-page"]
        viewer = subprocess.Popen(
            [*command, str(rollouts.dashboard_url)], stdout=subprocess.PIPE, text=True
        )
        for _ in itertools.islice(batches, BATCHES):
            rollouts.publish(WEIGHTS)
        output, _ = viewer.communicate(timeout=300)  # the run keeps going meanwhile
        return [json.loads(line) for line in output.splitlines()]


def rows() -> Iterator[Row]:
    """Return all lines of the table. The first updates, while the page loads, are skipped."""
    found = measured_views()[2:]
    if len(found) < 2:
        raise SystemExit("the browser saw too few updates: does TIDEGATE_CHROMIUM name one?")
    pairs = list(itertools.pairwise(found))
    gaps = [(b["at_s"] - a["at_s"]) / (b["frames"] - a["frames"]) for a, b in pairs]
    drawn = [(b["task_s"] - a["task_s"]) / (b["frames"] - a["frames"]) for a, b in pairs]
    yield Row("page_groups", found[-1]["cells"], "groups")
    yield compared("page_heap_mb", "MB", max(each["heap_mb"] for each in found), MEMORY_MAX_MB)
    process_mb = max(each["process_mb"] for each in found)
    yield compared("page_process_mb", "MB", process_mb, MEMORY_MAX_MB)
    yield Row("page_process_empty_mb", found[0]["empty_mb"], "MB")
    yield compared("page_update_s", "s", statistics.median(gaps), UPDATE_MAX_S)
    yield Row("page_update_s_max", max(gaps), "s")
    yield Row("page_draw_ms", 1e3 * statistics.median(drawn), "ms")


def main() -> None:
    """Measure, or run as the browser process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--view-page", metavar="URL", help="run the browser process, on this page")
    options = parser.parse_args()
    if options.view_page:
        view_page(options.view_page)
    else:
        show(rows(), as_json=options.json)


if __name__ == "__main__":
    main()
