"""Orchestrator cost per step message with up to 1,000 engines, and recovery from a node's death.

``python -m benchmarks.scale [--json] [--only PART …]`` prints ``name, value, unit, peer, ratio``. A
command that no module imports. Built on ``tidegate.serve``, and on Ray for one part.

    simulated: CPU time of the run's whole process per step message of 64 rows, one token each, all
        rollout costs included: 10, 100 and 1,000 simulated engines of 64 slots, in a process of
        their own, at the same 1,000 steps/s in all; the peer is 10 engines. 2.5 minutes
    real: the same for 2, 8 and 32 real worker processes with a random tiny model, 8 slots each; the
        peer is 2. They share the machine's cores, so more engines step more slowly. 4 minutes on 2
        cores, 7 GB
    node: seconds from a Ray node's death (SIGKILL of all its processes) to the next batch and to
        its detection, and from a new node to its engine; needs Ray. 2 minutes
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tidegate
from benchmarks.orchestrator.subject import WEIGHTS, settings_for, solve, wait_for_engines
from benchmarks.table import Row, compared, show

STEPS_PER_S = 1000
"""Steps per second of all engines together: a third of a core's work, so that the orchestrator
never falls behind."""

SLOTS = 64
TURN_STEPS = 32
MEASURED_S = 20.0
SIMULATED = (10, 100, 1000)
REAL = (2, 8, 32)
REAL_SLOTS = 8
START_TIMEOUT_S = 600.0
STORE_BYTES = 100 * 1024 * 1024


def simulated(engines: int) -> dict[str, float]:
    """Measure this many simulated engines."""
    step_s = engines / STEPS_PER_S
    work = argparse.Namespace(
        engines=engines,
        slots=SLOTS,
        tokens=TURN_STEPS,
        steps=TURN_STEPS,
        turn_s=step_s * TURN_STEPS,
        step_s=step_s,
        rollouts=engines * SLOTS * 5 // 4,  # a batch more than run at once, or slots would be empty
        group_size=8,
        batch=engines * SLOTS // 8 // 4,
        in_process=False,
    )
    with settings_for(work) as settings, tidegate.serve_sync(**settings) as rollouts:
        wait_for_engines(rollouts, engines)
        return _measured(rollouts, WEIGHTS, warm_up_steps=2 * engines * TURN_STEPS)


def real(engines: int) -> dict[str, float]:
    """Measure this many worker processes."""
    from tests.models import make_model_directory

    with tempfile.TemporaryDirectory() as directory:
        settings: dict[str, Any] = {
            "model": make_model_directory(Path(directory) / "model", vocab_size=256),
            "engines": engines,
            "group_size": 8,
            "groups_per_batch": max(1, engines // 4),
            "max_staleness": 8,
            "max_running_turns": REAL_SLOTS,
            "max_tokens": TURN_STEPS,
            "engine_start_timeout_s": START_TIMEOUT_S,
            "engine_timeout_s": START_TIMEOUT_S,
        }
        with tidegate.serve_sync(**settings) as rollouts:
            weights = load_file(settings["model"] / "model.safetensors")
            return _measured(rollouts, weights, warm_up_steps=engines * TURN_STEPS)


def _measured(
    rollouts: tidegate.SyncRollouts, weights: dict[str, torch.Tensor], *, warm_up_steps: int
) -> dict[str, float]:
    """Measure the CPU time and steps of some seconds, from one batch to another."""
    begun: tuple[float, float, int, int] | None = None
    now = (0.0, 0.0, 0, 0)
    for _ in rollouts.batches(itertools.count(), episode=solve):
        now = _taken(rollouts)
        if begun is None and now[2] >= warm_up_steps:
            begun = now
        if begun is not None and now[0] - begun[0] >= MEASURED_S:
            break
        rollouts.publish(weights)
    assert begun is not None
    wall_s, cpu_s, steps, rows = (after - before for after, before in zip(now, begun, strict=True))
    return {"wall_s": wall_s, "cpu_s": cpu_s, "steps": steps, "rows": rows}


def _taken(rollouts: tidegate.SyncRollouts) -> tuple[float, float, int, int]:
    engines = rollouts.statistics().engines
    steps, rows = sum(e.steps for e in engines), sum(e.rows for e in engines)
    return time.monotonic(), time.process_time(), steps, rows


def flat_rows(kind: str, counts: tuple[int, ...]) -> Iterator[Row]:
    """Compare each count with the first, each in its own process."""
    first: float | None = None
    for count in counts:
        command = [sys.executable, "-m", "benchmarks.scale", "--subject", kind, str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        reported = json.loads(done.stdout.splitlines()[-1])
        cost_us = reported["cpu_s"] / reported["steps"] * 1e6
        what = f"{kind}: {count} engines, {reported['steps'] / reported['wall_s']:.0f} steps/s"
        what = f"{what}, {reported['rows'] / reported['steps']:.0f} rows each"
        yield compared(f"{what}; peer: {counts[0]} engines", "us CPU/step message", cost_us, first)
        first = first or cost_us


def node_rows(_: str, nodes: tuple[int, ...]) -> Iterator[Row]:
    """Run on a Ray cluster whose nodes are processes of this machine, and kill one."""
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        return
    from tests.models import make_model_directory

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES}
    )
    for _node in range(nodes[0]):
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = make_model_directory(Path(directory) / "model", vocab_size=256)
            reported = _killed(cluster, model, nodes[0])
    finally:
        ray.shutdown()
        cluster.shutdown()
    for name, value in reported.items():
        yield Row(f"node: 1 of {nodes[0]} dies: {name}", value, "s")


def _killed(cluster: Any, model: Path, nodes: int) -> dict[str, float]:
    reported: dict[str, float] = {}
    with tidegate.serve_sync(
        model=model,
        engines=nodes,
        cluster="ray",
        group_size=4,
        groups_per_batch=2,
        max_staleness=4,
        max_tokens=TURN_STEPS,
        engine_start_timeout_s=START_TIMEOUT_S,
    ) as rollouts:
        batches = _trained(rollouts, load_file(model / "model.safetensors"))
        for _ in range(4):
            next(batches)
        killed_s = time.monotonic()
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        removed_s = time.monotonic()
        next(batches)
        reported["until a batch of the others"] = time.monotonic() - killed_s
        _until(batches, lambda: len(rollouts.statistics().engines) < nodes)
        reported["until the run knows"] = time.monotonic() - killed_s
        reported["of which ray.cluster_utils took to kill it"] = removed_s - killed_s
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        added_s = time.monotonic()
        _until(batches, lambda: len(rollouts.statistics().engines) == nodes)
        reported["from a new node to its engine"] = time.monotonic() - added_s
        assert rollouts.statistics().ledger.error == 0
    return reported


def _trained(
    rollouts: tidegate.SyncRollouts, weights: dict[str, torch.Tensor]
) -> Iterator[tidegate.Batch]:
    for batch in rollouts.batches(itertools.count(), episode=solve):
        yield batch
        rollouts.publish(weights)


def _until(batches: Iterator[Any], is_so: Callable[[], bool]) -> None:
    """Train on until a condition holds."""
    while not is_so():
        next(batches)


PARTS: dict[str, tuple[Callable[[str, tuple[int, ...]], Iterator[Row]], tuple[int, ...]]] = {
    "simulated": (flat_rows, SIMULATED),
    "real": (flat_rows, REAL),
    "node": (node_rows, (3,)),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--counts", type=int, nargs="+", help="of engines, in place of the usual")
    parser.add_argument("--subject", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.subject is not None:
        kind, count = options.subject
        print(json.dumps({"simulated": simulated, "real": real}[kind](int(count))))
        return
    _raise_file_limit()
    for part in options.only:
        rows, counts = PARTS[part]
        show(rows(part, tuple(options.counts or counts)), as_json=options.json)


def _raise_file_limit() -> None:
    """Raise the limit of open files: a thousand connections need a thousand at either end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
