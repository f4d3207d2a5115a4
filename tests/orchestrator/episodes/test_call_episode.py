"""call_episode over functions that are async, and over functions that only resemble them."""

import functools
import re
from typing import Any

import pytest

from tidegate.errors import ConfigError, EpisodeError
from tidegate.orchestrator.episodes.runner import call_episode


async def solve(episode: Any, task: int) -> float:
    return float(task)


class Solver:
    async def __call__(self, episode: Any, task: int) -> float:
        return await solve(episode, task)


ASYNC = [solve, Solver(), functools.partial(solve), lambda episode, task: solve(episode, task)]


@pytest.mark.parametrize("function", ASYNC)
async def test_whatever_returns_an_awaitable_is_an_episode(function: Any) -> None:
    assert await call_episode(function, None, 3) == 3.0


def plain(episode: Any, task: int) -> float:
    return 0.5


def forgetful(episode: Any, task: int) -> int:
    turn: Any = solve(episode, task)
    try:
        return len(turn.text)
    finally:
        turn.close()


async def of_one_argument(episode: Any) -> float:
    return 0.5


NOT_EPISODES = [
    (plain, ConfigError, "the episode plain is not async, it returned 0.5"),
    (forgetful, EpisodeError, "calling the episode forgetful raised AttributeError("),
    (of_one_argument, EpisodeError, "calling the episode of_one_argument raised TypeError("),
]


@pytest.mark.parametrize(("function", "error", "why"), NOT_EPISODES)
def test_a_function_that_cannot_be_an_episode_is_refused_with_its_definition_to_write(
    function: Any, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=re.escape(why)) as raised:
        call_episode(function, None, 3)
    assert f"`async def {function.__name__}(episode, task)`" in str(raised.value)
