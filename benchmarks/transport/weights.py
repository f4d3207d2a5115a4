"""CPU cost of transferring a version of weights, by shared memory and by ZeroMQ, against gloo.

``python -m benchmarks.transport weights`` calls :func:`rows`.
"""

import contextlib
import json
import math
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.table import Figures, Row, by_turns, spread_row
from benchmarks.transport.weight_end import HOME, End
from tidegate.transport.messages import encode
from tidegate.transport.weight_channels import NamedBuffer, receiver, sender
from tidegate.transport.weight_channels.zmq import SEND_BUFFER_BYTES

SHM_BYTES = 256 * 1024 * 1024
"""Size of the shared-memory benchmark, larger than a core's caches."""

PER_TENSOR = "gloo, a broadcast per tensor"
ONE_BUFFER = "gloo, one buffer"
PLAIN_TCP = "send and recv of a TCP socket"
PLAIN_UNIX = "send and recv of a Unix socket"
"""Peers that set the lower limit of any transfer through the kernel, which copies at both ends."""
UNIT = "GB/s per core, both ends"

SIBLINGS = 4
"""Number of engines on one host."""
SIBLINGS_UNIT = f"GB/s per core to {SIBLINGS} engines of a host, all ends, each with a copy"
GLOO_TO_SIBLINGS = f"gloo, a broadcast per tensor to {SIBLINGS}"


def shapes() -> list[tuple[int, ...]]:
    """Return half the layers of a model of half a billion parameters: 373 MB in bfloat16."""
    width, kv_width, hidden, vocab = 896, 128, 4864, 18_992
    layer: list[tuple[int, ...]] = [
        (width, width),
        (width,),
        (kv_width, width),
        (kv_width,),
        (kv_width, width),
        (kv_width,),
        (width, width),
        (hidden, width),
        (hidden, width),
        (width, hidden),
        (width,),
        (width,),
    ]
    return [(vocab, width), (width,), *layer * 12]


def rows() -> Iterator[Row]:
    """Compare shared memory with memcpy, and ZeroMQ with gloo, by CPU time of both ends."""
    yield from _shared_memory()
    yield from _network()
    yield from _siblings()


