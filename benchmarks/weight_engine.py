"""Receiver process of the weight benchmark; copies each tensor out, as an engine does.

:mod:`benchmarks.weights` starts it. It reads encoded messages in hex, one per line, and prints
``ready`` and, for each version, ``done``. Built on the weight channels' receivers.
"""

import sys

import numpy as np

from tidegate.transport.messages import InitWeights, decode_from_orchestrator
from tidegate.transport.security import EngineKeys
from tidegate.transport.weight_channels import WeightReceiver, WeightReceiverConfig, receiver


def main() -> None:
    """Run with the orchestrator's address, the host's name, and optional keys as arguments."""
    address, host, *keys = sys.argv[1:]
    engine_keys = EngineKeys(*(key.encode() for key in keys)) if keys else None
    end: WeightReceiver | None = None
    own = np.empty(0, np.uint8)
    for line in sys.stdin:
        message = decode_from_orchestrator(bytes.fromhex(line))
        if isinstance(message, InitWeights):
            end = receiver(message, WeightReceiverConfig(address, engine_keys, host))
            print("ready", flush=True)
            continue
        assert end is not None
        for _, view in end.tensors(message):  # type: ignore[arg-type]
            if len(own) < view.nbytes:
                own = np.ones(view.nbytes, np.uint8)
            np.copyto(own[: view.nbytes], np.frombuffer(view, np.uint8))
        print("done", flush=True)
    if end is not None:
        end.close()


if __name__ == "__main__":
    main()
