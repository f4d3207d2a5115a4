"""Validation of ZeroMQ addresses, and checks whether an address is reachable or already in use.

The sockets and weight channels call it before they bind or connect. Without CURVE keys, only
addresses that no other host can reach are allowed (loopback, ipc, inproc); with keys, any.
"""

import ipaddress
import os
import re
import socket

from tidegate.errors import AddressInUse, ConfigError

_TCP = re.compile(
    r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|\*|[A-Za-z0-9._-]+):(?P<port>\*|\d{1,5})", re.ASCII
)

PORT_MAX = 65535

IPC_PATH_BYTES_MAX = 107
"""Maximum path length of ``sockaddr_un`` on Linux (108 bytes) without the terminating zero."""

_EXAMPLES = "use ipc:///an/absolute/path or tcp://127.0.0.1:5555"


def check_listener(address: str, *, has_keys: bool) -> None:
    """Check an address to bind: well-formed, and local to this host unless there are keys.

    Raises:
        ConfigError: states the fault and what to do.
    """
    _check(address, has_keys=has_keys, listens=True)


def check_connector(address: str, *, has_keys: bool) -> None:
    """Check an address to connect to: complete, and on this host unless there are keys.

    Raises:
        ConfigError: states the fault and what to do.
    """
    _check(address, has_keys=has_keys, listens=False)


def is_on_this_host(address: str) -> bool:
    """Return whether only processes of this host can reach a well-formed address."""
    match = _TCP.fullmatch(address)
    return match is None or _is_loopback(match["host"])


def connectable_address(address: str) -> str:
    """Return the address to connect to a listener of this host; a wildcard becomes the loopback."""
    match = _TCP.fullmatch(address)
    if match is None:
        return address
    loopback = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return f"tcp://{loopback.get(match['host'], match['host'])}:{match['port']}"


def with_any_port(address: str) -> str | None:
    """Return the same interface with a wildcard port; None for an address without ports."""
    match = _TCP.fullmatch(address)
    return None if match is None else f"tcp://{match['host']}:*"


def resolve_wildcard_host(address: str, template: str) -> str:
    """Replace a wildcard host in ``template`` (``tcp://*:PORT``) with the host of ``address``."""
    match, wildcard = _TCP.fullmatch(address), _TCP.fullmatch(template)
    if match is None or wildcard is None or wildcard["host"] != "*":
        return template
    return f"tcp://{match['host']}:{wildcard['port']}"


def local_address_towards(address: str) -> str | None:
    """Return a wildcard-port address of the interface towards ``address``; None if no ports.

    Connects a UDP socket to find the route, which sends nothing.
    """
    match = _TCP.fullmatch(address)
    if match is None:
        return None
    host, port = match["host"].strip("[]"), int(match["port"])
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"this host can't resolve or reach {address!r}: {error}; check the host name and the "
            "network"
        ) from error
    return f"tcp://[{own}]:*" if family == socket.AF_INET6 else f"tcp://{own}:*"


def listening_host(address: str | None) -> str:
    """Return the interface of an address to bind to; the loopback for an address without ports."""
    match = None if address is None else _TCP.fullmatch(address)
    host = "127.0.0.1" if match is None else match["host"].strip("[]")
    return "0.0.0.0" if host == "*" else host


def check_not_in_use(address: str) -> None:
    """Raise AddressInUse if a process listens on this ipc path.

    ZeroMQ would silently take the path over from the listener. A socket file that a dead process
    left behind refuses connections, and may be reused. TCP ports need no check: bind fails.
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
            pass  # a listener too busy to accept still counts
        except OSError:
            return  # no listener, or unusable: bind will report which
    raise AddressInUse(address)


def _check(address: str, *, has_keys: bool, listens: bool) -> None:
    scheme, separator, path = address.partition("://")
    if not separator or not path or "\0" in address:
        raise ConfigError(f"{address!r} is no address; {_EXAMPLES}")
    match scheme:
        case "inproc":
            if has_keys:
                raise ConfigError(
                    f"{address!r} joins threads of one process, where ZeroMQ uses no keys; leave "
                    f"them out, or {_EXAMPLES}"
                )
        case "ipc":
            _check_ipc(address, path)
        case "tcp":
            _check_tcp(address, has_keys=has_keys, listens=listens)
        case _:
            raise ConfigError(f"{address!r} is of an unknown kind; {_EXAMPLES}")


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


def _check_tcp(address: str, *, has_keys: bool, listens: bool) -> None:
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError(f"{address!r} is not tcp://HOST:PORT; {_EXAMPLES}")
    host, port = match["host"], match["port"]
    if port == "*" and not listens:
        raise ConfigError(
            f"{address!r} leaves the port open, so there is nothing to connect to; give the port "
            "that the listener reports"
        )
    if port != "*" and not 0 < int(port) <= PORT_MAX:
        raise ConfigError(f"{address!r}: a port is 1 to {PORT_MAX}, or * for any free one")
    if not has_keys and not _is_loopback(host):
        raise ConfigError(
            f"{address!r} can be reached from other hosts, so it needs keys: make them with "
            f"`tidegate keys DIRECTORY`, then set curve_key_directory='DIRECTORY' for the run, and "
            f"give `--curve-key-directory DIRECTORY/engine` to engines (for this host alone, "
            f"{_EXAMPLES})"
        )
    if not listens and (host == "*" or _is_unspecified(host)):
        raise ConfigError(
            f"{address!r} is where to listen, on every interface; connect to one of them, by its "
            f"name or number"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a host name may resolve to any address


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
