"""ASGI scaffold of a JSON API: paths, access, error answers and JSON bodies."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tidegate.serving.http.errors import ApiError, ErrorForm, MalformedBody
from tidegate.serving.http.server import (
    BODY_IS_LARGE_BYTES,
    JSON_TYPE,
    AccessGuard,
    AccessPolicy,
    bearer_token,
    off_loop,
    read_body,
)

LARGE_ANSWER_TOKENS = 4096
"""Number of output tokens and log-probs from which an answer's body is encoded off the event loop:
10 ms of work."""

Answer = dict[str, Any] | Response | None
"""Result of a handler: a JSON object, a whole response, or None for an empty response."""

Body = TypeVar("Body")

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Answer]])


@dataclass(frozen=True, slots=True)
class ApiPath:
    """A path of an API, for one HTTP method."""

    method: str
    path: str
    handle: Callable[..., Awaitable[Answer]]
    errors: ErrorForm | None = None
    """Error form of this path; None: the application's."""
    is_control: bool = False
    """Whether the path needs the control token, because it stops engines, changes weights or ends
    others' requests."""
    is_open: bool = False
    """Whether the path needs no key, because probes and Prometheus send none."""


class Paths(list[ApiPath]):
    """Paths of one API, in the order of their handlers."""

    def on(self, method: str, path: str, **fields: Any) -> Callable[[Handler], Handler]:
        """Register the decorated function as the handler of a path, with these fields of
        :class:`ApiPath`."""

        def decorate(handle: Handler) -> Handler:
            self.append(ApiPath(method, path, handle, **fields))
            return handle

        return decorate


def api_app(
    paths: Iterable[ApiPath],
    call: Callable[[ApiPath, HttpRequest], Awaitable[Answer]],
    errors: ErrorForm,
    policy: AccessPolicy,
    *,
    body_bytes_max: int,
) -> ASGIApp:
    """Make an application with these paths, whose handlers ``call`` calls.

    Error answers have the form ``errors``. Bodies have at most ``body_bytes_max`` bytes.
    """

    async def unknown_path(http: HttpRequest, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return as_json(errors.unknown_path(status, http.method, http.url.path), status)

    def refusal_body(status: int, why: str) -> bytes:
        return msgspec.json.encode(errors.body(ApiError(status, why)))

    app = Starlette(
        routes=[
            Route(
                each.path,
                _endpoint(partial(call, each), each.errors or errors),
                methods=[each.method],
            )
            for each in paths
        ],
        exception_handlers={404: unknown_path, 405: unknown_path},
    )
    app.state.body_bytes_max = body_bytes_max
    return AccessGuard(app, policy, refusal_body)


def _endpoint(
    handler: Callable[[HttpRequest], Awaitable[Answer]], errors: ErrorForm
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Return an endpoint that sends a handler's result, or the error that it raises, as JSON."""

    async def endpoint(http: HttpRequest) -> Response:
        try:
            answer = await handler(http)
        except ClientDisconnect:
            return Response(status_code=499)  # nginx's status for a client that is gone; never read
        except Exception as error:  # noqa: BLE001 - reported to the client, whatever it is
            return as_json(*errors.answer(error))
        if answer is None:
            return Response()
        return answer if isinstance(answer, Response) else as_json(answer)

    return endpoint


# ---------------------------------------------------------------- requests


def key_of(http: HttpRequest) -> str:
    """Return the key that a request shows as ``Authorization: Bearer``, or as ``x-api-key`` if that
    is missing, as in Anthropic's API; empty if there is none."""
    key = bearer_token(http.headers.get("authorization", ""))
    return key or http.headers.get("x-api-key", "")


async def read_json_bytes(http: HttpRequest, *, bytes_max: int | None = None) -> bytes:
    """Read the whole body, and record its length for :func:`is_large`; ``bytes_max`` replaces the
    application's limit.

    Raises:
        ApiError: the body has too many bytes or JSON values.
        ClientDisconnect: the client is gone.
    """
    body = await read_body(http, bytes_max=bytes_max or http.app.state.body_bytes_max)
    http.state.is_large = len(body) >= BODY_IS_LARGE_BYTES
    return body


def is_large(http: HttpRequest) -> bool:
    """Whether the body that was read is large, so that work on it must run off the event loop."""
    large: bool = http.state.is_large
    return large


async def read(
    http: HttpRequest, kind: type[Body], *, may_be_empty: bool = False, bytes_max: int | None = None
) -> Body:
    """Read the whole body and decode it as a request of this kind.

    If it ``may_be_empty``, all fields of the kind are optional.

    Raises:
        ApiError: the body has too many bytes or JSON values.
        MalformedBody: the body is not JSON, or has other fields or types.
        ClientDisconnect: the client is gone.
    """
    body = await read_json_bytes(http, bytes_max=bytes_max)
    return decode_json(b"{}" if may_be_empty and not body.strip() else body, kind)


def decode_json(body: bytes, kind: type[Body]) -> Body:
    """Decode a body as a request of this kind.

    Raises:
        MalformedBody: the body is not JSON, or has other fields or types.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise MalformedBody(str(error), is_json=True) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedBody(str(error), is_json=False) from None


def part_of_body(value: object, kind: type[Body], where: str) -> Body:
    """Return a part of a decoded body, named ``where`` in errors, as an object of this kind.

    For parts whose kind depends on another part, or that the answer repeats as they came.

    Raises:
        ApiError: the part has other fields or types.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{where}: {error}", param=where.partition("[")[0]) from None


# ---------------------------------------------------------------- answers


def as_json(body: object, status: int = 200) -> Response:
    """Make a response with this JSON body."""
    return Response(msgspec.json.encode(body), status, media_type=JSON_TYPE)


async def encoded_response(encode: Callable[[], bytes], *, tokens: int) -> Response:
    """Make a response of the JSON that ``encode`` returns.

    ``encode`` runs off the event loop if the answer has many ``tokens`` and log-probs.
    """
    content = await off_loop(encode) if tokens >= LARGE_ANSWER_TOKENS else encode()
    return Response(content, media_type=JSON_TYPE)


DONE_EVENT = b"data: [DONE]\n\n"
"""Last server-sent event of a stream of OpenAI's API."""


def stream_event(body: object, *, name: str = "") -> bytes:
    """Encode a JSON body as one server-sent event, with an ``event`` line if it has a name."""
    line = f"event: {name}\n".encode() if name else b""
    return line + b"data: " + msgspec.json.encode(body) + b"\n\n"
