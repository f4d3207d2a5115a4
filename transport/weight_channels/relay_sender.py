"""Orchestrator's end of the ``relay`` weight channel: assigns each relay the node to fetch from.

It serves chunks as the ``zmq`` sender does, to the first relay of each version and to relays that
no other can serve.
"""

from dataclasses import dataclass, field

import zmq

from tidegate.transport.messages import InitWeights
from tidegate.transport.security import OrchestratorKeys, ephemeral_keys
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

    def parent(self, request: ParentRequest, *, fan_out: int = 1) -> str:
        """Return the address of the asker's parent; empty for the sender.

        The sender is node 0 and the asker node n + 1 of a tree in which each serves ``fan_out``.
        """
        if request.silent_parent:
            self.silent.add(request.silent_parent)
        self.silent.discard(request.relay_address)  # it has just sent a message
        if request.relay_address not in self.relays:
            self.relays.append(request.relay_address)
        before = self.relays[: self.relays.index(request.relay_address)]
        candidates = [relay for relay in before if relay not in self.silent]
        index = len(candidates) // fan_out
        return candidates[index - 1] if index else ""


class RelaySender(ZmqSender):
    """A ZmqSender that delegates most of the sending to relays."""

    def __init__(
        self, address: str | None = None, *, keys: OrchestratorKeys | None = None, fan_out: int = 1
    ) -> None:
        """Listen as :class:`ZmqSender` does; ``fan_out`` is how many hosts each host serves.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._trees: dict[str, RelayTree] = {}
        """One line per requested location; accessed by the serving thread only."""
        self._fan_out = fan_out
        self._relay_keys = None if keys is None else ephemeral_keys()[1]
        """Keys shared by all relays. Engines get them with the first message, which is encrypted.
        Any process that has them can serve and fetch the run's weights."""
        super().__init__(address, keys=keys)

    @property
    def silent_relays(self) -> int:
        """Number of relays reported silent for the most recently requested version."""
        return sum(len(tree.silent) for tree in list(self._trees.values())[-1:])

    def init(self) -> InitWeights:
        """Return the phase-1 message: the address to ask, and the relays' shared keys."""
        info = {"address": self.address, "sender": self._id}
        if self._relay_keys is not None:
            info["public"] = self._relay_keys.public.decode()
            info["secret"] = self._relay_keys.secret.decode()
        return InitWeights(channel=NAME, info=info)

    def _reply(self, peer: bytes, frames: list[bytes]) -> None:
        request = decode_parent_request(frames[0]) if len(frames) == 1 else None
        if request is None:
            super()._reply(peer, frames)
        else:
            self._socket.send_multipart([peer, encode(self._parent(request))], zmq.NOBLOCK)

    def _parent(self, request: ParentRequest) -> ParentAssignment:
        with self._lock:
            sizes = {stored.location: stored.nbytes for stored in self._stored}
        self._trees = {at: tree for at, tree in self._trees.items() if at in sizes}
        nbytes = sizes.get(request.location)
        if nbytes is None:
            reason = f"{request.location!r} is not served, or no longer"
            return ParentAssignment(request.location, kept_locations=list(sizes), refusal=reason)
        tree = self._trees.setdefault(request.location, RelayTree())
        address = tree.parent(request, fan_out=self._fan_out)
        return ParentAssignment(request.location, address, nbytes, list(sizes))
