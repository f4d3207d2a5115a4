"""Calculator task of the demo: sums to solve over several turns with a calculator tool.

Defines tasks, the tool, a grader and the episode; none of them depends on engines or training. The
demos, their tests and several benchmarks import it; standard library only, but for the optional
``reasoning_gym``.

For ``3 + 9 - 4`` the policy writes an answer (``8``) or a call (``?3+9``). The calculator takes two
operands. It replies with their value and the rest of the sum's next term (``>12-4``), and the
policy writes the next call (``?12-4``) or, once the sum is complete (``>8``), its answer. So n
terms take n turns.
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
"""Actions allowed beyond the one per term that solves a sum: room for a mistake."""
ACTION_TOKENS_MAX = 9
"""Token limit of an action. The longest useful one, such as ``?-162-9``, takes 8 with its end
token."""

TERMS_MAX = 16
"""Maximum terms of a long-tailed sum: 16 turns, and less than 300 tokens of context."""
TERMS_LOG_MEAN, TERMS_LOG_DEVIATION = 1.0, 0.9
"""Parameters of the log-normal distribution of long-tailed sums' terms. Half of all sums have two
terms, one in 14 has ten or more; the longest of a batch of 16 has three times the mean."""

INSTRUCTION = "State the final answer to the following arithmetic problem: "
"""Fixed beginning of every question; the tiny model has one token for it."""

Split = Literal["train", "held_out"]

_CALL = re.compile(r"\?(-?[0-9]{1,4})([+-])([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Task:
    """One sum to solve."""

    question: str
    expression: str
    """The sum alone, terms and operators separated by spaces: ``3 + 9 - 4``."""
    entry: dict[str, Any]
    """reasoning_gym's dataset entry, which its grader needs."""

    @property
    def answer(self) -> str:
        """The right answer, for demonstrations; :func:`grade` does the grading."""
        return str(self.entry["answer"])

    @property
    def continuations(self) -> list[str]:
        """Terms that the calculator appends to its answers, in order: ``-4`` for ``3 + 9 - 4``.

        One for each term but the first two; the sum's last answer gets nothing appended.
        """
        _, _, _, *rest = self.expression.split()
        pairs = zip(rest[::2], rest[1::2], strict=True)
        return [f"{operator}{operand}" for operator, operand in pairs]


class FinishedTurn(Protocol):
    """The part of ``tidegate.GeneratedTurn`` that this task uses."""

    @property
    def text(self) -> str:
        """The turn's decoded text, without special tokens."""


class Episode(Protocol):
    """The part of ``tidegate.Episode`` that this task uses."""

    def append(self, text_or_ids: str) -> None:
        """Append text to the context."""

    async def generate(self, *, max_tokens: int) -> FinishedTurn:
        """Generate until the end token or the limit."""


async def solve(episode: Episode, task: Task) -> float:
    """Play one episode; return 1.0 for a right answer, 0.0 for a wrong one or too many calls."""
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
    """Answers the calls of one episode, and tracks the remaining terms of the sum."""

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
    """Return 1.0 if reasoning_gym's grader accepts ``text`` as fully right, otherwise 0.0."""
    return float(_dataset(2, 3).score_answer(text, task.entry) >= 0.999)


def tasks(split: Split, seed: int) -> Iterator[Task]:
    """Yield sums of two or three terms, endlessly and deterministically for a seed.

    There are about 4,200 distinct sums, so they repeat. Each sum belongs to one split only.
    """
    numbers = random.Random(seed)
    while True:
        yield _draw(_dataset(2, 3), split, numbers)


def long_tailed_tasks(split: Split, seed: int, *, terms_max: int = TERMS_MAX) -> Iterator[Task]:
    """Yield sums of mostly few and sometimes many terms: rollouts differ up to tenfold in length.

    Endless and deterministic for a seed, as :func:`tasks`.
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
    """Return whether the sum is in the held-out fifth of all sums."""
    return hashlib.md5(expression.encode(), usedforsecurity=False).digest()[0] % 5 == 0


@cache
def _dataset(terms_min: int, terms_max: int) -> Any:
    """Return reasoning_gym's lazy dataset; entry i is generated from ``seed + i``, so size is
    free."""
    return reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=terms_min,
        max_terms=terms_max,
        min_digits=1,
        max_digits=1,
        seed=1,
        size=10**8,
    )
