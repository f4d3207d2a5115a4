"""Normal form of OpenAI messages, and digests by which earlier conversations are recognised.

:class:`Conversation` uses both. Clients add fields without content (``refusal: None``), split texts
into parts, and write arguments as strings where templates want objects.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tidegate.errors import ChatRefused
from tidegate.orchestrator.episodes.media_parts import KINDS, plain_part

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
        plain["tool_calls"] = _plain_calls(calls, number)
    return plain


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


def _plain_calls(calls: object, number: int) -> list[dict[str, Any]]:
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
