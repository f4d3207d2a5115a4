"""As whom does a relay speak, to the sender and to other relays? Its sockets, with keys or without.

It knows addresses and keys, and nothing of what is said.
"""

from dataclasses import dataclass

import zmq

from tidegate.transport.addresses import own_address_towards
from tidegate.transport.doorkeeper import Doorkeeper
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
from tidegate.transport.zeromq import Context, Socket, expect_life, outlive_links

GUIDE_SILENT_S = 10.0
"""What the sender says there fits a packet, and sockets to parents are made anew anyway."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The sender, and who this process is to it and to other relays."""

    address: str
    keys: EngineKeys | None
    relay_keys: EngineKeys | None

    @classmethod
    def of(cls, address: str, init: InitWeights, keys: EngineKeys | None) -> "Upstream":
        """As the sender's first message says."""
        public, secret = (str(init.info.get(key, "")).encode() for key in ("public", "secret"))
        relay_keys = EngineKeys(public, secret, public) if public else None
        return cls(address, keys, relay_keys)


class RelaySockets:
    """A context of its own, for its doorkeeper, and what is in it."""

    def __init__(self, upstream: Upstream) -> None:
        """Connect to the sender, which need not answer yet, and listen for other relays.

        Raises:
            ConfigError: this host knows no way to the sender.
        """
        self._upstream = upstream
        self._context: Context = zmq.Context()
        self._private: PrivateDirectory | None = None
        try:
            self.guide = self.to_parent("", silent_s=GUIDE_SILENT_S)
            """To the sender, which says whom to fetch from."""
            self.door = self._bound()
            """For relays of other hosts."""
            self.here = self.door.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def to_parent(self, address: str, *, silent_s: float | None = None) -> Socket:
        """A socket to another relay; to the sender itself if ``address`` is empty.

        ``silent_s``: after so long a connection is made anew.
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
        """Once all sockets to parents are closed."""
        self.guide.close()
        self.door.close()
        self._context.term()  # which the doorkeeper notices, and closes its own
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
            Doorkeeper(made, own)
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
    """Whether something has come."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
