"""Regression tests of reconnecting engines, found by simulation."""

from array import array

from tests.orchestrator.core.driver import Driver
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.fleet.fleet import Fleet
from tidegate.orchestrator.settings.config import FleetSettings
from tidegate.simulation.engine.spec import EngineCosts, SimulatedEngineSpec, hello_of
from tidegate.transport.messages import Message, Step, encode

SPEC = SimulatedEngineSpec(costs=EngineCosts(slots=1))


def test_a_swap_that_only_a_hello_reports_frees_the_slots_of_its_batch() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    driver.join("engine-0")
    driver.fill()
    driver.solve(driver.running[0])
    driver.do(ev.BatchRequested())
    driver.publish()
    assert driver.core.admissible_groups == 0

    driver.join("engine-0", version=1)  # its weights_live was lost with the connection

    assert driver.core.turns.live_version == 1
    assert driver.core.admissible_groups == 1


def test_an_engine_that_was_given_up_and_says_hello_again_continues_in_its_stream() -> None:
    sent: list[Message] = []

    def send(peer: bytes, message: Message) -> bool:
        sent.append(message)
        return True

    fleet = Fleet(
        FleetSettings(
            heartbeat_interval_s=1.0,
            engine_timeout_s=5.0,
            orchestrator_timeout_s=5.0,
            credit_steps=8,
        ),
        send,
    )
    hello = encode(hello_of("engine-0", 1, SPEC))
    fleet.receive([(b"engine-0", hello), (b"engine-0", a_step(0)), (b"engine-0", a_step(1))], 0.0)
    assert len(fleet.tick(6.0)) == 1  # silent for too long

    received = fleet.receive([(b"engine-0", hello), (b"engine-0", a_step(2))], 7.0)

    assert [type(item).__name__ for item in received] == ["EngineJoined", "StepArrived"]


def a_step(seq: int) -> bytes:
    token, logprob = array("i", [5]), array("f", [-1.0])
    return encode(
        Step(
            seq=seq,
            version=0,
            turns=array("I", [1]).tobytes(),
            token_ids=token.tobytes(),
            logprobs=logprob.tobytes(),
        )
    )
