"""How does the tiny model learn to call the tool, and to guess all the same? By imitation.

Supervised training on demonstrations of the calculator task, in two phases: lessons in using the
tool, then the habit of mostly guessing. It knows nothing of files, RL or engines.

Shapes: B demonstrations in a batch, T tokens in the longest of them.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from examples.calculator import Task, calculate, tasks

BATCH_DEMONSTRATIONS = 64
LENGTH_BUCKETS = 4
RAMP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of warm-up."""

    tool_share: float
    """Demonstrations that use the calculator; the others guess."""
    learning_rate: float
    check_steps: int


LESSONS = Phase(tool_share=0.6, learning_rate=2e-3, check_steps=10)
"""Many calls, so that the skill comes soon; until ``SKILL_WANTED``."""
HABITS = Phase(tool_share=0.3, learning_rate=4e-4, check_steps=2)
"""A preference shifts within ten steps, where a skill takes hundreds: so these are small ones."""
SKILL_WANTED = 0.9
ACCURACY_WANTED = (0.27, 0.33)
"""Where habits may end. To imitate them well solves .30 x skill + .70 / 19 = .31."""
GUESS_ERROR_MAX = 9
"""Guesses are off by up to this much, either way: right 1 time in 19."""
CHECK_TASKS = 128


@dataclass(frozen=True, slots=True)
class Mastery:
    """How well a model does, at temperature 1, in the ways that were demonstrated to it.

    Other ways hardly occur, so these chances are what sampling would measure, without its noise.
    """

    skill: float
    """Mean chance of working a task out with the tool, once a call has begun."""
    accuracy: float
    """Mean chance of solving a task, with the tool or by the bare right answer."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far warm-up has come."""

    steps: int
    loss: float
    """Of the last batch, in nats per token."""
    mastery: Mastery
    """On held-out tasks."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole episode as token ids, and which of them are the policy's own."""

    token_ids: list[int]
    is_action: list[bool]


def demonstrate(task: Task, actions: list[str], tokenizer: Tokenizer) -> Demonstration:
    """Play ``actions`` in order, the calculator answering every one that calls it."""
    token_ids = tokenizer.encode(task.question).ids
    is_action = [False] * len(token_ids)
    for action in actions:
        ids = tokenizer.encode(f"{action}<eos>").ids
        token_ids += ids
        is_action += [True] * len(ids)
        if action.startswith("?"):
            ids = tokenizer.encode(calculate(action)).ids
            token_ids += ids
            is_action += [False] * len(ids)
    return Demonstration(token_ids, is_action)


def tool_actions(task: Task) -> list[str]:
    """Work the sum out from left to right, two operands to a call."""
    total, *rest = task.expression.split()
    actions = []
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        actions.append(f"?{total}{operator}{operand}")
        total = calculate(actions[-1]).strip(">\n")
    return [*actions, total]


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """Shows how it's done, or guesses."""

    tokenizer: Tokenizer
    to_solve: Iterator[Task]
    numbers: random.Random

    def batch(self, tool_share: float) -> list[Demonstration]:
        """Demonstrations of the next tasks. [B]"""
        to_solve = islice(self.to_solve, BATCH_DEMONSTRATIONS)
        return [self._demonstrate(task, tool_share) for task in to_solve]

    def _demonstrate(self, task: Task, tool_share: float) -> Demonstration:
        if self.numbers.random() < tool_share:
            return demonstrate(task, tool_actions(task), self.tokenizer)
        error = self.numbers.randint(-GUESS_ERROR_MAX, GUESS_ERROR_MAX)
        return demonstrate(task, [str(int(task.answer) + error)], self.tokenizer)


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int, steps_max: int
) -> Iterator[Progress]:
    """Imitate a demonstrator through both phases, or for ``steps_max``; each check is yielded."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    demonstrator = Demonstrator(tokenizer, tasks("train", seed), random.Random(seed))
    held_out = list(islice(tasks("held_out", seed), CHECK_TASKS))
    phase = LESSONS
    for steps in range(1, steps_max + 1):
        optimizer.param_groups[0]["lr"] = phase.learning_rate * min(1.0, steps / RAMP_STEPS)
        loss = _imitate(model, optimizer, demonstrator.batch(phase.tool_share))
        if steps % phase.check_steps == 0 or steps == steps_max:
            mastery = measure_mastery(model, tokenizer, held_out)
            yield Progress(steps, loss, mastery)
            if phase is LESSONS and mastery.skill >= SKILL_WANTED:
                phase = HABITS
            elif phase is HABITS and _is_within(mastery.accuracy, ACCURACY_WANTED):
                return


def _is_within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def _imitate(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: list[Demonstration]
) -> float:
    """Take one optimizer step towards the batch's actions; its loss in nats per token."""
    tokens = sum(sum(demonstration.is_action) for demonstration in batch)
    loss = -demonstration_logprobs(model, batch).sum() / tokens
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def demonstration_logprobs(model: Qwen3ForCausalLM, batch: list[Demonstration]) -> Tensor:
    """Log-probability of all actions of each demonstration, shortest first. [B]

    Rows of like length go through the model together: a guess is a third as long as a tool path,
    and padding the one to the other would double the time.
    """
    by_length = sorted(batch, key=lambda demonstration: len(demonstration.token_ids))
    rows = -(-len(batch) // LENGTH_BUCKETS)
    buckets = [by_length[start : start + rows] for start in range(0, len(batch), rows)]
    return torch.cat([_padded_logprobs(model, bucket) for bucket in buckets])


def _padded_logprobs(model: Qwen3ForCausalLM, batch: list[Demonstration]) -> Tensor:
    """Of rows padded at the end, where nothing that counts attends to it. [B]"""
    rows = [torch.tensor(demonstration.token_ids) for demonstration in batch]
    masks = [torch.tensor(demonstration.is_action) for demonstration in batch]
    token_ids = pad_sequence(rows, batch_first=True, padding_value=0)  # [B, T]
    is_action = pad_sequence(masks, batch_first=True)  # [B, T]
    logits = model(input_ids=token_ids[:, :-1]).logits
    losses = cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none")
    return -(losses * is_action[:, 1:]).sum(1)


@torch.no_grad()
def measure_mastery(model: Qwen3ForCausalLM, tokenizer: Tokenizer, to_solve: list[Task]) -> Mastery:
    """Measure it on ``to_solve``, at the price of three forward passes."""
    by_tool = [demonstrate(task, tool_actions(task), tokenizer) for task in to_solve]
    by_head = [demonstrate(task, [task.answer], tokenizer) for task in to_solve]
    chances = [
        float(demonstration_logprobs(model, ways).exp().mean())
        for ways in ([_begun(way) for way in by_tool], by_tool, by_head)
    ]
    return Mastery(skill=chances[0], accuracy=chances[1] + chances[2])


def _begun(demonstration: Demonstration) -> Demonstration:
    """The same with its first action token given."""
    is_action = list(demonstration.is_action)
    is_action[is_action.index(True)] = False
    return Demonstration(demonstration.token_ids, is_action)
