"""Answers to completion requests of every API, while their choices are generated.

:func:`send_answer` sends a :class:`PendingAnswer`, whole or as an SSE stream. An
:class:`AnswerForm` writes an answer from turns: OpenAI's responses in :mod:`responses`, Anthropic's
messages in :mod:`anthropic_messages`, and the gateway's completions. Other completions are written
from the choices' outputs (:mod:`response_bodies`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import override

from tidegate.orchestrator.episodes.conversation import reply_content, reply_message
from tidegate.orchestrator.episodes.incremental_detokenizer import IncrementalDetokenizer
from tidegate.orchestrator.episodes.tool_calls import ReplyFormat, settled_text
from tidegate.serving.http.errors import ApiError
from tidegate.serving.http.scaffold import encoded_response
from tidegate.serving.http.server import OwnedStream, unless_gone
from tidegate.serving.openai.active_requests import ActiveChoice
from tidegate.serving.openai.requests import ChatRequest, OpenAIRequest

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.orchestrator.episodes.model_files import ModelFiles


# ---------------------------------------------------------------- of every API


class PendingAnswer:
    """Interface of an answer to one request, whose choices are being generated."""

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of server-sent events."""
        raise NotImplementedError

    async def wait(self) -> None:
        """Wait until every choice has ended; raise an error of one."""
        raise NotImplementedError

    def abort(self) -> None:
        """End the choices that are still generated."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        """Size of the whole answer, in tokens and listed log-probs."""
        raise NotImplementedError

    def encode(self) -> bytes:
        """Return the whole answer as JSON, once every choice has ended."""
        raise NotImplementedError

    def ended(self) -> None:
        """Record that the answer is complete."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        raise NotImplementedError

    def error_events(self, error: Exception) -> Iterator[bytes]:
        """Yield the events that report an error in a stream, whose status is sent already."""
        raise NotImplementedError


async def send_answer(http: HttpRequest, answer: PendingAnswer) -> Response:
    """Answer a request, whole or as a stream; a client that leaves aborts it.

    Raises:
        ClientDisconnect: the client is gone.
    """
    if answer.is_stream:
        return OwnedStream(_stream(answer), answer.abort)
    try:
        await unless_gone(http, answer.wait())
    finally:
        answer.abort()
    response = await encoded_response(answer.encode, tokens=answer.num_tokens)
    answer.ended()
    return response


async def _stream(answer: PendingAnswer) -> AsyncIterator[bytes]:
    """Yield server-sent events; an error is an event too, because the status is sent already."""
    try:
        async with contextlib.aclosing(answer.events()) as events:
            async for event in events:
                yield event
    except Exception as error:  # noqa: BLE001 - reported to the client, whatever it is
        for event in answer.error_events(error):
            yield event
    finally:
        answer.abort()


# ---------------------------------------------------------------- turns


@dataclass(slots=True)
class SentText:
    """Text that a stream has sent, which never changes."""

    text: str = ""

    def unsent(self, text: str) -> str:
        """Return the unsent rest of a text; empty while a new token changes text that was sent."""
        if not text.startswith(self.text):
            return ""
        more, self.text = text[len(self.text) :], text
        return more


