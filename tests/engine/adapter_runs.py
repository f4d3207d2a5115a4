"""How do tests train over others' engines? Whole runs, with weights that change each time."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tidegate
from tidegate.orchestrator.records.audit import AuditReport, audit_run

BATCHES = 4


async def solve(episode: tidegate.Episode, task: list[int]) -> float:
    episode.append(task)
    first = await episode.generate(max_tokens=40)
    episode.append([3, 4, 5])
    await episode.generate(max_tokens=20, top_k=20)
    return float(len(first.token_ids))


async def train(
    model: Path,
    run: Path,
    *,
    after_two: Callable[[], None] = lambda: None,
    batches: int = BATCHES,
    episode: Callable[[tidegate.Episode, list[int]], Awaitable[float]] = solve,
    **settings: Any,
) -> AuditReport:
    """Publish other weights after each batch; ``after_two`` batches something may happen."""
    weights = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    seen = 0
    async with tidegate.serve(
        model=model,
        run_directory=run,
        group_size=3,
        groups_per_batch=2,
        max_staleness=2,
        temperature=0.8,
        **settings,
    ) as rollouts:
        tasks = ([1, 2, 3, 10 + n % 80] * 5 for n in range(2 * batches))
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
