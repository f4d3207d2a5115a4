"""Errors of Tidegate that end a program show the user's lines, and Ctrl-C the line interrupted."""

import asyncio
import signal
import sys

import pytest

import tidegate
from tidegate.errors import ConfigError
from tidegate.orchestrator.episodes.tracebacks import TRACEBACKS, shorten_tracebacks


@pytest.fixture(autouse=True)
def as_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACEBACKS, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


async def start() -> None:
    async with tidegate.serve(model="model", max_staleness=-1):
        pass


def shown(error: BaseException, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that Python shows for an error that ends the program."""
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err.splitlines()


def test_a_wrong_setting_is_shown_with_the_users_lines_and_with_tidegates_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(start())
    monkeypatch.setenv(TRACEBACKS, "full")
    full = shown(refused.value, capsys)
    assert any("runs.py" in line for line in full)
    monkeypatch.delenv(TRACEBACKS)
    short = shown(refused.value, capsys)
    files = [line for line in short if line.startswith("  File ")]
    assert len(files) == 2  # asyncio.run(start()), and the line in it
    assert all(__file__ in line for line in files)
    assert short[-1].endswith("max_staleness=-1: must be greater than or equal to 0")


async def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)
    await asyncio.Event().wait()


def test_ctrl_c_is_shown_as_one_line_that_names_the_line_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shorten_tracebacks()
    # asyncio cancels the main task on SIGINT only where Python's own handler is installed.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            asyncio.run(interrupt())
    finally:
        signal.signal(signal.SIGINT, before)
    line = interrupt.__code__.co_firstlineno + 2
    assert shown(interrupted.value, capsys) == [f"interrupted at {__file__}:{line}"]


def test_a_program_that_shows_errors_itself_keeps_its_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own(*error: object) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", own)
    shorten_tracebacks()
    assert sys.excepthook is own
