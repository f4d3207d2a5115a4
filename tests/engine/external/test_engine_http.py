"""HTTP client against servers that close connections silently, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from tidegate.engine.external.http import HttpEngine, HttpStatusError

pytestmark = pytest.mark.wire

ANSWERS = [
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 3\r\n\r\nbad",
    b'HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"good"',
]


@asynccontextmanager
async def server(answers: list[bytes]) -> AsyncIterator[str]:
    """Server that answers one request per connection; it reads a second one and closes."""
    left = iter(answers)
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(left))
        await writer.drain()
        await reader.read(1)  # of another request, or the client's end
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    await asyncio.gather(*(task for task in serving if task is not None))


async def test_a_call_after_an_error_is_not_lost_with_the_connection_of_the_one_before() -> None:
    async with server(ANSWERS) as url:
        engine = HttpEngine(url)
        with pytest.raises(HttpStatusError, match="bad"):
            await engine.call("POST", "/start")
        assert await engine.call("POST", "/finish") == "good"
        await engine.close()


async def test_a_stream_is_not_lost_with_the_connection_of_the_one_before() -> None:
    event = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: 1\n\n"
    async with server([event, event]) as url:
        engine = HttpEngine(url)
        for _ in range(2):
            async with aclosing(engine.events("/generate", {})) as events:
                assert [data async for data in events] == [b"1"]
        await engine.close()
