"""ZAP authenticator: accepts or rejects each CURVE connection by the client's public key.

The listeners start one whenever they have keys. libzmq asks it over ZAP
(https://rfc.zeromq.org/spec/27/) at one inproc address per context, so each listener with keys has
a context of its own. It runs in its own thread, because a handshake must not wait for the event
loop. The key directory is re-read for each connection: adding a file admits a key and removing it
rejects the key, from the next connection on.
"""

import logging
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from tidegate.errors import ConfigError
from tidegate.transport.rate_limiter import RateLimiter
from tidegate.transport.security import KEY_BYTES, OrchestratorKeys, read_allowed
from tidegate.transport.zeromq import Socket

_ZAP_ADDRESS = "inproc://zeromq.zap.01"

_EVENTS_ADDRESS = "inproc://tidegate.zap"

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH  # public key not in the allowed list
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # no keys, or keys for another orchestrator
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # peer hung up, or timed out
)

WARNINGS_PER_MINUTE_MAX = 6
"""Maximum log lines per minute about rejected connections."""

log = logging.getLogger("tidegate")


class ZapAuthenticator:
    """Authenticates the connections of one listening socket, in a thread."""

    def __init__(self, listener: Socket, keys: OrchestratorKeys) -> None:
        """Start before ``listener`` is bound. The thread ends with the context that both share."""
        context = listener.context
        self.refused = 0
        """Number of connections that were rejected."""
        self._keys = keys
        self._rate_limiter = RateLimiter(replies_max=WARNINGS_PER_MINUTE_MAX, interval_s=60.0)
        self._requests = context.socket(zmq.REP)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind(_ZAP_ADDRESS)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        listener.monitor(_EVENTS_ADDRESS, _REFUSALS)
        self._events.connect(_EVENTS_ADDRESS)
        threading.Thread(target=self._serve, name="zap-authenticator", daemon=True).start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._requests:
                        self._answer(self._requests.recv_multipart())
                    else:
                        event = recv_monitor_message(self._events)["event"]
                        self.refused += bool(event & _REFUSALS)
        except zmq.ContextTerminated:
            pass
        # also after an exception: without an authenticator, libzmq rejects every connection
        finally:
            self._requests.close()
            self._events.close()

    def _answer(self, frames: list[bytes]) -> None:
        """Reply with ZAP status 200 (accept), 400 (reject) or 300 (temporary failure; retry
        later)."""
        _, request, _, origin, _, mechanism, *credentials = frames
        status, text, name = b"400", b"unknown key", ""
        try:
            allowed = read_allowed(self._keys.allowed)
        except ConfigError as error:
            status, text = b"300", b"the list of keys can't be read"
            self._warn(f"every peer is refused: {error}")
        else:
            key = credentials[0] if credentials else b""
            name = allowed.get(key, "") if mechanism == b"CURVE" else ""
            if name and len(key) == KEY_BYTES:
                status, text = b"200", b"OK"
            else:
                self._warn(
                    f"{origin.decode(errors='replace')} has no accepted key: the connection is "
                    "refused"
                )
        self._requests.send_multipart([b"1.0", request, status, text, name.encode(), b""])

    def _warn(self, message: str) -> None:
        if self._rate_limiter.has(b"", time.monotonic()):
            log.warning("ZAP: %s", message)
