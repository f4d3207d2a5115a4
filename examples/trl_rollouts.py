"""TRL's asynchronous trainer on rollouts from Tidegate directly, without a server in between.

    pip install -e '.[trl]' requests aiohttp  # after a torch for CPUs
    python -m examples.trl_rollouts --model DIR --steps 4
    torchrun --nproc-per-node 2 -m examples.trl_rollouts --model DIR --steps 4

TRL's AsyncGRPOTrainer trains; prompts, episodes, rewards, staleness and weights are the run's.
Unlike trl_async_grpo.py, engines keep generating while weights travel, and no token is older than
the bound, whatever TRL drops. With several ranks, rank 0 owns the run, because TRL asks only rank 0
for rows. The reward is the share of the letter `e`. With `--run ADDRESS` the run is in another
process (`await tidegate.listen(run, ADDRESS, tasks=…, episode=…)`), and this one only trains.
"""

import argparse
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import tidegate
from examples.trl_async_grpo import QUESTIONS, StalenessSeen, run_on_cpu

MAX_STALENESS = 1
"""Staleness bound of the run, because TRL's data loader asks for one micro-batch ahead."""

GROUP_SIZE = 4
GROUPS_PER_BATCH = 2
TOKENS_MAX = 24


def tasks() -> Iterator[dict[str, Any]]:
    """Yield the questions in an endless cycle."""
    for question in itertools.cycle(QUESTIONS):
        yield {"prompt": [{"role": "user", "content": question}]}


async def solve(episode: tidegate.Episode, task: dict[str, Any]) -> float:
    """Generate one answer; the reward is the letter's share of it."""
    turn = await episode.generate(messages=task["prompt"], max_tokens=TOKENS_MAX)
    return turn.text.count("e") / max(1, len(turn.text))


def main() -> None:
    """Train for a few steps, and print the results as one line of JSON."""
    arguments = _arguments()
    run_on_cpu()
    seen = StalenessSeen()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        config = _config(arguments, arguments.checkpoints or scratch)
        is_first = config.process_index == 0
        run, worker = _rollouts(arguments, config, stack) if is_first else (None, object())
        trainer = AsyncGRPOTrainer(
            model=str(arguments.model),
            args=config,
            train_dataset=Dataset.from_list(list(itertools.islice(tasks(), len(QUESTIONS)))),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            rollout_worker=worker,
            weight_transfer=worker,
        )
        if run is not None:
            seen.watch(trainer)
        trainer.train(resume_from_checkpoint=arguments.resume)
        if run is None:
            return
        ledger = run.statistics().ledger
        results = _results(trainer, seen) | {
            "run_version": run.version,
            "rollouts": run.statistics().trained_rollouts,
            "tokens": {
                "generated": ledger.generated,
                "trained": ledger.trained,
                "discarded": ledger.discarded,
            },
        }
    print(json.dumps(results))


def _rollouts(
    arguments: argparse.Namespace, config: AsyncGRPOConfig, stack: contextlib.ExitStack
) -> "tuple[tidegate.SyncRollouts | tidegate.SyncRemoteRollouts, tidegate.TRLRollouts]":
    """Start a run or connect to one, and wrap it as TRL's rollout worker."""
    if arguments.run is not None:
        remote = stack.enter_context(tidegate.connect_sync(arguments.run))
        # the remote run has its own tasks and episodes
        return remote, tidegate.TRLRollouts(remote, args=config)
    run = stack.enter_context(
        tidegate.serve_sync(
            model=arguments.model,
            engines=arguments.engines,
            # With a token budget it is known a weight sync later what TRL has trained on.
            max_staleness=MAX_STALENESS + (config.token_budget != 0),
            group_size=GROUP_SIZE,
            groups_per_batch=GROUPS_PER_BATCH,
        )
    )
    return run, tidegate.TRLRollouts(run, tasks(), episode=solve, args=config)


def _results(trainer: Any, seen: StalenessSeen) -> dict[str, Any]:
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "steps": trainer.state.global_step,
        "versions": trainer.model_version,
        "staleness": dict(sorted(seen.ages.items())),
        "rewards": [round(entry["reward"], 4) for entry in history],
        # The first step's rollouts are of the current weights: ratio 1 and KL 0 are expected.
        "first_ratio": history[0]["ratio"],
        "first_kl": history[0]["kl"],
        "ratios": [entry["ratio"] for entry in history],
        "mean_length": history[0]["completions/mean_length"],
        "trained_tokens": sum(entry["batch/trained_tokens_per_step"] for entry in history),
        "dropped": {
            "stale": sum(entry.get("sample/dropped_stale_total", 0) for entry in history),
            "oversize": sum(entry.get("batch/dropped_oversize_total", 0) for entry in history),
        },
    }


def _config(arguments: argparse.Namespace, scratch: str) -> AsyncGRPOConfig:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    return AsyncGRPOConfig(
        output_dir=scratch,
        max_steps=arguments.steps,
        max_staleness=MAX_STALENESS if arguments.max_staleness is None else arguments.max_staleness,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=(arguments.step_rows or GROUP_SIZE * GROUPS_PER_BATCH) // ranks,
        gradient_accumulation_steps=1,
        token_budget=arguments.token_budget,
        learning_rate=arguments.learning_rate,
        logging_steps=1,
        dtype="float32",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="steps" if arguments.checkpoints else "no",
        save_steps=1,
        report_to="none",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--run", help="the address of a run that listens, in another process")
    parser.add_argument("--checkpoints", help="a directory to save TRL's checkpoints in")
    parser.add_argument("--resume", help="one of TRL's checkpoints, to continue from")
    parser.add_argument("--step-rows", type=int, help="of one of TRL's steps; as the run's batches")
    parser.add_argument("--max-staleness", type=int, help="of TRL, which drops what is older")
    parser.add_argument(
        "--token-budget",
        type=int,
        default=0,
        help="tokens of TRL's rows; 0: so many rows as a batch of the run has",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
