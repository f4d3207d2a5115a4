"""Audit of whole runs in other architectures: windows, experts, the transformers fallback."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

import tidegate
from tests.models import HYBRID_TYPES, make_model, make_model_directory
from tidegate.observability.audit.audit import audit_run
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.transport.messages import KvPolicy, PauseMode

pytestmark = pytest.mark.wire

MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 6},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 6},
    "gpt2": {},
    "mixtral": {"tied": False, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "tied": False,
        "sliding_window": 6,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    **{model_type: {"tied": False} for model_type in HYBRID_TYPES},
}


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=16)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=8)
    return float(turn.token_ids[0] % 2)


def some_by_the_names_of_directories(model: Any) -> dict[str, torch.Tensor]:
    """Return tensors under the directory's names: the embedding, an untied head,
    and converted ones."""
    state = model.state_dict()
    saved = revert_weight_conversion(model, dict(state))
    converted = {name: tensor for name, tensor in saved.items() if name not in state}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    ends = {
        n: t for n, t in state.items() if t.data_ptr() in (embedding.data_ptr(), head.data_ptr())
    }
    return ends | converted


async def audited_run(
    root: Path,
    model_type: str,
    fields: dict[str, Any],
    episode: Callable[[tidegate.Episode, int], Awaitable[float]],
    tasks: range,
    *,
    parts: bool = False,
    **settings: Any,
) -> RunStatistics:
    """Run and audit episodes on one engine, publishing noisy weights after each batch, in parts
    every third time if ``parts``."""
    path = make_model_directory(root / "model", model_type, **fields)
    trained: Any = make_model(model_type, **fields)
    noise = torch.Generator().manual_seed(0)
    async with tidegate.serve(
        model=path,
        engines=1,
        groups_per_batch=2,
        max_running_turns=8,
        max_staleness=2,
        run_directory=root / "run",
        **settings,
    ) as rollouts:
        published = 0
        async for batch in rollouts.batches(tasks, episode=episode):
            published += 1
            is_part = parts and published % 3 == 0
            changed = [trained.get_output_embeddings().weight] if is_part else trained.parameters()
            with torch.no_grad():
                for parameter in changed:
                    parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
            if is_part:
                part = some_by_the_names_of_directories(trained)
                await rollouts.publish(part, batches=[batch], partial=True)
            else:
                await rollouts.publish(trained.state_dict())
        statistics = rollouts.statistics()

    assert statistics.engines[0].block_tokens == 16
    report = audit_run(root / "run")
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained
    return statistics


@pytest.mark.parametrize("model_type", MODELS)
async def test_every_token_of_a_run_with_updates_in_flight_is_audited(
    model_type: str, tmp_path: Path
) -> None:
    statistics = await audited_run(
        tmp_path,
        model_type,
        MODELS[model_type],
        two_turns,
        range(10),
        parts=True,
        group_size=2,
        pause_mode="keep",
        kv_policy="keep",
    )
    is_ours = model_type in ("gemma3_text", "qwen3_moe", "gpt_oss")
    (engine,) = statistics.engines
    assert engine.model_code == ("tidegate" if is_ours else "transformers")
    assert engine.dtype == "float32"


async def of_one_prompt(episode: tidegate.Episode, task: int) -> float:
    """Two turns after a prompt of three blocks, which the group shares."""
    episode.append([10 + task % 40, *range(1, 45)])
    await episode.generate(max_tokens=12)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=12)
    return float(turn.token_ids[0] % 2)


@pytest.mark.parametrize(
    ("model_type", "pause_mode", "kv_policy"),
    [
        ("falcon_h1", "abort", "recompute"),
        ("qwen3_5_text", "keep", "recompute"),
        ("nemotron_h", "keep", "keep"),
    ],
)
async def test_hybrids_are_audited_where_turns_share_few_blocks(
    model_type: str,
    pause_mode: PauseMode,
    kv_policy: KvPolicy,
    tmp_path: Path,
) -> None:
    statistics = await audited_run(
        tmp_path,
        model_type,
        {"tied": False},
        of_one_prompt,
        range(8),
        group_size=4,
        num_kv_blocks=17,  # of the 8 turns some need 5, of which 2 are shared
        pause_mode=pause_mode,
        kv_policy=kv_policy,
    )
    assert statistics.cached_context_tokens > 0
