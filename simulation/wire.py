"""Simulated wire: carries real frames, and delays, stalls, cuts and garbles them.

It stands where the sockets are, so the real codec runs on both ends. As on the real wire, order is
kept in each direction, nothing is lost while a connection lasts, and when one breaks an unknown
number of the last frames of each direction is lost.
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
from tidegate.simulation.coverage_marks import CoverageMark, CoverageMarks
from tidegate.transport.messages import (
    Message,
    Step,
    decode_from_engine,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.zeromq import sendable

STORY_FRAMES_MAX = 40
"""The last so many frames are told when something is wrong: a screenful."""


FRAME_LETTERS_MAX = 200

COLUMNS = {"turns": "I", "counts": "I", "token_ids": "i", "logprobs": "f"}
"""What columns hold, as :mod:`array` calls it; others hold bytes."""


@dataclass(frozen=True, slots=True)
class CarriedFrame:
    """One frame, as it arrived."""

    at_s: float
    engine: str
    is_from_engine: bool
    frame: bytes

    def __str__(self) -> str:
        decode = decode_from_engine if self.is_from_engine else decode_from_orchestrator
        try:
            said = _in_words(decode(self.frame))
        except BadFrame as error:
            said = str(error)
        arrow = "->" if self.is_from_engine else "<-"
        return f"{self.at_s:9.4f} s  {self.engine} {arrow} {said[:FRAME_LETTERS_MAX]}"


def _in_words(message: Message) -> str:
    """A message as a person reads it: columns as lists, and nothing that goes without saying."""
    words = []
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if value == field.default or (not value and field.default_factory is not msgspec.NODEFAULT):
            continue
        if isinstance(value, bytes):
            value = array(COLUMNS.get(field.name, "B"), value).tolist()
        words.append(f"{field.name}={value}")
    return f"{type(message).__name__}({', '.join(words)})"


class FrameLog:
    """Record of all frames carried: a digest of them, and the last ones in full."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.frames = 0
        self.last: deque[CarriedFrame] = deque(maxlen=STORY_FRAMES_MAX)

    def note(self, carried: CarriedFrame) -> None:
        """Take in one arrival."""
        self.frames += 1
        if b"heartbeat" not in carried.frame[:32]:  # they tell no story
            self.last.append(carried)
        about = struct.pack("<d?", carried.at_s, carried.is_from_engine)
        self._digest.update(about + carried.engine.encode() + carried.frame)

    def note_fact(self, fact: object) -> None:
        """Take in something else that has to be the same in each run of a seed."""
        self._digest.update(repr(fact).encode())

    def hexdigest(self) -> str:
        """What tells this run from any that went another way."""
        return self._digest.hexdigest()


class _Direction:
    """Frames on their way, in order."""

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
        self._flying: deque[tuple[asyncio.TimerHandle, bytes]] = deque()
        self._last_due_s = 0.0

    def carry(self, frame: bytes) -> None:
        """Deliver ``frame`` after a while, and after all before it."""
        delay_s = self._latency_s * self._chance.expovariate(1.0)
        self._last_due_s = max(self._last_due_s, self._loop.time() + delay_s)
        self._fly(frame)

    def _fly(self, frame: bytes) -> None:
        timer = self._loop.call_at(self._last_due_s, self._arrive, frame)
        self._flying.append((timer, frame))

    def _arrive(self, frame: bytes) -> None:
        self._flying.popleft()
        self._deliver(frame)

    def stall(self, lasts_s: float) -> None:
        """Let nothing arrive for a while, and then everything."""
        self._last_due_s = max(self._last_due_s, self._loop.time() + lasts_s)
        late, self._flying = self._flying, deque()
        for timer, frame in late:
            timer.cancel()
            self._fly(frame)

    def lose_tail(self) -> None:
        """Lose an unknown number of the last frames."""
        self._lose(self._chance.randint(0, len(self._flying)))

    def lose_all(self) -> None:
        """Lose every frame that is on its way."""
        self._lose(len(self._flying))

    def _lose(self, frames: int) -> None:
        for _ in range(frames):
            self._flying.pop()[0].cancel()
        if frames:
            self._on_loss()


