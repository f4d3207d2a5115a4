"""The dashboard's address, token and headers."""

import pytest

from tidegate.errors import ConfigError
from tidegate.observability.dashboard.access import (
    HEADERS,
    parse_address,
    shows_token,
    token_for,
)
from tidegate.serving.http.server import Headers
from tidegate.transport.server_keys import DASHBOARD_TOKEN_VARIABLE

TOKEN = "a-token-of-enough-characters"


def request(host: str = "127.0.0.1:80", query: str = "", **headers: str) -> Headers:
    return Headers(
        {name: (value,) for name, value in headers.items()} | {"host": (host,)}, query.encode()
    )


@pytest.mark.parametrize("text", ["127.0.0.1:80", "[::1]:0", "localhost:9", "0.0.0.0:65535"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    host, port = parse_address(text)
    assert text.replace("[", "").replace("]", "") == f"{host}:{port}"


@pytest.mark.parametrize("text", ["", "8080", ":8080", "a b:1", "h:65536", "http://h:1", "h:-1"])
def test_an_invalid_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:8080"):
        parse_address(text)


def test_loopback_needs_no_token_and_other_addresses_get_one() -> None:
    assert token_for("127.0.0.1", {}) == ""
    assert token_for("::1", {}) == ""
    drawn = {token_for("0.0.0.0", {}) for _ in range(2)}
    assert len(drawn) == 2
    assert min(map(len, drawn)) >= 32


def test_a_token_from_the_environment_is_used_unless_it_is_too_short() -> None:
    assert token_for("127.0.0.1", {DASHBOARD_TOKEN_VARIABLE: TOKEN}) == TOKEN
    with pytest.raises(ConfigError, match="5 characters"):
        token_for("0.0.0.0", {DASHBOARD_TOKEN_VARIABLE: "short"})


@pytest.mark.parametrize(
    "requested",
    [
        request(query=f"start=1&token={TOKEN}"),
        request(authorization=f"Bearer {TOKEN}"),
        request(cookie=f"other=1; tidegate_dashboard_80={TOKEN}"),
        request("run.example", cookie=f"tidegate_dashboard={TOKEN}"),
    ],
    ids=["in the query", "as a bearer", "in the cookie", "in the cookie of a proxy"],
)
def test_the_token_is_accepted_in_query_header_and_cookie(requested: Headers) -> None:
    assert shows_token(requested, TOKEN)
    assert not shows_token(requested, TOKEN + "x")


@pytest.mark.parametrize(
    "requested",
    [
        request(),
        request(cookie=f"tidegate_dashboard_81={TOKEN}"),
        request(authorization=f"Basic {TOKEN}"),
        request(cookie="\x00;;==\x7f"),
    ],
)
def test_other_tokens_are_refused(requested: Headers) -> None:
    assert not shows_token(requested, TOKEN)


def test_the_content_security_policy_allows_only_our_files() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
