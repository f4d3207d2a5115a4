"""ASGI application of the gateway: OpenAI's and Anthropic's paths, sessions and rewards.

Keys and sessions are checked in :mod:`sessions`. Each choice of a request is a turn of a row of the
session's rollout.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from tidegate.orchestrator.batches.tasks import to_json
from tidegate.orchestrator.episodes.chat_template import ChatRendering
from tidegate.orchestrator.episodes.conversation import EMPTY_CACHE
from tidegate.orchestrator.episodes.tool_calls import ReplyFormat
from tidegate.serving.gateway.completion_form import CompletionForm, TokensForm
from tidegate.serving.gateway.requests import (
    FailureRequest,
    GatewayChatRequest,
    GatewayCompletionRequest,
    RewardRequest,
    completion_of,
    generate_options,
)
from tidegate.serving.http.errors import AnthropicErrors, ApiError, OpenAIErrors
from tidegate.serving.http.scaffold import (
    Answer,
    ApiRoute,
    api_app,
    decode_json,
    is_large,
    key_of,
    read_json_bytes,
)
from tidegate.serving.http.server import (
    AccessPolicy,
    Headers,
    off_loop,
    refuse_large_chat,
    unless_gone,
)
from tidegate.serving.openai.answers import ActiveCompletion, ActiveTurn, AnswerForm, send_answer
from tidegate.serving.openai.anthropic_messages import (
    CountTokensRequest,
    MessagesForm,
    MessagesRequest,
)
from tidegate.serving.openai.requests import (
    ChatRequest,
    GenerateRequest,
    OpenAIRequest,
    TokenizeRequest,
)
from tidegate.serving.openai.responses import ResponsesForm, ResponsesRequest
from tidegate.transport.trace_context import continued_trace

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.serving.gateway.sessions import GatewaySessions, Session

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of one request's body: a context of a million tokens, as text, is a quarter of that."""


def gateway_app(gateway: "GatewaySessions") -> ASGIApp:
    """Make the application, behind its access guard."""

    def shows_key(headers: Headers) -> bool:
        return gateway.is_authorized(headers.key)

    policy = AccessPolicy(gateway.host, gateway.allowed_hosts, shows_key)
    return api_app(gateway_routes(gateway), OpenAIErrors(), policy)


def gateway_routes(gateway: "GatewaySessions") -> list[ApiRoute]:
    """Return the paths; the handlers of all but ``/health`` refuse requests without a key."""
    handlers, anthropic = _Handlers(gateway), AnthropicErrors()
    return [
        ApiRoute("POST", "/v1/chat/completions", handlers.chat),
        ApiRoute("POST", "/v1/completions", handlers.complete),
        ApiRoute("POST", "/v1/responses", handlers.respond),
        ApiRoute("POST", "/v1/messages", handlers.message, anthropic),
        ApiRoute("POST", "/v1/messages/count_tokens", handlers.count_tokens, anthropic),
        ApiRoute("POST", "/inference/v1/generate", handlers.generate),
        ApiRoute("POST", "/tokenize", handlers.tokenize),
        ApiRoute("POST", "/v1/tokenize", handlers.tokenize),
        ApiRoute("POST", "/sessions", handlers.open_session),
        ApiRoute("POST", "/sessions/{session_id}/reward", handlers.reward),
        ApiRoute("POST", "/sessions/{session_id}/failure", handlers.fail),
        ApiRoute("GET", "/v1/models", handlers.models),
        ApiRoute("GET", "/v1/models/{model:path}", handlers.model),
        ApiRoute("GET", "/health", handlers.health),
    ]


