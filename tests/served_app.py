"""Serves an ASGI application to tests over real HTTP, on a free loopback port, in a thread."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.responses import JSONResponse

START_TIMEOUT_S = 60


@contextmanager
def served(
    make_app: Callable[[], tuple[Any, Callable[[], Coroutine[Any, Any, None]] | None]],
) -> Iterator[str]:
    """Serve until the context is left; yield the URL.

    ``make_app`` is called on the server's own loop. It returns the application, and an optional
    coroutine function that runs beside it.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    box: list[uvicorn.Server] = []

    async def main() -> None:
        app, beside = make_app()
        config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        box.append(server)
        task = asyncio.create_task(beside()) if beside is not None else None
        serving = asyncio.create_task(server.serve([listening]))
        started.set()
        await serving
        if task is not None:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        assert started.wait(START_TIMEOUT_S)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        for server in box:
            server.should_exit = server.force_exit = True
        thread.join(START_TIMEOUT_S)
        listening.close()


def guarded(app: Any, key: str | None, is_guarded: Callable[[str], bool]) -> Any:
    """Wrap an application so that paths for which ``is_guarded`` is true require the key."""
    refused = JSONResponse({"error": "Unauthorized"}, 401)

    async def ask(scope: Any, receive: Any, send: Any) -> None:
        said = dict(scope.get("headers", ())).get(b"authorization")
        if key is not None and said != f"Bearer {key}".encode() and is_guarded(scope["path"]):
            await refused(scope, receive, send)
        else:
            await app(scope, receive, send)

    return ask
