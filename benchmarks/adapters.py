"""Overhead of driving an external engine (vLLM, SGLang) through Tidegate, in tokens/s.

``VLLM_PYTHON=PYTHON python -m benchmarks.adapters [--json] [--rounds 5]`` starts vLLM with a small
random model and loads it alternately through a Tidegate run and directly through its own HTTP API,
with the same prompts, lengths, order, sampling options and concurrency. It prints ``name, value,
unit, peer, ratio``, all medians; the ratio is the median of the per-round ratios, and each round
runs its three ways in another order. ``SGLANG_PYTHON=PYTHON … --server sglang`` starts SGLang on a
CPU, as ``make test-sglang`` does, with a tiny model.

All times run from the first request to the last complete answer. The direct load is measured twice:
with whole answers, which suffice for a batch trainer, and with streams token by token, of which a
crash loses nothing. The run's adapter reads streams of ``--stream-interval-tokens``.

On a busy machine, wall time includes other work. So the server's CPU seconds and vLLM's steps are
reported as well, which show what each way makes the server do.
"""

import argparse
import asyncio
import os
import re
import secrets
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import tidegate
from benchmarks.engine.shapes import SHAPES, Request, requests
from benchmarks.processes import free_port, started
from benchmarks.table import Row, make_parser, show
from tests.models import make_model_directory

ANSWER_TIMEOUT_S = 900.0
"""Timeout of a whole round, on a busy machine."""

MODEL_SHAPES = {"vllm": "small", "sglang": "tiny"}
"""Shape of the model and of the requests. Even the tiny one takes SGLang without CUDA tens of
milliseconds a step."""

ENVIRONMENTS = {
    "vllm": {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    },
    "sglang": {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path("tests/engine/external/sglang_on_a_cpu").resolve()),
    },
}

OPTIONS = {
    "vllm": (
        *("-m", "vllm.entrypoints.openai.api_server", "--max-model-len", "512", "--enforce-eager"),
        *("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
        "--disable-uvicorn-access-log",
    ),
    "sglang": (
        *("-m", "sglang.launch_server", "--device", "cpu", "--attention-backend", "torch_native"),
        *("--dtype", "float32", "--sampling-backend", "pytorch", "--skip-server-warmup"),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "65536"),
        *("--disable-overlap-schedule", "--log-level", "warning"),
    ),
}

NAMES_OF_OPTIONS = {
    "vllm": ("--model", "--max-num-seqs"),
    "sglang": ("--model-path", "--max-running-requests"),
}
"""Options that name the model, and the number of turns at once."""

BODIES: dict[str, tuple[str, Callable[[Request, str], dict[str, Any]]]] = {
    "vllm": (
        "/inference/v1/generate",
        lambda request, salt: {
            "token_ids": request.prompt,
            "cache_salt": salt,
            "sampling_params": {
                "max_tokens": request.output_tokens,
                "temperature": 1.0,
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": 0,
            },
        },
    ),
    "sglang": (
        "/generate",
        lambda request, salt: {
            "input_ids": request.prompt,
            "extra_key": salt,
            "sampling_params": {
                "max_new_tokens": request.output_tokens,
                "temperature": 1.0,
                "ignore_eos": True,
            },
            "return_logprob": True,
        },
    ),
}
"""Path and body of a request for tokens and log-probs, by kind of server; the salt avoids
prefix-cache hits."""

WAYS = ("tidegate", "whole", "streamed")


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over all requests, by one way."""

    took_s: float
    server_cpu_s: float
    """CPU time of all server processes."""
    steps: int
    """Steps of the server's engine; 0 if it does not report them."""


class Meter:
    """Time and CPU time from the first request to the last answer."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._made = self._begun = self._ended = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), cpu_s(self._session)

    def begin(self) -> None:
        """Set the begin. Later calls have no effect."""
        if self._begun is self._made:
            self._begun = self._now()

    def end(self) -> None:
        """Set the end."""
        self._ended = self._now()

    def round(self, steps: int) -> Round:
        """Return what was measured."""
        took_s, cpu_s = (end - begin for begin, end in zip(self._begun, self._ended, strict=True))
        return Round(took_s, cpu_s, steps)


def main() -> None:
    """Measure, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--server", choices=sorted(OPTIONS), default="vllm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--stream-interval-tokens", type=int, default=16, help="of the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate") as directory:
        fields = SHAPES[MODEL_SHAPES[options.server]].fields
        # An untied head, because vLLM does not update a tied one on a CPU.
        model = make_model_directory(Path(directory) / "model", tied=False, **fields)
        with server(options.server, model, options.concurrent) as (address, session):
            show(measure(address, model, options, session), as_json=options.json)


@contextmanager
def server(kind: str, model: Path, concurrent: int) -> Iterator[tuple[str, int]]:
    """Run a server in its own Python; yield its URL and its session id."""
    python = os.environ.get(f"{kind.upper()}_PYTHON")
    if python is None:
        raise SystemExit(f"{kind.upper()}_PYTHON must name a Python that has {kind}")
    port = free_port()
    of_model, of_concurrency = NAMES_OF_OPTIONS[kind]
    command = [python, *OPTIONS[kind], "--host", "127.0.0.1", "--port", str(port)]
    command += [of_model, str(model), of_concurrency, str(concurrent)]
    url = f"http://127.0.0.1:{port}"
    log = model.parent / "server.log"
    with started(command, f"{url}/health", log, ENVIRONMENTS[kind]) as session:
        yield url, session


