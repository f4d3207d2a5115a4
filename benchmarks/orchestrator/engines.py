"""Simulated engines that speak the wire protocol but compute nothing.

An engine has slots, a queue, steps in columns, credits and weight updates like a real one. A turn
is answered with the same tokens each time, after a configured time. :class:`FakeEngine` opens no
socket and reads no clock, so one process can run a thousand: ``python -m
benchmarks.orchestrator.engines ADDRESS`` over ZeroMQ, :class:`InProcessEngines` in the
orchestrator's own loop.
"""

import argparse
import asyncio
import math
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq
from msgspec.structs import replace

from tidegate.simulation.engine.spec import SimulatedEngineSpec, hello_of
from tidegate.transport.messages import (
    LENGTH,
    RUNNING,
    Ack,
    AdapterLive,
    AdapterLoaded,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromOrchestrator,
    LoadAdapter,
    Message,
    Shutdown,
    Step,
    SubmitTurn,
    SubmitTurns,
    SwapAdapter,
    UpdateWeights,
    WeightsLive,
    WeightsStaged,
    Welcome,
    decode_from_orchestrator,
    encode,
)
from tidegate.transport.streams import SendWindow

VOCAB_SIZE = 4096
HEARTBEAT_S = 5.0

OnFrames = Callable[[list[tuple[bytes, bytes]]], None]
Socket = zmq.Socket[bytes]


def add_work_options(parser: argparse.ArgumentParser) -> None:
    """Add the engines' workload as command-line options."""
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=64, help="turns that an engine runs at once")
    parser.add_argument("--tokens", type=int, default=64, help="per turn")
    parser.add_argument("--steps", type=int, default=4, help="step messages per turn")
    parser.add_argument("--turn-s", type=float, default=0.008, help="time that a turn takes")
    parser.add_argument("--step-s", type=float, default=0.002, help="between two steps")


class FakeEngine:
    """One engine: slots, a queue, and turns with known due times."""

    def __init__(
        self, number: int, work: argparse.Namespace, send: Callable[[bytes], object]
    ) -> None:
        self.name = f"engine-{number}"
        self.has_ended = False
        """Whether the engine was sent ``Shutdown``."""
        self._send_frame = send
        self._slots: int = work.slots
        self._steps: int = work.steps
        self._turn_s: float = work.turn_s
        self._step_s: float = work.step_s
        self._phase_s: float = work.step_s * number / work.engines
        """Offset of this engine's steps, so that engines do not step in unison."""
        tokens = work.tokens // work.steps
        self._token_ids = array("i", range(tokens)).tobytes()
        self._logprobs = array("f", [-1.0] * tokens).tobytes()
        self._count = array("I", [tokens]).tobytes() if tokens > 1 else b""
        self._window = SendWindow(1)
        self._version = 0
        self._adapters: dict[str, int] = {}
        """Live version of each LoRA adapter."""
        self._adapter_of: dict[int, str] = {}
        """Adapter of each turn that has one."""
        self._waiting: deque[int] = deque()
        self._due: deque[tuple[float, int, int]] = deque()
        """(due time, turn, steps left), earliest first, because the interval is the same for
        all."""

    @property
    def due_s(self) -> float | None:
        """When the next step is due; None while there is no work, or no credit."""
        return self._due[0][0] if self._due and self._window.is_open else None

    def start(self) -> None:
        """Send the hello."""
        self._send(
            replace(
                hello_of(self.name, time.time_ns(), SimulatedEngineSpec(adapters_max=16)),
                vocab_size=VOCAB_SIZE,
                max_running_turns=self._slots,
            )
        )

    def receive(self, message: FromOrchestrator, now_s: float) -> None:
        """Process one message."""
        match message:
            case SubmitTurn():
                self._submit(message)
                self._fill_slots(now_s)
            case SubmitTurns(turns=turns):
                for submitted in turns:
                    self._submit(submitted)
                self._fill_slots(now_s)
            case Ack(seq=seq):
                self._window.acknowledge(seq)
            case Welcome(credit_steps=credit_steps):
                self._window = SendWindow(credit_steps)
            case UpdateWeights(version=version):
                self._send(WeightsStaged(version=version))
            case FinishWeightUpdate(version=version):
                self._version = version
                self._send(WeightsLive(version=version))
            case LoadAdapter(name=name, version=version):
                self._send(AdapterLoaded(name=name, version=version))
            case SwapAdapter(name=name, version=version):
                self._adapters[name] = version
                self._send(AdapterLive(name=name, version=version))
            case Shutdown():
                self.has_ended = True

    def _submit(self, submitted: SubmitTurn) -> None:
        self._waiting.append(submitted.turn)
        if submitted.sampling.adapter:
            self._adapter_of[submitted.turn] = submitted.sampling.adapter

    def step(self, now_s: float) -> None:
        """Send everything due as one step message, or one for each adapter."""
        rows: dict[str, tuple[array[int], bytearray]] = {}
        due = self._due
        for _ in range(len(due)):
            if due[0][0] > now_s:
                break
            _, turn, left = due.popleft()
            adapter = self._adapter_of.get(turn, "")
            turns, finish = rows.setdefault(adapter, (array("I"), bytearray()))
            turns.append(turn)
            finish.append(LENGTH if left == 1 else RUNNING)
            if left > 1:
                due.append((self._step_after(now_s), turn, left - 1))
            elif adapter:
                del self._adapter_of[turn]
        self._fill_slots(now_s)
        for adapter, (turns, finish) in rows.items():
            self._send_step(adapter, turns, finish)

    def _send_step(self, adapter: str, turns: "array[int]", finish: bytearray) -> None:
        rows = len(turns)
        seq = self._window.next_seq()
        message = Step(
            seq=seq,
            version=self._adapters[adapter] if adapter else self._version,
            adapter=adapter,
            turns=turns.tobytes(),
            token_ids=self._token_ids * rows,
            logprobs=self._logprobs * rows,
            finish=bytes(finish) if any(finish) else b"",
            counts=self._count * rows,
            busy_us=1,
        )
        self._window.sent(seq, self._send(message))

    def send_heartbeat(self) -> None:
        """Send a heartbeat."""
        self._send(
            EngineHeartbeat(
                weight_version=self._version,
                running_turns=len(self._due),
                waiting_turns=len(self._waiting),
                free_blocks=0,
                sent_us=time.monotonic_ns() // 1000,
            )
        )

    def _fill_slots(self, now_s: float) -> None:
        while self._waiting and len(self._due) < self._slots:
            self._due.append((self._step_after(now_s), self._waiting.popleft(), self._steps))

    def _step_after(self, now_s: float) -> float:
        """Return the engine's step time closest to one interval from now, which is exact on
        average."""
        if not self._turn_s:
            return now_s
        steps = round((now_s + self._turn_s / self._steps - self._phase_s) / self._step_s)
        return steps * self._step_s + self._phase_s

    def _send(self, message: Message) -> bytes:
        frame = encode(message)
        self._send_frame(frame)
        return frame


