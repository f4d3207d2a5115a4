"""Chat conversations over token contexts: appends only the tokens after the model's own turns.

``Episode.generate(messages=…)`` and the OpenAI gateway use :class:`Conversation`. An agent sends
all messages each time. Rendering and tokenising all of them would give other tokens than the model
generated, so earlier turns keep the engine's token ids, and only what the chat template adds after
them (the end of the turn, observations, the next header) is appended. If the template or the agent
changes an earlier message, the episode forks, and the new row records why. Conversations are
recognised by digests of messages in a normal form.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec
from msgspec.structs import replace

from tidegate.errors import ChatRefused
from tidegate.orchestrator.episodes.chat_template import (
    PLACEHOLDER,
    PLAIN_RENDERING,
    ChatRendering,
    ChatTemplate,
    Message,
    read_chat_template,
)
from tidegate.orchestrator.episodes.forced_calls import Choice, forced_call, is_free
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.media_parts import (
    KINDS,
    media_of,
    plain_part,
    refuse_if_written_out,
    text_of,
)
from tidegate.orchestrator.episodes.model_files import BREAK, ModelFiles
from tidegate.orchestrator.episodes.tool_calls import (
    OPEN_REASONING,
    ParsedReply,
    ReplyFormat,
    end_of_call,
    resembles_call,
    with_well_formed_texts,
)
from tidegate.transport.media import Media
from tidegate.transport.sampling import LogitsProcessor

HARMONY_CALL_END = "<|call|>"
"""Token that ends a turn of gpt-oss with a tool call."""

_encoder = msgspec.json.Encoder(order="sorted", enc_hook=repr)

KEPT_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
"""Fields that templates read; all other fields are dropped."""


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Return messages in normal form.

    Raises:
        ChatRefused: they are no conversation of texts and media.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ChatRefused("messages must be a list of at least one message")
    return [_plain(message, number) for number, message in enumerate(messages)]


def _plain(message: object, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatRefused(f"messages[{number}] must be an object with a role, got {message!r:.80}")
    plain = {k: message[k] for k in KEPT_FIELDS if message.get(k) is not None}
    plain["content"] = _text(plain.get("content", ""), number)
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = plain_calls(calls, number)
    cleaned: dict[str, Any] = with_well_formed_texts(plain)
    return cleaned


def _text(content: object, number: int) -> str | list[dict[str, Any]]:
    """Return a string; or a list of parts if there are media in it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatRefused(
            f"messages[{number}].content must be text, got a {type(content).__name__}"
        )
    parts = [_part(part, number) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: object, number: int) -> dict[str, Any]:
    if isinstance(part, Mapping):
        if isinstance(text := part.get("text"), str):
            return {"type": "text", "text": text}
        if part.get("type") in KINDS:
            return plain_part(part, f"a part of messages[{number}]")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ChatRefused(
        f"messages[{number}] has a part of type {kind!r}; there are text, {', '.join(KINDS)}"
    )


def plain_calls(calls: object, number: int) -> list[dict[str, Any]]:
    """Return the tool calls of message ``number`` with arguments as objects, as templates take
    them.

    Raises:
        ChatRefused: they are in another form.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise ChatRefused(f"messages[{number}].tool_calls must be a list")
    plain: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatRefused(f"messages[{number}].tool_calls has one without function.name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # else left as it was written
                arguments = json.loads(arguments)
        entry = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        plain.append({"id": call["id"], **entry} if isinstance(call.get("id"), str) else entry)
    return plain


def prefix_digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return a digest of each prefix of the conversation; equal digests mean equal messages."""
    digest = hashlib.blake2b(digest_size=16)
    digests: list[bytes] = []
    for message in messages:
        content = message["content"]
        stripped = {**message, "content": content.strip() if isinstance(content, str) else content}
        digest.update(_encoder.encode(stripped) + b"\0")
        digests.append(digest.digest())
    return digests


