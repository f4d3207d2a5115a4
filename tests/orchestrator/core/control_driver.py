"""Test driver of :class:`WeightControl`: carries its commands out at once, without a loop."""

import itertools
from collections.abc import Sequence
from typing import Any

from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core.control_events import Outgoing, Reserved
from tidegate.orchestrator.core.weight_content import Change, replace_all
from tidegate.orchestrator.core.weight_control import WeightControl
from tidegate.transport.message import SwapMode
from tidegate.transport.messages import (
    FinishWeightUpdate,
    InitWeights,
    PauseMode,
    StartWeightUpdate,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

INIT = InitWeights(channel="shm")
AWAKE = wc.EngineMemory(levels=(1, 2), asleep=(), needs_weights=False)


def chunk(version: int) -> UpdateWeights:
    return UpdateWeights(version=version, location="segment", tensors=[])


def staging(engine: str, version: int) -> Outgoing:
    return [(engine, StartWeightUpdate(version=version)), (engine, chunk(version))]


def finish(engine: str, version: int) -> Outgoing:
    word = FinishWeightUpdate(version=version, pause_mode="keep", kv_policy="recompute")
    return [(engine, word)]


class ControlDriver:
    """Shell of the state machine."""

    def __init__(self, *engines: str, is_safe: bool = True, **settings: Any) -> None:
        """``is_safe``: whether decisions are committed at once."""
        self.state = WeightControl(
            INIT,
            next_version=lambda _: self.next_version,
            **{"swap_mode": SwapMode("keep", "recompute")} | settings,
        )
        self.numbers = itertools.count()
        self.is_safe = is_safe
        self.sent: Outgoing = []
        self.ended: dict[int, wc.Resolve] = {}
        self.timers: dict[wc.Timer, float] = {}
        self.given_up: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.released: list[int] = []
        self.retracted: list[int] = []
        self.is_held = False
        for engine in engines:
            assert self.join(engine) == [(engine, INIT)]

    def do(self, event: wc.Event) -> Outgoing:
        """Handle one event and all that follows from it; return the messages sent."""
        before = len(self.sent)
        self._handle(event)
        return self.sent[before:]

    def _handle(self, event: wc.Event) -> None:
        for command in self.state.handle(event):
            match command:
                case wc.Send(outgoing=outgoing):
                    self.sent += outgoing
                case wc.Resolve(call=call):
                    self.ended[call] = command
                case wc.SetTimer(timer=timer, seconds=seconds):
                    self.timers[timer] = seconds
                case wc.StopTimer(timer=timer):
                    self.timers.pop(timer, None)
                case wc.ReleaseVersion(version=version):
                    self.released.append(version)
                    if self.is_safe:
                        self._handle(wc.VersionDurable(version))
                case wc.RetractVersions(first_bad=first_bad):
                    self.retracted.append(first_bad)
                    self._handle(wc.VersionsRetracted())
                case wc.HoldBatches(is_held=is_held):
                    self.is_held = is_held
                case wc.GiveUp(engine=engine, why=why):
                    self.given_up[engine] = why
                    self._handle(wc.EngineRemoved(engine))
                case wc.RefuseEngine(engine=engine, why=why):
                    self.refused[engine] = why
                    self._handle(wc.EngineRemoved(engine))

    @property
    def next_version(self) -> int:
        return max(self.released, default=0) + 1

    # ------------------------------------------------------------ engines

    def join(
        self, engine: str, version: int = 0, memory: wc.EngineMemory | None = AWAKE
    ) -> Outgoing:
        return self.do(wc.EngineConnected(engine, version, memory))

    def leave(self, engine: str) -> Outgoing:
        return self.do(wc.EngineRemoved(engine))

    def hear(self, engine: str, message: wc.ControlReply) -> Outgoing:
        return self.do(wc.ControlReplyReceived(engine, message))

    def staged(self, engine: str, version: int) -> Outgoing:
        return self.hear(engine, WeightsStaged(version=version))

    def live(self, engine: str, version: int) -> Outgoing:
        return self.hear(engine, WeightsLive(version=version))

    def fails(self, engine: str, version: int, why: str = "wrong shape") -> Outgoing:
        return self.hear(engine, WeightsFailed(version=version, message=why))

    def fire(self, timer: wc.Timer) -> Outgoing:
        del self.timers[timer]
        return self.do(wc.TimerFired(timer))

    # ------------------------------------------------------------ calls

    def ask(self, kind: Any, *arguments: Any, **named: Any) -> int:
        """Begin a call; return its number."""
        number = next(self.numbers)
        self.do(kind(number, *arguments, **named))
        return number

    def result(self, call: int) -> Any:
        """Return a call's result, or raise its error."""
        ended = self.ended[call]
        if ended.error is not None:
            raise ended.error
        return ended.value

    def reserve(self, **asked: bool) -> Reserved:
        """Reserve the buffer, which no engine reads."""
        reserved = self.result(self.ask(wc.ReserveRequested, **asked))
        assert isinstance(reserved, Reserved)
        return reserved

    def publish(
        self,
        version: int,
        chunks: list[UpdateWeights] | None = None,
        change: Change = replace_all,
        wait: wc.PublishWait = "live",
    ) -> Outgoing:
        """Publish a written version; return the messages sent."""
        before = len(self.sent)
        self.call = self.ask(
            wc.PublishRequested, version, chunks or [chunk(version)], wait=wait, change=change
        )
        return self.sent[before:]

    def bring(self, version: int, *engines: str) -> None:
        """Publish a version until all engines serve it."""
        assert self.reserve().version == version
        self.publish(version)
        for engine in engines:
            self.staged(engine, version)
        for engine in engines:
            self.live(engine, version)
        assert self.state.weights.is_settled

    def pause(self, mode: PauseMode | None, *, clear_cache: bool = False) -> int:
        return self.ask(wc.PauseRequested, mode, clear_cache)

    def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag], mode: PauseMode = "abort") -> int:
        return self.ask(wc.SleepRequested, level, tags, mode)

    def wake(self, *tags: MemoryTag) -> int:
        return self.ask(wc.WakeRequested, tags)