class _Handlers:
    """Request handlers of the gateway's paths."""

    def __init__(self, gateway: "GatewaySessions") -> None:
        self._gateway = gateway

    async def chat(self, http: HttpRequest) -> Response:
        """Answer ``POST /v1/chat/completions``."""
        session = self._session(http)
        request = decode_json(await _body(http), GatewayChatRequest)
        return await self._answer_chat(http, session, request, CompletionForm)

    async def respond(self, http: HttpRequest) -> Response:
        """Answer ``POST /v1/responses``."""
        session = self._session(http)
        request = decode_json(await _body(http), ResponsesRequest)
        chat = request.chat(session.responses.messages(request.previous_response_id))
        form = partial(ResponsesForm, request, session.responses)
        return await self._answer_chat(http, session, chat, form)

    async def message(self, http: HttpRequest) -> Response:
        """Answer ``POST /v1/messages``."""
        session = self._session(http)
        request = decode_json(await _body(http), MessagesRequest)
        form = partial(MessagesForm, request)
        return await self._answer_chat(http, session, request.chat(), form)

    async def count_tokens(self, http: HttpRequest) -> Answer:
        """Answer ``POST /v1/messages/count_tokens``."""
        session = self._session(http)
        chat = decode_json(await _body(http), CountTokensRequest).chat()
        refuse_large_chat(chat.messages, chat.offered_tools)
        ids = await self._prompt_tokens(
            http, session, chat.messages, chat.offered_tools, chat.rendering
        )
        return {"input_tokens": len(ids)}

    async def _answer_chat(
        self,
        http: HttpRequest,
        session: "Session",
        request: ChatRequest,
        form: Callable[[ActiveCompletion], AnswerForm],
    ) -> Response:
        options, tools = generate_options(request), request.offered_tools
        rendering = request.rendering
        refuse_large_chat(request.messages, tools)
        conversation, cache = session.episode.conversation, EMPTY_CACHE
        if is_large(http) or conversation.renders_slowly:
            ahead = conversation.read_ahead(request.messages, tools, rendering, in_thread=off_loop)
            with session.recording_refusal():
                cache = await unless_gone(http, ahead)

        def begin_choice() -> ActiveTurn:
            prepared = conversation.prepare(
                request.messages,
                tools,
                request.call_choice,
                parallel_tool_calls=request.parallel_tool_calls is not False,
                rendering=rendering,
                cache=cache,
            )
            turn = conversation.generate_from(prepared, options)
            return _turn_of(prepared.row, turn, prepared.reply_format)

        beginnings = [begin_choice] * request.choices_per_prompt
        return await send_answer(http, form(_begin(http, session, request, beginnings)))

    async def complete(self, http: HttpRequest) -> Response:
        """Answer ``POST /v1/completions``."""
        session = self._session(http)
        request = decode_json(await _body(http), GatewayCompletionRequest)
        options = generate_options(request)
        begun = await self._begin_texts(http, session, request, options)
        return await send_answer(http, CompletionForm(begun))

    async def generate(self, http: HttpRequest) -> Response:
        """Answer ``POST /inference/v1/generate``, vLLM's path with tokens in and tokens out."""
        session = self._session(http)
        generate_request = decode_json(await _body(http), GenerateRequest)
        request = completion_of(generate_request)
        options = generate_options(request)
        if generate_request.sampling_params.max_tokens is None:
            del options["max_tokens"]
        begun = await self._begin_texts(http, session, request, options)
        return await send_answer(http, TokensForm(begun))

    async def _begin_texts(
        self,
        http: HttpRequest,
        session: "Session",
        request: GatewayCompletionRequest,
        options: dict[str, Any],
    ) -> ActiveCompletion:
        episode = session.episode
        limit = episode.context_tokens_max
        with session.recording_refusal():
            prompts = [
                await unless_gone(http, episode.encode(each, tokens_max=limit))
                if isinstance(each, str)
                else each
                for each in request.prompts
            ]
        if not all(prompts):
            raise ApiError(400, "the prompt has no token", param="prompt")

        def begin_choice(prompt: list[int]) -> ActiveTurn:
            row = session.episode.row_from(prompt)
            return _turn_of(row, row.generate(**options))

        beginnings = [
            partial(begin_choice, prompt)
            for prompt in prompts
            for _ in range(request.choices_per_prompt)
        ]
        return _begin(http, session, request, beginnings)

    async def tokenize(self, http: HttpRequest) -> Answer:
        """Answer ``POST /tokenize``."""
        session = self._session(http)
        request = decode_json(await _body(http), TokenizeRequest)
        if request.messages is not None:
            refuse_large_chat(request.messages, request.tools)
            ids = await self._prompt_tokens(
                http, session, request.messages, request.tools, request.rendering
            )
        else:
            ids = await unless_gone(http, session.episode.encode(request.prompt or ""))
        return {"count": len(ids), "tokens": ids}

    async def _prompt_tokens(
        self,
        http: HttpRequest,
        session: "Session",
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        rendering: ChatRendering,
    ) -> list[int]:
        conversation = session.episode.conversation
        in_thread = off_loop if is_large(http) or conversation.renders_slowly else None
        work = conversation.prompt_tokens(messages, tools, rendering, in_thread=in_thread)
        return await unless_gone(http, work)

    async def models(self, http: HttpRequest) -> Answer:
        """Answer ``GET /v1/models`` with one model, ``policy``."""
        self._session(http)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "tidegate"}
        return {"object": "list", "data": [model]}

    async def model(self, http: HttpRequest) -> Answer:
        """Answer ``GET /v1/models/ID``: each name stands for the policy, as in requests."""
        self._session(http)
        name = http.path_params["model"]
        return {"id": name, "object": "model", "created": 0, "owned_by": "tidegate"}

    async def health(self, http: HttpRequest) -> Answer:
        """Answer ``GET /health``."""
        return {"status": "ok", "sessions": self._gateway.num_sessions}

    async def open_session(self, http: HttpRequest) -> Response:
        """Answer ``POST /sessions`` with a task for an agent in another process."""
        await _body(http)  # after the body, only a disconnect is received
        session = await unless_gone(http, self._gateway.claim(key_of(http)))
        if await http.is_disconnected():
            self._gateway.unclaim(session)
            raise ClientDisconnect
        about = {"id": session.session_id, "api_key": session.api_key}
        about["base_url"] = f"{self._gateway.url}/v1"
        about |= session.trace
        return Response(to_json({**about, "task": session.task}), media_type="application/json")

    async def reward(self, http: HttpRequest) -> Answer:
        """Answer ``POST /sessions/{id}/reward``: set the reward of a rollout."""
        session = self._named_session(http)
        request = decode_json(await _body(http), RewardRequest)
        self._gateway.reward(session, request.reward)
        return {"id": session.session_id, "reward": request.reward}

    async def fail(self, http: HttpRequest) -> Answer:
        """Answer ``POST /sessions/{id}/failure``: end an episode without a reward."""
        session = self._named_session(http)
        request = decode_json(await _body(http), FailureRequest)
        self._gateway.fail(session, request.error())
        return {"id": session.session_id, "cause": request.cause, "reason": request.reason}

    def _named_session(self, http: HttpRequest) -> "Session":
        """Return the session that the path names, if the request's key may use it."""
        session_id = http.path_params["session_id"]
        session = self._gateway.session(key_of(http), session_id)
        if session.session_id != session_id:
            why = f"this key is of session {session.session_id!r}, which the path doesn't name"
            raise ApiError(401, why)
        return session

    def _session(self, http: HttpRequest) -> "Session":
        return self._gateway.session(key_of(http), http.headers.get("x-session-id"))


