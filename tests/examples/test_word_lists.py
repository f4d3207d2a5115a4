"""Tests of the lists of words: what counts, what costs, and disjoint splits."""

from itertools import islice

import pytest

from examples.word_lists import WordTask, grade, word_tasks


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("bear, boat, bell, bank", 1),
        ("1. Bear\n2. Boat\n3. Bell\n4. Bank\n", 1),
        ("bear, boat", 2 / 4),
        ("bear, boat, bell, cat", 3 / 4),
        ("bear, bear, bear, bear", 1 / 4),
        ("b, bb, b, b", 0),
        ("bear, boat, bell, bank, and so on", 4 / 7),
        ("Here you are: bear", 1 / 4),
        ("", 0),
    ],
)
def test_different_words_with_the_letter_count_and_all_others_cost(
    text: str, reward: float
) -> None:
    assert grade(text, WordTask("b", 4)) == pytest.approx(reward)


def test_tasks_are_the_same_for_a_seed_and_none_comes_twice_before_all_have_come() -> None:
    drawn = list(islice(word_tasks("train", 3), 188))
    assert drawn == list(islice(word_tasks("train", 3), 188))
    assert len(set(drawn)) == 188
    assert drawn != list(islice(word_tasks("train", 4), 188))


def test_no_held_out_task_is_trained_on() -> None:
    held_out, trained = (set(islice(word_tasks(s, 0), 300)) for s in ("held_out", "train"))
    assert not held_out & trained
    assert len(held_out) + len(trained) == 234
