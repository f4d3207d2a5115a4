"""Node of the weight relay: one process per host, which fetches each version once and forwards it.

:class:`RelayReceiver` starts one. Its clients are the engines of its host, which map its memory,
and relays of other hosts, which request chunks as from the sender. One thread with sockets and
timers, no locks.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import zmq

from tidegate.errors import BadFrame, WeightsRefused
from tidegate.transport.limits import cut
from tidegate.transport.wakeup import Wakeup
from tidegate.transport.weight_channels.host_memory import (
    MESSAGE_BYTES_MAX,
    HostMemory,
    is_own_user,
)
from tidegate.transport.weight_channels.relay import (
    KEEP_ALIVE_INTERVAL_S,
    PARENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    LocationProgress,
    ParentAssignment,
    ParentRequest,
    decode_location_request,
    decode_parent_assignment,
    encode,
    keep_alive,
)
from tidegate.transport.weight_channels.relay_slot import RelayBootstrap, Slot
from tidegate.transport.weight_channels.relay_sockets import RelaySockets, Upstream, is_readable
from tidegate.transport.weight_channels.transfer import keep_freed_chunks, take_chunk
from tidegate.transport.weight_channels.zmq import (
    CHUNK_BYTES,
    CHUNKS_PER_REQUEST_MAX,
    ChunkHeader,
    FetchRequest,
    decode_fetch_request,
)
from tidegate.transport.weight_channels.zmq import encode as encode_chunk
from tidegate.transport.zeromq import Socket


@dataclass(eq=False, slots=True)
class Client:
    """Connection of an engine of this host."""

    link: socket.socket
    location: str = ""
    """Location that the engine waits for."""
    told_bytes: int = -1
    """Number of bytes last reported to the engine; -1: it has not got the memory yet."""


class Clients:
    """The engines connected to this host's relay."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        slot: Callable[[str], Slot | None],
    ) -> None:
        """``slot`` looks up the slot of a location; it returns None if there are too many."""
        self._listener = listener
        self._watch = watch
        self._unwatch = unwatch
        self._slot = slot
        self._all: dict[int, Client] = {}
        """Clients by file descriptor."""
        watch(listener.fileno(), self._admit)

    def tell(self, slot: Slot, *, again: bool = False) -> None:
        """Report progress to the engines that wait for a slot; ``again`` reports even without
        progress."""
        for client in list(self._all.values()):
            if client.location == slot.location:
                self._tell(client, slot, again=again)

    def refuse(self, location: str, why: str) -> None:
        """Tell the engines that wait for a location that it cannot be fetched."""
        for client in list(self._all.values()):
            if client.location == location:
                client.location = ""
                self._send(client, LocationProgress(location, refusal=why))

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
            self._watch(link.fileno(), lambda: self._hear(client))

    def _hear(self, client: Client) -> None:
        try:
            frame = client.link.recv(MESSAGE_BYTES_MAX)
            want = decode_location_request(frame) if frame else None
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            want = None
        if want is None:
            self._drop(client)
            return
        client.location, client.told_bytes = want.location, -1
        slot = self._slot(want.location)
        if slot is None:
            self._send(client, LocationProgress(want.location, refusal="too many versions at once"))
        else:
            self._tell(client, slot)

    def _tell(self, client: Client, slot: Slot, *, again: bool = False) -> None:
        if slot.memory is None:
            if again:
                self._send(client, LocationProgress(""))  # empty location: keep-alive
            return
        there = slot.complete_bytes
        if client.told_bytes == there and (slot.is_complete or not again):
            return
        fds = [slot.memory.fd] if client.told_bytes < 0 else []
        if self._send(client, LocationProgress(slot.location, there), fds):
            client.told_bytes = there

    def _send(self, client: Client, ready: LocationProgress, fds: list[int] | None = None) -> bool:
        try:
            socket.send_fds(client.link, [encode(ready)], fds or [])
        except BlockingIOError:
            return False  # its socket buffer is full; the next tick reports again
        except OSError:
            self._drop(client)
            return False
        return True

    def _drop(self, client: Client) -> None:
        fileno = client.link.fileno()
        if self._all.pop(fileno, None) is not None:
            self._unwatch(fileno)
            client.link.close()


TICK_S = 0.5
"""Polling interval for silent parents and due keep-alives."""

CHUNKS_PER_TURN = 8
"""Maximum chunks read from one source before others are served."""

SLOTS_MAX = 16
"""Maximum number of locations. A run keeps a few; requests for more are invalid."""

JOIN_TIMEOUT_S = 5.0
"""How long closing waits for the thread."""


