"""Engine processes of a run: how they start, and that their descriptors are closed once."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tidegate.orchestrator.fleet import processes
from tidegate.orchestrator.fleet.processes import EngineProcess
from tidegate.orchestrator.scheduler import loop_watch
from tidegate.orchestrator.settings.config import FleetSettings, RunSettings

pytestmark = pytest.mark.wire


async def test_a_process_that_is_waited_for_twice_closes_no_other_file(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    process = EngineProcess(
        "engine-0",
        tmp_path / "log",
        processes.ForkedProcess(os.posix_spawnp("true", ["true"], os.environ)),  # noqa: ASYNC221
    )
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


@pytest.mark.usefixtures("programs_are_executed")
def test_engines_that_start_together_import_torch_once_and_are_children_of_the_run(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model")
    with tidegate.serve_sync(model=model, engines=3):
        engines = _engines()
        assert set(engines) == {"engine-0", "engine-1", "engine-2"}
        # The parent's address space was copied, so the addresses of a library's code are equal.
        mapped = {
            next(m.addr for m in each.memory_maps(grouped=False) if "libtorch_cpu" in m.path)
            for each in engines.values()
        }
        assert len(mapped) == 1
        engines["engine-1"].kill()
        while _engines().get("engine-1") in {None, engines["engine-1"]}:  # until it is restarted
            time.sleep(0.02)


def _engines() -> dict[str, psutil.Process]:
    """Return the engine processes among this process's children, by the names in their commands."""
    engines = {}
    for child in children():
        with contextlib.suppress(psutil.Error):
            command = child.cmdline()
            if command[1:3] == ["-m", processes.WORKER]:
                engines[command[command.index("--engine") + 1]] = child
    return engines


@pytest.mark.usefixtures("programs_are_executed")
@pytest.mark.parametrize(
    "source",
    [
        "raise SystemExit(1)",
        "print('an import says hello')",
        "print([2**22 + 1, 2**22 + 2], flush=True); input(); raise SystemExit(1)",
    ],
)
def test_engines_that_could_not_be_forked_are_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "failing_program.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(processes, "FORKED_WORKERS", "failing_program")
    model = make_model_directory(tmp_path / "model")
    with tidegate.serve_sync(model=model, engines=2):
        assert len(children()) == 2


@pytest.mark.parametrize("is_killed", [True, False])
def test_forked_engines_that_are_not_adopted_end(tmp_path: Path, is_killed: bool) -> None:
    command = processes.engine_command(RunSettings(model=tmp_path), "engine-0", "ipc:///none")
    starts = [[command, str(tmp_path / name)] for name in "ab"]
    forks = subprocess.Popen(
        [sys.executable, "-m", processes.FORKED_WORKERS, json.dumps(starts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert forks.stdout is not None
    engines = [psutil.Process(pid) for pid in json.loads(forks.stdout.readline())]
    if is_killed:
        forks.kill()
    forks.communicate()  # else by the end of its input
    _, alive = psutil.wait_procs(engines, timeout=30)
    assert not alive


@pytest.mark.usefixtures("programs_are_executed")
def test_a_run_that_ends_while_its_engines_import_torch_leaves_no_process(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model")
    settings = RunSettings(model=model, fleet=FleetSettings(engines=2))

    async def start_and_stop() -> None:
        engines = processes.LocalEngines(
            settings, "ipc:///none", tmp_path / "logs", on_exit=lambda name, why: None
        )
        engines.start()
        assert engines.names == ["engine-0", "engine-1"]
        assert len(children()) == 1
        engines.retire("engine-1")
        assert engines.names == ["engine-0"]
        engines.stop()

    asyncio.run(start_and_stop())
    assert not children()
