"""Speed of the engine on a GPU, with an audit, in stages that together end within half an hour.

``python -m benchmarks.device [--json]`` runs the stages in order, each in a process of its own with
a time limit. Rows are printed, and appended to ``--rows FILE``, as they are measured, so a run that
is cut off leaves what it has measured; the same command continues after the last stage that ended.

    machine: device, releases, and the rates of a copy and of a large matrix product
    runs: runs with weight updates, audited token by token
    kernels: each kernel against torch and the roofline
    engine: tokens/s at 32, 128 and 512 requests, beside ``transformers`` continuous batching, and
        without CUDA graphs
    stall: stall of a weight update, as benchmarks.engine.steps

``--device cpu --shape tiny`` runs every stage with tiny models, without a GPU: a test of the
command, whose figures mean nothing.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from benchmarks.engine.shapes import SHAPES, Shape, dump, make_directory, requests
from benchmarks.table import ERROR_CHARACTERS, Figures, make_parser, print_figures, sample

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "device.jsonl"

ENDED, FAILED, OUT_OF_TIME = "ended", "failed", "out of time"
"""How a stage came to its end. A stage that the whole command's limit cut off has no such row, and
starts again."""

WITHOUT_GRAPHS = "tidegate without CUDA graphs"

LARGE = {
    "0.5b": Shape("Qwen2", SHAPES["0.5b"].fields, median_tokens=128, longest_tokens=512),
    "7b": Shape(  # Qwen2.5-7B
        "Qwen2",
        {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
        },
        median_tokens=128,
        longest_tokens=512,
    ),
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """Models and numbers of requests of a run of the benchmark."""

    models: dict[str, Shape]
    dtype: str
    concurrent: Sequence[int]
    """Numbers of requests, at least 4 each: a quarter of them warm an engine up."""
    tasks: int
    """Tasks of an audited run."""
    peer_timeout_s: float


SIZES = {
    "real": Size(
        models=LARGE,
        dtype="bfloat16",
        concurrent=(32, 128, 512),
        tasks=48,
        peer_timeout_s=150.0,
    ),
    "tiny": Size(
        models={"tiny": Shape("Qwen3", SHAPES["tiny"].fields, median_tokens=8, longest_tokens=16)},
        dtype="float32",
        concurrent=(4,),
        tasks=12,
        peer_timeout_s=150.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """Arguments of a stage."""

    device: str
    size: Size
    directory: Path
    """Directory of models, which stages share."""

    def model(self, name: str) -> Path:
        """Return a model's directory, made by the first stage that needs it."""
        path = self.directory / name
        if not (path / "made").exists():
            make_directory(
                path,
                self.size.models[name],
                self.size.dtype,
                tied=name != "7b",
                device=self.device,
            )
            (path / "made").touch()
        return path

    def requests(self, name: str, concurrent: int) -> Path:
        """Return a file of requests to a model."""
        path = self.directory / f"{name}-{concurrent}.json"
        path.write_text(dump(requests(self.size.models[name], concurrent)))
        return path


