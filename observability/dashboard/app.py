"""ASGI application of the dashboard (Starlette): the page, its JSON API, updates, and metrics.

    /                     the page (page.html), with /page.css and /page.js beside it
    /api/state            everything shown, once; ?recent=1 leaves out the past
    /api/updates          one frame per second, as Server-Sent Events
    /api/rollouts         list of rollouts: ?state=running&group=3&skip=200&mixed=1
    /api/rollouts/{id}    one rollout, token by token: ?start=20000
    /metrics              Prometheus exposition

:class:`Dashboard` serves it. Data comes from a :class:`Source`, and is read only on request. Every
error becomes a JSON response; a request can't change or stop the run.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tidegate.errors import TidegateError
from tidegate.observability.dashboard import access
from tidegate.observability.dashboard.frames import about, frame, rollout_list
from tidegate.observability.dashboard.rollout_pages import rollout_page
from tidegate.observability.dashboard.source import RolloutQuery, Source
from tidegate.observability.dashboard.updates import TooManyViewers, Updates
from tidegate.observability.prometheus import CONTENT_TYPE, exposition
from tidegate.serving.http_server import AccessGuard, AccessPolicy, Headers

PAGE_FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "strips.js": "text/javascript; charset=utf-8",
    "rollouts.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

STATES = frozenset({"", "running", "finished", "trained", "discarded", "evaluated"})

NUMBER_MAX = 2**53
"""JavaScript's integers are exact up to here."""

Handler = Callable[[HttpRequest], Awaitable[Response]]

log = logging.getLogger("tidegate")


def dashboard_app(
    source: Source, updates: Updates, *, token: str, bound_host: str = "127.0.0.1"
) -> ASGIApp:
    """Return the application, wrapped in its access guard."""
    app = _App(source, updates)
    handlers: dict[str, Handler] = {
        "/": app.page("page.html"),
        "/api/state": app.state,
        "/api/updates": app.updates,
        "/api/rollouts": app.rollouts,
        "/api/rollouts/{rollout_id}": app.rollout,
        "/metrics": app.metrics,
    }
    handlers |= {f"/{name}": app.page(name) for name in PAGE_FILES}
    starlette = Starlette(
        routes=[
            Route(path, _with_cookie(handler, token), methods=["GET"])
            for path, handler in handlers.items()
        ]
    )

    def shows_token(headers: Headers) -> bool:
        query = parse_qs(headers.query.decode("latin-1"))
        request = access.DashboardRequest(
            host=headers.single("host"),
            authorization=headers.single("authorization"),
            cookie=headers.single("cookie"),
            query_token=query.get("token", [""])[0],
        )
        return access.shows_token(request, token)

    policy = AccessPolicy(bound_host, shows_secret=shows_token, needs_secret=bool(token))
    return AccessGuard(starlette, policy, _error_body, headers=access.HEADERS)


class _App:
    def __init__(self, source: Source, updates: Updates) -> None:
        self._source = source
        self._updates = updates

    def page(self, name: str) -> Handler:
        """Return a handler for one of the page's files, which is read once."""
        body = files("tidegate.observability.dashboard").joinpath("page", name).read_bytes()

        async def respond(http: HttpRequest) -> Response:
            return Response(body, media_type=PAGE_FILES[name])

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
        return StreamingResponse(_events(viewer), media_type="text/event-stream")

    async def rollouts(self, http: HttpRequest) -> Response:
        query = http.query_params
        state = query.get("state", "")
        if state not in STATES:
            return _error(400, f"state must be one of {', '.join(sorted(STATES - {''}))}")
        group, skip = _number(query.get("group", "")), _number(query.get("skip", "0"))
        if (query.get("group") and group is None) or skip is None or skip < 0:
            return _error(400, "group and skip must be whole numbers")
        rollout_query = RolloutQuery(state, group, skip, is_mixed=query.get("mixed") == "1")
        lines, total = await asyncio.to_thread(self._source.rollouts, rollout_query)
        return _json(rollout_list(lines, total=total))

    async def rollout(self, http: HttpRequest) -> Response:
        rollout_id = _number(http.path_params["rollout_id"])
        start = _number(http.query_params.get("start", "0"))
        if rollout_id is None or start is None or start < 0:
            return _error(400, "a rollout's id and start must be whole numbers")
        found = await asyncio.to_thread(self._source.rollout, rollout_id)
        if found is None:
            return _error(404, f"rollout {rollout_id} does not exist or is no longer kept")
        tokenizer = self._source.tokenizer
        return _json(await asyncio.to_thread(rollout_page, found, tokenizer, start=start))

    async def metrics(self, http: HttpRequest) -> Response:
        snapshot = await asyncio.to_thread(self._source.observe, is_update=True)
        return Response(await asyncio.to_thread(exposition, snapshot), media_type=CONTENT_TYPE)


async def _events(viewer: "AsyncIterator[bytes]") -> AsyncIterator[bytes]:
    yield b"retry: 2000\n\n"
    async for body in viewer:
        yield b"data: " + body + b"\n\n"


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
    except TidegateError as error:
        return _error(410, str(error))
    except Exception as error:
        log.error("the dashboard failed to answer a request", exc_info=error)
        return _error(500, f"{type(error).__name__}: {error}")


def _number(text: str) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if abs(number) <= NUMBER_MAX else None


def _error_body(status: int, why: str) -> bytes:
    return msgspec.json.encode({"error": why})


def _error(status: int, why: str) -> Response:
    return _json({"error": why}, status)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
