"""Access guard and limits that gateway, vLLM-compatible server and dashboard have in common."""

import asyncio
import contextlib
import gc
import signal
import socket
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tidegate.errors import ConfigError
from tidegate.serving.http import server as http_server
from tidegate.serving.http.errors import ApiError
from tidegate.serving.http.listening import is_loopback, listen
from tidegate.serving.http.server import (
    AccessGuard,
    AccessPolicy,
    Headers,
    OwnedStream,
    off_loop,
    read_body,
    serve_app,
    unless_gone,
)

pytestmark = pytest.mark.wire

TOKEN = "a-token-of-enough-characters"
BODY_BYTES_MAX = 1000
WAIT_S = 30.0


class HeldBody:
    """An object that a request's frames hold, as they hold its body."""


def refused(policy: AccessPolicy, method: str = "GET", **headers: str) -> int | None:
    """Status of the refusal of a request with these headers; None if it is answered."""
    named = {name.replace("_", "-"): (value,) for name, value in headers.items()}
    error = policy.refusal(method, Headers(named))
    return None if error is None else error.status


LOOPBACK = AccessPolicy("127.0.0.1")
OPEN = AccessPolicy("0.0.0.0", frozenset({"run.example"}))


def shows(headers: Headers) -> bool:
    return headers.bearer == TOKEN


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("policy", "hosts", "status"),
    [
        (LOOPBACK, ["127.0.0.1:8080", "localhost:1", "[::1]:8080", "LOCALHOST"], None),
        (LOOPBACK, ["evil.example:8080", "", "127.0.0.1.evil.example", "localhost."], 403),
        (LOOPBACK, ["10.0.0.1:80"], 403),
        (OPEN, ["10.0.0.1:80", "[fd00::1]:80", "run.example:80", "trainer-0:80"], None),
        (OPEN, ["evil.example", "run.example.evil.example:80", "a.b", ""], 403),
    ],
)
def test_a_server_is_called_by_address_by_a_name_without_a_dot_or_as_allowed(
    policy: AccessPolicy, hosts: list[str], status: int | None
) -> None:
    for host in hosts:
        assert refused(policy, host=host) == status, host


def test_a_request_with_a_secret_may_come_through_a_proxy_by_any_name() -> None:
    policy = AccessPolicy("127.0.0.1", shows_secret=shows)
    bearer = f"Bearer {TOKEN}"
    assert refused(policy, host="run.example", authorization=bearer) is None
    assert refused(policy, host="run.example", authorization=bearer + "x") == 403
    assert refused(policy, host="run.example", authorization=f"Basic {TOKEN}") == 403


def test_where_a_secret_is_needed_no_name_is_enough() -> None:
    policy = AccessPolicy("127.0.0.1", shows_secret=shows, needs_secret=True)
    assert refused(policy, host="127.0.0.1") == 403
    assert refused(policy, host="127.0.0.1", authorization=f"Bearer {TOKEN}") is None


def test_two_host_headers_are_no_name() -> None:
    headers = Headers({"host": ("127.0.0.1", "evil.example")})
    assert LOOPBACK.refusal("GET", headers) is not None


def test_loopback_addresses_are_known() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "run.example"]))


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    with listen("127.0.0.1", 0, "the test") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            listen("127.0.0.1", port, "the test")
    for port in (-1, 65_536):
        with pytest.raises(ConfigError, match="a port must be 0 to 65535"):
            listen("127.0.0.1", port, "the test")


# ---------------------------------------------------------------- pages and bodies


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:81", "file://", "", "127.0.0.1:80"]
)
def test_a_page_of_another_origin_is_refused_whatever_it_shows(origin: str) -> None:
    policy = AccessPolicy("127.0.0.1", shows_secret=shows)
    about = {"host": "127.0.0.1:80", "origin": origin}
    assert refused(policy, "POST", **about) == 403
    assert refused(policy, "POST", **about, authorization=f"Bearer {TOKEN}") == 403


def test_a_page_of_the_servers_own_is_answered() -> None:
    assert refused(LOOPBACK, host="127.0.0.1:80", origin="http://127.0.0.1:80") is None
    assert refused(OPEN, host="run.example", origin="https://run.example") is None


