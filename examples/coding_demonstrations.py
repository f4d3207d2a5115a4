"""Warm-up demonstrations for the coding task: right programs, and those that lack parentheses.

``agent_demo`` makes :class:`CodingDemonstrations` for ``tiny_model``, which trains on them.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from examples.coding import right_program, tasks, wrong_program
from examples.imitation import Demonstration, Performance, Phase, Plan, demonstration_logprobs
from examples.tiny_model import Recipe, character_tokenizer

SPECIAL = ("<pad>", "<eos>", "<unk>")
PHRASES = ("print(", "int(input())")
CHARACTERS = "0123456789+-*(): "

PLAN = Plan(
    skill_phase=Phase(skill_share=0.8, learning_rate=2e-3, check_steps=10),
    skill_wanted=0.95,
    mixed_phase=Phase(skill_share=0.3, learning_rate=4e-4, check_steps=2),
    accuracy_wanted=(0.25, 0.35),
)
"""Skill is a right program once it has begun with a parenthesis."""
CHECK_TASKS = 64


@dataclass(slots=True)
class CodingDemonstrations:
    """Demonstrations of programs."""

    tokenizer: Tokenizer
    seed: int
    plan: Plan = PLAN
    _tasks: Iterator[str] = field(init=False)
    _held_out: list[str] = field(init=False)
    _numbers: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._tasks = tasks("train", self.seed)
        self._held_out = list(islice(tasks("held_out", self.seed), CHECK_TASKS))
        self._numbers = random.Random(self.seed)

    def batch(self, skill_share: float) -> list[Demonstration]:
        """Return demonstrations of the next tasks. [B]"""
        return [
            self._demonstrate(
                task,
                right_program(task)
                if self._numbers.random() < skill_share
                else wrong_program(task),
            )
            for task in islice(self._tasks, self.plan.batch_demonstrations)
        ]

    @torch.no_grad()
    def performance(self, model: Qwen3ForCausalLM) -> Performance:
        """Measure a model on held-out tasks."""
        whole = [self._demonstrate(task, right_program(task)) for task in self._held_out]
        begun = [self._demonstrate(task, right_program(task), given=2) for task in self._held_out]
        skill, accuracy = (
            float(demonstration_logprobs(model, programs).exp().mean())
            for programs in (begun, whole)
        )
        return Performance(skill=skill, accuracy=accuracy)

    def _demonstrate(self, task: str, program: str, given: int = 0) -> Demonstration:
        """Demonstrate a program, of whose tokens the first ``given`` are not counted."""
        question = self.tokenizer.encode(f"{task}: ").ids
        answer = self.tokenizer.encode(f"{program}<eos>").ids
        is_action = [False] * (len(question) + given) + [True] * (len(answer) - given)
        return Demonstration(question + answer, is_action)


def coding_tokenizer() -> Tokenizer:
    """Return the tokenizer of characters and two phrases."""
    return character_tokenizer([*SPECIAL, *PHRASES, *CHARACTERS], special=SPECIAL, phrases=PHRASES)


CODER = Recipe(
    tokenizer=coding_tokenizer,
    source=CodingDemonstrations,
    sources=("coding_demonstrations.py", "coding.py"),
)
"""Recipe of the coding task's model."""
