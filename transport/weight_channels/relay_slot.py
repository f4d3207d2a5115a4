"""What does a relay have of one location, from whom does it come, and who waits for it?

It knows chunks, and names of those who wait; it sends nothing.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from tidegate.transport.weight_channels.host_memory import HostMemory
from tidegate.transport.weight_channels.transfer import Transfer
from tidegate.transport.weight_channels.zmq import CHUNK_BYTES
from tidegate.transport.zeromq import Socket


@dataclass(frozen=True, slots=True)
class Seed:
    """What an engine held that becomes its host's relay."""

    location: str
    fd: int
    complete_bytes: int


@dataclass(eq=False, slots=True)
class Slot:
    """One location."""

    location: str
    asked_s: float
    """When the sender was asked last whom to fetch from."""
    moved_s: float
    """When the last chunk came."""
    heard_s: float = 0.0
    """When the last word came from whom it is fetched from."""
    seed: Seed | None = None
    memory: HostMemory | None = None
    nbytes: int = 0
    transfer: Transfer | None = None
    """None until the sender has said how much there is."""
    parent: str = ""
    """Empty: the sender itself."""
    source: Socket | None = None
    """To the parent; None while nobody is asked."""
    held: dict[int, list[bytes]] = field(default_factory=dict)
    """Start of a chunk that isn't there yet -> relays that asked for it."""

    @property
    def complete_bytes(self) -> int:
        """So many are there from the beginning on; -1 if not even the memory is."""
        return -1 if self.transfer is None else min(self.transfer.complete_bytes, self.nbytes)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come."""
        return self.transfer is not None and self.complete_bytes == self.nbytes

    def open(self, memory: HostMemory, nbytes: int, start: int) -> None:
        """There is room for it now, in which all before ``start`` is right."""
        self.memory, self.nbytes = memory, nbytes
        self.transfer = Transfer(self.location, memory.view(nbytes), start=start)

    def chunk(self, start: int) -> memoryview | None:
        """The chunk that begins there; None if it isn't there yet."""
        if self.memory is None or self.transfer is None or not self.transfer.has_chunk(start):
            return None
        return self.memory.view(self.nbytes)[start : start + CHUNK_BYTES]

    def hold(self, peer: bytes, starts: Iterator[int] | range) -> None:
        """Somebody waits for these chunks."""
        for start in starts:
            waiting = self.held.setdefault(start, [])
            if peer not in waiting:
                waiting.append(peer)

    @property
    def waiting(self) -> set[bytes]:
        """Who waits for anything."""
        return {peer for peers in self.held.values() for peer in peers}

    def stop_fetching(self) -> None:
        """Listen to the parent no more; what has come stays."""
        if self.source is not None:
            self.source.close(linger=0)
            self.source = None

    def close(self) -> None:
        """Forget it all."""
        memory, self.memory = self.memory, None
        seed, self.seed = self.seed, None
        if memory is not None:
            memory.close()
        if seed is not None:
            os.close(seed.fd)
