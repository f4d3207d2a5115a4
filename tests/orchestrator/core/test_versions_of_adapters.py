"""Publishes of adapters reach all engines, in any order of replies, departures and reconnections.

The model is a set of engines that follow the protocol and answer late. Model-based, by hypothesis.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core.weight_control import WeightControl
from tidegate.transport.message import SwapMode
from tidegate.transport.messages import (
    AdapterFailed,
    AdapterLive,
    AdapterLoaded,
    AdapterNeeded,
    HeldAdapter,
    InitWeights,
    LoadAdapter,
    SwapAdapter,
    UnloadAdapter,
    UpdateWeights,
)

CHUNK = UpdateWeights(version=0, location="x", tensors=[])


class Driver:
    """Feeds the state machine, and keeps its engines' inboxes."""

    def __init__(self) -> None:
        self.released: dict[str, int] = {}
        control = WeightControl(
            InitWeights(channel="shm"),
            swap_mode=SwapMode("keep", "recompute"),
            next_version=lambda name: self.released.get(name, 0) + 1,
            released_adapters=self.released,
        )
        self.handle, self.adapters = control.handle, control.adapters
        self.inboxes: dict[str, list[Any]] = {}
        self.live: dict[str, dict[str, int]] = {}
        self.outcomes: dict[int, Any] = {}
        self.durable_due: list[tuple[str, int]] = []
        self.durable: set[tuple[str, int]] = set()
        self.reading: dict[tuple[str, str, int], int] = {}
        self.calls = 0
        self.reserving: dict[int, str] = {}

    def feed(self, event: wc.Event) -> None:
        for command in self.handle(event):
            match command:
                case wc.Send(outgoing=outgoing):
                    for engine, message in outgoing:
                        self.take(engine, message)
                case wc.Resolve(call=call, value=wc.Reserved(version=version)):
                    self.write(call, self.reserving.pop(call), version)
                case wc.Resolve(call=call, error=error):
                    assert call not in self.outcomes
                    self.outcomes[call] = error
                case wc.ReleaseVersion(adapter=name, version=version):
                    assert version > self.released.get(name, 0)
                    self.released[name] = version
                    self.durable_due.append((name, version))
                case wc.GiveUp(engine=engine):
                    self.leave(engine)

    def take(self, engine: str, message: Any) -> None:
        """Put a message about adapters into an engine's inbox."""
        if isinstance(message, InitWeights):
            return
        if isinstance(message, SwapAdapter):
            assert (message.name, message.version) in self.durable
        if isinstance(message, LoadAdapter):
            assert (message.name, message.version) in self.durable or not message.is_live
            self.reading[engine, message.name, message.version] = message.chunks[0].version
        self.inboxes[engine].append(message)

    def join(self, engine: str, adapters_max: int = 4) -> None:
        self.inboxes[engine] = []
        self.reading = {key: b for key, b in self.reading.items() if key[0] != engine}
        held = [HeldAdapter(*pair) for pair in self.live.setdefault(engine, {}).items()]
        self.feed(wc.EngineConnected(engine, 0, None, wc.AdapterMemory(adapters_max, held)))

    def leave(self, engine: str) -> None:
        self.inboxes.pop(engine, None)
        self.live.pop(engine, None)
        self.reading = {key: b for key, b in self.reading.items() if key[0] != engine}
        self.feed(wc.EngineRemoved(engine))

    def publish(self, name: str) -> int:
        self.calls += 1
        self.reserving[self.calls] = name
        self.feed(wc.ReserveRequested(self.calls, adapter=name))
        return self.calls

    def write(self, call: int, name: str, version: int) -> None:
        """Publish a version that may be written now; its buffer has the number of its call."""
        chunks = [UpdateWeights(version=call, location="x", tensors=[])]
        self.feed(wc.PublishRequested(call, version, chunks, adapter=name))

    def answer(self, engine: str, *, refuses: bool = False) -> None:
        """Have an engine handle the oldest message in its inbox."""
        message = self.inboxes[engine].pop(0)
        live = self.live[engine]
        reply: wc.AdapterReply | None = None
        match message:
            case LoadAdapter(name=name, version=version, is_live=is_live):
                if refuses and not is_live:
                    reply = AdapterFailed(name=name, version=version, message="no such projection")
                else:
                    reply = AdapterLoaded(name=name, version=version)
                    if is_live:
                        live[name] = max(version, live.get(name, 0))
                self.reading.pop((engine, name, version), None)
            case SwapAdapter(name=name, version=version):
                live[name] = version
                reply = AdapterLive(name=name, version=version)
            case UnloadAdapter(name=name, version=version):
                if version in (None, live.get(name)):
                    live.pop(name, None)
        if reply is not None:
            self.feed(wc.ControlReplyReceived(engine, reply))

    def commit(self) -> None:
        name, version = self.durable_due.pop(0)
        self.durable.add((name, version))
        self.feed(wc.VersionDurable(version, name))

    def live_version(self, name: str) -> int:
        adapter = self.adapters.get(name)
        return 0 if adapter is None else adapter.newest_version

    def settle(self) -> None:
        for _ in range(1000):
            busy = [engine for engine, inbox in self.inboxes.items() if inbox]
            if self.durable_due:
                self.commit()
            elif busy:
                self.answer(busy[0])
            else:
                return
        raise AssertionError("messages without end")


