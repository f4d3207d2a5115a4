"""Chats and completions being answered, and their answers, whole or as an SSE stream.

A server begins the turns of a request as an :class:`ActiveCompletion`. :func:`answer_turns` waits
for them, and an :class:`AnswerForm` writes the answer as one API has it: OpenAI's responses in
:mod:`responses`, Anthropic's messages in :mod:`anthropic_messages`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.orchestrator.episodes.incremental_detokenizer import IncrementalDetokenizer
from tidegate.orchestrator.episodes.tool_calls import ReplyFormat, settled_text
from tidegate.serving.http.scaffold import encoded_response
from tidegate.serving.http.server import OwnedStream, unless_gone
from tidegate.serving.openai.requests import ChatRequest, OpenAIRequest

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn


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
    sent: str = ""
    """Text that a stream has sent."""
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

    def unsent(self, text: str) -> str:
        """Return the unsent rest of a text; empty while a new token changes text that was sent."""
        if not text.startswith(self.sent):
            return ""
        more, self.sent = text[len(self.sent) :], text
        return more

    def settled_text(self, stops: list[str]) -> str:
        """Return the text of a running turn that no later token changes.

        For a turn that has ended, return the text already sent, because another request may
        continue its row.
        """
        so_far = self.current_turn()
        if self.turn.done() or so_far is None or not so_far.is_running:
            return self.sent
        self.detokenizer.add(so_far.token_ids_from(self.detokenizer.tokens))
        if self.reply_format is not None:
            return self.reply_format.settled(self.detokenizer.text, stops)
        return settled_text(self.detokenizer.text, (), stops)


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


# ---------------------------------------------------------------- answers


class AnswerForm:
    """Interface of one API's answer format. Made for one request, so it may keep state."""

    def body(self, active: ActiveCompletion) -> dict[str, Any]:
        """Return the whole answer, once all turns have ended."""
        raise NotImplementedError

    def first_events(self, active: ActiveCompletion) -> Iterator[bytes]:
        """Yield the events that begin a stream."""
        raise NotImplementedError

    def reasoning_events(
        self, active: ActiveCompletion, index: int, reasoning: str
    ) -> Iterator[bytes]:
        """Yield the events with one choice's reasoning, before those with its text."""
        raise NotImplementedError

    def text_events(self, active: ActiveCompletion, index: int, text: str) -> Iterator[bytes]:
        """Yield the events with more text of one choice."""
        raise NotImplementedError

    def last_events(self, active: ActiveCompletion) -> Iterator[bytes]:
        """Yield the events that end a stream, once all text has been sent."""
        raise NotImplementedError

    def error_events(self, error: Exception) -> Iterator[bytes]:
        """Yield the events that report an error in a stream, whose status is sent already."""
        raise NotImplementedError


async def answer_turns(http: HttpRequest, active: ActiveCompletion, form: AnswerForm) -> Response:
    """Answer a request, whole or as a stream; a client that leaves cancels it.

    Raises:
        ClientDisconnect: the client is gone.
    """
    if active.request.stream:
        return OwnedStream(_stream(active, form), active.cancel)
    try:
        await unless_gone(http, active.wait())
    finally:
        active.cancel()
    tokens = sum(len(choice.turn.result().token_ids) for choice in active.choices)
    each = 1 + (active.request.num_top_logprobs or 0)
    return await encoded_response(
        lambda: msgspec.json.encode(form.body(active)), tokens=tokens * each
    )


async def _stream(active: ActiveCompletion, form: AnswerForm) -> AsyncIterator[bytes]:
    """Yield server-sent events; an error is an event too, because the status is sent already."""
    waiting, new_tokens = asyncio.ensure_future(active.wait()), asyncio.Event()
    waiting.add_done_callback(lambda _: new_tokens.set())
    for choice in active.choices:
        choice.subscribe(new_tokens)
    new_tokens.set()  # some may have come already
    try:
        for event in form.first_events(active):
            yield event
        while not waiting.done():
            await new_tokens.wait()
            new_tokens.clear()
            if not waiting.done():
                for index, choice in enumerate(active.choices):
                    text = choice.settled_text(active.request.stop_strings)
                    for event in _new_events(active, form, index, text, choice.reasoning_so_far):
                        yield event
        await waiting
        for index, choice in enumerate(active.choices):
            text = active.content(choice)
            for event in _new_events(active, form, index, text, choice.reasoning, is_last=True):
                yield event
        for event in form.last_events(active):
            yield event
    except Exception as error:  # noqa: BLE001 - reported to the client, whatever it is
        for event in form.error_events(error):
            yield event
    finally:
        waiting.cancel()
        active.cancel()


def _new_events(
    active: ActiveCompletion,
    form: AnswerForm,
    index: int,
    text: str,
    read_reasoning: Callable[[], str],
    *,
    is_last: bool = False,
) -> Iterator[bytes]:
    """Yield the events with the unsent rest of a choice's text; before its first, its reasoning."""
    choice = active.choices[index]
    more = choice.unsent(text)
    if (more or is_last) and (reasoning := choice.unsent_reasoning(read_reasoning)):
        yield from form.reasoning_events(active, index, reasoning)
    if more:
        yield from form.text_events(active, index, more)
