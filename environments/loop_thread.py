"""Base of the pools: a thread with an event loop of its own, used from any loop or thread."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from tidegate.errors import RunClosed

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines on its own event loop. Close it, or use it in ``with``.

    What the coroutines start ends with the thread that starts it, so the thread, which begins with
    the first coroutine, runs until the pool is closed.
    """

    def __init__(
        self,
        name: str,
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        """``name`` stands in errors, and is the thread's name."""
        self._name = name
        self._make_loop = make_loop
        self._submitting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Start a coroutine on the loop. For the pool's own classes.

        Raises:
            RunClosed: the pool is closed.
        """
        with self._submitting:
            if self._is_closed:
                coroutine.close()
                raise RunClosed(f"the {self._name} is closed")
            if self._loop is None:
                self._loop = self._make_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and await it here; cancelling also cancels it.

        Raises:
            RunClosed: the pool is closed, or was closed meanwhile.
        """
        try:
            return await asyncio.wrap_future(self.submit(coroutine))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and not (task is not None and task.cancelling()):
                raise RunClosed(f"the {self._name} was closed") from None
            raise

    def close(self) -> None:
        """End everything that runs in the pool; pending calls raise ``RunClosed``. May be called
        again."""
        with self._submitting:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed and self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut_down(self) -> None:
        """Cancel all other coroutines, and wait for their ends."""
        while pending := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
