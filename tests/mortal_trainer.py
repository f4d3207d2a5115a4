"""Trainer process that may be killed at any time and resumes from its checkpoint.

``python -m tests.mortal_trainer MODEL DIRECTORY ADDRESS TASKS`` prints a line per trained batch,
and waits for a line on standard input before the next, so that a test can kill it in time.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tidegate


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    """Two turns with an observation between them; the reward is arbitrary."""
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=10)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


def weights(model: Path, batches: int) -> dict[str, torch.Tensor]:
    """Return the weights after this many batches, deterministically."""
    noise = torch.Generator().manual_seed(batches)
    state = load_file(model / "model.safetensors")
    return {k: t + 0.02 * torch.randn(t.shape, generator=noise) for k, t in state.items()}


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Replace the checkpoint atomically."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(checkpoint))
    os.replace(draft, path)


async def main(model: Path, directory: Path, address: str, tasks: int) -> None:
    """Train until the tasks are used up."""
    path = directory / "checkpoint.json"
    checkpoint = json.loads(path.read_text()) if path.exists() else {"trained": [], "state": None}
    async with tidegate.serve(
        model=model,
        engines=0,
        listen_address=address,
        group_size=2,
        groups_per_batch=2,
        run_directory=directory,
        journal=True,
        resume=checkpoint["state"] or True,
    ) as rollouts:
        if rollouts.is_resumed:
            await rollouts.publish(weights(model, len(checkpoint["trained"])))
        async for batch in rollouts.batches(range(tasks), episode=two_turns):
            assert (batch.staleness <= 2).all()
            checkpoint["trained"].append([*batch.tasks[::2]])
            checkpoint["state"] = rollouts.state_dict()
            save(path, checkpoint)
            sys.stdout.write(f"{batch.tasks}\n")
            sys.stdout.flush()
            await rollouts.publish(weights(model, len(checkpoint["trained"])))
            await rollouts.ack(checkpoint["state"])
            sys.stdin.readline()  # blocks, as training does
        statistics = rollouts.statistics()
        assert statistics.ledger.error == 0
        assert statistics.max_staleness_seen <= 2
        save(directory / "ledger.json", {"trained": statistics.ledger.trained})


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