def measure(address: str, model: Path, options: argparse.Namespace, session: int) -> Iterator[Row]:
    """Run the rounds; discard the first as a warm-up."""
    kind, url = options.server, f"{options.server}+{address}"
    workload = requests(SHAPES[MODEL_SHAPES[kind]], options.requests)
    interval_tokens, concurrent = options.stream_interval_tokens, options.concurrent
    ways: dict[str, Callable[[Meter], Coroutine[Any, Any, None]]] = {
        "tidegate": lambda meter: through_tidegate(
            meter, url, model, workload, concurrent, interval_tokens
        ),
        "whole": lambda meter: directly(
            meter, kind, address, workload, concurrent, is_streamed=False
        ),
        "streamed": lambda meter: directly(
            meter, kind, address, workload, concurrent, is_streamed=True
        ),
    }
    rounds: list[dict[str, Round]] = []
    for number in range(options.rounds + 1):
        order = WAYS[number % 3 :] + WAYS[: number % 3]
        rounds.append({way: one_round(ways[way], address, session) for way in order})
    del rounds[0]
    tokens = sum(request.output_tokens for request in workload)
    yield from rows(rounds, kind, tokens, options.concurrent)


def rows(
    rounds: Sequence[Mapping[str, Round]], kind: str, tokens: int, concurrent: int
) -> Iterator[Row]:
    """Return the lines of the table."""
    for way in WAYS[1:]:
        ratios = [each[way].took_s / each["tidegate"].took_s for each in rounds]
        ours, theirs = (
            statistics.median(tokens / each[one].took_s for each in rounds)
            for one in ("tidegate", way)
        )
        name = f"{kind} through tidegate / {way} answers directly, {concurrent} at once"
        yield Row(name, ours, "tokens/s", theirs, statistics.median(ratios))
        yield Row("  lowest of the rounds' ratios", min(ratios), "")
        yield Row("  highest", max(ratios), "")
    for field, unit in (("server_cpu_s", "CPU s of the server"), ("steps", "steps of the engine")):
        for way in WAYS[1:]:
            if all(getattr(each[way], field) for each in rounds):
                yield from paired(
                    f"  {unit}, through tidegate / {way} directly", unit, field, way, rounds
                )


def paired(
    name: str, unit: str, field: str, way: str, rounds: Sequence[Mapping[str, Round]]
) -> Iterator[Row]:
    """Return the medians of a field and of the rounds' ratios, and the ratios' range."""
    through, direct = (
        [float(getattr(each[one], field)) for each in rounds] for one in ("tidegate", way)
    )
    ratios = [ours / theirs for ours, theirs in zip(through, direct, strict=True)]
    medians = statistics.median(through), statistics.median(direct)
    yield Row(name, medians[0], unit, medians[1], statistics.median(ratios))
    yield Row("    lowest and highest of the rounds' ratios", min(ratios), "", max(ratios))


def one_round(
    run: Callable[[Meter], Coroutine[Any, Any, None]], address: str, session: int
) -> Round:
    """Measure one round of one way."""
    meter, before_steps = Meter(session), steps(address)
    asyncio.run(asyncio.wait_for(run(meter), ANSWER_TIMEOUT_S))
    return meter.round(steps(address) - before_steps)


def cpu_s(session: int) -> float:
    """Return the CPU time of a session's processes so far, from their /proc/PID/stat."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def steps(address: str) -> int:
    """Return the number of steps of vLLM's engine so far; 0 if the server does not report it."""
    text = ""
    with suppress(OSError), urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    counts = re.findall(r"^vllm:iteration_tokens_total_count\{.*\} ([\d.e+]+)$", text, re.M)
    return int(sum(map(float, counts)))


async def through_tidegate(
    meter: Meter,
    url: str,
    model: Path,
    workload: list[Request],
    concurrent: int,
    interval_tokens: int,
) -> None:
    """Measure from the first turn's submission to the last turn's end, in one batch."""
    left = len(workload)
    gate = asyncio.Semaphore(concurrent)

    async def episode(episode: tidegate.Episode, task: int) -> float:
        request = workload[task]
        episode.append(request.prompt)
        async with gate:
            meter.begin()
            turn = await episode.generate(max_tokens=request.output_tokens, stop_token_ids=())
        nonlocal left
        left -= 1
        if not left:
            meter.end()
        assert len(turn.token_ids) == request.output_tokens
        return 0.0

    async with tidegate.serve(
        model=model,
        engine_urls=[url],
        group_size=1,
        groups_per_batch=len(workload),
        max_staleness=0,
        temperature=1.0,
        stream_interval_tokens=interval_tokens,
    ) as rollouts:
        async for _ in rollouts.batches(iter(range(len(workload))), episode=episode):
            break


async def directly(
    meter: Meter,
    kind: str,
    address: str,
    workload: list[Request],
    concurrent: int,
    *,
    is_streamed: bool,
) -> None:
    """Measure from the first request to the last answer read and decoded."""
    import aiohttp

    path, body_of = BODIES[kind]
    salt = secrets.token_hex(8)
    gate = asyncio.Semaphore(concurrent)

    async def send(session: aiohttp.ClientSession, request: Request) -> None:
        body = msgspec.json.encode(body_of(request, salt) | {"stream": is_streamed})
        headers = {"Content-Type": "application/json"}
        async with gate, session.post(address + path, data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            if not is_streamed:
                msgspec.json.decode(await response.read())
                return
            rest = b""
            async for data in response.content.iter_any():
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    text = event.removeprefix(b"data:").strip()
                    if text != b"[DONE]":
                        msgspec.json.decode(text)

    unhurried = aiohttp.ClientTimeout(total=None)  # aiohttp's default timeout is five minutes
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=unhurried) as session:
        meter.begin()
        await asyncio.gather(*(send(session, request) for request in workload))
        meter.end()


if __name__ == "__main__":
    main()
