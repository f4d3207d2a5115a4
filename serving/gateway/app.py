"""ASGI application of the gateway: OpenAI's paths, and paths for sessions and rewards.

Keys and sessions are checked in :mod:`sessions`; :mod:`completions` answers requests.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from tidegate.orchestrator.batches.tasks import to_json
from tidegate.orchestrator.episodes.conversation import EMPTY_CACHE
from tidegate.serving.api_app import (
    Answer,
    ApiRoute,
    api_app,
    decode_json,
    is_large,
    key_of,
    read_json_bytes,
)
from tidegate.serving.api_errors import ApiError, OpenAIErrors
from tidegate.serving.gateway.completions import (
    ActiveCompletion,
    GatewayChoice,
    answer,
    begin,
    choice_of,
)
from tidegate.serving.gateway.requests import (
    GatewayChatRequest,
    GatewayCompletionRequest,
    RewardRequest,
    completion_of,
    generate_options,
)
from tidegate.serving.gateway.response_bodies import generated_tokens
from tidegate.serving.http_server import (
    MESSAGES_MAX,
    AccessPolicy,
    Headers,
    off_loop,
    unless_gone,
)
from tidegate.serving.openai_requests import TokenizeRequest
from tidegate.serving.vllm_server.requests import GenerateRequest

if TYPE_CHECKING:
    from tidegate.serving.gateway.sessions import GatewaySessions, Session

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of one request's body: a context of a million tokens, as text, is a quarter of that."""


def gateway_app(gateway: "GatewaySessions") -> ASGIApp:
    """Make the application, behind its access guard."""
    handlers = _Handlers(gateway)
    routes = [
        ApiRoute("POST", "/v1/chat/completions", handlers.chat),
        ApiRoute("POST", "/v1/completions", handlers.complete),
        ApiRoute("POST", "/inference/v1/generate", handlers.generate),
        ApiRoute("POST", "/tokenize", handlers.tokenize),
        ApiRoute("POST", "/v1/tokenize", handlers.tokenize),
        ApiRoute("POST", "/sessions", handlers.open_session),
        ApiRoute("POST", "/sessions/{session_id}/reward", handlers.reward),
        ApiRoute("GET", "/v1/models", handlers.models),
        ApiRoute("GET", "/health", handlers.health),
    ]

    def shows_key(headers: Headers) -> bool:
        return gateway.is_authorized(headers.bearer)

    policy = AccessPolicy(gateway.host, gateway.allowed_hosts, shows_key)
    return api_app(routes, OpenAIErrors(), policy)