class RelayNode:
    """The relay of a host, as a thread; it serves as long as it holds the host's socket name."""

    def __init__(
        self, upstream: Upstream, listener: socket.socket, seed: RelayBootstrap | None
    ) -> None:
        """Take over ``listener``, which holds the host's socket name until :meth:`close`.

        Raises:
            ConfigError: this host has no route to the sender. ``listener`` and ``seed`` are closed
                then.
        """
        self._upstream = upstream
        self._seed = seed
        self._slots: dict[str, Slot] = {}
        self._spare: list[HostMemory] = []
        self._poller = zmq.Poller()
        self._handlers: dict[Socket | int, Callable[[], None]] = {}
        try:
            self._sockets = RelaySockets(upstream)
        except BaseException:
            listener.close()
            if seed is not None:
                os.close(seed.fd)
            raise
        self._door = self._sockets.door
        self._clients = Clients(listener, watch=self._watch, unwatch=self._unwatch, slot=self._slot)
        keep_freed_chunks()
        self._wakeup = Wakeup()
        self._is_closing = False
        self._signs_due_s = 0.0
        self._watch(self._wakeup.fileno(), self._wakeup.quiet)
        self._watch(self._sockets.guide, self._hear_sender)
        self._watch(self._door, self._serve_relays)
        self._thread = threading.Thread(target=self._run, name="weights relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and free the name. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            self._wakeup.wake()
        self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------ sockets

    def _watch(self, what: Socket | int, handler: Callable[[], None]) -> None:
        self._handlers[what] = handler
        self._poller.register(what, zmq.POLLIN)

    def _unwatch(self, what: Socket | int) -> None:
        if self._handlers.pop(what, None) is not None:
            self._poller.unregister(what)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for ready, _ in self._poller.poll(round(TICK_S * 1000)):
                    handler = self._handlers.get(ready)
                    if handler is not None:  # a handler called before may have removed it
                        handler()
                self._look_after(time.monotonic())
        finally:
            self._end()

    def _end(self) -> None:
        with ExitStack() as ending:  # last first; every callback runs, even if one raises
            ending.callback(self._wakeup.close)
            if self._seed is not None:
                ending.callback(os.close, self._seed.fd)
            for memory in self._spare:
                ending.callback(memory.close)
            for slot in self._slots.values():
                ending.callback(slot.close)
            ending.callback(self._sockets.close)
            # Run before the sockets' close, which may block: the name is free, and engines notice.
            ending.callback(self._clients.close)
            for slot in self._slots.values():
                ending.callback(slot.stop_fetching)

    def _look_after(self, now_s: float) -> None:
        signs_due = now_s >= self._signs_due_s
        if signs_due:
            self._signs_due_s = now_s + KEEP_ALIVE_INTERVAL_S
        for slot in list(self._slots.values()):
            self._clients.tell(slot, again=signs_due)
            if slot.is_complete:
                continue
            if now_s - slot.moved_s > STALL_TIMEOUT_S:
                self._fail(
                    slot,
                    f"none have come from {slot.parent or self._upstream.address} for "
                    f"{STALL_TIMEOUT_S:g} s; is the orchestrator alive, and does a firewall let "
                    f"this host reach that port?",
                )
            elif now_s - max(slot.asked_s, slot.heard_s) > PARENT_TIMEOUT_S:
                self._ask_where(slot, avoid=slot.parent)
            elif signs_due:
                for peer in slot.waiting:
                    self._door.send_multipart([peer, encode_chunk(keep_alive(slot.location))])

    # ------------------------------------------------------------ upstream: the parent

    def _slot(self, location: str) -> Slot | None:
        """Return the slot of a location, created if needed; None if there are too many."""
        slot = self._slots.get(location)
        if slot is None and len(self._slots) < SLOTS_MAX:
            now_s = time.monotonic()
            slot = self._slots[location] = Slot(location, now_s, now_s)
            if self._seed is not None and self._seed.location == location:
                slot.seed, self._seed = self._seed, None
            self._ask_where(slot)
        return slot

    def _ask_where(self, slot: Slot, avoid: str = "") -> None:
        slot.asked_s = time.monotonic()
        self._sockets.guide.send(encode(ParentRequest(slot.location, self._sockets.here, avoid)))

    def _hear_sender(self) -> None:
        guide = self._sockets.guide
        while is_readable(guide):
            with suppress(BadFrame):  # the request is repeated
                self._follow(decode_parent_assignment(guide.recv_multipart()[0]))

    def _follow(self, parent: ParentAssignment) -> None:
        slot = self._slots.get(parent.location)
        if slot is None or slot.is_complete:
            return
        if parent.refusal:
            self._fail(slot, parent.refusal)
            return
        if slot.transfer is None:
            self._forget_all_but({*parent.kept_locations, parent.location})
            self._open(slot, parent.nbytes)
        self._stop_fetching(slot)
        if slot.is_complete:  # from its seed
            self._moved(slot)
            return
        slot.parent, slot.heard_s = parent.address, time.monotonic()
        slot.source = self._sockets.to_parent(parent.address)
        self._watch(slot.source, lambda: self._fetch(slot))
        assert slot.transfer is not None
        self._request(slot, [*slot.transfer.outstanding(), *slot.transfer.next_requests()])

    def _open(self, slot: Slot, nbytes: int) -> None:
        seed = slot.seed
        if seed is not None:
            memory = HostMemory(nbytes, seed.fd)
            whole = seed.complete_bytes >= nbytes
            start = nbytes if whole else seed.complete_bytes // CHUNK_BYTES * CHUNK_BYTES
            slot.seed = None
        else:
            memory, start = self._room(nbytes), 0
        slot.open(memory, nbytes, start)

    def _room(self, nbytes: int) -> HostMemory:
        """Reuse spare memory that is large enough, because first touches of pages are expensive."""
        found = min(
            (m for m in self._spare if m.nbytes >= nbytes), key=lambda m: m.nbytes, default=None
        )
        for memory in self._spare:
            if memory is not found and (found is not None or memory.nbytes <= nbytes):
                memory.close()
        self._spare = [m for m in self._spare if found is None and m.nbytes > nbytes]
        return found if found is not None else HostMemory(nbytes)

    def _forget_all_but(self, kept: set[str]) -> None:
        for location in [location for location in self._slots if location not in kept]:
            slot = self._slots.pop(location)
            self._stop_fetching(slot)
            if slot.memory is not None:
                self._spare.append(slot.memory)
                slot.memory = None
            slot.close()

    def _stop_fetching(self, slot: Slot) -> None:
        if slot.source is not None:
            self._unwatch(slot.source)
        slot.stop_fetching()

    def _request(self, slot: Slot, requests: list[FetchRequest]) -> None:
        if slot.source is not None:
            for request in requests:
                slot.source.send(encode_chunk(request))

    def _fetch(self, slot: Slot) -> None:
        """Receive chunks from the parent, and forward them."""
        if slot.source is None or slot.transfer is None:
            return
        slot.heard_s = time.monotonic()
        for _ in range(CHUNKS_PER_TURN):
            if not is_readable(slot.source):
                break
            try:
                start = take_chunk(slot.source, slot.transfer, slot.parent)
            except WeightsRefused as error:
                self._be_refused(slot, str(error))
                return
            if start is not None:
                slot.moved_s = slot.heard_s
                self._pass_on(slot, start)
        self._request(slot, slot.transfer.next_requests())
        self._moved(slot)

    def _be_refused(self, slot: Slot, why: str) -> None:
        if slot.parent:
            self._stop_fetching(slot)
            self._ask_where(slot, avoid=slot.parent)
        else:
            self._fail(slot, why)

    def _fail(self, slot: Slot, why: str) -> None:
        """Drop a location and report the failure; a later request tries again."""
        del self._slots[slot.location]
        self._stop_fetching(slot)
        self._clients.refuse(slot.location, cut(why))
        for peer in slot.waiting:
            refusal = ChunkHeader(slot.location, 0, cut(why))
            self._door.send_multipart([peer, encode_chunk(refusal)])
        slot.close()

    # ------------------------------------------------------------ downstream: other relays

    def _serve_relays(self) -> None:
        while is_readable(self._door):
            peer, *frames = self._door.recv_multipart()
            try:
                fetch = decode_fetch_request(frames)
            except BadFrame:
                continue  # a broken peer gets no answer
            self._serve(peer, fetch)

    def _serve(self, peer: bytes, fetch: FetchRequest) -> None:
        slot = self._slot(fetch.location)
        if slot is None or fetch.start % CHUNK_BYTES or not _is_fair(fetch):
            refusal = ChunkHeader(fetch.location, fetch.start, "that can't be had here")
            self._door.send_multipart([peer, encode_chunk(refusal)])
            return
        for start in range(fetch.start, fetch.end, CHUNK_BYTES):
            if not self._send_chunk(slot, peer, start):
                slot.hold(peer, range(start, start + 1))

    def _send_chunk(self, slot: Slot, peer: bytes, start: int) -> bool:
        chunk = slot.chunk(start)
        if chunk is None:
            return False
        header = encode_chunk(ChunkHeader(slot.location, start))
        self._door.send_multipart([peer, header], zmq.SNDMORE)
        self._door.send(chunk, copy=False)
        return True

    def _pass_on(self, slot: Slot, start: int) -> None:
        for peer in slot.held.pop(start, ()):
            self._send_chunk(slot, peer, start)

    def _moved(self, slot: Slot) -> None:
        """Report progress to engines, and to waiting relays if a seed completed the slot."""
        if slot.is_complete:
            self._stop_fetching(slot)
            for start in list(slot.held):
                self._pass_on(slot, start)
        self._clients.tell(slot)


def _is_fair(fetch: FetchRequest) -> bool:
    return 0 < fetch.end - fetch.start <= CHUNKS_PER_REQUEST_MAX * CHUNK_BYTES
