"""Which paths does the gateway have? OpenAI's, and a few for sessions; each request to its rollout.

Whatever a client sends, it gets an answer in OpenAI's form, and nothing else is harmed. It decides
nothing of sessions, and builds no bodies: see :mod:`gateway` and :mod:`gateway_replies`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tidegate.errors import RunClosed, TidegateError, TurnTimeout
from tidegate.orchestrator.episodes.conversation import NOTHING, tool_names
from tidegate.orchestrator.episodes.tool_calls import settled_words
from tidegate.orchestrator.gateway.replies import (
    Answered,
    GatewayError,
    completion,
    last_chunk,
    text_chunk,
    usage_chunk,
)
from tidegate.orchestrator.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    Request,
    RewardRequest,
    TokenizeRequest,
    read_body,
)
from tidegate.orchestrator.records.trajectories import to_json
from tidegate.orchestrator.weights.model_files import LONG_CHARACTERS

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.orchestrator.gateway.gateway import Gateway, Session

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Of one request: a context of a million tokens, as text, is a quarter of that."""

STREAM_INTERVAL_S = 0.05
"""Between two looks at what was said so far: as fast as people read."""

Result = TypeVar("Result")
Handler = Callable[[HttpRequest], Awaitable[Response]]

log = logging.getLogger("tidegate")


@dataclass(slots=True)
class _Choice:
    """One completion in the making."""

    row: "Episode"
    prompt_tokens: int
    turn: "asyncio.Task[GeneratedTurn]"
    sent: str = ""
    """Of a stream."""

    def said_so_far(self, tools: list[str], stops: list[str]) -> str:
        """Of a turn that goes on, what is sure to stay; at its end may be a token that is no word.
        One that has ended may go on meanwhile, for somebody else."""
        so_far = self.row.turn_so_far()
        if self.turn.done() or so_far is None or not so_far.goes_on:
            return self.sent
        said = self.row.decode(self.row.token_ids[self.prompt_tokens :])
        return settled_words(said.rstrip("\ufffd"), tools, stops)


@dataclass(slots=True)
class _Asking:
    """A request and all its completions."""

    session: "Session"
    request: Request
    choices: list[_Choice] = field(default_factory=list)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """Of the answer: the row and turn of its first choice."""
        return f"{self.choices[0].row.rollout_id}-{self.choices[0].prompt_tokens}"

    async def wait(self) -> None:
        """Until every choice has its turn; the first error is raised, and the others cancelled."""
        try:
            await asyncio.gather(*(choice.turn for choice in self.choices))
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Nobody waits for them any more."""
        for choice in self.choices:
            choice.turn.cancel()

    @property
    def answers(self) -> list[Answered]:
        """Once they are there."""
        return [Answered(choice.turn.result(), choice.prompt_tokens) for choice in self.choices]

    def token_text(self, token_id: int) -> str:
        """A token as text of its own."""
        return self.session.episode.decode([token_id])


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

        def begin() -> _Choice:
            prepared = conversation.prepare(
                request.messages, tools, request.tool_choice, known=known
            )
            return _choice(prepared.row, conversation.generate_from(prepared, options))

        return await _answer(http, _begin(session, request, begin))

    async def complete(self, http: HttpRequest) -> Response:
        """``POST /v1/completions``"""
        session = self._session(http)
        request: CompletionRequest = read_body(await _body(http), CompletionRequest)
        options = request.options()
        prompt = request.prompt
        ids = await session.episode.encoded(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise GatewayError(400, "invalid_request_error", "the prompt has no token")

        def begin() -> _Choice:
            row = session.episode.row_from(ids)
            return _choice(row, row.generate(**options))

        return await _answer(http, _begin(session, request, begin))

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


# ---------------------------------------------------------------- asking and answering


def _choice(row: "Episode", turn: "Coroutine[Any, Any, GeneratedTurn]") -> _Choice:
    """A row whose turn is to begin from what it has by now."""
    return _Choice(row, row.num_tokens, asyncio.ensure_future(turn))


def _begin(session: "Session", request: Request, begin: Callable[[], _Choice]) -> _Asking:
    """Ask for all turns at once."""
    session.refuse_if_busy()
    asking = _Asking(session, request)
    try:
        for _ in range(request.choices):
            asking.choices.append(begin())
    except BaseException:
        asking.cancel()
        raise
    return asking


async def _answer(http: HttpRequest, asking: _Asking) -> Response:
    if asking.request.stream:
        return StreamingResponse(_stream(asking), media_type="text/event-stream")
    await _unless_gone(http, asyncio.ensure_future(_wait(asking)))
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


async def _wait(asking: _Asking) -> None:
    asking.session.requests += 1
    try:
        await asking.wait()
    finally:
        asking.session.requests -= 1


async def _stream(asking: _Asking) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the first of them is one more, for the status is sent."""
    waiting = asyncio.ensure_future(_wait(asking))
    chat = asking.request if isinstance(asking.request, ChatRequest) else None
    tools = tool_names(chat and chat.offered_tools)
    try:
        for index in range(len(asking.choices)):
            yield _event(_text(asking, index, "", is_first=True))
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=STREAM_INTERVAL_S)
            if not waiting.done():
                for index, choice in enumerate(asking.choices):
                    said = choice.said_so_far(tools, asking.request.stops)
                    if more := _more(choice, said):
                        yield _event(_text(asking, index, more))
        await waiting
        for event in _end(asking):
            yield event
    except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
        yield _event(_failure(error).body())
    finally:
        waiting.cancel()
        asking.cancel()
    yield b"data: [DONE]\n\n"


