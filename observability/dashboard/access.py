"""Access rules of the dashboard: its address, its token, and the places where a request may carry
the token.

A loopback address needs no token; any other address does. :class:`AccessGuard` calls these
rules, and checks ``Host`` and ``Origin`` itself.
"""

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote, unquote

from tidegate.errors import ConfigError
from tidegate.serving.http.listening import is_loopback
from tidegate.transport.server_keys import DASHBOARD_TOKEN_VARIABLE

TOKEN_CHARACTERS_MIN = 16

COOKIE = "tidegate_dashboard"
"""Cookie name; the port is appended, because browsers share cookies between all ports of a host
and each run has its own token."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response. The content security policy runs no script but our files, so that
text of a rollout can't execute."""

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Address at which a dashboard listens."""

    host: str
    port: int
    """0 means any free port."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the address."""
        return is_loopback(self.host)


def parse_address(text: str) -> Address:
    """Parse ``HOST:PORT``.

    Raises:
        ConfigError: the text has another form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(
            f"a dashboard's address is HOST:PORT, such as 127.0.0.1:8080 or 127.0.0.1:0 for a free "
            f"port, got {text!r}"
        )
    return Address(match["host"].strip("[]"), int(match["port"]))


def token_for(address: Address, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token that requests must carry; empty on loopback unless one is configured.

    Raises:
        ConfigError: the token in the environment is too short to be secret.
    """
    token = environment.get(DASHBOARD_TOKEN_VARIABLE, "")
    if token and len(token) < TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"{DASHBOARD_TOKEN_VARIABLE} has {len(token)} characters and could be guessed; give it "
            f"{TOKEN_CHARACTERS_MIN} or more, or leave it out to have one drawn"
        )
    return token or ("" if address.is_loopback else secrets.token_urlsafe(24))


@dataclass(frozen=True, slots=True)
class DashboardRequest:
    """The parts of a request that decide about access."""

    host: str
    """Value of the request's header ``Host``."""
    authorization: str
    cookie: str
    query_token: str


def shows_token(request: DashboardRequest, token: str) -> bool:
    """Return whether a request carries the token, in the query, as bearer token or cookie."""
    if not token:
        return False
    scheme, _, bearer = request.authorization.partition(" ")
    tokens = [request.query_token, _token_in_cookie(request.cookie, cookie_name(request.host))]
    tokens += [bearer.strip()] if scheme.lower() == "bearer" else []
    return any(secrets.compare_digest(candidate.encode(), token.encode()) for candidate in tokens)


def cookie_name(host: str) -> str:
    """Return the cookie's name for requests with this ``Host`` header."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


def cookie_value(token: str) -> str:
    """Return the token, percent-encoded for a cookie."""
    return quote(token, safe="")


def _token_in_cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return unquote(morsel.value) if morsel is not None else ""
