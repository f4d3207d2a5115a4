"""Anthropic's Messages API, ``POST /v1/messages``: request bodies as chats, and answers of turns.

A request is converted to a chat request, so its tokens are those of the same conversation in
OpenAI's form. The model's message is returned as content blocks, which the next request converts
back to the same message. https://docs.anthropic.com/en/api/messages, and the types of the
``anthropic`` package.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from tidegate.serving.http.errors import AnthropicErrors, ApiError
from tidegate.serving.http.scaffold import stream_event
from tidegate.serving.openai.answers import ActiveCompletion, AnswerForm
from tidegate.serving.openai.requests import (
    HOSTED_TOOL_DROPPED,
    ChatRequest,
    refuse_fields,
    warn_dropped,
)

TOOL_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's word for each ``type`` of a ``tool_choice`` but ``tool``."""


BILLING_HEADER = "x-anthropic-billing-header:"
"""Beginning of the system block in which Claude Code writes its version and a check sum. The block
is left out, because it may change with each request, which would begin a new row."""

HOSTED_TOOLS = re.compile(r"[a-z0-9_]+_20\d{6}|mcp_toolset")
"""Kinds of tools that run at Anthropic, or that only its models are trained to call."""


class ToolChoice(msgspec.Struct, kw_only=True):
    """``tool_choice`` of a request."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """``output_config`` of a request."""

    effort: str | None = None
    format: dict[str, Any] | None = None
    """Of structured outputs."""


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/messages``.

    ``metadata``, ``service_tier``, ``cache_control`` and the like are ignored, because they have no
    meaning for an engine. ``thinking.budget_tokens`` has no effect. No edit of
    ``context_management`` is applied, which the answer says as Anthropic's does.
    """

    max_tokens: int
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """Former name of ``output_config.format``."""

    context_management: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}

    def chat(self) -> ChatRequest:
        """Return the request as a chat request.

        Raises:
            ApiError: a field or a content block can't be honoured.
        """
        refuse_fields(self, self.REFUSED)
        messages = chat_messages(self.messages, self.system)
        choice = self.tool_choice or ToolChoice(type="auto")
        is_forced = choice.type == "tool"
        if not is_forced and choice.type not in TOOL_CHOICES:
            why = f"tool_choice.type is auto, any, tool or none, got {choice.type!r:.80}"
            raise ApiError(400, why, param="tool_choice")
        form = {"type": "function", "function": {"name": choice.name}}
        config = self.output_config or OutputConfig()
        return ChatRequest(
            model=self.model,
            messages=messages,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            tools=_tools(self.tools),
            tool_choice=form if is_forced else TOOL_CHOICES[choice.type],
            parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
            response_format=_response_format(config.format or self.output_format),
            reasoning_effort=config.effort,
            chat_template_kwargs=self._thinking(),
            # An assistant's message at the end is the beginning of the answer.
            continue_final_message=messages[-1]["role"] == "assistant" or None,
        )

    def _thinking(self) -> dict[str, Any] | None:
        if self.thinking is None:
            return None
        kind = self.thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            why = f"thinking.type is enabled, adaptive or disabled, got {kind!r:.80}"
            raise ApiError(400, why, param="thinking")
        return {"enable_thinking": kind != "disabled"}


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """Return the chat request whose prompt is counted."""
        return MessagesRequest(
            max_tokens=1,
            messages=self.messages,
            system=self.system,
            tools=self.tools,
            tool_choice=self.tool_choice,
            thinking=self.thinking,
        ).chat()


# ---------------------------------------------------------------- requests


