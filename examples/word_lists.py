"""Task of the demo on a pretrained model: words to list that begin with a letter, in a chat.

``async_grpo --task words`` trains on it. The reward has partial credit, and answers differ tenfold
in length: a small model starts lists, tells stories, or says next to nothing.
"""

import itertools
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

import tidegate
from examples.calculator import Split

INSTRUCTION = "You write lists of words, and nothing else."
COUNTS = range(4, 13)
"""Numbers of words asked for."""
LETTERS_MIN = 3
"""Letters of the shortest word that counts: one letter, over and over, is no list."""
ANSWER_TOKENS_MAX = 80
"""Token limit of an answer. A word of a list takes about four, with its number or comma."""

_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class WordTask:
    """List ``count`` words that begin with ``letter``."""

    letter: str
    count: int


def word_tasks(split: Split, seed: int) -> Iterator[WordTask]:
    """Yield tasks, endlessly and deterministically for a seed.

    There are 234, so they repeat. A fifth is held out.
    """
    tasks = [WordTask(*each) for each in itertools.product(string.ascii_lowercase, COUNTS)]
    random.Random(0).shuffle(tasks)
    held_out = len(tasks) // 5
    own = tasks[:held_out] if split == "held_out" else tasks[held_out:]
    numbers = random.Random(seed)
    while True:
        yield from numbers.sample(own, len(own))


def question(task: WordTask) -> str:
    """Return the question of a task."""
    return f"{task.count} words that begin with the letter {task.letter}:"


async def list_words(episode: tidegate.Episode, task: WordTask) -> float:
    """Play one episode: a turn."""
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": question(task)},
    ]
    turn = await episode.generate(messages=messages, max_tokens=ANSWER_TOKENS_MAX)
    return grade(turn.text, task)


def grade(text: str, task: WordTask) -> float:
    """Return the share of different words that begin with the letter, of all words written, or of
    those asked for if these are more. No dictionary says whether they are words."""
    words = _WORD.findall(text.lower())
    right = {each for each in words if each[0] == task.letter and len(each) >= LETTERS_MIN}
    return len(right) / max(task.count, len(words))
