"""CPU cost of an aborting weight swap, and of tensor parallelism with two ranks.

``python -m benchmarks.engine.costs [--json]`` prints ``name, value, unit, peer, ratio``. Workers
run the small model in float32, on one thread each, driven over the wire protocol; values are
medians.

    abort/cpu_ms_per_turn: extra CPU time of a swap that aborts running turns, which are resubmitted
    at once, over a swap that keeps them. The peer is the prefill of equally long contexts, and one
    token of each
    ranks/2/tokens_per_cpu_s: tokens per CPU-second of both processes, against an engine of one rank
    ranks/2/tokens_per_s: the same by wall time, of little meaning on a busy machine
"""

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.engine.ours import Driver, command, cpu_s, until
from benchmarks.engine.shapes import SHAPES, Request, make_directory
from benchmarks.table import Row, compared, show
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.orchestrator.weight_sync.state_dict import named_buffers
from tidegate.transport.messages import (
    ABORT,
    FinishWeightUpdate,
    PauseMode,
    SamplingParams,
    Step,
    SubmitTurn,
)
from tidegate.transport.router import RouterSocket
from tidegate.transport.weight_channels import WeightSender, sender

SHAPE = SHAPES["small"]
TURNS = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 48
SWAP_AFTER_TOKENS = 32
"""Tokens of each turn before the swap; with the prompt, an abort recomputes 96 tokens."""

RUNS = 3


