"""Asyncio tasks stepped in rounds, so that thousands of short coroutines cost little each.

Episodes run as these tasks. An ``asyncio.Task`` costs a loop callback for each of its steps, a
set's bookkeeping in a task group, and a name. Here one callback per loop iteration steps all tasks
that are ready, in the order in which they became so. Code that runs in them sees ordinary tasks:
they are registered by asyncio's documented functions for custom task classes.
"""

import asyncio
import contextvars
import threading
from asyncio import _enter_task, _leave_task, _register_task
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")

_set_result = asyncio.Future.set_result
"""Bound once, because ``super()`` takes as long as the call itself."""


class Rounds:
    """Ready tasks of one event loop."""

    __slots__ = ("_on_error", "_ready", "loop")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]
    ) -> None:
        """``on_error`` gets errors of :meth:`SteppedTask.end`, and those never to be caught."""
        self.loop = loop
        self._on_error = on_error
        self._ready: list[SteppedTask] = []

    def add(self, task: "SteppedTask") -> None:
        """Step this task in the loop's next iteration."""
        if not self._ready:
            self.loop.call_soon(self._step_all)
        self._ready.append(task)

    def _step_all(self) -> None:
        """Step all ready tasks; those that become ready meanwhile wait for the next round."""
        ready, self._ready = self._ready, []
        for task in ready:
            try:
                task.step()
            except BaseException as error:  # noqa: BLE001 - other tasks must still be stepped
                self._on_error(error)


class ContainedExit(RuntimeError):
    """``SystemExit`` or ``KeyboardInterrupt`` that users' code has raised in a task."""


def contained_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, Result] | Generator[Any, None, Result],
    **options: Any,
) -> "asyncio.Task[Result]":
    """Create a task; the task factory of loops that run users' code.

    asyncio lets ``SystemExit`` and ``KeyboardInterrupt`` of a task end the loop, with everything
    that runs on it. Here they become :class:`ContainedExit`, which the awaiting code can handle.
    """
    return asyncio.Task(_Contained(coro), loop=loop, **options)


def is_interrupt(error: BaseException) -> bool:
    """Whether an error may be a Ctrl-C, which the interpreter raises in the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and is_main


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose ``SystemExit`` and ``KeyboardInterrupt`` become :class:`ContainedExit`."""

    def __init__(self, coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any]) -> None:
        self._coro: Any = coro

    def __await__(self) -> Generator[Any, Any, Any]:
        awaiting: Generator[Any, Any, Any] = self._coro.__await__()
        return awaiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # cr_await and others, for debuggers

    def send(self, value: Any) -> Any:
        """As of the wrapped coroutine."""
        try:
            return self._coro.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            if is_interrupt(error):
                raise
            raise ContainedExit(f"a task raised {error!r}") from error

    def throw(self, *error: Any) -> Any:
        """As of the wrapped coroutine."""
        try:
            return self._coro.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exited:
            if is_interrupt(exited):
                raise
            raise ContainedExit(f"a task raised {exited!r}") from exited

    def close(self) -> None:
        """As of the wrapped coroutine."""
        self._coro.close()


class SteppedFuture(asyncio.Future[Result]):
    """A future whose stepped waiter continues in the next round, without a callback of its own.

    Make it by :func:`stepped_future`: a constructor in Python takes three times as long.
    """

    __slots__ = ("waiter",)

    waiter: "SteppedTask | None"
    """Stepped task that awaits this; other tasks await it as any future."""

    def set_result(self, result: Result, /) -> None:
        """As :meth:`asyncio.Future.set_result`."""
        _set_result(self, result)
        waiter = self.waiter
        if waiter is None:
            return
        rounds = waiter._rounds
        if rounds._ready:  # add inlined: the call would cost as much again
            rounds._ready.append(waiter)
        else:
            rounds.add(waiter)

    def set_exception(self, exception: type[BaseException] | BaseException, /) -> None:
        """As :meth:`asyncio.Future.set_exception`."""
        super().set_exception(exception)
        if self.waiter is not None:
            self.waiter.wake()

    def cancel(self, msg: Any = None) -> bool:
        """As :meth:`asyncio.Future.cancel`."""
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.waiter is not None:
            self.waiter.wake()
        return is_cancelled


def stepped_future(loop: asyncio.AbstractEventLoop) -> SteppedFuture[Any]:
    """Return a new future without a waiter."""
    future: SteppedFuture[Any] = SteppedFuture(loop=loop)
    future.waiter = None
    return future


