"""Efficiency and staleness of each staleness policy, in virtual time, against a published model.

``python -m benchmarks.scheduling`` runs the real orchestrator in virtual time over 12 simulated
engines and a trainer on 4 machines (16 and 16 for policies that share them), and prints for each
run, beside the figures of the published model of the same machines:

    efficiency: unmasked trained tokens per second, over those of machines that are never idle
    max_staleness: largest lag of any trained token, in versions, warm-up included
    mean_staleness: mean lag of each rollout's oldest token, in versions
    mixed_share: share of trained rollouts that two or more versions sampled
    masked_share: share of trained tokens that were too old for the loss
    wasted_share: share of generated tokens that were discarded
    length_bias: mean length of trained rollouts over that of the given tasks
    tail_bias: share of rollouts longer than half the cap, over that of the given tasks
    speedup_over_sync: trained tokens per second over those of sync-colocated
    orchestrator_cpu_share: CPU-seconds of the orchestrator per virtual second. A step message has
        up to 128 tokens of each turn here and one in reality, so this is the cost of deciding;
        benchmarks.orchestrator measures the wire's

All but the last are deterministic for a seed. Without options: every policy on reasoning-32k.
``--bounds`` runs nothing, and prints what no policy exceeds (:mod:`benchmarks.scheduling.bounds`).
``--experiments`` prints what other ideas change (:mod:`benchmarks.scheduling.experiments`), and
``--trajectories`` the efficiency of agents by their number per engine slot.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.scheduling.experiments import EXPERIMENTS, experiment_rows, trajectory_rows
from benchmarks.scheduling.policies import POLICIES, SYNC, Variant, variants
from benchmarks.scheduling.rows import Row, bound_rows, read, rows
from benchmarks.scheduling.run import Outcome, run_once
from benchmarks.scheduling.workloads import RHO, WORKLOADS, Workload
from benchmarks.table import make_parser, show

MODES = ("keep", "abort", "wait")

BOUND_ETAS = (1, 2, 4, 8)
"""Values of η for which ``--bounds`` prints bounds, unless ``--eta`` gives others."""


def main() -> None:
    """Print the table."""
    options = _options()
    if options.trajectories:
        show(trajectory_rows(WORKLOADS["agentic"], options.seed), as_json=options.json)
        return
    if options.experiments is not None:
        names, etas = options.experiments or list(EXPERIMENTS), options.eta or [2, 4]
        for workload in map(WORKLOADS.__getitem__, options.workload):
            if options.versions is not None:
                workload = workload.of_versions(options.versions)
            show(experiment_rows(names, etas, options.seeds, workload), as_json=options.json)
        return
    table: list[Row] = []
    for run in _chosen(options):
        show(run, as_json=options.json)
        table += run
    if options.picture is not None:
        from benchmarks.scheduling.picture import draw

        draw(table, options.picture)


def _chosen(options: argparse.Namespace) -> Iterator[list[Row]]:
    if options.read:
        yield from read(options.read)
    elif options.bounds:
        for workload in map(WORKLOADS.__getitem__, options.workload):
            for eta in options.eta or BOUND_ETAS if workload.turns == 1 else ():
                yield from bound_rows(workload, eta)
    else:
        yield from _all_runs(options)


def _all_runs(options: argparse.Namespace) -> Iterator[list[Row]]:
    for name in options.workload:
        workload = WORKLOADS[name]
        if options.versions is not None:
            workload = workload.of_versions(options.versions)
        yield from _runs(replace(workload, rho=options.rho), options)


def _runs(workload: Workload, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows of each run of a workload."""
    sync = _run(workload, Variant(SYNC, POLICIES[SYNC], 0), "keep", options.seed)
    for variant in variants(options.policy, options.eta, is_eager=options.eager):
        # All pause modes are equal for policies with a barrier: nothing runs while weights change.
        for mode in options.mode[:1] if variant.policy.is_barrier else options.mode:
            is_sync = variant.name == SYNC
            outcome = sync if is_sync else _run(workload, variant, mode, options.seed)
            yield rows(workload, variant, mode, outcome, sync)


def _run(workload: Workload, variant: Variant, mode: str, seed: int) -> Outcome:
    started_s = time.perf_counter()
    outcome = run_once(workload, variant, mode=mode, seed=seed)
    took_s = time.perf_counter() - started_s
    about = f"{workload.name} {variant.name} eta={variant.eta} {mode}"
    print(f"# {about}: {outcome.steps} steps in {took_s:.0f} s", file=sys.stderr, flush=True)
    return outcome


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=["reasoning-32k"])
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--eta", type=int, nargs="+", help="instead of each policy's own choice")
    parser.add_argument("--mode", choices=MODES, nargs="+", default=["keep"])
    parser.add_argument("--all", action="store_true", help="every workload, policy and mode")
    parser.add_argument("--versions", type=int, help="of a run, warm-up included")
    parser.add_argument("--rho", type=float, default=RHO, help="trainer seconds over engines'")
    parser.add_argument("--eager", action="store_true", help="without just-in-time admission")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--read", type=Path, nargs="+", help="show what --json wrote; run nothing")
    parser.add_argument("--bounds", action="store_true", help="print upper bounds; run nothing")
    parser.add_argument("--experiments", choices=EXPERIMENTS, nargs="*", help="these ideas, or all")
    parser.add_argument("--trajectories", action="store_true", help="five runs of agents")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of an experiment")
    parser.add_argument("--picture", type=Path, help="draw the table into this file")
    options = parser.parse_args()
    if options.all:
        options.workload, options.policy = list(WORKLOADS), list(POLICIES)
        options.mode = list(MODES)
    return options


if __name__ == "__main__":
    main()
