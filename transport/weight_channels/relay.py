"""Orchestrator's end of the ``relay`` weight channel: hosts forward weights in a chain.

One engine per host becomes the host's relay (:mod:`relay_node`): it fetches into memory that the
host's other engines map, and forwards chunks to the next host as they arrive. :class:`RelaySender`
assigns each relay its parent, per version, in the order of requests, so that no relay fetches from
a dead host, and a late relay fetches from one that has everything. It serves chunks as
:class:`ZmqSender` does, to the first relay of a version and to relays that no other can serve.

Why a chain and not a tree: with S bytes, chunks of c, a link of B bytes/s and n hosts, a chain
takes S/B + (n - 1)·c/B, and a tree with fan-out f takes f·S/B. For 125 hosts and 2 MiB chunks the
second term equals the time of 0.25 GB: a tree is faster for models smaller than that.
"""

from dataclasses import dataclass, field

import zmq

from tidegate.transport.messages import InitWeights
from tidegate.transport.security import OrchestratorKeys, ephemeral_keys
from tidegate.transport.weight_channels.base import WeightChannel, decode_if, encode
from tidegate.transport.weight_channels.relay_messages import ParentAssignment, ParentRequest
from tidegate.transport.weight_channels.relay_receiver import RelayReceiver
from tidegate.transport.weight_channels.zmq import ZmqSender

NAME = "relay"


@dataclass(slots=True)
class RelayChain:
    """The relays that have asked for one location, in that order. A relay fetches only from earlier
    ones, so there are no cycles."""

    relays: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Relays that a child has reported as silent."""

    def parent(self, request: ParentRequest) -> str:
        """Return the address of the relay that the requester fetches chunks from; empty if it
        fetches them from the sender."""
        if request.silent_parent:
            self.silent.add(request.silent_parent)
        self.silent.discard(request.relay_address)  # it has just sent a message
        if request.relay_address not in self.relays:
            self.relays.append(request.relay_address)
        before = self.relays[: self.relays.index(request.relay_address)]
        candidates = [relay for relay in before if relay not in self.silent]
        return candidates[-1] if candidates else ""


class RelaySender(ZmqSender):
    """A ZmqSender that delegates most of the sending to relays."""

    def __init__(self, address: str | None = None, *, keys: OrchestratorKeys | None = None) -> None:
        """Listen as :class:`ZmqSender` does.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._chains: dict[str, RelayChain] = {}
        """Of each requested location; accessed by the serving thread only."""
        self._relay_keys = None if keys is None else ephemeral_keys()[1]
        """Keys shared by all relays. Engines get them with the first message, which is encrypted.
        Any process that has them can serve and fetch the run's weights."""
        super().__init__(address, keys=keys)

    def init(self) -> InitWeights:
        """Return what engines are told once they connect: the address to ask for weights, and the
        relays' shared keys."""
        info = {"address": self.address, "sender": self._id}
        if self._relay_keys is not None:
            info["public"] = self._relay_keys.public.decode()
            info["secret"] = self._relay_keys.secret.decode()
        return InitWeights(channel=NAME, info=info)

    def _reply(self, peer: bytes, frames: list[bytes]) -> None:
        request = decode_if(frames, ParentRequest)
        if request is None:
            super()._reply(peer, frames)
        else:
            self._socket.send_multipart([peer, encode(self._parent(request))], zmq.NOBLOCK)

    def _parent(self, request: ParentRequest) -> ParentAssignment:
        with self._lock:
            sizes = {stored.location: stored.nbytes for stored in self._stored}
        self._chains = {at: chain for at, chain in self._chains.items() if at in sizes}
        nbytes = sizes.get(request.location)
        if nbytes is None:
            reason = f"{request.location!r} is not in the sender's memory (any more)"
            return ParentAssignment(request.location, kept_locations=list(sizes), refusal=reason)
        parent = self._chains.setdefault(request.location, RelayChain()).parent(request)
        return ParentAssignment(request.location, parent, nbytes, list(sizes))


CHANNEL = WeightChannel(
    open_sender=lambda config: RelaySender(config.address, keys=config.keys),
    open_receiver=RelayReceiver,
    one_reader=True,
)
