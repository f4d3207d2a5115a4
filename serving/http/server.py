"""HTTP server with limits and access control.

* :func:`serve_app` runs an ASGI application in uvicorn, with limits on bytes, time, connections.
* :class:`AccessGuard` is ASGI middleware: Host allow-list, no foreign Origin, JSON bodies only.
* :func:`read_body`, :func:`unless_gone`, :class:`OwnedStream` and :func:`off_loop` are for
    handlers: with them, neither a large request nor a client that disconnects blocks the event loop
    or an engine.
"""

import asyncio
import concurrent.futures
import ipaddress
import resource
import socket
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidegate.serving.http.errors import ApiError
from tidegate.serving.http.listening import LOOPBACK_NAMES, is_loopback

# ---------------------------------------------------------------- limits

HEAD_BYTES_MAX = 64 * 1024
"""Bytes of a request's line, headers, trailers and chunk sizes together, beyond as many bytes as
its body has: what other servers allow. Real clients send less than 4 KiB."""

HEAD_TIMEOUT_S = 60.0
"""Time in which a request's headers must be complete, from the connection or their first byte."""

BODY_IDLE_TIMEOUT_S = 60.0
"""Time without a byte of an unfinished body after which the request is refused."""

BODY_TIMEOUT_S = 600.0
"""Time in which a whole request must have arrived: 64 MiB at 1 Mbit/s are 540 s."""

ANSWER_STALL_TIMEOUT_S = 600.0
"""Time without a read of a waiting answer after which the connection is closed."""

BODY_DISCARDED_FACTOR = 4
"""Multiple of the body's limit up to which an oversized body is still read, so that its client gets
to read the refusal; then the connection is closed."""

CONNECTIONS_MAX = 16_384
"""Open connections of one server, or half the process's file descriptors if those are fewer: the
other half is for engines, journal and model files."""

JSON_VALUES_MAX = 2_000_000
"""Commas and opening brackets in one JSON body. Parsing holds the interpreter for about 0.1 us for
each, so for at most a quarter of a second; a prompt of token ids has one for each token."""

BODY_IS_LARGE_BYTES = 32 * 1024
"""Bodies from this size on are rendered and tokenised off the event loop: 30 ms or more."""

MESSAGES_MAX = 16_384
"""Messages of one conversation: rendering each takes a chat template 15 us or more."""

TOOLS_BYTES_MAX = 1024 * 1024
"""Bytes of a conversation's tools as JSON. Clients send some kilobytes; 15 MiB took 40 s."""

LARGE_WORK_THREADS = 2
"""Threads for large requests, of all servers of a process. More would take the interpreter from the
event loop more often without doing more."""

LARGE_WORK_WAITING_MAX = 256
"""Pieces of large work that run or wait; further ones are refused with 503."""


# ---------------------------------------------------------------- connections


class BoundedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP/1.1 connection, with limits on a request's bytes and on the time it takes."""

    body_bytes_max = 0
    """Bytes that a request's body may have; set by :func:`serve_app`."""
    connections_max = CONNECTIONS_MAX

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or close it if there are too many."""
        self._overhead_bytes = 0
        self._body_bytes = 0
        self._is_reading = True
        self._begun_s = self._received_s = self.loop.time()
        self._is_in_body = False
        self._reading_timer: asyncio.TimerHandle | None = None
        self._writing_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > self.connections_max:
            transport.abort()
            return
        self._watch_reading(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_reading_timer()
        self._stop_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; close the connection if they break a limit."""
        if self.transport.is_closing() or self.parser is None:
            return
        self._received_s = self.loop.time()
        if not self._is_reading:
            self._is_reading = True
            self._begun_s = self._received_s
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._overhead_bytes > HEAD_BYTES_MAX + self._body_bytes:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._body_bytes > BODY_DISCARDED_FACTOR * self.body_bytes_max:
            self._refuse(b"413 Content Too Large")
        elif not self._is_reading:
            self._stop_reading_timer()
        elif self._reading_timer is None:
            self._watch_reading(HEAD_TIMEOUT_S)

    def on_message_begin(self) -> None:
        """Start the clock of a request."""
        self._is_reading, self._is_in_body = True, False
        self._begun_s = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Hand the request to the application, now that its headers are complete."""
        self._is_in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a body."""
        self._overhead_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the limits for the connection's next request."""
        self._is_reading = self._is_in_body = False
        self._overhead_bytes = self._body_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timer of a client that reads slower than the application writes."""
        super().pause_writing()
        if self._writing_timer is None:
            self._writing_timer = self.loop.call_later(ANSWER_STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer of a client that has read again."""
        self._stop_writing_timer()
        super().resume_writing()

    # ------------------------------------------------------------ timers

    def _watch_reading(self, delay_s: float) -> None:
        self._reading_timer = self.loop.call_later(delay_s, self._check_reading)

    def _check_reading(self) -> None:
        """Close the connection if its request is overdue; else set the timer for when it may be."""
        self._reading_timer = None
        if not self._is_reading or self.transport.is_closing():
            return
        now = self.loop.time()
        if self.flow.read_paused:  # the server still answers an earlier request
            self._begun_s = self._received_s = now
        if self._is_in_body:
            due_s = min(self._received_s + BODY_IDLE_TIMEOUT_S, self._begun_s + BODY_TIMEOUT_S)
        else:
            due_s = self._begun_s + HEAD_TIMEOUT_S
        if now >= due_s:
            self._refuse(b"408 Request Timeout")
        else:
            self._watch_reading(due_s - now)

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _stop_writing_timer(self) -> None:
        if self._writing_timer is not None:
            self._writing_timer.cancel()
            self._writing_timer = None

    def _refuse(self, status: bytes) -> None:
        """Close the connection, with a status unless another answer is being sent on it."""
        cycle = self.cycle
        if self._is_in_body:
            is_free = not cycle.response_started
        else:
            is_free = cycle is None or cycle.response_complete
        if is_free:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\n\r\n")
        self.transport.close()


async def serve_app(
    app: ASGIApp, listening: socket.socket, *, body_bytes_max: int, **settings: Any
) -> None:
    """Serve ``app`` on a listening socket until cancelled; ``settings`` go to uvicorn."""
    server = make_server(app, body_bytes_max=body_bytes_max, **settings)
    own = listening.dup()  # closed with the server; the caller's stays for another one
    try:
        await server.serve(sockets=[own])
    finally:
        for each in getattr(server, "servers", []):
            each.close()
        for connection in server.server_state.connections:
            connection.transport.abort()
        own.close()


def make_server(app: ASGIApp, *, body_bytes_max: int, **settings: Any) -> uvicorn.Server:
    """Make a uvicorn server with the limits of this module."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {
        "body_bytes_max": body_bytes_max,
        "connections_max": CONNECTIONS_MAX
        if descriptors == resource.RLIM_INFINITY
        else min(CONNECTIONS_MAX, descriptors // 2),
    }
    protocol = type("BoundedHttpProtocol", (BoundedHttpProtocol,), limits)
    config = uvicorn.Config(
        app,
        http=protocol,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        **settings,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """Leaves signals to the program.

    uvicorn's own puts the handlers back that it found at its start: those of an event loop that may
    have ended since, where Ctrl-C is raised in the middle of other code.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# ---------------------------------------------------------------- access

JSON_TYPE = "application/json"

API_HEADERS: Mapping[str, str] = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer of an API, so that no page of another origin can embed or read it."""


def never(headers: "Headers") -> bool:
    """Return False: no request carries a secret."""
    return False


@dataclass(frozen=True, slots=True)
class Headers:
    """Headers of a request that decide on access; names in lower case."""

    values: Mapping[str, tuple[str, ...]]
    query: bytes = b""

    def single(self, name: str) -> str:
        """Return a header's only value; empty if there is none, or several."""
        values = self.values.get(name, ())
        return values[0] if len(values) == 1 else ""

    @property
    def bearer(self) -> str:
        """Return the token of ``Authorization: Bearer``; empty if there is none."""
        return bearer_token(self.single("authorization"))

    @property
    def key(self) -> str:
        """Return the bearer token, or the value of ``x-api-key`` if there is none."""
        return self.bearer or self.single("x-api-key")


