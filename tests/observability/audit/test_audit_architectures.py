"""The audit's replay of every architecture, sliding-window layers included."""

from pathlib import Path
from typing import Any

import pytest

from tests.models import make_model_directory
from tests.observability import recorded
from tests.observability.sampled_runs import KINDS, make_models, one_version, record_run
from tidegate.observability.audit.audit import TOLERANCE, audit_run

pytestmark = pytest.mark.slow

WINDOW = 4
"""Shorter than each context, so that batched replays have padding outside of windows."""

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": EXPERTS,
    "gpt2": {},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_audits_agree_for_every_sampling_mode(model_type: str, tmp_path: Path) -> None:
    models = make_models(model_type=model_type, **MODELS[model_type])
    rollouts = [kind(models, number) for number, kind in enumerate(KINDS)]
    rollouts += [
        one_version(models, number, version=number % 3, tokens=number - 4)
        for number in range(6, 14)
    ]

    report = audit_run(record_run(tmp_path / "run", models, rollouts))

    assert [str(problem) for problem in report.problems] == []
    assert report.tokens_agreeing == report.tokens
    assert report.worst is not None
    assert report.worst.difference < TOLERANCE / 10
    assert report.version_power.unnoticed_share < 0.1  # a Gemma is near-certain of some tokens


@pytest.mark.wire
def test_a_run_of_a_model_with_limited_time_steps_agrees(tmp_path: Path) -> None:
    make_model_directory(tmp_path / "model", "nemotron_h", time_step_min=1.4)

    report = audit_run(recorded.record_run(tmp_path / "run"))

    assert report.agrees, report.lines()
    assert report.worst is not None
    assert report.worst.difference < TOLERANCE / 10
