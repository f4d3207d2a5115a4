"""Answers to completion requests, whole or as streams of events.

A client that leaves aborts its request. Bodies of answers are :mod:`bodies`' matter.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.serving.http_server import OwnedStream, off_loop, unless_gone
from tidegate.serving.vllm_server.bodies import Bodies
from tidegate.serving.vllm_server.completing import Begun
from tidegate.serving.vllm_server.failures import as_answer
from tidegate.serving.vllm_server.outputs import Output

if TYPE_CHECKING:
    from typing import Any

    from tidegate.serving.vllm_server.desks import Desks

STREAM_INTERVAL_S = 0.02
"""Between two looks at what was said so far: what comes meanwhile travels together."""

LARGE_ANSWER_TOKENS = 4096
"""Output tokens and log-probs from which on an answer's body is made off the event loop: 10 ms."""

DONE = b"data: [DONE]\n\n"


class Streamable(Protocol):
    """What is looked at of a request."""

    stream: bool | None
    stream_options: "dict[str, Any] | None"


async def answer(
    http: HttpRequest, desks: "Desks", request: Streamable, begun: Begun, bodies: Bodies
) -> Response:
    """Return the answer, whole or as a stream.

    Raises:
        ClientDisconnect: the client is gone, and its request aborted.
    """
    if request.stream:
        wants_usage = bool((request.stream_options or {}).get("include_usage"))
        events = _stream(desks, begun, bodies, wants_usage=wants_usage)
        return OwnedStream(events, begun.asking.abort)
    try:
        await unless_gone(http, begun.asking.wait())
    finally:
        begun.asking.abort()

    def encoded() -> tuple[list[Output], bytes]:
        outputs = [reader.rest() for reader in begun.readers]
        whole = bodies.whole(outputs)
        # One by one, for the encoder holds the interpreter until it is done.
        whole["choices"] = [msgspec.Raw(msgspec.json.encode(each)) for each in whole["choices"]]
        return outputs, msgspec.json.encode(whole)

    is_large = begun.told_tokens >= LARGE_ANSWER_TOKENS
    outputs, content = await off_loop(encoded) if is_large else encoded()
    desks.counts.note(begun, outputs)
    return Response(content, media_type="application/json")


async def _stream(
    desks: "Desks", begun: Begun, bodies: Bodies, *, wants_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the first of them is one more, for the status is sent."""
    outputs: list[Output] = []
    try:
        for body in bodies.opening:
            yield _event(body)
        async for output in _outputs(begun):
            if output.finish_reason is not None:
                outputs.append(output)
            yield _event(bodies.chunk(output))
        await begun.asking.wait()
        if wants_usage:
            tokens = sum(choice.num_tokens for choice in begun.asking.choices)
            yield _event(bodies.usage_chunk(tokens))
        desks.counts.note(begun, outputs)
    except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
        yield _event(as_answer(error).body())
    finally:
        begun.asking.abort()
    yield DONE


async def _outputs(begun: Begun) -> AsyncIterator[Output]:
    """Parts of all choices, as they come; the last of each says how it ended."""
    going_on = dict(zip(begun.readers, begun.asking.choices, strict=True))
    while going_on:
        ends = [choice.ended for choice in going_on.values()]
        await asyncio.wait(ends, timeout=STREAM_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        for reader, choice in list(going_on.items()):
            has_ended = choice.ended.done()
            if has_ended:
                del going_on[reader]
            if choice.error is not None:
                continue
            output = reader.rest() if has_ended else reader.more()
            if output is not None:
                yield output


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
