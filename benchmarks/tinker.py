"""Speed of `tidegate tinker` through the SDK: samples and optimizer steps, against SkyRL's server.

    make test-skyrl test-tinker     # makes the Pythons of both
    .venv-tinker/bin/python -m benchmarks.tinker --skyrl .venv-skyrl/bin/python --json
    .venv-tinker/bin/python -m benchmarks.tinker --tenants-beside --json

Both servers serve the demos' tiny model at the same time, and are loaded in turn by the same client
(:mod:`benchmarks.peers.tinker_client`, with the SDK 0.24.1, which both read), in windows of some
seconds. A figure is the median of the windows, with the lowest and the highest. Each load is first
repeated untimed until JAX has compiled what it needs.

``--tenants-beside`` measures Tidegate's server alone: what one tenant's samples take while there is
no other, while another samples as much and trains (its share of the machine), and while that one
also publishes its weights every second. The three take turns, and each ratio is of one turn.
"""

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.processes import LineProcess, free_port, started
from benchmarks.table import make_parser, print_figures
from examples.tiny_model import make_model

CLIENT = Path(__file__).parent / "peers" / "tinker_client.py"

LOADS = (
    *(("sample", clients) for clients in (1, 4, 16)),
    *(("train", clients) for clients in (1, 4, 16)),
)
"""Operation, and number of tenants that repeat it at the same time."""

HEALTH = "/api/v1/healthz"

MODELS_MAX, RANK_MAX = 20, 8
"""SkyRL's server reserves memory for so many adapters, of this rank."""


@contextlib.contextmanager
def skyrl_server(python: Path, model: Path, folder: Path) -> Iterator[str]:
    """Run SkyRL's server with its JAX backend."""
    from examples.skyrl_tinker_server import UV  # needs the SDK

    uv = folder / "uv"
    uv.write_text(UV.format(python=python.absolute()))
    uv.chmod(0o755)
    port = free_port()
    config = json.dumps({"max_lora_adapters": MODELS_MAX, "max_lora_rank": RANK_MAX})
    command = [str(uv), "run", "python", "-m", "skyrl.tinker.api", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--base-model", str(model), "--backend", "jax"]
    command += ["--backend-config", config, "--checkpoints-base", f"{folder}/checkpoints"]
    command += ["--database-url", f"sqlite:///{folder}/tinker.db"]
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    url = f"http://127.0.0.1:{port}"
    with started(command, url + HEALTH, folder / "skyrl.log", environment):
        yield url


@contextlib.contextmanager
def tidegate_server(model: Path, folder: Path) -> Iterator[str]:
    """Run Tidegate's server, with a state directory: both servers' requests survive a crash."""
    port = free_port()
    command = [sys.executable, "-c", "from tidegate.cli import main; main()", "tinker"]
    command += ["--model", str(model), "--engines", "2", "--port", str(port)]
    command += ["--state-directory", str(folder / "state"), "--tenant-models", str(MODELS_MAX)]
    url = f"http://127.0.0.1:{port}"
    with started(command, url + HEALTH, folder / "tidegate.log", {}):
        yield url


class Client(LineProcess):
    """Client process of one server."""

    def __init__(self, python: Path, url: str, model: Path) -> None:
        environment = {**os.environ, "TINKER_TELEMETRY": "0"}
        super().__init__([str(python), str(CLIENT), url, str(model)], env=environment)

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # the SDK's threads would keep it
        super().__exit__(*error)

    def window(self, what: str, clients: int, seconds: float) -> dict[str, Any]:
        """Load the server for some seconds; return the client's counts and times."""
        self.send(f"{what} {clients} {seconds}")
        return self.result()

    def result(self) -> dict[str, Any]:
        """Return the counts and times of the window that was begun."""
        result: dict[str, Any] = json.loads(self.receive())
        return result


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


BESIDE: Mapping[str, str] = {"alone": "", "beside": "study", "publishing": "publish"}
"""What the other tenant does, by condition; nothing if empty."""

STREAMS = 4
"""Samples that each of two tenants has running."""


def tenants_beside(url: str, model: Path, seconds: float, turns: int) -> Iterator[dict[str, Any]]:
    """Yield a row per figure of one tenant's samples, under each condition."""
    python = Path(sys.executable)
    with Client(python, url, model) as one, Client(python, url, model) as other:
        one.window("sample", STREAMS, 3)
        other.window("publish", STREAMS, 3)
        found: dict[str, list[dict[str, Any]]] = {condition: [] for condition in BESIDE}
        for turn in range(turns):
            order = list(BESIDE)
            for condition in order[turn % 3 :] + order[: turn % 3]:
                if what := BESIDE[condition]:
                    other.send(f"{what} {STREAMS} {seconds}")
                found[condition].append(one.window("sample", STREAMS, seconds))
                if what:
                    other.result()
    by_condition = {condition: figures(windows) for condition, windows in found.items()}
    for (kind, name), (unit, _) in UNITS.items():
        if kind == "sample":
            yield beside_row(name, unit, {c: f[name] for c, f in by_condition.items()})


def beside_row(name: str, unit: str, values: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return a figure's row from its values by condition, in the order of the turns."""
    row: dict[str, Any] = {"name": f"sample_{name}", "unit": unit}
    row |= {c: round(statistics.median(of_turns), 2) for c, of_turns in values.items()}
    for ratio, above, below in (("share", "beside", "alone"), ("ratio", "publishing", "beside")):
        ratios = sorted(a / b for a, b in zip(values[above], values[below], strict=True))
        row[ratio] = round(statistics.median(ratios), 3)
        row[f"{ratio}_lowest"], row[f"{ratio}_highest"] = round(ratios[0], 3), round(ratios[-1], 3)
    return row


def main() -> None:
    """Start the servers, load them in turn, and print a row per figure."""
    parser = make_parser(__doc__)
    parser.add_argument("--skyrl", type=Path, help="Python with skyrl[tinker,jax]==0.3.0")
    parser.add_argument("--seconds", type=float, default=10, help="of one window")
    parser.add_argument("--windows", type=int, default=3, help="of each load")
    parser.add_argument("--warm-up-s", type=float, default=40, help="SkyRL's, of each load")
    parser.add_argument("--model", type=Path, help="its directory; default: made anew")
    parser.add_argument("--tenants-beside", action="store_true", help="without SkyRL")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that both servers end, too
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = options.model or folder / "model"
        if options.model is None:
            make_model(model)
        if options.tenants_beside:
            url = stack.enter_context(tidegate_server(model, folder))
            for row in tenants_beside(url, model, options.seconds, options.windows):
                print_figures(row, as_json=options.json)
            return
        python = options.skyrl or Path(sys.executable)
        url = stack.enter_context(tidegate_server(model, folder))
        ours = stack.enter_context(Client(python, url, model))
        theirs = None
        if options.skyrl:
            url = stack.enter_context(skyrl_server(options.skyrl, model, folder))
            theirs = stack.enter_context(Client(python, url, model))
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
                print_figures(row, as_json=options.json)


if __name__ == "__main__":
    main()