class SteppedTask(asyncio.Future[None]):
    """A task whose coroutine :meth:`begin` makes, and whose result :meth:`end` gets.

    It has the methods and attributes of :class:`asyncio.Task` that libraries use: anyio, aiohttp
    and asyncio's own timeouts and groups read them from the current task.
    """

    __slots__ = (
        "_cancel_message",
        "_cancels",
        "_context",
        "_coro",
        "_error",
        "_fut_waiter",
        "_must_cancel",
        "_rounds",
    )

    def __init__(self, rounds: Rounds) -> None:
        """Begin in the next round."""
        asyncio.Future.__init__(self, loop=rounds.loop)
        self._rounds = rounds
        self._context = contextvars.copy_context()
        self._coro: Coroutine[Any, Any, Any] | None = None
        self._fut_waiter: asyncio.Future[Any] | None = None
        self._must_cancel = False
        self._cancel_message: Any = None
        """Message of the cancellation; anyio finds the cancelled scope by it."""
        self._cancels = 0
        self._error: BaseException | None = None
        """Error to throw into the coroutine, because it awaited something invalid."""
        _register_task(self)  # type: ignore[arg-type]
        if rounds._ready:  # as in set_result
            rounds._ready.append(self)
        else:
            rounds.add(self)

    # ------------------------------------------------------------ for those who make tasks of it

    def begin(self) -> Coroutine[Any, Any, Any]:
        """Return the coroutine to run. Called in the first step, unless cancelled before."""
        raise NotImplementedError

    def end(self, value: Any, error: BaseException | None) -> None:
        """Take the coroutine's result: it returned ``value``, or raised ``error``."""
        raise NotImplementedError

    # ------------------------------------------------------------ steps

    def wake(self) -> None:
        """Continue in the next round."""
        self._rounds.add(self)

    def step(self) -> None:
        """Run the coroutine until it waits again, or ends."""
        loop = self._rounds.loop
        value: Any = None
        failure: BaseException | None = None
        _enter_task(loop, self)  # type: ignore[arg-type]
        try:
            if self._error is not None or self._must_cancel:
                waits_for = self._throw()
            else:
                self._fut_waiter, run = None, self._context.run
                coro = self._coro
                if coro is None:
                    coro = self._coro = run(self.begin)
                waits_for = run(coro.send, None)
            if (
                type(waits_for) is SteppedFuture
                and waits_for.waiter is None
                and not self._must_cancel
                and waits_for._asyncio_future_blocking
                and waits_for.get_loop() is loop
            ):  # the usual case of _wait_for, inlined
                waits_for._asyncio_future_blocking = False
                self._fut_waiter = waits_for
                waits_for.waiter = self
            else:
                self._wait_for(waits_for)
            return
        except StopIteration as returned:
            value = returned.value
            if self._must_cancel:  # it cancelled itself in its last step
                failure = self._cancelled_error()
        except BaseException as error:  # noqa: BLE001 - end() gets it
            failure = error
        finally:
            _leave_task(loop, self)  # type: ignore[arg-type]
        try:
            self.end(value, failure)
        finally:
            failure = None  # its traceback refers to this frame
            _set_result(self, None)
            self._coro = self._fut_waiter = None

    def _throw(self) -> Any:
        error, self._error, self._fut_waiter = self._error, None, None
        if self._must_cancel:
            self._must_cancel = False
            error = self._cancelled_error()
        assert error is not None
        if self._coro is None:
            raise error
        return self._context.run(self._coro.throw, error)

    def _wait_for(self, awaited: Any) -> None:
        if awaited is None:  # as asyncio.sleep(0) does
            self.wake()
        elif not getattr(awaited, "_asyncio_future_blocking", False):
            self._error = RuntimeError(f"Task got bad yield: {awaited!r}")
            self.wake()
        elif awaited.get_loop() is not self._rounds.loop:
            self._error = RuntimeError(f"{awaited!r} is attached to a different loop")
            self.wake()
        else:
            awaited._asyncio_future_blocking = False
            self._fut_waiter = awaited
            if type(awaited) is SteppedFuture and awaited.waiter is None:
                awaited.waiter = self
            else:
                awaited.add_done_callback(self._on_done)
            if self._must_cancel and awaited.cancel(self._cancel_message):
                self._must_cancel = False

    def _cancelled_error(self) -> asyncio.CancelledError:
        message = self._cancel_message
        return asyncio.CancelledError() if message is None else asyncio.CancelledError(message)

    def _on_done(self, _: "asyncio.Future[Any]") -> None:
        try:
            self.step()
        except BaseException as error:  # noqa: BLE001 - as in a round
            self._rounds._on_error(error)

    # ------------------------------------------------------------ as asyncio.Task

    def cancel(self, msg: Any = None) -> bool:
        """Raise ``CancelledError`` in the coroutine, where it waits or when it next does."""
        if self.done():
            return False
        self._cancels += 1
        if self._fut_waiter is None or not self._fut_waiter.cancel(msg):
            self._must_cancel, self._cancel_message = True, msg
        return True

    def cancelling(self) -> int:
        """Return the number of cancellations that were not taken back."""
        return self._cancels

    def uncancel(self) -> int:
        """Take one cancellation back; return how many are left."""
        self._cancels = max(0, self._cancels - 1)
        return self._cancels

    def get_coro(self) -> Coroutine[Any, Any, Any] | None:
        """Return the coroutine, while the task runs."""
        return self._coro

    def get_name(self) -> str:
        """Return the task's name."""
        raise NotImplementedError
