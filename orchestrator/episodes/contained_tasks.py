"""Task factory that keeps ``SystemExit`` and ``KeyboardInterrupt`` of users' code off the loop.

asyncio ends the event loop when a task raises one of them. ``trainer/run.py`` and the simulation
install :func:`contained_task` on their loops.
"""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")


class ContainedExit(RuntimeError):
    """``SystemExit`` or ``KeyboardInterrupt`` that users' code has raised in a task."""


def contained_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, Result] | Generator[Any, None, Result],
    **options: Any,
) -> "asyncio.Task[Result]":
    """Create a task; the task factory of loops that run users' code.

    In asyncio, ``SystemExit`` or ``KeyboardInterrupt`` in a task ends the loop with all its tasks.
    Here both become :class:`ContainedExit`, which the awaiting code can handle.
    """
    return asyncio.Task(_Contained(coro), loop=loop, **options)


def is_interrupt(error: BaseException) -> bool:
    """Whether an error may be a Ctrl-C, which the interpreter raises in the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and is_main


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose ``SystemExit`` and ``KeyboardInterrupt`` are :class:`ContainedExit`."""

    def __init__(self, coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any]) -> None:
        self._coro: Any = coro

    def __await__(self) -> Generator[Any, Any, Any]:
        awaiting: Generator[Any, Any, Any] = self._coro.__await__()
        return awaiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # cr_await and so on, for debuggers

    def send(self, value: Any) -> Any:
        """Forward to the coroutine."""
        try:
            return self._coro.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            if is_interrupt(error):
                raise
            raise ContainedExit(f"a task raised {error!r}") from error

    def throw(self, *error: Any) -> Any:
        """Forward to the coroutine."""
        try:
            return self._coro.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exited:
            if is_interrupt(exited):
                raise
            raise ContainedExit(f"a task raised {exited!r}") from exited
        finally:
            # The error's traceback refers to this frame: without a reference back, the error and
            # what its frames hold are freed at once, not by the garbage collector.
            del error

    def close(self) -> None:
        """Forward to the coroutine."""
        self._coro.close()
