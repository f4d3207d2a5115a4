"""How is a model trained with asynchronous rollouts? GRPO on a tool-using task; start from here.

    python -m examples.async_grpo                          # the demo
    python -m examples.async_grpo --mode sync              # or one-step
    python -m examples.async_grpo --pause abort            # or keep, wait
    python -m examples.async_grpo --colocated              # engines and trainer take turns
    python -m examples.async_grpo --dashboard 127.0.0.1:0  # in the browser
    python -m examples.async_grpo --model PATH             # any Qwen2, Qwen3 or Llama directory

The loop is in ``grpo.py``: batches come in, weights go out, and the engines go on generating
meanwhile. The task is in ``calculator.py``, the small model in ``tiny_model.py``.
"""

import argparse
import asyncio
import dataclasses
import itertools
import sys
import time
from pathlib import Path

import torch

import tidegate
from examples.calculator import solve, tasks
from examples.grpo import learn
from examples.tiny_model import make_model
from tidegate.orchestrator.records.report import write_report

MODES = {"sync": 0, "one-step": 1, "async": 2}
"""Mode -> how many versions old a trained token may be."""

HELD_OUT_SEED = 11
GROUPS_PER_BATCH = 16
GROUP_SIZE = 8


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train with asynchronous rollouts, and report.")
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face directory; left out, a small one is made")
    add("--mode", choices=MODES, default="async")
    add("--pause", choices=("abort", "keep", "wait"), default="keep", help="at weight updates")
    add("--kv-policy", choices=("keep", "recompute"), default="recompute")
    add("--max-staleness", type=int, help="in versions; left out, the mode's")
    add("--engines", type=int, default=2)
    add("--colocated", action="store_true", help="engines sleep while the trainer trains")
    add("--num-blocks", type=int, help="of each engine's KV cache; left out, 256 MiB of them")
    add("--quantize", choices=("int8", "fp8"), help="what engines round each version's weights to")
    add("--slots", type=int, default=16, help="turns that an engine decodes at once")
    add("--versions", type=int, default=60, help="weight versions to make")
    add("--groups-per-batch", type=int, default=GROUPS_PER_BATCH)
    add("--group-size", type=int, default=GROUP_SIZE)
    add("--held-out", type=int, default=512, help="tasks that measure, before and after")
    add("--learning-rate", type=float, default=3e-4)
    add("--correction", choices=("importance", "none"), default="importance")
    add("--seed", type=int, default=0)
    add("--runs", type=Path, default=Path("runs"), help="where runs and the model are kept")
    add("--dashboard", help="show the run under this HOST:PORT; port 0 takes a free one")
    add("--name", help="of this run; left out, made from the mode and the time")
    return parser.parse_args(arguments)


async def train(options: argparse.Namespace, run_directory: Path) -> None:
    """Measure, train, measure again; everything is recorded in ``run_directory``."""
    model_path, warm_up = find_model(options)
    held_out = list(itertools.islice(tasks("held_out", HELD_OUT_SEED), options.held_out))
    training = itertools.islice(
        tasks("train", options.seed), options.versions * options.groups_per_batch
    )
    async with tidegate.serve(
        model=model_path,
        engines=options.engines,
        max_running_turns=options.slots,
        max_staleness=staleness_bound(options),
        group_size=options.group_size,
        groups_per_batch=options.groups_per_batch,
        pause_mode=options.pause,
        kv_policy=options.kv_policy,
        quantize=options.quantize,
        num_blocks=options.num_blocks,
        run_directory=run_directory,
        dashboard=options.dashboard,
        seed=options.seed,
    ) as rollouts:
        if rollouts.dashboard_url is not None:
            print(f"dashboard: {rollouts.dashboard_url}", flush=True)
        gain = await learn(
            rollouts,
            solve,
            model=model_path,
            training=training,
            held_out=held_out,
            batches=options.versions,
            learning_rate=options.learning_rate,
            corrects=options.correction != "none",
            is_colocated=options.colocated,
        )
        rollouts.note(
            mode=options.mode,
            reward_before=gain.before,
            reward_after=gain.after,
            mismatch=gain.mismatch,
            memory_mb=gain.memory_mb,
            colocated=options.colocated,
            warm_up=warm_up,
        )


def staleness_bound(options: argparse.Namespace) -> int:
    """η: what was asked for, or what the mode means."""
    return MODES[options.mode] if options.max_staleness is None else options.max_staleness


def find_model(options: argparse.Namespace) -> tuple[Path, dict[str, object] | None]:
    """The directory given, or the small model, made now or found from last time."""
    if options.model is not None:
        return options.model, None
    path = options.runs / f"model-{options.seed}"
    report = make_model(
        path,
        seed=options.seed,
        on_progress=lambda p: print(
            f"warm-up: step {p.steps}, loss {p.loss:.3f}, accuracy {p.mastery.accuracy:.2f}",
            flush=True,
        ),
    )
    return path, dataclasses.asdict(report)


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status is 2 for what the user can mend, 130 for Ctrl-C."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    name = options.name or f"{options.mode}-{options.pause}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_directory = options.runs / name
    try:
        asyncio.run(train(options, run_directory))
        print(f"report: {write_report(run_directory)}")
    except tidegate.TidegateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
