"""Listening sockets of Tidegate's HTTP servers, and checks of their addresses.

Servers and the dashboard bind their sockets before anything else starts.
"""

import ipaddress
import socket

from tidegate.errors import ConfigError

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of this host that only a client on this host uses, as they stand in a Host header."""

KEEP_ALIVE_S = 3600
"""Idle time after which a connection is closed. Agents' tools take minutes; a client whose
connection is closed while it sends a request sends the request again, which samples again."""


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a server that is bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, server: str) -> socket.socket:
    """Open a listening socket; ``port`` 0 takes a free one. ``server`` is the server's name in the
    error.

    Raises:
        ConfigError: the address is taken, or not of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it. With Nagle's algorithm a response's body waits 40 ms for an ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        why = error.strerror if isinstance(error, OSError) else "a port must be 0 to 65535"
        raise ConfigError(f"{server} can't listen on {host}:{port}: {why}") from error
    listening.setblocking(False)
    return listening


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket for clients on this host."""
    bound = listening.getsockname()
    shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
    return f"http://{shown}:{bound[1]}"
