"""Orchestrator's end of the ``collective`` weight channel: gloo or NCCL broadcasts, in rounds.

:mod:`collective_rounds` describes the protocol. The sender forms rounds and broadcasts as rank 0.
It stores versions as :class:`ZmqSender` does, and also answers that channel's requests. Rounds run
one after another on a thread of their own, so that new requests are read meanwhile.
"""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import zmq

from tidegate.errors import ConfigError
from tidegate.transport.addresses import listening_host
from tidegate.transport.messages import InitWeights
from tidegate.transport.security import OrchestratorKeys
from tidegate.transport.weight_channels.base import WeightChannel, decode_if, encode
from tidegate.transport.weight_channels.collective_receiver import CollectiveReceiver
from tidegate.transport.weight_channels.collective_rounds import (
    GATHER_S,
    PIECE_BYTES,
    BroadcastGroup,
    BroadcastMember,
    RoundAssignment,
    RoundRequest,
    join_custom_group,
    open_store,
    own_gpu,
)
from tidegate.transport.weight_channels.zmq import StoredVersion, ZmqSender

__all__ = [
    "CHANNEL",
    "BroadcastGroup",
    "CollectiveSender",
    "join_custom_group",
    "open_store",
]

NAME = "collective"

TICK_MS = 50
"""Polling interval for due rounds while requests are waiting."""

LOST_AFTER_S = 600.0
"""A receiver silent for this long is no longer waited for."""


