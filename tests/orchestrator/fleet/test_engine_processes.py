"""A run closes an engine process's descriptors once, and no others."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tidegate.orchestrator.fleet.processes import EngineProcess

pytestmark = pytest.mark.wire


async def test_who_waits_twice_for_a_process_closes_nobody_elses_file(tmp_path: Path) -> None:
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
