"""Share of wrong tags that `tidegate audit` finds, after real steps of Adam.

    python -m benchmarks.audit_power [--json]          # about 25 minutes on two cores

Prints ``name, value, unit, peer, ratio``. Each run is real: engines sample while a trainer takes
GRPO steps and publishes, and KV is kept over updates. ``demo`` is the calculator task, whose spans
have four tokens, most of them near-certain; ``long`` samples 48 tokens a turn from a random model.
The audit compares the recorded log-probs under each span's tag and under a wrong one; as the
comparison is symmetric, a wrong tag in the right one's place is found as often. ``alarms`` are
wrong verdicts on the right tags. The peer is the share that the tolerance alone would find.
``same`` counts wrong tags that give all tokens the same float32 log-prob: nothing can find them.
``smollm2`` lists words, a pretrained model of 135 million parameters in bfloat16; with ``float32``
in float32. Cases named ``exact`` are of deterministic engines, whose tokens ``tidegate audit
--exact`` samples again.
"""

import asyncio
import contextlib
import io
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

import tidegate
from benchmarks.engine.shapes import SHAPES, make_directory
from benchmarks.table import Row, compared, main
from examples import async_grpo
from examples.grpo import load_trainer, train_step
from examples.worker_grpo import VOCABULARY, make_model
from tidegate.observability.audit.audit import audit_run

LEARNING_RATES = (1e-6, 1e-5, 3e-4)
VERSIONS = 8
TURN_TOKENS = 48
GROUP_SIZE = 8
GROUPS_PER_BATCH = 4

SMOLLM2 = Path("runs/smollm2-135m")
"""Model directory that ``make model`` makes; its rows are left out where it is missing."""


def demo(directory: Path, learning_rate: float, *, deterministic: bool) -> Path:
    """Run the demo's task; return the run's directory."""
    run = directory / f"demo-{learning_rate}-{deterministic}"
    return _train(run, learning_rate, deterministic, "--held-out", "16")


def smollm2(directory: Path, learning_rate: float, *, deterministic: bool) -> Path:
    """Train the last layers of SmolLM2-135M in bfloat16; return the run's directory."""
    run = directory / f"smollm2-{learning_rate}-{deterministic}"
    return _train_smollm2(SMOLLM2, run, learning_rate, deterministic)


def smollm2_float32(directory: Path, learning_rate: float, *, deterministic: bool) -> Path:
    """Train as :func:`smollm2` does, with engines that compute in float32."""
    model = make_directory(directory / "smollm2", SHAPES["smollm2"], "float32")
    transformers.AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(model)
    run = directory / f"smollm2-float32-{learning_rate}-{deterministic}"
    return _train_smollm2(model, run, learning_rate, deterministic)


def _train_smollm2(model: Path, run: Path, learning_rate: float, deterministic: bool) -> Path:
    arguments = ["--model", str(model), "--task", "words", "--last-layers", "10"]
    arguments += ["--groups-per-batch", "4", "--group-size", "8", "--rows-max", "8"]
    # Slow steps, so that publishes come in the middle of turns.
    arguments += ["--engines", "1", "--step-time-s", "0.25", "--held-out", "2"]
    return _train(run, learning_rate, deterministic, *arguments)


def _train(run: Path, learning_rate: float, deterministic: bool, *arguments: str) -> Path:
    """Run examples/async_grpo.py with KV kept over updates."""
    options = async_grpo.parse_arguments(
        [
            *("--mode", "async", "--pause-mode", "keep", "--kv-policy", "keep"),
            *("--learning-rate", str(learning_rate), "--versions", str(VERSIONS)),
            *("--runs", str(run.parent), "--name", run.name, *["--deterministic"] * deterministic),
            *arguments,
        ]
    )
    asyncio.run(async_grpo.train(options, "async", run))
    return run


def long(directory: Path, learning_rate: float, *, deterministic: bool) -> Path:
    """Train on long turns of a random model; return the run's directory."""
    path, run = directory / "random", directory / f"long-{learning_rate}-{deterministic}"
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
        deterministic=deterministic,
        step_time_min_s=0.005,
        run_directory=run,
    ) as rollouts:
        for batch in rollouts.batches(tasks, episode=solve):
            train_step(model, optimizer, batch)
            rollouts.publish(model.state_dict())
    return run


def rows() -> Iterator[Row]:
    """Return the whole table."""
    with tempfile.TemporaryDirectory() as name:
        small = itertools.product((False, True), (long, demo), LEARNING_RATES)
        real = itertools.product((True,), (smollm2, smollm2_float32), LEARNING_RATES[:2])
        for exact, task, rate in itertools.chain(small, real if SMOLLM2.exists() else ()):
            with contextlib.redirect_stdout(io.StringIO()):
                run = task(Path(name), rate, deterministic=exact)
                report = audit_run(run, exact=exact, wrong_tags_max=None)
            about = f"{task.__name__.replace('_', '-')}{'-exact' * exact}/{rate:g}"
            powers = {
                "version": report.version_power,
                "boundary": report.boundary_power,
                "kv": report.kv_power,
            }
            for kind, power in powers.items():
                found = 1 - power.unnoticed_share
                gross = 1 - power.tags_within_tolerance / max(1, power.tags_tried)
                if exact:
                    yield Row(f"{about}/{kind}", found, "of wrong tags")
                else:
                    yield compared(f"{about}/{kind}", "of wrong tags", found, gross)
                yield Row(f"{about}/{kind}/tried", power.tags_tried, "wrong tags")
                yield Row(f"{about}/{kind}/same", power.tags_same, "wrong tags")
            yield Row(f"{about}/alarms", len(report.problems), "turns")


if __name__ == "__main__":
    main(__doc__, rows)
