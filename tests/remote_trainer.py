"""Trainer in a process of its own: ``python -m tests.remote_trainer ADDRESS MODEL [JSON]``.

It prints a line of JSON per batch, and an argument makes it die at one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tidegate


def say(**facts: Any) -> None:
    """Print one line for the test that started this process."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def weights(model: Path, batches: int) -> dict[str, torch.Tensor]:
    """Return the weights after this many batches, deterministically."""
    noise = torch.Generator().manual_seed(batches)
    state = load_file(model / "model.safetensors")
    return {k: t + 0.02 * torch.randn(t.shape, generator=noise) for k, t in state.items()}


def main(address: str, model: Path, options: dict[str, Any]) -> None:
    """Train until the tasks are used up, or until ``die_at``."""
    tasks = range(options["tasks"]) if "tasks" in options else None
    try:
        with tidegate.connect_sync(address, **options.get("connect", {})) as rollouts:
            say(joined=rollouts.rank, version=rollouts.version)
            for batch in rollouts.batches(tasks, episode=options.get("episode")):
                say(
                    number=batch.number,
                    rows=len(batch.rewards),
                    tasks=list(batch.tasks),
                    rollouts=batch.rollout_ids.tolist(),
                    staleness=batch.staleness.tolist(),
                )
                if batch.number == options.get("die_at"):
                    os.abort()
                is_mine = rollouts.rank == 0
                version = rollouts.publish(weights(model, batch.number) if is_mine else None)
                say(published=version)
            say(trained=rollouts.statistics().ledger.trained)
    except tidegate.TidegateError as error:
        say(error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
