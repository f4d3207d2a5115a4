"""Node of the weight relay: one process per host, which fetches each version once and forwards it.

:class:`RelayReceiver` starts the node. Its clients are the engines of its host, which map its
memory, and relays of other hosts, which request chunks as from the sender. One thread handles
sockets and timers, without locks; a :class:`Slot` is its state for one location.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import zmq

from tidegate.errors import BadFrame, WeightsRefused
from tidegate.transport.addresses import local_address_towards
from tidegate.transport.limits import cut
from tidegate.transport.messages import InitWeights
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.security import EngineKeys, OrchestratorKeys, secure_connector
from tidegate.transport.wakeup import Wakeup
from tidegate.transport.weight_channels.base import decode, encode
from tidegate.transport.weight_channels.host_memory import (
    MESSAGE_BYTES_MAX,
    HostMemory,
    is_own_user,
)
from tidegate.transport.weight_channels.relay_messages import (
    KEEP_ALIVE_INTERVAL_S,
    PARENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    LocationProgress,
    LocationRequest,
    ParentAssignment,
    ParentRequest,
)
from tidegate.transport.weight_channels.zmq import (
    CHUNK_BYTES,
    CHUNKS_PER_REQUEST_MAX,
    ChunkHeader,
    FetchRequest,
    Transfer,
    chunk_router,
    decode_fetch_request,
    keep_freed_chunks,
    receive_chunk,
)
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
        shared, keys = self._upstream.relay_keys, None
        if shared is not None:
            keys = OrchestratorKeys(shared.public, shared.secret, frozenset({shared.public}))
        address = local_address_towards(self._upstream.address)
        if address is None:
            self._private = PrivateDirectory("relay")
            address = f"ipc://{self._private.path}/relay"
        socket = chunk_router(self._context, address, keys)
        socket.bind(address)
        return socket


def is_readable(socket: Socket) -> bool:
    """Return whether a message can be read."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


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


@dataclass(eq=False, slots=True)
class Client:
    """Connection of an engine of this host."""

    link: socket.socket
    location: str = ""
    """Location that the engine waits for."""
    reported_bytes: int = -1
    """Number of bytes last reported to the engine; -1: it has not got the memory yet."""


