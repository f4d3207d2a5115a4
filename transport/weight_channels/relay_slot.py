"""State of one location in a relay: received chunks, the parent, and peers with open requests.

:class:`RelayNode` drives it; it sends nothing itself.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from tidegate.transport.weight_channels.host_memory import HostMemory
from tidegate.transport.weight_channels.transfer import Transfer
from tidegate.transport.weight_channels.zmq import CHUNK_BYTES
from tidegate.transport.zeromq import Socket


@dataclass(frozen=True, slots=True)
class RelayBootstrap:
    """Memory that an engine had mapped before it became its host's relay."""

    location: str
    fd: int
    complete_bytes: int


@dataclass(eq=False, slots=True)
class Slot:
    """One location in a relay."""

    location: str
    requested_s: float
    """Monotonic time of the last parent request to the sender."""
    moved_s: float
    """Monotonic time of the last received chunk."""
    parent_message_s: float = 0.0
    """Monotonic time of the last message from the parent."""
    bootstrap: RelayBootstrap | None = None
    memory: HostMemory | None = None
    nbytes: int = 0
    transfer: Transfer | None = None
    """Progress of the transfer; None until the sender has reported the size."""
    parent: str = ""
    """Address of the parent; empty: the sender itself."""
    source: Socket | None = None
    """Socket to the parent; None while nothing is being fetched."""
    waiting_peers: dict[int, list[bytes]] = field(default_factory=dict)
    """Relays that requested a chunk that has not arrived, by the chunk's start."""

    @property
    def complete_bytes(self) -> int:
        """Number of leading bytes that have arrived; -1 if no memory is allocated yet."""
        return -1 if self.transfer is None else min(self.transfer.complete_bytes, self.nbytes)

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.transfer is not None and self.complete_bytes == self.nbytes

    def open(self, memory: HostMemory, nbytes: int, start: int) -> None:
        """Assign memory whose bytes before ``start`` are valid already."""
        self.memory, self.nbytes = memory, nbytes
        self.transfer = Transfer(self.location, memory.view(nbytes), start=start)

    def chunk(self, start: int) -> memoryview | None:
        """Return the chunk at ``start``; None if it has not arrived."""
        if self.memory is None or self.transfer is None or not self.transfer.has_chunk(start):
            return None
        return self.memory.view(self.nbytes)[start : start + CHUNK_BYTES]

    def add_waiting(self, peer: bytes, starts: Iterator[int] | range) -> None:
        """Register a relay that requested these chunks before they arrived."""
        for start in starts:
            waiting = self.waiting_peers.setdefault(start, [])
            if peer not in waiting:
                waiting.append(peer)

    @property
    def requesting_peers(self) -> set[bytes]:
        """ZeroMQ identities of the relays that requested a chunk that has not arrived."""
        return {peer for peers in self.waiting_peers.values() for peer in peers}

    def stop_fetching(self) -> None:
        """Close the socket to the parent; received chunks stay."""
        if self.source is not None:
            self.source.close(linger=0)
            self.source = None

    def close(self) -> None:
        """Release the memory and the bootstrap descriptor."""
        memory, self.memory = self.memory, None
        bootstrap, self.bootstrap = self.bootstrap, None
        if memory is not None:
            memory.close()
        if bootstrap is not None:
            os.close(bootstrap.fd)
