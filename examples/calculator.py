"""What task does the demo learn? Short sums, with a calculator that answers between turns.

It knows nothing of engines or training: tasks, a tool, a grader and an episode that joins them.
The policy writes an answer (``12``) or a call (``?3+9``); a call is answered (``>12``) and the
policy goes on. The calculator takes two operands, so three terms take two calls and an answer.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import reasoning_gym

ACTIONS_MAX = 4
"""Two calls and an answer solve every task; one action is left for a mistake."""
ACTION_TOKENS_MAX = 9
"""The longest useful action, such as ``?18-9``, takes 6 with its end token; the rest is slack."""

INSTRUCTION = "State the final answer to the following arithmetic problem: "
"""How every question begins, word for word; the tiny model has one token for it."""

Split = Literal["train", "held_out"]

_CALL = re.compile(r"\?(-?[0-9]{1,4})([+-])([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Task:
    """One sum to work out."""

    question: str
    expression: str
    """The sum alone, terms and operators with a space between: ``3 + 9 - 4``."""
    entry: dict[str, Any]
    """What the library made, which its grader wants back."""

    @property
    def answer(self) -> str:
        """The right answer, for demonstrations; grading is :func:`grade`'s business."""
        return str(self.entry["answer"])


class FinishedTurn(Protocol):
    """What a generation call gives back, as far as this task cares."""

    @property
    def text(self) -> str:
        """The tokens decoded, special ones left out."""


class Episode(Protocol):
    """The part of ``tidegate.Episode`` that this task uses."""

    def append(self, text_or_ids: str) -> None:
        """Add given text to what the model reads."""

    async def generate(self, *, max_tokens: int) -> FinishedTurn:
        """Let the model go on until its end token, or the limit."""


async def solve(episode: Episode, task: Task) -> float:
    """Play one episode; 1.0 for a right answer, 0.0 for a wrong one or none after four actions."""
    episode.append(task.question)
    for actions_left in reversed(range(ACTIONS_MAX)):
        turn = await episode.generate(max_tokens=ACTION_TOKENS_MAX)
        if not turn.text.startswith("?"):
            return grade(turn.text, task)
        if actions_left:
            episode.append(calculate(turn.text))
    return 0.0


def calculate(call: str) -> str:
    """Answer a call such as ``?3+9`` with ``>12``, and anything else with ``>error``."""
    match = _CALL.fullmatch(call)
    if match is None:
        return ">error\n"
    left, operator, right = int(match[1]), match[2], int(match[3])
    return f">{left + right if operator == '+' else left - right}\n"


def grade(text: str, task: Task) -> float:
    """1.0 if the library's grader takes ``text`` as fully right, otherwise 0.0."""
    return float(_dataset().score_answer(text, task.entry) >= 0.999)


def tasks(split: Split, seed: int) -> Iterator[Task]:
    """Tasks of one split, endless; the same ones in the same order for the same seed.

    There are about 4,200 distinct sums, so they come again. A sum belongs to one split for ever.
    """
    numbers = random.Random(seed)
    dataset = _dataset()
    while True:
        entry = dataset[numbers.randrange(len(dataset))]
        expression = entry["metadata"]["expression"]
        if _is_held_out(expression) == (split == "held_out"):
            yield Task(entry["question"], expression, entry)


def _is_held_out(expression: str) -> bool:
    """Whether it is among the fifth of all sums that nothing is ever trained on."""
    return hashlib.md5(expression.encode(), usedforsecurity=False).digest()[0] % 5 == 0


@cache
def _dataset() -> Any:
    """The library makes entry i from ``seed + i`` when asked, so the size costs nothing."""
    return reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=3, min_digits=1, max_digits=1, seed=1, size=10**8
    )
