"""Our engine's speed: a real worker process, driven over the wire protocol.

``python -m benchmarks.engine.ours MODEL REQUESTS`` prints one JSON object: tokens, and the worker's
CPU and wall time for them, I/O threads included. Then the same prompts get answers of equal length,
so that all run in many steps, to measure the time of a full step.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.engine.shapes import Request, load
from benchmarks.table import Figures
from tests.engine.orchestra import Orchestra
from tidegate.transport.messages import (
    FromEngine,
    Hello,
    SamplingParams,
    Step,
    TurnFailed,
    WeightsFailed,
    Welcome,
)

CREDIT_STEPS = 256
READ_INTERVAL_S = 0.004
STEPS_PER_ACK = 32
"""About as many steps as the tiny model takes in this interval."""

FULL_TOKENS = 64
"""Length of the equal answers, in tokens."""

GPU_STEP_TOKENS = 8192
"""Tokens of a step on a GPU, so that prefills fill it."""

TIMEOUT_S = 3600.0


class Driver(Orchestra):
    """Orchestrator's end of one engine, which only counts."""

    tokens = 0
    open_turns = 0
    """Turns that were submitted and have not ended."""

    def __init__(self, directory: Path, model: Path, options: Sequence[str], program: str) -> None:
        super().__init__(directory, model, options, program=program)
        self.acknowledges = False  # each step of its own
        self.kept: list[Step] = []
        """Steps since the list was last cleared."""

    def ask(self, requests: Sequence[Request], seed: int) -> None:
        """Submit all requests at once."""
        self.open_turns += len(requests)
        for one in requests:
            own_seed = seed + self._next_turn
            self.submit(one.prompt, SamplingParams(max_tokens=one.output_tokens, seed=own_seed))

    def read_answers(self) -> None:
        """Read until all turns have ended."""
        self.read_until(lambda: not self.open_turns)

    def cpu_s(self) -> float:
        """Return the CPU time of the worker's process and its other ranks so far."""
        process = psutil.Process(self.process.pid)
        all_times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return float(sum(times.user + times.system for times in all_times))

    def _take_rows(self, step: Step) -> None:
        self.kept.append(step)
        self.tokens += len(step.token_ids) // 4
        self.open_turns -= len(step.finish) - step.finish.count(0)
        if self.steps % STEPS_PER_ACK == 0:
            self.acknowledge()

    def _read_one(self) -> FromEngine:
        self._waited_s = 0.0  # a step may take long; a worker that has ended sends no heartbeat
        if not self._socket.poll(0):
            time.sleep(READ_INTERVAL_S)  # a wakeup for each step would compete with the worker
        message = super()._read_one()
        if isinstance(message, WeightsFailed | TurnFailed):
            raise SystemExit(f"the engine refuses: {message}")
        return message


@contextmanager
def driven(
    model: Path,
    concurrent: int,
    device: str,
    *arguments: str,
    program: str = "tidegate.engine.worker",
) -> Iterator[Driver]:
    """Run a worker until the end of the `with`; it has the machine's memory for itself."""
    options = ["--threads", "1", "--device", device, "--max-running-turns", str(concurrent)]
    options += ["--memory-sharers", "1"]
    if device != "cpu":
        options += ["--max-step-tokens", str(GPU_STEP_TOKENS)]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        driver = Driver(Path(directory), model, [*options, *arguments], program)
        stack.enter_context(driver)
        driver.await_one(Hello)
        driver.send(
            Welcome(
                heartbeat_interval_s=1.0,
                orchestrator_timeout_s=TIMEOUT_S,
                credit_steps=CREDIT_STEPS,
            )
        )
        yield driver


def measure(model: Path, requests: Sequence[Request], device: str) -> Figures:
    """Warm up on some of the requests, then measure all of them."""
    with driven(model, len(requests), device) as driver:
        few = requests[: -(-len(requests) // 4)]
        # Reversed, so that no prompt that is measured is in the prefix cache.
        driver.ask([Request(one.prompt[::-1], one.output_tokens) for one in few], seed=0)
        driver.read_answers()
        driver.tokens = 0
        cpu_before_s, began_s = driver.cpu_s(), time.perf_counter()
        driver.ask(requests, seed=1000)
        driver.read_answers()
        measured = {
            "tokens": float(driver.tokens),
            "cpu_s": driver.cpu_s() - cpu_before_s,
            "wall_s": time.perf_counter() - began_s,
        }
        driver.kept.clear()
        driver.ask([Request(one.prompt, FULL_TOKENS) for one in requests], seed=2000)
        driver.read_answers()
        full = [step.busy_us for step in driver.kept if len(step.turns) // 4 == len(requests)]
        # Long prompts do not all run at once.
        return measured | ({"full_step_us": statistics.median(full)} if full else {})


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
    print(json.dumps(measure(options.model, options.requests, options.device)))
