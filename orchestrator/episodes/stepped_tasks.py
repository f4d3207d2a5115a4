"""Tasks that are stepped in rounds, so that thousands of coroutines cost little each.

A task of asyncio's own costs a callback of the loop for each of its steps, a set's bookkeeping in a
task group, and a name. Here one callback per turn of the loop steps all that can go on, in the
order in which they could. To the code that runs in them they are tasks like any other: what they
are made of is asyncio's documented way to have tasks of one's own. It knows no episode.
"""

import asyncio
import contextvars
import threading
from asyncio import _enter_task, _leave_task, _register_task
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")

_set_result = asyncio.Future.set_result
"""To be called at once: to look it up by ``super()`` takes as long as it does."""


class Rounds:
    """The tasks of one loop that can go on."""

    __slots__ = ("_on_error", "_ready", "loop")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]
    ) -> None:
        """``on_error`` hears what :meth:`SteppedTask.end` raises, and what no code should catch."""
        self.loop = loop
        self._on_error = on_error
        self._ready: list[SteppedTask] = []

    def add(self, task: "SteppedTask") -> None:
        """Step this one in the loop's next turn."""
        if not self._ready:
            self.loop.call_soon(self._step_all)
        self._ready.append(task)

    def _step_all(self) -> None:
        """Those that can go on again by then wait for the next round, as a callback would."""
        ready, self._ready = self._ready, []
        for task in ready:
            try:
                task.step()
            except BaseException as error:  # noqa: BLE001 - it must not keep others from going on
                self._on_error(error)


class ContainedExit(RuntimeError):
    """``SystemExit`` or ``KeyboardInterrupt`` that users' code has raised in a task."""


def contained_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, Result] | Generator[Any, None, Result],
    **options: Any,
) -> "asyncio.Task[Result]":
    """Create a task; the task factory of loops that run users' code.

    asyncio lets ``SystemExit`` and ``KeyboardInterrupt`` of a task end the loop, with all that runs
    on it. Here they become :class:`ContainedExit`, which whoever awaits the task can handle.
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
        return getattr(self._coro, name)  # where it waits, for whoever shows that

    def send(self, value: Any) -> Any:
        """As the coroutine's."""
        try:
            return self._coro.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            if is_interrupt(error):
                raise
            raise ContainedExit(f"a task raised {error!r}") from error

    def throw(self, *error: Any) -> Any:
        """As the coroutine's."""
        try:
            return self._coro.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exited:
            if is_interrupt(exited):
                raise
            raise ContainedExit(f"a task raised {exited!r}") from exited

    def close(self) -> None:
        """As the coroutine's."""
        self._coro.close()


class SteppedFuture(asyncio.Future[Result]):
    """A future whose waiter goes on in the next round, with no callback of its own.

    :func:`stepped_future` makes it: a constructor in Python takes thrice as long.
    """

    __slots__ = ("waiter",)

    waiter: "SteppedTask | None"
    """Who waits; other tasks than ours wait for it as for any future."""

    def set_result(self, result: Result, /) -> None:
        """As any future's."""
        _set_result(self, result)
        waiter = self.waiter
        if waiter is None:
            return
        rounds = waiter._rounds
        if rounds._ready:  # as add, whose call costs as much again
            rounds._ready.append(waiter)
        else:
            rounds.add(waiter)

    def set_exception(self, exception: type[BaseException] | BaseException, /) -> None:
        """As any future's."""
        super().set_exception(exception)
        if self.waiter is not None:
            self.waiter.wake()

    def cancel(self, msg: Any = None) -> bool:
        """As any future's."""
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.waiter is not None:
            self.waiter.wake()
        return is_cancelled


def stepped_future(loop: asyncio.AbstractEventLoop) -> SteppedFuture[Any]:
    """A new one, for which nobody waits."""
    future: SteppedFuture[Any] = SteppedFuture(loop=loop)
    future.waiter = None
    return future


class SteppedTask(asyncio.Future[None]):
    """A task whose coroutine :meth:`begin` makes, and whose end :meth:`end` hears of.

    Its methods and attributes are those of :class:`asyncio.Task` that libraries look for: anyio,
    aiohttp and asyncio's own timeouts and groups ask the current task for them.
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
        """Begins in the next round."""
        asyncio.Future.__init__(self, loop=rounds.loop)
        self._rounds = rounds
        self._context = contextvars.copy_context()
        self._coro: Coroutine[Any, Any, Any] | None = None
        self._fut_waiter: asyncio.Future[Any] | None = None
        self._must_cancel = False
        self._cancel_message: Any = None
        """What the error of a cancel says: anyio knows by it whose scope was cancelled."""
        self._cancels = 0
        self._error: BaseException | None = None
        """What is wrong with what the coroutine has awaited; it is told so."""
        _register_task(self)  # type: ignore[arg-type]
        if rounds._ready:  # as in set_result
            rounds._ready.append(self)
        else:
            rounds.add(self)

    # ------------------------------------------------------------ for those who make tasks of it

    def begin(self) -> Coroutine[Any, Any, Any]:
        """What is to run. Called as part of the first step, unless it is cancelled before."""
        raise NotImplementedError

    def end(self, value: Any, error: BaseException | None) -> None:
        """It has returned ``value``, or raised ``error``."""
        raise NotImplementedError

    # ------------------------------------------------------------ steps

    def wake(self) -> None:
        """What it waited for is there: it goes on in the next round."""
        self._rounds.add(self)

    def step(self) -> None:
        """Run until it waits again, or ends."""
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
            ):  # as mostly, and as below
                waits_for._asyncio_future_blocking = False
                self._fut_waiter = waits_for
                waits_for.waiter = self
            else:
                self._wait_for(waits_for)
            return
        except StopIteration as returned:
            value = returned.value
            if self._must_cancel:  # by itself, in its last step
                failure = self._cancelled_error()
        except BaseException as error:  # noqa: BLE001 - it is told of it
            failure = error
        finally:
            _leave_task(loop, self)  # type: ignore[arg-type]
        try:
            self.end(value, failure)
        finally:
            failure = None  # whose traceback holds this frame
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
        """Have its coroutine raise ``CancelledError``, where it waits or at once it does."""
        if self.done():
            return False
        self._cancels += 1
        if self._fut_waiter is None or not self._fut_waiter.cancel(msg):
            self._must_cancel, self._cancel_message = True, msg
        return True

    def cancelling(self) -> int:
        """How often it was cancelled and that not taken back."""
        return self._cancels

    def uncancel(self) -> int:
        """Take one cancel back; how many are left."""
        self._cancels = max(0, self._cancels - 1)
        return self._cancels

    def get_coro(self) -> Coroutine[Any, Any, Any] | None:
        """Its coroutine, while it goes on."""
        return self._coro

    def get_name(self) -> str:
        """What it is called where tasks are told of."""
        raise NotImplementedError
