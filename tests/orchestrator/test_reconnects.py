"""What the simulation found about engines that come back, each on its own."""

from array import array

from tests.orchestrator.driver import Driver
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.fleet.fleet import Fleet, FleetTimes
from tidegate.orchestrator.simulation.traits import EngineTraits, hello_of
from tidegate.orchestrator.weights.weights import WeightCoordinator
from tidegate.transport.messages import InitWeights, Message, Step, UpdateWeights, encode

COSTS = EngineTraits(
    step_s=0.01,
    running_turn_s=0.0,
    prefill_tokens_per_s=1e6,
    staging_s=0.0,
    max_running_turns=1,
    chunk_tokens=1,
)


def test_a_swap_that_only_a_hello_tells_of_frees_the_places_of_its_batch() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    driver.join("engine-0")
    driver.fill()
    driver.solve(driver.running[0])
    driver.do(ev.BatchAsked())
    driver.publish()
    assert driver.core.capacity_groups == 0

    driver.join("engine-0", version=1)  # its weights_live was lost with the connection

    assert driver.core.turns.live_version == 1
    assert driver.core.capacity_groups == 1


def test_an_engine_that_was_given_up_and_says_hello_again_goes_on_in_its_stream() -> None:
    sent: list[Message] = []

    def send(peer: bytes, message: Message) -> bool:
        sent.append(message)
        return True

    fleet = Fleet(FleetTimes(1.0, 5.0, 5.0, 8), send)
    hello = encode(hello_of("engine-0", 1, COSTS))
    fleet.hear([(b"engine-0", hello), (b"engine-0", a_step(0)), (b"engine-0", a_step(1))], 0.0)
    assert len(fleet.tick(6.0)) == 1  # silent for too long

    heard = fleet.hear([(b"engine-0", hello), (b"engine-0", a_step(2))], 7.0)

    assert [type(item).__name__ for item in heard] == ["EngineJoined", "StepArrived"]


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


def test_a_second_swap_asked_of_an_engine_that_has_just_swapped_is_no_refusal() -> None:
    weights = WeightCoordinator(InitWeights(channel="shm"), pause_mode="wait", kv_policy="keep")
    weights.joined("engine-0", 0)
    weights.publish(1, [UpdateWeights(version=1, location="", tensors=[])])
    weights.joined("engine-0", 0)  # it reconnects, and is asked anew
    weights.staged("engine-0", 1)  # from before the reconnect
    weights.release()
    weights.live("engine-0", 1)

    assert not weights.refused("engine-0", 1, "v1 is not staged here")

    assert weights.update is not None
    assert weights.update.refusals == {}
    assert weights.is_settled
