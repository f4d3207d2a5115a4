"""ZeroMQ sockets of a relay, towards the sender and other relays, with or without CURVE keys.

:class:`RelayNode` uses them.
"""

from dataclasses import dataclass

import zmq

from tidegate.transport.addresses import own_address_towards
from tidegate.transport.messages import InitWeights
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.security import (
    EngineKeys,
    OrchestratorKeys,
    secure_connector,
    secure_listener,
)
from tidegate.transport.weight_channels.zmq import SEND_BUFFER_BYTES
from tidegate.transport.weight_channels.zmq_sender import QUEUED_MAX, REQUEST_BYTES_MAX
from tidegate.transport.zap_authenticator import ZapAuthenticator
from tidegate.transport.zeromq import Context, Socket, expect_life, outlive_links

GUIDE_SILENT_S = 10.0
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
        """Read the relay keys from the sender's phase-1 message."""
        public, secret = (str(init.info.get(key, "")).encode() for key in ("public", "secret"))
        relay_keys = EngineKeys(public, secret, public) if public else None
        return cls(address, keys, relay_keys)


class RelaySockets:
    """A relay's sockets, in a context of their own because of its ZAP authenticator."""

    def __init__(self, upstream: Upstream) -> None:
        """Connect to the sender, which need not answer yet, and listen for other relays.

        Raises:
            ConfigError: this host has no route to the sender.
        """
        self._upstream = upstream
        self._context: Context = zmq.Context()
        self._private: PrivateDirectory | None = None
        try:
            self.guide = self.to_parent("", silent_s=GUIDE_SILENT_S)
            """DEALER to the sender, which assigns parents."""
            self.door = self._bound()
            """ROUTER for relays of other hosts."""
            self.here = self.door.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def to_parent(self, address: str, *, silent_s: float | None = None) -> Socket:
        """Open a socket to another relay, or to the sender if ``address`` is empty.

        The connection is renewed after ``silent_s`` without a message from the peer.
        """
        keys = self._upstream.relay_keys if address else self._upstream.keys
        address = address or self._upstream.address
        made = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, "[" in address)
        outlive_links(made)
        if silent_s is not None:
            expect_life(made, silent_s)
        if keys is not None:
            secure_connector(made, keys)
        made.connect(address)
        return made

    def close(self) -> None:
        """Close the sockets; all sockets to parents must be closed before."""
        self.guide.close()
        self.door.close()
        self._context.term()  # the authenticator thread notices, and closes its sockets
        if self._private is not None:
            self._private.remove()

    def _bound(self) -> Socket:
        made = self._context.socket(zmq.ROUTER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, QUEUED_MAX)
        made.setsockopt(zmq.RCVHWM, QUEUED_MAX)
        made.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        outlive_links(made)
        keys = self._upstream.relay_keys
        if keys is not None:
            own = OrchestratorKeys(keys.public, keys.secret, frozenset({keys.public}))
            secure_listener(made, own)
            ZapAuthenticator(made, own)
        address = own_address_towards(self._upstream.address)
        if address is None:
            self._private = PrivateDirectory("relay")
            address = f"ipc://{self._private.path}/relay"
        else:
            made.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
            made.setsockopt(zmq.IPV6, "[" in address)
        made.bind(address)
        return made


def is_readable(socket: Socket) -> bool:
    """Return whether a message can be read."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
