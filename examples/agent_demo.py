"""Agent demo: trains agents that call a tool, play a game or write programs, asynchronously.

    python -m examples.agent_demo                     # both, one after the other
    python -m examples.agent_demo --task tool         # or lake
    python -m examples.agent_demo --task code         # programs in sandboxes; needs bubblewrap
    python -m examples.agent_demo --model PATH        # any directory with a chat template

Each task gets a small, warmed-up model, which is evaluated, trained and evaluated again; then every
token of the run is audited. The training loop is in ``grpo.py``, the tasks are in
``tool_agent.py``, ``frozen_lake.py`` and ``coding.py``.
"""

import argparse
import asyncio
import dataclasses
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import tidegate
from examples import calculator, coding, frozen_lake, lake_demonstrations
from examples.calculator import Split
from examples.coding_demonstrations import CODER
from examples.grpo import learn
from examples.lake_demonstrations import LAKE_PLAYER
from examples.tiny_model import Recipe, find_model
from examples.tool_agent import ToolAgent
from examples.tool_demonstrations import TOOL_AGENT
from tidegate.observability.audit.audit import AuditReport, audit_run, write_audit
from tidegate.observability.records.trajectories import RecordedRollout, read_trajectories
from tidegate.observability.reports.facts import Facts, read_facts
from tidegate.observability.reports.report import write_report
from tidegate.orchestrator.episodes.runner import EpisodeFunction

HELD_OUT_SEED = 11
ENGINES = 2
SLOTS = 8
"""Decode slots per engine; few, so that rollouts spread over time and updates find many in
flight."""
MAX_STALENESS = 2
GROUP_SIZE = 8

SANDBOXES = 4
"""Sandboxes in use at a time, and as many ready: programs take a few milliseconds each."""

WORKER_BYTES = 1 << 30
"""Address-space limit of an environment worker: Python, numpy and gymnasium take half of it."""
CALL_TIMEOUT_S = 30.0
"""Timeout of an environment call. A call takes a millisecond, but a busy machine may stall for
seconds."""