def bearer_token(authorization: str) -> str:
    """Return the token of an ``Authorization: Bearer`` header's value; empty if it has none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Access rules of a server: decides from a request's headers whether to answer it.

    A web page that a user of this host has open can send requests to servers here. The browser
    names the page in ``Origin``, and the name that the page used for the server in ``Host``. A page
    can have its own name lead to this host (DNS rebinding), but not send a name of this host's.
    """

    bound_host: str
    """Address that the server listens on."""
    allowed_hosts: frozenset[str] = frozenset()
    """Further names that clients may use as ``Host``, without a port, in lower case."""
    shows_secret: Callable[[Headers], bool] = never
    """Returns whether a request carries a secret of the server, which a page of another origin
    cannot have. Such a request may use any ``Host``, because it may come through a proxy."""
    needs_secret: bool = False
    """Whether every request must show the secret."""
    body_types: frozenset[str] = frozenset({JSON_TYPE})
    """Content types that bodies may have. Do not include forms and plain text, which pages of other
    origins can send without a preflight request."""

    def refusal(self, method: str, headers: Headers) -> ApiError | None:
        """Return the error that refuses a request; None if the server may answer it."""
        host = headers.single("host").lower()
        origins = headers.values.get("origin", ())
        if origins and not _is_same_origin(origins, host):
            return ApiError(403, f"pages of {origins[0]!r:.200} may not use this server")
        is_known = self.shows_secret(headers)
        if self.needs_secret and not is_known:
            return ApiError(403, "this server answers requests that show its token only")
        if not is_known and not self._is_own_name(_name_of(host)):
            return ApiError(
                403,
                f"this server is not called {host!r:.200}: use its address, or name the host as "
                f"allowed where the server is started",
            )
        if _has_body(method, headers) and _body_type(headers) not in self.body_types:
            types = " or ".join(sorted(self.body_types))
            return ApiError(415, f"a body must come with the header Content-Type: {types}")
        return None

    def _is_own_name(self, name: str) -> bool:
        if name in LOOPBACK_NAMES or name in self.allowed_hosts:
            return True
        if is_loopback(self.bound_host):
            return name == self.bound_host
        if name in (self.bound_host.lower(), socket.gethostname().lower()):
            return True
        # DNS rebinding needs a public name, which is no address and has a dot.
        return _is_address(name) or (bool(name) and "." not in name)


