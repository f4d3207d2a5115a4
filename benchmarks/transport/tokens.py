"""CPU cost of receiving tokens, from the socket to the rollout, against zmq.asyncio.

``python -m benchmarks.transport tokens`` calls :func:`rows`; ``engine.py`` is the sender. The path
is the run's own: socket, decode, checks, receive window, rollout lookup, append, version spans. The
peer's transport delivers the same frames to the same path. All CPU time of this process counts,
except for starting a wave of turns.
"""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio

from benchmarks.table import Figures, Row, by_turns, spread_row
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.fleet.fleet import Fleet
from tidegate.orchestrator.settings.config import FleetSettings
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.transport.messages import Message, SamplingParams, encode
from tidegate.transport.router import RouterSocket

TURNS = 128
TURN_TOKENS = 1024
GROUP_SIZE = 8
CREDIT_STEPS = 256
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Work:
    """Amount and pace of the tokens."""

    tokens: int
    """Tokens per turn and step."""
    waves: int
    steps_per_s: float = 0.0
    """Steps per second; 0: as fast as possible."""

    @property
    def steps_per_wave(self) -> int:
        """Number of steps until the turns have ended."""
        return TURN_TOKENS // self.tokens


BULK = Work(tokens=16, waves=24)
SINGLE = Work(tokens=1, waves=4)
PACED = Work(tokens=1, waves=2, steps_per_s=1000.0)


class Subject:
    """A core and a fleet that process frames, and the time they take."""

    def __init__(self, work: Work, send: Callable[[bytes, Message], bool]) -> None:
        self._work = work
        self._fleet = Fleet(
            FleetSettings(
                heartbeat_interval_s=1.0,
                engine_timeout_s=30.0,
                orchestrator_timeout_s=30.0,
                credit_steps=CREDIT_STEPS,
            ),
            send,
            newest_version=lambda adapter: work.waves * work.steps_per_wave,
        )
        self._steps_left = self._waves_left = 0
        self._started_s = self._started_cpu_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Figures] = self._loop.create_future()

    def take(self, frames: list[tuple[bytes, bytes]]) -> None:
        """Process frames as the scheduler does."""
        for item in self._fleet.receive(frames, self._loop.time()):
            match item:
                case ev.StepArrived():
                    self._core.handle(item)
                    self._steps_left -= 1
                    if not self._steps_left:
                        self._end_wave()
                case ev.EngineJoined():
                    self._joined = item
                    self._waves_left = self._work.waves
                    self._begin_wave()
                    self._started_s, self._started_cpu_s = time.perf_counter(), time.process_time()
        self._fleet.acknowledge(self._fleet.take_acks())

    def _begin_wave(self) -> None:
        policy = BoundedStaleness(max_staleness=0, groups_per_batch=TURNS // GROUP_SIZE)
        self._core = core = Core(Rules(policy=policy, group_size=GROUP_SIZE))
        core.handle(self._joined)
        for _ in range(TURNS // GROUP_SIZE):
            for command in core.handle(ev.TaskArrived(None)):
                if isinstance(command, ev.StartEpisode):
                    command.rollout.extend([1] * 128)
                    sampling = SamplingParams(max_tokens=TURN_TOKENS)
                    core.handle(ev.TurnRequested(command.rollout.rollout_id, sampling))
        self._steps_left = self._work.steps_per_wave

    def _end_wave(self) -> None:
        generated = self._core.ledger.in_flight
        assert generated == TURNS * TURN_TOKENS, f"{generated} tokens have arrived"
        self._waves_left -= 1
        if self._waves_left:
            before_s = time.thread_time()
            self._begin_wave()
            self._started_cpu_s += time.thread_time() - before_s
            return
        cpu_s = time.process_time() - self._started_cpu_s
        wall_s = time.perf_counter() - self._started_s
        tokens = self._work.waves * TURNS * TURN_TOKENS
        self.done.set_result(
            {
                "tokens_per_cpu_s": tokens / cpu_s,
                "cpu_us_per_chunk": 1e6 * cpu_s / (tokens / self._work.tokens),
                "core_share": cpu_s / wall_s,
            }
        )


# ---------------------------------------------------------------------------------- transports


async def ours(work: Work, directory: Path) -> Figures:
    """Receive with the run's own socket."""
    router = RouterSocket(None, name="benchmark")
    subject = Subject(work, router.send)
    router.attach(asyncio.get_running_loop(), subject.take)
    try:
        async with engine(router.address, work):
            return await subject.done
    finally:
        router.close()


async def zmq_asyncio(work: Work, directory: Path) -> Figures:
    """Receive with ``await recv_multipart()`` of zmq.asyncio."""
    address = f"ipc://{directory}/socket"
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(address)
        answers: list[Awaitable[object]] = []

        def send(peer: bytes, message: Message) -> bool:
            answers.append(router.send_multipart([peer, encode(message)]))
            return True

        subject = Subject(work, send)
        async with engine(address, work):
            while not subject.done.done():
                peer, frame = await router.recv_multipart()
                subject.take([(peer, frame)])
                while answers:
                    await answers.pop()
            return subject.done.result()


@contextlib.asynccontextmanager
async def engine(address: str, work: Work) -> AsyncIterator[None]:
    """Start the sending process; exceeding the timeout is an error."""
    options = {
        "turns": TURNS,
        "tokens": work.tokens,
        "steps": work.steps_per_wave,
        "waves": work.waves,
        "steps-per-s": work.steps_per_s,
    }
    command = [sys.executable, "-m", "benchmarks.transport.engine", address]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with subprocess.Popen(command) as process:  # noqa: ASYNC220
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield
        finally:
            process.kill()


def measured(transport: Callable[[Work, Path], Awaitable[Figures]], work: Work) -> Figures:
    """Measure one run."""

    async def run() -> Figures:
        with tempfile.TemporaryDirectory() as directory:
            return await transport(work, Path(directory))

    return uvloop.run(run())


def rows() -> Iterator[Row]:
    """Yield tokens per CPU-second for two chunk sizes, and the cost of a paced stream."""
    for work, suffix in ((BULK, ""), (SINGLE, "_single"), (PACED, "")):
        figures = by_turns(
            {
                "ours": partial(measured, ours, work),
                "zmq.asyncio": partial(measured, zmq_asyncio, work),
            }
        )
        wanted = {
            "tokens_per_cpu_s": (
                f"tokens_per_s_end_to_end{suffix}",
                f"tokens/s per core, {work.tokens} per chunk",
            ),
            "cpu_us_per_chunk": (f"cpu_us_per_chunk{suffix}", f"us, {work.tokens} per chunk"),
        }
        if work is PACED:
            pace = f"of a core, {PACED.steps_per_s:.0f} steps/s of {TURNS} tokens"
            wanted = {"core_share": ("paced_core_share", pace)}
        for figure, (name, unit) in wanted.items():
            mine, theirs = figures["ours"][figure], figures["zmq.asyncio"][figure]
            yield spread_row(name, unit, mine, theirs, "zmq.asyncio")
