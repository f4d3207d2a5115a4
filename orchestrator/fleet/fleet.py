"""Registry of a run's engines: turns their frames into events of the core. Time is an argument.

The scheduler's engine side feeds it frames from the ZeroMQ ROUTER. It decides which engines may
join, handles handshakes, acknowledgements, credits and heartbeats, and sends through a function
that it is given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tidegate.errors import BadFrame
from tidegate.orchestrator.core.events import EngineJoined, EngineLeft, Event, TurnRejected
from tidegate.orchestrator.core.step_checks import are_tokens_valid, check_step, step_arrived
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.settings.config import FleetSettings
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, EngineWork
from tidegate.transport.limits import cut
from tidegate.transport.messages import (
    PROTOCOL,
    Ack,
    EngineHeartbeat,
    FromEngine,
    Goodbye,
    Hello,
    HelloRejected,
    KvPolicy,
    Message,
    MessageRejected,
    OrchestratorHeartbeat,
    Shutdown,
    Step,
    TurnFailed,
    WeightsLive,
    Welcome,
    decode_from_engine,
)
from tidegate.transport.rate_limiter import RateLimiter
from tidegate.transport.streams import ReceiveWindow, StepAcceptance

ENGINE_NAME_BYTES_MAX = 200
"""ZeroMQ identities are at most 255 bytes."""

ENGINES_MAX = 4096
"""Limit of engines, more than one process serves; stops a peer that joins under ever more names."""


@dataclass(frozen=True, slots=True)
class EngineRequirements:
    """Requirements of a run that each engine must meet."""

    is_deterministic: bool
    quantization: str
    """Quantization of weights; empty for none."""
    kv_policy: KvPolicy | None
    """KV policy that engines must support; None for any."""
    weight_channel: str | None
    """Weight channel that engines must support; None for any."""


NewestVersion = Callable[[str], int]
"""Returns the newest version that was published of an adapter; empty: of the run's weights."""


def objection(
    peer: bytes,
    hello: Hello,
    requirements: EngineRequirements,
    engines: Mapping[str, Engine],
    newest_version: NewestVersion,
) -> str | None:
    """Return why an engine can't join the run; None if it can."""
    return (
        _name_objection(peer, hello, engines)
        or _capability_objection(hello, requirements)
        or _block_size_objection(hello, requirements, engines)
        or _weights_objection(hello, requirements, engines, newest_version(""))
        or _adapters_objection(hello, newest_version)
    )


def _name_objection(peer: bytes, hello: Hello, engines: Mapping[str, Engine]) -> str | None:
    if hello.protocol != PROTOCOL:
        return (
            f"engine {hello.engine!r} speaks protocol {hello.protocol}, this run {PROTOCOL}; "
            f"run the same version of Tidegate on both ends"
        )
    if not 0 < len(hello.engine.encode()) <= ENGINE_NAME_BYTES_MAX:
        return f"engine names have 1 to {ENGINE_NAME_BYTES_MAX} bytes, got {hello.engine!r}"
    if not hello.engine.isprintable():
        return f"engine names are printable, got {hello.engine!r}"
    if len(engines) >= ENGINES_MAX and hello.engine not in engines:
        return f"this run has {len(engines)} engines, its maximum"
    if hello.engine.encode() != peer:
        return f"engine {hello.engine!r} must connect under its own name, not {peer!r}"
    return None


def _capability_objection(hello: Hello, requirements: EngineRequirements) -> str | None:
    if hello.max_running_turns < 1:
        return f"max_running_turns must be >= 1, got {hello.max_running_turns}"
    if requirements.is_deterministic and not hello.is_deterministic:
        return (
            f"engine {hello.engine!r} is not deterministic, but this run is; start the engine with "
            f"--deterministic"
        )
    if hello.quantization != requirements.quantization:
        return (
            f"engine {hello.engine!r} has quantization {hello.quantization or 'none'!r}, but this "
            f"run {requirements.quantization or 'none'!r}; start both with the same quantization"
        )
    if requirements.kv_policy is not None and requirements.kv_policy not in hello.kv_policies:
        can = ", ".join(map(repr, hello.kv_policies)) or "nothing"
        return (
            f"engine {hello.engine!r} ({hello.model_code or hello.architecture}) does not support "
            f"kv_policy={requirements.kv_policy!r} with correct provenance; it supports {can}: "
            f"set one of these"
        )
    return None


