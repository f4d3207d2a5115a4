"""HTTP client for external engines' APIs: deadlines on every call, and errors with reasons.

A server that cannot be reached or does not answer in time raises ``EngineGone``; an error status
raises ``HttpStatusError``.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from tidegate.errors import ConfigError, EngineGone, TidegateError
from tidegate.transport import server_keys

CONTROL_TIMEOUT_S = 30.0
"""Seconds for a call that waits only for the engine's own loop."""

CONNECT_TIMEOUT_S = 10.0

START_TIMEOUT_S = 100.0
"""Seconds for a server's first answer: less than ``engine_start_timeout_s``, so that the error
names the server."""

RETRY_INTERVAL_S = 0.5

ERROR_CHARACTERS_MAX = 300
"""Length to which a refusal's body is cut."""

UNAUTHORIZED = 401

Query = Mapping[str, str] | Sequence[tuple[str, str]]


class HttpStatusError(TidegateError):
    """The server answered with a status other than 200."""

    def __init__(self, path: str, status: int, message: str) -> None:
        self.status = status
        self.why = message
        super().__init__(f"{path} answered {status}: {message}")


class HttpEngine:
    """A server's address, and the connections to it."""

    def __init__(self, url: str) -> None:
        """Connect on first use.

        Raises:
            ConfigError: aiohttp is not installed, or the URL is invalid.
        """
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError(
                'engines behind HTTP need aiohttp; install it with pip install "tidegate[engines]"'
            ) from error
        server_keys.refuse_secrets(url)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"an engine's url must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        key = server_keys.key_of(self.url)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._aiohttp = aiohttp
        self._opened: Any = None
        """The ``aiohttp.ClientSession``, if there is one."""
        self.calls_begun = self.calls_ended = 0
        """Numbers of calls, without streams."""

    def _session(self) -> Any:
        """Return the session, of which each call opens a new connection.

        A server may close an idle connection at any time. A call on it would fail, and the healthy
        engine would be removed.
        """
        if self._opened is None:
            timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            connector = self._aiohttp.TCPConnector(limit=0, force_close=True)
            self._opened = self._aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._opened

    async def close(self) -> None:
        """Close all connections, which aborts the requests in flight."""
        if self._opened is not None:
            await self._opened.close()

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Query | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> Any:
        """Return a call's JSON answer, or its text if it is not JSON.

        Raises:
            HttpStatusError: the status is not 200.
            EngineGone: no answer in time, or no connection.
        """
        self.calls_begun += 1
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._request(method, path, body, query) as response,
            ):
                data = await response.read()
        except TimeoutError:
            raise EngineGone(
                f"{self.url}{path} did not respond within {timeout_s:g} s; is the engine stuck?"
            ) from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise self._connection_error(path, error) from error
        finally:
            self.calls_ended += 1
        if response.status != 200:
            raise self._status_error(path, response.status, data)
        try:
            return msgspec.json.decode(data) if data else None
        except msgspec.DecodeError:
            return data.decode(errors="replace")

    async def events(self, path: str, body: object) -> AsyncGenerator[bytes, None]:
        """Yield the data of each server-sent event, until ``[DONE]`` or the end.

        Raises:
            HttpStatusError: the status is not 200.
            EngineGone: the connection broke.
        """
        try:
            async with self._request("POST", path, body) as response:
                if response.status != 200:
                    raise self._status_error(path, response.status, await response.read())
                pending = b""
                async for data in response.content.iter_any():
                    *events, pending = (pending + data).split(b"\n\n")
                    for event in events:
                        text = event.removeprefix(b"data:").strip()
                        if text == b"[DONE]":
                            return
                        yield text
        except (self._aiohttp.ClientError, OSError) as error:
            raise self._connection_error(path, error) from error

    async def wait_for(self, path: str) -> dict[str, Any]:
        """Return the answer of ``path``, retrying until the server has started.

        Raises:
            ConfigError: no server answered in time, or another kind of server did.
        """
        started_s = time.monotonic()
        while True:
            try:
                answer = await self.call("GET", path, timeout_s=CONNECT_TIMEOUT_S)
                if isinstance(answer, dict):
                    return answer
                raise self._wrong_server(path, "with something that is not a JSON object")
            except HttpStatusError as refusal:
                if refusal.status == UNAUTHORIZED:
                    raise ConfigError(str(refusal)) from refusal
                raise self._wrong_server(path, f"with {refusal.status}: {refusal.why}") from refusal
            except EngineGone as error:
                if time.monotonic() - started_s > START_TIMEOUT_S:
                    raise ConfigError(
                        f"no server answers at {self.url} after {START_TIMEOUT_S:.0f} s ({error}); "
                        "start the server, or correct the address"
                    ) from error
            await asyncio.sleep(RETRY_INTERVAL_S)

    def _wrong_server(self, path: str, answer: str) -> ConfigError:
        return ConfigError(
            f"{self.url}{path} answers {answer}; check that KIND of KIND+URL is the server's kind, "
            f"and that URL is the server's own address, not a router's, without /v1 at the end"
        )

    def _request(self, method: str, path: str, body: object, query: Query | None = None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers | ({} if data is None else {"Content-Type": "application/json"})
        return self._session().request(
            method, self.url + path, data=data, params=query, headers=headers
        )

    def _status_error(self, path: str, status: int, data: bytes) -> HttpStatusError:
        why = _message(data)
        if status == UNAUTHORIZED:
            sent = "another key than it was sent" if self._headers else "a key"
            why = f"{self.url} requires {sent} ({why}); {server_keys.HINT}"
        return HttpStatusError(path, status, why)

    def _connection_error(self, path: str, error: BaseException) -> EngineGone:
        return EngineGone(
            f"{self.url}{path}: the connection broke or was refused "
            f"({str(error) or type(error).__name__}); does the server run?"
        )


def _message(data: bytes) -> str:
    try:
        error = msgspec.json.decode(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:ERROR_CHARACTERS_MAX]
    except (msgspec.DecodeError, KeyError, TypeError):
        return data.decode(errors="replace")[:ERROR_CHARACTERS_MAX]
