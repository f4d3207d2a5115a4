"""Which addresses may Tidegate listen on, and is one free?

Only those that no other host can reach: messages are neither encrypted nor authenticated.
"""

import ipaddress
import os
import re
import socket

from tidegate.errors import AddressInUse, ConfigError

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:\[\]/]+):(?P<port>\*|\d{1,5})")

PORT_MAX = 65535

IPC_PATH_BYTES_MAX = 107
"""What fits ``sockaddr_un`` on Linux, less the closing zero."""


def check_address(address: str, *, may_be_wildcard: bool = False) -> None:
    """Refuse what is malformed or could be reached from another host.

    Raises:
        ConfigError: says what is wrong, and what an address looks like.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or not rest or "\0" in address:
        raise ConfigError(f"{address!r} is no address; {_EXAMPLES}")
    match scheme:
        case "inproc":
            return
        case "ipc":
            _check_ipc(address, rest)
        case "tcp":
            _check_tcp(address, may_be_wildcard=may_be_wildcard)
        case _:
            raise ConfigError(f"{address!r} is of an unknown kind; {_EXAMPLES}")


def refuse_living_listener(address: str) -> None:
    """Raise AddressInUse if someone listens on this ipc path.

    ZeroMQ would take the path away from the listener without a word. A file that a dead process
    left behind refuses connections, and may be taken. Ports need no such look: the system refuses.
    """
    scheme, _, path = address.partition("://")
    if scheme != "ipc":
        return
    name = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.setblocking(False)
            probe.connect(name)
        except BlockingIOError:
            pass  # a listener too busy to accept is one all the same
        except OSError:
            return  # nobody there, or unusable: bind will tell which
    raise AddressInUse(address)


_EXAMPLES = "use ipc:///an/absolute/path or tcp://127.0.0.1:5555"


def _check_ipc(address: str, path: str) -> None:
    if path[0] not in "/@":
        raise ConfigError(
            f"{address!r} has a relative path, which means another file in another process; "
            f"{_EXAMPLES}"
        )
    if len(os.fsencode(path)) > IPC_PATH_BYTES_MAX:
        raise ConfigError(
            f"{address!r}: the path is too long, {IPC_PATH_BYTES_MAX} bytes is the system's "
            f"limit; choose a shorter one, or set TMPDIR to one if you left the address out"
        )


def _check_tcp(address: str, *, may_be_wildcard: bool) -> None:
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError(f"{address!r} is not tcp://HOST:PORT; {_EXAMPLES}")
    host, port = match["host"], match["port"]
    if port == "*" and not may_be_wildcard:
        raise ConfigError(f"{address!r} leaves the port open, so there is nothing to connect to")
    if port != "*" and not 0 < int(port) <= PORT_MAX:
        raise ConfigError(f"{address!r}: a port is 1 to {PORT_MAX}, or * for any free one")
    try:
        is_loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = False  # a name, which may lead anywhere
    if not is_loopback:
        raise ConfigError(
            f"{address!r} can be reached from other hosts, and messages are not encrypted or "
            f"authenticated; {_EXAMPLES}"
        )