class SwapDriver(Driver):
    """Swaps weights while turns run, and resubmits turns that end with ``abort``."""

    def __init__(self, socket: RouterSocket) -> None:
        super().__init__(socket)
        self._asked: dict[int, SubmitTurn] = {}
        """Submitted turns by handle."""
        self._said: dict[int, array[int]] = {}
        self._swap: FinishWeightUpdate | None = None
        self.aborted = 0

    def ask(self, requests: Sequence[Request], swap: FinishWeightUpdate | None = None) -> None:
        """Submit all requests; send ``swap`` once each turn has sampled this many tokens on
        average."""
        self.finished.clear()
        self.live.clear()
        self._swap, self.tokens, self.aborted = swap, 0, 0
        for one in requests:
            sampling = SamplingParams(max_tokens=one.output_tokens, seed=self._turns)
            self._submit(array("i", one.prompt), sampling)

    def take(self, step: Step) -> None:
        """Record each turn's tokens, to resume it after an abort."""
        token_ids, first = array("i", step.token_ids), 0
        counts = array("I", step.counts) or [1] * (len(step.turns) // 4)
        codes = step.finish or bytes(len(step.turns) // 4)
        for turn, count, code in zip(array("I", step.turns), counts, codes, strict=True):
            self._said[turn] += token_ids[first : first + count]
            first += count
            if code == ABORT:
                self._continue(turn)
        super().take(step)
        if self._swap is not None and self.tokens >= TURNS * SWAP_AFTER_TOKENS:
            self.say(self._swap)
            self._swap = None

    def _continue(self, turn: int) -> None:
        self.aborted += 1
        asked, said = self._asked[turn], self._said[turn]
        sampling = SamplingParams(
            max_tokens=asked.sampling.max_tokens - len(said), seed=asked.sampling.seed
        )
        self._submit(array("i", asked.token_ids) + said, sampling, sampled_before=len(said))

    def _submit(
        self, tokens: "array[int]", sampling: SamplingParams, sampled_before: int = 0
    ) -> None:
        turn = SubmitTurn(
            turn=self._turns,
            token_ids=tokens.tobytes(),
            sampling=sampling,
            sampled_before=sampled_before,
        )
        self._asked[turn.turn], self._said[turn.turn] = turn, array("i")
        self._turns += 1
        self._open_turns += 1
        self.say(turn)


@dataclass(slots=True)
class Engine:
    """One worker with its driver."""

    driver: SwapDriver
    worker: subprocess.Popen[bytes]
    errors: IO[str]

    async def spent(self, requests: Sequence[Request], swap: FinishWeightUpdate | None) -> "Spent":
        """Return the cost of answering all requests."""
        before_s, began_s = cpu_s(self.worker), time.perf_counter()
        self.driver.ask(requests, swap)
        await until(self.driver.finished, self.worker, self.errors)
        if swap is not None:
            await until(self.driver.live, self.worker, self.errors)
        wall_s = time.perf_counter() - began_s
        return Spent(cpu_s(self.worker) - before_s, wall_s, self.driver.tokens)


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of a set of answers."""

    cpu_s: float
    wall_s: float
    tokens: int


@contextlib.asynccontextmanager
async def started(model: Path, *options: str) -> AsyncIterator[Engine]:
    """Start a worker and warm it up."""
    socket = RouterSocket(None, name="benchmark")
    with tempfile.TemporaryFile("w+") as errors:
        line = [*command(socket.address, model, TURNS), *options]
        worker = subprocess.Popen(line, stderr=errors)  # noqa: ASYNC220 - the loop is idle
        try:
            engine = Engine(SwapDriver(socket), worker, errors)
            await until(engine.driver.greeted, worker, errors)
            await engine.spent(requests(seed=0, count=4), None)
            yield engine
        finally:
            worker.kill()  # its other ranks end with it
            worker.wait()
            socket.close()


def requests(
    seed: int, *, count: int = TURNS, prompt: int = PROMPT_TOKENS, output: int = OUTPUT_TOKENS
) -> list[Request]:
    """Return prompts of equal length; each seed has its own, so that none is in the prefix
    cache."""
    vocab = SHAPE.fields["vocab_size"]
    prompts = np.random.default_rng(seed).integers(3, vocab, (count, prompt))
    return [Request(one.tolist(), output) for one in prompts]


async def abort_rows(model: Path) -> list[Row]:
    """Compare an aborting swap with a keeping one, and with the prefill that it requires."""
    channel = sender("shm", None)
    try:
        async with started(model) as engine:
            engine.driver.say(channel.init())
            runs = [await abort_costs(engine, channel, model, run) for run in range(RUNS)]
    finally:
        channel.close()
    cost_s, prefill_s = (statistics.median(column) for column in zip(*runs, strict=True))
    per_turn_ms = 1e3 / TURNS
    ours, peer = cost_s * per_turn_ms, prefill_s * per_turn_ms
    return [compared("abort/cpu_ms_per_turn", "ms", ours, peer)]


async def abort_costs(
    engine: Engine, channel: WeightSender, model: Path, run: int
) -> tuple[float, float]:
    """Return the CPU seconds of an abort beyond a keep, and of the prefill alone."""
    spent: dict[PauseMode, float] = {}
    modes: tuple[PauseMode, ...] = ("keep", "abort")
    for number, mode in enumerate(modes):
        version = 1 + 2 * run + number
        tensors = named_buffers(dict(read_tensors(model)))
        await engine.driver.stage(version, channel, tensors)
        swap = FinishWeightUpdate(version=version, pause_mode=mode, kv_policy="keep")
        spent[mode] = (await engine.spent(requests(version), swap)).cpu_s
        expected = TURNS if mode == "abort" else 0
        if engine.driver.aborted != expected:
            raise SystemExit(f"{engine.driver.aborted} turns were aborted, not {expected}")
    again = requests(1000 + run, prompt=PROMPT_TOKENS + SWAP_AFTER_TOKENS, output=1)
    return spent["abort"] - spent["keep"], (await engine.spent(again, None)).cpu_s


async def rank_rows(model: Path) -> list[Row]:
    """Compare two ranks with one, alternately; the idle engine sleeps."""
    taken: list[list[Spent]] = [[], []]
    async with started(model) as one, started(model, "--tensor-parallel-size", "2") as two:
        for run in range(RUNS):
            for engine, found in zip((two, one), taken, strict=True):
                found.append(await engine.spent(requests(100 + run), None))
    by_cpu, by_wall = (
        [statistics.median(each) for each in rates]
        for rates in (
            [[spent.tokens / spent.cpu_s for spent in found] for found in taken],
            [[spent.tokens / spent.wall_s for spent in found] for found in taken],
        )
    )
    return [
        compared("ranks/2/tokens_per_cpu_s", "1/s", *by_cpu),
        compared("ranks/2/tokens_per_s", "1/s", *by_wall),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_directory(Path(directory), SHAPE, "float32")
        for rows in (abort_rows, rank_rows):
            show(asyncio.run(rows(model)), as_json=options.json)


if __name__ == "__main__":
    main()