Tools = Sequence[Mapping[str, Any]]
"""Tool definitions as in OpenAI's API: ``{"type": "function", "function": {"name": …, …}}``."""

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function in a thread, and returns its result."""


@dataclass(frozen=True, slots=True)
class RenderCache:
    """Results computed in a thread ahead of :meth:`Conversation.prepare`, for long requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Token ids by the text that they encode."""
    rendered: dict[bytes, str] = field(default_factory=dict)
    """Rendered prompts by :func:`_digest` of what the template gets."""


EMPTY_CACHE = RenderCache()


@dataclass(frozen=True, slots=True)
class _Request:
    """Input of a chat template for one turn: messages, tools and options."""

    messages: list[dict[str, Any]]
    tools: Tools | None
    rendering: ChatRendering
    cache: RenderCache


log = logging.getLogger("tidegate")


class ContextRow(Protocol):
    """One context of an episode: its own, or a branch's. :class:`Episode` implements it."""

    @property
    def rollout_id(self) -> int:
        """The row's rollout number, unique in the run."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """A copy of the context's token ids."""
        ...

    @property
    def num_tokens(self) -> int:
        """Length of the context in tokens."""
        ...

    @property
    def context_tokens_max(self) -> int:
        """Length that no context of a turn may reach."""
        ...

    @property
    def media(self) -> list[Media]:
        """Media of the context, in order of their positions."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no turn is being generated in this row, and none is reserved."""
        ...

    def reserve(self) -> None:
        """Keep this row for a turn that is about to be generated."""

    def append(self, content: str | Sequence[int], *, media: Sequence[Media] = ()) -> None:
        """Append given tokens to the context."""

    def branch(self, context: Sequence[int], reason: str, *, media: Sequence[Media] = ()) -> Self:
        """Start another row with its own context; ``reason`` is recorded."""
        ...

    @property
    def generate(self) -> Callable[..., Awaitable[GeneratedTurn]]:
        """Generate a turn from the context; takes the options of :meth:`Episode.generate`."""
        ...


Row = TypeVar("Row", bound=ContextRow)


@dataclass(frozen=True, slots=True)
class _GeneratedMessage(Generic[Row]):
    """A turn that the model generated, with the context before it."""

    row: Row
    tokens: int
    """Length of the row's context up to the end of the turn."""
    prompt: str
    """Rendered messages before the turn, which the model continued."""
    shown: str
    """Text up to the first tool call, or all of it; a template must show it unchanged."""
    reasoning: str
    has_tool_calls: bool
    call_end: str
    """Text that has stopped a turn of a single call; else empty."""


@dataclass(frozen=True, slots=True)
class _Continuation(Generic[Row]):
    """Where messages continue or begin a row; nothing is appended yet."""

    generated: _GeneratedMessage[Row] | None
    """Turn that the messages continue from; None if they begin a row."""
    text: str
    """Text that is to be appended to the row: what the template renders after its tokens."""
    media: list[Media]
    why: str
    """Fork reason, if the messages begin a row beside others."""


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Row]):
    """A row whose next turn answers these messages."""

    row: Row
    messages: list[dict[str, Any]]
    prompt: str
    continues_final_message: bool
    reply_format: ReplyFormat
    """How the turn's text is read."""
    forced: LogitsProcessor | None = None
    """Logits processor that constrains the turn to a tool call."""
    call_end: str = ""
    """Text at which a turn of a single call stops; empty if it stops by itself."""


