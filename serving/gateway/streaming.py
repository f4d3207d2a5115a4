"""How does an answer of the gateway come as a stream? In chunks of what is sure to stay.

It looks at turns from time to time; nobody tells it of single tokens.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tidegate.orchestrator.episodes.conversation import tool_names
from tidegate.serving.gateway.asking import Asking, Choice
from tidegate.serving.gateway.failures import failure_of
from tidegate.serving.gateway.replies import last_chunk, text_chunk, usage_chunk
from tidegate.serving.gateway.requests import ChatRequest

STREAM_INTERVAL_S = 0.05
"""Between two looks at what was said so far: as fast as people read."""


async def streamed(asking: Asking) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the first of them is one more, for the status is sent."""
    waiting = asyncio.ensure_future(asking.wait())
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
        yield _event(failure_of(error).body())
    finally:
        waiting.cancel()
        asking.cancel()
    yield b"data: [DONE]\n\n"


def _end(asking: Asking) -> list[bytes]:
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


def _more(choice: Choice, said: str) -> str:
    """What was not sent yet; nothing while a token's text still changes what was before."""
    if not said.startswith(choice.sent):
        return ""
    more, choice.sent = said[len(choice.sent) :], said
    return more


def _text(asking: Asking, index: int, text: str, *, is_first: bool = False) -> dict[str, Any]:
    return text_chunk(
        asking.request,
        index,
        text,
        name=asking.name,
        created_s=asking.created_s,
        is_first=is_first,
    )


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
