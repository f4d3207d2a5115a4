"""ASGI application of the dashboard (Starlette): the page, its JSON API, updates, and metrics.

    /                     the page (page.html), with /page.css and /page.js beside it
    /api/state            everything shown, once; ?recent=1 omits the past
    /api/updates          one frame per second, as Server-Sent Events; event ``ended`` is the last
    /api/timeline         finer timeline of a range of a recorded run: ?start_us=0&end_us=9000000
    /api/rollouts         list of rollouts: ?state=trained&text=word&sort=reward&skip=200
    /api/rollouts/{id}    one rollout, token by token: ?start=20000
    /api/stories/{subject}  what happened to rollout:41, group:7 or batch:3
    /api/runs             names of the runs that can be compared with this one
    /api/comparison       runs side by side: ?run=sync&run=async
    /metrics              Prometheus exposition

:class:`Dashboard` serves it. Data comes from a :class:`Source`, and is read only on request. Every
error becomes a JSON response; a request can't change or stop the run.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib.resources import files
from pathlib import PurePath

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tidegate.errors import ConfigError, TidegateError
from tidegate.observability.dashboard import access
from tidegate.observability.dashboard.comparisons import ComparableRuns
from tidegate.observability.dashboard.frames import about, frame, rollout_list, timeline
from tidegate.observability.dashboard.rollout_pages import rollout_page
from tidegate.observability.dashboard.rollout_queries import RolloutQuery, whole_number
from tidegate.observability.dashboard.source import Source
from tidegate.observability.dashboard.updates import TooManyViewers, Updates
from tidegate.observability.metrics.catalogue import exposition
from tidegate.observability.reports.story import Subject
from tidegate.serving.http.server import AccessGuard, AccessPolicy

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Types of the page's files; others in its folder are not served."""

Handler = Callable[[HttpRequest], Awaitable[Response]]

log = logging.getLogger("tidegate")


def dashboard_app(
    source: Source,
    updates: Updates,
    *,
    token: str,
    bound_host: str = "127.0.0.1",
    comparable: ComparableRuns | None = None,
) -> ASGIApp:
    """Return the application, wrapped in its access guard.

    ``comparable``: runs that can be compared with the shown one; None for none.
    """
    app = _App(source, updates, comparable or ComparableRuns(None))
    handlers: dict[str, Handler] = {
        "/": app.page("page.html"),
        "/api/state": app.state,
        "/api/updates": app.updates,
        "/api/timeline": app.timeline,
        "/api/rollouts": app.rollouts,
        "/api/rollouts/{rollout_id}": app.rollout,
        "/api/stories/{subject}": app.story,
        "/api/runs": app.runs,
        "/api/comparison": app.comparison,
        "/metrics": app.metrics,
    }
    handlers |= {f"/{name}": app.page(name) for name in _page_files()}
    starlette = Starlette(
        routes=[
            Route(path, _with_cookie(handler, token), methods=["GET"])
            for path, handler in handlers.items()
        ]
    )
    shows_token = partial(access.shows_token, token=token)
    policy = AccessPolicy(bound_host, shows_secret=shows_token, needs_secret=bool(token))
    return AccessGuard(starlette, policy, _error_body, headers=access.HEADERS)