Counts = Callable[[], dict[str, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A task to train on: its model recipe, its task iterator, and its episode."""

    recipe: Recipe
    tasks: Callable[[Split, int], Iterator[Any]]
    player: Callable[
        [tidegate.EnvironmentPool, ExitStack], Awaitable[tuple[EpisodeFunction, Counts]]
    ]
    """Creates the episode function on a pool, and a function that returns its counters; the stack
    closes what it opens."""
    learning_rate: float = 3e-4


async def _tool_agent(
    pool: tidegate.EnvironmentPool, opened: ExitStack
) -> tuple[EpisodeFunction, Counts]:
    agent = await ToolAgent.with_tools(pool)
    return agent, lambda: {"tool calls": agent.counts.made, "failed": agent.counts.failed}


async def _lake_player(
    pool: tidegate.EnvironmentPool, opened: ExitStack
) -> tuple[EpisodeFunction, Counts]:
    walk = frozen_lake.episode(pool)
    counts = walk.counts
    return walk, lambda: {"moves": counts.turns, "walks given up": counts.out_of_turns}


async def _coder(
    pool: tidegate.EnvironmentPool, opened: ExitStack
) -> tuple[EpisodeFunction, Counts]:
    sandboxes = tidegate.Sandboxes(
        tidegate.Bubblewrap(), limits=coding.LIMITS, sandboxes_max=SANDBOXES, ready=SANDBOXES
    )
    write = coding.episode(opened.enter_context(sandboxes))
    return write, lambda: {"programs": write.counts.turns}


SUBJECTS = {
    "tool": Subject(TOOL_AGENT, calculator.tasks, _tool_agent),
    "lake": Subject(LAKE_PLAYER, lake_demonstrations.lakes, _lake_player),
    "code": Subject(CODER, coding.tasks, _coder, learning_rate=1e-4),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train agents with asynchronous rollouts.")
    add = parser.add_argument
    add("--task", choices=(*SUBJECTS, "both"), default="both")
    add("--model", type=Path, help="Hugging Face directory; default: create a small model")
    add("--versions", type=int, default=40, help="weight versions to make")
    add("--groups-per-batch", type=int, default=16)
    add("--held-out", type=int, default=256, help="tasks that measure, before and after")
    add("--seed", type=int, default=0)
    add("--runs", type=Path, default=Path("runs"), help="where runs and models are kept")
    add("--name", default="agent-%Y%m%d-%H%M%S", help="of the runs; the task is added")
    return parser.parse_args(arguments)


async def train(name: str, options: argparse.Namespace, run_directory: Path) -> dict[str, int]:
    """Evaluate, train and evaluate again; return the episode's counters."""
    subject = SUBJECTS[name]
    made_at = options.runs / f"model-{name}-{options.seed}"
    model, warm_up = find_model(options.model, made_at, recipe=subject.recipe, seed=options.seed)
    held_out = list(itertools.islice(subject.tasks("held_out", HELD_OUT_SEED), options.held_out))
    num_tasks = options.versions * options.groups_per_batch
    with ExitStack() as opened:
        async with (
            tidegate.EnvironmentPool(
                processes=2, call_timeout_s=CALL_TIMEOUT_S, memory_bytes=WORKER_BYTES
            ) as pool,
            tidegate.serve(
                model=model,
                engines=ENGINES,
                max_running_turns=SLOTS,
                max_staleness=MAX_STALENESS,
                group_size=GROUP_SIZE,
                groups_per_batch=options.groups_per_batch,
                run_directory=run_directory,
                progress=True,
                seed=options.seed,
            ) as rollouts,
        ):
            episode, counts = await subject.player(pool, opened)
            rollouts.evaluate_every(options.versions + 1, held_out, episode=episode)
            await learn(
                rollouts,
                episode,
                model=model,
                training=list(itertools.islice(subject.tasks("train", options.seed), num_tasks)),
                learning_rate=subject.learning_rate,
            )
            rollouts.record_facts(mode="async", warm_up=warm_up)
    return counts()


def crossed(rollout: RecordedRollout) -> bool:
    """Return whether any later turn of a rollout used a weight version that its first did not."""
    first = {span.version for span in rollout.turns[0].spans} if rollout.turns else set()
    later = {span.version for turn in rollout.turns[1:] for span in turn.spans}
    return bool(later - first)


def summary(
    name: str, facts: Facts, audit: AuditReport, counts: dict[str, int], trained: list[bool]
) -> list[str]:
    """Summarise a run in a few lines; ``trained`` holds :func:`crossed` of each trained rollout."""
    return [
        f"{name}: reward {facts.reward_before or 0:.3f} -> {facts.reward_after or 0:.3f} on "
        f"held-out tasks, {facts.versions} versions in {facts.wall_s:.0f} s",
        "  " + ", ".join(f"{what} {count}" for what, count in counts.items()),
        f"  {facts.rollouts_trained} rollouts trained: {facts.mixed_version_share:.1%} over two or "
        f"more versions, {sum(trained) / max(1, len(trained)):.1%} with an update between turns",
        f"  staleness {facts.mean_staleness:.2f}, highest {facts.max_staleness}, bound "
        f"{facts.staleness_bound}",
        f"  audit: {audit.tokens_agreeing} of {audit.tokens} tokens agree; {audit.verdict}",
    ]


def run(name: str, options: argparse.Namespace, run_directory: Path) -> tuple[list[str], bool]:
    """Train and audit; return the summary, and whether the audit agrees."""
    counts = asyncio.run(train(name, options, run_directory))
    audit = audit_run(run_directory)
    write_audit(run_directory, audit)
    print(f"report: {write_report(run_directory)}", flush=True)
    recorded = read_trajectories(run_directory)
    trained = [crossed(rollout) for rollout in recorded if rollout.state == "trained"]
    return summary(name, read_facts(run_directory), audit, counts, trained), audit.agrees


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; exit status 1 if an audit disagrees, 2 for a user error, 130 for Ctrl-C."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    base = time.strftime(options.name)
    lines: list[str] = []
    agree = True
    try:
        for name in ("tool", "lake") if options.task == "both" else (options.task,):
            report_lines, agrees = run(name, options, options.runs / f"{base}-{name}")
            lines += report_lines
            agree = agree and agrees
    except tidegate.TidegateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    print("\n".join(["", *lines]))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
