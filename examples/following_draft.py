"""Speculative decoding with a draft model that follows the policy: GRPO with and without.

    python -m examples.following_draft                     # the demo's model, on a CPU
    python -m examples.following_draft --step-time-s 0     # what drafts cost on this machine
    python -m examples.following_draft --model PATH --task words --layers 4

The draft model is the policy's first layers, with its embedding and head. It learns the policy's
tokens before the run, from rollouts of its own, and in the run from each batch, whose tokens the
policy sampled anyway. Three runs train the same policy on the same tasks: without drafts, with a
draft model that stays as it was, and with one that is published with each version. The table shows
the share of draft tokens that engines accepted, by version, and tokens per turn and step, and per
CPU-second.

Measured with the demo's model and seed 0, one run each; accepted shares of the first and the last
two versions of 24: a draft model that stayed .53 and .14, one that followed .49 and .37, or 1.44
and 1.66 tokens per turn and step. With --learning-rate 1e-3, at which the policy changes fast and
rewards rise and fall: .55 and .18, .49 and .89. With 3e-4 following gains nothing: .55 and .53 on
average. On a CPU drafts save no time. With 3e-4, --step-time-s 0 and 12 versions, engines hardly
draft, and sample 8,242 tokens per CPU-second without a draft model, 8,024 with one that stays and
7,577 with one that follows. Paced, where they always draft: 4,263, 3,342 and 3,198.

Shapes: P rows in one pass, T tokens in the longest of them, S from the first sampled one on.
"""

import argparse
import asyncio
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tidegate
from examples.async_grpo import TASKS
from examples.grpo import first_trained, load_trainer, rows_of_like_length, train_step
from examples.tiny_model import make_model
from tidegate.engine.models.quiet_transformers import quiet_transformers

MODES = ("plain", "stays", "follows")
WARM_UP_SEED, HELD_OUT_SEED = 7, 11


@dataclass(slots=True)
class Measured:
    """What one run measured."""

    shares: list[float] = field(default_factory=list)
    """Accepted share of the draft tokens of each version, 0 where there were none."""
    tokens: int = 0
    rows: int = 0
    """Sum over the engine's steps of the turns in each."""
    cpu_s: float = 0.0
    """CPU time of the engine from the first batch on, in seconds; tokens and rows likewise."""


def make_draft(model: Path, directory: Path, layers: int) -> None:
    """Write the model's first layers, with its embedding, last norm and head, as a model."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    with quiet_transformers():
        config = AutoConfig.from_pretrained(model, num_hidden_layers=layers, local_files_only=True)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        whole = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
        auto: Any = AutoModelForCausalLM
        draft = auto.from_config(config, dtype=whole.dtype)
        draft.load_state_dict(whole.state_dict(), strict=False)
        draft.save_pretrained(directory)


def imitate(
    draft: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: tidegate.Batch
) -> float:
    """Take one step towards the tokens that the policy sampled; return the loss in nats per token.

    The expected loss is least where the draft's probabilities are the policy's.
    """
    optimizer.zero_grad()
    total = 0.0
    for rows in rows_of_like_length(batch, torch.arange(len(batch.rewards))):
        first, longest = first_trained(batch, rows), int(batch.attention_mask[rows].sum(1).max())
        token_ids, mask = batch.token_ids[rows, :longest], batch.loss_mask[rows, first:longest]
        kept = torch.arange(first - 1, longest - 1)
        logits = draft(input_ids=token_ids, logits_to_keep=kept).logits  # [P, S, V]
        losses = cross_entropy(
            logits.flatten(0, 1).float(), token_ids[:, first:].flatten(), reduction="none"
        )
        loss = (losses * mask.flatten()).sum() / batch.sampled_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    return total


def engine_cpu_s() -> float:
    """Return the CPU time of this process's engines, in seconds."""
    children = psutil.Process().children(recursive=True)
    return sum(sum(child.cpu_times()[:2]) for child in children)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of all runs."""
    return {
        "engines": 1,
        "max_running_turns": options.max_running_turns,
        "max_staleness": 1,
        "group_size": 8,
        "groups_per_batch": options.groups_per_batch,
        "step_time_min_s": options.step_time_s,
        "seed": options.seed,
    }


def tasks(options: argparse.Namespace, seed: int, batches: int) -> Iterator[object]:
    """Return the tasks of so many batches."""
    make_tasks, _ = TASKS[options.task]
    return itertools.islice(make_tasks("train", seed), batches * options.groups_per_batch)


async def warm_up(options: argparse.Namespace, model: Path, directory: Path) -> None:
    """Teach the draft model in ``directory`` the policy's own rollouts."""
    draft, optimizer = load_trainer(directory, options.draft_learning_rate)
    async with tidegate.serve(model=model, **settings(options)) as rollouts:
        batches = [
            batch
            async for batch in rollouts.batches(
                tasks(options, WARM_UP_SEED, options.warm_up_batches),
                episode=TASKS[options.task][1],
            )
            if await rollouts.publish({}, batches=[batch], partial=True)
        ]
    for step in range(options.warm_up_steps):
        loss = imitate(draft, optimizer, batches[step % len(batches)])
        if step % 50 == 0 or step == options.warm_up_steps - 1:
            print(f"draft: step {step}, loss {loss:.3f} nats per token", flush=True)
    with quiet_transformers():
        draft.save_pretrained(directory)


