"""Fuzzing of every place where frames and HTTP requests are read: a million frames and more.

``python -m tests.fuzz [--frames N] [--bodies N] [--seed S] [--json]`` prints ``name, value, unit,
limit, holds`` and exits with status 1 if anything raised, hung or leaked memory. Half of the frames
go to the orchestrator's fleet and core in this process, where a seed replays exactly; a quarter to
an engine, a quarter to a whole run over its socket. HTTP bodies go to the gateway, and a fifth as
many to the vLLM- and SGLang-compatible server, and to the Tinker server where its SDK is installed:
up to their size limits, beside oversized headers and half requests. ``make test`` sends a small
share of this.
"""

import argparse
import ctypes
import gc
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import uvloop

from tests.fuzz.fuzzed_engine import FuzzedEngine
from tests.fuzz.fuzzed_fleet import FuzzedFleet
from tests.fuzz.fuzzed_http import (
    LARGE_SHARE,
    WARM_UP_LARGE_SHARE,
    FuzzedGateway,
    FuzzedServer,
)
from tests.fuzz.fuzzed_run import FuzzedRun
from tests.long_runs.checks import Row, show

FRAMES_DEFAULT = 1_250_000
"""Default number of frames; four in five turn out to be malformed, a million."""

BODIES_DEFAULT = 125_000
"""Default number of bodies; as many are malformed, a hundred thousand."""

SERVER_PART = 5
"""Divisor of the bodies for servers with an engine that samples tokens behind them."""

FAILURES_SHOWN_MAX = 5

WARM_UP_SHARE = 0.2
"""Share of the frames after which everything is loaded and cached."""

WARM_UP_BODIES = 600
"""Requests before those that are counted, a tenth of them large, because the first ones of each
kind load modules, start threads and fill caches: 18 MiB in the gateway, 51 in the server."""

GROWTH_MIB_MAX = 16.0
"""Maximum memory growth of the process after the warm-up: what the allocator may round and keep."""


@dataclass(slots=True)
class Outcome:
    place: str
    frames: int = 0
    malformed: int = 0
    """Frames counted as malformed; most others came too late or twice, and some were valid."""
    healthy: int = 0
    """Steps and turns of the healthy peer that were served meanwhile."""
    growth_mib: float = 0.0
    exceptions: int = 0
    story: str = ""

    def rows(self) -> list[Row]:
        name, healthy, raised = f"fuzz_{self.place}", self.healthy, self.exceptions
        growth, limit = round(self.growth_mib, 1), GROWTH_MIB_MAX
        return [
            Row(f"{name}_frames", self.frames, "frames"),
            Row(f"{name}_malformed", self.malformed, "frames"),
            Row(f"{name}_healthy_served", healthy, "steps or turns", "> 0", healthy > 0),
            Row(f"{name}_growth", growth, "MiB", f"< {limit:g}", self.growth_mib < limit),
            Row(f"{name}_exceptions", raised, "exceptions", "0", raised == 0),
        ]

    def feed(self, frames: int, feed: Callable[[], bytes]) -> None:
        """Feed frames one by one; record exceptions with the frame, and continue."""
        warm_up = int(frames * WARM_UP_SHARE)
        before_mib = 0.0
        for number in range(frames):
            if number == warm_up:
                before_mib = rss_mib()
            try:
                feed()
            except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
                self.fail(f"at frame {number}: {traceback.format_exc()}")
            self.frames += 1
        self.growth_mib = rss_mib() - before_mib

    def fail(self, why: str) -> None:
        self.exceptions += 1
        if self.exceptions <= FAILURES_SHOWN_MAX:
            self.story += f"{self.place}: {why}\n"


