"""OpenAI's Responses API, ``POST /v1/responses``: request bodies as chats, and answers of turns.

``previous_response_id`` continues the conversation of an earlier answer.
https://platform.openai.com/docs/api-reference/responses, and the types of the ``openai`` package.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.serving.http.errors import ApiError, OpenAIErrors
from tidegate.serving.http.scaffold import part_of_body, stream_event
from tidegate.serving.openai.answers import ActiveCompletion, AnswerForm
from tidegate.serving.openai.requests import (
    HOSTED_TOOL_DROPPED,
    ChatRequest,
    refuse_fields,
    warn_dropped,
)
from tidegate.serving.openai.response_store import Message, ResponseStore
from tidegate.serving.openai.token_logprobs import chat_logprobs

_LOGPROBS = "message.output_text.logprobs"

INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""Values of ``include`` that are served; the second has no effect, because answers have no such
content."""

TEXT_PARTS = ("input_text", "output_text", "text")

HOSTED_TOOLS = re.compile(
    r"(web_search|file_search|code_interpreter|image_generation|mcp|computer|tool_search"
    r"|programmatic_tool_calling|local_shell|shell|apply_patch)(_[a-z0-9_]+)?"
)
"""Kinds of tools that run at OpenAI, or that only its models are trained to call; with dates and
the like behind them."""

UNREADABLE_ITEMS = frozenset(
    {
        "compaction",
        "compaction_summary",
        "context_compaction",
        "web_search_call",
        "file_search_call",
        "image_generation_call",
        "mcp_list_tools",
    }
)
"""Input items that only OpenAI can make and read: encrypted text, or what a hosted tool did."""


class TextOptions(msgspec.Struct, kw_only=True):
    """``text`` of a request, which the answer repeats."""

    format: dict[str, Any] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """``reasoning`` of a request, which the answer repeats."""

    effort: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """One item of ``input``: the fields of all kinds that are read."""

    type: str = "message"
    role: str | None = None
    content: str | list[Any] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[Any] | None = None


class GrammarFormat(msgspec.Struct, kw_only=True):
    """``format`` of a custom tool."""

    syntax: str | None = None
    definition: str | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One of the ``tools``: the fields of all kinds that are read."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: GrammarFormat | None = None
    tools: list[Any] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/responses``.

    ``metadata``, ``user`` and the like are ignored, and so are ``text.verbosity``, ``truncation``
    and ``context_management``: a context that is too long is an error in any case.
    """

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    store: bool | None = None
    """False: no later request continues the answer by its id, so it is not kept."""
    stream: bool | None = None

    background: Any = None
    conversation: Any = None
    prompt: Any = None
    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
    }

    def chat(self, earlier: list[Message]) -> ChatRequest:
        """Return the request as a chat request.

        Args:
            earlier: messages up to and including the answer that ``previous_response_id`` names.

        Raises:
            ApiError: a field or an item can't be honoured.
        """
        refuse_fields(self, self.REFUSED)
        unknown = [each for each in self.include or () if each not in INCLUDED]
        if unknown:
            raise ApiError(400, f"include {unknown[0]!r:.80} is not served", param="include")
        text = part_of_body(self.text or {}, TextOptions, "text")
        reasoning = part_of_body(self.reasoning or {}, ReasoningOptions, "reasoning")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        has_logprobs = _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return ChatRequest(
            model=self.model,
            messages=[*system, *earlier, *chat_messages(self.input)],
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=has_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=None if self.tools is None else [tool.function for tool in served_tools(self)],
            tool_choice=_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=reasoning.effort,
            response_format=_response_format(text.format),
            stream=self.stream,
        )


# ---------------------------------------------------------------- requests


def chat_messages(given: str | list[dict[str, Any]]) -> list[Message]:
    """Return input items as messages of the chat completions API.

    There, an assistant's text and its calls are one message; in the Responses API each is an item.

    Raises:
        ApiError: an item is of an unsupported kind, or there is none.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise ApiError(400, "input must not be empty", param="input")
    messages: list[Message] = []
    reasoning = ""
    is_open = False  # whether the last message is an assistant's that calls may join
    for number, each in enumerate(given):
        where = f"input[{number}]"
        item = part_of_body(each, InputItem, where)
        match item.type:
            case "message":
                message = _message(item, where)
            case "function_call" | "custom_tool_call":
                call = _call(item)
                if is_open and not reasoning:
                    messages[-1].setdefault("tool_calls", []).append(call)
                    continue
                message = {"role": "assistant", "content": "", "tool_calls": [call]}
            case "function_call_output" | "custom_tool_call_output":
                output = item.output or ""
                content = output if isinstance(output, str) else _parts(output, where)
                message = {"role": "tool", "tool_call_id": item.call_id, "content": content}
            case "reasoning":
                reasoning += _reasoning_text(item)
                is_open = False
                continue
            case kind if kind in UNREADABLE_ITEMS:
                warn_dropped(kind, "only OpenAI can read such input items")
                continue
            case kind:
                why = f"{where} of type {kind!r:.80} is not served: leave it out"
                raise ApiError(400, why, param="input")
        is_open = message["role"] == "assistant"
        if is_open and reasoning:
            message["reasoning_content"], reasoning = reasoning, ""
        messages.append(message)
    return messages


