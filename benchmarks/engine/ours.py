"""Our engine's speed: a real worker process, driven over the wire protocol.

``python -m benchmarks.engine.ours MODEL REQUESTS`` prints one JSON object: tokens, and the worker's
CPU and wall time for them, I/O threads included. Then the same prompts get answers of equal length,
so that all run in many steps, to measure the time of a full step.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import psutil

from benchmarks.engine.shapes import Request, load
from benchmarks.table import Figures
from tidegate.transport.messages import (
    Ack,
    BaseVersions,
    FinishWeightUpdate,
    FromEngine,
    Hello,
    Message,
    SamplingParams,
    StartWeightUpdate,
    Step,
    SubmitTurn,
    TurnFailed,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
    Welcome,
    decode_from_engine,
)
from tidegate.transport.router import RouterSocket
from tidegate.transport.weight_channels import NamedBuffer, WeightSender, sender

CREDIT_STEPS = 256
FULL_TOKENS = 64
"""Length of the equal answers, in tokens."""

GPU_STEP_TOKENS = 8192
"""Tokens of a step on a GPU, so that prefills fill it."""

TIMEOUT_S = 3600.0


class Driver:
    """Minimal orchestrator end of one engine, which only counts."""

    def __init__(self, socket: RouterSocket) -> None:
        self._socket = socket
        self._peer = b""
        self.greeted = asyncio.Event()
        self.finished = asyncio.Event()
        self.staged = asyncio.Event()
        self.live = asyncio.Event()
        self.steps: list[Step] = []
        self.tokens = 0
        self._open_turns = 0
        self._turns = 0
        socket.attach(asyncio.get_running_loop(), self._on_frames)

    def submit(self, requests: Sequence[Request], seed: int) -> None:
        """Submit all requests at once."""
        self.finished.clear()
        self._open_turns += len(requests)
        for one in requests:
            sampling = SamplingParams(max_tokens=one.output_tokens, seed=seed + self._turns)
            prompt = np.array(one.prompt, "<i4").tobytes()
            turn = SubmitTurn(turn=self._turns, token_ids=prompt, sampling=sampling)
            self._turns += 1
            self.say(turn)

    def say(self, message: Message) -> None:
        """Send a message to the engine."""
        self._socket.send(self._peer, message)

    async def publish(
        self, tensors: Sequence[NamedBuffer], version: int = 1, base_version: int | None = None
    ) -> None:
        """Run all four phases of a weight update, through shared memory.

        ``base_version``: the live version that the tensors' patches apply to; None for whole sets.
        """
        channel = sender("shm", None)
        try:
            self.say(channel.init())
            self.live.clear()
            await self.stage(version, channel, tensors, base_version)
            self.say(FinishWeightUpdate(version=version, pause_mode="keep", kv_policy="keep"))
            await self.live.wait()
        finally:
            channel.close()

    async def stage(
        self,
        version: int,
        channel: WeightSender,
        tensors: Sequence[NamedBuffer],
        base_version: int | None = None,
    ) -> None:
        """Stage a version beside the live weights."""
        self.staged.clear()
        self.say(StartWeightUpdate(version=version))
        bases = None if base_version is None else BaseVersions(base_version, base_version)
        for update in channel.write(version, tensors):
            self.say(msgspec.structs.replace(update, base_versions=bases))
        await self.staged.wait()

    def _on_frames(self, frames: list[tuple[bytes, bytes]]) -> None:
        last_seq = None
        for peer, frame in frames:
            self._peer = peer
            message = decode_from_engine(frame)
            if isinstance(message, Step):
                last_seq = message.seq
                self.take(message)
            else:
                self._answer(message)
        if last_seq is not None:
            self.say(Ack(seq=last_seq))

    def take(self, step: Step) -> None:
        """Count the tokens and ends of a step."""
        self.steps.append(step)
        self.tokens += len(step.token_ids) // 4
        self._open_turns -= len(step.finish) - step.finish.count(0)
        if self._open_turns == 0:
            self.finished.set()

    def _answer(self, message: FromEngine) -> None:
        match message:
            case Hello():
                welcome = Welcome(
                    heartbeat_interval_s=1.0,
                    orchestrator_timeout_s=TIMEOUT_S,
                    credit_steps=CREDIT_STEPS,
                )
                self.say(welcome)
                self.greeted.set()
            case WeightsStaged():
                self.staged.set()
            case WeightsLive():
                self.live.set()
            case WeightsFailed() | TurnFailed():
                raise SystemExit(f"the engine refuses: {message}")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process with its driver."""

    driver: Driver
    process: subprocess.Popen[bytes]
    errors: IO[str]

    async def until(self, event: asyncio.Event) -> None:
        """Wait for an event, or exit with the worker's errors if it dies."""
        while not event.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), 1.0)
            if (status := self.process.poll()) is not None and not event.is_set():
                self.errors.seek(0)
                raise SystemExit(f"the worker ended with status {status}: {self.errors.read()}")

    def cpu_s(self) -> float:
        """Return the CPU time of the worker's process and its other ranks so far."""
        process = psutil.Process(self.process.pid)
        all_times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return float(sum(times.user + times.system for times in all_times))


@contextlib.asynccontextmanager
async def started(
    model: Path, concurrent: int, device: str, program: Sequence[str] = ("tidegate.engine.worker",)
) -> AsyncIterator[Worker]:
    """Run a worker until the end of the `with`; on a GPU it has the GPU for itself."""
    socket = RouterSocket(None, name="benchmark")
    command = [sys.executable, "-m", *program, "--connect", socket.address, "--model", str(model)]
    command += ["--engine", "engine-0", "--threads", "1", "--device", device]
    command += ["--max-running-turns", str(concurrent)]
    if device != "cpu":
        command += ["--memory-sharers", "1", "--max-step-tokens", str(GPU_STEP_TOKENS)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stderr=errors)  # noqa: ASYNC220 - the loop is idle
        try:
            worker = Worker(Driver(socket), process, errors)
            await worker.until(worker.driver.greeted)
            yield worker
        finally:
            process.kill()  # its other ranks end with it
            process.wait()
            socket.close()


async def measure(model: Path, requests: Sequence[Request], device: str) -> Figures:
    """Warm up on some of the requests, then measure all of them."""
    async with started(model, len(requests), device) as worker:
        driver = worker.driver
        driver.submit(requests[: len(requests) // 4], seed=0)
        await worker.until(driver.finished)
        driver.steps.clear()
        driver.tokens = 0
        cpu_before_s, began_s = worker.cpu_s(), time.perf_counter()
        driver.submit(requests, seed=1000)
        await worker.until(driver.finished)
        measured = {
            "tokens": float(driver.tokens),
            "cpu_s": worker.cpu_s() - cpu_before_s,
            "wall_s": time.perf_counter() - began_s,
        }
        driver.steps.clear()
        driver.submit([Request(one.prompt, FULL_TOKENS) for one in requests], seed=2000)
        await worker.until(driver.finished)
        full = [step.busy_us for step in driver.steps if len(step.turns) // 4 == len(requests)]
        return measured | {"full_step_us": statistics.median(full)}


def parse(description: str | None, *flags: str) -> argparse.Namespace:
    """Parse the model's directory, the requests' file and the device."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("requests", type=lambda name: load(Path(name).read_text()))
    parser.add_argument("--device", default="cpu", help="as the worker's")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse(__doc__)
    print(json.dumps(asyncio.run(measure(options.model, options.requests, options.device))))
