"""ASGI application of the gateway: OpenAI's and Anthropic's paths, sessions and rewards.

Each choice of a request is a turn of a row of the session's rollout.
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
    ApiPath,
    Paths,
    api_app,
    is_large,
    key_of,
    read,
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

    async def call(path: ApiPath, http: HttpRequest) -> Answer:
        return await path.handle(gateway, http)

    return api_app(PATHS, call, OpenAIErrors(), policy, body_bytes_max=BODY_BYTES_MAX)


PATHS = Paths()
"""Paths of the gateway; all handlers but that of ``/health`` refuse requests without a key."""

on = PATHS.on


@on("POST", "/v1/chat/completions")
async def chat(gateway: "GatewaySessions", http: HttpRequest) -> Response:
    """Answer ``POST /v1/chat/completions``."""
    session = _session(gateway, http)
    request = await read(http, GatewayChatRequest)
    return await _answer_chat(http, session, request, CompletionForm)


@on("POST", "/v1/responses")
async def respond(gateway: "GatewaySessions", http: HttpRequest) -> Response:
    """Answer ``POST /v1/responses``."""
    session = _session(gateway, http)
    request = await read(http, ResponsesRequest)
    chat = request.chat(session.responses.messages(request.previous_response_id))
    form = partial(ResponsesForm, request, session.responses)
    return await _answer_chat(http, session, chat, form)


@on("POST", "/v1/messages", errors=AnthropicErrors())
async def message(gateway: "GatewaySessions", http: HttpRequest) -> Response:
    """Answer ``POST /v1/messages``."""
    session = _session(gateway, http)
    request = await read(http, MessagesRequest)
    form = partial(MessagesForm, request)
    return await _answer_chat(http, session, request.chat(), form)


@on("POST", "/v1/messages/count_tokens", errors=AnthropicErrors())
async def count_tokens(gateway: "GatewaySessions", http: HttpRequest) -> Answer:
    """Answer ``POST /v1/messages/count_tokens``."""
    session = _session(gateway, http)
    chat = (await read(http, CountTokensRequest)).chat()
    refuse_large_chat(chat.messages, chat.offered_tools)
    ids = await _prompt_tokens(http, session, chat.messages, chat.offered_tools, chat.rendering)
    return {"input_tokens": len(ids)}


async def _answer_chat(
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


@on("POST", "/v1/completions")
async def complete(gateway: "GatewaySessions", http: HttpRequest) -> Response:
    """Answer ``POST /v1/completions``."""
    session = _session(gateway, http)
    request = await read(http, GatewayCompletionRequest)
    options = generate_options(request)
    begun = await _begin_texts(http, session, request, options)
    return await send_answer(http, CompletionForm(begun))


@on("POST", "/inference/v1/generate")
async def generate(gateway: "GatewaySessions", http: HttpRequest) -> Response:
    """Answer ``POST /inference/v1/generate``, vLLM's path with tokens in and tokens out."""
    session = _session(gateway, http)
    generate_request = await read(http, GenerateRequest)
    request = completion_of(generate_request)
    options = generate_options(request)
    if generate_request.sampling_params.max_tokens is None:
        del options["max_tokens"]
    begun = await _begin_texts(http, session, request, options)
    return await send_answer(http, TokensForm(begun))


async def _begin_texts(
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


@on("POST", "/tokenize")
@on("POST", "/v1/tokenize")
async def tokenize(gateway: "GatewaySessions", http: HttpRequest) -> Answer:
    """Answer ``POST /tokenize``."""
    session = _session(gateway, http)
    request = await read(http, TokenizeRequest)
    if request.messages is not None:
        refuse_large_chat(request.messages, request.tools)
        ids = await _prompt_tokens(
            http, session, request.messages, request.tools, request.rendering
        )
    else:
        ids = await unless_gone(http, session.episode.encode(request.prompt or ""))
    return {"count": len(ids), "tokens": ids}


async def _prompt_tokens(
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


@on("GET", "/v1/models")
async def models(gateway: "GatewaySessions", http: HttpRequest) -> Answer:
    """Answer ``GET /v1/models`` with one model, ``policy``."""
    _session(gateway, http)
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "tidegate"}
    return {"object": "list", "data": [model]}


@on("GET", "/v1/models/{model:path}")
async def model(gateway: "GatewaySessions", http: HttpRequest) -> Answer:
    """Answer ``GET /v1/models/ID``: each name stands for the policy, as in requests."""
    _session(gateway, http)
    name = http.path_params["model"]
    return {"id": name, "object": "model", "created": 0, "owned_by": "tidegate"}


@on("GET", "/health")
async def health(gateway: "GatewaySessions", http: HttpRequest) -> Answer:
    """Answer ``GET /health``."""
    return {"status": "ok", "sessions": gateway.num_sessions}


@on("POST", "/sessions")
async def open_session(gateway: "GatewaySessions", http: HttpRequest) -> Response:
    """Answer ``POST /sessions`` with a task for an agent in another process."""
    await read_json_bytes(http)  # after the body, only a disconnect is received
    session = await unless_gone(http, gateway.claim(key_of(http)))
    if await http.is_disconnected():
        gateway.unclaim(session)
        raise ClientDisconnect
    about = {"id": session.session_id, "api_key": session.api_key}
    about["base_url"] = f"{gateway.url}/v1"
    about |= session.trace
    return Response(to_json({**about, "task": session.task}), media_type="application/json")


@on("POST", "/sessions/{session_id}/reward")
async def reward(gateway: "GatewaySessions", http: HttpRequest) -> Answer:
    """Answer ``POST /sessions/{id}/reward``: set the reward of a rollout."""
    session = _named_session(gateway, http)
    request = await read(http, RewardRequest)
    gateway.reward(session, request.reward)
    return {"id": session.session_id, "reward": request.reward}


@on("POST", "/sessions/{session_id}/failure")
async def fail(gateway: "GatewaySessions", http: HttpRequest) -> Answer:
    """Answer ``POST /sessions/{id}/failure``: end an episode without a reward."""
    session = _named_session(gateway, http)
    request = await read(http, FailureRequest)
    gateway.fail(session, request.error())
    return {"id": session.session_id, "cause": request.cause, "reason": request.reason}


def _named_session(gateway: "GatewaySessions", http: HttpRequest) -> "Session":
    session_id = http.path_params["session_id"]
    session = gateway.session(key_of(http), session_id)
    if session.session_id != session_id:
        why = f"this key is of session {session.session_id!r}, which the path doesn't name"
        raise ApiError(401, why)
    return session


def _session(gateway: "GatewaySessions", http: HttpRequest) -> "Session":
    return gateway.session(key_of(http), http.headers.get("x-session-id"))


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
