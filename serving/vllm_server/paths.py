"""Table of the server's paths, and how their handlers read requests."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.serving.http_server import BODY_IS_LARGE_BYTES, read_body
from tidegate.serving.vllm_server import protocol
from tidegate.serving.vllm_server.failures import ServerError
from tidegate.transport.messages import PauseMode

if TYPE_CHECKING:
    from tidegate.serving.vllm_server.desks import Desks

BODY_BYTES_MAX = 64 * 1024 * 1024
"""Of one request: prompts of several million tokens, as JSON."""

Answer = dict[str, Any] | Response | None
"""None is an empty body."""

Handle = Callable[["Desks", HttpRequest], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Path:
    """One path, by one method."""

    method: str
    path: str
    handle: Handle
    is_control: bool = False
    """Whether it stops engines, changes weights or ends others' requests, and so wants the control
    token."""

    @property
    def about(self) -> str:
        """What it does, in a sentence."""
        return self.handle.__doc__ or ""


class Paths(list[Path]):
    """Those of one file, in the order of their definitions."""

    def on(self, method: str, path: str, *, is_control: bool = False) -> Callable[[Handle], Handle]:
        """Have this function answer a path."""

        def decorate(handle: Handle) -> Handle:
            self.append(Path(method, path, handle, is_control))
            return handle

        return decorate


def request_name(http: HttpRequest) -> str:
    """What the client calls its request, or a name made up."""
    return http.headers.get("x-request-id") or secrets.token_hex(8)


def mode_of(http: HttpRequest) -> PauseMode:
    """How a pause is to be, from the query."""
    mode = http.query_params.get("mode", "abort")
    for known in get_args(PauseMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    told = f"mode must be 'abort', 'wait' or 'keep', got '{mode}'"
    raise ServerError(400, told, param="query.mode")


def flag(http: HttpRequest, name: str, *, default: bool) -> bool:
    """A truth value from the query."""
    value = http.query_params.get(name, str(default)).lower()
    if value in ("true", "1", "yes", "on"):
        return True
    if value in ("false", "0", "no", "off"):
        return False
    raise ServerError(400, f"{name} must be true or false, got '{value}'", param=f"query.{name}")


async def read(http: HttpRequest, kind: type[Any]) -> Any:
    """The body as a request of this kind; raises ServerError if it is none."""
    return protocol.read_body(await read_bytes(http), kind)


async def read_bytes(http: HttpRequest) -> bytes:
    """Read the whole body, if it is within its limits."""
    body = await read_body(http, bytes_max=BODY_BYTES_MAX)
    http.state.is_large = len(body) >= BODY_IS_LARGE_BYTES
    return body


def is_large(http: HttpRequest) -> bool:
    """Whether the body that was read is one to work on off the event loop."""
    large: bool = http.state.is_large
    return large


def as_json(body: object, status: int = 200) -> Response:
    """An answer with this body."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
