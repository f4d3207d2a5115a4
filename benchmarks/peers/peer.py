"""Shared parts of the peers' scripts: options, HTTP engine process, and the JSON result line.

Standard library only, because it runs in a peer's Python.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROMPT = list(range(128))
"""Token ids of the prompt."""


def options(description: str | None) -> argparse.Namespace:
    """Parse the options, named as those of ``benchmarks.orchestrator.subject``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("what", choices=("http", "in_process"))
    parser.add_argument("--tokens", type=int, default=64, help="per turn")
    parser.add_argument("--turn-s", type=float, default=0.0, help="in_process: time a turn takes")
    parser.add_argument("--rollouts", type=int, default=1024, help="at once")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="groups per batch")
    parser.add_argument("--warm-up", type=int, default=8, help="batches")
    parser.add_argument("--batches", type=int, default=32)
    return parser.parse_args()


@contextmanager
def http_engine(tokens: int) -> Iterator[str]:
    """Start the HTTP engine in another process; yield its ``host:port``."""
    command = [sys.executable, str(Path(__file__).with_name("http_engine.py"))]
    command += ["--tokens", str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


class Stopwatch:
    """Measures wall time, and CPU time of this process."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()
        self._cpu_since_s = time.process_time()

    def print_line(self, rollouts: int) -> None:
        """Print the time since creation as JSON."""
        wall_s = time.perf_counter() - self._since_s
        cpu_s = time.process_time() - self._cpu_since_s
        print(json.dumps({"rollouts": rollouts, "cpu_s": cpu_s, "wall_s": wall_s}))
