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
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import psutil

from benchmarks.engine.shapes import Request, load
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


def measure(model: Path, requests: Sequence[Request], device: str = "cpu") -> dict[str, float]:
    """Start a worker, measure it, and stop it."""
    socket = RouterSocket(None, name="benchmark")
    with tempfile.TemporaryFile("w+") as errors:
        started = command(socket.address, model, len(requests), device)
        worker = subprocess.Popen(started, stderr=errors)
        try:
            return asyncio.run(drive(socket, worker, errors, requests))
        finally:
            worker.kill()
            worker.wait()
            socket.close()


async def drive(
    socket: RouterSocket,
    worker: subprocess.Popen[bytes],
    errors: IO[str],
    requests: Sequence[Request],
) -> dict[str, float]:
    """Warm up on some of the requests, then measure all of them."""
    driver = Driver(socket)
    await until(driver.greeted, worker, errors)
    driver.submit(requests[: len(requests) // 4], seed=0)
    await until(driver.finished, worker, errors)
    driver.steps.clear()
    driver.tokens = 0
    cpu_before_s, began_s = cpu_s(worker), time.perf_counter()
    driver.submit(requests, seed=1000)
    await until(driver.finished, worker, errors)
    measured = {
        "tokens": float(driver.tokens),
        "cpu_s": cpu_s(worker) - cpu_before_s,
        "wall_s": time.perf_counter() - began_s,
    }
    driver.steps.clear()
    driver.submit([Request(one.prompt, FULL_TOKENS) for one in requests], seed=2000)
    await until(driver.finished, worker, errors)
    full = [step.busy_us for step in driver.steps if len(step.turns) // 4 == len(requests)]
    return measured | {"full_step_us": statistics.median(full)}


def command(address: str, model: Path, concurrent: int, device: str = "cpu") -> list[str]:
    """Return the command that starts a worker; on a GPU it has the GPU for itself."""
    started = [sys.executable, "-m", "tidegate.engine.worker", "--connect", address]
    started += ["--model", str(model), "--engine", "engine-0", "--threads", "1"]
    started += ["--max-running-turns", str(concurrent), "--device", device]
    if device != "cpu":
        started += ["--memory-sharers", "1", "--max-step-tokens", str(GPU_STEP_TOKENS)]
    return started


async def until(event: asyncio.Event, worker: subprocess.Popen[bytes], errors: IO[str]) -> None:
    """Wait for an event, or exit with the worker's errors if it dies."""
    while not event.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), 1.0)
        if worker.poll() is not None and not event.is_set():
            errors.seek(0)
            raise SystemExit(f"the worker ended with status {worker.returncode}: {errors.read()}")


def cpu_s(worker: subprocess.Popen[bytes]) -> float:
    """Return the CPU time of the worker's process and its other ranks so far."""
    process = psutil.Process(worker.pid)
    all_times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(times.user + times.system for times in all_times))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--device", default="cpu", help="as the worker's")
    options = parser.parse_args()
    requests = load(options.requests.read_text())
    measured = measure(options.model, requests, options.device)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
