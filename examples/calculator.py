"""The demo's task: sums, with a calculator that answers between turns.

Tasks, a tool, a grader and an episode that joins them; nothing here depends on engines or training.
For ``3 + 9 - 4`` the policy writes an answer (``8``) or a call (``?3+9``). The calculator takes two
operands. It answers with their value and how the sum goes on (``>12-4``), and the policy writes the
next call (``?12-4``) or, once the sum is over (``>8``), its answer. So n terms take n turns.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import reasoning_gym

ACTIONS_SPARE = 1
"""Actions beyond those that solve a sum, one for each of its terms: room for a mistake."""
ACTION_TOKENS_MAX = 9
"""The longest useful action, such as ``?-162-9``, takes 8 with its end token."""

TERMS_MAX = 16
"""Most terms of a long-tailed sum: 16 turns, and less than 300 tokens of context."""
TERMS_LOG_MEAN, TERMS_LOG_DEVIATION = 1.0, 0.9
"""Of the log-normal distribution that long-tailed sums draw their terms from. Half of all sums have
two terms, one in 14 has ten or more; the longest of a batch of 16 has three times the mean."""

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

    @property
    def continuations(self) -> list[str]:
        """What the calculator adds to its answers, in order: ``-4`` for ``3 + 9 - 4``.

        The last answer of a sum gets nothing, so there is one for each term but the first two.
        """
        _, _, _, *rest = self.expression.split()
        pairs = zip(rest[::2], rest[1::2], strict=True)
        return [f"{operator}{operand}" for operator, operand in pairs]


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
    """Play one episode; 1.0 for a right answer, 0.0 for a wrong one or for too many calls."""
    episode.append(task.question)
    calculator = Calculator(task)
    actions_max = len(task.continuations) + 2 + ACTIONS_SPARE
    for actions_left in reversed(range(actions_max)):
        turn = await episode.generate(max_tokens=ACTION_TOKENS_MAX)
        if not turn.text.startswith("?"):
            return grade(turn.text, task)
        if actions_left:
            episode.append(calculator.answer(turn.text))
    return 0.0


class Calculator:
    """Answers the calls of one episode, and reads the sum along with them."""

    def __init__(self, task: Task) -> None:
        self._continuations = iter(task.continuations)

    def answer(self, call: str) -> str:
        """Answer ``?3+9`` with ``>12`` and the sum's next term, anything else with ``>error``."""
        match = _CALL.fullmatch(call)
        if match is None:
            return ">error\n"
        left, operator, right = int(match[1]), match[2], int(match[3])
        value = left + right if operator == "+" else left - right
        return f">{value}{next(self._continuations, '')}\n"


def grade(text: str, task: Task) -> float:
    """1.0 if the library's grader takes ``text`` as fully right, otherwise 0.0."""
    return float(_dataset(2, 3).score_answer(text, task.entry) >= 0.999)


def tasks(split: Split, seed: int) -> Iterator[Task]:
    """Sums of two or three terms, endless; the same ones in the same order for the same seed.

    There are about 4,200 distinct sums, so they come again. A sum belongs to one split for ever.
    """
    numbers = random.Random(seed)
    while True:
        yield _draw(_dataset(2, 3), split, numbers)


def long_tailed_tasks(split: Split, seed: int, *, terms_max: int = TERMS_MAX) -> Iterator[Task]:
    """Sums of mostly few terms and sometimes many, so rollouts differ in length by up to ten times.

    Endless, and the same for the same seed, as :func:`tasks`.
    """
    numbers = random.Random(seed)
    while True:
        drawn = int(numbers.lognormvariate(TERMS_LOG_MEAN, TERMS_LOG_DEVIATION))
        terms = min(terms_max, max(2, drawn))
        yield _draw(_dataset(terms, terms), split, numbers)


def _draw(dataset: Any, split: Split, numbers: random.Random) -> Task:
    """Draw a sum of this split."""
    while True:
        entry = dataset[numbers.randrange(len(dataset))]
        expression = entry["metadata"]["expression"]
        if _is_held_out(expression) == (split == "held_out"):
            return Task(entry["question"], expression, entry)


def _is_held_out(expression: str) -> bool:
    """Whether it is among the fifth of all sums that nothing is ever trained on."""
    return hashlib.md5(expression.encode(), usedforsecurity=False).digest()[0] % 5 == 0


@cache
def _dataset(terms_min: int, terms_max: int) -> Any:
    """The library makes entry i from ``seed + i`` when asked, so the size costs nothing."""
    return reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=terms_min,
        max_terms=terms_max,
        min_digits=1,
        max_digits=1,
        seed=1,
        size=10**8,
    )
