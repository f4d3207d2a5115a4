"""Process at one end of a weight transfer, which reports its CPU time after each one.

``python -m benchmarks.transport.weight_end fetch HOME`` fetches what the messages on its standard
input say, and ``… copy HOME [HOST [KEY…]]`` also copies it to its own memory. ``… gloo RANK RANKS
FILE 'SHAPES'`` takes part in a broadcast for each line, and ``… plain DESCRIPTOR RANK BYTES`` moves
that many bytes over a socket by system calls alone. After each transfer, and once a channel is
open, it prints the CPU seconds that it spent since the one before. :class:`End` starts it.
"""

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.processes import LineProcess
from tidegate.transport.messages import InitWeights, UpdateWeights, decode_from_orchestrator
from tidegate.transport.security import EngineKeys
from tidegate.transport.weight_channels import WeightReceiverConfig, receiver
from tidegate.transport.weight_channels.zmq import CHUNK_BYTES

HOME = "tcp://127.0.0.1:5555"
"""Placeholder for the orchestrator's address; weights use a port beside it."""


class End(LineProcess):
    """A process that takes part in transfers; ``prefix`` is the command that it runs below."""

    def __init__(
        self, *arguments: str, prefix: Sequence[str] = (), descriptor: int | None = None
    ) -> None:
        command = [*prefix, sys.executable, "-m", "benchmarks.transport.weight_end", *arguments]
        super().__init__(command, pass_fds=() if descriptor is None else (descriptor,))

    def receive_seconds(self) -> float:
        """Wait for the end of its part; return the CPU seconds that it took."""
        return float(self.receive())


def fetch(home: str) -> None:
    """Receive weights as an engine does."""
    _receive(WeightReceiverConfig(home), lambda tensor: None)


def copy(home: str, host: str = "", *keys: str) -> None:
    """Receive weights and copy them, because engines of one host share what one of them fetches."""
    engine_keys = EngineKeys(*(key.encode() for key in keys)) if keys else None
    own = np.empty(0, np.uint8)

    def take(tensor: npt.NDArray[np.uint8]) -> None:
        nonlocal own
        if len(own) < len(tensor):
            own = np.ones(len(tensor), np.uint8)
        np.copyto(own[: len(tensor)], tensor)

    _receive(WeightReceiverConfig(home, engine_keys, host), take)


def _receive(config: WeightReceiverConfig, take: Callable[[npt.NDArray[np.uint8]], None]) -> None:
    spent_s, end = time.process_time(), None
    for line in sys.stdin:
        match decode_from_orchestrator(bytes.fromhex(line)):
            case InitWeights() as init:
                end = receiver(init, config)
            case UpdateWeights() as update:
                assert end is not None
                for _, view in end.tensors(update):
                    take(np.frombuffer(view, np.uint8))
        print(time.process_time() - spent_s, flush=True)
        spent_s = time.process_time()
    if end is not None:
        end.close()


def broadcast(rank: str, ranks: str, file: str, shapes: str) -> None:
    """Take part in gloo broadcasts as one rank."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=int(rank), world_size=int(ranks)
    )
    tensors = [torch.ones(shape, dtype=torch.bfloat16) for shape in json.loads(shapes)]
    for _ in sys.stdin:
        started_s = time.process_time()
        for tensor in tensors:
            distributed.broadcast(tensor, 0)
        print(time.process_time() - started_s, flush=True)
    distributed.destroy_process_group()


def plain(descriptor: str, rank: str, nbytes: str) -> None:
    """Send (rank 0) or receive on a socket by system calls alone."""
    memory = np.ones(int(nbytes), np.uint8).data
    with socket.socket(fileno=int(descriptor)) as connection:
        for _ in sys.stdin:
            started_s = time.process_time()
            at = 0
            while at < len(memory):
                part = memory[at : at + CHUNK_BYTES]
                moved = connection.recv_into(part) if int(rank) else connection.send(part)
                if not moved:
                    raise ConnectionError(f"the other end has gone, {len(memory) - at} bytes early")
                at += moved
            print(time.process_time() - started_s, flush=True)


ENDS: dict[str, Callable[..., None]] = {
    "fetch": fetch,
    "copy": copy,
    "gloo": broadcast,
    "plain": plain,
}

if __name__ == "__main__":
    ENDS[sys.argv[1]](*sys.argv[2:])