def test_only_a_body_that_says_that_it_is_json_is_read() -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        about = {"host": "localhost", "content_type": kind}
        assert refused(LOOPBACK, "POST", **about, content_length="2") == 415
        assert refused(LOOPBACK, "POST", **about, transfer_encoding="chunked") == 415
        assert refused(LOOPBACK, "POST", **about, content_length="0") is None
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        about = {"host": "localhost", "content_type": kind, "content_length": "2"}
        assert refused(LOOPBACK, "POST", **about) is None


# ---------------------------------------------------------------- over a real socket


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body, or with why it can't be read."""
    http = HttpRequest(scope, receive)
    try:
        answer = Response(await read_body(http, bytes_max=BODY_BYTES_MAX))
    except ApiError as error:
        answer = Response(str(error), error.status)
    except ClientDisconnect:
        return
    await answer(scope, receive, send)


@asynccontextmanager
async def served(app: Any = echo) -> AsyncIterator[int]:
    """Serve on a free port, until left."""
    listening = listen("127.0.0.1", 0, "the test")
    guard = AccessGuard(app, LOOPBACK, lambda status, why: why.encode())
    serving = asyncio.create_task(serve_app(guard, listening, body_bytes_max=BODY_BYTES_MAX))
    try:
        yield listening.getsockname()[1]
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listening.close()


