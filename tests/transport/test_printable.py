"""Tests that control characters of models, tasks, errors and peers are escaped in output."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.observability.recorded import some_statistics
from tidegate.cli.conventions import echo
from tidegate.observability.dashboard.terminal import WatchedRun, watch
from tidegate.observability.logs import JsonLines
from tidegate.observability.progress import ProgressDisplay
from tidegate.observability.records.recording import RunRecorder
from tidegate.observability.reports.report import write_report
from tidegate.transport.printable import print_stderr, printable

pytestmark = pytest.mark.wire

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202eevil\u2028"


def is_harmless(text: str) -> bool:
    return not any(each in text for each in HOSTILE if each not in "]0;owned[2J31mevil")


def test_controls_are_escaped_and_other_text_stays() -> None:
    assert printable(HOSTILE) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202eevil\u2028"
    assert printable("größer 数 🙂\n") == "größer 数 🙂\\n"
    assert printable("a\nb", keeps="\n") == "a\nb"


@pytest.mark.parametrize("formatter", [logging.Formatter(), JsonLines()])
def test_a_log_line_has_no_control_characters_of_its_arguments(
    formatter: logging.Formatter,
) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.getLogger("tidegate")
    log.addHandler(handler)
    try:
        log.error("engine=%s why=%r number=%d", HOSTILE, HOSTILE, 7)
        try:
            raise ValueError(HOSTILE + "\nERROR:tidegate:forged")
        except ValueError as error:
            log.error("failed: %s", error)
            log.error("on_batch raised", exc_info=error)
    finally:
        log.removeHandler(handler)
    said = stream.getvalue()
    assert is_harmless(said)
    assert "number=7" in said
    assert [line.startswith("ERROR:tidegate:forged") for line in said.splitlines()].count(True) <= 1


def test_what_a_command_or_an_engine_prints_has_no_controls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    echo(f"worst: {HOSTILE}\nnext")
    print_stderr(f"error: {HOSTILE}\nforged")
    said = capsys.readouterr()
    assert is_harmless(said.out)
    assert is_harmless(said.err)
    assert said.out.count("\n") == 2
    assert said.err.count("\n") == 1


def test_reports_tables_and_screens_of_a_hostile_run_have_no_controls(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = tmp_path / "run"
    with RunRecorder(run, settings={"mode": HOSTILE}, model=tmp_path) as recorder:
        recorder.finish(some_statistics(), warm_up=HOSTILE, mismatch={HOSTILE: 1.0})
    body = json.loads((run / "run.json").read_text())
    body["model"] = HOSTILE
    body["statistics"]["discarded_rollouts"] = {HOSTILE: 2}
    body["statistics"]["stuck"] = [
        {"kind": "turn", "name": HOSTILE, "waited_s": 1.0, "where": HOSTILE}
    ]
    (run / "run.json").write_text(json.dumps(body))
    assert is_harmless(write_report(run).read_text())
    state = dict(WatchedRun.find(run).fetch_state())
    state["about"] = {**state["about"], "is_live": True}  # ended runs show no stuck turns
    for is_terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=is_terminal, color_system=None, width=300)
        watch(WatchedRun(lambda: state, is_live=True), console, once=True)
        if not is_terminal:  # rich moves the cursor for a live table
            progress = ProgressDisplay(groups_per_batch=1, console=console)
            progress.show(HOSTILE, some_statistics)
        assert is_harmless(screen.getvalue())
        assert r"\x1b]0;owned" in screen.getvalue()


def test_a_command_that_fails_on_a_hostile_name_prints_it_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidegate.cli", "report"]
    ended = subprocess.run(
        [*command, str(tmp_path / "\x1b[2Jgone")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "\x1b" not in ended.stderr
    assert r"\x1b[2Jgone" in ended.stderr