def _name_of(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and (name.endswith("]") or ":" not in name) else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_same_origin(origins: Iterable[str], host: str) -> bool:
    return all(
        origin.partition("://")[0] in ("http", "https")
        and origin.partition("://")[2].lower() == host
        for origin in origins
    )


def _has_body(method: str, headers: Headers) -> bool:
    if method in ("GET", "HEAD"):
        return False
    return (
        headers.single("content-length") not in ("", "0") or "transfer-encoding" in headers.values
    )


def _body_type(headers: Headers) -> str:
    return headers.single("content-type").partition(";")[0].strip().lower()


class AccessGuard:
    """ASGI middleware that refuses requests according to an :class:`AccessPolicy`."""

    def __init__(
        self,
        app: ASGIApp,
        policy: AccessPolicy,
        error_body: Callable[[int, str], bytes],
        *,
        headers: Mapping[str, str] = API_HEADERS,
    ) -> None:
        """``error_body`` writes a refusal as the API's clients read it; ``headers`` are added to
        every answer."""
        self._app = app
        self._policy = policy
        self._error_body = error_body
        self._headers = [(k.lower().encode(), v.encode()) for k, v in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have the application answer it."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        refused = self._policy.refusal(scope["method"], _headers_of(scope))
        if refused is None:
            await self._app(scope, receive, send_with_headers)
            return
        body = self._error_body(refused.status, str(refused))
        response = Response(body, refused.status, media_type=JSON_TYPE)
        await response(scope, receive, send_with_headers)


DECISIVE = frozenset(
    (b"host", b"origin", b"authorization", b"cookie", b"content-type", b"content-length")
) | {b"transfer-encoding", b"x-api-key"}
"""Headers that decide on access; a request may have thousands of others."""


def _headers_of(scope: Scope) -> Headers:
    found: dict[str, list[str]] = {}
    for raw, value in scope["headers"]:
        name = raw.lower()
        if name in DECISIVE:
            found.setdefault(name.decode(), []).append(value.decode("latin-1"))
    values = {name: tuple(each) for name, each in found.items()}
    return Headers(values, scope.get("query_string", b""))


# ---------------------------------------------------------------- bodies


async def read_body(http: HttpRequest, *, bytes_max: int) -> bytes:
    """Read a request's whole JSON body.

    Raises:
        ApiError: the body has too many bytes, or more JSON values than are parsed without a pause.
        ClientDisconnect: the client is gone.
    """
    parts: list[bytes] = []
    bytes_left = bytes_max
    async for part in http.stream():
        bytes_left -= len(part)
        if bytes_left < 0:
            raise ApiError(413, f"a body may have {bytes_max} bytes")
        parts.append(part)
    body = b"".join(parts)
    if len(body) > JSON_VALUES_MAX:
        values = body.count(b",") + body.count(b"{") + body.count(b"[")
        if values > JSON_VALUES_MAX:
            raise ApiError(413, f"a body may have {JSON_VALUES_MAX} JSON values, got {values}")
    return body


def refuse_large_chat(messages: Sequence[object], tools: Sequence[object] | None) -> None:
    """Raise ApiError if a conversation has too many messages or too large tools."""
    if len(messages) > MESSAGES_MAX:
        why = f"a conversation has at most {MESSAGES_MAX} messages, got {len(messages)}"
        raise ApiError(400, why, param="messages")
    tools_bytes = len(msgspec.json.encode(tools)) if tools else 0
    if tools_bytes > TOOLS_BYTES_MAX:
        why = f"tools may have {TOOLS_BYTES_MAX} bytes as JSON, got {tools_bytes}; offer fewer"
        raise ApiError(400, why, param="tools")


# ---------------------------------------------------------------- clients that leave

Result = TypeVar("Result")


async def unless_gone(http: HttpRequest, work: Awaitable[Result]) -> Result:
    """Return what ``work`` returns; cancel it if the client goes away before.

    For requests whose body was read. ``work`` has ended when this returns or raises.

    Raises:
        ClientDisconnect: the client is gone.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(http.receive())
    either: set[asyncio.Future[Any]] = {task, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        # An error's traceback refers to this frame. Without references back to the tasks, the error
        # and the bodies in its frames are freed at once, not by the garbage collector.
        either.clear()
        del task, leaving
    raise ClientDisconnect


class OwnedStream(StreamingResponse):
    """Server-sent events with a callback at their end, even if no event was ever sent.

    An async generator that was never started runs no ``finally``. Without the callback, a client
    that leaves at once would leave behind whatever the generator owns.
    """

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        """``on_end`` is called once the answer has ended, however it did."""
        super().__init__(events, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


# ---------------------------------------------------------------- large work


_threads = concurrent.futures.ThreadPoolExecutor(LARGE_WORK_THREADS, "tidegate-large-request")
_places = threading.BoundedSemaphore(LARGE_WORK_WAITING_MAX)


async def off_loop(work: Callable[[], Result]) -> Result:
    """Run ``work`` in a thread of the pool for large requests.

    If cancelled, work that waits for a thread is not begun; work that runs continues to its end.

    Raises:
        ApiError: too many pieces of work wait already.
    """
    if not _places.acquire(blocking=False):
        raise ApiError(503, f"{LARGE_WORK_WAITING_MAX} large requests are worked on; retry later")
    future = _threads.submit(work)
    future.add_done_callback(lambda _: _places.release())
    try:
        return await asyncio.wrap_future(future)
    finally:
        del future  # an error's traceback refers to this frame, and the future to the error