def _block_size_objection(
    hello: Hello, requirements: EngineRequirements, engines: Mapping[str, Engine]
) -> str | None:
    """Require one block size, because deterministic engines sum attention block by block."""
    for other in engines.values() if requirements.is_deterministic else ():
        other_block_tokens = other.hello.block_tokens
        if other.hello.engine != hello.engine and other_block_tokens != hello.block_tokens:
            return (
                f"engine {hello.engine!r} has KV blocks of {hello.block_tokens} tokens, "
                f"{other.hello.engine!r} of {other_block_tokens}, but the exact results of a "
                f"deterministic engine depend on the block size; start all engines with the same "
                f"--block-tokens"
            )
    return None


def _weights_objection(
    hello: Hello,
    requirements: EngineRequirements,
    engines: Mapping[str, Engine],
    newest_version: int,
) -> str | None:
    if requirements.weight_channel not in (None, *hello.weight_channels):
        return (
            f"engine {hello.engine!r} has no weight channel {requirements.weight_channel!r}, and "
            f"could never serve this run's weights; it has "
            f"{', '.join(hello.weight_channels) or 'none'}: set weight_channel to one of these"
        )
    if hello.weight_version > newest_version:
        return (
            f"engine {hello.engine!r} serves weights v{hello.weight_version}, but this run has "
            f"published none newer than v{newest_version}; restart the engine"
        )
    for other in engines.values():
        if other.hello.engine != hello.engine and other.hello.vocab_size != hello.vocab_size:
            return (
                f"engine {hello.engine!r} serves a vocabulary of {hello.vocab_size} tokens, "
                f"{other.hello.engine!r} one of {other.hello.vocab_size}; all must serve the "
                f"same model"
            )
    return None


def _adapters_objection(hello: Hello, newest_version: NewestVersion) -> str | None:
    for held in hello.adapters:
        newest = newest_version(held.name)
        if held.version > newest:
            return (
                f"engine {hello.engine!r} serves adapter {held.name!r} v{held.version}, but this "
                f"run has published none newer than v{newest}; restart the engine"
            )
    return None


REMEMBERED_MAX = 1000
"""Engines that left or were refused whose reasons are kept; the oldest are forgotten."""

ANSWERS_PER_S_MAX = 32
"""Complaints and refusals sent to one peer, and complaints taken from it; others are counted."""

HELLOS_PER_S_MAX = 8
"""Hellos accepted from one peer per second. Each may be answered with all turns and weights."""

