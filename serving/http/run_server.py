"""Base class of HTTP servers over a run's engines: starts, serves on the run's loop, closes."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tidegate.orchestrator.trainer.rollouts import Rollouts, SyncRollouts
from tidegate.serving.http.listening import listen, url_of

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler.scheduler import Scheduler

REQUEST_TIMEOUT_S = 7 * 24 * 3600.0
"""Time limit of a request. vLLM has none: clients disconnect when they have waited long enough."""

END_TIMEOUT_S = 10.0
"""Time for the requests that are being answered when the server closes."""


class RunServer(SyncRollouts):
    """HTTP server of one run, and the run's engines; use it in ``with`` or ``async with``.

    Serves on the run's own thread, from entering until :meth:`close`. Subclasses implement
    :meth:`_serve`, and call :meth:`_listen` at the end of their constructor.
    """

    url: str
    """Base URL without a final slash; OpenAI's clients need ``/v1`` appended."""

    def __init__(self, rollouts: Rollouts, host: str, allowed_hosts: Sequence[str]) -> None:
        super().__init__(rollouts)
        self._rollouts = rollouts
        self._host = host
        self._allowed_hosts = frozenset(name.lower() for name in allowed_hosts)
        self._serving: concurrent.futures.Future[None] | None = None

    def _listen(self, port: int) -> None:
        """Bind the address; raise ConfigError if it is taken."""
        self._socket = listen(self._host, port, "the server")
        self.url = url_of(self._socket)

    async def _serve(self, scheduler: "Scheduler") -> None:
        """Answer requests on the run's loop until cancelled."""
        raise NotImplementedError

    def _close_before_run(self) -> None:
        """Release resources that need the run's engines; called while the engines still run."""

    def _close_after_run(self) -> None:
        """Release everything else; called also if the run could not start."""

    def __enter__(self) -> Self:
        try:
            super().__enter__()
            self._serving = self._rollouts._running.submit(self._serve)
        except BaseException:
            self._socket.close()
            self._close_after_run()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def wait(self) -> None:
        """Wait until the run fails, and raise its error."""
        if self._serving is None:
            raise RuntimeError("the server has not been started; use it in a `with` statement")
        try:
            self._serving.result()
        except concurrent.futures.CancelledError:  # the run's loop has ended under it
            raise self._rollouts._running.failure() from None

    def close(self) -> None:
        """End the server and its engines. Harmless when repeated."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(Exception, concurrent.futures.CancelledError):
                self._serving.result(END_TIMEOUT_S)
        self._close_before_run()
        self._rollouts._exit()
        self._socket.close()
        self._close_after_run()
