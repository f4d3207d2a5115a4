"""HTTP client of the doctor (`http.client`): one JSON request at a time, with a timeout.

API keys are read by ``transport/server_keys.py``.
"""

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tidegate.errors import ConfigError, EngineLost
from tidegate.transport import server_keys

REQUEST_TIMEOUT_S = 120.0
"""An engine's first request may compile kernels, which takes a minute or more."""

LOAD_TIMEOUT_S = 600.0
"""Loading a large model's weights takes minutes; the engine adapters allow the same time."""

UNAUTHORIZED = 401

_KIND = re.compile(r"[a-z]+\+https?://")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """Response to a request."""

    status: int
    body: Any
    """Parsed JSON, or the text if it is no JSON."""

    @property
    def is_ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


class Http:
    """Client of one server. Each request opens a connection, so threads may share the client."""

    def __init__(self, url: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Parse the URL and find the server's key; opens no connection.

        Raises:
            ConfigError: ``url`` is no address of an engine.
        """
        parts = _split(url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path.rstrip("/")
        key = server_keys.key_of(self.url + self._prefix)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._netloc = parts.netloc
        self._connect = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._timeout_s = timeout_s

    def get(self, path: str) -> HttpReply:
        """Send a GET request.

        Raises:
            EngineLost: there is no response.
            ConfigError: the server requires a key, or another one.
        """
        return self._request("GET", path, None, self._timeout_s)

    def post(self, path: str, body: object, *, timeout_s: float | None = None) -> HttpReply:
        """Send ``body`` as JSON; the default is the client's timeout.

        Raises:
            EngineLost: there is no response.
            ConfigError: the server requires a key, or another one.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._request("POST", path, json.dumps(body).encode(), timeout_s)

    def _request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> HttpReply:
        connection = self._connect(self._netloc, timeout=timeout_s)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, self._prefix + path, body, self._headers | headers)
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise EngineLost(
                f"{self.url} did not respond to {method} {path}: {why}. Check that the engine "
                f"runs, has loaded its model, and listens there"
            ) from None
        finally:
            connection.close()
        if answer.status == UNAUTHORIZED:
            sent = "another key than it was sent" if self._headers else "a key"
            raise ConfigError(f"{self.url} requires {sent}; {server_keys.HINT}")
        return HttpReply(status=answer.status, body=_parsed(raw))


def _split(url: str) -> SplitResult:
    """Parse an engine's address, also in the form KIND+URL of ``engine_urls``.

    Raises:
        ConfigError: the text is no address.
    """
    address = url.partition("+")[2] if _KIND.match(url) else url
    server_keys.refuse_secrets(address)
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018 - raises if it is out of range
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"{url!r} is not an engine's address; write it as http://HOST:PORT")
    return parts


def _parsed(raw: bytes) -> Any:
    text = raw.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
