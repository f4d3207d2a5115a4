"""Orchestrator's end of the ``zmq`` weight channel: a thread serves chunks of a buffer on request.

The buffer is reused for each version, because the first touch of a fresh page costs ten times a
copy into an old one. ZeroMQ sends its memory without a copy, from frames that are created once.
"""

import threading
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import zmq

from tidegate.errors import BadFrame, ConfigError
from tidegate.transport.addresses import with_any_port
from tidegate.transport.limits import cut
from tidegate.transport.messages import InitWeights, UpdateWeights
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.security import OrchestratorKeys, secure_listener
from tidegate.transport.weight_channels.base import NamedBuffer, check_buffers, layout
from tidegate.transport.weight_channels.zmq import (
    CHUNK_BYTES,
    CHUNKS_PER_REQUEST_MAX,
    NAME,
    SEND_BUFFER_BYTES,
    ChunkHeader,
    FetchRequest,
    decode_fetch_request,
    encode,
)
from tidegate.transport.zap_authenticator import ZapAuthenticator
from tidegate.transport.zeromq import Context, Socket, enable_keepalive


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
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUED_CHUNKS_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUED_CHUNKS_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        enable_keepalive(socket)
        if keys is not None:
            secure_listener(socket, keys)
            ZapAuthenticator(socket, keys)
        own = None if address is None else with_any_port(address)
        if own is None:
            self._private = PrivateDirectory("weights")
            self.address = f"ipc://{self._private.path}/weights"
        else:
            socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
            socket.setsockopt(zmq.IPV6, "[" in own)
        try:
            socket.bind(own or self.address)
        except zmq.ZMQError as error:
            raise ConfigError(f"can't serve weights at {own!r}: {error.strerror}") from error
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
        return f"{fetch.location!r} is not served, or no longer"
    bytes_max = CHUNKS_PER_REQUEST_MAX * CHUNK_BYTES
    if not 0 < fetch.end - fetch.start <= bytes_max or fetch.end > stored.nbytes:
        return (
            f"bytes [{fetch.start}, {fetch.end}) are not 1 to {bytes_max} bytes within the "
            f"{stored.nbytes} of this version"
        )
    return None
