"""Whole training runs over external engines, with other weights after each batch.

With a staleness bound of one, five batches contain tokens of at least three versions however fast
the engines are: the last batch's are of none of the first two.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tidegate
from tidegate.observability.audit.audit import AuditReport, audit_run

BATCHES = 5

FIRST_TASK = 10
"""Fourth token of the first task's prompt; later tasks count up."""

MIDST = 5
"""Tokens after which a turn is held."""


async def solve(episode: tidegate.Episode, task: list[int]) -> float:
    episode.append(task)
    first = await episode.generate(max_tokens=40)
    episode.append([3, 4, 5])
    await episode.generate(max_tokens=20, top_k=20)
    return float(len(first.token_ids))


class InTheMidst:
    """Holds turns in a server double, so that the first new weights arrive mid-turn."""

    def __init__(self) -> None:
        self._begun_by: str | None = None
        """Label of the weights that sampled the start of a turn of the third group."""

    def __call__(self, prompt: list[int], sampled: int, label: str) -> bool:
        """Whether the turn is held for now."""
        groups = [token - FIRST_TASK for token in prompt[3:4]]  # a worker tries shorter ones
        if sampled < MIDST or groups not in ([0], [1], [2]):
            return False
        if groups != [2]:  # of the first batch, without which there are no new weights
            return self._begun_by is None
        self._begun_by = self._begun_by or label
        return label == self._begun_by


async def train(
    model: Path,
    run: Path,
    *,
    after_two: Callable[[], None] = lambda: None,
    batches: int = BATCHES,
    episode: Callable[[tidegate.Episode, list[int]], Awaitable[float]] = solve,
    **settings: Any,
) -> AuditReport:
    """Train for ``batches`` batches, publishing after each; ``after_two`` is called
    after two batches."""
    weights = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    seen = 0
    async with tidegate.serve(
        model=model,
        run_directory=run,
        group_size=3,
        groups_per_batch=2,
        max_staleness=1,
        temperature=0.8,
        **settings,
    ) as rollouts:
        tasks = ([1, 2, 3, FIRST_TASK + n % 80] * 5 for n in range(2 * batches))
        async for _ in rollouts.batches(tasks, episode=episode):
            seen += 1
            state = {
                name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise)
                for name, tensor in weights.items()
            }
            await rollouts.publish(state)
            if seen == 2:
                after_two()
        statistics = rollouts.statistics()
    assert seen == batches
    assert statistics.ledger.error == 0
    return audit_run(run)
