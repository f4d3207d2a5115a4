"""Weight channel ``zmq``: engines on other hosts pull chunks of the orchestrator's buffer.

Chosen by ``weight_channel="zmq"``; the relay and collective channels build on it. The channel has
its own sockets, so weights never delay other messages. :class:`ZmqSender` serves chunks from a
thread; :class:`ZmqReceiver` requests a few chunks ahead. So no engine receives more than it can
hold, a slow engine slows no other, and the rest is requested again after a lost connection.

Both ends reuse one buffer for all versions, because the first touch of a fresh page costs ten times
a copy into an old one. The sender's frames are created once, and ZeroMQ sends them without a copy.
Every wait of the receiver is bounded: a sender that stays silent is an error.
"""

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from tidegate.errors import BadFrame, ConfigError, WeightsRefused
from tidegate.transport.addresses import with_any_port
from tidegate.transport.limits import Count, cut
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.security import OrchestratorKeys, secure_connector, secure_listener
from tidegate.transport.weight_channels.base import (
    NamedBuffer,
    WeightChannel,
    WeightReceiverConfig,
    check_buffers,
    decode,
    encode,
    layout,
    sender_address,
    views,
)
from tidegate.transport.zap_authenticator import ZapAuthenticator
from tidegate.transport.zeromq import Context, Socket, enable_keepalive, new_socket, skip_frames

NAME = "zmq"

CHUNK_BYTES = 2 * 1024 * 1024
"""Chunk size with the lowest cost per byte: smaller chunks cost per-chunk overhead, larger ones
leave the CPU cache before they are copied."""

CHUNKS_PER_REQUEST_MAX = 4
"""Chunks per request, because a request costs two wakeups at either end."""

CHUNKS_AHEAD = 8
"""Maximum number of requested chunks in flight: enough to keep a fast network busy."""

SEND_BUFFER_BYTES = 512 * 1024
"""TCP send buffer. The system holds twice as many bytes before they are read: a megabyte per round
trip, and no more than a core's own cache. Twice that, or the system's default, took half as much
time again between two processes of one host."""


class FetchRequest(msgspec.Struct, frozen=True, array_like=True):
    """Engine -> sender: requests the bytes ``[start, end)`` of ``location``.

    They arrive in chunks of :data:`CHUNK_BYTES`, of which the last may be shorter.
    """

    location: str
    start: Count
    end: Count


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """Sender -> engine: header of the chunk at ``start``, whose bytes are in the next frame."""

    location: str
    start: Count
    refusal: str = ""
    """Reason why the chunk cannot be sent; no frame follows then. Empty: it is sent."""


def decode_fetch_request(frames: Sequence[bytes]) -> FetchRequest:
    """Decode an engine's request.

    Raises:
        BadFrame: the frames are not a request.
    """
    if len(frames) != 1:
        raise BadFrame(f"a request for weights is one frame, but yours had {len(frames)}")
    return decode(frames[0], FetchRequest)


# ---------------------------------------------------------------- transfer progress


