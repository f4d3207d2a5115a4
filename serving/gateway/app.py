"""ASGI application of the gateway: OpenAI's paths and a few for sessions.

Every request gets an answer in OpenAI's form. Sessions are :mod:`gateway`'s, bodies of answers
:mod:`replies`' and :mod:`streaming`'s.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tidegate.orchestrator.batches.tasks import to_json
from tidegate.orchestrator.episodes.conversation import NOTHING
from tidegate.serving.gateway.asking import Asking, Choice, begin_asking, choice_of
from tidegate.serving.gateway.failures import failure_of
from tidegate.serving.gateway.replies import GatewayError, completion
from tidegate.serving.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    RewardRequest,
    TokenizeRequest,
    decode_body,
)
from tidegate.serving.gateway.streaming import streamed
from tidegate.serving.http_server import (
    BODY_IS_LARGE_BYTES,
    MESSAGES_MAX,
    AccessGuard,
    AccessPolicy,
    Headers,
    OwnedStream,
    off_loop,
    read_body,
    unless_gone,
)

if TYPE_CHECKING:
    from tidegate.serving.gateway.sessions import Session, Sessions

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of one request's body: a context of a million tokens, as text, is a quarter of that."""

LARGE_ANSWER_TOKENS = 4096
"""Output tokens and log-probs from which on an answer's body is made off the event loop: 10 ms."""

Handler = Callable[[HttpRequest], Awaitable[Response]]


def gateway_app(gateway: "Sessions") -> ASGIApp:
    """Make the application, behind its access guard."""
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
    starlette = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})

    def shows_key(headers: Headers) -> bool:
        return gateway.knows(headers.bearer)

    policy = AccessPolicy(gateway.host, gateway.allowed_hosts, shows_key)
    return AccessGuard(starlette, policy, _refusal_body)


def _refusal_body(status: int, why: str) -> bytes:
    kind = "permission_error" if status == 403 else "invalid_request_error"
    return msgspec.json.encode(GatewayError(status, kind, why).body())


class _App:
    """What each path does."""

    def __init__(self, gateway: "Sessions") -> None:
        self._gateway = gateway

    async def chat(self, http: HttpRequest) -> Response:
        """``POST /v1/chat/completions``"""
        session = self._session(http)
        body = await _body(http)
        request: ChatRequest = decode_body(body, ChatRequest)
        options, tools = request.options(), request.offered_tools
        _refuse_many(request.messages)
        conversation, known = session.episode.conversation, NOTHING
        if len(body) >= BODY_IS_LARGE_BYTES:
            ahead = conversation.read_ahead(request.messages, tools, in_thread=off_loop)
            known = await unless_gone(http, ahead)

        def begin() -> Choice:
            prepared = conversation.prepare(
                request.messages, tools, request.tool_choice, known=known
            )
            return choice_of(prepared.row, conversation.generate_from(prepared, options))

        return await _answer(http, begin_asking(session, request, begin))

    async def complete(self, http: HttpRequest) -> Response:
        """``POST /v1/completions``"""
        session = self._session(http)
        request: CompletionRequest = decode_body(await _body(http), CompletionRequest)
        options = request.options()
        prompt = request.prompt
        ids: list[int]
        if isinstance(prompt, str):
            ids = await unless_gone(http, session.episode.encoded(prompt))
        else:
            ids = prompt
        if not ids:
            raise GatewayError(400, "invalid_request_error", "the prompt has no token")

        def begin() -> Choice:
            row = session.episode.row_from(ids)
            return choice_of(row, row.generate(**options))

        return await _answer(http, begin_asking(session, request, begin))

    async def tokenize(self, http: HttpRequest) -> Response:
        """``POST /tokenize``"""
        session = self._session(http)
        body = await _body(http)
        request: TokenizeRequest = decode_body(body, TokenizeRequest)
        if request.messages is not None:
            _refuse_many(request.messages)
            in_thread = off_loop if len(body) >= BODY_IS_LARGE_BYTES else None
            conversation = session.episode.conversation
            work = conversation.prompt_tokens(request.messages, request.tools, in_thread=in_thread)
            ids = await unless_gone(http, work)
        else:
            ids = await unless_gone(http, session.episode.encoded(request.prompt or ""))
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
        session = await unless_gone(http, self._gateway.claim(_key(http)))
        if await http.is_disconnected():
            self._gateway.give_back(session)
            raise ClientDisconnect
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
        request: RewardRequest = decode_body(await _body(http), RewardRequest)
        self._gateway.reward(session, request.reward)
        return _json({"id": session.session_id, "reward": request.reward})

    def _session(self, http: HttpRequest) -> "Session":
        return self._gateway.session(_key(http), http.headers.get("x-session-id"))


# ---------------------------------------------------------------- answering


async def _answer(http: HttpRequest, asking: Asking) -> Response:
    if asking.request.stream:
        return OwnedStream(streamed(asking), asking.cancel)
    try:
        await unless_gone(http, asking.wait())
    finally:
        asking.cancel()
    answers = asking.answers

    def encoded() -> bytes:
        body = completion(
            asking.request,
            answers,
            name=asking.name,
            created_s=asking.created_s,
            text_of=asking.token_text,
        )
        return msgspec.json.encode(body)

    each = 1 + (asking.request.top_logprobs_asked or 0)
    tokens = sum(len(answer.turn.token_ids) for answer in answers)
    content = await off_loop(encoded) if tokens * each >= LARGE_ANSWER_TOKENS else encoded()
    return Response(content, media_type="application/json")


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
    return await read_body(http, bytes_max=BODY_BYTES_MAX)


def _refuse_many(messages: Sequence[object]) -> None:
    if len(messages) > MESSAGES_MAX:
        told = f"a conversation has at most {MESSAGES_MAX} messages, got {len(messages)}"
        raise GatewayError(400, "invalid_request_error", told)


def _key(http: HttpRequest) -> str:
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
