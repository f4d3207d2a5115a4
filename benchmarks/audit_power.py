"""Share of wrong tags that `tidegate audit` finds, after real steps of Adam.

    python -m benchmarks.audit_power [--json]          # about 5 minutes on two cores

Prints ``name, value, unit, peer, ratio``. Each run is real: engines sample while a trainer takes
GRPO steps and publishes, and KV is kept over updates. ``demo`` is the calculator task, whose spans
have four tokens, most of them near-certain; ``long`` samples 48 tokens a turn from a random model.
The audit compares the recorded log-probs under each span's tag and under a wrong one; as the
comparison is symmetric, a wrong tag in the right one's place is found as often. ``alarms`` are
wrong verdicts on the right tags. The peer is the share that the tolerance alone would find.
"""

import argparse
import asyncio
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import tidegate
from benchmarks.table import Row, compared, show
from examples import async_grpo
from examples.grpo import load_trainer, train_step
from examples.worker_grpo import VOCABULARY, make_model
from tidegate.observability.audit import audit
from tidegate.observability.audit.rivals import RivalVerdict

LEARNING_RATES = (1e-6, 1e-5, 3e-4)
VERSIONS = 8
TURN_TOKENS = 48
GROUP_SIZE = 8
GROUPS_PER_BATCH = 4


def demo(directory: Path, learning_rate: float) -> Path:
    """Run the demo's task; return the run's directory."""
    arguments = ["--mode", "async", "--pause-mode", "keep", "--kv-policy", "keep"]
    arguments += ["--learning-rate", str(learning_rate), "--versions", str(VERSIONS)]
    arguments += ["--held-out", "16", "--runs", str(directory), "--name", f"demo-{learning_rate}"]
    options = async_grpo.parse_arguments(arguments)
    asyncio.run(async_grpo.train(options, "async", directory / options.name))
    return directory / str(options.name)


def long(directory: Path, learning_rate: float) -> Path:
    """Train on long turns of a random model; return the run's directory."""
    path, run = directory / "random", directory / f"long-{learning_rate}"
    make_model(path)

    async def solve(episode: tidegate.Episode, task: list[int]) -> float:
        episode.append(task)
        turn = await episode.generate(max_tokens=TURN_TOKENS, min_tokens=TURN_TOKENS)
        return sum(token < VOCABULARY // 2 for token in turn.token_ids) / TURN_TOKENS

    model, optimizer = load_trainer(path, learning_rate)
    tasks = torch.randint(VOCABULARY, (VERSIONS * GROUPS_PER_BATCH, 3)).tolist()
    with tidegate.serve_sync(
        model=path,
        engines=2,
        max_running_turns=16,
        max_staleness=2,
        group_size=GROUP_SIZE,
        groups_per_batch=GROUPS_PER_BATCH,
        pause_mode="keep",
        kv_policy="keep",
        step_time_min_s=0.005,
        run_directory=run,
    ) as rollouts:
        for batch in rollouts.batches(tasks, episode=solve):
            train_step(model, optimizer, batch)
            rollouts.publish(model.state_dict())
    return run


def rows() -> Iterator[Row]:
    """Return the whole table."""
    verdicts: list[RivalVerdict] = []
    judge = audit.judge

    def keep(*arguments: object) -> list[RivalVerdict]:
        found = judge(*arguments)  # type: ignore[arg-type]
        verdicts.extend(found)
        return found

    audit.judge = keep  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        for task in (long, demo):
            for rate in LEARNING_RATES:
                verdicts.clear()
                with contextlib.redirect_stdout(io.StringIO()):
                    report = audit.audit_run(task(Path(name), rate))
                about = f"{task.__name__}/{rate:g}"
                for kind in ("version", "boundary", "kv"):
                    own = [verdict for verdict in verdicts if verdict.rival.kind == kind]
                    found = np.mean([verdict.log_odds <= -audit.LOG_ODDS_MIN for verdict in own])
                    gross = np.mean([exceeds(verdict, report.tolerance) for verdict in own])
                    yield compared(f"{about}/{kind}", "of wrong tags", float(found), float(gross))
                    yield Row(f"{about}/{kind}/tried", len(own), "wrong tags")
                yield Row(f"{about}/alarms", len(report.problems), "turns")


def exceeds(verdict: RivalVerdict, tolerance: float) -> bool:
    """Whether a token under the wrong tag differs from its record by more than the tolerance."""
    parts = verdict.rival.parts
    return any((np.abs(p.copy.replayed - p.copy.recorded) > tolerance).any() for p in parts)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    show(rows(), as_json=parser.parse_args().json)


if __name__ == "__main__":
    sys.exit(main())
