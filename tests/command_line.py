"""The command `tidegate`, called in this process."""

import contextlib
import io
import sys
from typing import NamedTuple

import pytest

from tidegate.cli import command


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


def tidegate(*arguments: object) -> Ended:
    """Call `tidegate` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        status = status_of(list(map(str, arguments)), patch)
    return Ended(status, out.getvalue(), err.getvalue())


def status_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Call `tidegate` with these arguments, whose output pytest captures; return its status."""
    monkeypatch.setattr(sys, "argv", ["tidegate", *arguments])
    try:
        command.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