def chat_messages(
    messages: list[dict[str, Any]], system: str | list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. A tool's results, parts of the user's messages there, are
    messages of their own here.

    Raises:
        ApiError: a content block is of an unsupported kind, or there is no message.
    """
    if not messages:
        raise ApiError(400, "messages must not be empty", param="messages")
    chat: list[dict[str, Any]] = []
    if system:
        parts = [_text_part(system)] if isinstance(system, str) else system
        texts = [_block_text(block, "system") for block in parts]
        text = "\n\n".join(text for text in texts if not text.startswith(BILLING_HEADER))
        chat.append({"role": "system", "content": text})
    for number, message in enumerate(messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{number}]"
        if role not in ("user", "assistant", "system") or not isinstance(content, str | list):
            raise ApiError(400, f"{where} needs a role and content", param="messages")
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
        elif role == "assistant":
            chat.append(_assistant_message(content, where))
        else:
            chat += _user_messages(role, content, where)
    if not chat:
        raise ApiError(400, "messages must have content", param="messages")
    return chat


def _assistant_message(blocks: list[Any], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match _kind(block, where):
            case "text":
                texts.append(_block_text(block, where))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass  # readable by its author alone
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case kind:
                raise _unserved(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(role: str, blocks: list[Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield a message for each tool's result, and one for the blocks between two results."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if _kind(block, where) != "tool_result":
            parts += _parts(block, where)
            continue
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        content = block.get("content") or ""
        if not isinstance(content, str):
            content = _listed(content, where)
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    if parts:
        yield {"role": role, "content": parts}


def _parts(block: Any, where: str) -> list[dict[str, Any]]:
    match _kind(block, where):
        case "text":
            return [_text_part(_block_text(block, where))]
        case "image":
            source = _source(block)
            url = source.get("url")
            if source.get("type") == "base64":
                url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return [{"type": "image_url", "image_url": {"url": url}}]
        case "document":
            return [*_heading(block, "title", "context"), *_document(block, where)]
        case "search_result":
            return [*_heading(block, "title", "source"), *_listed(block.get("content"), where)]
        case kind:
            raise _unserved(kind, where)


def _heading(block: Mapping[str, Any], *fields: str) -> list[dict[str, Any]]:
    """Return these fields of a block as lines of text, if it has them."""
    given = [block[field] for field in fields if block.get(field)]
    return [_text_part("".join(f"{line}\n" for line in given))] if given else []


def _document(block: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the text and images of a document.

    Raises:
        ApiError: it is a PDF or a file kept by the provider.
    """
    source = _source(block)
    match source.get("type"):
        case "text" if isinstance(source.get("data"), str):
            return [_text_part(source["data"])]
        case "content":
            return _listed(source.get("content"), where)
        case kind:
            why = (
                f"{where} has a document whose source is of type {kind!r:.80}: text and content "
                f"are served; convert PDFs to text"
            )
            raise ApiError(400, why, param="messages")


def _source(block: Mapping[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    return source if isinstance(source, dict) else {}


def _listed(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text_part(content)]
    blocks = content if isinstance(content, list) else []
    return [part for each in blocks for part in _parts(each, where)]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise ApiError(400, f"{where} has a content block without a type", param="messages")
    return kind


def _block_text(block: Any, where: str) -> str:
    text = block.get("text") if isinstance(block, dict) else None
    if not isinstance(text, str):
        raise ApiError(400, f"{where} has a text block without text", param="messages")
    return text


def _unserved(kind: str, where: str) -> ApiError:
    why = f"{where} has a content block of type {kind!r:.80}, which is not served: leave it out"
    return ApiError(400, why, param="messages")


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools in OpenAI's form; those that run on Anthropic's servers are left out.

    Raises:
        ApiError: a tool is of an unknown kind.
    """
    if tools is None:
        return None
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and HOSTED_TOOLS.fullmatch(kind):
            warn_dropped(kind, HOSTED_TOOL_DROPPED)
            continue
        if kind not in (None, "custom"):
            why = f"tools[{number}] has type {kind!r:.80}, which is not served: leave it out"
            raise ApiError(400, why, param="tools")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        if tool.get("description"):
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    return functions


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    return {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}


# ---------------------------------------------------------------- answers


class MessagesForm(AnswerForm):
    """The answer to a Messages request: content blocks, whole or as named events."""

    def __init__(self, request: MessagesRequest, active: ActiveCompletion) -> None:
        super().__init__(active)
        no_edits: dict[str, Any] = {"context_management": {"applied_edits": []}}
        self._edits = {} if request.context_management is None else no_edits
        """Edits of the context that the answer reports: none, if the request asked for some."""
        self._has_text_block = False
        """Whether the stream has begun the block of the turn's text."""
        self._has_thinking_block = False
        """Whether the stream has sent a block of the turn's reasoning."""

    @override
    def body(self) -> dict[str, Any]:
        (choice,) = self.active.choices
        turn = choice.turn.result()
        text = self.active.content(choice)
        content: list[dict[str, Any]] = []
        if (reasoning := choice.reasoning()) and self._shows_thinking:
            content.append(_thinking_block(reasoning))
        content += [{"type": "text", "text": text}] if text else []
        content += _tool_uses(turn.tool_calls)
        return {
            **self._head(),
            "content": content,
            **self._stop(),
            **self._edits,
            "usage": {"input_tokens": choice.prompt_tokens, "output_tokens": len(turn.token_ids)},
            "weight_versions": self.active.weight_versions(turn),
        }

    @override
    def first_events(self) -> Iterator[bytes]:
        usage = {"input_tokens": self.active.choices[0].prompt_tokens, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head(), "content": [], **stop, "usage": usage}
        yield _event({"type": "message_start", "message": message})

    def reasoning_events(self, index: int, reasoning: str) -> Iterator[bytes]:
        """Yield a block of its own, if the client has asked for thinking."""
        if not self._shows_thinking:
            return
        self._has_thinking_block = True
        delta = {"type": "thinking_delta", "thinking": reasoning}
        yield from _block_events(0, _thinking_block(""), delta)

    def text_events(self, index: int, text: str) -> Iterator[bytes]:
        """Yield the block's start before its first text, and the text."""
        block = int(self._has_thinking_block)
        if not self._has_text_block:
            self._has_text_block = True
            yield _block_start(block, {"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": text}
        yield _event({"type": "content_block_delta", "index": block, "delta": delta})

    def last_events(self) -> Iterator[bytes]:
        """Yield the tool calls, each in a block, and the message's end."""
        blocks = int(self._has_thinking_block)
        if self._has_text_block:
            yield _event({"type": "content_block_stop", "index": blocks})
            blocks += 1
        turn = self.active.choices[0].turn.result()
        for index, use in enumerate(_tool_uses(turn.tool_calls), start=blocks):
            written = msgspec.json.encode(use["input"]).decode()
            delta = {"type": "input_json_delta", "partial_json": written}
            yield from _block_events(index, {**use, "input": {}}, delta)
        usage = {"output_tokens": len(turn.token_ids)}
        yield _event(
            {
                "type": "message_delta",
                "delta": self._stop(),
                **self._edits,
                "usage": usage,
                "weight_versions": self.active.weight_versions(turn),
            }
        )
        yield _event({"type": "message_stop"})

    @override
    def error_events(self, error: Exception) -> Iterator[bytes]:
        form = AnthropicErrors()
        yield _event(form.body(form.answer_to(error)))

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.active.name}",
            "type": "message",
            "role": "assistant",
            "model": self.active.request.model or "policy",
        }

    @property
    def _shows_thinking(self) -> bool:
        """Whether the client has asked for the reasoning, by ``thinking``."""
        chat = self.active.request
        options = chat.chat_template_kwargs if isinstance(chat, ChatRequest) else None
        return bool((options or {}).get("enable_thinking"))

    def _stop(self) -> dict[str, Any]:
        turn = self.active.choices[0].turn.result()
        if turn.tool_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if turn.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        stops = self.active.request.stop_strings
        if found := [(at, stop) for stop in stops if (at := turn.text.find(stop)) >= 0]:
            return {"stop_reason": "stop_sequence", "stop_sequence": min(found)[1]}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _event(body: Mapping[str, Any]) -> bytes:
    return stream_event(body, name=body["type"])


def _block_start(index: int, block: Mapping[str, Any]) -> bytes:
    return _event({"type": "content_block_start", "index": index, "content_block": block})


def _block_events(
    index: int, block: Mapping[str, Any], delta: Mapping[str, Any]
) -> Iterator[bytes]:
    yield _block_start(index, block)
    yield _event({"type": "content_block_delta", "index": index, "delta": delta})
    yield _event({"type": "content_block_stop", "index": index})


def _thinking_block(reasoning: str) -> dict[str, Any]:
    """Return a block of reasoning, without a signature."""
    return {"type": "thinking", "thinking": reasoning, "signature": ""}


def _tool_uses(calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in calls
    ]