def test_a_version_is_swapped_in_once_all_engines_have_it_and_its_number_is_durable() -> None:
    driver = Driver()
    driver.join("e0")
    driver.join("e1")
    call = driver.publish("a")
    driver.answer("e0")
    assert not driver.released
    driver.answer("e1")
    assert driver.released == {"a": 1}
    assert driver.inboxes == {"e0": [], "e1": []}
    driver.commit()
    driver.answer("e0")
    assert call not in driver.outcomes
    driver.answer("e1")
    assert driver.outcomes == {call: None}


def test_a_resumed_run_waits_for_its_trainer_before_it_answers_for_an_adapter() -> None:
    driver = Driver()
    driver.released["a"] = 3
    driver.durable.add(("a", 3))
    driver.live["e0"] = {"a": 3}
    driver.join("e0")
    driver.feed(wc.ControlReplyReceived("e0", AdapterNeeded(name="a")))
    driver.feed(wc.ControlReplyReceived("e0", AdapterNeeded(name="b")))
    assert driver.inboxes["e0"] == [UnloadAdapter(name="b")]
    driver.publish("a")
    driver.settle()
    assert driver.live["e0"] == {"a": 4}


@pytest.mark.parametrize("is_released", [False, True])
def test_an_engine_that_reconnects_with_the_version_that_a_resumed_run_publishes_gets_it(
    is_released: bool,
) -> None:
    driver = Driver()
    driver.released["a"] = 2
    driver.live["e0"] = {"a": 3}  # which a resumed trainer publishes again under its number
    driver.join("e0")
    call = driver.publish("a")
    if is_released:
        driver.answer("e0")
    driver.join("e0")  # it has forgotten what it staged, and has dropped its live tensors for room
    driver.feed(wc.ControlReplyReceived("e0", AdapterNeeded(name="a", version=3)))
    assert [(type(each), each.version) for each in driver.inboxes["e0"]] == [(LoadAdapter, 3)]
    driver.settle()
    assert driver.live["e0"] == {"a": 3}
    assert driver.outcomes == {call: None}


class AdapterPublishes(RuleBasedStateMachine):
    """Three engines that come, go, refuse and answer late; three adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.open: dict[str, int] = {}
        """Adapter -> its publish that a caller waits for; one at a time, as the shell ensures."""

    @rule(engine=st.sampled_from(("e0", "e1", "e2")))
    def join_or_reconnect(self, engine: str) -> None:
        self.driver.join(engine)

    @rule(engine=st.sampled_from(("e0", "e1", "e2")))
    def leave(self, engine: str) -> None:
        self.driver.leave(engine)

    @rule(name=st.sampled_from("abc"))
    def publish(self, name: str) -> None:
        if self.open.get(name) is None or self.open[name] in self.driver.outcomes:
            self.open[name] = self.driver.publish(name)

    @rule(name=st.sampled_from("abc"))
    def unload(self, name: str) -> None:
        if self.open.get(name) is None or self.open[name] in self.driver.outcomes:
            self.driver.feed(wc.UnloadRequested(name))

    @rule(name=st.sampled_from("abc"), is_pinned=st.booleans())
    def pin(self, name: str, is_pinned: bool) -> None:
        self.driver.feed(wc.PinChanged(name, self.driver.live_version(name), is_pinned))

    @rule(name=st.sampled_from("abc"))
    def time_out_or_cancel(self, name: str) -> None:
        if (call := self.open.get(name)) is not None and call % 2:
            self.driver.feed(wc.TimerFired(name))
        elif call is not None:
            self.driver.feed(wc.CallCancelled(call))
            del self.open[name]  # a released one runs to its end, and the next waits for it

    @precondition(lambda self: self.driver.durable_due)
    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @precondition(lambda self: self.driver.inboxes)
    @rule(data=st.data(), name=st.sampled_from("abc"))
    def need(self, data: Any, name: str) -> None:
        engine = data.draw(st.sampled_from(sorted(self.driver.inboxes)))
        self.driver.feed(wc.ControlReplyReceived(engine, AdapterNeeded(name=name)))

    @rule(data=st.data(), refuses=st.booleans())
    def answer(self, data: Any, refuses: bool) -> None:
        busy = [engine for engine, inbox in self.driver.inboxes.items() if inbox]
        if busy:
            self.driver.answer(data.draw(st.sampled_from(busy)), refuses=refuses)

    @invariant()
    def no_buffer_is_freed_while_it_is_read(self) -> None:
        assert set(self.driver.reading.values()) <= self.driver.adapters.buffers

    def teardown(self) -> None:
        """Once all have replied, publishes have outcomes and no engine serves an old version."""
        self.driver.settle()
        assert all(call in self.driver.outcomes for call in self.open.values())
        for engine in self.driver.inboxes:
            for name, version in self.driver.live[engine].items():
                assert version == self.driver.live_version(name)


TestAdapterPublishes = AdapterPublishes.TestCase
TestAdapterPublishes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
