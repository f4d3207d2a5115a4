"""Time to bring a version to many engines: by relay, or one by one.

`python -m benchmarks.weights` measures, with real processes:

* on this machine, where every copy costs its CPUs: 1 to 32 engines on 1 host or 4;
* if permitted, between network namespaces whose links carry 200 Mbit/s, where the network is the
  bottleneck, as between machines; compared with the models' predictions.

`--deltas` measures patches of elements instead: their bytes, and the time to make and apply them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from benchmarks.table import Row, compared, make_parser, show
from benchmarks.transport.weight_end import HOME, End
from tests.namespaces import Network, are_allowed
from tidegate.transport.messages import encode
from tidegate.transport.security import ephemeral_keys
from tidegate.transport.weight_channels import NamedBuffer, WeightSender, sender
from tidegate.transport.weight_channels.zmq import CHUNK_BYTES

TENSORS = 16
LOCAL_BYTES = 64 * 1024 * 1024
LINK_MBIT_PER_S = 200
LINK_BYTES = 16 * 1024 * 1024
REPEATS = 3


@dataclass(frozen=True, slots=True)
class FanOut:
    """Cost of bringing a version to all engines."""

    wall_s: float
    """Median wall time."""
    cpu_s: float
    """Mean CPU time of the sender and all engines."""


def measured(weights: WeightSender, ends: Sequence[Callable[[], End]], nbytes: int) -> FanOut:
    """Measure some fan-outs from the trainer's tensors to the last engine's copy, once pages and
    connections are warm."""
    tensors = tensors_of(nbytes)
    with closing(weights), ExitStack() as stack:
        started = [stack.enter_context(end()) for end in ends]
        for end in started:  # one by one: the first on a host is its relay
            end.send(encode(weights.init()).hex())
            end.receive_seconds()

        def fan_out(version: int) -> tuple[float, float]:
            begun_s, cpu_begun_s = time.monotonic(), time.process_time()
            [update] = weights.write(version, tensors)
            for end in started:
                end.send(encode(update).hex())
            received_s = sum(end.receive_seconds() for end in started)
            wall_s, cpu_s = time.monotonic() - begun_s, time.process_time() - cpu_begun_s
            return wall_s, cpu_s + received_s

        fan_out(1)
        walls_s, cpus_s = zip(*map(fan_out, range(2, 2 + REPEATS)), strict=True)
    return FanOut(median(walls_s), sum(cpus_s) / REPEATS)


def tensors_of(nbytes: int) -> list[NamedBuffer]:
    """Return this many bytes in a few tensors."""
    size = nbytes // TENSORS
    data = np.random.default_rng(0).integers(0, 255, size, np.uint8).data
    return [NamedBuffer(f"w{n}", "uint8", (size,), data) for n in range(TENSORS)]


def local_rows(counts: list[int]) -> Iterator[Row]:
    """Yield the rows of this machine."""
    for count in counts:
        naive = measured(sender("zmq", address=HOME), local(count, 1), LOCAL_BYTES)
        what = f"{count} engines, {LOCAL_BYTES >> 20} MiB"
        for hosts in (1, 4):
            if count % hosts == 0:
                relay = measured(sender("relay", address=HOME), local(count, hosts), LOCAL_BYTES)
                line = f"{what}: relay, {hosts} hosts; peer: one by one"
                yield compared(line, "s", relay.wall_s, naive.wall_s)
                yield compared(line, "CPU-s", relay.cpu_s, naive.cpu_s)


def local(count: int, hosts: int) -> list[Callable[[], End]]:
    """Return engines to start, spread over this many simulated hosts."""
    return [partial(End, HOME, f"host{index % hosts}") for index in range(count)]


def network_rows(counts: list[int]) -> Iterator[Row]:
    """Yield the rows of hosts with links of their own, with keys."""
    if not are_allowed():
        return
    bytes_per_s = LINK_MBIT_PER_S * 1e6 / 8
    once_s = LINK_BYTES / bytes_per_s
    for hosts in counts:
        with ExitStack() as stack:
            network = stack.enter_context(Network(hosts, link_mbit_per_s=LINK_MBIT_PER_S))
            chain = over(network, hosts, "relay")
            naive = over(network, hosts, "zmq")
        what = f"{hosts} hosts, {LINK_BYTES >> 20} MiB over {LINK_MBIT_PER_S} Mbit/s"
        relays = f"{what}: relays in a chain"
        yield compared(f"{relays}; peer: one by one", "s", chain.wall_s, naive.wall_s)
        chunk_s = CHUNK_BYTES / bytes_per_s
        model_s = once_s + (hosts - 1) * chunk_s
        yield compared(f"{relays}; peer: its model", "s", chain.wall_s, model_s)
        yield compared(f"{what}: one by one; peer: its model", "s", naive.wall_s, hosts * once_s)
        # If the CPU time approaches the wall time, CPU is the bottleneck.
        yield compared(f"{relays}; peer: one by one", "CPU-s", chain.cpu_s, naive.cpu_s)


def over(network: Network, hosts: int, channel: str) -> FanOut:
    """Measure one engine per host, with keys."""
    orchestrator, engine = ephemeral_keys()
    address = f"tcp://{network.address}:5555"
    keys = [engine.public.decode(), engine.secret.decode(), engine.orchestrator.decode()]
    started = [
        partial(End, address, "", *keys, prefix=network.command(host)) for host in range(hosts)
    ]
    return measured(sender(channel, address=address, keys=orchestrator), started, LINK_BYTES)


def main() -> None:
    """Print a table, or with --json one object per line."""
    parser = make_parser(__doc__)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--deltas", action="store_true", help="patches of elements (5 minutes)")
    options = parser.parse_args()
    if options.deltas:
        from benchmarks import weight_deltas

        show(weight_deltas.rows(), as_json=options.json)
        return
    show(network_rows(options.hosts), as_json=options.json)
    show(local_rows(options.engines), as_json=options.json)


if __name__ == "__main__":
    main()
