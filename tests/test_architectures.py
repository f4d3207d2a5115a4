"""Is every token of a run what its tags say in other architectures: windows, experts, fallback?"""

from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.models import make_model, make_model_directory
from tidegate.orchestrator.records.audit import audit_run

MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 6},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 6},
    "gpt2": {},
}


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=16)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=8)
    return float(turn.token_ids[0] % 2)


@pytest.mark.parametrize("model_type", MODELS)
async def test_every_token_of_a_run_with_updates_in_flight_is_audited(
    model_type: str, tmp_path: Path
) -> None:
    fields = MODELS[model_type]
    path = make_model_directory(tmp_path / "model", model_type, **fields)
    trained = make_model(model_type, **fields)
    noise = torch.Generator().manual_seed(0)
    async with tidegate.serve(
        model=path,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        max_running_turns=8,
        max_staleness=2,
        pause_mode="keep",
        kv_policy="keep",
        run_directory=tmp_path / "run",
    ) as rollouts:
        async for _ in rollouts.batches(range(10), episode=two_turns):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
            await rollouts.publish(trained.state_dict())
        (engine,) = rollouts.statistics().engines

    assert engine.model_code == ("transformers" if model_type == "gpt2" else "tidegate")
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.tokens == rollouts.statistics().ledger.trained