class Conversation(Generic[Row]):
    """Generates turns for messages. Several calls may run at once, on any number of message
    histories: each that continues from the end of an earlier turn stays in that turn's row."""

    def __init__(self, episode: Row, model: ModelFiles) -> None:
        """Raises ModelError if the model has no chat template."""
        self._episode = episode
        self._model = model
        self._template = read_chat_template(model.path)
        self._generated: dict[bytes, _GeneratedMessage[Row]] = {}
        """Generated turns, by digest of the messages up to and including each."""
        self._generated_without_reasoning: dict[bytes, _GeneratedMessage[Row]] = {}
        """Generated turns with reasoning, by digest of the messages without any reasoning: clients
        may leave it out."""
        self._requested_digests: set[bytes] = set()
        """Digests of all message prefixes requested so far."""
        self._requested_messages: set[bytes] = set()
        """Digests of all messages requested so far, each by itself."""
        self.forks: Counter[str] = Counter()
        """Number of rows begun beside the first, by reason."""

    async def generate(
        self,
        messages: object,
        tools: Tools | None,
        tool_choice: Choice = None,
        *,
        parallel_tool_calls: bool = True,
        **options: Any,
    ) -> GeneratedTurn:
        """Generate the next message; ``options`` are those of :meth:`Episode.generate`.

        Raises:
            ChatRefused: the chat template has no prompt for these messages.
        """
        prepared = self.prepare(
            messages, tools, tool_choice, parallel_tool_calls=parallel_tool_calls
        )
        return await self.generate_from(prepared, options)

    @property
    def renders_slowly(self) -> bool:
        """Whether even short messages are better rendered with :meth:`read_ahead`."""
        return self._template.is_slow

    async def read_ahead(
        self,
        messages: object,
        tools: Tools | None,
        rendering: ChatRendering = PLAIN_RENDERING,
        *,
        in_thread: InThread = asyncio.to_thread,
    ) -> RenderCache:
        """Render and tokenise in a thread what :meth:`prepare` would on the event loop.

        Raises:
            ChatRefused: the chat template has no prompt for these messages.
            ContextFull: they are longer than any context.
        """
        cache = RenderCache()

        def work() -> None:
            request = self._request(messages, tools, rendering, cache)
            prompt = self._rendered(request, request.messages)
            digests = prefix_digests(request.messages)
            continuation = self._continuation_of(request, digests, prompt)
            cache.tokens[continuation.text] = self._encoded(continuation)

        await in_thread(work)
        return cache

    def prepare(
        self,
        messages: object,
        tools: Tools | None,
        tool_choice: Choice = None,
        *,
        parallel_tool_calls: bool = True,
        rendering: ChatRendering = PLAIN_RENDERING,
        cache: RenderCache = EMPTY_CACHE,
    ) -> "Prepared[Row]":
        """Append what these messages add to a row, and reserve the row for the next turn.

        Unless ``parallel_tool_calls``, the turn stops at the end of its first tool call.
        ``cache``: results of :meth:`read_ahead`.

        Raises:
            ChatRefused: the chat template has no prompt for these messages, or no call can be
                forced.
            ContextFull: the messages are longer than any context.
        """
        if tool_choice == "none":
            tools = None
        schemas = tool_schemas(tools)
        request = self._request(messages, tools, rendering, cache)
        plain = request.messages
        prompt = self._rendered(request, plain)
        forced, call_end = forced_by(tool_choice, tools, self._template, prompt), ""
        if forced is None and schemas and not parallel_tool_calls:
            call_end = self._end_of_single_call()
        refuse_if_written_out(prompt, plain)
        row = self._row_for(request, prompt)
        row.reserve()
        continues = rendering.continue_final_message
        reply_format = reply_format_of(self._template, schemas, _unbroken(prompt))
        return Prepared(row, plain, prompt, continues, reply_format, forced, call_end)

    def _end_of_single_call(self) -> str:
        """Return the text at which a turn of one call stops; empty if it stops by itself.

        Raises:
            ChatRefused: nothing ends a call of this model before the next one.
        """
        end = end_of_call(self._template.source)
        if end is None:
            raise ChatRefused(
                "parallel_tool_calls=False can't be honoured for this model, which writes all "
                "calls of a turn as one list; leave it out"
            )
        return end

    def _request(
        self, messages: object, tools: Tools | None, rendering: ChatRendering, cache: RenderCache
    ) -> _Request:
        """Return a request with its messages in normal form, without a system message that the
        template writes by itself, and with the reasoning that the client has omitted."""
        plain = self._plain(messages)
        request = _Request(plain, self._escaped(tools), rendering, cache)
        if self._begins_with_default(request):
            del plain[0]
        if self._generated_without_reasoning:
            for message, digest in zip(plain, prefix_digests(_unreasoned(plain)), strict=True):
                generated = self._generated_without_reasoning.get(digest)
                if generated is not None and "reasoning_content" not in message:
                    message["reasoning_content"] = self._escaped(generated.reasoning)
        return request

    def _plain(self, messages: object) -> list[dict[str, Any]]:
        """Return messages in normal form, without the text of special tokens."""
        return [self._escaped_message(each) for each in plain_messages(messages)]

    def _begins_with_default(self, request: _Request) -> bool:
        """Whether the prompt is the same without the system message."""
        first, *others = request.messages
        if not others or first["role"] != "system":
            return False
        if not self._template.may_write(text_of(first["content"])):
            return False  # most are not, and cost no second rendering
        try:
            return self._rendered(request, request.messages) == self._rendered(request, others)
        except ChatRefused:
            return False

    def _escaped_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a plain message whose text has no special token, except in references to media."""
        content = message["content"]
        if isinstance(content, list):
            content = [
                {**part, "text": self._escaped(part["text"])} if part["type"] == "text" else part
                for part in content
            ]
        else:
            content = self._escaped(content)
        others = {k: v for k, v in message.items() if k not in ("role", "content")}
        return {"role": message["role"], "content": content, **self._escaped(others)}

    def _escaped(self, value: Any) -> Any:
        escaper = self._model.text_escaper
        return value if escaper is None else escaper.escape(value)

    async def generate_from(
        self, prepared: "Prepared[Row]", options: Mapping[str, Any]
    ) -> GeneratedTurn:
        """Generate the next message in a prepared row."""
        row, messages = prepared.row, prepared.messages
        if prepared.forced is not None:
            own = options.get("logits_processors") or ()
            options = {**options, "logits_processors": [*own, prepared.forced]}
        stops = self._stopping_at(prepared.call_end, options) if prepared.call_end else options
        turn = await row.generate(**stops)
        text = reply_content(self._model, turn, options)
        reply = prepared.reply_format.parse(text)
        schemas = prepared.reply_format.tools
        if schemas and (reply.tool_calls or resembles_call(text, schemas)):
            self._model.call_counts.count(text, is_parsed=bool(reply.tool_calls))
        turn.message = reply_message(reply, f"{row.rollout_id}-{turn.number}")
        turn.invalid_tool_calls = reply.invalid_tool_calls
        [plain] = plain_messages([turn.message])
        message = self._escaped_message(plain)
        if prepared.continues_final_message:
            *messages, begun = messages
            message["content"] = text_of(begun["content"]) + message["content"]
        has_calls = bool(reply.tool_calls)
        generated = _GeneratedMessage(
            row,
            row.num_tokens,
            prepared.prompt,
            reply.shown,
            reply.reasoning,
            has_calls,
            prepared.call_end if has_calls and self._is_open_at(row) else "",
        )
        whole = [*messages, message]
        self._generated[prefix_digests(whole)[-1]] = generated
        if reply.reasoning:
            key = prefix_digests(_unreasoned(whole))[-1]
            self._generated_without_reasoning[key] = generated
        return turn

    def _stopping_at(self, call_end: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return options that stop a turn at the end of its first tool call."""
        token_id = self._model.tokenizer.token_to_id(call_end)
        if token_id is None:
            stops = [*(options.get("stop_strings") or ()), call_end]
            return {**options, "stop_strings": stops}
        own = options.get("stop_token_ids")
        stop_ids = [*(self._model.stop_token_ids if own is None else own), token_id]
        return {**options, "stop_token_ids": stop_ids}

    def _is_open_at(self, row: Row) -> bool:
        """Whether a row ends without a token that ends turns."""
        return row.token_ids[-1] not in self._model.stop_token_ids

    async def prompt_tokens(
        self,
        messages: object,
        tools: Tools | None,
        rendering: ChatRendering = PLAIN_RENDERING,
        *,
        in_thread: InThread | None = None,
    ) -> list[int]:
        """Return these messages' tokens as a new context; ``in_thread`` runs the computation."""

        def encoded() -> list[int]:
            request = self._request(messages, tools, rendering, EMPTY_CACHE)
            ids = self._model.encode_prompt(self._rendered(request, request.messages))
            media = media_of(request.messages)
            images = self._model.images
            return images.expand(ids, media, 0)[0] if media and images is not None else ids

        if in_thread is None:
            in_thread = asyncio.to_thread
        ids: list[int] = await in_thread(encoded)
        return ids

    def _rendered(self, request: _Request, messages: list[dict[str, Any]]) -> str:
        """Return the prompt of these messages, with the tools and options of a request."""
        rendered = request.cache.rendered
        if request.cache is EMPTY_CACHE:
            return self._template.prompt(messages, request.tools, request.rendering)
        digest = _digest(messages, request.tools, request.rendering)
        if digest not in rendered:
            rendered[digest] = self._template.prompt(messages, request.tools, request.rendering)
        return rendered[digest]

    # ------------------------------------------------------------ continue or begin a row

    def _row_for(self, request: _Request, prompt: str) -> Row:
        digests = prefix_digests(request.messages)
        continuation = self._continuation_of(request, digests, prompt)
        self._note_new(request.messages, digests)
        ids = request.cache.tokens.get(continuation.text)
        if ids is None:
            ids = self._encoded(continuation)
        if continuation.generated is not None:
            return self._continue_row(continuation.generated, ids, continuation.media)
        return self._begin_row(ids, continuation.why, continuation.media)

    def _encoded(self, continuation: _Continuation[Row]) -> list[int]:
        """Return the tokens of a continuation's text; raises ContextFull if they are too many."""
        generated = continuation.generated
        return self._model.encode_prompt(
            continuation.text,
            tokens_before=0 if generated is None else generated.tokens,
            tokens_max=self._episode.context_tokens_max,
        )

    def _note_new(self, messages: list[dict[str, Any]], digests: list[bytes]) -> None:
        """Keep the digests of new messages, and count those of which text was escaped."""
        escaper = self._model.text_escaper
        for message, digest in zip(messages, digests, strict=True):
            if digest in self._requested_digests:
                continue
            self._requested_digests.add(digest)
            self._requested_messages.update(prefix_digests([message]))
            if escaper is not None:
                escaper.escaped += BREAK in text_of(message["content"])

    def _continuation_of(
        self, request: _Request, digests: list[bytes], prompt: str
    ) -> _Continuation[Row]:
        messages, why = request.messages, ""
        cut = self._generated.get(digests[-1]) if request.rendering.continue_final_message else None
        if (
            cut is not None
            and self._is_open(cut)
            and _unbroken(prompt) == _unbroken(cut.prompt + cut.shown)
        ):
            return _Continuation(cut, "", [], "")
        for index in range(len(messages) - 2, -1, -1):
            generated = self._generated.get(digests[index])
            if generated is None:
                continue
            appended = self._appended_text(generated, request, index + 1, prompt)
            if appended is not None:
                return _Continuation(generated, appended, media_of(messages[index + 1 :]), "")
            why = (
                "template_rewrote: the chat template, or other tools, show what was before "
                f"message {index + 1} otherwise than the model saw and generated it"
            )
            break
        why = why or self._fork_reason(messages, digests)
        return _Continuation(None, prompt, media_of(messages), why)

    def _is_open(self, generated: _GeneratedMessage[Row]) -> bool:
        """Whether a turn ended without a stop token, so that its message can be continued."""
        return generated.row.token_ids[generated.tokens - 1] not in self._model.stop_token_ids

    def _continue_row(
        self, generated: _GeneratedMessage[Row], appended: list[int], media: list[Media]
    ) -> Row:
        row = generated.row
        last = row.token_ids[generated.tokens - 1 : generated.tokens]
        if appended[:1] == last:  # the engine has sampled the end of the turn itself
            appended = appended[1:]
        if row.is_idle and row.num_tokens == generated.tokens:
            row.append(appended, media=media)
            return row
        context = [*row.token_ids[: generated.tokens], *appended]
        before = [each for each in row.media if each.token_offset < generated.tokens]
        media = [*before, *(replace(each, position=generated.tokens) for each in media)]
        why = "resampled: the row continues differently after these messages"
        return self._fork(row, context, why, media)

    def _begin_row(self, context: list[int], why: str, media: list[Media]) -> Row:
        episode = self._episode
        if episode.is_idle and not episode.num_tokens:
            episode.append(context, media=media)
            return episode
        return self._fork(episode, context, why, media)

    def _fork(self, row: Row, context: list[int], why: str, media: list[Media]) -> Row:
        self.forks[why.partition(":")[0]] += 1
        branch = row.branch(context, why, media=media)
        log.info("rollout=%d forks into %d, %s", row.rollout_id, branch.rollout_id, why)
        return branch

    def _fork_reason(self, messages: list[dict[str, Any]], digests: list[bytes]) -> str:
        """Return the fork reason of these messages, which continue no earlier turn."""
        begin = sum(digest in self._requested_digests for digest in digests)
        if begin == len(digests):
            return "resampled: the same messages were requested before"
        for number, message in enumerate(messages[begin:], begin):
            if prefix_digests([message])[0] in self._requested_messages:
                return (
                    f"agent_rewrote: messages from number {begin} on have changed; number {number} "
                    "is one of before"
                )
        if begin:
            return f"agent_rewrote: messages from number {begin} on have changed"
        return "new_conversation: no message of before is in it"

    def _appended_text(
        self,
        generated: _GeneratedMessage[Row],
        request: _Request,
        start: int,
        prompt: str,
    ) -> str | None:
        """Return the text that the template adds after a turn; None if it changed the text before.

        A second rendering with other text in the first message after the turn shows where that
        message's own text begins: the turn's end is the last end-of-turn mark before it.
        """
        if not prompt.startswith(generated.prompt):
            return None
        begin = len(generated.prompt)
        end_of_turn = self._template.end_of_turn.strip() or self._template.end_of_turn
        if self._template.is_harmony:
            if not generated.has_tool_calls:
                return None  # the template ends a finished answer differently
            end_of_turn = HARMONY_CALL_END
        try:
            if end_of_turn:
                common = _common(prompt, self._with_other_text(request, start))
                end = common.rfind(end_of_turn, begin)
            else:
                end = self._end_without_mark(request, start, prompt)
        except ChatRefused:
            return None
        rendered, shown = _squeezed(prompt[begin:end]), _squeezed(generated.shown)
        is_same = rendered.startswith(shown) if generated.has_tool_calls else rendered == shown
        if end < begin or not is_same:
            return None
        if generated.call_end:  # the model was stopped there: what closes its calls is given
            after_call = prompt.rfind(generated.call_end, begin, end)
            if after_call < 0:
                return None
            end = after_call + len(generated.call_end)
        return prompt[end:]

    def _with_other_text(self, request: _Request, start: int) -> str:
        """Return the prompt with another text in message ``start``."""
        messages, first = request.messages, request.messages[start]
        text = text_of(first["content"])
        other = PLACEHOLDER if text.lstrip()[:1] != PLACEHOLDER[0] else "0"
        changed = [*messages[:start], {**first, "content": other}, *messages[start + 1 :]]
        return self._rendered(request, changed)

    def _end_without_mark(self, request: _Request, start: int, prompt: str) -> int:
        """Return where message ``start`` begins in the prompt of a template that ends no turn,
        such as GLM's, where the next message's header ends it; -1 if the template changes
        earlier text."""
        so_far = self._template.render(
            request.messages[:start],
            request.tools,
            add_generation_prompt=False,
            options=request.rendering.names,
        )
        return len(so_far) if prompt.startswith(so_far) else -1