class _App:
    def __init__(self, source: Source, updates: Updates, comparable: ComparableRuns) -> None:
        self._source = source
        self._comparable = comparable
        self._updates = updates

    def page(self, name: str) -> Handler:
        """Return a handler for one of the page's files, which is read once."""
        body = files("tidegate.observability.dashboard").joinpath("page", name).read_bytes()

        async def respond(http: HttpRequest) -> Response:
            return Response(body, media_type=MEDIA_TYPES[PurePath(name).suffix])

        return respond

    async def state(self, http: HttpRequest) -> Response:
        recent = "recent" in http.query_params
        snapshot = await asyncio.to_thread(self._source.observe, is_update=recent)
        return await asyncio.to_thread(lambda: _json({**about(snapshot), "frame": frame(snapshot)}))

    async def updates(self, http: HttpRequest) -> Response:
        try:
            viewer = self._updates.viewer()
        except TooManyViewers as error:
            return _error(503, str(error))
        return StreamingResponse(
            _events(viewer, lambda: self._updates.last), media_type="text/event-stream"
        )

    async def timeline(self, http: HttpRequest) -> Response:
        start_us = whole_number(http.query_params.get("start_us", ""))
        end_us = whole_number(http.query_params.get("end_us", ""))
        if start_us is None or end_us is None or start_us >= end_us:
            return _error(400, "start_us and end_us must be whole numbers of microseconds")
        found = await asyncio.to_thread(self._source.timeline, start_us, end_us)
        return _json(None if found is None else timeline(found))

    async def rollouts(self, http: HttpRequest) -> Response:
        query = RolloutQuery.parse(dict(http.query_params))
        return _json(rollout_list(await asyncio.to_thread(self._source.rollouts, query)))

    async def rollout(self, http: HttpRequest) -> Response:
        rollout_id = whole_number(http.path_params["rollout_id"])
        start = whole_number(http.query_params.get("start", "0"))
        if rollout_id is None or start is None or start < 0:
            return _error(400, "a rollout's id and start must be whole numbers")
        found = await asyncio.to_thread(self._source.rollout, rollout_id)
        if found is None:
            return _error(404, f"rollout {rollout_id} does not exist or is no longer kept")
        page = await asyncio.to_thread(
            rollout_page, found, self._source.tokenizer, start=start, bound=self._source.bound
        )
        return _json(page)

    async def story(self, http: HttpRequest) -> Response:
        subject = Subject.parse(http.path_params["subject"])
        found = await asyncio.to_thread(self._source.story, subject)
        if found is None:
            return _error(404, f"{subject} does not exist or is no longer kept")
        return _json(dataclasses.asdict(found))

    async def runs(self, http: HttpRequest) -> Response:
        return _json(await asyncio.to_thread(self._comparable.names))

    async def comparison(self, http: HttpRequest) -> Response:
        names = list(dict.fromkeys(http.query_params.getlist("run")))
        return _json(await asyncio.to_thread(self._comparable.compare, names))

    async def metrics(self, http: HttpRequest) -> Response:
        snapshot = await asyncio.to_thread(self._source.observe, is_update=True)
        return Response(
            await asyncio.to_thread(exposition, snapshot), media_type=CONTENT_TYPE_LATEST
        )


async def _events(
    viewer: AsyncIterator[bytes], last: Callable[[], bytes | None]
) -> AsyncIterator[bytes]:
    yield b"retry: 2000\n\n"
    async for body in viewer:
        yield b"data: " + body + b"\n\n"
    if (body_at_end := last()) is not None:
        yield b"event: ended\ndata: " + body_at_end + b"\n\n"


def _page_files() -> list[str]:
    folder = files("tidegate.observability.dashboard").joinpath("page")
    names = (file.name for file in folder.iterdir())
    return sorted(name for name in names if PurePath(name).suffix in MEDIA_TYPES)


def _with_cookie(handler: Handler, token: str) -> Handler:
    """Set the token as a cookie if a browser passed it in the URL."""

    async def respond(http: HttpRequest) -> Response:
        response = await _respond(handler, http)
        if token and http.query_params.get("token", ""):
            name = access.cookie_name(http.headers.get("host", ""))
            value = access.cookie_value(token)
            response.set_cookie(name, value, httponly=True, samesite="strict")
        return response

    return respond


async def _respond(handler: Handler, http: HttpRequest) -> Response:
    try:
        return await handler(http)
    except ConfigError as error:
        return _error(400, str(error))
    except TidegateError as error:
        return _error(410, str(error))
    except Exception as error:
        log.error("the dashboard failed to answer a request", exc_info=error)
        return _error(500, f"{type(error).__name__}: {error}")


def _error_body(status: int, why: str) -> bytes:
    return msgspec.json.encode({"error": why})


def _error(status: int, why: str) -> Response:
    return _json({"error": why}, status)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
