"""Access rules of the dashboard: its address, its token, and the places where a request may carry
the token.

A loopback address needs no token; any other address does. :class:`AccessGuard` calls these
rules, and checks ``Host`` and ``Origin`` itself.
"""

import os
import re
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote

from tidegate.errors import ConfigError
from tidegate.serving.http.listening import is_loopback
from tidegate.transport.server_keys import DASHBOARD_TOKEN_VARIABLE

if TYPE_CHECKING:  # it imports uvicorn, which may not be installed
    from tidegate.serving.http.server import Headers

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


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``; port 0 means any free one.

    Raises:
        ConfigError: the text has another form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(
            f"a dashboard's address is HOST:PORT, such as 127.0.0.1:8080 or 127.0.0.1:0 for a free "
            f"port, got {text!r}"
        )
    return match["host"].strip("[]"), int(match["port"])


def token_for(host: str, environment: Mapping[str, str] = os.environ) -> str:
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
    return token or ("" if is_loopback(host) else secrets.token_urlsafe(24))


def shows_token(headers: "Headers", token: str) -> bool:
    """Return whether a request carries the token, in the query, as bearer token or cookie."""
    if not token:
        return False
    (in_query, *_) = parse_qs(headers.query.decode("latin-1")).get("token", [""])
    in_cookie = _token_in_cookie(headers.single("cookie"), cookie_name(headers.single("host")))
    candidates = (in_query, headers.bearer, in_cookie)
    return any(secrets.compare_digest(each.encode(), token.encode()) for each in candidates)


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