VOCAB_SIZE_UNKNOWN = 1 << 31
"""Larger than any token id."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineReply:
    """Engine message about weights, pauses, sleep or scoring, which the fleet passes on."""

    engine: str
    message: FromEngine


@dataclass(frozen=True, slots=True)
class DueAck:
    """Acknowledgement that is sent once the acknowledged steps are committed."""

    engine: str
    epoch: int
    seq: int


Received = list[Event | EngineReply]
"""Meaning of a batch of frames, in order."""


class Fleet:
    """All engines of a run."""

    def __init__(
        self,
        settings: FleetSettings,
        send: Callable[[bytes, Message], bool],
        *,
        is_deterministic: bool = False,
        quantization: str = "",
        kv_policy: KvPolicy | None = None,
        weight_channel: str | None = None,
        newest_version: NewestVersion = lambda adapter: 0,
    ) -> None:
        """``is_deterministic``, ``quantization``, ``kv_policy`` and ``weight_channel`` are the
        run's settings: engines with other values are refused. So are engines with versions newer
        than ``newest_version``, because they belong to another run."""
        self._settings = settings
        self._newest_version = newest_version
        self._requirements = EngineRequirements(
            is_deterministic, quantization, kv_policy, weight_channel
        )
        self._send = send
        self.engines: dict[str, Engine] = {}
        self.malformed_frames = 0
        self.context_tokens = 0
        """Context positions of all prefills so far, including engines that left."""
        self.cached_context_tokens = 0
        """Number of these positions that engines had cached."""
        self.refused_engines: dict[str, str] = {}
        """Engine -> reason for which it could not join."""
        self.departed: dict[str, str] = {}
        """Engine -> reason for which it left."""
        self._given_up: dict[str, Engine] = {}
        """Engines that left, by name: one that was only silent may continue its stream."""
        self._retired: dict[str, int] = {}
        """Engine -> epoch of a process that was asked to leave for good."""
        self._streams: Mapping[str, tuple[int, int]] = {}
        """After a resume: engine -> (epoch, next seq) of the crashed process."""
        self._expected: dict[str, float] = {}
        """After a resume: engines of the crashed process, and until when they may return."""
        self._acks: dict[str, DueAck] = {}
        """Acknowledgements not sent yet, by engine."""
        self._next_tick_s: float | None = None
        """When :meth:`tick` is due again."""
        self._vocab_size_min = VOCAB_SIZE_UNKNOWN
        """Smallest vocabulary of any engine so far."""
        self.context_tokens_max = 0
        """Longest context that every engine of the run reads and holds, because a turn may move to
        any of them; 0 before the first has joined."""
        self._have_valid_tokens = False
        """Whether all token ids and log-probs of the steps being handled are in range."""
        self._reply_limiter = RateLimiter(replies_max=ANSWERS_PER_S_MAX, interval_s=1.0)
        self._hello_limiter = RateLimiter(replies_max=HELLOS_PER_S_MAX, interval_s=1.0)

    def resume(self, streams: Mapping[str, tuple[int, int]], away: list[str], now_s: float) -> None:
        """Expect the engines of a crashed process, which reconnect and replay their steps."""
        self._streams = dict(streams)
        self._expected = dict.fromkeys(away, now_s + self._settings.engine_timeout_s)

    def take_acks(self) -> list[DueAck]:
        """Return the acknowledgements to send once everything received so far is committed."""
        acks, self._acks = self._acks, {}
        return list(acks.values())

    def acknowledge(self, acks: list[DueAck]) -> None:
        """Send acknowledgements, except to engines that were restarted since."""
        for ack in acks:
            engine = self.engines.get(ack.engine)
            if engine is not None and engine.hello.epoch == ack.epoch:
                self.send(ack.engine, Ack(seq=ack.seq))

    # ------------------------------------------------------------ outgoing

    def send(self, engine: str, message: Message) -> None:
        """Send a message to an engine; dropped if the engine has vanished."""
        self._send(engine.encode(), message)

    def supports_submit_turns(self, engine: str) -> bool:
        """Whether an engine's hello says that it accepts ``SubmitTurns``."""
        known = self.engines.get(engine)
        return known is not None and known.hello.supports_submit_turns

    def tick(self, now_s: float) -> list[Event]:
        """Send heartbeats, and remove engines that were silent for too long."""
        events: list[Event] = []
        blocked_s = self._blocked_s(now_s)
        for name, engine in list(self.engines.items()):
            engine.last_message_s += blocked_s
            silent_s = now_s - engine.last_message_s
            if silent_s > self._settings.engine_timeout_s:
                engine.may_return = True
                events += self.lose(name, f"said nothing for {silent_s:.0f} s")
            elif now_s - (engine.stuck_since_s or now_s) > self._settings.engine_timeout_s:
                events += self.lose(name, "its steps can't be read, or one of them is missing")
            else:
                self.send(name, OrchestratorHeartbeat())
        for name in [name for name, until_s in self._expected.items() if now_s > until_s]:
            del self._expected[name]
            self.departed[name] = "did not reconnect after the run was resumed"
            events.append(EngineLeft(name, is_crash=False))  # its host may have died with the run's
        return events

    def _blocked_s(self, now_s: float) -> float:
        """Return for how long user code blocked this loop, which must not count as silence."""
        due_s = self._next_tick_s if self._next_tick_s is not None else now_s
        self._next_tick_s = now_s + self._settings.heartbeat_interval_s
        return max(0.0, now_s - due_s)

    def retire(self, name: str) -> None:
        """Let the present process of an engine not join again once it has left."""
        _keep_newest(self._retired, name, self.engines[name].hello.epoch)

    def is_retired(self, name: str) -> bool:
        """Whether an engine that has left was asked to leave for good."""
        gone = self._given_up.get(name)
        return gone is not None and self._retired.get(name) == gone.hello.epoch

    def lose(self, name: str, why: str, *, is_crash: bool = True) -> list[Event]:
        """Remove an engine; ``is_crash``: one of its turns may have caused the loss."""
        engine = self.engines.pop(name, None)
        if engine is None:
            return []
        _keep_newest(self._given_up, name, engine)
        _keep_newest(self.departed, name, cut(why))
        return [EngineLeft(name, is_crash)]

    # ------------------------------------------------------------ incoming

    def receive(self, frames: list[tuple[bytes, bytes]], now_s: float) -> Received:
        """Decode frames of engines. A bad frame is counted, answered and dropped, alone."""
        received: Received = []
        messages = [_decoded(frame) for _, frame in frames]
        steps = [message for message in messages if type(message) is Step]
        self._have_valid_tokens = are_tokens_valid(steps, self._vocab_size_min)
        for (peer, _), message in zip(frames, messages, strict=True):
            if isinstance(message, BadFrame):
                self._complain(peer, message, now_s)
                continue
            try:
                self._receive_message(peer, message, now_s, received)
            except BadFrame as error:
                self._complain(peer, error, now_s)
        return received

    def _complain(self, peer: bytes, error: BadFrame, now_s: float) -> None:
        self.malformed_frames += 1
        self._reply_to(peer, MessageRejected(message=cut(str(error))), now_s)

    def _reply_to(self, peer: bytes, message: Message, now_s: float) -> None:
        if self._reply_limiter.has(peer, now_s):
            self._send(peer, message)

    def _receive_message(
        self, peer: bytes, message: FromEngine, now_s: float, received: Received
    ) -> None:
        if type(message) is Hello:
            if not self._hello_limiter.has(peer, now_s):
                raise BadFrame(f"more than {HELLOS_PER_S_MAX} hellos a second; wait")
            self._welcome(peer, message, now_s, received)
            return
        name = _name(peer)
        engine = self.engines.get(name)
        if engine is None:
            gone = self._given_up.get(name)
            may_return = gone is not None and gone.may_return and not self.is_retired(name)
            if may_return:  # a hang of the engine or the network has ended
                raise BadFrame(
                    f"{name!r} {self.departed[name]} and was removed; send a hello message to "
                    "join again"
                )
            if name in self.departed:  # its turns run on other engines: it must end
                rejected = HelloRejected(message=f"removed: {self.departed[name]}")
                self._reply_to(peer, Shutdown() if self.is_retired(name) else rejected, now_s)
                return
            raise BadFrame(f"{name!r} sent a message before its hello was accepted")
        engine.last_message_s = now_s
        match message:
            case Step():
                self._receive_step(name, engine, message, received)
            case EngineHeartbeat():
                engine.running_turns = message.running_turns
                engine.waiting_turns = message.waiting_turns
                engine.out_of_memory_steps = message.out_of_memory_steps
            case TurnFailed(turn=turn, message=why):
                received.append(TurnRejected(name, turn, cut(why)))
            case Goodbye(reason=reason, has_failed=has_failed, is_requested=is_requested):
                if is_requested:
                    self.retire(name)
                received += self.lose(name, reason, is_crash=has_failed)
            case MessageRejected() if not self._reply_limiter.has(peer, now_s):
                self.malformed_frames += 1  # above the rate limit: counted, not logged
            case _:
                if isinstance(message, WeightsLive):
                    self._receive_live(engine, message)
                received.append(EngineReply(name, message))

    def _receive_live(self, engine: Engine, live: WeightsLive) -> None:
        if live.version > (newest := self._newest_version("")):
            raise BadFrame(f"weights v{live.version} are live, but v{newest} is the newest")
        engine.count_swap(live)

    def _receive_step(self, name: str, engine: Engine, step: Step, received: Received) -> None:
        try:  # a bad step doesn't count as received
            event = step_arrived(name, step, engine.hello.epoch)
            check_step(
                event,
                vocab_size=engine.hello.vocab_size,
                newest_version=self._newest_version(step.adapter),
                has_valid_tokens=self._have_valid_tokens,
            )
        except BadFrame:
            engine.stuck_since_s = engine.stuck_since_s or engine.last_message_s
            raise
        verdict = engine.window.accept(engine.hello.epoch, step.seq)
        if verdict is StepAcceptance.NEW:
            engine.count(event)
            engine.count_load(step)
            engine.stuck_since_s = None
            for prefill in event.prefills:
                self.context_tokens += prefill.spans[-1].end
                self.cached_context_tokens += prefill.cached_tokens
            received.append(event)
        elif verdict is StepAcceptance.GAP:
            engine.stuck_since_s = engine.stuck_since_s or engine.last_message_s
        if (seq := engine.window.acknowledgement()) is not None:
            self._acks[name] = DueAck(name, engine.hello.epoch, seq)

    # ------------------------------------------------------------ handshake

    def _welcome(self, peer: bytes, hello: Hello, now_s: float, received: Received) -> None:
        if why := objection(peer, hello, self._requirements, self.engines, self._newest_version):
            _keep_newest(self.refused_engines, hello.engine[:ENGINE_NAME_BYTES_MAX], cut(why))
            self._reply_to(peer, HelloRejected(message=cut(why)), now_s)
            return
        if self._retired.get(hello.engine) == hello.epoch and hello.engine not in self.engines:
            self._send(peer, Shutdown())  # the one sent when it left was lost
            return
        held = _handles(hello)
        if hello.vocab_size < self._vocab_size_min:
            self._vocab_size_min, self._have_valid_tokens = hello.vocab_size, False
        known = self.engines.get(hello.engine)
        if known is not None and known.hello.epoch != hello.epoch:
            received += self.lose(hello.engine, "came back as a new process")
        before = known or self._given_up.get(hello.engine)
        if before is not None and before.hello.epoch == hello.epoch:
            window = before.window  # it has reconnected: its stream continues
        else:
            window = self._window(hello)
        self._given_up.pop(hello.engine, None)
        self._expected.pop(hello.engine, None)
        engine = Engine(hello, window, now_s, hello.weight_version)
        engine.is_draining = self._retired.get(hello.engine) == hello.epoch
        self.engines[hello.engine] = engine
        self.context_tokens_max = min(map(_context_tokens_max, self.engines.values()))
        self.departed.pop(hello.engine, None)
        welcome = Welcome(
            heartbeat_interval_s=self._settings.heartbeat_interval_s,
            orchestrator_timeout_s=self._settings.orchestrator_timeout_s,
            credit_steps=self._settings.credit_steps,
        )
        self._send(peer, welcome)
        joined = EngineJoined(
            hello.engine,
            hello.weight_version,
            hello.max_running_turns,
            epoch=hello.epoch,
            held=held,
            replay_until=hello.next_seq,
            media=tuple(hello.media),
            adapters=tuple((held.name, held.version) for held in hello.adapters),
        )
        received.append(joined)

    def _window(self, hello: Hello) -> ReceiveWindow:
        """Make the receive window of an engine process that is new to this process."""
        epoch, next_seq = self._streams.get(hello.engine, (hello.epoch, 0))
        if epoch != hello.epoch:
            next_seq = 0
        start = max(next_seq, hello.first_seq)  # acknowledged steps are not sent again
        return ReceiveWindow(self._settings.credit_steps, epoch=hello.epoch, next_seq=start)

    def statistics(self) -> tuple[EngineStatistics, ...]:
        """Return a snapshot of every engine."""
        return tuple(engine.statistics(name) for name, engine in sorted(self.engines.items()))

    def work(self) -> dict[str, EngineWork]:
        """Return the work of every engine so far, by name. Safe to call from any thread."""
        engines = list(self.engines.items())  # at once: engines come and go meanwhile
        return {name: EngineWork(engine.busy_us, engine.tokens) for name, engine in engines}


def _decoded(frame: bytes) -> FromEngine | BadFrame:
    """Decode a frame; errors are returned, so that the other frames are read anyway."""
    try:
        return decode_from_engine(frame)
    except BadFrame as error:
        return error


def _keep_newest(records: dict[str, T], name: str, reason: T) -> None:
    records.pop(name, None)
    records[name] = reason
    if len(records) > REMEMBERED_MAX:
        del records[next(iter(records))]


def _name(peer: bytes) -> str:
    try:
        return peer.decode()
    except UnicodeDecodeError:
        raise BadFrame(f"a peer's name is UTF-8, got {peer!r}") from None


def _context_tokens_max(engine: Engine) -> int:
    """Return the length of the longest context that an engine reads and has KV blocks for."""
    hello = engine.hello
    return min(hello.context_tokens_max, hello.num_kv_blocks * hello.block_tokens)


def _handles(hello: Hello) -> tuple[int, ...]:
    if len(hello.turns) % 4:
        raise BadFrame(f"a hello's turns are uint32, but they are {len(hello.turns)} bytes")
    return tuple(memoryview(hello.turns).cast("I"))
