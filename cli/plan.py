"""The `tidegate plan` command: prints predicted throughput and staleness for several settings.

:mod:`tidegate.simulation.planning` computes the predictions, :mod:`plan_table` formats them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.cli.conventions import echo
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload

EXAMPLES = (
    "tidegate plan runs/demo",
    "tidegate plan --engines 12 --max-running-turns 64 --step-ms 8 --running-turn-ms 0.12 \\",
    "              --mean-tokens 4000 --train-tokens-per-s 65000 --picture plan.png",
    "tidegate plan runs/demo --max-staleness 0,1,2,4,8 --pause-mode keep,abort",
    "tidegate plan runs/demo --engine-trainer-split 12:4,8:8 --batch-sizes 8,16,32",
)


def plan(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A finished run's directory; same as --from."),
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option("--from", help="Take speeds and lengths from a finished run.")
    ] = None,
    max_staleness: Annotated[
        str, typer.Option(help="Staleness bounds to compare, in weight versions.")
    ] = "0,1,2,4,8",
    pause_mode: Annotated[
        str, typer.Option(help="Pause modes to compare, e.g. keep,abort,wait.")
    ] = "",
    engine_trainer_split: Annotated[
        str,
        typer.Option(help="Numbers of engines and trainers to compare, e.g. 12:4,8:8."),
    ] = "",
    batch_sizes: Annotated[
        str, typer.Option(help="Batch sizes to compare, in groups, e.g. 32,64.")
    ] = "",
    engines: Annotated[
        int | None, typer.Option(min=1, help="Number of engines; needed without a run.")
    ] = None,
    max_running_turns: Annotated[
        int, typer.Option(min=1, help="Turns that an engine decodes at once.")
    ] = 64,
    step_ms: Annotated[float, typer.Option(min=0, help="Fixed time of a decode step.")] = 8.0,
    running_turn_ms: Annotated[
        float, typer.Option(min=0, help="Additional step time per running turn.")
    ] = 0.12,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1, help="Prefill speed.")] = 25_000.0,
    swap_s: Annotated[
        float, typer.Option(min=0, help="Stall of an engine per weight update.")
    ] = 0.1,
    mean_tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean length of a rollout, in tokens.")
    ] = None,
    sigma: Annotated[
        float,
        typer.Option(min=0, help="Standard deviation of the logarithm of a rollout's length."),
    ] = 0.8,
    tokens_max: Annotated[int, typer.Option(min=2, help="Longest rollout, in tokens.")] = 32_768,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Length of a prompt, in tokens.")] = 512,
    group_size: Annotated[int, typer.Option(min=1, help="Rollouts per group.")] = 8,
    groups_per_batch: Annotated[
        int | None, typer.Option(min=1, help="Groups per batch; default: the run's, or 64.")
    ] = None,
    trainers: Annotated[int, typer.Option(min=1, help="Number of trainers.")] = 1,
    train_tokens_per_s: Annotated[
        float | None,
        typer.Option(min=0, help="Trained tokens per second, of all trainers together."),
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Also simulate each choice; slower.")
    ] = True,
    versions: Annotated[int, typer.Option(min=2, help="Weight versions per simulated run.")] = 16,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Predict throughput and staleness for several settings, and recommend a staleness bound.

    Two predictions: closed forms, and the orchestrator itself over simulated engines in virtual
    time.
    """
    if run is not None and from_run is not None:
        raise ConfigError(f"{run} and --from {from_run} name two runs; give one")
    from_run = from_run or run
    options = dict(locals())
    from tidegate.cli import plan_table

    workload, base = _from_run(options) if from_run is not None else _from_options(options)
    rows = plan_table.rows(workload, base, options)
    for line in plan_table.json_lines(rows) if as_json else plan_table.lines(rows):
        echo(line)
    if picture is not None:
        from tidegate.simulation.planning.plan import plot_plan

        plot_plan(picture, [row for row in rows if row.varied == "max_staleness"])


def _from_options(options: dict[str, Any]) -> "tuple[PlanWorkload, PlanCandidate]":
    from tidegate.simulation.engine.spec import EngineCosts
    from tidegate.simulation.planning.workload import (
        PlanCandidate,
        PlanWorkload,
        log_normal_groups,
    )

    for name in ("engines", "mean_tokens", "train_tokens_per_s"):
        if options[name] is None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is required; or give --from RUN to measure it"
            )
    costs = EngineCosts(
        slots=options["max_running_turns"],
        step_s=options["step_ms"] / 1e3,
        running_turn_s=options["running_turn_ms"] / 1e3,
        prefill_tokens_per_s=options["prefill_tokens_per_s"],
        swap_s=options["swap_s"],
        prompt_tokens=options["prompt_tokens"],
        group_size=options["group_size"],
    )
    if not costs.step_s + costs.running_turn_s > 0:
        raise ConfigError("--step-ms and --running-turn-ms can't both be 0: steps take time")
    groups = log_normal_groups(
        mean_tokens=options["mean_tokens"],
        sigma=options["sigma"],
        tokens_max=options["tokens_max"],
        group_size=options["group_size"],
    )
    speed = options["train_tokens_per_s"] / options["trainers"]
    workload = PlanWorkload(groups=groups, costs=costs, trainer_tokens_per_s=speed)
    return workload, PlanCandidate(
        max_staleness=0,
        groups_per_batch=options["groups_per_batch"] or 64,
        engines=options["engines"],
        trainers=options["trainers"],
    )


def _from_run(options: dict[str, Any]) -> "tuple[PlanWorkload, PlanCandidate]":
    from dataclasses import replace

    from tidegate.cli.plan_table import measured_line
    from tidegate.simulation.planning.from_run import measured_run

    run = measured_run(options["from_run"])
    echo(measured_line(run), err=True)
    changed = {n: options[n] for n in ("engines", "groups_per_batch") if options[n] is not None}
    return run.workload, replace(run.candidate, **changed)
