"""Settings, episodes and weights of the runs of this folder."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tidegate
from tidegate.observability.audit.audit import AuditReport, audit_run

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
    "failure_policy": tidegate.FailurePolicy(retry_delay_s=0),
}

SINGLE: dict[str, Any] = SMALL | {"group_size": 1, "max_staleness": 1}

WAIT_S = 60.0
"""Far longer than anything here takes: reaching it is a failure, not a timing."""


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


async def until(condition: Callable[[], bool]) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - another thread brings it about
            await asyncio.sleep(0.005)


def audited(run: Path, **options: Any) -> AuditReport:
    """Audit a run's records, which must agree."""
    report = audit_run(run, **options)
    assert report.agrees, report.lines()
    return report


class Weights:
    """A trainer's model: a state dict that changes at every step."""

    def __init__(self, model: Path) -> None:
        self.state = load_file(model / "model.safetensors")
        self._noise = torch.Generator().manual_seed(0)

    def step(self, names: str = "") -> dict[str, torch.Tensor]:
        """Change the tensors with ``names`` in their names, in place; return all."""
        for name, tensor in self.state.items():
            if names in name:
                tensor += 0.02 * torch.randn(tensor.shape, generator=self._noise)
        return self.state


def engine_process(model: Path, address: str, name: str = "outsider") -> "subprocess.Popen[bytes]":
    """Start an engine that no run has started; it connects to ``address``."""
    command = [sys.executable, "-m", "tidegate.engine.worker", "--connect", address]
    command += ["--model", str(model), "--engine", name, "--max-running-turns", "8"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)
