"""Speed of `tidegate tinker` through the SDK: samples and optimizer steps, against SkyRL's server.

A command that no module imports. It starts both servers, and ``peers/tinker_client.py``, as
processes.

    make test-skyrl test-tinker     # makes the Pythons of both
    .venv-tinker/bin/python -m benchmarks.tinker --skyrl .venv-skyrl/bin/python --json

Both servers serve the demos' tiny model at the same time, and are loaded in turn by the same client
(:mod:`benchmarks.peers.tinker_client`, with the SDK 0.24.1, which both read), in windows of some
seconds. A figure is the median of the windows, with the lowest and the highest. Each load is first
repeated untimed until JAX has compiled what it needs.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.skyrl_tinker_server import UV, end_group, wait_until_healthy
from examples.tiny_model import make_model

CLIENT = Path(__file__).parent / "peers" / "tinker_client.py"

LOADS = (
    *(("sample", clients) for clients in (1, 4, 16)),
    *(("train", clients) for clients in (1, 4, 16)),
)
"""Operation, and number of tenants that repeat it at the same time."""

MODELS_MAX, RANK_MAX = 20, 8
"""SkyRL's server reserves memory for so many adapters, of this rank."""


@contextlib.contextmanager
def started(command: list[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """Run a server until the end of the `with`; yield its URL."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(process, f"{url}/api/v1/healthz")
            yield url
        finally:
            end_group(process)


@contextlib.contextmanager
def skyrl_server(python: Path, model: Path, folder: Path) -> Iterator[str]:
    """Run SkyRL's server with its JAX backend."""
    uv = folder / "uv"
    uv.write_text(UV.format(python=python.absolute()))
    uv.chmod(0o755)
    port = free_port()
    config = json.dumps({"max_lora_adapters": MODELS_MAX, "max_lora_rank": RANK_MAX})
    command = [str(uv), "run", "python", "-m", "skyrl.tinker.api", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--base-model", str(model), "--backend", "jax"]
    command += ["--backend-config", config, "--checkpoints-base", f"{folder}/checkpoints"]
    command += ["--database-url", f"sqlite:///{folder}/tinker.db"]
    path = f"{folder}:{os.environ['PATH']}"
    with started(command, port, folder / "skyrl.log", PATH=path, JAX_PLATFORMS="cpu") as url:
        yield url


@contextlib.contextmanager
def tidegate_server(model: Path, folder: Path) -> Iterator[str]:
    """Run Tidegate's server, with a state directory: both servers' requests survive a crash."""
    port = free_port()
    command = [sys.executable, "-c", "from tidegate.cli import main; main()", "tinker"]
    command += ["--model", str(model), "--engines", "2", "--port", str(port)]
    command += ["--state-directory", str(folder / "state"), "--tenant-models", str(MODELS_MAX)]
    with started(command, port, folder / "tidegate.log") as url:
        yield url


def free_port() -> int:
    """Return a port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Client:
    """Client process of one server."""

    def __init__(self, python: Path, url: str, model: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(CLIENT), url, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TINKER_TELEMETRY": "0"},
        )

    def window(self, what: str, clients: int, seconds: float) -> dict[str, Any]:
        """Load the server for some seconds; return the client's counts and times."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, clients, seconds, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the client has ended; its error is above")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        """End the client."""
        self._process.kill()
        self._process.wait()


def figures(windows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return each figure of the windows, by its name."""
    return {
        "rate": [each["done"] / each["wall_s"] for each in windows],
        "p50_ms": [1e3 * statistics.median(each["times_s"]) for each in windows],
        "p99_ms": [
            1e3 * sorted(each["times_s"])[int(0.99 * len(each["times_s"]))] for each in windows
        ],
    }


UNITS = {
    ("sample", "rate"): ("round trips/s", 1.0),
    ("sample", "p50_ms"): ("ms", 1.0),
    ("sample", "p99_ms"): ("ms", 1.0),
    ("train", "rate"): ("optimizer steps/min", 60.0),
    ("train", "p50_ms"): ("ms", 1.0),
}
"""Unit of each figure, and what a second's figure is multiplied by."""


def rows_of(
    what: str, clients: int, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield a row per figure of a load."""
    mine, peers = figures(ours), figures(theirs) if theirs else {}
    for (kind, name), (unit, factor) in UNITS.items():
        if kind != what:
            continue
        values = sorted(value * factor for value in mine[name])
        peer = sorted(value * factor for value in peers.get(name, ()))
        row = {
            "name": f"{what}_{name}",
            "clients": clients,
            "value": round(statistics.median(values), 2),
            "lowest": round(values[0], 2),
            "highest": round(values[-1], 2),
            "unit": unit,
            "peer": "skyrl 0.3.0" if peer else None,
        }
        if peer:
            middle = statistics.median(peer)
            row |= {
                "peer_value": round(middle, 2),
                "peer_lowest": round(peer[0], 2),
                "peer_highest": round(peer[-1], 2),
                "ratio": round(statistics.median(values) / middle, 2),
            }
        yield row


def main() -> None:
    """Start the servers, load them in turn, and print a row per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skyrl", type=Path, help="Python with skyrl[tinker,jax]==0.3.0")
    parser.add_argument("--seconds", type=float, default=10, help="of one window")
    parser.add_argument("--windows", type=int, default=3, help="of each load")
    parser.add_argument("--warm-up-s", type=float, default=40, help="SkyRL's, of each load")
    parser.add_argument("--model", type=Path, help="its directory; default: made anew")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that both servers end, too
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = options.model or folder / "model"
        make_model(model)
        python = options.skyrl or Path(sys.executable)
        ours = Client(python, stack.enter_context(tidegate_server(model, folder)), model)
        stack.callback(ours.close)
        theirs = None
        if options.skyrl:
            url = stack.enter_context(skyrl_server(options.skyrl, model, folder))
            theirs = Client(python, url, model)
            stack.callback(theirs.close)
        for what, clients in LOADS:
            ours.window(what, clients, 3)
            if theirs is not None:
                theirs.window(what, clients, options.warm_up_s)
            pairs = []
            for _ in range(options.windows):
                mine = ours.window(what, clients, options.seconds)
                pairs.append((mine, theirs and theirs.window(what, clients, options.seconds)))
            done = [theirs for _, theirs in pairs if theirs]
            for row in rows_of(what, clients, [mine for mine, _ in pairs], done):
                print(json.dumps(row) if options.json else text_of(row), flush=True)


def text_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    peer = f", {row['peer_value']:.4g} of {row['peer']}, {row['ratio']}x" if row["peer"] else ""
    spread = f"{row['lowest']:.4g} to {row['highest']:.4g}"
    what = f"{row['name']}, {row['clients']} clients"
    return f"{what}: {row['value']:.4g} {row['unit']} ({spread}){peer}"


if __name__ == "__main__":
    main()
