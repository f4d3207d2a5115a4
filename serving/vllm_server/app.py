"""ASGI application of the vLLM-compatible server: all paths, their keys and the access guard.

Every request gets an answer in vLLM's form.
"""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tidegate.serving.http_server import AccessGuard, AccessPolicy, Headers
from tidegate.serving.vllm_server import completion_paths, control_paths, info_paths, weight_paths
from tidegate.serving.vllm_server.failures import ServerError, as_answer
from tidegate.serving.vllm_server.paths import Answer, Path, Paths, as_json
from tidegate.serving.vllm_server.server_info import openapi

if TYPE_CHECKING:
    from tidegate.serving.vllm_server.desks import Desks

Handler = Callable[[HttpRequest], Awaitable[Response]]

_OWN = Paths()


@_OWN.on("GET", "/openapi.json")
async def list_paths(desks: "Desks", http: HttpRequest) -> Answer:
    """Which paths there are."""
    return openapi([(one.method, one.path, one.about) for one in PATHS])


PATHS: list[Path] = [
    *completion_paths.PATHS,
    *info_paths.PATHS,
    *_OWN,
    *control_paths.PATHS,
    *weight_paths.PATHS,
]
"""All of them."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Secrets that requests show as ``Authorization: Bearer``; None where none is wanted."""

    api_key: str | None
    """Wanted by paths under /v1, as by vLLM's."""
    control_token: str | None
    """Wanted by paths that stop engines or change weights; opens every other path, too."""

    def are_shown(self, shown: str) -> bool:
        """Whether this is one of them."""
        return any(_is_equal(shown, key) for key in (self.api_key, self.control_token) if key)

    def refuse(self, path: Path, shown: str) -> None:
        """Raise ServerError unless ``shown`` opens a path."""
        if self.control_token and _is_equal(shown, self.control_token):
            return
        if path.is_control and self.control_token:
            raise ServerError(
                401,
                f"Unauthorized: {path.path} wants the server's control token, as the header "
                f"Authorization: Bearer TOKEN. For trainers that send none, start the server with "
                f"--no-control-token",
            )
        if path.path.startswith("/v1") and self.api_key and not _is_equal(shown, self.api_key):
            raise ServerError(401, "Unauthorized")


def _is_equal(shown: str, key: str) -> bool:
    return secrets.compare_digest(shown.encode(), key.encode())


def server_app(
    desks: "Desks",
    keys: Keys,
    *,
    bound_host: str = "127.0.0.1",
    allowed_hosts: frozenset[str] = frozenset(),
) -> ASGIApp:
    """Make the application, behind its access guard."""
    routes = [Route(one.path, _answered(desks, one, keys), methods=[one.method]) for one in PATHS]
    app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})

    def shows_key(headers: Headers) -> bool:
        return keys.are_shown(headers.bearer)

    policy = AccessPolicy(bound_host, allowed_hosts, shows_key)
    return AccessGuard(app, policy, _refusal_body)


def _refusal_body(status: int, why: str) -> bytes:
    return msgspec.json.encode(ServerError(status, why).body())


def _answered(desks: "Desks", one: Path, keys: Keys) -> Handler:
    """Answer with an error what a handler raises."""

    async def handle(http: HttpRequest) -> Response:
        try:
            scheme, _, shown = http.headers.get("authorization", "").partition(" ")
            keys.refuse(one, shown.strip() if scheme.lower() == "bearer" else "")
            said = await one.handle(desks, http)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
            failure = as_answer(error)
            return as_json(failure.body(), status=failure.status)
        if said is None:
            return Response()
        return said if isinstance(said, Response) else as_json(said)

    return handle


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    why = "Method Not Allowed" if status == 405 else "Not Found"
    return as_json({"detail": why}, status=status)