class _Handlers:
    """Handlers of the paths."""

    def __init__(self, gateway: "GatewaySessions") -> None:
        self._gateway = gateway

    async def chat(self, http: HttpRequest) -> Response:
        """Answer ``POST /v1/chat/completions``."""
        session = self._session(http)
        request = decode_json(await _body(http), GatewayChatRequest)
        options, tools = generate_options(request), request.offered_tools
        rendering = request.rendering
        _refuse_many(request.messages)
        conversation, cache = session.episode.conversation, EMPTY_CACHE
        if is_large(http):
            ahead = conversation.read_ahead(request.messages, tools, rendering, in_thread=off_loop)
            cache = await unless_gone(http, ahead)

        def begin_choice() -> GatewayChoice:
            prepared = conversation.prepare(
                request.messages, tools, request.tool_choice, rendering=rendering, cache=cache
            )
            return choice_of(prepared.row, conversation.generate_from(prepared, options))

        beginnings = [begin_choice] * request.choices_per_prompt
        return await answer(http, begin(session, request, beginnings))

    async def complete(self, http: HttpRequest) -> Response:
        """Answer ``POST /v1/completions``."""
        session = self._session(http)
        request = decode_json(await _body(http), GatewayCompletionRequest)
        options = generate_options(request)
        return await answer(http, await self._begin(http, session, request, options))

    async def generate(self, http: HttpRequest) -> Response:
        """Answer ``POST /inference/v1/generate``, vLLM's path with tokens in and tokens out."""
        session = self._session(http)
        generate_request = decode_json(await _body(http), GenerateRequest)
        request = completion_of(generate_request)
        options = generate_options(request)
        if generate_request.sampling_params.max_tokens is None:
            del options["max_tokens"]
        return await answer(
            http, await self._begin(http, session, request, options), body_of=generated_tokens
        )

    async def _begin(
        self,
        http: HttpRequest,
        session: "Session",
        request: GatewayCompletionRequest,
        options: dict[str, Any],
    ) -> ActiveCompletion:
        prompts = [
            await unless_gone(http, session.episode.encode(each)) if isinstance(each, str) else each
            for each in request.prompts
        ]
        if not all(prompts):
            raise ApiError(400, "the prompt has no token", param="prompt")

        def begin_choice(prompt: list[int]) -> GatewayChoice:
            row = session.episode.row_from(prompt)
            return choice_of(row, row.generate(**options))

        beginnings = [
            partial(begin_choice, prompt)
            for prompt in prompts
            for _ in range(request.choices_per_prompt)
        ]
        return begin(session, request, beginnings)

    async def tokenize(self, http: HttpRequest) -> Answer:
        """Answer ``POST /tokenize``."""
        session = self._session(http)
        request = decode_json(await _body(http), TokenizeRequest)
        if request.messages is not None:
            _refuse_many(request.messages)
            in_thread = off_loop if is_large(http) else None
            conversation = session.episode.conversation
            work = conversation.prompt_tokens(
                request.messages, request.tools, request.rendering, in_thread=in_thread
            )
            ids = await unless_gone(http, work)
        else:
            ids = await unless_gone(http, session.episode.encode(request.prompt or ""))
        return {"count": len(ids), "tokens": ids}

    async def models(self, http: HttpRequest) -> Answer:
        """Answer ``GET /v1/models`` with one model, ``policy``."""
        self._session(http)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "tidegate"}
        return {"object": "list", "data": [model]}

    async def health(self, http: HttpRequest) -> Answer:
        """Answer ``GET /health``."""
        return {"status": "ok", "sessions": self._gateway.num_sessions}

    async def open_session(self, http: HttpRequest) -> Response:
        """Answer ``POST /sessions`` with a task for an agent from outside."""
        await _body(http)  # after the body, only a disconnect is received
        session = await unless_gone(http, self._gateway.claim(key_of(http)))
        if await http.is_disconnected():
            self._gateway.unclaim(session)
            raise ClientDisconnect
        about = {"id": session.session_id, "api_key": session.api_key}
        about["base_url"] = f"{self._gateway.url}/v1"
        return Response(to_json({**about, "task": session.task}), media_type="application/json")

    async def reward(self, http: HttpRequest) -> Answer:
        """Answer ``POST /sessions/{id}/reward``: set the reward of a rollout."""
        session_id = http.path_params["session_id"]
        session = self._gateway.session(key_of(http), session_id)
        if session.session_id != session_id:
            why = f"this key is of session {session.session_id!r}, which the path doesn't name"
            raise ApiError(401, why)
        request = decode_json(await _body(http), RewardRequest)
        self._gateway.reward(session, request.reward)
        return {"id": session.session_id, "reward": request.reward}

    def _session(self, http: HttpRequest) -> "Session":
        return self._gateway.session(key_of(http), http.headers.get("x-session-id"))


async def _body(http: HttpRequest) -> bytes:
    return await read_json_bytes(http, bytes_max=BODY_BYTES_MAX)


def _refuse_many(messages: Sequence[object]) -> None:
    if len(messages) > MESSAGES_MAX:
        why = f"a conversation has at most {MESSAGES_MAX} messages, got {len(messages)}"
        raise ApiError(400, why)