async def train(options: argparse.Namespace, model: Path, directory: Path, mode: str) -> Measured:
    """Train the policy in one mode; return what was measured."""
    torch.manual_seed(options.seed)
    policy, optimizer = load_trainer(model, options.learning_rate)
    draft, draft_optimizer = load_trainer(directory, options.draft_learning_rate)
    method = None if mode == "plain" else f"draft:{directory}"
    measured, marks = Measured(), list[tuple[int, int, int, int]]()
    async with tidegate.serve(
        model=model, speculative_method=method, **settings(options)
    ) as rollouts:
        cpu_s = 0.0
        async for batch in rollouts.batches(
            tasks(options, options.seed, options.versions), episode=TASKS[options.task][1]
        ):
            [engine] = rollouts.engines
            marks.append(
                (engine.tokens, engine.rows, engine.draft_tokens, engine.accepted_draft_tokens)
            )
            cpu_s = cpu_s or engine_cpu_s()
            train_step(policy, optimizer, batch)
            if mode == "follows":
                for _ in range(options.draft_steps):
                    imitate(draft, draft_optimizer, batch)
                await rollouts.publish(
                    policy.state_dict(), draft=draft.state_dict(), batches=[batch]
                )
            else:
                await rollouts.publish(policy.state_dict(), batches=[batch])
            reward = float(batch.rewards.mean())
            print(f"{mode}: version {batch.number}, reward {reward:.2f}", flush=True)
        measured.cpu_s = engine_cpu_s() - cpu_s
    for before, after in itertools.pairwise(marks):
        drafted, accepted = after[2] - before[2], after[3] - before[3]
        measured.shares.append(accepted / max(1, drafted))
    measured.tokens, measured.rows = (marks[-1][n] - marks[0][n] for n in range(2))
    return measured


def table(found: dict[str, Measured], columns: int) -> list[str]:
    """Return the accepted shares by version, and tokens per step and CPU-second, as lines."""
    lines = []
    for mode, measured in found.items():
        each = max(1, len(measured.shares) // columns)
        parts = [measured.shares[n : n + each] for n in range(0, len(measured.shares), each)]
        shares = " ".join(f"{sum(part) / len(part):.2f}" for part in parts)
        lines.append(
            f"{mode:8} accepted by version ({each} each): {shares if mode != 'plain' else '-'}; "
            f"{measured.tokens / max(1, measured.rows):.2f} tokens per turn and step, "
            f"{measured.tokens / max(1e-9, measured.cpu_s):.0f} per CPU-second of the engine"
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Make the draft model, and train in each mode."""
    parser = argparse.ArgumentParser(description="Train with drafts that follow, or stay.")
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face directory; default: the demo's small model")
    add("--task", choices=TASKS, default="long-tail")
    add("--layers", type=int, default=1, help="number of the policy's layers in the draft model")
    add("--modes", nargs="+", choices=MODES, default=MODES)
    add("--versions", type=int, default=24)
    add("--groups-per-batch", type=int, default=8)
    add("--max-running-turns", type=int, default=8)
    add("--learning-rate", type=float, default=6e-4)
    add("--draft-learning-rate", type=float, default=1e-3)
    add("--draft-steps", type=int, default=4, help="steps of the draft model per batch")
    add("--warm-up-batches", type=int, default=6)
    add("--warm-up-steps", type=int, default=300)
    add("--step-time-s", type=float, default=0.02, help="minimum time of an engine's step")
    add("--seed", type=int, default=0)
    add("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = options.model or options.runs / f"model-{options.seed}"
    if options.model is None:
        make_model(model, seed=options.seed)
    directory = options.runs / f"draft-{model.name}"
    shutil.rmtree(directory, ignore_errors=True)
    make_draft(model, directory, options.layers)
    asyncio.run(warm_up(options, model, directory))
    found = {mode: asyncio.run(train(options, model, directory, mode)) for mode in options.modes}
    print("\n".join(table(found, columns=8)))


if __name__ == "__main__":
    main()