class InProcessEngines:
    """Implements :class:`~tidegate.orchestrator.fleet.shell.Wire` with engines behind it, without a
    socket: messages are still encoded and decoded."""

    def __init__(self, work: argparse.Namespace) -> None:
        self.address = "in-process"
        self._work = work
        self._engines: dict[bytes, FakeEngine] = {}
        self._frames: list[tuple[bytes, bytes]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_frames: OnFrames = lambda frames: None
        self._is_due = False

    def send(self, peer: bytes, message: Message) -> bool:
        """Deliver a message to an engine now; it steps before the loop's next turn."""
        assert self._loop is not None
        engine = self._engines[peer]
        assert isinstance(message, FromOrchestrator)
        engine.receive(message, self._loop.time())
        self._schedule()
        return True

    def attach(self, loop: asyncio.AbstractEventLoop, on_frames: OnFrames) -> None:
        """Start the engines, which send their hellos."""
        self._loop, self._on_frames = loop, on_frames
        for number in range(self._work.engines):
            peer = f"engine-{number}".encode()
            engine = FakeEngine(number, self._work, partial(self._say, peer))
            self._engines[peer] = engine
            engine.start()
        self._schedule()

    def _say(self, peer: bytes, frame: bytes) -> None:
        self._frames.append((peer, frame))

    def detach(self) -> None:
        """Stop delivering frames."""
        self._on_frames = lambda frames: None

    def close(self) -> None:
        """No-op."""

    def _schedule(self) -> None:
        assert self._loop is not None
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        assert self._loop is not None
        self._is_due = False
        now_s = self._loop.time()
        for engine in self._engines.values():
            if (due_s := engine.due_s) is not None and due_s <= now_s:
                engine.step(now_s)
                self._schedule()
        frames, self._frames = self._frames, []
        if frames:
            self._on_frames(frames)


def connect(address: str, work: argparse.Namespace) -> dict[Socket, FakeEngine]:
    """Create the engines, each with its own socket."""
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, max(1024, 2 * work.engines))
    engines = {}
    for number in range(work.engines):
        socket = context.socket(zmq.DEALER)
        engine = FakeEngine(number, work, socket.send)
        socket.setsockopt(zmq.IDENTITY, engine.name.encode())
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        engine.start()
        engines[socket] = engine
    return engines


def serve(engines: dict[Socket, FakeEngine]) -> None:
    """Run all engines until they receive ``Shutdown``."""
    poller = zmq.Poller()
    for socket in engines:
        poller.register(socket, zmq.POLLIN)
    next_heartbeat_s = time.monotonic() + HEARTBEAT_S
    while not all(engine.has_ended for engine in engines.values()):
        due = min(
            (s for e in engines.values() if (s := e.due_s) is not None), default=next_heartbeat_s
        )
        wait_s = min(due, next_heartbeat_s) - time.monotonic()
        for socket, _ in poller.poll(max(0, math.ceil(wait_s * 1000))):
            read(socket, engines[socket])
        now_s = time.monotonic()
        for engine in engines.values():
            if (due_s := engine.due_s) is not None and due_s <= now_s:
                engine.step(now_s)
        if now_s >= next_heartbeat_s:
            next_heartbeat_s = now_s + HEARTBEAT_S
            for engine in engines.values():
                engine.send_heartbeat()


def read(socket: Socket, engine: FakeEngine) -> None:
    """Deliver all arrived messages to an engine."""
    now_s = time.monotonic()
    while True:
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        engine.receive(decode_from_orchestrator(frame), now_s)


def main() -> None:
    """Connect, and run until ``Shutdown``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    add_work_options(parser)
    work = parser.parse_args()
    serve(connect(work.address, work))


if __name__ == "__main__":
    main()
