"""ZeroMQ sockets of a relay, towards the sender and other relays, with or without CURVE keys.

:class:`RelayNode` creates them, and polls them on its thread.
"""

from dataclasses import dataclass

import zmq

from tidegate.transport.addresses import local_address_towards
from tidegate.transport.messages import InitWeights
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.security import (
    EngineKeys,
    OrchestratorKeys,
    secure_connector,
    secure_listener,
)
from tidegate.transport.weight_channels.zmq import (
    QUEUED_CHUNKS_MAX,
    REQUEST_BYTES_MAX,
    SEND_BUFFER_BYTES,
)
from tidegate.transport.zap_authenticator import ZapAuthenticator
from tidegate.transport.zeromq import Context, Socket, enable_heartbeats, enable_keepalive

SENDER_TIMEOUT_S = 10.0
"""Silence after which the connection to the sender is renewed. Its messages fit a packet, and
sockets to parents are renewed anyway."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """Address of the sender, and this process's keys towards it and towards other relays."""

    address: str
    keys: EngineKeys | None
    relay_keys: EngineKeys | None

    @classmethod
    def of(cls, address: str, init: InitWeights, keys: EngineKeys | None) -> "Upstream":
        """Read the relays' CURVE keys from ``InitWeights``, which the sender's run sends first."""
        public, secret = (str(init.info.get(key, "")).encode() for key in ("public", "secret"))
        relay_keys = EngineKeys(public, secret, public) if public else None
        return cls(address, keys, relay_keys)


class RelaySockets:
    """A relay's sockets. They have a ZeroMQ context of their own, because a context has one ZAP
    authenticator."""

    def __init__(self, upstream: Upstream) -> None:
        """Connect to the sender, which need not answer yet, and listen for other relays.

        Raises:
            ConfigError: this host has no route to the sender.
        """
        self._upstream = upstream
        self._context: Context = zmq.Context()
        self._private: PrivateDirectory | None = None
        try:
            self.sender = self.to_parent("", silent_s=SENDER_TIMEOUT_S)
            """DEALER to the sender, which assigns parents."""
            self.router = self._bind()
            """ROUTER for relays of other hosts."""
            self.address = self.router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def to_parent(self, address: str, *, silent_s: float | None = None) -> Socket:
        """Open a socket to another relay, or to the sender if ``address`` is empty.

        The connection is renewed after ``silent_s`` without a message from the peer.
        """
        keys = self._upstream.relay_keys if address else self._upstream.keys
        address = address or self._upstream.address
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in address)
        enable_keepalive(socket)
        if silent_s is not None:
            enable_heartbeats(socket, silent_s)
        if keys is not None:
            secure_connector(socket, keys)
        socket.connect(address)
        return socket

    def close(self) -> None:
        """Close the sockets; all sockets to parents must be closed before."""
        self.sender.close()
        self.router.close()
        self._context.term()  # the authenticator thread notices, and closes its sockets
        if self._private is not None:
            self._private.remove()

    def _bind(self) -> Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUED_CHUNKS_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUED_CHUNKS_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        enable_keepalive(socket)
        keys = self._upstream.relay_keys
        if keys is not None:
            own = OrchestratorKeys(keys.public, keys.secret, frozenset({keys.public}))
            secure_listener(socket, own)
            ZapAuthenticator(socket, own)
        address = local_address_towards(self._upstream.address)
        if address is None:
            self._private = PrivateDirectory("relay")
            address = f"ipc://{self._private.path}/relay"
        else:
            socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
            socket.setsockopt(zmq.IPV6, "[" in address)
        socket.bind(address)
        return socket


def is_readable(socket: Socket) -> bool:
    """Return whether a message can be read."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