async def _body(http: HttpRequest) -> bytes:
    return await read_json_bytes(http, bytes_max=BODY_BYTES_MAX)


def _turn_of(
    row: "Episode",
    turn: "Coroutine[Any, Any, GeneratedTurn]",
    reply_format: ReplyFormat | None = None,
) -> ActiveTurn:
    """Begin a turn that continues a row from its present tokens."""
    tokens, task = row.num_tokens, asyncio.ensure_future(turn)
    return ActiveTurn(
        name=f"{row.rollout_id}-{tokens}",
        prompt_tokens=tokens,
        prompt=lambda: row.token_ids[:tokens],  # contexts only grow
        turn=task,
        current_turn=row.current_turn,
        subscribe=lambda event: row.subscribe(event, task),
        decode=row.decode if reply_format is None else row.reply_text,
        reply_format=reply_format,
    )


def _begin(
    http: HttpRequest,
    session: "Session",
    request: OpenAIRequest,
    beginnings: Iterable[Callable[[], ActiveTurn]],
) -> ActiveCompletion:
    """Begin all choices of a request; one that can't begin cancels the others.

    Raises:
        ApiError: the session has too many requests.
    """
    session.refuse_if_busy()
    active = ActiveCompletion(request, _weight_versions, answering=session.answering)
    is_traced = bool(session.trace)
    try:
        for begin_choice in beginnings:
            with session.recording_refusal(), continued_trace(http.headers if is_traced else {}):
                choice = begin_choice()
            choice.turn.add_done_callback(session.record_turn)
            active.choices.append(choice)
    except BaseException:
        active.cancel()
        raise
    return active


def _weight_versions(turn: "GeneratedTurn") -> list[dict[str, Any]]:
    """Return the weight version of each range of the turn's tokens."""
    return [
        {"version": str(span.version), "start": span.start, "end": span.end} for span in turn.spans
    ]