def _end(asking: _Asking) -> list[bytes]:
    events: list[bytes] = []
    for index, choice in enumerate(asking.choices):
        turn = choice.turn.result()
        is_chat = isinstance(asking.request, ChatRequest)
        content = (turn.message or {}).get("content", "") if is_chat else turn.text
        if more := _more(choice, content):
            events.append(_event(_text(asking, index, more)))
        head = {"name": asking.name, "created_s": asking.created_s}
        chunk = last_chunk(asking.request, index, turn, text_of=asking.token_text, **head)  # type: ignore[arg-type]
        events.append(_event(chunk))
    if (asking.request.stream_options or {}).get("include_usage"):
        chunk = usage_chunk(
            asking.request, asking.answers, name=asking.name, created_s=asking.created_s
        )
        events.append(_event(chunk))
    return events


def _more(choice: _Choice, said: str) -> str:
    """What was not sent yet; nothing while a token's text still changes what was before."""
    if not said.startswith(choice.sent):
        return ""
    more, choice.sent = said[len(choice.sent) :], said
    return more


def _text(asking: _Asking, index: int, text: str, *, is_first: bool = False) -> dict[str, Any]:
    return text_chunk(
        asking.request,
        index,
        text,
        name=asking.name,
        created_s=asking.created_s,
        is_first=is_first,
    )


# ---------------------------------------------------------------- HTTP


def _answered(handler: Handler) -> Handler:
    """Nothing that a handler raises gets further than its client."""

    async def answer(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
            failure = _failure(error)
            return _json(failure.body(), status=failure.status)

    return answer


def _failure(error: Exception) -> GatewayError:
    match error:
        case GatewayError():
            return error
        case ClientDisconnect():
            return GatewayError(499, "client_closed", "the client has gone")
        case RunClosed():
            return GatewayError(410, "invalid_request_error", str(error), "session_over")
        case TurnTimeout():
            return GatewayError(504, "timeout_error", str(error))
        case TidegateError() | ValueError() | OverflowError() | TypeError():
            return GatewayError(400, "invalid_request_error", str(error))
    log.error("the gateway failed to answer a request", exc_info=error)
    return GatewayError(500, "server_error", f"{type(error).__name__}: {error}")


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


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