class CollectiveSender(ZmqSender):
    """Rank 0 of every round."""

    def __init__(self, address: str | None = None, *, keys: OrchestratorKeys | None = None) -> None:
        """Listen as :class:`ZmqSender` does, and open the TCPStore through which groups meet.

        Raises:
            ConfigError: the address cannot be bound, or this torch has no torch.distributed.
        """
        self._host = listening_host(address)
        self._store, self._store_port = _store(self._host)
        self._gpu = own_gpu()
        self._member: BroadcastMember | None = None
        self._members: tuple[bytes, ...] = ()
        """Peers in the current group beside this end, in rank order."""
        self._groups = 0
        self._requests: dict[bytes, RoundRequest] = {}
        self._first_request_s = 0.0
        self._receivers_last_message_s: dict[bytes, float] = {}
        """Known receivers, with the time of their last request."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights round")
        self._running: Future[RoundAssignment | None] | None = None
        """Running round; its result is sent to the members if it failed."""
        self._has_member_left = False
        """Whether a member has left the running round."""
        self._is_closed = False
        self.rounds = 0
        """Number of rounds started so far."""
        super().__init__(address, keys=keys)

    def init(self) -> InitWeights:
        """Return the phase-1 message: the address to send requests to."""
        return InitWeights(channel=NAME, info={"address": self.address})

    def close(self) -> None:
        """Stop serving; members of a running round see it fail. Idempotent."""
        self._is_closed = True
        super().close()
        self._leave()
        self._pool.shutdown(wait=False)

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        try:
            while True:
                is_idle = not self._requests and self._running is None
                if is_idle or self._socket.poll(TICK_MS):
                    peer, *frames = self._socket.recv_multipart()
                    self._reply(peer, frames)
                self._finish_round_if_done()
                self._start_round_if_due()
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _reply(self, peer: bytes, frames: list[bytes]) -> None:
        request = decode_if(frames, RoundRequest)
        if request is None:
            super()._reply(peer, frames)
            return
        self._receivers_last_message_s[peer] = now_s = time.monotonic()
        if not request.location:
            self._requests.pop(peer, None)
            self._has_member_left |= peer in self._members
            return
        if not self._requests:
            self._first_request_s = now_s
        self._requests[peer] = request

    def _finish_round_if_done(self) -> None:
        if self._running is None or not self._running.done():
            return
        failed, self._running = self._running.result(), None
        if failed is not None:
            for peer in self._members:
                self._socket.send_multipart([peer, encode(failed)])

    def _start_round_if_due(self) -> None:
        if not self._requests or self._running is not None:
            return
        now_s = time.monotonic()
        receivers = {
            peer
            for peer, last_message_s in self._receivers_last_message_s.items()
            if now_s - last_message_s < LOST_AFTER_S
        }
        if receivers <= self._requests.keys() or now_s - self._first_request_s > GATHER_S:
            self._start_round()

    def _start_round(self) -> None:
        """Send the version that the oldest request asks for, to all who have asked for it."""
        location = next(iter(self._requests.values())).location
        requests = {
            peer: request
            for peer, request in self._requests.items()
            if request.location == location
        }
        for peer in requests:
            del self._requests[peer]
        with self._lock:
            stored = next((p for p in self._stored if p.location == location), None)
        if stored is None:
            reason = f"{location!r} is not in the sender's memory (any more)"
            for peer in requests:
                self._socket.send_multipart(
                    [peer, encode(RoundAssignment(location, refusal=reason))]
                )
            return
        received_bytes = min(request.received_bytes for request in requests.values())
        start = received_bytes // PIECE_BYTES * PIECE_BYTES
        backend = self._backend(requests)
        peers = tuple(sorted(requests))
        name = self._group_name(peers, backend)
        size = len(peers) + 1
        rounds = [
            RoundAssignment(
                location,
                group=name,
                store=f"tcp://*:{self._store_port}",
                backend=backend,
                rank=rank,
                world_size=size,
                start=min(start, stored.nbytes),
                nbytes=stored.nbytes,
            )
            for rank in range(size)
        ]
        for peer, assignment in zip(peers, rounds[1:], strict=True):
            self._socket.send_multipart([peer, encode(assignment)])
        self.rounds += 1
        self._has_member_left = False
        self._running = self._pool.submit(self._broadcast, rounds[0], stored)

    def _backend(self, requests: dict[bytes, RoundRequest]) -> str:
        """Return ``nccl`` only if every member has a GPU of its own, because NCCL refuses to share
        one."""
        gpus = [self._gpu, *(request.gpu for request in requests.values())]
        return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"

    def _group_name(self, peers: tuple[bytes, ...], backend: str) -> str:
        member = self._member
        if member is None or peers != self._members or not member.name.endswith(backend):
            self._leave()
            self._members = peers
            self._groups += 1
        return f"{self._groups}-{backend}"

    def _leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()

    # ------------------------------------------------------------ the round's thread

    def _broadcast(self, round_: RoundAssignment, stored: StoredVersion) -> RoundAssignment | None:
        """Broadcast a version; return the failure notice for the members, or None."""
        member = self._member
        if member is None or member.name != round_.group:
            host = None if self._host == "0.0.0.0" else self._host
            member = self._member = BroadcastMember(round_, lambda: self._store, own_host=host)
        try:
            for start in range(round_.start, round_.nbytes, PIECE_BYTES):
                piece = stored.memory.bytes[start : min(start + PIECE_BYTES, round_.nbytes)]
                if not member.broadcast(piece, lambda: self._is_wanted(stored)):
                    break
                self.sent_bytes += len(piece)
            else:
                return None
        except RuntimeError:
            pass  # a member is gone; the others ask again
        self._leave()
        return RoundAssignment(round_.location, group=round_.group)

    def _is_wanted(self, stored: StoredVersion) -> bool:
        with self._lock:
            served = (stored_version.location for stored_version in self._stored)
            is_stopped = self._is_closed or self._has_member_left
            return not is_stopped and stored.location in served


def _store(host: str) -> tuple[Any, int]:
    """Open the store on the interface that serves weights, and on no other."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connect_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            port = listener.getsockname()[1]
            return open_store(connect_host, port, listen_fd=listener.detach()), port
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"weight_channel='collective' needs torch.distributed, and this torch has none: {error}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"can't serve the TCPStore of weight broadcasts at {host!r}: {error}"
        ) from error


CHANNEL = WeightChannel(
    open_sender=lambda config: CollectiveSender(config.address, keys=config.keys),
    open_receiver=CollectiveReceiver,
    one_reader=True,
)
