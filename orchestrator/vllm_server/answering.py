"""How is a begun request answered? In one piece, or as a stream of events; or not, if its client
goes away. It knows no prompts, and what bodies look like is :mod:`bodies`' matter."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from tidegate.orchestrator.vllm_server.bodies import Bodies
from tidegate.orchestrator.vllm_server.completing import Begun
from tidegate.orchestrator.vllm_server.failures import as_answer
from tidegate.orchestrator.vllm_server.outputs import Output

if TYPE_CHECKING:
    from typing import Any

    from tidegate.orchestrator.vllm_server.desks import Desks

STREAM_INTERVAL_S = 0.02
"""Between two looks at what was said so far: what comes meanwhile travels together."""

DONE = b"data: [DONE]\n\n"


class Streamable(Protocol):
    """What is looked at of a request."""

    stream: bool | None
    stream_options: "dict[str, Any] | None"


async def answer(
    http: HttpRequest, desks: "Desks", request: Streamable, begun: Begun, bodies: Bodies
) -> Response:
    """The answer, whole or as a stream."""
    if request.stream:
        wants_usage = bool((request.stream_options or {}).get("include_usage"))
        events = _stream(desks, begun, bodies, wants_usage=wants_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    try:
        await _unless_gone(http, begun)
        outputs = [reader.rest() for reader in begun.readers]
    except BaseException:
        begun.asking.abort()
        raise
    desks.counts.note(begun, outputs)
    return Response(msgspec.json.encode(bodies.whole(outputs)), media_type="application/json")


async def _unless_gone(http: HttpRequest, begun: Begun) -> None:
    """Until it has ended; if its client goes away before, it is aborted."""
    waiting = asyncio.ensure_future(begun.asking.wait())
    leaving = asyncio.ensure_future(http.receive())
    either: set[asyncio.Future[Any]] = {waiting, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientDisconnect
        waiting.result()
    finally:
        waiting.cancel()
        leaving.cancel()


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
