"""Warm-up demonstrations of the calculator task: first with the tool, then mostly answers without
it.

``tiny_model`` uses :class:`ToolDemonstrations` as its default source; ``imitation`` trains on it.

Shapes: B demonstrations in a batch.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from examples.calculator import Calculator, Task, long_tailed_tasks
from examples.imitation import Demonstration, Performance, Phase, Plan, demonstration_logprobs

PLAN = Plan(
    skill_phase=Phase(
        skill_share=0.8, learning_rate=2e-3, check_steps=20, cooling_steps=(140, 240)
    ),
    skill_wanted=0.9,
    mixed_phase=Phase(skill_share=0.3, learning_rate=4e-4, check_steps=2),
    accuracy_wanted=(0.27, 0.33),
)
"""Skill is to call the tool. A good imitation of the second phase solves .30 x skill + .70 / 19 =
.31."""
ANSWER_ERROR_MAX = 9
"""Largest error of an answer without the tool, in either direction: 1 in 19 is right."""
CHECK_TASKS = 64
LESSON_TERMS_MAX = 8
"""Longest demonstrated sum. Each call copies what the calculator showed last, so a model that
solves these solves longer ones as well, and demonstrations of those take far longer."""


def demonstrate(task: Task, actions: list[str], tokenizer: Tokenizer) -> Demonstration:
    """Play ``actions`` in order, with the calculator's answer after each call."""
    shown = Demonstration()
    shown.add(tokenizer, task.question, is_action=False)
    calculator = Calculator(task)
    for action in actions:
        shown.add(tokenizer, f"{action}<eos>", is_action=True)
        if action.startswith("?"):
            shown.add(tokenizer, calculator.answer(action), is_action=False)
    return shown


def tool_actions(task: Task) -> list[str]:
    """Return the calls that solve the sum from left to right, and the answer."""
    calculator = Calculator(task)
    shown = "".join(task.expression.split()[:3])
    actions = []
    for _ in range(len(task.continuations) + 1):
        actions.append(f"?{shown}")
        shown = calculator.answer(actions[-1]).strip(">\n")
    return [*actions, shown]


@dataclass(slots=True)
class ToolDemonstrations:
    """Demonstrations with the calculator, and of answers without it."""

    tokenizer: Tokenizer
    seed: int
    plan: Plan = PLAN
    _to_solve: Iterator[Task] = field(init=False)
    _held_out: list[Task] = field(init=False)
    _numbers: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._to_solve = long_tailed_tasks("train", self.seed, terms_max=LESSON_TERMS_MAX)
        self._held_out = list(islice(long_tailed_tasks("held_out", self.seed), CHECK_TASKS))
        self._numbers = random.Random(self.seed)

    def batch(self, skill_share: float) -> list[Demonstration]:
        """Return demonstrations of the next tasks. [B]"""
        to_solve = islice(self._to_solve, self.plan.batch_demonstrations)
        return [self._demonstrate(task, skill_share) for task in to_solve]

    def performance(self, model: Qwen3ForCausalLM) -> Performance:
        """Measure a model on held-out tasks."""
        return measure_performance(model, self.tokenizer, self._held_out)

    def _demonstrate(self, task: Task, tool_share: float) -> Demonstration:
        if self._numbers.random() < tool_share:
            return demonstrate(task, tool_actions(task), self.tokenizer)
        return demonstrate(task, [unaided_answer(task, self._numbers)], self.tokenizer)


def unaided_answer(task: Task, numbers: random.Random) -> str:
    """Return an answer given without a calculator, mostly wrong."""
    return str(int(task.answer) + numbers.randint(-ANSWER_ERROR_MAX, ANSWER_ERROR_MAX))


def measure_performance(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, to_solve: list[Task]
) -> Performance:
    """Measure the model on ``to_solve``, at the cost of three forward passes."""
    by_tool = [demonstrate(task, tool_actions(task), tokenizer) for task in to_solve]
    by_head = [demonstrate(task, [task.answer], tokenizer) for task in to_solve]
    return measure_demonstrations(model, by_tool, by_head)


@torch.no_grad()
def measure_demonstrations(
    model: Qwen3ForCausalLM, by_tool: list[Demonstration], by_head: list[Demonstration]
) -> Performance:
    """Return the probabilities of solving tasks with the tool, or by the bare right answer.

    Skill is the probability of a right tool path once a call has begun. Other ways hardly occur, so
    these probabilities equal what sampling would measure, without its noise.
    """
    chances = [
        float(demonstration_logprobs(model, ways).exp().mean())
        for ways in ([_begun(way) for way in by_tool], by_tool, by_head)
    ]
    return Performance(skill=chances[0], accuracy=chances[1] + chances[2])


def _begun(demonstration: Demonstration) -> Demonstration:
    """Return the demonstration with its first action token given, so not counted."""
    is_action = list(demonstration.is_action)
    is_action[is_action.index(True)] = False
    return Demonstration(demonstration.token_ids, is_action)
