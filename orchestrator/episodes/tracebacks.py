"""Tracebacks that show the user's lines: of errors, and where Ctrl-C interrupted the program.

Tidegate's own lines are shown if the environment variable :data:`TRACEBACKS` is ``full``.
"""

import asyncio
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from tidegate.errors import TidegateError
from tidegate.transport.printable import print_stderr

OUR_DIRECTORY = str(Path(__file__).parents[2])
"""Directory of Tidegate's own code, whose lines are not shown as the place of an error."""

NOT_USERS = (OUR_DIRECTORY, str(Path(asyncio.__file__).parent))
"""Directories whose lines are not the user's: ``asyncio.run`` is the caller of a trainer's loop."""

TRACEBACKS = "TIDEGATE_TRACEBACKS"
"""Environment variable; ``full`` keeps Tidegate's own lines in tracebacks of its errors."""


def for_users(error: BaseException) -> BaseException:
    """Remove Tidegate's own lines from the traceback of an error, and of its causes; return it.

    Only of errors that Tidegate raises on purpose: their message says all. Any other may be a
    defect of Tidegate's, and loses just the lines that called the user's code.
    """
    if os.environ.get(TRACEBACKS) == "full":
        return error
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:  # a user's causes may form a circle
        seen.add(id(each))
        frames: list[TracebackType] = []
        trace = each.__traceback__
        while trace is not None:
            is_ours = trace.tb_frame.f_code.co_filename.startswith(NOT_USERS)
            if not is_ours or (frames and not isinstance(each, TidegateError)):
                frames.append(trace)
            trace = trace.tb_next
        if frames or isinstance(each, TidegateError):
            users: TracebackType | None = None
            for frame in reversed(frames):
                users = TracebackType(users, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
            each.__traceback__ = users
        each = each.__cause__
    return error


def at_the_call(error: TidegateError) -> BaseException:
    """Return an error as a call of the trainer's raises it: without the lines below the call, which
    are no lines of the trainer's."""
    if os.environ.get(TRACEBACKS) == "full":
        return error
    return for_users(error.with_traceback(None))


def shorten_tracebacks() -> None:
    """Have errors of Tidegate that end the program shown with the user's lines only, and Ctrl-C in
    one line.

    Changes nothing if the program shows its errors by a hook of its own.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if os.environ.get(TRACEBACKS) == "full":
        pass
    elif isinstance(error, KeyboardInterrupt):
        print_stderr(f"interrupted{_users_line(error)}")
        return
    elif isinstance(error, TidegateError):
        trace = for_users(error).__traceback__
    sys.__excepthook__(kind, error, trace)


def _users_line(interrupt: KeyboardInterrupt) -> str:
    """Return the innermost line of the program's own, `` at FILE:LINE``; empty if there is none."""
    paths = sysconfig.get_paths()
    others = (OUR_DIRECTORY, paths["stdlib"], paths["purelib"], "<frozen ")
    # asyncio.run raises a KeyboardInterrupt of its own; its context has the coroutine's lines.
    for error in (interrupt.__context__, interrupt):
        frames = traceback.extract_tb(None if error is None else error.__traceback__)
        for frame in reversed(frames):
            if not frame.filename.startswith(others):
                return f" at {frame.filename}:{frame.lineno}"
    return ""
