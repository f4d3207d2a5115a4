"""Which engines are there, and what do they say? From frames to events; time is an argument.

It owns the handshake, the acknowledgements and the heartbeats. It knows messages and engines; not
rollouts or batches, and no socket: it is given one to send with.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.errors import BadFrame
from tidegate.orchestrator.events import EngineJoined, EngineLeft, Event, StepArrived, TurnRejected
from tidegate.orchestrator.statistics import EngineStatistics
from tidegate.transport.messages import (
    PROTOCOL,
    Ack,
    Complaint,
    EngineHeartbeat,
    FromEngine,
    Goodbye,
    Hello,
    Message,
    OrchestratorHeartbeat,
    Refused,
    Step,
    TurnRefused,
    WeightsLive,
    Welcome,
    decode_from_engine,
)
from tidegate.transport.streams import ReceiveWindow, Verdict

ENGINE_NAME_BYTES_MAX = 200
"""ZeroMQ identities are at most 255 bytes."""


@dataclass(slots=True)
class Engine:
    """One engine of the fleet."""

    hello: Hello
    window: ReceiveWindow
    heard_s: float
    """When it last said anything, on the orchestrator's clock."""
    weight_version: int
    tokens: int = 0
    busy_us: int = 0
    running_turns: int = 0
    waiting_turns: int = 0


@dataclass(frozen=True, slots=True)
class FleetTimes:
    """Intervals the fleet works by."""

    heartbeat_interval_s: float
    engine_timeout_s: float
    credit_steps: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine says of weights and pauses: the coordinator's business."""

    engine: str
    message: FromEngine


Heard = list[Event | Answer]
"""What a batch of frames meant, in order."""


