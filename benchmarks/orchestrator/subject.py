"""The measured process of the orchestrator benchmark; prints its CPU, wall time or memory as JSON.

It runs Tidegate as users do (``serve_sync``, episodes, batches as tensors, a publish per batch),
with engines in another process (:mod:`benchmarks.orchestrator.engines`). All CPU time of this
process counts: event loop, trainer and ZeroMQ's I/O thread.
"""

import argparse
import asyncio
import gc
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models

import tidegate
from benchmarks.orchestrator.engines import InProcessEngines, add_work_options
from tidegate.orchestrator.trainer import run
from tidegate.orchestrator.trainer.adapters import AdapterTrainer
from tidegate.orchestrator.trainer.rollouts import Rollouts, Scorer, SyncScorer

PROMPT_TOKENS = 128
PROMPTS = [[number, *range(1, PROMPT_TOKENS)] for number in range(64)]
"""Prompts of the tasks; the rollouts of a group share one."""
WEIGHTS = {"w": torch.zeros(4)}
LORA = {f"layers.0.q_proj.lora_{letter}.weight": torch.zeros(1, 1) for letter in "AB"}
LORA_CONFIG = {"r": 1, "lora_alpha": 1}
JOIN_TIMEOUT_S = 120.0
CONTEXT_TOKEN_BYTES = 8
"""Size of a context token: an int32 and a float32."""


async def solve(episode: tidegate.Episode, task: int) -> float:
    """Run one turn and return a reward."""
    episode.append(PROMPTS[task % len(PROMPTS)])
    await episode.generate()
    return 1.0


def write_model(directory: Path) -> Path:
    """Write a model directory with what the orchestrator reads."""
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(directory / "tokenizer.json"))
    return directory


@contextmanager
def settings_for(work: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start engines, and yield the settings of a run that they connect to."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        address = f"ipc://{directory}/socket"
        settings = {
            "model": write_model(directory),
            "engines": 0,
            "listen_address": address,
            "group_size": work.group_size,
            "groups_per_batch": work.batch,
            "max_staleness": -(-work.rollouts // (work.batch * work.group_size)) - 1,
            "max_tokens": work.tokens,
            "episode_timeout_s": 3600,
            "engine_timeout_s": 600,
            "heartbeat_interval_s": 5,
        }
        with engines_in_process(work) if work.in_process else engines_over(address, work):
            yield settings


@contextmanager
def engines_over(address: str, work: argparse.Namespace) -> Iterator[None]:
    """Start the engines in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.orchestrator.engines", address]
    for option in ("engines", "slots", "steps", "tokens", "turn_s", "step_s"):
        command += [f"--{option.replace('_', '-')}", str(getattr(work, option))]
    with subprocess.Popen(command) as engines:
        try:
            yield
        finally:
            engines.terminate()


@contextmanager
def engines_in_process(work: argparse.Namespace) -> Iterator[None]:
    """Replace the run's socket by engines in its own loop."""
    with patch.object(run, "RouterSocket", lambda *_, **__: InProcessEngines(work)):
        yield


def wait_for_engines(rollouts: Scorer | SyncScorer, engines: int) -> None:
    """Wait until this many engines have joined."""
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while (joined := len(rollouts.statistics().engines)) < engines:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{joined} of {engines} engines after {JOIN_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def throughput(work: argparse.Namespace) -> dict[str, float]:
    """Return the rollouts, CPU and wall time of the batches after a warm-up."""
    with settings_for(work) as settings, tidegate.serve_sync(**settings) as rollouts:
        wait_for_engines(rollouts, work.engines)
        started_s = cpu_started_s = 0.0
        counted = 0
        for number, batch in enumerate(rollouts.batches(itertools.count(), episode=solve)):
            counted += len(batch.rewards)
            if number == work.warm_up - 1:
                started_s, cpu_started_s, counted = time.perf_counter(), time.process_time(), 0
            if number == work.warm_up + work.batches - 1:
                break
            rollouts.publish(WEIGHTS)
        cpu_s, wall_s = time.process_time() - cpu_started_s, time.perf_counter() - started_s
    return {"rollouts": counted, "cpu_s": cpu_s, "wall_s": wall_s}


async def adapters(work: argparse.Namespace) -> dict[str, float]:
    """Return the sampled rollouts and the CPU time of ``work.batches`` of all adapters together."""
    each = max(1, work.batches // work.adapters)
    with settings_for(work) as settings:
        settings["max_staleness"] = 1
        async with tidegate.serve(**settings) as rollouts:
            wait_for_engines(rollouts, work.engines)
            trainers = [await rollouts.train_adapter(f"adapter-{n}") for n in range(work.adapters)]

            async def train(trainer: AdapterTrainer, batches: int) -> None:
                for _ in range(batches):
                    assert await trainer.next_batch() is not None
                    await trainer.publish(LORA, config=LORA_CONFIG)

            def sampled() -> float:
                tokens = sum(trainer.statistics().ledger.generated for trainer in trainers)
                return float(tokens / work.tokens)

            for trainer in trainers:
                await trainer.publish(LORA, config=LORA_CONFIG)
                await trainer.offer(itertools.count(), episode=solve)
            await asyncio.gather(*(train(trainer, 1) for trainer in trainers))
            before = sampled()
            cpu_started_s, started_s = time.process_time(), time.perf_counter()
            await asyncio.gather(*(train(trainer, each) for trainer in trainers))
            cpu_s, wall_s = time.process_time() - cpu_started_s, time.perf_counter() - started_s
            counted = sampled() - before
    return {"rollouts": counted, "cpu_s": cpu_s, "wall_s": wall_s}


async def memory(work: argparse.Namespace) -> dict[str, float]:
    """Return the resident bytes per waiting rollout, without its tokens."""
    with settings_for(work) as settings:
        async with tidegate.serve(**settings) as rollouts:
            wait_for_engines(rollouts, work.engines)
            before = resident_bytes()
            waiting = asyncio.create_task(first_batch(rollouts))
            while turns_on_engines(rollouts) < work.rollouts:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.2)
            grown = (resident_bytes() - before) / work.rollouts
            waiting.cancel()
            await asyncio.wait([waiting])
    return {"bytes": grown - PROMPT_TOKENS * CONTEXT_TOKEN_BYTES}


async def first_batch(rollouts: Rollouts) -> None:
    """Request a batch that never comes."""
    async for _ in rollouts.batches(itertools.count(), episode=solve):
        break


def turns_on_engines(rollouts: Scorer | SyncScorer) -> int:
    """Return the number of turns according to the engines' last heartbeats."""
    return sum(e.running_turns + e.waiting_turns for e in rollouts.statistics().engines)


def resident_bytes() -> int:
    """Return this process's resident memory after a garbage collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("throughput", "memory", "adapters"))
    add_work_options(parser)
    parser.add_argument("--in-process", action="store_true", help="no wire, one step per turn")
    parser.add_argument("--rollouts", type=int, default=256, help="that may be outstanding at once")
    parser.add_argument("--group-size", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="groups per batch")
    parser.add_argument("--adapters", type=int, default=1, help="trained at once")
    parser.add_argument("--warm-up", type=int, default=20, help="batches")
    parser.add_argument("--batches", type=int, default=100)
    work = parser.parse_args()
    torch.set_num_threads(1)
    if work.what == "throughput":
        print(json.dumps(throughput(work)))
    else:
        measure = memory if work.what == "memory" else adapters
        print(json.dumps(asyncio.run(measure(work))))


if __name__ == "__main__":
    main()
