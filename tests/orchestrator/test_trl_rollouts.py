"""Are runs that TRL can't train on refused before a rollout is asked for? No TRL is needed."""

from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import pytest

import tidegate
from tidegate.errors import ConfigError


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(is_installed("trl"), reason="TRL is installed")
def test_without_trl_it_says_what_to_install_before_anything_is_generated() -> None:
    run: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"pip install 'tidegate\[trl\]'"):
        tidegate.TRLRollouts(run)


def test_a_run_whose_batches_wait_for_every_publish_is_refused() -> None:
    run: Any = SimpleNamespace(settings=SimpleNamespace(policy=None, max_staleness=0))
    with pytest.raises(ConfigError, match="max_staleness of at least 1, got 0"):
        tidegate.TRLRollouts(run)


async def solve(episode: tidegate.Episode, task: int) -> float:
    return 0.0


@pytest.mark.parametrize("given", [{}, {"tasks": [1]}, {"episode": solve}])
def test_a_run_of_this_process_without_tasks_or_episode_is_refused(given: dict[str, Any]) -> None:
    run: Any = SimpleNamespace(settings=SimpleNamespace(policy=None, max_staleness=1))
    with pytest.raises(ConfigError, match="has its tasks and its episode from here"):
        tidegate.TRLRollouts(run, **given)
