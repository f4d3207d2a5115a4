"""Trainer for ``tidegate run``, named by examples/run.toml: GRPO as in grpo.py, with its arguments.

`tidegate run` calls :func:`train` with a started run, tasks and an episode.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import tidegate
from examples.calculator import long_tailed_tasks
from examples.grpo import learn
from tidegate.orchestrator.episodes.runner import EpisodeFunction

HELD_OUT_SEED = 11


def held_out(*, count: int) -> Sequence[Any]:
    """Return tasks that are not trained on."""
    return list(itertools.islice(long_tailed_tasks("held_out", HELD_OUT_SEED), count))


async def train(
    rollouts: tidegate.Rollouts,
    tasks: Iterable[Any],
    episode: EpisodeFunction,
    *,
    batches: int,
    learning_rate: float = 3e-4,
) -> dict[str, object]:
    """Train; the returned figures go into the run's record."""
    torch.set_num_threads(1)
    settings = rollouts.settings
    measured = await learn(
        rollouts,
        episode,
        model=settings.model,
        training=list(itertools.islice(tasks, batches * settings.staleness.groups_per_batch)),
        learning_rate=learning_rate,
    )
    return {"mismatch": measured.mismatch}
