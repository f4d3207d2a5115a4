"""Server of the dashboard, on a thread with an event loop of its own beside the run's.

So a run whose loop is blocked by somebody's code can still be looked at, and what is encoded for
viewers delays no rollout.
"""

import asyncio
import contextlib
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from tidegate.errors import ConfigError
from tidegate.observability.dashboard.access import parse_address, token_for
from tidegate.serving.listening import listen, url_of

if TYPE_CHECKING:
    from tidegate.observability.dashboard.source import Source

URL_FILE = "dashboard.url"
"""In the run's directory, while it is served: `tidegate top RUN` finds it there."""

END_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0

KEEP_ALIVE_S = 30
"""Longer than Prometheus' usual interval, so that a scrape needs no new connection."""


BODY_BYTES_MAX = 1024
"""Bytes of a request's body: no path of the dashboard reads one."""


class Dashboard:
    """An HTTP server that shows one run. Start it, and close it; or use it in ``with``.

    Raises:
        ConfigError: the packages it needs are missing, or the address is taken, or none.
    """

    def __init__(self, address: str, *, directory: Path | None = None) -> None:
        """Listens from now on; answers once it is started. ``directory``: the run's, if any."""
        _need_packages()
        parsed = parse_address(address)
        self._token = token_for(parsed)
        self._host = parsed.host
        self._socket: socket.socket = listen(parsed.host, parsed.port, "the dashboard")
        self._bare_url = url_of(self._socket)
        self._url_file = None if directory is None else Path(directory) / URL_FILE
        self._thread: threading.Thread | None = None
        self._server: Any = None
        self._updates: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()

    @property
    def url(self) -> str:
        """For a browser; with the token, if one is needed."""
        token = quote(self._token, safe="")
        return f"{self._bare_url}/?token={token}" if token else f"{self._bare_url}/"

    def start(self, source: "Source") -> None:
        """Answer, from now on, for this run."""
        self._thread = threading.Thread(
            target=self._serve, args=(source,), name="tidegate-dashboard", daemon=True
        )
        self._thread.start()
        self._is_up.wait()
        if self._url_file is not None and self._url_file.parent.is_dir():
            _write_private(self._url_file, self.url)

    def close(self) -> None:
        """Answer no more. Harmless if repeated, or never started."""
        loop, thread = self._loop, self._thread
        if self._url_file is not None and thread is not None:  # or it is another run's
            with contextlib.suppress(OSError):
                self._url_file.unlink(missing_ok=True)
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(self._end)
            thread.join(END_TIMEOUT_S)
        self._socket.close()

    def wait(self) -> None:
        """Until it is closed, or Ctrl-C."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(1.0)  # in parts: a signal is seen in between

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        from tidegate.serving.http_server import make_server

        def make() -> bytes:
            return msgspec.json.encode(frame(source.observe(is_update=True)))

        self._loop = asyncio.get_running_loop()
        self._updates = Updates(make)
        self._server = make_server(
            dashboard_app(source, self._updates, token=self._token, bound_host=self._host),
            body_bytes_max=BODY_BYTES_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._is_up.set()
        await self._server.serve(sockets=[self._socket])

    def _end(self) -> None:
        self._updates.end()
        self._server.should_exit = True


def url_in(directory: Path) -> str | None:
    """Where the run in this directory is shown now; None if it isn't, e.g. because it has ended."""
    try:
        url = (Path(directory) / URL_FILE).read_text().strip()
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), CONNECT_TIMEOUT_S):
            return url
    except (OSError, ValueError):
        return None  # a run that was killed leaves the file behind


def _need_packages() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f'{error.name} is missing: pip install "tidegate[dashboard]"') from None


def _write_private(path: Path, text: str) -> None:
    """Only its owner may read it: it may hold a token."""
    draft = path.with_name(path.name + ".draft")
    with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(draft, path)
