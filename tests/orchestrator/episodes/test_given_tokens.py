"""Cached tokens of texts that a group's rollouts append."""

from array import array
from typing import Any, cast

import pytest

from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.model_files import TEXTS_CACHED_MAX, TextEncoder, TokenCache


class Letters:
    """Encoder of letters that records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, **limits: object) -> list[int]:
        """Return one token per letter."""
        self.asked.append(text)
        return [ord(letter) for letter in text]


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture
def given(letters: Letters) -> TokenCache:
    return TokenCache(cast(TextEncoder, letters))


def test_a_text_that_comes_again_is_tokenised_once(given: TokenCache, letters: Letters) -> None:
    assert [given.of("ab"), given.of("c"), given.of("ab")] == [
        array("i", [97, 98]),
        array("i", [99]),
        array("i", [97, 98]),
    ]
    assert letters.asked == ["ab", "c"]


def test_only_so_many_texts_are_remembered(given: TokenCache, letters: Letters) -> None:
    texts = [f"{number}" for number in range(TEXTS_CACHED_MAX + 1)]
    for text in texts:
        given.of(text)
    given.of(texts[-1])
    assert letters.asked == texts
    given.of(texts[0])
    assert letters.asked == [*texts, texts[0]]


def test_a_list_that_was_changed_since_is_read_anew(given: TokenCache) -> None:
    ids = [1, 2]
    before = given.of(ids)
    ids.append(3)
    assert given.of(ids) == array("i", [1, 2, 3])
    assert before == array("i", [1, 2])


def test_rollouts_that_were_given_the_same_go_different_ways(given: TokenCache) -> None:
    one, other = Rollout(0, 0, 0), Rollout(1, 0, 1)
    for rollout in (one, other):
        rollout.extend(given.of([1, 2]))
    one.extend(given.of([3]))
    assert one.token_ids.tolist() == [1, 2, 3]
    assert other.token_ids.tolist() == [1, 2]
    assert given.of([1, 2]) == array("i", [1, 2])


@pytest.mark.parametrize(("ids", "error"), [(["a"], TypeError), ([1 << 31], OverflowError)])
def test_what_is_no_token_is_refused_each_time(
    given: TokenCache, ids: list[Any], error: type[Exception]
) -> None:
    for _ in range(2):
        with pytest.raises(error):
            given.of(ids)
    assert given.of([]) == array("i")
