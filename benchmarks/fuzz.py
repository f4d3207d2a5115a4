"""Fuzzing of every place where frames and HTTP requests are read: a million frames and more.

``python -m benchmarks.fuzz [--frames N] [--bodies N] [--seed S] [--json]`` prints ``name, value,
unit`` and ends with status 1 if anything raised, hung or grew. Half of the frames go to the
orchestrator's fleet and core in this process, where a seed replays exactly; a quarter to an engine,
a quarter to a whole run over its socket. Bodies go to the gateway, and a fifth as many to the
vLLM-compatible server, over HTTP: up to their limits, beside oversized headers and half requests.
"""

import argparse
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import uvloop

from benchmarks.fuzz_engine import FuzzedEngine
from benchmarks.fuzz_fleet import FuzzedFleet
from benchmarks.fuzz_http import FuzzedGateway, FuzzedServer
from benchmarks.fuzz_wire import FuzzedRun
from benchmarks.table import Row, show

FRAMES_DEFAULT = 1_250_000
"""Four in five turn out to be malformed: a million."""

BODIES_DEFAULT = 125_000
"""As many of them are malformed: a hundred thousand."""

SERVER_PART = 5
"""A fifth as many bodies go to the vLLM-compatible server: behind it an engine samples tokens."""

FAILURES_SHOWN_MAX = 5

WARM_UP_SHARE = 0.2
"""Of the frames: what is loaded and cached on the way is in place after them."""

GROWTH_MIB_MAX = 16.0
"""Of the whole process, after the warm-up: what the allocator may round and keep."""


@dataclass(slots=True)
class Outcome:
    """What came of the frames at one place."""

    place: str
    frames: int = 0
    malformed: int = 0
    """Counted as such; of the others, most came too late or twice, and some were right."""
    healthy: int = 0
    """Steps and turns of the healthy peer that were served meanwhile."""
    growth_mib: float = 0.0
    exceptions: int = 0
    story: str = ""

    def rows(self) -> list[Row]:
        """The figures."""
        return [
            Row(f"fuzz_{self.place}_frames", self.frames, "frames"),
            Row(f"fuzz_{self.place}_malformed", self.malformed, "frames"),
            Row(f"fuzz_{self.place}_healthy_served", self.healthy, "steps or turns"),
            Row(f"fuzz_{self.place}_growth", round(self.growth_mib, 1), "MiB"),
            Row(f"fuzz_{self.place}_exceptions", self.exceptions, "exceptions"),
        ]

    @property
    def is_harmless(self) -> bool:
        """Whether it all went as it should."""
        return not self.exceptions and self.healthy > 0 and self.growth_mib < GROWTH_MIB_MAX

    def feed(self, frames: int, feed: Callable[[], bytes]) -> None:
        """Feed frames one by one; what raises is told with the frame, and feeding goes on."""
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
        """Count something that must not be."""
        self.exceptions += 1
        if self.exceptions <= FAILURES_SHOWN_MAX:
            self.story += f"{self.place}: {why}\n"


def rss_mib() -> float:
    """Memory that this process has in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def fuzz_fleet(frames: int, seed: int) -> Outcome:
    """The orchestrator's fleet and core, without a socket."""
    outcome, fleet = Outcome("fleet"), FuzzedFleet(seed)
    outcome.feed(frames, fleet.feed)
    outcome.malformed, outcome.healthy = fleet.fleet.malformed_frames, fleet.healthy_steps
    return outcome


def fuzz_engine(frames: int, seed: int) -> Outcome:
    """An engine's loop, over its socket."""
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
    """A whole run, over its socket, flooded by another process."""
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
    """The gateway, over HTTP."""
    outcome = Outcome("http", frames=bodies)
    warm_up, before_mib = int(bodies * WARM_UP_SHARE), 0.0

    def each(number: int) -> None:
        nonlocal before_mib
        if number == warm_up:
            before_mib = rss_mib()

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # warns of what is not HTTP
    with tempfile.TemporaryDirectory() as directory:
        fuzzed = FuzzedGateway(seed, Path(directory))
        try:
            uvloop.run(fuzzed.feed(bodies, each))
        except Exception:  # noqa: BLE001 - as above
            outcome.fail(traceback.format_exc())
    outcome.growth_mib = rss_mib() - before_mib
    for failure in fuzzed.failures:
        outcome.fail(failure)
    outcome.malformed, outcome.healthy = fuzzed.refused, fuzzed.healthy
    return outcome


def fuzz_server(bodies: int, seed: int) -> Outcome:
    """The vLLM-compatible server with an engine, over HTTP."""
    outcome = Outcome("server", frames=bodies)
    warm_up, before_mib = int(bodies * WARM_UP_SHARE), 0.0

    def each(number: int) -> None:
        nonlocal before_mib
        if number == warm_up:
            before_mib = rss_mib()

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        server = FuzzedServer(seed, Path(directory))
        try:
            server.feed(bodies, each)
        except Exception:  # noqa: BLE001 - as above
            outcome.fail(traceback.format_exc())
    outcome.growth_mib = rss_mib() - before_mib
    for failure in server.fuzzed.failures:
        outcome.fail(failure)
    outcome.malformed, outcome.healthy = server.fuzzed.refused, server.fuzzed.healthy
    return outcome


def main() -> int:
    """Run all five and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=FRAMES_DEFAULT)
    parser.add_argument("--bodies", type=int, default=BODIES_DEFAULT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    half, quarter = arguments.frames // 2, arguments.frames // 4
    outcomes = []
    places = ((fuzz_fleet, half), (fuzz_engine, quarter), (fuzz_wire, quarter))
    bodies = ((fuzz_http, arguments.bodies), (fuzz_server, arguments.bodies // SERVER_PART))
    for fuzz, count in (*places, *bodies):
        if not count:
            continue
        outcome = fuzz(count, arguments.seed)
        outcomes.append(outcome)
        show(outcome.rows(), as_json=arguments.json)
        sys.stderr.write(outcome.story)
    return 0 if all(outcome.is_harmless for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