class Fleet:
    """The engines of a run."""

    def __init__(self, times: FleetTimes, send: Callable[[bytes, Message], bool]) -> None:
        self._times = times
        self._send = send
        self.engines: dict[str, Engine] = {}
        self.malformed_frames = 0
        self.refused_engines: dict[str, str] = {}
        """Name -> why it could not join."""
        self.departed: dict[str, str] = {}
        """Name -> why it left."""
        self._given_up: dict[str, Engine] = {}
        """Those that left, by name: one that was only silent comes back in mid-stream."""

    # ------------------------------------------------------------ outgoing

    def send(self, engine: str, message: Message) -> None:
        """Send a message to an engine; to a vanished one it is dropped, its loss is noticed."""
        self._send(engine.encode(), message)

    def tick(self, now_s: float) -> list[Event]:
        """Send heartbeats; notice who has been silent for too long."""
        events: list[Event] = []
        for name, engine in list(self.engines.items()):
            silent_s = now_s - engine.heard_s
            if silent_s > self._times.engine_timeout_s:
                events += self.lose(name, f"said nothing for {silent_s:.0f} s")
            else:
                self.send(name, OrchestratorHeartbeat())
        return events

    def lose(self, name: str, why: str) -> list[Event]:
        """Strike an engine from the fleet."""
        engine = self.engines.pop(name, None)
        if engine is None:
            return []
        self._given_up[name] = engine
        self.departed[name] = why
        return [EngineLeft(name)]

    # ------------------------------------------------------------ incoming

    def hear(self, frames: list[tuple[bytes, bytes]], now_s: float) -> Heard:
        """Read what engines sent. A bad frame is counted, answered, and harms nobody else."""
        heard: Heard = []
        for peer, frame in frames:
            try:
                self._hear_one(peer, decode_from_engine(frame), now_s, heard)
            except BadFrame as error:
                self.malformed_frames += 1
                self._send(peer, Complaint(message=str(error)))
        return heard

    def _hear_one(self, peer: bytes, message: FromEngine, now_s: float, heard: Heard) -> None:
        if isinstance(message, Hello):
            self._welcome(peer, message, now_s, heard)
            return
        name = peer.decode(errors="replace")
        engine = self.engines.get(name)
        if engine is None:
            if name in self.departed:  # it was given up; its turns went elsewhere: it must end
                self._send(peer, Refused(message=f"given up: {self.departed[name]}"))
                return
            raise BadFrame(f"{name!r} sent a message before its hello was accepted")
        engine.heard_s = now_s
        match message:
            case Step():
                self._hear_step(name, engine, message, heard)
            case EngineHeartbeat():
                engine.running_turns = message.running_turns
                engine.waiting_turns = message.waiting_turns
            case TurnRefused(turn=turn, message=why):
                heard.append(TurnRejected(name, turn, why))
            case Goodbye(reason=reason):
                heard += self.lose(name, reason)
            case _:
                if isinstance(message, WeightsLive):
                    engine.weight_version = message.version
                heard.append(Answer(name, message))

    def _hear_step(self, name: str, engine: Engine, step: Step, heard: Heard) -> None:
        event = step_arrived(name, step)  # before it counts as received: a bad one is not
        if engine.window.accept(engine.hello.epoch, step.seq) is Verdict.NEW:
            engine.tokens += len(event.token_ids)
            engine.busy_us += step.busy_us
            heard.append(event)
        if (seq := engine.window.acknowledgement()) is not None:
            self.send(name, Ack(seq=seq))

    # ------------------------------------------------------------ handshake

    def _welcome(self, peer: bytes, hello: Hello, now_s: float, heard: Heard) -> None:
        if why := self._objection(peer, hello):
            self.refused_engines[hello.engine[:ENGINE_NAME_BYTES_MAX]] = why
            self._send(peer, Refused(message=why))
            return
        known = self.engines.get(hello.engine)
        if known is not None and known.hello.epoch != hello.epoch:
            heard += self.lose(hello.engine, "came back as a new process")
        before = known or self._given_up.get(hello.engine)
        if before is not None and before.hello.epoch == hello.epoch:
            window = before.window  # it has reconnected: its stream goes on where it was
        else:
            window = ReceiveWindow(self._times.credit_steps)
        self._given_up.pop(hello.engine, None)
        self.engines[hello.engine] = Engine(hello, window, now_s, hello.weight_version)
        self.departed.pop(hello.engine, None)
        welcome = Welcome(
            heartbeat_interval_s=self._times.heartbeat_interval_s,
            orchestrator_timeout_s=self._times.engine_timeout_s,
            credit_steps=self._times.credit_steps,
        )
        self._send(peer, welcome)
        joined = EngineJoined(hello.engine, hello.weight_version, hello.max_running_turns)
        heard.append(joined)

    def _objection(self, peer: bytes, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL:
            return (
                f"engine {hello.engine!r} speaks protocol {hello.protocol}, this run {PROTOCOL}; "
                f"run the same version of Tidegate on both ends"
            )
        if not 0 < len(hello.engine.encode()) <= ENGINE_NAME_BYTES_MAX:
            return f"engine names have 1 to {ENGINE_NAME_BYTES_MAX} bytes, got {hello.engine!r}"
        if hello.engine.encode() != peer:
            return f"engine {hello.engine!r} must connect under its own name, not {peer!r}"
        if hello.max_running_turns < 1:
            return f"max_running_turns must be >= 1, got {hello.max_running_turns}"
        for other in self.engines.values():
            if other.hello.engine != hello.engine and other.hello.vocab_size != hello.vocab_size:
                return (
                    f"engine {hello.engine!r} serves a vocabulary of {hello.vocab_size} tokens, "
                    f"{other.hello.engine!r} one of {other.hello.vocab_size}; all must serve the "
                    f"same model"
                )
        return None

    def statistics(self) -> tuple[EngineStatistics, ...]:
        """A snapshot of every engine."""
        return tuple(
            EngineStatistics(
                name=name,
                weight_version=engine.weight_version,
                running_turns=engine.running_turns,
                waiting_turns=engine.waiting_turns,
                tokens=engine.tokens,
                busy_s=engine.busy_us / 1e6,
            )
            for name, engine in sorted(self.engines.items())
        )


def step_arrived(engine: str, step: Step) -> StepArrived:
    """Unpack a step's columns.

    Raises:
        BadFrame: their lengths don't agree, or a probability exceeds 1.
    """
    try:
        turns = memoryview(step.turns).cast("I")
        token_ids = memoryview(step.token_ids).cast("i")
        logprobs = memoryview(step.logprobs).cast("f")
        counts = memoryview(step.counts).cast("I") if step.counts else None
    except (TypeError, struct.error) as error:
        raise BadFrame(f"step {step.seq}: a column is no whole number of items: {error}") from error
    tokens = len(turns) if counts is None else sum(counts)
    rows = {len(turns), len(step.finish) or len(turns), len(turns if counts is None else counts)}
    if len(rows) > 1 or not len(token_ids) == len(logprobs) == tokens:
        raise BadFrame(
            f"step {step.seq}: {len(turns)} turns, {tokens} tokens announced, but "
            f"{len(token_ids)} ids, {len(logprobs)} log-probs and {len(step.finish)} finish flags"
        )
    return StepArrived(
        engine=engine,
        version=step.version,
        turns=turns,
        token_ids=token_ids,
        logprobs=logprobs,
        finish=step.finish,
        counts=counts,
        prefills=step.prefills,
        started_us=step.started_us,
        busy_us=step.busy_us,
    )
