"""Shared test configuration: kernel backend, timeouts, and checks for leaked processes and sockets.

Kernels run on a GPU, else in Triton's interpreter. Triton reads the environment variable when it is
imported, which any test's imports may do, so it is set here first.
"""

import atexit
import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.forked_programs import children, executing, forking

SLOW_TIMEOUT_S = 600
"""Timeout of slow tests: a run that takes one minute on an idle machine took more than three beside
eight others."""

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked_programs.py forks no process with threads
os.environ.setdefault("TIDEGATE_TRACEBACKS", "full")  # a failing test shows all lines
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns, an error in tests
# A shell ignores SIGINT in background jobs, and programs that tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("untimed", settings.default, deadline=None)  # no test asserts a timing
settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]

LONGEST_FIRST = (
    "tests/examples/test_async_grpo.py",
    "tests/benchmarks/test_device_benchmark.py",
    "tests/engine/test_architectures.py",
    "tests/orchestrator/trainer/test_serve.py",
    "tests/observability/records/test_killed_runs.py",
    "tests/engine/execution/test_hybrids_exactly.py",
    "tests/engine/device/test_device_graphs.py",
)
"""Files that take longest, in this order. What is missing here costs time only."""

UNIT = "not wire"
"""Part of the mark expression of `make unit`, whose tests start no process and open no socket."""

_FORBIDDEN_IN_UNIT_TESTS = {"subprocess.Popen", "os.fork", "socket.connect", "socket.bind"}

_LEFT_OUT = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.(wire|slow)\b", re.MULTILINE)
"""Matches the source of a module all of whose tests have the mark `wire` or `slow`, its second
group. Many such modules import transformers, which each worker would do for nothing."""


def pytest_configure(config: pytest.Config) -> None:
    """Make unit tests fail that start a process or open a socket; those need the mark `wire`."""
    if UNIT not in config.option.markexpr:
        return

    def refuse(event: str, arguments: object) -> None:
        if event in _FORBIDDEN_IN_UNIT_TESTS and "PYTEST_CURRENT_TEST" in os.environ:
            raise RuntimeError(f"{event} in a unit test: mark its module with pytest.mark.wire")

    sys.addaudithook(refuse)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules without a unit test before each worker imports them with what they test."""
    expression = config.option.markexpr
    if UNIT not in expression or collection_path.suffix != ".py":
        return None
    left_out = _LEFT_OUT.search(collection_path.read_text(encoding="utf-8"))
    return True if left_out and f"not {left_out[2]}" in expression else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while modules are imported, and rarely all of it afterwards.

    A full collection visits the million objects of torch, transformers and hypothesis, which
    stay until the end: a third of a second each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or extension modules report what the cycles hold as leaks
        gc.set_threshold(5_000, 10, 100)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give slow tests more time before they count as hung; have workers begin with long files."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if hasattr(config, "workerinput"):
        _order_by_length(items)


def _order_by_length(items: list[pytest.Item]) -> None:
    """Sort files by how long they take, as far as that is known, longest first.

    xdist itself begins with the file that has most tests, and so ends with a worker that runs the
    longest one alone, because tests that start processes are few to a file.
    """
    waiting = {item.path for item in items if item.get_closest_marker("wire")}
    tests = Counter(item.path for item in items)
    ranks = {ROOT / name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(
        key=lambda item: (
            ranks.get(item.path, len(ranks)),
            item.path not in waiting,
            -tests[item.path],
            item.path,
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run two workers on each core: half of the time a test of several processes waits for one."""
    if UNIT in config.option.markexpr:
        return None
    return 2 * len(os.sched_getaffinity(0))


@pytest.fixture(scope="session")
def forked_programs() -> Iterator[None]:
    """Fork engines from a process that has torch imported."""
    with forking():
        yield


@pytest.fixture
def programs_are_executed() -> Iterator[None]:
    """Execute engines in this test, as a run of a user does."""
    with executing():
        yield


@pytest.fixture
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines make drafts also where the machine's load would speak against it."""
    monkeypatch.setattr("tidegate.orchestrator.fleet.processes.WORKER", "tests.free_drafts_worker")


@pytest.fixture(scope="module", autouse=True)
def nothing_started_by_a_module_outlives_it(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check for leaked processes, so that a later module that counts its processes is not
    blamed."""
    if any(request.node.iter_markers("wire")):
        request.getfixturevalue("forked_programs")
    before = children(recursive=True)
    yield
    left = [each for each in children(recursive=True) if each not in before]
    assert not left, f"still running, or not waited for: {left}"