def machine(bench: Bench) -> Iterator[Row]:
    """Yield what the device is, and its rates."""
    import torch

    from benchmarks.kernels import rates

    yield _row("python", platform.python_version())
    for package in ("torch", "triton", "transformers", "msgspec", "pyzmq", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            yield _row(package, version(package))
    if bench.device != "cpu":
        yield _row("name", torch.cuda.get_device_name(bench.device))
        free, total = torch.cuda.mem_get_info(bench.device)
        yield _row("memory_free", free, "bytes")
        yield _row("memory", total, "bytes")
    measured = rates(bench.device, getattr(torch, bench.size.dtype))
    yield _row("copy", measured.bytes_per_us / 1e3, "GB/s")
    yield _row("matrix_product", measured.flops_per_us / 1e6, "TFLOP/s")


def runs(bench: Bench) -> Iterator[Row]:
    """Yield what audits of whole runs find, in the order of the architectures."""
    from tests.models import make_model_directory

    dtypes = ("float32",) if bench.device == "cpu" else ("float32", "bfloat16")
    architectures = ("qwen3",) if bench.device == "cpu" else ("qwen3", "gemma2")
    for architecture in architectures:
        for dtype in dtypes:
            with tempfile.TemporaryDirectory(dir=bench.directory) as directory:
                model = make_model_directory(Path(directory) / "model", architecture, dtype=dtype)
                name = f"{architecture} {dtype}"
                yield from _audited(bench, name, model, Path(directory) / "run")


def _audited(bench: Bench, name: str, model: Path, directory: Path) -> Iterator[Row]:
    from tidegate.observability.audit.audit import audit_run

    published = asyncio.run(_run(bench, model, directory))
    report = audit_run(directory)
    yield _row(f"{name}: versions published", published, "versions")
    yield _row(f"{name}: versions audited", report.versions, "versions")
    yield _row(f"{name}: tokens", report.tokens, "tokens")
    yield _row(f"{name}: tokens that agree", report.tokens_agreeing, "tokens")
    yield _row(f"{name}: tolerance", report.tolerance, "nats")
    if not report.agrees:
        raise RuntimeError(f"{name}: {' '.join(report.lines())}")


async def _run(bench: Bench, model: Path, directory: Path) -> int:
    """Train a model with noise in place of gradients; return how many versions were published."""
    import torch

    import tidegate
    from tidegate.engine.models.checkpoint import read_tensors

    async def two_turns(episode: tidegate.Episode, task: int) -> float:
        episode.append([10 + task % 40, 11, 12])
        await episode.generate(max_tokens=24)
        episode.append([13, 14])
        return float((await episode.generate(max_tokens=8)).token_ids[0] % 2)

    state = {name: tensor.clone() for name, tensor in read_tensors(model)}
    noise = torch.Generator().manual_seed(0)
    published = 0
    async with tidegate.serve(
        model=model,
        engines=1,
        device=bench.device,
        group_size=2,
        groups_per_batch=2,
        run_directory=directory,
    ) as rollouts:
        async for _ in rollouts.batches(range(bench.size.tasks), episode=two_turns):
            for tensor in state.values():
                tensor += 0.02 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
            await rollouts.publish(state)
            published += 1
    return published


def kernels(bench: Bench) -> Iterator[Row]:
    """Yield each kernel's time."""
    from benchmarks.kernels import REAL, TINY, cases, measure, rates

    sizes = TINY if bench.device == "cpu" else REAL
    limits = rates(bench.device, sizes.dtype)
    for case in cases(sizes, bench.device):
        yield asdict(measure(case, limits, bench.device))


def engine(bench: Bench) -> Iterator[Row]:
    """Yield tokens/s of our engine and of ``transformers``, smallest model first."""
    competitors = {
        "tidegate": ["benchmarks.engine.ours"],
        "transformers-continuous": ["benchmarks.engine.transformers_peer", "continuous"],
    }
    if bench.device != "cpu":
        competitors |= {WITHOUT_GRAPHS: competitors["tidegate"]}
    for name in bench.size.models:
        for concurrent in bench.size.concurrent:
            speeds: dict[str, float] = {}
            for who, (module, *mode) in competitors.items():
                case = f"{name} {bench.size.dtype} x{concurrent}, {who}"
                work = [*mode, str(bench.model(name)), str(bench.requests(name, concurrent))]
                try:
                    graphs = "0" if who == WITHOUT_GRAPHS else "1"
                    found = _sample(bench, [module, *work], TIDEGATE_CUDA_GRAPHS=graphs)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    yield _row(case, None, "tokens/s") | {"error": str(error)[-ERROR_CHARACTERS:]}
                    continue
                speeds[who] = found["tokens"] / found["wall_s"]
                row = _row(case, speeds[who], "tokens/s") | found
                if who != "tidegate" and "tidegate" in speeds:
                    row["ratio"] = speeds["tidegate"] / speeds[who]
                yield row


def stall(bench: Bench) -> Iterator[Row]:
    """Yield how long the longest decode step of an update is."""
    concurrent = bench.size.concurrent[:2][-1]
    for name in bench.size.models:
        work = [str(bench.model(name)), str(bench.requests(name, concurrent))]
        found = _sample(bench, ["benchmarks.engine.steps", *work])
        for measured, value in found.items():
            if measured != "overhead_share" or bench.device == "cpu":  # kernels run asynchronously
                unit = "of 1" if measured == "overhead_share" else "steps"
                yield _row(f"{name} x{concurrent}: {measured}", value, unit)


def _sample(bench: Bench, module: Sequence[str], **environment: str) -> Figures:
    command = [sys.executable, "-m", *module, "--device", bench.device]
    return sample(command, bench.size.peer_timeout_s, environment)


def _row(name: str, value: object, unit: str = "") -> Row:
    return {"name": name, "value": value, "unit": unit}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, and how long it may take."""

    rows: Callable[[Bench], Iterator[Row]]
    limit_s: float


STAGES = {
    "machine": Stage(machine, 90),
    "runs": Stage(runs, 150),
    "kernels": Stage(kernels, 180),
    "engine": Stage(engine, 600),
    "stall": Stage(stall, 300),
}
"""The stages in their order; the limits add up to half an hour."""


class Recorder:
    """Prints rows, and appends them to a file."""

    def __init__(self, file: Path, common: Row, *, as_json: bool) -> None:
        self._common = common
        self._as_json = as_json
        self._path = file
        file.parent.mkdir(parents=True, exist_ok=True)

    def ended(self) -> set[str]:
        """Return the stages of the same device and shape that have ended."""
        if not self._path.exists():
            return set()
        rows = [json.loads(line) for line in self._path.read_text().splitlines()]
        return {
            row["stage"]
            for row in rows
            if row["name"] == "stage" and self._common.items() <= row.items()
        }

    def add(self, row: Row) -> None:
        """Record a row."""
        with self._path.open("a") as file:
            file.write(json.dumps({**row, **self._common}) + "\n")
        print_figures({**row, **self._common}, as_json=self._as_json)


def run_stage(name: str, options: argparse.Namespace, recorder: Recorder, limit_s: float) -> None:
    """Run a stage in a process of its own, kill it at its limit, and record its rows."""
    stage_limit_s = STAGES[name].limit_s
    command = [sys.executable, "-m", "benchmarks.device", "--one", name]
    command += ["--device", options.device, "--shape", options.shape]
    command += ["--models", str(options.models)]
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        timer = threading.Timer(min(limit_s, stage_limit_s), _kill_group, [process])
        timer.start()
        try:
            assert process.stdout is not None
            _record(process.stdout, name, recorder)
            status = process.wait()
        finally:
            timer.cancel()
            _kill_group(process)  # workers that the stage left, or all of them if we are stopped
            process.wait()
        took_s = time.monotonic() - began_s
        if status == -signal.SIGKILL and limit_s < stage_limit_s:
            return  # the whole command's limit, not the stage's: it starts again
        how = {0: ENDED, -signal.SIGKILL: OUT_OF_TIME}.get(status, FAILED)
        row = _row("stage", round(took_s, 1), "s") | {"stage": name, "how": how}
        if how != ENDED:
            errors.seek(0)
            row["error"] = errors.read()[-ERROR_CHARACTERS:]
        recorder.add(row)


def _record(lines: IO[str], stage: str, recorder: Recorder) -> None:
    for line in lines:
        recorder.add(json.loads(line) | {"stage": stage})


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _refuse_without(device: str) -> str | None:
    """Return why the device can't be measured; None if it can."""
    from tidegate.engine.device.devices import find_device
    from tidegate.errors import ConfigError

    try:
        find_device(device)
    except ConfigError as error:
        return str(error)
    return None


def main() -> int:
    """Run the stages that have not ended yet, or one of them in this process."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu; default: cuda:0")
    parser.add_argument("--shape", choices=SIZES, default="real", help="default: real")
    parser.add_argument("--rows", type=Path, default=RESULTS, help=f"default: {RESULTS.name}")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="time for all stages; default: 30"
    )
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, help="only these, also if they have ended"
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=Path(tempfile.gettempdir()) / "tidegate-device-models",
        help="directory of the random models, 17 GB; they stay there for the next run",
    )
    parser.add_argument("--one", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        directory = options.models / options.shape
        directory.mkdir(parents=True, exist_ok=True)
        for row in STAGES[options.one].rows(Bench(options.device, SIZES[options.shape], directory)):
            print(json.dumps(row), flush=True)
        return 0
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a stage imports the kernels
    if (refusal := _refuse_without(options.device)) is not None:
        print(f"benchmarks.device: {refusal}", file=sys.stderr)
        return 2
    common = {"device": options.device, "shape": options.shape}
    recorder = Recorder(options.rows, common, as_json=options.json)
    ends_at_s = time.monotonic() + 60 * options.minutes
    left = [s for s in options.stages or STAGES if options.stages or s not in recorder.ended()]
    for name in left:
        if (limit_s := ends_at_s - time.monotonic()) > 0:
            run_stage(name, options, recorder, limit_s)
    missing = [name for name in left if name not in recorder.ended()]
    if missing:
        print(f"time is up before {', '.join(missing)}; run it again to go on", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
