"""Which paths does the server have? vLLM's; each file of paths has some of them.

Whatever a client sends, it gets an answer in vLLM's form, and nothing else is harmed. It knows no
path but that of the list of paths.
"""

import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tidegate.orchestrator.vllm_server import (
    completion_paths,
    control_paths,
    info_paths,
    weight_paths,
)
from tidegate.orchestrator.vllm_server.failures import ServerError, as_answer
from tidegate.orchestrator.vllm_server.paths import Answer, Path, Paths, as_json
from tidegate.orchestrator.vllm_server.server_info import openapi

if TYPE_CHECKING:
    from tidegate.orchestrator.vllm_server.desks import Desks

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


def server_app(desks: "Desks", *, api_key: str | None) -> Starlette:
    """All its paths. With an ``api_key``, those under /v1 want it, as vLLM's do."""
    routes = [
        Route(one.path, _answered(desks, one, api_key=api_key), methods=[one.method])
        for one in PATHS
    ]
    return Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})


def _answered(desks: "Desks", one: Path, *, api_key: str | None) -> Handler:
    """Nothing that a handler raises gets further than its client."""

    async def handle(http: HttpRequest) -> Response:
        try:
            if api_key is not None and one.path.startswith("/v1"):
                _refuse_without_key(http, api_key)
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


def _refuse_without_key(http: HttpRequest, api_key: str) -> None:
    scheme, _, shown = http.headers.get("authorization", "").partition(" ")
    is_right = secrets.compare_digest(shown.strip().encode(), api_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise ServerError(401, "Unauthorized")


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    why = "Method Not Allowed" if status == 405 else "Not Found"
    return as_json({"detail": why}, status=status)
