"""Which paths does the gateway have? OpenAI's, and a few for sessions; each request to its rollout.

Whatever a client sends, it gets an answer in OpenAI's form, and nothing else is harmed. It decides
nothing of sessions, and builds no bodies: see :mod:`gateway`, :mod:`replies`, :mod:`streaming`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tidegate.orchestrator.episodes.conversation import NOTHING
from tidegate.orchestrator.gateway.asking import Asking, Choice, begin_asking, choice_of
from tidegate.orchestrator.gateway.failures import failure_of
from tidegate.orchestrator.gateway.replies import GatewayError, completion
from tidegate.orchestrator.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    RewardRequest,
    TokenizeRequest,
    read_body,
)
from tidegate.orchestrator.gateway.streaming import streamed
from tidegate.orchestrator.records.trajectories import to_json
from tidegate.orchestrator.weights.model_files import LONG_CHARACTERS

if TYPE_CHECKING:
    from tidegate.orchestrator.gateway.gateway import Gateway, Session

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Of one request: a context of a million tokens, as text, is a quarter of that."""

Result = TypeVar("Result")
Handler = Callable[[HttpRequest], Awaitable[Response]]


def gateway_app(gateway: "Gateway") -> Starlette:
    """All its paths."""
    app = _App(gateway)
    posts: dict[str, Handler] = {
        "/v1/chat/completions": app.chat,
        "/v1/completions": app.complete,
        "/tokenize": app.tokenize,
        "/v1/tokenize": app.tokenize,
        "/sessions": app.open_session,
        "/sessions/{session_id}/reward": app.reward,
    }
    gets: dict[str, Handler] = {"/v1/models": app.models, "/health": app.health}
    routes = [Route(path, _answered(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, _answered(handler), methods=["GET"]) for path, handler in gets.items()]
    return Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})


class _App:
    """What each path does."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    async def chat(self, http: HttpRequest) -> Response:
        """``POST /v1/chat/completions``"""
        session = self._session(http)
        body = await _body(http)
        request: ChatRequest = read_body(body, ChatRequest)
        options, tools = request.options(), request.offered_tools
        conversation, known = session.episode.conversation, NOTHING
        if len(body) >= LONG_CHARACTERS:
            known = await conversation.read_ahead(request.messages, tools)

        def begin() -> Choice:
            prepared = conversation.prepare(
                request.messages, tools, request.tool_choice, known=known
            )
            return choice_of(prepared.row, conversation.generate_from(prepared, options))

        return await _answer(http, begin_asking(session, request, begin))

    async def complete(self, http: HttpRequest) -> Response:
        """``POST /v1/completions``"""
        session = self._session(http)
        request: CompletionRequest = read_body(await _body(http), CompletionRequest)
        options = request.options()
        prompt = request.prompt
        ids = await session.episode.encoded(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise GatewayError(400, "invalid_request_error", "the prompt has no token")

        def begin() -> Choice:
            row = session.episode.row_from(ids)
            return choice_of(row, row.generate(**options))

        return await _answer(http, begin_asking(session, request, begin))

    async def tokenize(self, http: HttpRequest) -> Response:
        """``POST /tokenize``"""
        session = self._session(http)
        request: TokenizeRequest = read_body(await _body(http), TokenizeRequest)
        if request.messages is not None:
            ids = await session.episode.conversation.prompt_tokens(request.messages, request.tools)
        else:
            ids = await session.episode.encoded(request.prompt or "")
        return _json({"count": len(ids), "tokens": ids})

    async def models(self, http: HttpRequest) -> Response:
        """``GET /v1/models``: one, whatever it is called."""
        self._session(http)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "tidegate"}
        return _json({"object": "list", "data": [model]})

    async def health(self, http: HttpRequest) -> Response:
        """``GET /health``"""
        return _json({"status": "ok", "sessions": self._gateway.num_sessions})

    async def open_session(self, http: HttpRequest) -> Response:
        """``POST /sessions``: a task for an agent that came from outside."""
        await _body(http)  # what follows it is that the client goes away
        claiming = asyncio.ensure_future(self._gateway.claim(_key(http)))
        session = await _unless_gone(http, claiming)
        about = {"id": session.session_id, "api_key": session.api_key}
        about["base_url"] = f"{self._gateway.url}/v1"
        return Response(to_json({**about, "task": session.task}), media_type="application/json")

    async def reward(self, http: HttpRequest) -> Response:
        """``POST /sessions/{id}/reward``: what its rollout is worth, or a first guess."""
        session_id = http.path_params["session_id"]
        session = self._gateway.session(_key(http), session_id)
        if session.session_id != session_id:
            why = f"this key is of session {session.session_id!r}, which the path doesn't name"
            raise GatewayError(401, "authentication_error", why, "invalid_api_key")
        request: RewardRequest = read_body(await _body(http), RewardRequest)
        self._gateway.reward(session, request.reward)
        return _json({"id": session.session_id, "reward": request.reward})

    def _session(self, http: HttpRequest) -> "Session":
        return self._gateway.session(_key(http), http.headers.get("x-session-id"))


# ---------------------------------------------------------------- answering


async def _answer(http: HttpRequest, asking: Asking) -> Response:
    if asking.request.stream:
        return StreamingResponse(streamed(asking), media_type="text/event-stream")
    await _unless_gone(http, asyncio.ensure_future(asking.wait()))
    answers = asking.answers
    return _json(
        completion(
            asking.request,
            answers,
            name=asking.name,
            created_s=asking.created_s,
            text_of=asking.token_text,
        )
    )


async def _unless_gone(http: HttpRequest, work: "asyncio.Future[Result]") -> Result:
    """What comes of it, which is for the client of a request whose body was read; if that goes
    away before, it is cancelled."""
    leaving = asyncio.ensure_future(http.receive())
    either: set[asyncio.Future[Any]] = {work, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise GatewayError(499, "client_closed", "the client has gone")
        return await work
    finally:
        work.cancel()
        leaving.cancel()


# ---------------------------------------------------------------- HTTP


def _answered(handler: Handler) -> Handler:
    """Nothing that a handler raises gets further than its client."""

    async def answer(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
            failure = failure_of(error)
            return _json(failure.body(), status=failure.status)

    return answer


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    why = f"there is no {http.method} {http.url.path} here"
    status = getattr(error, "status_code", 404)
    return _json(GatewayError(status, "not_found_error", why).body(), status=status)


async def _body(http: HttpRequest) -> bytes:
    """All of it, if that is not too much."""
    parts: list[bytes] = []
    bytes_left = BODY_BYTES_MAX
    async for part in http.stream():
        bytes_left -= len(part)
        if bytes_left < 0:
            most = f"a body may have {BODY_BYTES_MAX} bytes"
            raise GatewayError(413, "invalid_request_error", most, "body_too_large")
        parts.append(part)
    return b"".join(parts)


def _key(http: HttpRequest) -> str:
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