async def say(port: int, *parts: bytes) -> bytes:
    """Send parts until the server closes the connection, and return what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                return await reader.read()
            return b""
    finally:
        writer.close()


async def test_a_server_leaves_the_programs_signal_handlers_in_place() -> None:
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    async with served() as port:
        await say(port, request())
        assert found == {number: signal.getsignal(number) for number in found}
    assert found == {number: signal.getsignal(number) for number in found}


def request(body: bytes = b"", **headers: str) -> bytes:
    about: Mapping[str, str] = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in about.items())
    return f"POST / HTTP/1.1\r\n{lines}\r\n".encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def test_a_right_request_is_answered_with_headers_that_keep_pages_out() -> None:
    async with served() as port:
        answer = (await say(port, request(b"{}"))).lower()
    assert status_of(answer) == 200
    assert answer.endswith(b"{}")
    assert b"x-content-type-options: nosniff" in answer
    assert b"cross-origin-resource-policy: same-origin" in answer


async def test_the_guard_answers_in_place_of_the_application() -> None:
    async with served() as port:
        for headers, status in (
            ({"host": "evil.example"}, 403),
            ({"origin": "http://evil.example"}, 403),
            ({"content_type": "text/plain"}, 415),
        ):
            assert status_of(await say(port, request(b"{}", **headers))) == status


async def test_what_has_no_end_outside_a_body_is_cut_off_and_others_are_served() -> None:
    most = http_server.HEAD_BYTES_MAX
    begun = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
    chunked = begun + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with served() as port:
        for parts in (
            [begun, *[b"x: " + b"y" * 1000 + b"\r\n"] * (most // 125)],
            [begun + b"x: ", *[b"y" * 1000] * (most // 500)],
            [b"GET /", *[b"y" * 1000] * (most // 500)],
            [chunked + b"0\r\n", *[b"t: " + b"y" * 997 + b"\r\n"] * (most // 500)],
            [chunked + b"1;", *[b"e" * 1000] * (most // 500)],
            [b"\r\n" * most * 4],
        ):
            # 0: reset before the answer was read.
            assert status_of(await say(port, *parts)) in (0, 400, 431, 413)
        assert status_of(await say(port, request(b"{}"))) == 200


async def test_a_body_over_its_limit_is_refused_and_at_last_cut_off() -> None:
    async with served() as port:
        right = b"x" * BODY_BYTES_MAX
        assert status_of(await say(port, request(right))) == 200
        assert status_of(await say(port, request(right + b"x"))) == 413
        endless = request(b"", content_length=str(10**9))
        assert status_of(await say(port, endless, *[right] * 100)) in (0, 413)


async def test_a_body_of_more_values_than_are_parsed_at_once_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "JSON_VALUES_MAX", 100)
    async with served() as port:
        assert status_of(await say(port, request(b"[" + b"0," * 100 + b"0]"))) == 413
        assert status_of(await say(port, request(b"[" + b"{}," * 100 + b"0]"))) == 413
        assert status_of(await say(port, request(b"[" + b"0," * 50 + b"0]"))) == 200
        assert status_of(await say(port, request(b'"' + b"x" * 900 + b'"'))) == 200


@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"\r\n",
        b"POST / HTTP/1.1\r\nHost: lo",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 10\r\n\r\n{",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=["nothing", "a line end", "half headers", "half a body", "half of chunks"],
)
async def test_half_a_request_is_timed_out(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_TIMEOUT_S", "BODY_IDLE_TIMEOUT_S"):
        monkeypatch.setattr(http_server, name, 0.05)
    async with served() as port:
        assert status_of(await say(port, half)) in (0, 408)


async def test_half_a_request_after_a_whole_one_is_timed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.05)
    async with served() as port:
        answer = await say(port, request(b"{}", connection="keep-alive"), b"POST /")
        assert status_of(answer) == 200


async def test_a_request_that_comes_byte_by_byte_without_end_is_timed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.2)
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"", content_length="900"))
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"x")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.01):
                            await reader.read()
        writer.close()


async def test_a_slow_answer_is_waited_for_longer_than_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HEAD_TIMEOUT_S", "BODY_IDLE_TIMEOUT_S", "BODY_TIMEOUT_S"):
        monkeypatch.setattr(http_server, name, 0.05)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.2)
        await echo(scope, receive, send)

    async with served(slow) as port:
        assert status_of(await say(port, request(b"{}"))) == 200


async def test_a_client_that_never_reads_its_answer_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "ANSWER_STALL_TIMEOUT_S", 0.05)
    ended = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        async def events() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 100_000
                await asyncio.sleep(0)

        await OwnedStream(events(), ended.set)(scope, receive, send)

    async with served(endless) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request())
            async with asyncio.timeout(WAIT_S):
                await ended.wait()


async def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS_MAX", 2)
    async with served() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await say(port) == b""
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(WAIT_S):
            while status_of(await say(port, request(b"{}"))) != 200:
                pass  # the server has yet to see that they are closed


async def test_work_for_a_client_that_leaves_is_cancelled_and_has_ended() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        await read_body(http, bytes_max=BODY_BYTES_MAX)
        with pytest.raises(ClientDisconnect):
            await unless_gone(http, work())
        assert ended.is_set()

    async with served(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"{}"))
        async with asyncio.timeout(WAIT_S):
            await began.wait()
            writer.close()
            await ended.wait()


async def test_what_a_refused_request_held_is_freed_without_the_garbage_collector() -> None:
    held: list[weakref.ref[HeldBody]] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> None:
        body = HeldBody()
        held.append(weakref.ref(body))
        await asyncio.sleep(0)
        raise ApiError(400, "refused")

    gc.disable()
    try:
        with contextlib.suppress(ApiError):
            await unless_gone(HttpRequest({"type": "http"}, receive), work())
        await asyncio.sleep(0)  # the task that waited for the client ends now
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()


async def test_a_stream_whose_client_left_before_its_first_event_says_that_it_has_ended() -> None:
    ended = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"never asked for"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await OwnedStream(events(), ended.set)(scope, receive, send)

    async with served(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"{}"))
        await writer.drain()
        writer.close()
        async with asyncio.timeout(WAIT_S):
            await ended.wait()


async def test_large_work_is_done_in_threads_and_refused_beyond_what_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import threading

    monkeypatch.setattr(http_server, "_places", threading.BoundedSemaphore(3))
    gate = threading.Event()
    works = [asyncio.create_task(off_loop(lambda: gate.wait(WAIT_S))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as error:
        await off_loop(lambda: None)
    assert error.value.status == 503
    gate.set()
    assert await asyncio.gather(*works) == [True] * 3
    assert await off_loop(threading.get_ident) != threading.get_ident()
