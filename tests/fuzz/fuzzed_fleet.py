"""Fuzz target: the orchestrator's fleet and core, without sockets or threads, fed frame by frame.

Deterministic for a seed. One healthy engine has its turns answered; a hostile engine and strangers
send what :mod:`tests.fuzz.frames` generates.
"""

import random
from collections import deque

from tests.fuzz.frames import ENGINE_EXAMPLES, FrameMaker, LiveState, hello_of, step_of
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.fleet.fleet import REMEMBERED_MAX, EngineReply, Fleet
from tidegate.orchestrator.settings.config import FleetSettings
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.transport.messages import (
    CancelTurn,
    Message,
    SamplingParams,
    SubmitTurn,
    WeightsLive,
    encode,
)
from tidegate.transport.zeromq import encode_frame

S_PER_FRAME = 0.002
"""Advance of the receiver's clock per frame: 500 frames are a second, so rate limits run out and
recover."""

FRAMES_PER_HEALTHY_STEP = 25

FRAMES_PER_CHECK = 250

FRAMES_PER_PROGRESS = 10_000
"""Interval of progress checks, 20 s of the receiver's clock: longer than an engine may hold turns
silently."""

TURNS_SHOWN = 16
"""Number of its turns that the hostile engine uses; larger steps would find nothing more."""

STRANGERS = (b"", b"\xff\xfe", b"\0\0\0\0\1", b"\xef\xbf\xbd", b"x" * 255)