def _shared_memory() -> Iterator[Row]:
    """Measure writing a version, and copying it out of the receiver's views into warm memory."""
    trained, live = _memory(), _memory()
    tensor = NamedBuffer("w", "bfloat16", (SHM_BYTES // 2,), trained.data)
    out = sender("shm")
    [update] = out.write(0, [tensor])
    end = receiver(out.init())

    def read() -> None:
        for _, view in end.tensors(update):
            np.copyto(live, np.frombuffer(view, dtype=np.uint8))

    read()
    figures = by_turns(
        {
            "write": lambda: _gb_per_s(lambda: out.write(0, [tensor])),
            "read": lambda: _gb_per_s(read),
            "memcpy": lambda: _gb_per_s(lambda: np.copyto(live, trained)),
        }
    )
    end.close()
    out.close()
    memcpy = figures["memcpy"]["gb_per_s"]
    for name, what in (("shm_weights_gb_per_s", "write"), ("shm_weights_read_gb_per_s", "read")):
        yield spread_row(name, "GB/s", figures[what]["gb_per_s"], memcpy, "memcpy")


def _memory() -> npt.NDArray[np.uint8]:
    """Allocate memory as torch does: numpy's own large arrays lie in huge pages, which are faster
    to read than any memory that processes share."""
    memory = np.frombuffer(mmap.mmap(-1, SHM_BYTES), dtype=np.uint8)
    memory[:] = 1
    return memory


def _gb_per_s(copy: Callable[[], object]) -> Figures:
    """Return the speed of moving the weights once; the best of four, because other processes run
    too."""
    times_s = []
    for _ in range(4):
        started_s = time.perf_counter()
        copy()
        times_s.append(time.perf_counter() - started_s)
    return {"gb_per_s": SHM_BYTES / 1e9 / min(times_s)}


def _network() -> Iterator[Row]:
    every = shapes()
    total = sum(math.prod(shape) for shape in every)
    gb = 2 * total / 1e9
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = {
            "ipc": stack.enter_context(_channel("zmq", None, every, "fetch")),
            "tcp": stack.enter_context(_channel("zmq", HOME, every, "fetch")),
            PER_TENSOR: stack.enter_context(_gloo(directory / "tensors", every)),
            ONE_BUFFER: stack.enter_context(_gloo(directory / "buffer", [(total,)])),
            PLAIN_TCP: stack.enter_context(_plain(_tcp_pair(), 2 * total)),
            PLAIN_UNIX: stack.enter_context(_plain(socket.socketpair(), 2 * total)),
        }
        seconds = by_turns(runs)
    speed = {
        name: {what: [gb / cpu_s for cpu_s in cpus_s] for what, cpus_s in figures.items()}
        for name, figures in seconds.items()
    }
    for name, unit, ours, against in (
        ("zmq_weights_gb_per_cpu_s", UNIT, speed["ipc"]["sent"], PER_TENSOR),
        ("zmq_weights_gb_per_cpu_s_vs_one_buffer", UNIT, speed["ipc"]["sent"], ONE_BUFFER),
        ("zmq_weights_gb_per_cpu_s_vs_plain", UNIT, speed["ipc"]["sent"], PLAIN_UNIX),
        ("zmq_tcp_weights_gb_per_cpu_s", UNIT, speed["tcp"]["sent"], PER_TENSOR),
        ("zmq_tcp_weights_gb_per_cpu_s_vs_one_buffer", UNIT, speed["tcp"]["sent"], ONE_BUFFER),
        ("zmq_tcp_weights_gb_per_cpu_s_vs_plain", UNIT, speed["tcp"]["sent"], PLAIN_TCP),
        (
            "zmq_publish_gb_per_cpu_s",
            f"{UNIT}, with the copy out of the trainer's tensors",
            speed["ipc"]["published"],
            PER_TENSOR,
        ),
    ):
        yield spread_row(name, unit, ours, speed[against]["sent"], against)


def _siblings() -> Iterator[Row]:
    """Compare the transfer to several engines of one host, which fetch a version once, with a
    broadcast."""
    every = shapes()
    gb = 2 * sum(math.prod(shape) for shape in every) * SIBLINGS / 1e9
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        relay = stack.enter_context(_channel("relay", HOME, every, *["copy"] * SIBLINGS))
        gloo = stack.enter_context(_gloo(directory / "siblings", every, 1 + SIBLINGS))
        seconds = by_turns({"ours": relay, "gloo": gloo})
    ours, peer = ([gb / cpu_s for cpu_s in seconds[name]["sent"]] for name in ("ours", "gloo"))
    name = f"zmq_weights_gb_per_cpu_s_to_{SIBLINGS}"
    yield spread_row(name, SIBLINGS_UNIT, ours, peer, GLOO_TO_SIBLINGS)


Run = Callable[[], Figures]
"""One transfer; returns the CPU seconds of both ends, by what is counted."""


@contextlib.contextmanager
def _channel(
    name: str, home: str | None, every: list[tuple[int, ...]], *roles: str
) -> Iterator[Run]:
    """Set up our channel: this process sends, others receive, each in its role."""
    tensors = [
        NamedBuffer(f"w{n}", "bfloat16", shape, np.ones(2 * math.prod(shape), np.uint8).data)
        for n, shape in enumerate(every)
    ]
    out = sender(name, address=home)
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(End(role, home or "")) for role in roles]
        for end in ends:
            end.send(encode(out.init()).hex())
            end.receive_seconds()

        def run() -> Figures:
            before_s = time.process_time()
            [update] = out.write(0, tensors)
            written_s = time.process_time()
            for end in ends:
                end.send(encode(update).hex())
            received_s = sum(end.receive_seconds() for end in ends)
            sent_s = time.process_time() - written_s
            return {
                "sent": sent_s + received_s,
                "published": sent_s + received_s + written_s - before_s,
            }

        run()  # touches all pages
        yield run
    out.close()


@contextlib.contextmanager
def _gloo(file: Path, every: list[tuple[int, ...]], ranks: int = 2) -> Iterator[Run]:
    """Set up gloo: separate processes, one of which sends."""
    with contextlib.ExitStack() as stack:
        yield _together(
            [
                stack.enter_context(
                    End("gloo", str(rank), str(ranks), str(file), json.dumps(every))
                )
                for rank in range(ranks)
            ]
        )


@contextlib.contextmanager
def _plain(pair: tuple[socket.socket, socket.socket], nbytes: int) -> Iterator[Run]:
    """Set up two processes that only make system calls."""
    sending, receiving = (one.detach() for one in pair)
    with (
        End("plain", str(sending), "0", str(nbytes), descriptor=sending) as one,
        End("plain", str(receiving), "1", str(nbytes), descriptor=receiving) as other,
    ):
        os.close(sending)
        os.close(receiving)
        yield _together([one, other])


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sending = socket.socket()
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sending.connect(listener.getsockname())
        return sending, listener.accept()[0]


def _together(ends: list[End]) -> Run:
    """Return a function that runs all ends once; run it once to touch all pages."""

    def run() -> Figures:
        for end in ends:
            end.send("go")
        return {"sent": sum(end.receive_seconds() for end in ends)}

    run()
    return run
