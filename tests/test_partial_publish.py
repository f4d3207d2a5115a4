"""Can a trainer publish only what changed, for real: engine processes, the wire, the audit?"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tidegate.errors import WeightsRefused
from tidegate.orchestrator.records.audit import audit_run


async def episode(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=8)
    return float(turn.token_ids[0] % 2)


async def test_tokens_of_versions_published_in_parts_are_audited(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model")
    state = load_file(model / "model.safetensors")
    names = list(state)
    noise = torch.Generator().manual_seed(0)
    async with tidegate.serve(
        model=model,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        weight_channel="zmq",
        weight_checksums=True,
        run_directory=tmp_path / "run",
    ) as rollouts:
        async for _ in rollouts.batches(range(12), episode=episode):
            step = rollouts.version
            part = {name: state[name] for name in names[step * 4 : step * 4 + 5]}
            for tensor in part.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=noise)
            if step == 3:
                await rollouts.publish(state)
            else:
                await rollouts.publish(part, partial=True)
            with pytest.raises(WeightsRefused, match="has no tensor 'head'"):
                await rollouts.publish({"head": torch.zeros(3)}, partial=True)
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.versions >= 3