class FuzzedFleet:
    def __init__(self, seed: int) -> None:
        settings = FleetSettings(
            heartbeat_interval_s=1.0,
            engine_timeout_s=5.0,
            orchestrator_timeout_s=60.0,
            credit_steps=64,
        )
        self.core = Core(
            Rules(policy=BoundedStaleness(max_staleness=1, groups_per_batch=2), group_size=4)
        )
        self.fleet = Fleet(settings, self._send, newest_version=self.core.newest_version)
        self.frames = 0
        self.healthy_steps = self.healthy_tokens = self.batches = 0
        self._chance = random.Random(seed)
        self._maker = FrameMaker(seed, ENGINE_EXAMPLES)
        self._healthy = LiveState(engine="healthy")
        self._bad = LiveState()
        self._events: deque[ev.Event] = deque()
        self._now_s = 0.0
        self._tokens_before = 0
        self._join(self._healthy)
        assert "healthy" in self.fleet.engines
        self._do(ev.TasksOffered())
        self._do(ev.BatchRequested())

    def feed(self) -> bytes:
        """Process one fuzzed frame, and now and then a valid one; return the frame."""
        self.frames += 1
        self._now_s += S_PER_FRAME
        if "bad" not in self.fleet.engines and self.frames % 50 == 0:
            self._bad.epoch += 1
            self._join(self._bad)
        peer, frame = self._peer(), self._maker.frame(self._bad)
        if peer.startswith(b"stranger") and self._chance.random() < 0.5:
            vocab_size = self._bad.vocab_size + (self._chance.random() < 0.9)
            stranger = LiveState(engine=peer.decode(), vocab_size=vocab_size)
            frame = encode(hello_of(stranger))
        self.receive(peer, frame)
        if self.frames % FRAMES_PER_HEALTHY_STEP == 0:
            self._answer_turns()
        if self.frames % FRAMES_PER_CHECK == 0:
            self._check()
        return frame

    def _peer(self) -> bytes:
        chance = self._chance.random()
        if chance < 0.85:
            return b"bad"
        if chance < 0.97:
            return self._chance.choice(STRANGERS)
        return b"stranger-%d" % self._chance.randrange(10**6)

    # ------------------------------------------------------------ stand-in for the scheduler

    def receive(self, peer: bytes, frame: bytes) -> int:
        """Process one frame and its commands; return the number of steps accepted."""
        steps = 0
        for item in self.fleet.receive([(peer, frame)], self._now_s):
            if isinstance(item, EngineReply):
                if isinstance(item.message, WeightsLive):
                    self._do(ev.EngineSwapped(item.engine, item.message.version))
                continue
            self._do(item)
            if isinstance(item, ev.StepArrived):
                steps += 1
                state = self._healthy if item.engine == "healthy" else self._bad
                state.seq = item.seq + 1
        return steps

    def _do(self, event: ev.Event) -> None:
        self._events.append(event)
        while self._events:
            for command in self.core.handle(self._events.popleft()):
                self._act(command)
            if not self._events and self.core.admissible_groups:
                self._events.append(ev.TaskArrived(0))

    def _act(self, command: ev.Command) -> None:
        match command:
            case ev.Submit(engine=engine, message=message):
                self.fleet.send(engine, message)
            case ev.Cancel(engine=engine, handle=handle):
                self.fleet.send(engine, CancelTurn(turn=handle))
            case ev.StartEpisode(rollout=rollout):
                rollout.extend([1, 2, 3])
                sampling = SamplingParams(max_tokens=64)
                self._events.append(ev.TurnRequested(rollout.rollout_id, sampling))
            case ev.EndTurns(turns=turns):
                self._events += [ev.EpisodeReturned(turn.rollout_id, 1.0) for turn in turns]
            case ev.FailTurn(turn=turn):
                self._events.append(ev.EpisodeFailed(turn.rollout_id, "refused"))
            case ev.HandOver(groups=groups, number=number, request=request):
                for rollout in (rollout for group in groups for rollout in group.kept):
                    self._check_rollout(rollout)
                self._publish(number, request)

    def _publish(self, batch: int, request: int) -> None:
        """Make every engine serve the next version at once, and request another batch."""
        self.batches += 1
        version = self.core.trainer_version + 1
        self._healthy.version = self._bad.version = version
        self._events += [ev.BatchTaken(request), ev.BatchesTrained((batch,))]
        self._events.append(ev.VersionPublished(version))
        for name, engine in self.fleet.engines.items():
            engine.weight_version = version
            self._events.append(ev.EngineSwapped(name, version))
        self._events.append(ev.BatchRequested())

    def _send(self, peer: bytes, message: Message) -> bool:
        encode_frame(message)  # as the socket does: an oversized message would be our own bug
        state = {b"healthy": self._healthy, b"bad": self._bad}.get(peer)
        if state is not None and isinstance(message, SubmitTurn):
            state.turns = [*state.turns, message.turn][-TURNS_SHOWN:]
        elif state is not None and isinstance(message, CancelTurn) and message.turn in state.turns:
            state.turns.remove(message.turn)
        return True

    # ------------------------------------------------------------ valid engines

    def _join(self, state: LiveState) -> None:
        state.seq, state.turns = 0, []
        self.receive(state.engine.encode(), encode(hello_of(state, self.core.trainer_version)))

    def _answer_turns(self) -> None:
        step = step_of(self._healthy, finish=b"\1" * len(self._healthy.turns))
        self.healthy_steps += 1
        self.healthy_tokens += len(self._healthy.turns)
        self._healthy.turns = []
        if self.receive(b"healthy", encode(step)) != 1:
            raise AssertionError(f"the healthy engine's step {step.seq} was not taken in")
        self._do_all(self.fleet.tick(self._now_s))
        self.fleet.take_acks()

    def _do_all(self, events: list[ev.Event]) -> None:
        for event in events:
            self._do(event)

    def _check_rollout(self, rollout: Rollout) -> None:
        """Check that a rollout holds only tokens that an engine can have sampled."""
        tokens, logprobs = rollout.token_ids, rollout.logprobs
        if not 0 <= min(tokens) <= max(tokens) < self._bad.vocab_size:
            raise AssertionError(f"a batch with tokens {tokens}")
        if not all(-1e9 <= logprob <= 0.01 for logprob in logprobs):
            raise AssertionError(f"a batch with log-probs {logprobs}")
        for turn in rollout.turns:
            if turn.length > turn.sampling.max_tokens:
                raise AssertionError(f"{turn.length} tokens of {turn.sampling.max_tokens} allowed")
            if any(span.version > self.core.trainer_version for span in turn.spans()):
                raise AssertionError(f"a batch by weights to come: {turn.spans()}")

    def _check(self) -> None:
        self.core.check()
        if self.frames % FRAMES_PER_PROGRESS == 0:
            if self.healthy_tokens == self._tokens_before:
                raise AssertionError("the healthy engine is given no turns any more")
            self._tokens_before = self.healthy_tokens
        fleet = self.fleet
        names = [len(fleet.departed), len(fleet.refused_engines), len(fleet._given_up)]
        if max(names) > REMEMBERED_MAX:
            raise AssertionError(f"the fleet remembers {names} names")