def _digest(messages: list[dict[str, Any]], tools: Tools | None, rendering: ChatRendering) -> bytes:
    """Return a digest of everything that a chat template gets; equal digests render alike."""
    given = msgspec.json.encode((messages, tools, rendering), enc_hook=repr)
    return hashlib.blake2b(given, digest_size=16).digest()


def _unreasoned(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: m[k] for k in m if k != "reasoning_content"} for m in messages]


def tool_schemas(tools: object) -> dict[str, Any]:
    """Return the JSON schema of the parameters of each tool in OpenAI's form, by name.

    Raises:
        ChatRefused: they are in another form.
    """
    if tools is None:
        return {}
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise ChatRefused("tools must be a list")
    schemas: dict[str, Any] = {}
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatRefused(f"tools[{number}] must have a function with a name")
        schemas[function["name"]] = function.get("parameters") or {}
    return schemas


def reply_format_of(template: ChatTemplate, schemas: Mapping[str, Any], prompt: str) -> ReplyFormat:
    """Return how the text that continues ``prompt`` is read; ``schemas`` as :func:`tool_schemas`
    returns them."""
    return ReplyFormat(
        schemas,
        template.separates_reasoning,
        _is_reasoning_open(prompt),
        template.response_template,
        prompt,
    )


def forced_by(
    choice: Choice, tools: Tools | None, template: ChatTemplate, prompt: str
) -> LogitsProcessor | None:
    """Return the processor that constrains what continues ``prompt`` to a call; None if ``choice``
    forces none.

    Raises:
        ChatRefused: no call can be forced.
    """
    if is_free(choice):
        return None
    is_open = _is_reasoning_open(prompt)
    return forced_call(choice, tools, template.source, is_reasoning_open=is_open)


