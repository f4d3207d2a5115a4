"""Tests of the calculator task: its tool, its grader, its lengths, and disjoint splits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

import pytest

from examples.calculator import (
    ACTIONS_SPARE,
    INSTRUCTION,
    TERMS_MAX,
    Calculator,
    FinishedTurn,
    Split,
    Task,
    grade,
    long_tailed_tasks,
    solve,
    tasks,
)


@dataclass
class Said:
    text: str


@dataclass
class ScriptedEpisode:
    """A scripted policy that records the transcript."""

    script: list[str]
    transcript: list[str] = field(default_factory=list)

    def append(self, text_or_ids: str) -> None:
        self.transcript.append(text_or_ids)

    async def generate(self, *, max_tokens: int) -> FinishedTurn:
        text = self.script.pop(0)
        self.transcript.append(text)
        return Said(text)


def task_of(expression: str, answer: str) -> Task:
    question = f"{INSTRUCTION}{expression} ="
    return Task(question, expression, {"answer": answer, "metadata": {}})


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("?3+9", ">12\n"),
        ("?3-9", ">-6\n"),
        ("?-6+4", ">-2\n"),
        ("?-6-4", ">-10\n"),
        ("?0-0", ">0\n"),
        ("?9999+9999", ">19998\n"),
    ],
)
def test_a_call_is_answered_with_its_result(call: str, answer: str) -> None:
    assert Calculator(task_of("1 + 1", "2")).answer(call) == answer


@pytest.mark.parametrize(
    "call", ["", "?", "12", "?3", "?3+", "?3+-9", "?3*9", "?3+9+1", "? 3+9", "?3+9\n", "?12345+1"]
)
def test_anything_but_two_operands_is_an_error(call: str) -> None:
    assert Calculator(task_of("1 + 1", "2")).answer(call) == ">error\n"


async def test_calls_are_answered_until_the_policy_answers_itself() -> None:
    task = task_of("3 + 9 - 4", "8")
    episode = ScriptedEpisode(["?3+9", "?12-4", "8"])

    reward = await solve(episode, task)

    assert reward == 1.0
    assert episode.transcript == [task.question, "?3+9", ">12-4\n", "?12-4", ">8\n", "8"]


async def test_the_calculator_reads_the_sum_along_past_a_malformed_call() -> None:
    task = task_of("3 + 9 - 4 + 1", "9")
    episode = ScriptedEpisode(["?3+9", "?12-", "?12-4", "?8+1", "9"])

    assert await solve(episode, task) == 1.0
    assert episode.transcript[2::2] == [">12-4\n", ">error\n", ">8+1\n", ">9\n"]


async def test_an_answer_without_a_call_ends_the_episode_right_or_wrong() -> None:
    episode = ScriptedEpisode(["7", "8"])

    assert await solve(episode, task_of("3 + 9 - 4", "8")) == 0.0
    assert episode.script == ["8"]


async def test_a_malformed_call_is_answered_and_may_be_retried() -> None:
    task = task_of("1 + 1", "2")
    episode = ScriptedEpisode(["?1+", "2"])

    assert await solve(episode, task) == 1.0
    assert episode.transcript == [task.question, "?1+", ">error\n", "2"]


async def test_only_calls_score_nothing_and_the_last_is_not_answered() -> None:
    task = task_of("1 + 1", "2")
    episode = ScriptedEpisode(["?1+1"] * 9)

    assert await solve(episode, task) == 0.0
    calls_answered = 1 + ACTIONS_SPARE
    assert episode.transcript == [task.question, *["?1+1", ">2\n"] * calls_answered, "?1+1"]


@pytest.mark.parametrize("text", ["12", "+12", "012", "12.0"])
def test_the_librarys_grader_forgives_how_a_right_answer_is_written(text: str) -> None:
    assert grade(text, task_of("3 + 9", "12")) == 1.0


@pytest.mark.parametrize("text", ["", "11", "-12", "112", "12 or 13", "?3+9", ">12", "abc"])
def test_there_is_no_reward_for_less_than_the_right_answer(text: str) -> None:
    assert grade(text, task_of("3 + 9", "12")) == 0.0


@pytest.mark.parametrize("make", [tasks, long_tailed_tasks])
def test_no_sum_is_both_trained_on_and_held_out(
    make: Callable[[Split, int], Iterator[Task]],
) -> None:
    train = {task.expression for task in islice(make("train", 0), 3000)}
    held_out = {task.expression for task in islice(make("held_out", 0), 1000)}

    assert not train & held_out


def test_the_longest_of_a_batch_of_long_tailed_sums_has_three_times_the_mean_of_terms() -> None:
    terms = [
        len(task.expression.split()) // 2 + 1 for task in islice(long_tailed_tasks("train", 0), 960)
    ]
    longest = [max(terms[start : start + 16]) for start in range(0, 960, 16)]

    assert min(terms) == 2
    assert max(terms) == TERMS_MAX
    assert fmean(longest) / fmean(terms) > 2.8


def test_a_fifth_of_the_sums_is_held_out() -> None:
    """Checked on all 200 sums of two terms, each of which occurs within these samples."""
    train = {task.expression for task in islice(tasks("train", 0), 8000)}
    held_out = {task.expression for task in islice(tasks("held_out", 0), 2000)}
    two_terms = [{sum_ for sum_ in split if len(sum_.split()) == 3} for split in (train, held_out)]

    assert len(two_terms[0] | two_terms[1]) == 200
    assert 20 <= len(two_terms[1]) <= 60


def test_a_seed_always_gives_the_same_tasks_and_another_seed_others() -> None:
    first, again, other = (list(islice(tasks("train", seed), 50)) for seed in (5, 5, 6))

    assert first == again
    assert first != other


def test_every_question_is_the_instruction_and_a_sum_with_the_librarys_answer() -> None:
    for task in islice(tasks("train", 1), 200):
        assert task.question == f"{INSTRUCTION}{task.expression} ="
        assert len(task.expression.split()) in (3, 5)
        assert grade(task.answer, task) == 1.0
        assert set(task.expression) <= set("0123456789+- ")