@dataclass(slots=True)
class ActiveTurn:
    """One choice of a request: a turn that is being generated, and how its text is read."""

    name: str
    """Name of the turn, unique in the run."""
    prompt_tokens: int
    """Number of tokens of the context before the turn."""
    prompt: Callable[[], list[int]]
    """Returns the tokens of the context before the turn."""
    turn: "asyncio.Future[GeneratedTurn]"
    current_turn: "Callable[[], GeneratedTurn | None]"
    """Returns the turn with its tokens so far; None before it has begun."""
    subscribe: Callable[[asyncio.Event], None]
    """Has an event set at each step with tokens of the turn."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens of the turn."""
    reply_format: ReplyFormat | None = None
    """How a chat's turn is read; None for a plain completion."""
    sent: SentText = field(default_factory=SentText)
    has_sent_reasoning: bool = False
    detokenizer: IncrementalDetokenizer = field(init=False)
    """Detokenizer of the turn so far; used by streams only."""

    def __post_init__(self) -> None:
        self.detokenizer = IncrementalDetokenizer(self.decode)

    def reasoning(self) -> str:
        """Return the reasoning of a turn that has ended."""
        return str((self.turn.result().message or {}).get("reasoning_content", ""))

    def reasoning_so_far(self) -> str:
        """Return the reasoning of the turn so far."""
        if self.reply_format is None:
            return ""
        return self.reply_format.parse(self.detokenizer.text).reasoning

    def unsent_reasoning(self, read: Callable[[], str]) -> str:
        """Return the turn's reasoning, once."""
        if self.has_sent_reasoning:
            return ""
        self.has_sent_reasoning = True
        return read()

    def settled_text(self, stops: list[str]) -> str:
        """Return the text of a running turn that no later token changes.

        For a turn that has ended, return the text already sent, because another request may
        continue its row.
        """
        so_far = self.current_turn()
        if self.turn.done() or so_far is None or not so_far.is_running:
            return self.sent.text
        self.detokenizer.add(so_far.token_ids_from(self.detokenizer.tokens))
        if self.reply_format is not None:
            return self.reply_format.settled(self.detokenizer.text, stops)
        return settled_text(self.detokenizer.text, (), stops)


class ServedTurn(ActiveTurn):
    """Turn of a choice of a server's chat, whose reply is parsed: content, reasoning, calls."""

    def __init__(
        self,
        choice: ActiveChoice,
        model: "ModelFiles",
        reply_format: ReplyFormat,
        name: str,
        *,
        has_parallel_calls: bool,
    ) -> None:
        """``has_parallel_calls``: whether the turn may have several calls; else only the first is
        kept, as by vLLM."""
        self._choice, self._model = choice, model
        self._has_parallel_calls = has_parallel_calls
        ids = choice.prompt.token_ids
        turn = asyncio.ensure_future(self._ended())
        turn.add_done_callback(lambda done: done.cancelled() or done.exception())
        super().__init__(
            name,
            len(ids),
            lambda: ids,
            turn,
            choice.current_turn,
            choice.subscribe,
            model.reply_text,
            reply_format,
        )

    def message(self) -> dict[str, Any]:
        """Return the message of the choice, which has ended."""
        turn = self._parsed()
        return {} if turn is None else turn.message or {}

    def _parsed(self) -> "GeneratedTurn | None":
        """Return the turn of the choice, which has ended, with its message; None if there is none,
        because the choice was aborted before."""
        turn = self._choice.current_turn()
        if turn is not None and self.reply_format is not None:
            text = reply_content(self._model, turn, self._choice.options)
            turn.message = reply_message(self.reply_format.parse(text), self.name)
            if turn.tool_calls and not self._has_parallel_calls:
                turn.message["tool_calls"] = turn.tool_calls[:1]
        return turn

    async def _ended(self) -> "GeneratedTurn":
        """Wait for the end of the choice; cancelling this aborts the choice.

        Raises:
            ApiError: the choice was aborted.
        """
        try:
            await asyncio.wait([self._choice.ended])
        except asyncio.CancelledError:
            self._choice.abort()
            raise
        if self._choice.error is not None:
            raise self._choice.error
        turn = self._parsed()
        if turn is None or self._choice.is_aborted:
            raise ApiError(503, "the request was aborted; ask again")
        return turn


# ---------------------------------------------------------------- answers from turns


