"""GRPO with asynchronous rollouts, on a tool-using task: the demo, and a trainer to start from.

    python -m examples.async_grpo                          # sync, one-step and async, compared
    python -m examples.async_grpo --mode async             # one of them alone
    python -m examples.async_grpo --pause-mode abort            # or keep, wait
    python -m examples.async_grpo --colocated              # engines and trainer take turns
    python -m examples.async_grpo --step-time-s 0          # engines as fast as this machine
    python -m examples.async_grpo --mode async --dashboard 127.0.0.1:0  # in the browser
    python -m examples.async_grpo --model PATH             # any Qwen2, Qwen3 or Llama directory
    make demo-real                                         # a pretrained model, in a chat

The loop is in ``grpo.py``: it takes batches and publishes weights while the engines keep
generating. The task is in ``calculator.py``, the small model in ``tiny_model.py``, the table that
compares the modes in ``compare_modes.py``.

Engines compute every token, but no step takes less than ``--step-time-s``, which is the pace of a
large model on an accelerator. Without pacing, a CPU generates with a model of 0.3 million
parameters about as fast as it trains it, and engines and trainer compete for its cores.
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tidegate
from examples.calculator import Split, long_tailed_tasks, solve, tasks
from examples.compare_modes import comparison_text, publish_text, sample_text
from examples.grpo import learn
from examples.tiny_model import find_model
from examples.word_lists import list_words, word_tasks
from tidegate.observability.reports.comparison import read_runs
from tidegate.observability.reports.pictures import draw_comparison
from tidegate.observability.reports.report import write_report
from tidegate.orchestrator.episodes.runner import EpisodeFunction

MODES = {"sync": 0, "one-step": 1, "async": 2}
"""Staleness bound of each mode, in weight versions."""

TASKS: dict[str, tuple[Callable[[Split, int], Iterator[Any]], EpisodeFunction]] = {
    "long-tail": (long_tailed_tasks, solve),
    "short": (tasks, solve),
    "words": (word_tasks, list_words),
}
"""Source of tasks, and their episode, by name."""

STEP_TIME_S = 0.02
"""Minimum step time of paced engines: 50 tokens per second and turn, a common speed of large models
on accelerators. A batch then takes two or three seconds, and its training step less than half a
second."""

TARGET_REWARD = 0.75
"""Reward whose time the comparison shows: most of the way from .3 to the final reward, where it
rises too fast for one batch of hard sums to move the time by much."""

LATEST = "latest"
"""Name of the link to the newest comparison's directory, beside the runs."""

HELD_OUT_SEED = 11
GROUPS_PER_BATCH = 16
GROUP_SIZE = 8


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train with asynchronous rollouts, and report.")
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face directory; default: create a small model")
    add("--mode", choices=MODES, help="default: run all, one after the other, and compare")
    add(
        "--task",
        choices=TASKS,
        default="long-tail",
        help="lengths of sums; or words: lists of words, in a chat",
    )
    add("--step-time-s", type=float, default=STEP_TIME_S, help="minimum time of an engine's step")
    add(
        "--pause-mode",
        choices=("abort", "keep", "wait"),
        default="keep",
        help="what a weight update does to running turns",
    )
    add("--kv-policy", choices=("keep", "recompute"), default="recompute", help="of kept turns")
    add("--max-staleness", type=int, help="in versions; implies --mode async")
    add("--engines", type=int, default=2, help="number of engine processes")
    add("--colocated", action="store_true", help="engines sleep while the trainer trains")
    add("--num-kv-blocks", type=int, help="KV blocks per engine; default: by the free memory")
    add(
        "--quantization",
        choices=("int8", "fp8"),
        help="format to which engines round the weights",
    )
    add(
        "--deterministic",
        action="store_true",
        help="engines give the same bits in any batch, for tidegate audit --exact",
    )
    add("--max-running-turns", type=int, default=32, help="turns that an engine decodes at once")
    add("--versions", type=int, default=24, help="number of weight versions to train")
    add("--groups-per-batch", type=int, default=GROUPS_PER_BATCH)
    add("--group-size", type=int, default=GROUP_SIZE)
    add("--held-out", type=int, default=256, help="number of tasks to evaluate")
    add("--evaluate-every", type=int, help="in versions; default: only before and after")
    add("--learning-rate", type=float, default=3e-4)
    add("--last-layers", type=int, help="train and publish these layers only; default: all")
    add("--rows-max", type=int, help="train so many rollouts of a batch, of the largest advantages")
    add("--target-reward", type=float, default=TARGET_REWARD, help="whose time is compared")
    add("--correction", choices=("importance", "none"), default="importance")
    add("--seed", type=int, default=0)
    add("--runs", type=Path, default=Path("runs"), help="directory of the runs and the model")
    add("--dashboard", help="HOST:PORT of the dashboard; port 0: any free one")
    add("--name", help="the run's name; default: from the mode and the time")
    options = parser.parse_args(arguments)
    if options.mode is None and options.max_staleness is not None:
        options.mode = "async"
    return options


