"""Warm-up demonstrations for the tool agent: conversations with calculator calls, as token ids.

``agent_demo`` makes :class:`AgentDemonstrations` for ``tiny_model``, which trains on them.
Conversations are tokenized as by the orchestrator: the agent's output and the template's additions
are encoded separately.
"""

import datetime
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from examples.agent_model import CALL_BEGIN, CALL_END, CHAT_TEMPLATE, SPECIAL, agent_tokenizer
from examples.agent_tools import calculate
from examples.calculator import Task, tasks
from examples.imitation import Demonstration, Performance, Phase, Plan
from examples.tiny_model import Recipe
from examples.warm_up import CHECK_TASKS, measure_demonstrations, unaided_answer
from tidegate.orchestrator.episodes.chat_template import ChatTemplate

PLAN = Plan(
    skill_phase=Phase(skill_share=0.6, learning_rate=2e-3, check_steps=10),
    skill_wanted=0.9,
    mixed_phase=Phase(skill_share=0.3, learning_rate=4e-4, check_steps=2),
    accuracy_wanted=(0.27, 0.33),
)
"""Same plan as the demo without messages (``warm_up``)."""

TOOLS = [{"type": "function", "function": {"name": "calculate"}}]
"""The tool schema, reduced to what the template shows."""


@dataclass(slots=True)
class AgentDemonstrations:
    """Demonstrations with the tool, and of answers without it."""

    tokenizer: Tokenizer
    seed: int
    plan: Plan = PLAN
    _template: ChatTemplate = field(init=False)
    _to_solve: Iterator[Task] = field(init=False)
    _held_out: list[Task] = field(init=False)
    _numbers: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._template = ChatTemplate(CHAT_TEMPLATE, {}, datetime.datetime.now().astimezone())
        self._to_solve = tasks("train", self.seed)
        self._held_out = list(islice(tasks("held_out", self.seed), CHECK_TASKS))
        self._numbers = random.Random(self.seed)

    def batch(self, skill_share: float) -> list[Demonstration]:
        """Return demonstrations of the next tasks. [B]"""
        numbers = self._numbers
        return [
            self.demonstrate(task, sums(task))
            if numbers.random() < skill_share
            else self.demonstrate(task, [], unaided_answer(task, numbers))
            for task in islice(self._to_solve, self.plan.batch_demonstrations)
        ]

    def performance(self, model: Qwen3ForCausalLM) -> Performance:
        """Measure a model on held-out tasks."""
        by_tool = [self.demonstrate(task, sums(task)) for task in self._held_out]
        by_head = [self.demonstrate(task, []) for task in self._held_out]
        return measure_demonstrations(model, by_tool, by_head)

    def demonstrate(self, task: Task, calls: list[str], answer: str | None = None) -> Demonstration:
        """Demonstrate these calls, then an answer, which defaults to the right one."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
        shown = self._template.render(messages, TOOLS)
        demonstration = Demonstration()
        demonstration.add(self.tokenizer, shown, is_action=False)
        for expression in [*calls, None]:
            said = tool_call_text(expression) if expression else answer or task.answer
            demonstration.add(self.tokenizer, f"{said}{SPECIAL[1]}", is_action=True)
            if expression is not None:
                messages += exchange(expression)
                before, shown = f"{shown}{said}{SPECIAL[1]}", self._template.render(messages, TOOLS)
                demonstration.add(self.tokenizer, shown.removeprefix(before), is_action=False)
        return demonstration


def sums(task: Task) -> list[str]:
    """Return the calls that solve the sum from left to right, two operands each."""
    total, *rest = task.expression.split()
    calls = []
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        calls.append(f"{total}{operator}{operand}")
        total = calculate(calls[-1])
    return calls


def tool_call_text(expression: str) -> str:
    """Return a call as the model writes it."""
    return f"{CALL_BEGIN}{expression}{CALL_END}"


def exchange(expression: str) -> list[dict[str, Any]]:
    """Return the messages of a call and its answer."""
    function = {"name": "calculate", "arguments": {"expression": expression}}
    call = {"type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": calculate(expression)},
    ]


TOOL_AGENT = Recipe(
    tokenizer=agent_tokenizer,
    source=AgentDemonstrations,
    sources=(
        "tool_demonstrations.py",
        "agent_model.py",
        "agent_tools.py",
        "calculator.py",
        "warm_up.py",
    ),
    context_tokens=1024,
    chat_template=CHAT_TEMPLATE,
)
"""Recipe of the tool agent's model."""
