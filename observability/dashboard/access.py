"""Access to the dashboard: its address, its token, and where a request may show the token.

On a loopback address no token is needed; on any other one is. The name that a request calls the
server by, and the page that it comes from, are checked by :class:`http_server.AccessGuard`.
"""

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote, unquote

from tidegate.errors import ConfigError
from tidegate.serving.listening import is_loopback
from tidegate.transport.server_keys import DASHBOARD_TOKEN_VARIABLE

TOKEN_CHARACTERS_MIN = 16

COOKIE = "tidegate_dashboard"
"""With the port: browsers give a host's cookies to all of its ports, and each run has a token."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On every answer. No script but our files runs, whatever a rollout says: not even one of ours that
is written into the page."""

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a dashboard is served."""

    host: str
    port: int
    """0: a free one."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this host reaches it."""
        return is_loopback(self.host)


def parse_address(text: str) -> Address:
    """``HOST:PORT``.

    Raises:
        ConfigError: it is something else.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(
            f"a dashboard's address is HOST:PORT, such as 127.0.0.1:8080 or 127.0.0.1:0 for a free "
            f"port, got {text!r}"
        )
    return Address(match["host"].strip("[]"), int(match["port"]))


def token_for(address: Address, environment: Mapping[str, str] = os.environ) -> str:
    """What visitors must show; empty where none is needed: only this host gets there.

    Raises:
        ConfigError: the one in the environment could be guessed.
    """
    token = environment.get(DASHBOARD_TOKEN_VARIABLE, "")
    if token and len(token) < TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"{DASHBOARD_TOKEN_VARIABLE} has {len(token)} characters and could be guessed; give it "
            f"{TOKEN_CHARACTERS_MIN} or more, or leave it out to have one drawn"
        )
    return token or ("" if address.is_loopback else secrets.token_urlsafe(24))


@dataclass(frozen=True, slots=True)
class Request:
    """What of a request decides."""

    host: str
    """Header ``Host``: the name that the visitor's browser knows us by."""
    authorization: str
    cookie: str
    query_token: str


def shows_token(request: Request, token: str) -> bool:
    """Whether a request shows the token, in the query, as a bearer, or in the cookie."""
    if not token:
        return False
    scheme, _, bearer = request.authorization.partition(" ")
    shown = [request.query_token, _in_cookie(request.cookie, cookie_name(request.host))]
    shown += [bearer.strip()] if scheme.lower() == "bearer" else []
    return any(secrets.compare_digest(each.encode(), token.encode()) for each in shown)


def cookie_name(host: str) -> str:
    """Of the cookie for who asks under this name."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


def cookie_value(token: str) -> str:
    """Of the cookie: whatever a token is made of, it gets through."""
    return quote(token, safe="")


def _in_cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return unquote(morsel.value) if morsel is not None else ""
