"""Engine's end of a weight transfer: receives each version, copies it, and prints its CPU time.

``python -m benchmarks.transport.weight_end HOME [HOST [KEY…]]`` receives what the messages on its
standard input say, and after each prints the CPU seconds that it spent since the one before.
:class:`End` starts it.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.processes import LineProcess
from tidegate.transport.messages import InitWeights, UpdateWeights, decode_from_orchestrator
from tidegate.transport.security import EngineKeys
from tidegate.transport.weight_channels import WeightReceiverConfig, receiver

HOME = "tcp://127.0.0.1:5555"
"""Placeholder for the orchestrator's address; weights use a port beside it."""


class End(LineProcess):
    """A process that takes part in transfers; ``prefix`` is the command that it runs below."""

    def __init__(self, *arguments: str, prefix: Sequence[str] = ()) -> None:
        super().__init__(
            [*prefix, sys.executable, "-m", "benchmarks.transport.weight_end", *arguments]
        )

    def receive_seconds(self) -> float:
        """Wait for the end of its part; return the CPU seconds that it took."""
        return float(self.receive())


def copy(home: str, host: str = "", *keys: str) -> None:
    """Receive weights and copy them, because engines of one host share what one of them fetches."""
    engine_keys = EngineKeys(*(key.encode() for key in keys)) if keys else None
    config = WeightReceiverConfig(home, engine_keys, host)
    own = np.empty(0, np.uint8)
    spent_s, end = time.process_time(), None
    for line in sys.stdin:
        match decode_from_orchestrator(bytes.fromhex(line)):
            case InitWeights() as init:
                end = receiver(init, config)
            case UpdateWeights() as update:
                assert end is not None
                for _, view in end.tensors(update):
                    tensor = np.frombuffer(view, np.uint8)
                    if len(own) < len(tensor):
                        own = np.ones(len(tensor), np.uint8)
                    np.copyto(own[: len(tensor)], tensor)
        print(time.process_time() - spent_s, flush=True)
        spent_s = time.process_time()
    if end is not None:
        end.close()


if __name__ == "__main__":
    copy(*sys.argv[1:])