def rss_mib() -> float:
    """Return this process's resident memory in MiB, without what its allocator keeps free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def fuzz_fleet(frames: int, seed: int) -> Outcome:
    outcome, fleet = Outcome("fleet"), FuzzedFleet(seed)
    outcome.feed(frames, fleet.feed)
    outcome.malformed, outcome.healthy = fleet.fleet.malformed_frames, fleet.healthy_steps
    return outcome


def fuzz_engine(frames: int, seed: int) -> Outcome:
    outcome = Outcome("engine")
    with tempfile.TemporaryDirectory() as directory:
        engine = FuzzedEngine(seed, Path(directory))
        try:
            outcome.feed(frames, engine.feed)
            if not engine.still_serves():
                outcome.fail("the engine serves no turn any more")
        finally:
            engine.close()
        for failure in engine.failures:
            outcome.fail(failure)
        outcome.malformed, outcome.healthy = engine.malformed, engine.steps
    return outcome


def fuzz_wire(frames: int, seed: int) -> Outcome:
    """Fuzz a whole run, over its socket, flooded by another process."""
    outcome = Outcome("wire", frames=frames)
    with tempfile.TemporaryDirectory() as directory, FuzzedRun(Path(directory)) as run:
        try:
            run.flood(frames, seed)
            run.await_frames(int(frames * WARM_UP_SHARE))
            before_mib = rss_mib()
            run.await_frames(frames)
            outcome.growth_mib = rss_mib() - before_mib
            run.evaluate()
        except Exception:  # noqa: BLE001 - as above
            outcome.fail(traceback.format_exc())
        outcome.malformed, outcome.healthy = run.malformed, run.episodes
    return outcome


def fuzz_http(bodies: int, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        fuzzed = FuzzedGateway(seed, Path(directory))
        return _fuzz_requests(
            "http", bodies, fuzzed, lambda number, each: uvloop.run(fuzzed.feed(number, each))
        )


def fuzz_server(bodies: int, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        server = FuzzedServer(seed, Path(directory))
        return _fuzz_requests("server", bodies, server.fuzzed, server.feed)


def fuzz_tinker(bodies: int, seed: int) -> Outcome:
    """Fuzz the Tinker server with an engine and a trainer, over HTTP, and start it again."""
    from tests.fuzz.fuzzed_tinker import FuzzedTinker  # needs the SDK

    with tempfile.TemporaryDirectory() as directory:
        server = FuzzedTinker(seed, Path(directory))
        return _fuzz_requests("tinker", bodies, server.fuzzed, server.feed)


def _fuzz_requests(
    place: str,
    bodies: int,
    fuzzed: FuzzedGateway,
    feed: Callable[[int, Callable[[int], None]], object],
) -> Outcome:
    """Send requests with ``feed``, which calls its second argument with the number of each."""
    outcome = Outcome(place, frames=bodies)
    before_mib = 0.0
    fuzzed.large_share = WARM_UP_LARGE_SHARE

    def each(number: int) -> None:
        nonlocal before_mib
        if number == WARM_UP_BODIES:
            before_mib = rss_mib()
            fuzzed.large_share = LARGE_SHARE

    # it warns of requests that are not HTTP
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        feed(WARM_UP_BODIES + bodies, each)
    except Exception:  # noqa: BLE001 - as above
        outcome.fail(traceback.format_exc())
    outcome.growth_mib = rss_mib() - before_mib
    for failure in fuzzed.failures:
        outcome.fail(failure)
    outcome.malformed, outcome.healthy = fuzzed.refused, fuzzed.healthy
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=FRAMES_DEFAULT)
    parser.add_argument("--bodies", type=int, default=BODIES_DEFAULT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    half, quarter = arguments.frames // 2, arguments.frames // 4
    places = ((fuzz_fleet, half), (fuzz_engine, quarter), (fuzz_wire, quarter))
    part = arguments.bodies // SERVER_PART
    bodies = ((fuzz_http, arguments.bodies), (fuzz_server, part), (fuzz_tinker, part))
    status = 0
    for fuzz, count in (*places, *bodies):
        if not count or (fuzz is fuzz_tinker and find_spec("tinker") is None):
            continue
        outcome = fuzz(count, arguments.seed)
        status |= show(outcome.rows(), as_json=arguments.json)
        sys.stderr.write(outcome.story)
    return status


if __name__ == "__main__":
    sys.exit(main())