def _is_reasoning_open(prompt: str) -> bool:
    return prompt.rstrip().endswith(OPEN_REASONING)


def reply_content(model: ModelFiles, turn: GeneratedTurn, options: Mapping[str, Any]) -> str:
    """Return a turn's text without the stop token or stop string that ended it; ``options`` are
    those that the turn was generated with."""
    stops = options.get("stop_token_ids")
    stops = model.stop_token_ids if stops is None else stops
    ids = turn.token_ids
    is_stopped = turn.finish_reason == "stop" and bool(ids)
    if is_stopped and ids[-1] in stops:
        return model.reply_text(ids[:-1])
    text = model.reply_text(ids)
    if not is_stopped:
        return text
    positions = [text.rfind(stop) for stop in options.get("stop_strings") or ()]
    ends = [position for position in positions if position >= 0]
    return text[: min(ends)] if ends else text


def reply_message(reply: ParsedReply, turn_name: str) -> dict[str, Any]:
    """Return a parsed reply as a message of OpenAI's API; ``turn_name`` begins its calls' ids."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id or f"call_{turn_name}-{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for number, call in enumerate(reply.tool_calls)
        ]
    return message


def _common(one: str, other: str) -> str:
    """Return the common prefix, by bisection: a Python loop over a long prompt is slow."""
    length, end = 0, min(len(one), len(other))
    while length < end:
        middle = (length + end + 1) // 2
        if one[length:middle] == other[length:middle]:
            length = middle
        else:
            end = middle - 1
    return one[:length]


def _unbroken(text: str) -> str:
    """Return a text in which no special token's text is broken."""
    return text.replace(BREAK, "")


def _squeezed(text: str) -> str:
    """Remove whitespace, because templates trim messages and break lines around them."""
    return "".join(_unbroken(text).split())


__all__ = ["Conversation", "Message", "Tools"]
