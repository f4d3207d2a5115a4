"""Programs per second in sandboxes: reused, taken from the warm pool, and started cold.

A command that no module imports. Built on ``environments/``'s sandboxes.

    python -m benchmarks.sandboxes [--json] [--programs 60] [--at-a-time 1]

The peer is the same program as a plain child process, without any sandbox, in the same round. A
program is ``python3 -I -S -c pass``, so that what is measured is the overhead. Each row is the
median of the rounds' ratios, and their spread is in its name.
"""

import argparse
import asyncio
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable

from benchmarks.table import Row, show
from tidegate.environments.local_sandboxes import Bubblewrap, default_python
from tidegate.environments.sandboxes import Sandboxes

COMMAND = ["python3", "-I", "-S", "-c", "pass"]
ROUNDS = 5

RunOne = Callable[[], Awaitable[None]]


async def rate(run_one: RunOne, programs: int, at_a_time: int) -> float:
    """Return programs per second."""

    async def worker() -> None:
        for _ in range(programs // at_a_time):
            await run_one()

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_a_time)))
    return programs // at_a_time * at_a_time / (time.perf_counter() - started)


async def measure(programs: int, at_a_time: int) -> list[Row]:
    """Measure all ways in each round, and return a row for each."""
    plain = [default_python(), *COMMAND[1:]]

    async def child() -> None:
        await asyncio.to_thread(subprocess.run, plain, check=True)

    def sandboxed(pool: Sandboxes) -> RunOne:
        async def take_one() -> None:
            async with pool.take() as sandbox:
                assert (await sandbox.run(COMMAND)).succeeded

        return take_one

    def pool(ready: int) -> Sandboxes:
        return Sandboxes(Bubblewrap(), sandboxes_max=at_a_time, ready=ready)

    with pool(0) as cold, pool(2 * at_a_time) as warm, pool(0) as reused:
        held = [await reused.open() for _ in range(at_a_time)]

        async def reuse() -> None:
            sandbox = held.pop()
            assert (await sandbox.run(COMMAND)).succeeded
            held.append(sandbox)

        ways: dict[str, RunOne] = {
            "reused sandbox": reuse,
            "from the pool": sandboxed(warm),
            "cold start": sandboxed(cold),
        }
        rates: dict[str, list[float]] = {name: [] for name in ["child", *ways]}
        for _ in range(ROUNDS):
            rates["child"].append(await rate(child, programs, at_a_time))
            for name, way in ways.items():
                rates[name].append(await rate(way, programs, at_a_time))
    rows = []
    for name in ways:
        ratios = [ours / peer for ours, peer in zip(rates[name], rates["child"], strict=True)]
        rows.append(
            Row(
                f"{name}, {at_a_time} at a time (ratios {min(ratios):.2f} to {max(ratios):.2f})",
                statistics.median(rates[name]),
                "programs/s",
                statistics.median(rates["child"]),
                statistics.median(ratios),
            )
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--programs", type=int, default=60, help="in each round and way")
    parser.add_argument("--at-a-time", type=int, default=1)
    options = parser.parse_args()
    show(asyncio.run(measure(options.programs, options.at_a_time)), as_json=options.json)


if __name__ == "__main__":
    main()
