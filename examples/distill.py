"""On-policy distillation of a prompt into weights, on a pretrained model.

    make model
    python -m examples.distill --model runs/smollm2-135m  # 14 min on two busy cores with AVX2 only

The task is that of `make demo-real`: words that begin with a letter. The teacher is the same model
as it was at first, with three answered questions in its prompt; the student gets the question
alone, samples, and learns to give its samples the probabilities that the teacher gives them. The
teacher scores each rollout as it ends, on an engine of its own, so no batch waits for it. No reward
is trained on: held-out rewards show what was learned, .085 ± .010 before and .205 ± .019 after 32
versions, where the teacher has .218 ± .020 (138 answers each, seed 0).
"""

import argparse
import asyncio
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import torch

import tidegate
from examples.grpo import first_trained, load_trainer, rows_of_like_length, trained_weights
from examples.word_lists import (
    ANSWER_TOKENS_MAX,
    INSTRUCTION,
    WordTask,
    grade,
    question,
    word_tasks,
)
from tidegate.policies.distillation import teacher_kl_losses

EXAMPLES = {
    WordTask("s", 8): "sun, sand, stone, silver, song, seed, storm, spoon",
    WordTask("m", 5): "moon, milk, mouse, market, mirror",
    WordTask("t", 10): "tree, table, tiger, train, tower, tomato, ticket, thunder, tent, turtle",
}
"""Answers that the teacher reads before the question."""
TOP_LOGPROBS = 20
"""Likeliest tokens of the teacher that are compared one by one; all others together are one."""
HELD_OUT_SEED = 1


def asked(task: WordTask, *, with_examples: bool) -> list[dict[str, str]]:
    """Return the conversation of a task, with the teacher's examples or without."""
    messages = [{"role": "system", "content": INSTRUCTION}]
    for example, answer in EXAMPLES.items() if with_examples else ():
        messages.append({"role": "user", "content": question(example)})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": question(task)}]


async def answer(episode: tidegate.Episode, task: WordTask, *, with_examples: bool) -> float:
    """Play one episode: a turn, without a teacher."""
    messages = asked(task, with_examples=with_examples)
    turn = await episode.generate(messages=messages, max_tokens=ANSWER_TOKENS_MAX)
    return grade(turn.text, task)


def distill_step(student: Any, optimizer: torch.optim.Optimizer, batch: tidegate.Batch) -> float:
    """Take one optimizer step; return the KL divergence per token before it, in nats."""
    assert batch.teacher_top_ids is not None
    assert batch.teacher_top_logprobs is not None
    optimizer.zero_grad()
    total = 0.0
    for rows in rows_of_like_length(batch, torch.arange(len(batch.rewards))):
        longest = int(batch.attention_mask[rows].sum(1).max())
        first = first_trained(batch, rows)
        with torch.autocast("cpu", student.dtype, enabled=student.dtype != torch.float32):
            kept = torch.arange(first - 1, longest - 1)
            logits = student(batch.token_ids[rows, :longest], logits_to_keep=kept).logits
        losses = teacher_kl_losses(
            logits,
            batch.teacher_top_ids[rows, first:longest],
            batch.teacher_top_logprobs[rows, first:longest],
            batch.loss_mask[rows, first:longest],
        )
        loss = losses.sum() / batch.sampled_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    return total


async def held_out(
    rollouts: tidegate.Rollouts, options: argparse.Namespace, *, with_examples: bool = False
) -> str:
    """Return the mean held-out reward with its standard error, as text."""

    async def play(episode: tidegate.Episode, task: WordTask) -> float:
        return await answer(episode, task, with_examples=with_examples)

    tasks = list(itertools.islice(word_tasks("held_out", HELD_OUT_SEED), options.held_out))
    evaluation = await rollouts.evaluate(tasks, episode=play)
    rewards = [reward or 0.0 for reward in evaluation.rewards]  # None: its episode failed
    error = statistics.stdev(rewards) / math.sqrt(len(rewards))
    return f"{statistics.mean(rewards):.3f} ± {error:.3f}"


async def train(options: argparse.Namespace) -> None:
    """Distill, and print held-out rewards before and after."""
    async with (
        tidegate.score_server(model=options.model, engines=1) as teacher,
        tidegate.serve(
            model=options.model,
            engines=1,
            group_size=1,
            groups_per_batch=options.batch,
            max_staleness=1,
            run_directory=options.run_directory,
        ) as rollouts,
    ):

        async def play(episode: tidegate.Episode, task: WordTask) -> float:
            reward = await answer(episode, task, with_examples=False)
            messages = asked(task, with_examples=True)
            await episode.attach_teacher(teacher, messages=messages, top_logprobs=TOP_LOGPROBS)
            return reward

        print(f"teacher, held out: {await held_out(rollouts, options, with_examples=True)}")
        print(f"student, held out: {await held_out(rollouts, options)}", flush=True)
        student, optimizer = load_trainer(options.model, options.learning_rate, options.last_layers)
        tasks = itertools.islice(
            word_tasks("train", options.seed), options.batch * options.versions
        )
        async for batch in rollouts.batches(tasks, episode=play):
            kl = distill_step(student, optimizer, batch)
            weights = trained_weights(student)
            await rollouts.publish(weights, batches=[batch], partial=True)
            print(
                f"batch {batch.number}: {kl:.3f} nats per token from the teacher, "
                f"reward {float(batch.rewards.mean()):.3f}",
                flush=True,
            )
        print(f"student, held out: {await held_out(rollouts, options)}")


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a model with a chat template")
    parser.add_argument("--run-directory", type=Path, default=Path("runs/distill"))
    parser.add_argument("--versions", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16, help="rollouts of a version")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--last-layers", type=int, default=10, help="layers that are trained")
    parser.add_argument("--held-out", type=int, default=138, help="answers of an evaluation")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
