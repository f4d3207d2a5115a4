"""Orchestrator's end of the ``collective`` weight channel: forms rounds and broadcasts as rank 0.

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
from tidegate.transport.weight_channels.collective import (
    GATHER_S,
    NAME,
    PIECE_BYTES,
    BroadcastMember,
    RoundAssignment,
    RoundRequest,
    decode_round_request,
    encode,
    open_store,
    own_gpu,
)
from tidegate.transport.weight_channels.zmq_sender import Place, ZmqSender

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
        self._asked: dict[bytes, RoundRequest] = {}
        self._first_asked_s = 0.0
        self._known: dict[bytes, float] = {}
        """Known receivers, with the time of their last request."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights round")
        self._running: Future[RoundAssignment | None] | None = None
        """Running round; its result is sent to the members if it failed."""
        self._is_left = False
        """Whether a member has left the running round."""
        self._is_closed = False
        self.rounds = 0
        """Number of rounds started."""
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
                is_quiet = not self._asked and self._running is None
                if is_quiet or self._socket.poll(TICK_MS):
                    peer, *frames = self._socket.recv_multipart()
                    self._answer(peer, frames)
                self._end_if_over()
                self._begin_if_due()
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _answer(self, peer: bytes, frames: list[bytes]) -> None:
        join = decode_round_request(frames[0]) if len(frames) == 1 else None
        if join is None:
            super()._answer(peer, frames)
            return
        self._known[peer] = now_s = time.monotonic()
        if not join.location:
            self._asked.pop(peer, None)
            self._is_left |= peer in self._members
            return
        if not self._asked:
            self._first_asked_s = now_s
        self._asked[peer] = join

    def _end_if_over(self) -> None:
        if self._running is None or not self._running.done():
            return
        failed, self._running = self._running.result(), None
        if failed is not None:
            for peer in self._members:
                self._socket.send_multipart([peer, encode(failed)])

    def _begin_if_due(self) -> None:
        if not self._asked or self._running is not None:
            return
        now_s = time.monotonic()
        known = {peer for peer, heard_s in self._known.items() if now_s - heard_s < LOST_AFTER_S}
        if known <= self._asked.keys() or now_s - self._first_asked_s > GATHER_S:
            self._begin()

    def _begin(self) -> None:
        """Start a round for all who want the version that the oldest request wants."""
        location = next(iter(self._asked.values())).location
        asked = {peer: join for peer, join in self._asked.items() if join.location == location}
        for peer in asked:
            del self._asked[peer]
        with self._lock:
            place = next((p for p in self._places if p.location == location), None)
        if place is None:
            why = f"{location!r} is not here, or not any more"
            for peer in asked:
                self._socket.send_multipart([peer, encode(RoundAssignment(location, refusal=why))])
            return
        start = min(join.received_bytes for join in asked.values()) // PIECE_BYTES * PIECE_BYTES
        backend = self._backend(asked)
        peers = tuple(sorted(asked))
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
                start=min(start, place.nbytes),
                nbytes=place.nbytes,
            )
            for rank in range(size)
        ]
        for peer, told in zip(peers, rounds[1:], strict=True):
            self._socket.send_multipart([peer, encode(told)])
        self.rounds += 1
        self._is_left = False
        self._running = self._pool.submit(self._broadcast, rounds[0], place)

    def _backend(self, asked: dict[bytes, RoundRequest]) -> str:
        """Return ``nccl`` only if every member has a GPU of its own, because NCCL refuses to share
        one."""
        gpus = [self._gpu, *(join.gpu for join in asked.values())]
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

    def _broadcast(self, round_: RoundAssignment, place: Place) -> RoundAssignment | None:
        """Broadcast a version; return the failure notice for the members, or None."""
        member = self._member
        if member is None or member.name != round_.group:
            host = None if self._host == "0.0.0.0" else self._host
            member = self._member = BroadcastMember(round_, lambda: self._store, own_host=host)
        try:
            for start in range(round_.start, round_.nbytes, PIECE_BYTES):
                piece = place.memory.bytes[start : min(start + PIECE_BYTES, round_.nbytes)]
                if not member.broadcast(piece, lambda: self._is_served(place)):
                    break
                self.sent_bytes += len(piece)
            else:
                return None
        except RuntimeError:
            pass  # a member is gone; the others ask again
        self._leave()
        return RoundAssignment(round_.location, group=round_.group)

    def _is_served(self, place: Place) -> bool:
        with self._lock:
            served = (other.location for other in self._places)
            is_over = self._is_closed or self._is_left
            return not is_over and place.location in served


def _store(host: str) -> tuple[Any, int]:
    """Open the store on the interface that serves weights, and on no other."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    seen = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            port = listener.getsockname()[1]
            return open_store(seen, port, listen_fd=listener.detach()), port
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"weight_channel='collective' needs torch.distributed, and this torch has none: {error}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"groups for weights can't meet at {host!r}: {error}") from error
