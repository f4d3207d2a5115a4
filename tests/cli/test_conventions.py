"""Progress of commands where standard error is no terminal."""

import pytest

from tidegate.cli import conventions


def test_without_a_terminal_progress_is_lines_at_most_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("tidegate.cli.conventions.time.monotonic", lambda: now_s[0])
    with conventions.progress("reading") as show:
        for second in range(8):
            now_s[0] = second
            show(f"v{second}\x1b[2J")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [rf"v{second}\x1b[2J" for second in (2, 4, 6)]
