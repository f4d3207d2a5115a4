"""HTTP server of the dashboard, on a thread with an event loop of its own.

A run's observers start it, and so does `tidegate dashboard` for recorded runs. Because of the
thread, a run whose loop is blocked can still be viewed, and encoding delays no rollout.
"""

import asyncio
import contextlib
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from tidegate.errors import ConfigError
from tidegate.observability.dashboard.access import parse_address, token_for
from tidegate.serving.http.listening import listen, url_of
from tidegate.transport.private_directory import make_private_file

if TYPE_CHECKING:
    from tidegate.observability.dashboard.comparisons import ComparableRuns
    from tidegate.observability.dashboard.source import Source

URL_FILE = "dashboard.url"
"""File in the run's directory with the URL of the running dashboard, for `tidegate top RUN`."""

END_TIMEOUT_S = 5.0
"""Longest wait for the thread in :meth:`Dashboard.close`."""
LAST_FRAME_TIMEOUT_S = 2.0
"""Longest wait for the state that viewers get when the run ends."""
CONNECT_TIMEOUT_S = 2.0
"""Longest wait for a connection in :func:`url_in`."""

KEEP_ALIVE_S = 30
"""Idle time of a connection: longer than Prometheus' usual interval, so that it is reused."""


BODY_BYTES_MAX = 1024
"""Limit of a request's body: no route reads one."""


class Dashboard:
    """HTTP server that shows one run. Start and close it, or use it in ``with``.

    Raises:
        ConfigError: a package is missing, or the address is invalid or in use.
    """

    def __init__(self, address: str, *, directory: Path | None = None) -> None:
        """Bind the address and listen; requests are answered after :meth:`start`.

        ``directory``: the running run's directory, for :data:`URL_FILE`; None for a recorded run.
        """
        _need_packages()
        self._host, port = parse_address(address)
        self._token = token_for(self._host)
        self._socket: socket.socket = listen(self._host, port, "the dashboard")
        self._bare_url = url_of(self._socket)
        self._url_file = None if directory is None else Path(directory) / URL_FILE
        self._thread: threading.Thread | None = None
        self._server: Any = None
        self._updates: Any = None
        self._make_last: Any = None
        self._comparable: ComparableRuns | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()

    @property
    def url(self) -> str:
        """URL for a browser, with the token if one is needed."""
        token = quote(self._token, safe="")
        return f"{self._bare_url}/?token={token}" if token else f"{self._bare_url}/"

    def start(self, source: "Source", comparable: "ComparableRuns | None" = None) -> None:
        """Start the thread, and answer requests with this source's data.

        ``comparable``: runs that can be compared with the shown one; None for none.
        """
        self._comparable = comparable
        self._thread = threading.Thread(
            target=self._serve, args=(source,), name="tidegate-dashboard", daemon=True
        )
        self._thread.start()
        self._is_up.wait()
        if self._url_file is not None and self._url_file.parent.is_dir():
            _write_private(self._url_file, self.url)

    def close(self, failure: str = "") -> None:
        """Stop the server and the thread. May be called again, or without a start.

        Viewers get the run's last state, and ``failure``: why it ended, empty if it ended normally.
        """
        loop, thread = self._loop, self._thread
        if (
            self._url_file is not None and thread is not None
        ):  # otherwise the file belongs to another run
            with contextlib.suppress(OSError):
                self._url_file.unlink(missing_ok=True)
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                asyncio.run_coroutine_threadsafe(self._end(failure), loop)
            thread.join(END_TIMEOUT_S)
        self._socket.close()

    def wait(self) -> None:
        """Block until the server is closed, or Ctrl-C."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(1.0)  # with a timeout, so that signals are handled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------ the thread

    def _serve(self, source: "Source") -> None:
        try:
            asyncio.run(self._run(source))
        finally:
            self._is_up.set()

    async def _run(self, source: "Source") -> None:
        import msgspec

        from tidegate.observability.dashboard.app import dashboard_app
        from tidegate.observability.dashboard.frames import frame
        from tidegate.observability.dashboard.updates import Updates
        from tidegate.serving.http.server import make_server

        def make() -> bytes:
            return msgspec.json.encode(frame(source.observe(is_update=True)))

        def make_last(failure: str) -> bytes:
            last = frame(source.observe(is_update=True))
            return msgspec.json.encode({"frame": last, "failure": failure})

        self._loop = asyncio.get_running_loop()
        self._updates = Updates(make)
        self._make_last = make_last
        self._server = make_server(
            dashboard_app(
                source,
                self._updates,
                token=self._token,
                bound_host=self._host,
                comparable=self._comparable,
            ),
            body_bytes_max=BODY_BYTES_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._is_up.set()
        await self._server.serve(sockets=[self._socket])

    async def _end(self, failure: str) -> None:
        last = None
        if self._updates.num_viewers:
            with contextlib.suppress(Exception):  # the run may be unable to answer any more
                make = asyncio.to_thread(self._make_last, failure)
                last = await asyncio.wait_for(make, LAST_FRAME_TIMEOUT_S)
        self._updates.end(last)
        self._server.should_exit = True


def url_in(directory: Path) -> str | None:
    """Return the URL of the dashboard that shows this directory's run now, or None."""
    try:
        url = (Path(directory) / URL_FILE).read_text().strip()
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), CONNECT_TIMEOUT_S):
            return url
    except (OSError, ValueError):
        return None  # a killed run leaves the file behind


def _need_packages() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f'{error.name} is missing: pip install "tidegate[dashboard]"') from None


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, because it may hold a token."""
    draft = path.with_name(path.name + ".draft")
    with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)
        make_private_file(draft)
        draft.write_text(text)
        draft.replace(path)