def _message(item: InputItem, where: str) -> Message:
    role, content = item.role, item.content
    if role not in ("user", "assistant", "system", "developer"):
        raise ApiError(400, f"{where} has role {role!r:.80}", param="input")
    role = "system" if role == "developer" else role
    if not isinstance(content, str):
        content = _parts(content, where)
    return {"role": role, "content": content}


def _parts(parts: list[Any] | None, where: str) -> list[dict[str, Any]]:
    if parts is None:
        raise ApiError(400, f"{where} needs content", param="input")
    return [_part(part, where) for part in parts]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_audio":
        return dict(part)
    why = f"{where} has content of type {kind!r:.80}, which is not served: leave it out"
    raise ApiError(400, why, param="input")


def _call(item: InputItem) -> dict[str, Any]:
    arguments: object = item.arguments or "{}"
    if item.type == "custom_tool_call":
        arguments = {CUSTOM_INPUT: item.input or ""}
    function = {"name": _flat_name(item.namespace, item.name), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _reasoning_text(item: InputItem) -> str:
    parts = item.content or ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


# ---------------------------------------------------------------- tools

CUSTOM_INPUT = "input"
"""Argument of the function that stands for a tool of type ``custom``, which takes one text."""


@dataclass(frozen=True, slots=True)
class ServedTool:
    """A tool of a request, as the model is told of it and as the answer names it."""

    name: str
    namespace: str | None
    is_custom: bool
    function: dict[str, Any]
    """The tool in the form of chat completions."""


def served_tools(request: ResponsesRequest) -> list[ServedTool]:
    """Return the tools that the model may call: functions, custom tools, and those of namespaces.

    A namespace's tools are functions named ``NAMESPACE__NAME``. Hosted tools are left out.

    Raises:
        ApiError: a tool is of an unknown kind, or has no name.
    """
    tools: list[ServedTool] = []
    for number, each in enumerate(request.tools or ()):
        where = f"tools[{number}]"
        tool = part_of_body(each, Tool, where)
        if tool.type != "namespace":
            tools += _served(tool, None, where)
            continue
        for inner_number, each_inner in enumerate(tool.tools or ()):
            inner_where = f"{where}.tools[{inner_number}]"
            inner = part_of_body(each_inner, Tool, inner_where)
            if tool.description and not inner_number:
                # The model reads of the namespace at its first tool.
                inner.description = f"{tool.description}\n\n{inner.description or ''}".rstrip()
            tools += _served(inner, tool.name, inner_where)
    return tools


def _served(tool: Tool, namespace: str | None, where: str) -> list[ServedTool]:
    """Return one tool; none if it is hosted."""
    kind, name = tool.type, tool.name
    if kind is not None and HOSTED_TOOLS.fullmatch(kind):
        warn_dropped(kind, HOSTED_TOOL_DROPPED)
        return []
    if kind not in ("function", "custom") or name is None:
        why = (
            f"{where} has type {kind!r:.80} and name {name!r:.80}: tools of the types function, "
            f"custom and namespace are served, which have names"
        )
        raise ApiError(400, why, param="tools")
    described: dict[str, Any] = {
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    function = {field: value for field, value in described.items() if value is not None}
    if kind == "custom":
        function = _custom_function(tool)
    function = {"name": _flat_name(namespace, name), **function}
    form = {"type": "function", "function": function}
    return [ServedTool(name, namespace, kind == "custom", form)]


def _custom_function(tool: Tool) -> dict[str, Any]:
    """Return a custom tool as a function of one text; a grammar for it is only described."""
    description, form = tool.description or "", tool.format
    if form is not None and form.definition:
        description += f"\n\nThe input follows this {form.syntax} grammar:\n{form.definition}"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
    }
    return {"description": description.strip(), "parameters": parameters}


def _flat_name(namespace: str | None, name: str | None) -> str | None:
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_chosen(each) for each in tools] if isinstance(tools, list) else []
        served = [each for each in named if each is not None]
        allowed = {"mode": choice.get("mode"), "tools": served}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    chosen = _chosen(choice)
    if chosen is None:
        why = f"tool_choice of type {choice.get('type')!r:.80} is not served"
        raise ApiError(400, why, param="tool_choice")
    return chosen


