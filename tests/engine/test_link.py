"""When an engine gives up on its orchestrator."""

import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.orchestrator.fleet.test_fleet import hello
from tidegate.engine.link import OrchestratorLink
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import (
    FromOrchestrator,
    Message,
    OrchestratorHeartbeat,
    Welcome,
    encode,
)

pytestmark = pytest.mark.wire

WELCOME = Welcome(heartbeat_interval_s=1.0, orchestrator_timeout_s=60.0, credit_steps=8)


class Wire:
    """One connection, in memory."""

    def __init__(self) -> None:
        self.incoming: list[FromOrchestrator] = []

    def connection(self) -> int:
        return 1

    def receive(self, timeout_s: float) -> Sequence[FromOrchestrator]:
        incoming, self.incoming = self.incoming, []
        return incoming

    def send(self, message: Message) -> bytes:
        return encode(message)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The fake time, replacing ``time.monotonic``."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def welcomed(wire: Wire) -> OrchestratorLink:
    link = OrchestratorLink(cast(DealerSocket, cast(Any, wire)), hello("a"))
    link.receive(0.0)
    link.send_hello(weight_version=0, turns=[])
    wire.incoming.append(WELCOME)
    link.receive(0.0)
    return link


def test_an_engine_exits_if_the_orchestrator_is_silent_for_too_long(
    clock: list[float],
) -> None:
    link = welcomed(Wire())
    clock[0] += 59.0
    link.receive(0.0)
    assert link.timeout_reason() is None
    clock[0] += 2.0
    link.receive(0.0)
    assert link.timeout_reason() == "heard nothing for 61.0 s"


def test_time_without_polling_does_not_count_as_silence(clock: list[float]) -> None:
    wire = Wire()
    link = welcomed(wire)
    clock[0] += 300.0  # waking weights takes as long as a disk does
    assert link.timeout_reason() is None
    wire.incoming.append(OrchestratorHeartbeat())
    link.receive(0.0)
    assert link.timeout_reason() is None