class SimulatedLink:
    """One engine's connection to the orchestrator: the engine's socket, one process after another.

    What an engine sends while there is no connection waits for the next; what the orchestrator
    sends is refused meanwhile.
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
        self._tape = router.tape
        self._router = router
        self._hardships = router.hardships
        self._receive: Callable[[bytes], None] | None = None
        self._up = _Direction(
            router.loop,
            latency_s=latency_s,
            chance=chance,
            deliver=self._at_router,
            on_loss=partial(self._hardships.note, CoverageMark.LOST_TO_ORCHESTRATOR),
        )
        self._down = _Direction(
            router.loop,
            latency_s=latency_s,
            chance=chance,
            deliver=self._at_engine,
            on_loss=partial(self._hardships.note, CoverageMark.LOST_TO_ENGINE),
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
        """A new process connects."""
        self._receive = receive
        self._has_reconnected = self._was_open_when_cut = False

    def hang_up(self, *, is_clean: bool) -> None:
        """The process ends. Cleanly: what it said still arrives."""
        self._receive = None
        self._unsent.clear()
        self._down.lose_all()
        if not is_clean:
            self._up.lose_tail()

    def send(self, frame: bytes) -> None:
        """Carry a frame to the orchestrator, now or after the next reconnect."""
        if self._is_cut:
            self._unsent.append(frame)
            return
        if self._frames_to_garble:
            self._frames_to_garble -= 1
            self._hardships.note(CoverageMark.GARBLED)
            frame = _garbled(frame)
        self._up.carry(frame)

    def take_reconnected(self) -> bool:
        """Whether the connection was made anew since the last call."""
        has, self._has_reconnected = self._has_reconnected, False
        return has

    # ------------------------------------------------------------ the orchestrator's end

    def send_to_engine(self, frame: bytes) -> bool:
        """Carry a frame to the engine; False if it isn't connected."""
        if not self.is_up:
            return False
        self._down.carry(frame)
        return True

    # ------------------------------------------------------------ faults

    def cut(self, lasts_s: float) -> None:
        """Break the connection; it is made anew after a while."""
        if self._receive is not None:
            self._hardships.note(CoverageMark.CUT)
        self._up.lose_tail()
        self._down.lose_tail()
        self._is_cut = True
        self._was_open_when_cut = self._receive is not None
        self._cuts += 1
        self._loop.call_later(lasts_s, self._mend, self._cuts)

    def _mend(self, cut: int) -> None:
        if cut != self._cuts:  # it was cut again meanwhile, for longer
            return
        self._is_cut = False
        self._has_reconnected = self._was_open_when_cut
        unsent, self._unsent = self._unsent, []
        for frame in unsent:
            self.send(frame)

    def stall(self, lasts_s: float) -> None:
        """Let one direction's frames, or both's, arrive only after a while."""
        directions = self._chance.choice(((self._up,), (self._down,), (self._up, self._down)))
        for direction in directions:
            direction.stall(lasts_s)
        if self.is_up:
            self._hardships.note(CoverageMark.STALLED)

    def garble(self, frames: int) -> None:
        """Damage the next frames that the engine sends."""
        self._frames_to_garble += frames

    # ------------------------------------------------------------ arrivals

    def _at_router(self, frame: bytes) -> None:
        self._tape.note(CarriedFrame(self._loop.time(), self._engine, True, frame))
        self._router.arrive(self._engine.encode(), frame)

    def _at_engine(self, frame: bytes) -> None:
        if self._receive is not None:
            self._tape.note(CarriedFrame(self._loop.time(), self._engine, False, frame))
            self._receive(frame)


def _garbled(frame: bytes) -> bytes:
    """Damage that is found out only late where possible: a step whose columns disagree."""
    message = decode_from_engine(frame)
    if isinstance(message, Step) and message.token_ids:
        return encode(msgspec.structs.replace(message, token_ids=message.token_ids[4:]))
    return frame[: len(frame) // 2]


class SimulatedRouter:
    """The orchestrator's socket, with links for wires; see :class:`wire.Wire`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tape: FrameLog, hardships: CoverageMarks
    ) -> None:
        self.address = "simulated"
        self.loop = loop
        self.tape = tape
        self.hardships = hardships
        self._links: dict[bytes, SimulatedLink] = {}
        self._arrived: list[tuple[bytes, bytes]] = []
        self._on_frames: Callable[[list[tuple[bytes, bytes]]], None] | None = None
        self._drain_handle: asyncio.Handle | None = None

    def link(self, engine: str, *, latency_s: float, chance: random.Random) -> SimulatedLink:
        """The wire to an engine of this name."""
        link = SimulatedLink(engine, self, latency_s=latency_s, chance=chance)
        self._links[engine.encode()] = link
        return link

    def send(self, peer: bytes, message: Message) -> bool:
        """Carry one message; False if the peer isn't connected."""
        link = self._links.get(peer)
        return link is not None and link.send_to_engine(sendable(message))

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[list[tuple[bytes, bytes]]], None],
    ) -> None:
        """Have ``on_frames`` called with what arrives."""
        assert loop is self.loop
        self._on_frames = on_frames
        self._schedule_drain()

    def detach(self) -> None:
        """Stop calling back."""
        self._on_frames = None

    def close(self) -> None:
        """Nothing to let go of."""

    def forget(self) -> None:
        """The process is gone, with what had arrived and was not read."""
        self._arrived.clear()

    def arrive(self, peer: bytes, frame: bytes) -> None:
        """A link has carried a frame here."""
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
