"""CPU cost of routing a turn, with ten engines and with a thousand.

``python -m benchmarks.routing [--json]`` prints ``name, value, unit, peer, ratio``. One turn is
sent to the engine that the policy chooses, and the oldest running one is cancelled; 50 run per
engine. The value is the CPU time of both, the peer the same with ten engines; values are medians.
The garbage collector is off, because it scans all turns whatever the policy. A command that no
module imports. Built on the core's placement and ``policies/routing.py``.
"""

import argparse
import gc
import statistics
from collections import deque
from time import process_time

from benchmarks.table import Row, compared, show
from tidegate.orchestrator.core.events import EngineJoined
from tidegate.orchestrator.core.placement import PlacementRules
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.core.turns import TurnTracker
from tidegate.policies.routing import (
    LeastLoaded,
    PowerOfTwoChoices,
    PrefixAffinity,
    RoutingPolicy,
    SessionAffinity,
)
from tidegate.transport.messages import SamplingParams

POLICIES: dict[str, RoutingPolicy] = {
    "least_loaded": LeastLoaded(),
    "session_affinity": SessionAffinity(),
    "prefix_affinity": PrefixAffinity(),
    "power_of_two_choices": PowerOfTwoChoices(),
}
TURNS_PER_ENGINE = 50
TURNS = 20_000
RUNS = 5


class Crowd:
    """A turn table with many running turns, to which one is added as one is removed."""

    def __init__(self, policy: RoutingPolicy, engines: int) -> None:
        self._tracker = TurnTracker(PlacementRules(routing_policy=policy))
        for number in range(engines):
            self._tracker.join(EngineJoined(f"engine-{number:04}", 0, 64))
        self._running: deque[Rollout] = deque()
        self._sent = 0
        for _ in range(engines * TURNS_PER_ENGINE):
            self._send()

    def _send(self) -> None:
        rollout = Rollout(self._sent, self._sent // 8, self._sent % 8)
        self._sent += 1
        turn = Turn(rollout, SamplingParams(max_tokens=8))
        rollout.turns.append(turn)
        self._running.append(rollout)
        self._tracker.submit(turn, rollout.group_id)

    def us_per_turn(self) -> float:
        """Return the CPU time to send one turn and cancel one."""
        began_s = process_time()
        for _ in range(TURNS):
            self._send()
            self._tracker.cancel(self._running.popleft())
        return (process_time() - began_s) / TURNS * 1e6


def measure(name: str, policy: RoutingPolicy) -> Row:
    """Measure both sizes alternately, so that a busy machine slows them alike."""
    few, many = Crowd(policy, 10), Crowd(policy, 1000)
    samples = [(few.us_per_turn(), many.us_per_turn()) for _ in range(RUNS)]
    peer, value = (statistics.median(column) for column in zip(*samples, strict=True))
    return compared(f"{name}_1000_engines", "us/turn", value, peer)


def main() -> None:
    """Measure all, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object a line")
    as_json = parser.parse_args().json
    gc.disable()
    for name, policy in POLICIES.items():
        show([measure(name, policy)], as_json=as_json)


if __name__ == "__main__":
    main()
