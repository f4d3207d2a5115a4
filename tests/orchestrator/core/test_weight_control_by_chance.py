""":class:`WeightControl` against an independent model of engines, driven by hypothesis.

The engines are written from docs/protocol.md alone: they stage, refuse, swap, pause, sleep, hang,
reconnect and leave, and copy weights out of a buffer that the trainer overwrites. Messages to and
from each engine keep their order and take any time. Whatever is asked for meanwhile: an engine that
answers is never given up, no call waits for ever, and in the end all engines serve the newest
weights.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.orchestrator.core.control_driver import ControlDriver
from tidegate.errors import TidegateError
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core.control_events import Outgoing, Reserved
from tidegate.orchestrator.core.control_state import ControlledEngine, Steps, Turns, Wait
from tidegate.orchestrator.core.pause_control import PauseControl
from tidegate.orchestrator.core.sleep_control import SleepControl
from tidegate.orchestrator.core.target_versions import TargetVersions
from tidegate.orchestrator.core.weight_versions import WeightVersions
from tidegate.transport.messages import (
    Asleep,
    Awake,
    FinishWeightUpdate,
    InitWeights,
    Message,
    Pause,
    Resume,
    StartWeightUpdate,
    TurnsPaused,
    TurnsResumed,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, Sleep, Wake

pytestmark = pytest.mark.slow

ENGINES_MAX = 4
TORN = -1
"""Content of a copy made while its place in the buffer was written."""

engines = st.integers(0, ENGINES_MAX - 1)
modes = st.sampled_from(["abort", "keep", "wait"])
moves = st.lists(st.tuples(engines, st.integers(0, 9)), min_size=1, max_size=40)
tags = st.sampled_from([MEMORY_TAGS, MEMORY_TAGS[:1], MEMORY_TAGS[1:]])


@dataclass
class Copy:
    """Weights that an engine is copying, or has copied."""

    version: int
    place: int
    found: int
    """Content of its place in the buffer when the copy began."""


@dataclass
class Engine:
    """One engine that follows the protocol."""

    version: int = 0
    opened: int | None = None
    """Version that it was asked to stage, and has not reported yet."""
    copying: Copy | None = None
    staged: Copy | None = None
    swaps_to: Copy | None = None
    pause_mode: str | None = None
    asleep: set[MemoryTag] = field(default_factory=set)
    has_weights: bool = True
    inbox: deque[Message] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)
    is_hung: bool = False

    @property
    def memory(self) -> wc.EngineMemory:
        lacks = not self.has_weights and "weights" not in self.asleep
        return wc.EngineMemory((1, 2), tuple(self.asleep), lacks)

    def abandon(self) -> None:
        """Drop the version under way without an answer."""
        self.opened = self.copying = self.staged = self.swaps_to = None

    def take(self, message: Message, buffer: dict[int, int]) -> None:
        """Carry out a message."""
        match message:
            case InitWeights():
                pass
            case StartWeightUpdate(version=version):
                if self.opened not in (None, version):
                    why = f"given up, for v{version} was started"
                    self.outbox.append(WeightsFailed(version=self.opened or 0, message=why))
                self.abandon()
                self.opened = version
            case UpdateWeights(version=version, location=location):
                assert self.opened == version, "weights that were not started"
                self.copying = Copy(version, int(location), buffer[int(location)])
            case FinishWeightUpdate(version=version):
                assert self.staged is not None, "told to swap to what it hasn't staged"
                assert self.staged.version == version
                self.swaps_to = self.staged
            case Pause(mode=mode):
                self.pause_mode = mode
                self.outbox.append(TurnsPaused(mode=mode))
            case Resume():
                self.pause_mode = None
                self.outbox.append(TurnsResumed())
            case Sleep(request_id=request, level=level, tags=slept):
                assert self.pause_mode is not None, "told to sleep while turns run"
                assert self.copying is None, "told to sleep while it copies weights"
                assert self.swaps_to is None, "told to sleep while it swaps"
                if "weights" in slept:
                    self.abandon()
                    self.has_weights &= level == 1
                self.asleep |= set(slept)
                reported = [tag for tag in MEMORY_TAGS if tag in self.asleep]
                self.outbox.append(Asleep(request_id=request, tags=reported, freed_bytes=1))
            case Wake(request_id=request, tags=woken):
                self.asleep -= set(woken)
                if "weights" in woken and self.version == 0:
                    self.has_weights = True  # its model directory has them
                reported = [tag for tag in MEMORY_TAGS if tag in self.asleep]
                lacks = not self.has_weights and "weights" not in self.asleep
                self.outbox.append(Awake(request_id=request, tags=reported, needs_weights=lacks))
            case _:
                raise AssertionError(f"{message} is no engine's")

    def copied(self, buffer: dict[int, int], *, refuses: bool) -> None:
        """Complete the copy."""
        copy, self.copying, self.opened = self.copying, None, None
        assert copy is not None
        if refuses:
            self.outbox.append(WeightsFailed(version=copy.version, message="wrong shape"))
            return
        is_torn = TORN in (copy.found, buffer[copy.place]) or copy.found != buffer[copy.place]
        self.staged = Copy(copy.version, copy.place, TORN if is_torn else copy.found)
        self.outbox.append(WeightsStaged(version=copy.version))

    def swap(self) -> None:
        """Swap between two steps."""
        assert self.swaps_to is not None
        assert self.swaps_to.found == self.swaps_to.version, "torn weights, or others'"
        self.version, self.has_weights = self.swaps_to.version, True
        self.asleep.discard("weights")
        self.staged = self.swaps_to = None
        self.outbox.append(WeightsLive(version=self.version))


class Trainer(RuleBasedStateMachine):
    """Trainer that makes any call at any time, with engines that may fail."""

    @initialize(count=st.integers(1, ENGINES_MAX), wave=st.sampled_from([None, None, 1, 2]))
    def begin(self, count: int, wave: int | None) -> None:
        self.wave = wave
        self.run = ControlDriver(wave_engines=wave)
        self.engines: dict[str, Engine] = {}
        self.buffer: dict[int, int] = {}
        """Place in the buffer -> version written there."""
        self.ever_hung: set[str] = set()
        self.sent_finish: set[str] = set()
        self.sent_pause: dict[str, int] = {}
        """Engine -> pauses and resumes of the run that it has not answered."""
        self.joining = ""
        self.writing: Reserved | None = None
        self.reserving: int | None = None
        self.is_eager = False
        """Whether weights are written at once when they may be."""
        self.calls: dict[int, str] = {}
        self.names = 0
        for _ in range(count):
            self.join()

    # ------------------------------------------------------------ the run's shell

    def do(self, event: wc.Event) -> None:
        before, released = len(self.run.sent), len(self.run.released)
        self.run.do(event)
        self.after(before, released)

    def ask(self, kind: Any, *arguments: Any) -> int:
        before, released = len(self.run.sent), len(self.run.released)
        call = self.run.ask(kind, *arguments)
        self.calls[call] = kind.__name__
        self.after(before, released)
        return call

    def after(self, before: int, released: int) -> None:
        """Deliver the messages sent since, and check versions released since."""
        for version in self.run.released[released:]:
            for name, engine in self.engines.items():
                has_it = engine.staged is not None and engine.staged.version == version
                assert has_it or engine.version == version, f"{name} has not staged v{version}"
        self.carry(self.run.sent[before:])
        for call in [call for call in self.calls if call in self.run.ended]:
            del self.calls[call]
        for name in (*self.run.given_up, *self.run.refused):
            self.forget(name)
        if self.reserving is not None and self.reserving in self.run.ended:
            call, self.reserving = self.reserving, None
            try:
                self.writing = self.run.result(call)
            except TidegateError:
                return
            assert self.writing is not None
            kept = {p for p, version in self.buffer.items() if version in self.writing.keep}
            place = next(place for place in range(9) if place not in kept)
            for name, engine in self.engines.items():
                coming = [m.location for m in engine.inbox if isinstance(m, UpdateWeights)]
                read = [str(engine.copying.place)] if engine.copying is not None else []
                assert str(place) not in (*coming, *read), f"{name} copies what is overwritten"
            self.buffer[place] = TORN
            self.place = place
            if self.is_eager:
                self.publish("live")

    def carry(self, outgoing: Outgoing) -> None:
        for name, message in outgoing:
            if isinstance(message, FinishWeightUpdate):
                assert message.version in self.run.released, "an unreleased version is swapped in"
                assert not self.sent_pause, "a swap in the midst of a pause"
                self.sent_finish.add(name)
                assert self.wave is None or len(self.sent_finish) <= self.wave
            elif isinstance(message, Pause | Resume) and name != self.joining:
                assert not self.sent_finish, "a pause in the midst of a swap"
                self.sent_pause[name] = self.sent_pause.get(name, 0) + 1
            elif isinstance(message, StartWeightUpdate):
                self.sent_finish.discard(name)  # the newer version takes the older one's place
            if name in self.engines:
                self.engines[name].inbox.append(message)

    def forget(self, name: str) -> None:
        self.engines.pop(name, None)
        self.sent_finish.discard(name)
        self.sent_pause.pop(name, None)

    # ------------------------------------------------------------ engines

    @precondition(lambda self: len(self.engines) < ENGINES_MAX)
    @rule()
    def join(self) -> None:
        name = f"engine-{self.names}"
        self.names += 1
        self.engines[name] = Engine()
        self.joining = name
        self.do(wc.EngineConnected(name, 0, self.engines[name].memory))
        self.joining = ""

    @rule(number=engines, fault=st.sampled_from(["leave", "hang", "reconnect", "reconnect"]))
    def fail(self, number: int, fault: str) -> None:
        getattr(self, fault)(number)

    def leave(self, number: int) -> None:
        if name := self.chosen(number):
            self.forget(name)
            self.do(wc.EngineRemoved(name))

    def reconnect(self, number: int) -> None:
        """Reconnect an engine: messages under way and requests are lost; weights and sleep stay."""
        if name := self.chosen(number):
            engine = self.engines[name]
            engine.abandon()
            engine.pause_mode = None
            engine.inbox.clear()
            engine.outbox.clear()
            self.sent_finish.discard(name)
            self.sent_pause.pop(name, None)
            self.joining = name
            self.do(wc.EngineConnected(name, engine.version, engine.memory))
            self.joining = ""

    def hang(self, number: int) -> None:
        if name := self.chosen(number):
            self.engines[name].is_hung = True
            self.ever_hung.add(name)

    def chosen(self, number: int) -> str | None:
        names = [name for name, engine in self.engines.items() if not engine.is_hung]
        return names[number % len(names)] if names else None

    @rule(moves=moves)
    def move(self, moves: list[tuple[int, int]]) -> None:
        """Deliver some messages, complete some copies, swap some engines; maybe one refuses."""
        for number, what in moves:
            if name := self.chosen(number):
                self.step(name, what)

    def step(self, name: str, what: int) -> None:
        engine = self.engines[name]
        if what < 4 and engine.inbox:
            engine.take(engine.inbox.popleft(), self.buffer)
        elif what < 7 and engine.outbox:
            self.hear(name, engine.outbox.popleft())
        elif engine.copying is not None:
            engine.copied(self.buffer, refuses=what == 9)
        elif engine.swaps_to is not None:
            engine.swap()

    def hear(self, name: str, answer: Any) -> None:
        if isinstance(answer, WeightsLive):
            self.sent_finish.discard(name)
        elif isinstance(answer, TurnsPaused | TurnsResumed) and self.sent_pause.get(name):
            self.sent_pause[name] -= 1
            if not self.sent_pause[name]:
                del self.sent_pause[name]
        self.do(wc.ControlReplyReceived(name, answer))

    @rule()
    def arrive(self) -> None:
        """Deliver all messages, except from engines that hang."""
        while moving := [
            name
            for name, engine in self.engines.items()
            if not engine.is_hung
            and (engine.inbox or engine.outbox or engine.copying or engine.swaps_to)
        ]:
            for name in moving:
                for what in (0, 4, 8):
                    if name in self.engines:
                        self.step(name, what)

    # ------------------------------------------------------------ the trainer

    @precondition(lambda self: self.reserving is None and self.writing is None)
    @rule()
    def begin_to_write(self) -> None:
        self.is_eager = False
        self.reserve()

    def reserve(self, first_bad: int | None = None) -> None:
        call = self.reserving = next(self.run.numbers)
        self.calls[call] = "ReserveRequested"
        self.do(wc.ReserveRequested(call, first_bad=first_bad))

    @precondition(lambda self: self.writing is not None)
    @rule(wait=st.sampled_from(["live", "live", "staged", "none"]))
    def publish(self, wait: Any) -> None:
        assert self.writing is not None
        version, self.writing = self.writing.version, None
        for place in [p for p, there in self.buffer.items() if there == version]:
            self.buffer[place] = TORN  # a number that was given up, and is used again
        self.buffer[self.place] = version
        chunks = [UpdateWeights(version=version, location=str(self.place), tensors=[])]
        call = next(self.run.numbers)
        self.calls[call] = "PublishRequested"
        self.do(wc.PublishRequested(call, version, chunks, wait))

    @precondition(lambda self: self.writing is not None)
    @rule()
    def fail_to_write(self) -> None:
        self.writing = None
        self.do(wc.ReserveAbandoned())

    @precondition(lambda self: self.reserving is None and self.writing is None)
    @rule(
        moves=moves, is_cancelled=st.booleans(), is_rollback=st.sampled_from([False, False, True])
    )
    def bring(self, moves: list[tuple[int, int]], is_cancelled: bool, is_rollback: bool) -> None:
        """Publish at once when the buffer is free, and carry out some of what follows."""
        self.is_eager = True
        self.reserve(1 if is_rollback else None)
        self.move(moves)
        publishes = [call for call, kind in self.calls.items() if kind == "PublishRequested"]
        if is_cancelled and publishes:
            self.give_up(publishes[-1])

    @rule(mode=modes, woken=tags)
    def nap(self, mode: Any, woken: Any) -> None:
        """Put engines to sleep, as trainers do that share devices with engines."""
        self.ask(wc.SleepRequested, 2, MEMORY_TAGS, mode)
        self.arrive()
        self.ask(wc.WakeRequested, woken)
        self.arrive()

    @rule(
        what=st.sampled_from(["pause", "still", "sleep", "sleep", "wake", "wake"]), data=st.data()
    )
    def stop(self, what: str, data: st.DataObject) -> None:
        """Pause or resume engines."""
        match what:
            case "pause":
                self.ask(wc.PauseRequested, data.draw(st.one_of(st.none(), st.none(), modes)))
            case "still":
                self.ask(wc.EngineHaltRequested, data.draw(st.booleans()))
            case "sleep":
                level = data.draw(st.sampled_from([1, 2, 2]))
                self.ask(wc.SleepRequested, level, data.draw(tags), data.draw(modes))
            case "wake":
                self.ask(wc.WakeRequested, data.draw(tags))

    @precondition(lambda self: bool(self.calls))
    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        self.give_up(sorted(self.calls)[number % len(self.calls)])

    def give_up(self, call: int) -> None:
        del self.calls[call]
        if call == self.reserving:
            self.reserving = None
        self.sent_pause.clear()  # who is gone waits for no engine's answer
        self.do(wc.CallCancelled(call))

    # ------------------------------------------------------------ what holds

    @invariant()
    def no_engine_that_answers_is_given_up(self) -> None:
        assert set(self.run.given_up) <= self.ever_hung, self.run.given_up

    def settle(self) -> None:
        """Deliver everything, and let engines that hang time out."""
        self.arrive()
        for name in [name for name, engine in self.engines.items() if engine.is_hung]:
            self.forget(name)
            self.do(wc.EngineRemoved(name))
            self.arrive()

    @property
    def newest(self) -> int:
        return max(self.run.released, default=0)

    def teardown(self) -> None:
        """End everything that the trainer has begun; then no call may wait any more."""
        if not hasattr(self, "run"):
            return
        self.settle()
        if self.reserving is not None:
            self.give_up(self.reserving)
        if self.writing is not None:
            self.fail_to_write()
        self.settle()
        assert self.calls == {}, (
            f"{self.calls} wait for ever: {self.run.state.weights.lagging_engines}"
        )
        if self.run.state.pauses.mode is None:
            for name, engine in self.engines.items():
                assert engine.version == self.newest, f"{name} is left with v{engine.version}"
        if not self.engines:
            self.join()
        self.run.state.shared.take_failure()
        self.is_eager = True
        self.reserve()
        self.settle()
        self.ask(wc.WakeRequested, MEMORY_TAGS)
        self.ask(wc.EngineHaltRequested, False)
        self.ask(wc.PauseRequested, None)
        self.settle()
        assert self.calls == {}
        newest = self.newest
        for name, engine in self.engines.items():
            assert engine.version == newest, f"{name} serves v{engine.version}, not v{newest}"
            assert engine.has_weights
            assert (engine.asleep, engine.pause_mode) == (set(), None), name
        assert self.run.timers == {}
        self.no_engine_that_answers_is_given_up()


TestTrainer = Trainer.TestCase
TestTrainer.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


# ---------------------------------------------------------------- would it notice?


def no_wave_is_full(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightVersions, "_swaps_available", ENGINES_MAX)


def the_buffer_is_overwritten_while_engines_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightVersions, "is_writable", True)


def weights_that_late_joiners_need_are_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightVersions, "kept_buffers", frozenset())


def a_late_joiner_gets_no_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TargetVersions, "catch_up", lambda self, engine=None: None)


def engines_swap_in_the_midst_of_a_pause(patch: pytest.MonkeyPatch) -> None:
    def apply(self: PauseControl, *, clear_cache: bool = False) -> Steps[None]:
        with self._turns.queued() as turn:
            yield turn
            yield from self._change(self.users_mode, clear_cache)

    patch.setattr(PauseControl, "apply", apply)


def engines_sleep_while_weights_are_on_their_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SleepControl, "_may_sleep", lambda self, name: True)


def a_pause_that_ends_lets_no_other_pause_begin(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def queued(self: Turns) -> Iterator[Wait]:
        call = object()
        self._calls.append(call)
        yield Wait(lambda: self._calls[0] is call)

    patch.setattr(Turns, "queued", queued)


def a_resume_that_is_not_answered_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    none_due = property(lambda self: 0, lambda self, value: None)
    patch.setattr(ControlledEngine, "resumes_due", none_due)


@pytest.mark.parametrize(
    "plant",
    [
        no_wave_is_full,
        the_buffer_is_overwritten_while_engines_copy,
        weights_that_late_joiners_need_are_overwritten,
        a_late_joiner_gets_no_weights,
        engines_swap_in_the_midst_of_a_pause,
        engines_sleep_while_weights_are_on_their_way,
        a_pause_that_ends_lets_no_other_pause_begin,
        a_resume_that_is_not_answered_is_forgotten,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_detected(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    chance = settings(
        TestTrainer.settings,
        max_examples=1000,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Trainer, settings=chance)