def _chosen(tool: object) -> dict[str, Any] | None:
    """Return the choice of one tool in the form of chat completions; None if it is hosted."""
    if not isinstance(tool, dict) or tool.get("type") not in ("function", "custom"):
        return None
    chosen = part_of_body(tool, InputItem, "tool_choice")
    name = _flat_name(chosen.namespace, chosen.name)
    return {"type": "function", "function": {"name": name}}


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") == "text":
        return None
    return {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}


# ---------------------------------------------------------------- answers


class ResponsesForm(AnswerForm):
    """The answer to a Responses request: output items, whole or as named events."""

    def __init__(
        self, request: ResponsesRequest, store: ResponseStore, active: ActiveCompletion
    ) -> None:
        super().__init__(active)
        self.request, self.store = request, store
        self._sequence = 0
        """Number of the stream's next event."""
        self._has_text_item = self._has_reasoning_item = False

    def body(self) -> dict[str, Any]:
        """Return the whole response, and keep its conversation."""
        turn = self.active.choices[0].turn.result()
        chat = self.active.request
        assert isinstance(chat, ChatRequest)  # made by ResponsesRequest.chat
        given = chat.messages[1:] if self.request.instructions else chat.messages
        if self.request.store is not False:
            self.store.add(self._id, [*given, turn.message or {}])
        is_cut = turn.finish_reason == "length"
        prompt, output = self.active.choices[0].prompt_tokens, len(turn.token_ids)
        return {
            **self._head("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(turn),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + output,
            },
            "weight_versions": self.active.weight_versions(turn),
        }

    def first_events(self) -> Iterator[bytes]:
        """Yield the response without output, as created and as in progress."""
        head = {**self._head("in_progress"), "output": [], "usage": None}
        yield self._event("response.created", response=head)
        yield self._event("response.in_progress", response=head)

    def reasoning_events(self, index: int, reasoning: str) -> Iterator[bytes]:
        """Yield the reasoning as an item of its own."""
        self._has_reasoning_item = True
        item = self._reasoning_item(reasoning)
        begun = {**item, "status": "in_progress", "content": []}
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        yield self._event("response.output_item.added", output_index=0, item=begun)
        yield self._event("response.reasoning_text.delta", delta=reasoning, **place)
        yield self._event("response.reasoning_text.done", text=reasoning, **place)
        yield self._event("response.output_item.done", output_index=0, item=item)

    @property
    def _text_place(self) -> dict[str, Any]:
        index = int(self._has_reasoning_item)
        return {"item_id": f"msg_{self.active.name}", "output_index": index, "content_index": 0}

    def text_events(self, index: int, text: str) -> Iterator[bytes]:
        """Yield the start of the message's item before its first text, and the text."""
        place = self._text_place
        if not self._has_text_item:
            yield from self._begin_text()
        yield self._event("response.output_text.delta", delta=text, logprobs=[], **place)

    def _begin_text(self) -> Iterator[bytes]:
        self._has_text_item = True
        place = self._text_place
        item = {**self._text_item("", []), "status": "in_progress", "content": []}
        at = place["output_index"]
        yield self._event("response.output_item.added", output_index=at, item=item)
        yield self._event("response.content_part.added", part=_text_part("", []), **place)

    def last_events(self) -> Iterator[bytes]:
        """Yield the end of the text, the calls, and the whole response."""
        whole = self.body()
        items = whole["output"]
        sent = int(self._has_reasoning_item)
        if not self._has_text_item and items[sent]["type"] == "message":  # an empty one
            yield from self._begin_text()
        if self._has_text_item:
            place = self._text_place
            part = items[sent]["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **done, **place)
            yield self._event("response.content_part.done", part=part, **place)
            yield self._event("response.output_item.done", output_index=sent, item=items[sent])
            sent += 1
        for index, item in enumerate(items[sent:], start=sent):
            yield from self._call_events(index, item)
        name = "incomplete" if whole["incomplete_details"] else "completed"
        yield self._event(f"response.{name}", response=whole)

    @override
    def error_events(self, error: Exception) -> Iterator[bytes]:
        form = OpenAIErrors()
        about = form.body(form.answer_to(error))["error"]
        yield self._event(
            "error", code=about["code"], message=about["message"], param=about["param"]
        )

    def _call_events(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        is_custom = item["type"] == "custom_tool_call"
        field = "input" if is_custom else "arguments"
        name = f"response.{'custom_tool_call_input' if is_custom else 'function_call_arguments'}"
        place, text = {"item_id": item["id"], "output_index": index}, item[field]
        begun = {**item, field: "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event(f"{name}.delta", delta=text, **place)
        done = {field: text} if is_custom else {field: text, "name": item["name"]}
        yield self._event(f"{name}.done", **done, **place)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return stream_event(body, name=kind)

    def _head(self, status: str) -> dict[str, Any]:
        asked = self.request
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.active.created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": asked.model or "policy",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": asked.reasoning,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "metadata": {},
        }

    def _items(self, turn: GeneratedTurn) -> list[dict[str, Any]]:
        """Return the output items; a stream that has sent text has an item of it."""
        reasoning = self.active.choices[0].reasoning()
        items = [self._reasoning_item(reasoning)] if reasoning else []
        text = self.active.content(self.active.choices[0])
        if text or self._has_text_item or not turn.tool_calls:
            found = chat_logprobs(self.active.request, turn)
            items.append(self._text_item(text, (found or {}).get("content", [])))
        tools = {tool.function["function"]["name"]: tool for tool in served_tools(self.request)}
        items += [_call_item(call, tools) for call in turn.tool_calls]
        return items

    @property
    def _id(self) -> str:
        return f"resp_{self.active.name}"

    def _reasoning_item(self, reasoning: str) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "id": f"rs_{self.active.name}",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": reasoning}],
        }

    def _text_item(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": f"msg_{self.active.name}",
            "status": "completed",
            "role": "assistant",
            "content": [_text_part(text, logprobs)],
        }


def _call_item(call: Mapping[str, Any], tools: Mapping[str, ServedTool]) -> dict[str, Any]:
    """Return a call as an output item, by the name that the client's tool has."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    tool = tools.get(name)
    item: dict[str, Any] = {"call_id": call["id"], "name": tool.name if tool else name}
    if tool and tool.namespace:
        item["namespace"] = tool.namespace
    if tool and tool.is_custom:
        text = json.loads(arguments).get(CUSTOM_INPUT, "")
        item |= {"type": "custom_tool_call", "id": f"ctc_{call['id']}"}
        return {**item, "input": text if isinstance(text, str) else json.dumps(text)}
    item |= {"type": "function_call", "id": f"fc_{call['id']}", "status": "completed"}
    return {**item, "arguments": arguments}


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
