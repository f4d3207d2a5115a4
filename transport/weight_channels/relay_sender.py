"""Orchestrator's end of the ``relay`` weight channel: assigns each relay the node to fetch from.

It serves chunks as the ``zmq`` sender does, to the first relay of each version and to relays that
no other can serve.
"""

from dataclasses import dataclass, field

import zmq

from tidegate.transport.messages import InitWeights
from tidegate.transport.security import OrchestratorKeys, passing_keys
from tidegate.transport.weight_channels.relay import (
    NAME,
    ParentAssignment,
    ParentRequest,
    decode_parent_request,
    encode,
)
from tidegate.transport.weight_channels.zmq_sender import ZmqSender


@dataclass(slots=True)
class RelayTree:
    """The relays that have asked for one location, in that order. A relay fetches only from earlier
    ones, so there are no cycles."""

    relays: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Relays that a child has reported as silent."""

    def parent(self, where: ParentRequest, *, fan_out: int = 1) -> str:
        """Return the address of the asker's parent; empty for the sender.

        The sender is node 0 and the asker node n + 1 of a tree in which each serves ``fan_out``.
        """
        if where.silent_parent:
            self.silent.add(where.silent_parent)
        self.silent.discard(where.relay_address)  # it has just sent a message
        if where.relay_address not in self.relays:
            self.relays.append(where.relay_address)
        before = self.relays[: self.relays.index(where.relay_address)]
        able = [relay for relay in before if relay not in self.silent]
        node = len(able) // fan_out
        return able[node - 1] if node else ""


class RelaySender(ZmqSender):
    """A ZmqSender that delegates most of the sending to relays."""

    def __init__(
        self, address: str | None = None, *, keys: OrchestratorKeys | None = None, fan_out: int = 1
    ) -> None:
        """Listen as :class:`ZmqSender` does; ``fan_out`` is how many hosts each host serves.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._lines: dict[str, RelayTree] = {}
        """One line per requested location; accessed by the serving thread only."""
        self._fan_out = fan_out
        self._relay_keys = None if keys is None else passing_keys()[1]
        """Keys shared by all relays. Engines get them with the first message, which is encrypted.
        Any process that has them can serve and fetch the run's weights."""
        super().__init__(address, keys=keys)

    @property
    def silent_relays(self) -> int:
        """Number of relays reported silent for the most recently requested version."""
        return sum(len(line.silent) for line in list(self._lines.values())[-1:])

    def init(self) -> InitWeights:
        """Return the phase-1 message: the address to ask, and the relays' shared keys."""
        info = {"address": self.address, "sender": self._id}
        if self._relay_keys is not None:
            info["public"] = self._relay_keys.public.decode()
            info["secret"] = self._relay_keys.secret.decode()
        return InitWeights(channel=NAME, info=info)

    def _answer(self, peer: bytes, frames: list[bytes]) -> None:
        where = decode_parent_request(frames[0]) if len(frames) == 1 else None
        if where is None:
            super()._answer(peer, frames)
        else:
            self._socket.send_multipart([peer, encode(self._parent(where))], zmq.NOBLOCK)

    def _parent(self, where: ParentRequest) -> ParentAssignment:
        with self._lock:
            sizes = {place.location: place.nbytes for place in self._places}
        self._lines = {at: line for at, line in self._lines.items() if at in sizes}
        nbytes = sizes.get(where.location)
        if nbytes is None:
            why = f"{where.location!r} is not here, or not any more"
            return ParentAssignment(where.location, kept_locations=list(sizes), refusal=why)
        line = self._lines.setdefault(where.location, RelayTree())
        address = line.parent(where, fan_out=self._fan_out)
        return ParentAssignment(where.location, address, nbytes, list(sizes))