@dataclass(slots=True)
class ActiveCompletion:
    """A completion request that is being answered, and all its choices."""

    request: OpenAIRequest
    weight_versions: "Callable[[GeneratedTurn], Sequence[Mapping[str, Any]]]"
    """Returns the weight version of each range of a turn's tokens."""
    choices: list[ActiveTurn] = field(default_factory=list)
    answering: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Returns a context in which the turns are waited for; the gateway counts requests with it."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Unix time, for the answer's ``created``."""

    @property
    def name(self) -> str:
        """Id of the answer: the client's id, or the name of the first choice."""
        return self.request.request_id or self.choices[0].name

    async def wait(self) -> None:
        """Wait until every choice has its turn; at the first error, cancel the others."""
        with self.answering():
            try:
                await asyncio.gather(*(choice.turn for choice in self.choices))
            finally:
                self.cancel()

    def cancel(self) -> None:
        """Cancel the choices that are still generated."""
        for choice in self.choices:
            choice.turn.cancel()

    def content(self, choice: ActiveTurn) -> str:
        """Return the text of a choice whose turn has ended, without its tool calls."""
        turn = choice.turn.result()
        if isinstance(self.request, ChatRequest):
            return str((turn.message or {}).get("content", ""))
        return turn.text


class AnswerForm(PendingAnswer):
    """Answer to a completion, written from its turns in one API's format; may keep state."""

    def __init__(self, active: ActiveCompletion) -> None:
        self.active = active

    def body(self) -> dict[str, Any]:
        """Return the whole answer, once all turns have ended."""
        raise NotImplementedError

    def first_events(self) -> Iterator[bytes]:
        """Yield the events that begin a stream."""
        raise NotImplementedError

    def reasoning_events(self, index: int, reasoning: str) -> Iterator[bytes]:
        """Yield the events with one choice's reasoning, before those with its text."""
        raise NotImplementedError

    def text_events(self, index: int, text: str) -> Iterator[bytes]:
        """Yield the events with more text of one choice."""
        raise NotImplementedError

    def last_events(self) -> Iterator[bytes]:
        """Yield the events that end a stream, once all text has been sent."""
        raise NotImplementedError

    @property
    @override
    def is_stream(self) -> bool:
        return bool(self.active.request.stream)

    @override
    async def wait(self) -> None:
        await self.active.wait()

    @override
    def abort(self) -> None:
        self.active.cancel()

    @property
    @override
    def num_tokens(self) -> int:
        tokens = sum(len(choice.turn.result().token_ids) for choice in self.active.choices)
        return tokens * (1 + (self.active.request.num_top_logprobs or 0))

    @override
    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())

    @override
    async def events(self) -> AsyncGenerator[bytes, None]:
        active, new_tokens = self.active, asyncio.Event()
        waiting = asyncio.ensure_future(active.wait())
        waiting.add_done_callback(lambda _: new_tokens.set())
        for choice in active.choices:
            choice.subscribe(new_tokens)
        new_tokens.set()  # some may have come already
        try:
            for event in self.first_events():
                yield event
            while not waiting.done():
                await new_tokens.wait()
                new_tokens.clear()
                if not waiting.done():
                    for event in self._new_events():
                        yield event
            await waiting
        finally:
            waiting.cancel()
        for event in self._rest_events():
            yield event
        for event in self.last_events():
            yield event

    def _new_events(self) -> Iterator[bytes]:
        for index, choice in enumerate(self.active.choices):
            text = choice.settled_text(self.active.request.stop_strings)
            if more := choice.sent.unsent(text):
                yield from self._reasoning_events(index, choice.reasoning_so_far)
                yield from self.text_events(index, more)

    def _rest_events(self) -> Iterator[bytes]:
        for index, choice in enumerate(self.active.choices):
            more = choice.sent.unsent(self.active.content(choice))
            yield from self._reasoning_events(index, choice.reasoning)
            if more:
                yield from self.text_events(index, more)

    def _reasoning_events(self, index: int, read: Callable[[], str]) -> Iterator[bytes]:
        """Yield a choice's reasoning before its first text, unless it was sent."""
        if reasoning := self.active.choices[index].unsent_reasoning(read):
            yield from self.reasoning_events(index, reasoning)
