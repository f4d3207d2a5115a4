"""Simulated wire in place of the ZeroMQ sockets: delays, stalls, cuts and damages real frames.

The real codec encodes and decodes every frame on both ends. As with ZeroMQ over TCP, each direction
keeps its order, no frame is lost while a connection lasts, and a broken connection loses an unknown
number of the last frames of each direction.
"""

import asyncio
import hashlib
import random
import struct
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from tidegate.errors import BadFrame
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.transport.messages import (
    Message,
    Step,
    decode_from_engine,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.zeromq import encode_frame

LAST_FRAMES_MAX = 40
"""Number of frames shown in the report of a failure: a screenful."""

SHOWN_FRAMES_MAX = 8
"""Number of frames shown beside a user's failed test, whose cause they rarely are."""

DESCRIPTION_CHARS_MAX = 120
"""Characters after which a shown frame is cut off."""

COLUMNS = {"turns": "I", "counts": "I", "token_ids": "i", "logprobs": "f"}
"""Type codes of :mod:`array` for the columns of a step message; other columns hold bytes."""


@dataclass(frozen=True, slots=True)
class CarriedFrame:
    """One frame that has arrived."""

    at_s: float
    engine: str
    is_from_engine: bool
    frame: bytes

    def __str__(self) -> str:
        decode = decode_from_engine if self.is_from_engine else decode_from_orchestrator
        try:
            description = _describe(decode(self.frame))
        except BadFrame as error:
            description = str(error)
        arrow = "->" if self.is_from_engine else "<-"
        return f"{self.at_s:9.4f} s  {self.engine} {arrow} {description[:DESCRIPTION_CHARS_MAX]}"


def _describe(message: msgspec.Struct) -> str:
    """Format a message for a reader: columns as lists, and without fields equal to defaults."""
    parts = []
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if value == field.default or (not value and field.default_factory is not msgspec.NODEFAULT):
            continue
        if isinstance(value, bytes):
            value = array(COLUMNS.get(field.name, "B"), value).tolist()
        elif isinstance(value, msgspec.Struct):
            value = _describe(value)
        elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
            value = f"[{', '.join(map(_describe, value))}]"
        parts.append(f"{field.name}={value}")
    return f"{type(message).__name__}({', '.join(parts)})"


class FrameLog:
    """Log of all frames of a run: their digest, and the last frames in full."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.frames = 0
        self.last: deque[CarriedFrame] = deque(maxlen=LAST_FRAMES_MAX)

    def record(self, carried: CarriedFrame) -> None:
        """Add one frame that has arrived; heartbeats count only in the digest."""
        self.frames += 1
        if b"heartbeat" not in carried.frame[:32]:
            self.last.append(carried)
        header = struct.pack("<d?", carried.at_s, carried.is_from_engine)
        self._digest.update(header + carried.engine.encode() + carried.frame)

    def record_fact(self, fact: object) -> None:
        """Add a result to the run's digest, which is equal for all runs of one seed."""
        self._digest.update(repr(fact).encode())

    def hexdigest(self) -> str:
        """Return the digest of all frames and facts so far."""
        return self._digest.hexdigest()


class _Direction:
    """One direction of a connection: its frames in flight, in order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        latency_s: float,
        chance: random.Random,
        deliver: Callable[[bytes], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._latency_s = latency_s
        self._chance = chance
        self._deliver = deliver
        self._on_loss = on_loss
        self._in_flight: deque[tuple[asyncio.TimerHandle, bytes]] = deque()
        self._last_due_s = 0.0

    def carry(self, frame: bytes) -> None:
        """Deliver ``frame`` after a random delay, and after all earlier frames."""
        delay_s = self._latency_s * self._chance.expovariate(1.0)
        self._last_due_s = max(self._last_due_s, self._loop.time() + delay_s)
        self._schedule(frame)

    def _schedule(self, frame: bytes) -> None:
        timer = self._loop.call_at(self._last_due_s, self._arrive, frame)
        self._in_flight.append((timer, frame))

    def _arrive(self, frame: bytes) -> None:
        self._in_flight.popleft()
        self._deliver(frame)

    def stall(self, lasts_s: float) -> None:
        """Deliver no frame for ``lasts_s`` seconds, and then all of them."""
        self._last_due_s = max(self._last_due_s, self._loop.time() + lasts_s)
        delayed, self._in_flight = self._in_flight, deque()
        for timer, frame in delayed:
            timer.cancel()
            self._schedule(frame)

    def lose_tail(self) -> None:
        """Lose a random number of the last frames in flight."""
        self._lose(self._chance.randint(0, len(self._in_flight)))

    def lose_all(self) -> None:
        self._lose(len(self._in_flight))

    def _lose(self, frames: int) -> None:
        for _ in range(frames):
            self._in_flight.pop()[0].cancel()
        if frames:
            self._on_loss()


class SimulatedLink:
    """Connection of one engine name to the orchestrator, used by its processes one after another.

    While the connection is broken, frames of the engine wait for the reconnect, and frames of the
    orchestrator are refused, as ZeroMQ's DEALER and ROUTER sockets do.
    """

    def __init__(
        self,
        engine: str,
        router: "SimulatedRouter",
        *,
        latency_s: float,
        chance: random.Random,
    ) -> None:
        self._engine = engine
        self._loop = router.loop
        self._chance = chance
        self._frame_log = router.frame_log
        self._router = router
        self._coverage = router.coverage
        self._receive: Callable[[bytes], None] | None = None
        self._up = _Direction(
            router.loop,
            latency_s=latency_s,
            chance=chance,
            deliver=self._at_router,
            on_loss=partial(self._coverage.add, CoverageMark.LOST_TO_ORCHESTRATOR),
        )
        self._down = _Direction(
            router.loop,
            latency_s=latency_s,
            chance=chance,
            deliver=self._at_engine,
            on_loss=partial(self._coverage.add, CoverageMark.LOST_TO_ENGINE),
        )
        self._unsent: list[bytes] = []
        self._cuts = 0
        self._is_cut = False
        self._was_open_when_cut = False
        self._frames_to_garble = 0
        self._has_reconnected = False

    @property
    def is_up(self) -> bool:
        """Whether both ends are connected."""
        return self._receive is not None and not self._is_cut

    # ------------------------------------------------------------ the engine's end

    def open(self, receive: Callable[[bytes], None]) -> None:
        """Connect a new engine process, which gets its frames through ``receive``."""
        self._receive = receive
        self._has_reconnected = self._was_open_when_cut = False

    def hang_up(self, *, is_clean: bool) -> None:
        """Disconnect the engine process; if ``is_clean``, frames that it has sent still arrive."""
        self._receive = None
        self._unsent.clear()
        self._down.lose_all()
        if not is_clean:
            self._up.lose_tail()

    def send(self, frame: bytes) -> None:
        """Send a frame to the orchestrator, now or after the next reconnect."""
        if self._is_cut:
            self._unsent.append(frame)
            return
        if self._frames_to_garble:
            self._frames_to_garble -= 1
            self._coverage.add(CoverageMark.GARBLED)
            frame = _garbled(frame)
        self._up.carry(frame)

    def take_reconnected(self) -> bool:
        """Return whether the connection was restored since the last call."""
        has_reconnected, self._has_reconnected = self._has_reconnected, False
        return has_reconnected

    # ------------------------------------------------------------ the orchestrator's end

    def send_to_engine(self, frame: bytes) -> bool:
        """Send a frame to the engine; return False if the engine isn't connected."""
        if not self.is_up:
            return False
        self._down.carry(frame)
        return True

    # ------------------------------------------------------------ faults

    def cut(self, lasts_s: float) -> None:
        """Break the connection, and restore it after ``lasts_s`` seconds."""
        if self._receive is not None:
            self._coverage.add(CoverageMark.CUT)
        self._up.lose_tail()
        self._down.lose_tail()
        self._is_cut = True
        self._was_open_when_cut = self._receive is not None
        self._cuts += 1
        self._loop.call_later(lasts_s, self._reconnect, self._cuts)

    def _reconnect(self, cut: int) -> None:
        if cut != self._cuts:  # a later cut restores the connection
            return
        self._is_cut = False
        self._has_reconnected = self._was_open_when_cut
        unsent, self._unsent = self._unsent, []
        for frame in unsent:
            self.send(frame)

    def stall(self, lasts_s: float) -> None:
        """Delay the frames of one direction or of both by ``lasts_s`` seconds."""
        directions = self._chance.choice(((self._up,), (self._down,), (self._up, self._down)))
        for direction in directions:
            direction.stall(lasts_s)
        if self.is_up:
            self._coverage.add(CoverageMark.STALLED)

    def garble(self, frames: int) -> None:
        """Damage the next frames that the engine sends."""
        self._frames_to_garble += frames

    # ------------------------------------------------------------ arrivals

    def _at_router(self, frame: bytes) -> None:
        self._frame_log.record(CarriedFrame(self._loop.time(), self._engine, True, frame))
        self._router.arrive(self._engine.encode(), frame)

    def _at_engine(self, frame: bytes) -> None:
        if self._receive is not None:
            self._frame_log.record(CarriedFrame(self._loop.time(), self._engine, False, frame))
            self._receive(frame)


def _garbled(frame: bytes) -> bytes:
    """Damage a frame: drop a step's last token id, which decoding accepts, or half of the bytes."""
    message = decode_from_engine(frame)
    if isinstance(message, Step) and message.token_ids:
        return encode(msgspec.structs.replace(message, token_ids=message.token_ids[4:]))
    return frame[: len(frame) // 2]


class SimulatedRouter:
    """Stand-in for the orchestrator's ROUTER socket, with one :class:`SimulatedLink` per engine."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, frame_log: FrameLog, coverage: set[CoverageMark]
    ) -> None:
        self.address = "simulated"
        self.loop = loop
        self.frame_log = frame_log
        self.coverage = coverage
        self._links: dict[bytes, SimulatedLink] = {}
        self._arrived: list[tuple[bytes, bytes]] = []
        self._on_frames: Callable[[list[tuple[bytes, bytes]]], None] | None = None
        self._drain_handle: asyncio.Handle | None = None

    def link(self, engine: str, *, latency_s: float, chance: random.Random) -> SimulatedLink:
        """Make the connection of the engine named ``engine``."""
        link = SimulatedLink(engine, self, latency_s=latency_s, chance=chance)
        self._links[engine.encode()] = link
        return link

    def send(self, peer: bytes, message: Message) -> bool:
        """Send one message; return False if the peer isn't connected."""
        link = self._links.get(peer)
        return link is not None and link.send_to_engine(encode_frame(message))

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[list[tuple[bytes, bytes]]], None],
    ) -> None:
        """Call ``on_frames`` with the frames that arrive, in batches."""
        assert loop is self.loop
        self._on_frames = on_frames
        self._schedule_drain()

    def detach(self) -> None:
        """Stop calling back."""
        self._on_frames = None

    def close(self) -> None:
        """Do nothing: there is no socket to close."""

    def forget(self) -> None:
        """Discard the frames that have arrived and were not read, as a crash does."""
        self._arrived.clear()

    def arrive(self, peer: bytes, frame: bytes) -> None:
        """Accept a frame from a link."""
        self._arrived.append((peer, frame))
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if self._drain_handle is None:
            self._drain_handle = self.loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_handle = None
        if self._on_frames is not None and self._arrived:
            arrived, self._arrived = self._arrived, []
            self._on_frames(arrived)