class Transfer:
    """Tracks which chunks of one buffer have arrived, are requested, or are still to be
    requested."""

    def __init__(self, location: str, buffer: memoryview, *, start: int = 0) -> None:
        """Bytes before ``start``, a chunk boundary, are valid already."""
        self._location = location
        self._buffer = buffer
        self._next_start = start
        """Offset from which nothing has been requested yet."""
        self._requested: dict[int, memoryview] = {}
        """Requested chunks that have not arrived, by start in ascending order, with their buffer
        slices."""

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that have not arrived."""
        requested_bytes = sum(target.nbytes for target in self._requested.values())
        return self._buffer.nbytes - self._next_start + requested_bytes

    def has(self, end: int) -> bool:
        """Return whether all bytes before ``end`` have arrived."""
        return self.complete_bytes >= end

    @property
    def complete_bytes(self) -> int:
        """Number of leading bytes that have arrived without a gap."""
        return min(self._requested, default=self._next_start)

    def has_chunk(self, start: int) -> bool:
        """Return whether the chunk at ``start`` has arrived."""
        return start < self._next_start and start not in self._requested

    def next_requests(self) -> list[FetchRequest]:
        """Return the requests to send now; each asks for several chunks, once that many fit the
        window."""
        requests = []
        while (
            self._next_start < self._buffer.nbytes
            and len(self._requested) + CHUNKS_PER_REQUEST_MAX <= CHUNKS_AHEAD
        ):
            start = self._next_start
            end = min(start + CHUNKS_PER_REQUEST_MAX * CHUNK_BYTES, self._buffer.nbytes)
            for chunk_start in range(start, end, CHUNK_BYTES):
                self._requested[chunk_start] = self._buffer[
                    chunk_start : min(chunk_start + CHUNK_BYTES, end)
                ]
            requests.append(FetchRequest(self._location, start, end))
            self._next_start = end
        return requests

    def outstanding(self) -> list[FetchRequest]:
        """Return requests for all chunks that were requested and have not arrived."""
        return [
            FetchRequest(self._location, start, start + target.nbytes)
            for start, target in self._requested.items()
        ]

    def buffer_for(self, chunk: ChunkHeader) -> memoryview | None:
        """Return the buffer slice for a chunk; None for a duplicate or another transfer.

        Raises:
            WeightsRefused: the sender does not have it.
        """
        if chunk.refusal and chunk.location in ("", self._location):
            raise WeightsRefused(f"weights can't be fetched: {chunk.refusal}")
        return self._requested.get(chunk.start) if chunk.location == self._location else None

    def mark_arrived(self, chunk: ChunkHeader) -> None:
        """Mark a chunk as arrived."""
        del self._requested[chunk.start]


def keep_freed_chunks() -> None:
    """Make glibc's malloc keep the memory of freed chunks, if it has its default settings.

    By default glibc returns several freed blocks of this size to the system, and a page's first
    touch costs ten times a copy. Freeing a larger block raises its dynamic mmap threshold: this
    block, which is never touched, is as large as all chunks that can be in flight.
    """
    np.empty(CHUNKS_AHEAD * CHUNK_BYTES, np.uint8)


def receive_chunk(
    socket: Socket, transfer: Transfer, address: str, *, flags: int = zmq.NOBLOCK
) -> int | None:
    """Read one answer; return the chunk's start, or None if this transfer does not wait for it.

    With ``flags=0`` it blocks up to the socket's receive timeout, otherwise not at all.

    Raises:
        zmq.Again: nothing has arrived.
        WeightsRefused: the sender at ``address`` does not have the chunk, or sent something else.
    """
    header = socket.recv(flags, copy=False)
    try:
        chunk = decode(header.bytes, ChunkHeader)
        target = transfer.buffer_for(chunk)
        if target is None or not header.more:
            if header.more:
                skip_frames(socket)
            return None
        received = socket.recv_into(target, flags=zmq.NOBLOCK)
    except BadFrame as error:
        raise WeightsRefused(str(error)) from error
    if received != target.nbytes or socket.getsockopt(zmq.RCVMORE):
        raise WeightsRefused(
            f"{address} sent {received} bytes of weights, but {target.nbytes} were requested"
        )
    transfer.mark_arrived(chunk)
    return chunk.start


# ---------------------------------------------------------------- sender


class SendableMemory:
    """A buffer that one thread writes and another sends."""

    def __init__(self, nbytes: int) -> None:
        """Allocate without touching the pages."""
        self.bytes = np.empty(nbytes, np.uint8)
        self._frames: dict[int, zmq.Frame] = {}
        """Zero-copy frames of whole chunks, by start offset."""

    def __len__(self) -> int:
        """Return the size in bytes."""
        return len(self.bytes)

    def frame(self, start: int, end: int) -> zmq.Frame:
        """Return a zero-copy frame of ``[start, end)``; it shows later writes until it is sent."""
        if start % CHUNK_BYTES or end - start != CHUNK_BYTES:
            return self._new_frame(start, end)
        frame = self._frames.get(start)
        if frame is None:
            frame = self._frames[start] = self._new_frame(start, end)
        return frame

    def _new_frame(self, start: int, end: int) -> zmq.Frame:
        return zmq.Frame(self.bytes.data[start:end], copy=False)


REQUEST_BYTES_MAX = 1024
"""Maximum request size; a request is 60 bytes, and larger frames are refused unread."""

QUEUED_CHUNKS_MAX = 64
"""High-water marks: requests of one engine, and chunks queued to it. Legitimate engines have a few;
a flood's excess is dropped."""


def chunk_router(context: Context, address: str, keys: OrchestratorKeys | None) -> Socket:
    """Create the ROUTER that chunks are requested from, to be bound to ``address``. With keys, the
    context gets its ZAP authenticator."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUED_CHUNKS_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUED_CHUNKS_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
    enable_keepalive(socket)
    if keys is not None:
        secure_listener(socket, keys)
        ZapAuthenticator(socket, keys)
    if address.startswith("tcp:"):
        socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
        socket.setsockopt(zmq.IPV6, "[" in address)
    return socket


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version in memory."""

    version: int
    location: str
    memory: SendableMemory
    nbytes: int


