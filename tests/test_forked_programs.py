"""Tests that a program forked by ``tests/forked_programs.py`` is like an executed one, to itself
and to whoever starts it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forked_programs import children, executing

pytestmark = pytest.mark.wire

WAIT_S = 60

SHOWN = [sys.executable, "-m", "tests.shown_process", "--an", "argument with spaces"]

IS_FORKED = "has torch"
"""Key of what only a fork has shown: it has modules that it did not import."""

QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def outputs(command: list[str], **options: Any) -> tuple[int, str, str]:
    """Return a program's status and what it wrote."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "input": ""}
    done = subprocess.run(command, text=True, timeout=WAIT_S, check=False, **{**streams, **options})
    return done.returncode, done.stdout, done.stderr


def shown(**options: Any) -> dict[str, Any]:
    """Return what the program that shows itself has printed, and its status."""
    status, stdout, stderr = outputs(SHOWN, **options)
    printed: dict[str, Any] = json.loads(stdout.replace("an error\n", ""))
    for name in ("COLUMNS", "LINES"):  # the readline library's, of which os.environ does not know
        printed["environ"].pop(name, None)
    return printed | {"status": status, "stderr": stderr}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"input": "lines\nfor it"},
        {"start_new_session": True},
        {"env": {**os.environ, "TIDEGATE_SEEN": "\udce9"}},
        {"stderr": subprocess.STDOUT},
    ],
    ids=["plain", "stdin", "session", "environment", "one stream"],
)
def test_a_forked_program_sees_what_an_executed_one_sees(options: dict[str, Any]) -> None:
    forked = shown(**options)
    with executing():
        executed = shown(**options)
    assert forked.pop(IS_FORKED) is True
    assert executed.pop(IS_FORKED) is False
    assert forked == executed
    assert forked["status"] == 3


def test_a_forked_program_inherits_the_descriptors_passed_and_the_umask() -> None:
    reading, writing = os.pipe()
    before = os.umask(0o27)
    try:
        forked = shown(pass_fds=[writing, reading])
        with executing():
            executed = shown(pass_fds=[writing, reading])
        assert {**forked, IS_FORKED: False} == executed
        assert (forked["umask"], len(forked["descriptors"])) == (0o27, 5)
    finally:
        os.umask(before)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("arguments", [["--help"], ["--no-such-option"], []])
def test_an_engine_that_refuses_its_arguments_ends_alike(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "tidegate.engine.worker", *arguments]
    forked = outputs(command)
    with executing():
        assert outputs(command) == forked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_forked_program_is_a_child_and_dies_of_signals(number: signal.Signals) -> None:
    with subprocess.Popen(SHOWN, stdin=subprocess.PIPE, **QUIET) as process:
        assert children() == [psutil.Process(process.pid)]
        process.send_signal(number)
        assert process.wait(WAIT_S) == -number


@pytest.mark.parametrize(
    ("variable", "options", "forks"),
    [
        ("TIDEGATE_OTHER", {}, True),
        ("TORCH_LOGS", {}, False),
        ("TIDEGATE_OTHER", {"cwd": Path.cwd()}, False),
        ("TIDEGATE_OTHER", {"close_fds": False}, False),
        ("TIDEGATE_OTHER", {"process_group": 0}, False),
    ],
)
def test_what_a_fork_cannot_imitate_is_executed(
    variable: str, options: dict[str, Any], forks: bool
) -> None:
    assert shown(env={**os.environ, variable: ""}, **options)[IS_FORKED] is forks


def test_a_test_can_have_its_programs_executed(programs_are_executed: None) -> None:
    assert not shown()[IS_FORKED]