class Clients:
    """The engines connected to this host's relay."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        register: Callable[[int, Callable[[], None]], None],
        unregister: Callable[[int], None],
        slot: Callable[[str], Slot | None],
    ) -> None:
        """``slot`` finds the slot of a location; it returns None if there are too many."""
        self._listener = listener
        self._register = register
        self._unregister = unregister
        self._slot = slot
        self._all: dict[int, Client] = {}
        """Clients by file descriptor."""
        register(listener.fileno(), self._admit)

    def report(self, slot: Slot, *, again: bool = False) -> None:
        """Report progress to the engines that wait for a slot; ``again`` reports even without
        progress."""
        for client in list(self._all.values()):
            if client.location == slot.location:
                self._report_to(client, slot, again=again)

    def refuse(self, location: str, reason: str) -> None:
        """Notify the engines that wait for a location that it cannot be fetched."""
        for client in list(self._all.values()):
            if client.location == location:
                client.location = ""
                self._send(client, LocationProgress(location, refusal=reason))

    def close(self) -> None:
        """Close the listener first, so that the name is free for the first engine that notices."""
        self._listener.close()
        for client in self._all.values():
            client.link.close()

    def _admit(self) -> None:
        with suppress(BlockingIOError):
            link, _ = self._listener.accept()
            if not is_own_user(link):
                link.close()
                return
            link.setblocking(False)
            client = self._all[link.fileno()] = Client(link)
            self._register(link.fileno(), lambda: self._on_request(client))

    def _on_request(self, client: Client) -> None:
        try:
            frame = client.link.recv(MESSAGE_BYTES_MAX)
            request = decode(frame, LocationRequest) if frame else None
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            request = None
        if request is None:
            self._disconnect(client)
            return
        client.location, client.reported_bytes = request.location, -1
        slot = self._slot(request.location)
        if slot is None:
            self._send(
                client, LocationProgress(request.location, refusal="too many versions at once")
            )
        else:
            self._report_to(client, slot)

    def _report_to(self, client: Client, slot: Slot, *, again: bool = False) -> None:
        if slot.memory is None:
            if again:
                self._send(client, LocationProgress(""))  # empty location: keep-alive
            return
        ready_bytes = slot.complete_bytes
        if client.reported_bytes == ready_bytes and (slot.is_complete or not again):
            return
        fds = [slot.memory.fd] if client.reported_bytes < 0 else []
        if self._send(client, LocationProgress(slot.location, ready_bytes), fds):
            client.reported_bytes = ready_bytes

    def _send(
        self, client: Client, progress: LocationProgress, fds: list[int] | None = None
    ) -> bool:
        try:
            socket.send_fds(client.link, [encode(progress)], fds or [])
        except BlockingIOError:
            return False  # its socket buffer is full; the next tick reports again
        except OSError:
            self._disconnect(client)
            return False
        return True

    def _disconnect(self, client: Client) -> None:
        fileno = client.link.fileno()
        if self._all.pop(fileno, None) is not None:
            self._unregister(fileno)
            client.link.close()


TICK_S = 0.5
"""Polling interval for silent parents and due keep-alives."""

CHUNKS_PER_TURN = 8
"""Maximum chunks read from one source before others are served."""

SLOTS_MAX = 16
"""Maximum number of locations. A run keeps a few; requests for more are invalid."""

JOIN_TIMEOUT_S = 5.0
"""Longest time in seconds for which closing waits for the thread."""


class RelayNode:
    """The relay of a host, as a thread; it serves as long as it holds the host's socket name."""

    def __init__(
        self, upstream: Upstream, listener: socket.socket, bootstrap: RelayBootstrap | None
    ) -> None:
        """Take over ``listener``, which holds the host's socket name until :meth:`close`.

        Raises:
            ConfigError: this host has no route to the sender; ``listener`` and ``bootstrap`` are
                closed.
        """
        self._upstream = upstream
        self._bootstrap = bootstrap
        self._slots: dict[str, Slot] = {}
        self._spare: list[HostMemory] = []
        self._poller = zmq.Poller()
        self._handlers: dict[Socket | int, Callable[[], None]] = {}
        try:
            self._sockets = RelaySockets(upstream)
        except BaseException:
            listener.close()
            if bootstrap is not None:
                os.close(bootstrap.fd)
            raise
        self._router = self._sockets.router
        self._clients = Clients(
            listener, register=self._register, unregister=self._unregister, slot=self._slot
        )
        keep_freed_chunks()
        self._wakeup = Wakeup()
        self._is_closing = False
        self._next_keep_alive_s = 0.0
        self._register(self._wakeup.fileno(), self._wakeup.clear)
        self._register(self._sockets.sender, self._on_sender_readable)
        self._register(self._router, self._serve_relays)
        self._thread = threading.Thread(target=self._run, name="weights relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and free the name. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            self._wakeup.wake()
        self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------ sockets

    def _register(self, source: Socket | int, handler: Callable[[], None]) -> None:
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def _unregister(self, source: Socket | int) -> None:
        if self._handlers.pop(source, None) is not None:
            self._poller.unregister(source)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for ready, _ in self._poller.poll(round(TICK_S * 1000)):
                    handler = self._handlers.get(ready)
                    if handler is not None:  # a handler called before may have removed it
                        handler()
                self._tick(time.monotonic())
        finally:
            self._end()

    def _end(self) -> None:
        with ExitStack() as ending:  # last first; every callback runs, even if one raises
            ending.callback(self._wakeup.close)
            if self._bootstrap is not None:
                ending.callback(os.close, self._bootstrap.fd)
            for memory in self._spare:
                ending.callback(memory.close)
            for slot in self._slots.values():
                ending.callback(slot.close)
            ending.callback(self._sockets.close)
            # Run before the sockets' close, which may block: the name is free, and engines notice.
            ending.callback(self._clients.close)
            for slot in self._slots.values():
                ending.callback(slot.stop_fetching)

    def _tick(self, now_s: float) -> None:
        are_keep_alives_due = now_s >= self._next_keep_alive_s
        if are_keep_alives_due:
            self._next_keep_alive_s = now_s + KEEP_ALIVE_INTERVAL_S
        for slot in list(self._slots.values()):
            self._clients.report(slot, again=are_keep_alives_due)
            if slot.is_complete:
                continue
            if now_s - slot.moved_s > STALL_TIMEOUT_S:
                self._fail(
                    slot,
                    f"nothing arrived from {slot.parent or self._upstream.address} for "
                    f"{STALL_TIMEOUT_S:g} s; is the orchestrator alive, and does a firewall let "
                    f"this host reach that port?",
                )
            elif now_s - max(slot.requested_s, slot.parent_message_s) > PARENT_TIMEOUT_S:
                self._request_parent(slot, silent_parent=slot.parent)
            elif are_keep_alives_due:
                for peer in slot.requesting_peers:  # a header without a chunk keeps them waiting
                    self._router.send_multipart([peer, encode(ChunkHeader(slot.location, 0))])

    # ------------------------------------------------------------ upstream: the parent

    def _slot(self, location: str) -> Slot | None:
        """Return the slot of a location, created if needed; None if there are too many."""
        slot = self._slots.get(location)
        if slot is None and len(self._slots) < SLOTS_MAX:
            now_s = time.monotonic()
            slot = self._slots[location] = Slot(location, now_s, now_s)
            if self._bootstrap is not None and self._bootstrap.location == location:
                slot.bootstrap, self._bootstrap = self._bootstrap, None
            self._request_parent(slot)
        return slot

    def _request_parent(self, slot: Slot, silent_parent: str = "") -> None:
        slot.requested_s = time.monotonic()
        self._sockets.sender.send(
            encode(ParentRequest(slot.location, self._sockets.address, silent_parent))
        )

    def _on_sender_readable(self) -> None:
        sender = self._sockets.sender
        while is_readable(sender):
            with suppress(BadFrame):  # the request is repeated
                self._apply_assignment(decode(sender.recv_multipart()[0], ParentAssignment))

    def _apply_assignment(self, parent: ParentAssignment) -> None:
        slot = self._slots.get(parent.location)
        if slot is None or slot.is_complete:
            return
        if parent.refusal:
            self._fail(slot, parent.refusal)
            return
        if slot.transfer is None:
            self._drop_locations_except({*parent.kept_locations, parent.location})
            self._open(slot, parent.nbytes)
        self._stop_fetching(slot)
        if slot.is_complete:  # from its seed
            self._on_progress(slot)
            return
        slot.parent, slot.parent_message_s = parent.address, time.monotonic()
        slot.source = self._sockets.to_parent(parent.address)
        self._register(slot.source, lambda: self._fetch(slot))
        assert slot.transfer is not None
        self._request(slot, [*slot.transfer.outstanding(), *slot.transfer.next_requests()])

    def _open(self, slot: Slot, nbytes: int) -> None:
        bootstrap = slot.bootstrap
        if bootstrap is not None:
            memory = HostMemory(nbytes, bootstrap.fd)
            is_whole = bootstrap.complete_bytes >= nbytes
            start = nbytes if is_whole else bootstrap.complete_bytes // CHUNK_BYTES * CHUNK_BYTES
            slot.bootstrap = None
        else:
            memory, start = self._memory_for(nbytes), 0
        slot.open(memory, nbytes, start)

    def _memory_for(self, nbytes: int) -> HostMemory:
        """Reuse spare memory that is large enough, because first touches of pages are expensive."""
        chosen = min(
            (m for m in self._spare if m.nbytes >= nbytes), key=lambda m: m.nbytes, default=None
        )
        for memory in self._spare:
            if memory is not chosen and (chosen is not None or memory.nbytes <= nbytes):
                memory.close()
        self._spare = [m for m in self._spare if chosen is None and m.nbytes > nbytes]
        return chosen if chosen is not None else HostMemory(nbytes)

    def _drop_locations_except(self, kept: set[str]) -> None:
        for location in [location for location in self._slots if location not in kept]:
            slot = self._slots.pop(location)
            self._stop_fetching(slot)
            if slot.memory is not None:
                self._spare.append(slot.memory)
                slot.memory = None
            slot.close()

    def _stop_fetching(self, slot: Slot) -> None:
        if slot.source is not None:
            self._unregister(slot.source)
        slot.stop_fetching()

    def _request(self, slot: Slot, requests: list[FetchRequest]) -> None:
        if slot.source is not None:
            for request in requests:
                slot.source.send(encode(request))

    def _fetch(self, slot: Slot) -> None:
        """Receive chunks from the parent, and forward them."""
        if slot.source is None or slot.transfer is None:
            return
        slot.parent_message_s = time.monotonic()
        for _ in range(CHUNKS_PER_TURN):
            if not is_readable(slot.source):
                break
            try:
                start = receive_chunk(slot.source, slot.transfer, slot.parent)
            except WeightsRefused as error:
                self._on_refusal(slot, str(error))
                return
            if start is not None:
                slot.moved_s = slot.parent_message_s
                self._forward(slot, start)
        self._request(slot, slot.transfer.next_requests())
        self._on_progress(slot)

    def _on_refusal(self, slot: Slot, reason: str) -> None:
        if slot.parent:
            self._stop_fetching(slot)
            self._request_parent(slot, silent_parent=slot.parent)
        else:
            self._fail(slot, reason)

    def _fail(self, slot: Slot, reason: str) -> None:
        """Drop a location and report the failure; a later request tries again."""
        del self._slots[slot.location]
        self._stop_fetching(slot)
        self._clients.refuse(slot.location, cut(reason))
        for peer in slot.requesting_peers:
            refusal = ChunkHeader(slot.location, 0, cut(reason))
            self._router.send_multipart([peer, encode(refusal)])
        slot.close()

    # ------------------------------------------------------------ downstream: other relays

    def _serve_relays(self) -> None:
        while is_readable(self._router):
            peer, *frames = self._router.recv_multipart()
            try:
                fetch = decode_fetch_request(frames)
            except BadFrame:
                continue  # a broken peer gets no answer
            self._serve(peer, fetch)

    def _serve(self, peer: bytes, fetch: FetchRequest) -> None:
        slot = self._slot(fetch.location)
        if slot is None or fetch.start % CHUNK_BYTES or not _is_valid_range(fetch):
            refusal = ChunkHeader(
                fetch.location,
                fetch.start,
                f"{fetch.location!r} is not served, or the range is invalid",
            )
            self._router.send_multipart([peer, encode(refusal)])
            return
        for start in range(fetch.start, fetch.end, CHUNK_BYTES):
            if not self._send_chunk(slot, peer, start):
                slot.add_waiting(peer, range(start, start + 1))

    def _send_chunk(self, slot: Slot, peer: bytes, start: int) -> bool:
        chunk = slot.chunk(start)
        if chunk is None:
            return False
        header = encode(ChunkHeader(slot.location, start))
        self._router.send_multipart([peer, header], zmq.SNDMORE)
        self._router.send(chunk, copy=False)
        return True

    def _forward(self, slot: Slot, start: int) -> None:
        for peer in slot.waiting_peers.pop(start, ()):
            self._send_chunk(slot, peer, start)

    def _on_progress(self, slot: Slot) -> None:
        """Report progress to engines, and to waiting relays if a seed completed the slot."""
        if slot.is_complete:
            self._stop_fetching(slot)
            for start in list(slot.waiting_peers):
                self._forward(slot, start)
        self._clients.report(slot)


def _is_valid_range(fetch: FetchRequest) -> bool:
    return 0 < fetch.end - fetch.start <= CHUNKS_PER_REQUEST_MAX * CHUNK_BYTES