class ZmqSender:
    """Owns the memory, a ROUTER socket, and the thread that serves it."""

    def __init__(self, address: str | None = None, *, keys: OrchestratorKeys | None = None) -> None:
        """Listen on a free port of the interface of ``address``; privately if ipc or None.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._private: PrivateDirectory | None = None
        self._id = uuid.uuid4().hex
        self._writes = 0
        self._stored: list[StoredVersion] = []
        """Versions being served: the newest, and the kept ones."""
        self._spare = SendableMemory(0)
        """Memory that may be overwritten."""
        self._lock = threading.Lock()
        self.malformed_requests = 0
        self.sent_bytes = 0
        """Total bytes of weights sent to all engines."""
        self._context: Context = zmq.Context()
        try:
            self._socket = self._bind(address, keys)
        except BaseException:
            self._context.destroy(linger=0)
            self._remove_directory()
            raise
        threading.Thread(target=self._serve, name="weights", daemon=True).start()

    def init(self) -> InitWeights:
        """Return the phase-1 message: the address, with ``*`` for the host at which the engine
        reached us."""
        return InitWeights(channel=NAME, info={"address": self.address})

    def write(
        self, version: int, tensors: Sequence[NamedBuffer], *, keep: Collection[int] = ()
    ) -> list[UpdateWeights]:
        """Copy the tensors, and serve them beside the kept versions; all others are dropped."""
        check_buffers(tensors)
        specs, nbytes = layout(tensors)
        with self._lock:
            # If a version was written twice, keep the later one.
            kept = {stored.version: stored for stored in self._stored if stored.version in keep}
            dropped = [p for p in self._stored if kept.get(p.version) is not p]
            self._stored = list(kept.values())
        target = self._buffer_for(nbytes, [self._spare, *(stored.memory for stored in dropped)])
        for spec, tensor in zip(specs, tensors, strict=True):
            if spec.nbytes:  # numpy rejects empty buffers
                source = np.frombuffer(tensor.data.cast("B"), np.uint8)
                np.copyto(target.bytes[spec.offset : spec.offset + spec.nbytes], source)
        self._writes += 1
        # Unique per write, because the same version may be written twice.
        location = f"{self._id}/{self._writes}"
        with self._lock:
            self._stored = [*kept.values(), StoredVersion(version, location, target, nbytes)]
        return [UpdateWeights(version=version, location=location, tensors=specs)]

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._context.term()  # the thread notices, and closes its socket
        self._remove_directory()

    def _buffer_for(self, nbytes: int, free: list[SendableMemory]) -> SendableMemory:
        """Return the smallest free buffer that is large enough, or a new one; keep the largest
        other."""
        chosen = min((m for m in free if len(m) >= nbytes), key=len, default=None)
        unused = [memory for memory in free if memory is not chosen]
        if chosen is None:
            # Drop buffers that are too small, but keep larger ones: the next full set after a
            # partial update needs one.
            unused = [memory for memory in unused if len(memory) > nbytes]
            chosen = SendableMemory(nbytes)
        self._spare = max(unused, key=len, default=SendableMemory(0))
        return chosen

    def _bind(self, address: str | None, keys: OrchestratorKeys | None) -> Socket:
        own = None if address is None else with_any_port(address)
        if own is None:
            self._private = PrivateDirectory("weights")
            self.address = f"ipc://{self._private.path}/weights"
        socket = chunk_router(self._context, own or self.address, keys)
        try:
            socket.bind(own or self.address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"can't serve weights at {own!r}: {error.strerror}; set another listen_address"
            ) from error
        if own is not None:
            port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            self.address = f"tcp://*:{port}"
        return socket

    def _remove_directory(self) -> None:
        if self._private is not None:
            self._private.remove()

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        try:
            while True:
                peer, *frames = self._socket.recv_multipart()
                self._reply(peer, frames)
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _reply(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            fetch = decode_fetch_request(frames)
        except BadFrame as error:
            self.malformed_requests += 1
            self._socket.send_multipart([peer, encode(ChunkHeader("", 0, cut(str(error))))])
            return
        with self._lock:
            stored = next((p for p in self._stored if p.location == fetch.location), None)
        if reason := _refusal(fetch, stored):
            refusal = ChunkHeader(cut(fetch.location), fetch.start, cut(reason))
            self._socket.send_multipart([peer, encode(refusal)])
            return
        assert stored is not None
        for start in range(fetch.start, fetch.end, CHUNK_BYTES):
            header = encode(ChunkHeader(fetch.location, start))
            end = min(start + CHUNK_BYTES, fetch.end)
            self._socket.send_multipart([peer, header], zmq.SNDMORE)
            self._socket.send(stored.memory.frame(start, end), copy=False)
            self.sent_bytes += end - start


def _refusal(fetch: FetchRequest, stored: StoredVersion | None) -> str | None:
    """Return why a request cannot be served, or None."""
    if stored is None:
        return f"{fetch.location!r} is not in the sender's memory (any more)"
    bytes_max = CHUNKS_PER_REQUEST_MAX * CHUNK_BYTES
    if not 0 < fetch.end - fetch.start <= bytes_max or fetch.end > stored.nbytes:
        return (
            f"bytes [{fetch.start}, {fetch.end}) are not 1 to {bytes_max} bytes within the "
            f"{stored.nbytes} of this version"
        )
    return None


# ---------------------------------------------------------------- receiver

STALL_TIMEOUT_S = 30.0
"""Timeout without a single chunk; 2 MiB take this long at half a megabit per second."""

POLL_S = 0.1
"""Polling interval for whether the weights are still wanted."""

_REJECTED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ZmqReceiver:
    """A DEALER to one sender, and the buffer; for one thread."""

    def __init__(self, init: InitWeights, config: WeightReceiverConfig) -> None:
        """Connect to the address in ``init``, which need not answer yet.

        Raises:
            WeightsRefused: the address is invalid.
        """
        self._address = sender_address(init, config)
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._socket = new_socket(zmq.DEALER, self._address)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, round(1000 * POLL_S))
        if config.keys is not None:
            secure_connector(self._socket, config.keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _REJECTED)
        self._connections = 0
        keep_freed_chunks()
        self._socket.connect(self._address)

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield views of the buffer, each as soon as it is complete."""
        nbytes = max((spec.offset + spec.nbytes for spec in update.tensors), default=0)
        if nbytes > len(self._buffer):
            self._buffer = np.empty(nbytes, np.uint8)
        buffer = self._buffer.data[:nbytes]
        tensor_views = views(update.tensors, buffer)
        return self._fetched(tensor_views, Transfer(update.location, buffer), is_wanted)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()

    def _fetched(
        self,
        tensor_views: Iterator[tuple[TensorSpec, memoryview]],
        transfer: Transfer,
        is_wanted: Callable[[], bool],
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        self._send_requests(transfer.next_requests())
        for spec, view in tensor_views:
            while not transfer.has(spec.offset + spec.nbytes):
                if not self._receive(transfer, is_wanted):
                    return
                self._send_requests(transfer.next_requests())
            yield spec, view

    # ------------------------------------------------------------ the wire

    def _send_requests(self, requests: list[FetchRequest]) -> None:
        for request in requests:
            self._socket.send(encode(request))

    def _receive(self, transfer: Transfer, is_wanted: Callable[[], bool]) -> bool:
        """Wait for one chunk of this transfer; False if the weights are no longer wanted."""
        deadline_s = time.monotonic() + STALL_TIMEOUT_S
        while is_wanted():
            try:
                if receive_chunk(self._socket, transfer, self._address, flags=0) is not None:
                    return True
            except zmq.Again:
                self._resend_if_reconnected(transfer)
                if time.monotonic() > deadline_s:
                    raise WeightsRefused(
                        f"no weights arrived from {self._address} for {STALL_TIMEOUT_S:g} s, with "
                        f"{transfer.missing_bytes} bytes missing; is the orchestrator "
                        f"alive, and does a firewall let this host reach that port?"
                    ) from None
        return False

    def _resend_if_reconnected(self, transfer: Transfer) -> None:
        """Repeat the outstanding requests, which a broken connection has lost."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event & _REJECTED:
                raise WeightsRefused(
                    f"{self._address} rejected this engine's keys; copy the directory that "
                    f"`tidegate keys` made for engines from that orchestrator's host"
                )
            self._connections += 1
            if self._connections > 1:
                self._send_requests(transfer.outstanding())


CHANNEL = WeightChannel(
    open_sender=lambda config: ZmqSender(config.address, keys=config.keys),
    open_receiver=ZmqReceiver,
    carries_adapters=True,
)