async def train(options: argparse.Namespace, mode: str, run_directory: Path) -> None:
    """Train, and evaluate meanwhile; everything is recorded in ``run_directory``."""
    model_path, warm_up = model_of(options)
    make_tasks, episode = TASKS[options.task]
    held_out = list(itertools.islice(make_tasks("held_out", HELD_OUT_SEED), options.held_out))
    training = list(
        itertools.islice(
            make_tasks("train", options.seed), options.versions * options.groups_per_batch
        )
    )
    bound = MODES[mode] if options.max_staleness is None else options.max_staleness
    async with tidegate.serve(
        model=model_path,
        engines=options.engines,
        max_running_turns=options.max_running_turns,
        max_staleness=bound,
        group_size=options.group_size,
        groups_per_batch=options.groups_per_batch,
        pause_mode=options.pause_mode,
        kv_policy=options.kv_policy,
        quantization=options.quantization,
        deterministic=options.deterministic,
        num_kv_blocks=options.num_kv_blocks,
        step_time_min_s=options.step_time_s,
        run_directory=run_directory,
        dashboard_address=options.dashboard,
        progress=True,
        seed=options.seed,
    ) as rollouts:
        every = options.evaluate_every or options.versions + 1
        rollouts.evaluate_every(every, held_out, episode=episode)
        measured = await learn(
            rollouts,
            episode,
            model=model_path,
            training=training,
            learning_rate=options.learning_rate,
            corrects=options.correction != "none",
            is_colocated=options.colocated,
            last_layers=options.last_layers,
            rows_max=options.rows_max,
        )
        rollouts.record_facts(
            mode=mode,
            mismatch=measured.mismatch,
            memory_mb=measured.memory_mb,
            colocated=options.colocated,
            warm_up=warm_up,
        )


def model_of(options: argparse.Namespace) -> tuple[Path, dict[str, object] | None]:
    """Return the model's directory, and how it was warmed up."""
    made_at = options.runs / f"model-{options.seed}"
    return find_model(options.model, made_at, seed=options.seed)


def run(options: argparse.Namespace, mode: str, run_directory: Path) -> None:
    """Train in one mode, and write the report."""
    if options.step_time_s:
        print(f"engines are paced: no step takes less than {1e3 * options.step_time_s:g} ms")
    torch.manual_seed(options.seed)
    asyncio.run(train(options, mode, run_directory))
    print(f"report: {write_report(run_directory)}", flush=True)


def compare(options: argparse.Namespace, directory: Path) -> None:
    """Train in every mode from the same model, on the same tasks; print how the runs differ."""
    model_of(options)
    for number, mode in enumerate(MODES, 1):
        print(f"\n{mode} ({number} of {len(MODES)}), staleness bound {MODES[mode]}", flush=True)
        run(options, mode, directory / mode)
    runs = read_runs([directory / mode for mode in MODES])
    slots = options.engines * options.max_running_turns
    lines = comparison_text(runs, target=options.target_reward, slots=slots)
    lines += [
        "",
        *publish_text(directory / "async"),
        *sample_text(directory / "async", runs[-1].facts.model),
    ]
    draw_comparison(directory / "comparison.png", runs)
    (directory / "comparison.txt").write_text("\n".join(lines) + "\n")
    point_latest_to(directory)
    print("\n".join(["", *lines, "", f"picture: {directory / 'comparison.png'}"]))
    for command in ("audit", "dashboard"):
        print(f"next: .venv/bin/tidegate {command} {directory / 'async'}")


def point_latest_to(directory: Path) -> None:
    """Point the ``latest`` link at ``directory``; leave anything that is not a link alone."""
    link = directory.parent / LATEST
    if link.is_symlink():
        link.unlink()
    if not link.exists():
        link.symlink_to(directory.name)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; exit status 2 for a user error, 130 for Ctrl-C."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    now = time.strftime("%Y%m%d-%H%M%S")
    try:
        if options.mode is None:
            compare(options, options.runs / (options.name or f"demo-{now}"))
        else:
            name = options.name or f"{options.mode}-{options.pause_mode}-{now}"
            run(options, options.mode, options.runs / name)
    except tidegate.TidegateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
