"""A run closes an engine process's descriptors once, and no others."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

import tidegate
from tests.models import make_model_directory
from tidegate.orchestrator.fleet.processes import EngineProcess
from tidegate.orchestrator.scheduler import loop_watch

pytestmark = pytest.mark.wire


async def test_a_process_that_is_waited_for_twice_closes_no_other_file(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    process = EngineProcess("engine-0", [sys.executable, "-c", ""], tmp_path / "log")
    ended = asyncio.Event()
    process.watch(asyncio.get_running_loop(), lambda _: ended.set())
    async with asyncio.timeout(60):
        await ended.wait()
    process.join()
    other, _ = ends = os.pipe()
    try:
        process.join()
        process.unwatch(asyncio.get_running_loop())
        assert os.fstat(other)
    finally:
        for end in ends:
            os.close(end)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_run_that_waits_for_an_engine_to_end_does_not_call_its_loop_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    join = EngineProcess.join

    def slowly(process: EngineProcess) -> None:  # as an adapter that ends its requests to vLLM
        time.sleep(0.5)
        join(process)

    monkeypatch.setattr(loop_watch, "REPORT_AFTER_S", 0.1)
    monkeypatch.setattr(loop_watch, "CHECK_INTERVAL_S", 0.02)
    model = make_model_directory(tmp_path / "model")
    with tidegate.serve_sync(model=model, engines=1):
        caplog.clear()
        monkeypatch.setattr(EngineProcess, "join", slowly)
    assert not [r for r in caplog.records if "stuck=loop" in r.getMessage()]
