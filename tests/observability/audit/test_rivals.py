"""Wrong tags between versions that are nearer to each other than the audit's tolerance."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tidegate
from tests.models import make_model_directory
from tests.observability import sampled_runs
from tests.observability.sampled_runs import (
    Row,
    claim_a_recompute,
    edit_rollout,
    make_models,
    move_boundary,
    record_run,
    tag_all,
)
from tidegate.observability.audit.audit import AuditReport, audit_run

pytestmark = pytest.mark.wire

ONE_VERSION, ABORTED, RECOMPUTED, KEPT, SWAPPED_IN_PREFILL = range(5)

DRIFT = 1e-5
"""Distance of the weights of neighbouring versions, ten times a step of Adam at 1e-6."""

TOLERANCE = 0.01
"""Nats; all tokens of all versions agree within it."""


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = make_models(drift=DRIFT)
    kinds = [sampled_runs.aborted, sampled_runs.recomputed, sampled_runs.kept]
    kinds += [sampled_runs.swapped_in_prefill]
    rollouts = [sampled_runs.one_version(models, ONE_VERSION, version=1, tokens=5)]
    rollouts += [kind(models, number) for number, kind in enumerate(kinds, start=1)]
    return record_run(tmp_path_factory.mktemp("runs") / "honest", models, rollouts)


@pytest.fixture
def run(honest_run: Path, tmp_path: Path) -> Path:
    """A copy of the correct run, to be falsified."""
    return shutil.copytree(honest_run, tmp_path / "run")


def move_recompute(row: Row) -> None:
    turn = row["turns"][0]
    boundary = turn["spans"][1]["start"]
    prefill = next(each for each in turn["prefills"] if each["at"] == boundary)
    move_boundary(row, -1)
    prefill["at"] -= 1
    prefill["spans"][-1]["end"] -= 1


def test_versions_closer_than_the_tolerance_are_distinguished(honest_run: Path) -> None:
    report = audit_run(honest_run, tolerance=TOLERANCE)
    assert report.agrees, report.lines()
    for power in (report.version_power, report.boundary_power, report.kv_power):
        assert power.tags_tried > 0
        assert power.tags_unnoticed == 0


@pytest.mark.parametrize(
    ("rollout_id", "lie", "claim"),
    [
        (ONE_VERSION, partial(tag_all, version=2), "v1"),
        (KEPT, partial(move_boundary, shift=1), "a boundary at token 4 in place of 5"),
        (KEPT, partial(move_boundary, shift=-1), "a boundary at token 4 in place of 3"),
        (KEPT, claim_a_recompute, "KV kept from before the recompute"),
        (ABORTED, move_recompute, "a boundary at token 4 in place of 3"),
    ],
)
def test_a_wrong_tag_within_the_tolerance_is_farther_from_the_record_than_the_right_one(
    run: Path, rollout_id: int, lie: Callable[[Row], None], claim: str
) -> None:
    edit_rollout(run, rollout_id, lie)
    report: AuditReport = audit_run(run, tolerance=TOLERANCE)
    assert report.tokens_agreeing == report.tokens
    reported = [problem.message for problem in report.problems if problem.rollout_id == rollout_id]
    assert any(f"are nearer to {claim}, by odds of" in message for message in reported), reported
    assert {problem.rollout_id for problem in report.problems} == {rollout_id}


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
async def test_versions_of_equal_weights_are_never_nearer_than_each_other(
    model_type: str, tmp_path: Path
) -> None:
    """Most tokens are nearly certain, and the log-probs of the others have a hundred times their
    noise; a mixture is replayed in float32."""
    model = make_model_directory(tmp_path / "model", model_type)
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        module.model.norm.weight *= 40
    module.save_pretrained(model)

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([10 + task, 11, 12])
        await episode.generate(max_tokens=40, stop_token_ids=[])
        return float(task % 2)

    settings: Any = {"engines": 1, "group_size": 2, "groups_per_batch": 8, "max_staleness": 2}
    async with tidegate.serve(model=model, run_directory=tmp_path / "run", **settings) as rollouts:
        async for _ in rollouts.batches(range(32), episode=solve):
            await rollouts.publish(dict(module.state_dict()))
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()


def test_tags_that_no_log_prob_can_distinguish_are_counted_apart(tmp_path: Path) -> None:
    models = make_models(versions=2, drift=0.0) + make_models(versions=1, drift=0.0)
    models[2].load_state_dict(models[1].state_dict())
    with torch.no_grad():
        models[2].lm_head.weight.add_(torch.randn_like(models[2].lm_head.weight) * 0.05)
    rollouts = [
        sampled_runs.one_version(models, number, version=number % 2, tokens=6)
        for number in range(4)
    ]
    report = audit_run(record_run(tmp_path / "run", models, rollouts))
    power = report.version_power
    assert report.agrees, report.lines()
    assert 0 < power.tags_same == power.tags_unnoticed < power.tags_tried
    assert power.missed_share == 0
    assert f"{power.tags_same} of them because they give the same log-probs" in str(report.lines())
