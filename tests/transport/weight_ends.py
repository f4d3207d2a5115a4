"""Both ends of a weight channel for tests: tensors to send, and receivers on threads."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tidegate.transport.messages import UpdateWeights
from tidegate.transport.weight_channels import (
    NamedBuffer,
    WeightReceiverConfig,
    WeightSender,
    receiver,
)

WAIT_S = 100.0

ORCHESTRATOR = "tcp://127.0.0.1:5555"
"""Orchestrator's address, with no listener; weights use a port beside it."""

RECEIVER_CONFIG = WeightReceiverConfig(ORCHESTRATOR)


def tensors(*sizes: int) -> list[NamedBuffer]:
    """Return tensors of random bytes."""
    return [
        NamedBuffer(f"w{n}", "uint8", (size,), memoryview(os.urandom(size)))
        for n, size in enumerate(sizes)
    ]


def as_bytes(sent: list[NamedBuffer]) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.data) for tensor in sent}


class Engine:
    """A receiver with a thread of its own."""

    def __init__(
        self, weights: WeightSender, config: WeightReceiverConfig = RECEIVER_CONFIG
    ) -> None:
        self._end = receiver(weights.init(), config)
        self._thread = ThreadPoolExecutor(1)

    def fetch(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> "Future[dict[str, bytes]]":
        return self._thread.submit(
            lambda: {spec.name: bytes(view) for spec, view in self._end.tensors(update, is_wanted)}
        )

    def fetch_one(self, update: UpdateWeights) -> "Future[str]":
        """Fetch the first tensor, and no more."""
        return self._thread.submit(lambda: next(self._end.tensors(update))[0].name)

    def close(self) -> None:
        self._thread.submit(self._end.close).result(WAIT_S)
        self._thread.shutdown()


def wait_until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("it never came to that")
