"""Tests of speculative decoding in a whole run, from the setting to the audit and the report."""

from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.models import make_model_directory
from tests.repeating import make_repeating_model
from tidegate.engine.drafts.draft_sources import open_drafts
from tidegate.engine.drafts.rollouts import RolloutDrafts
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import ConfigError, TidegateError
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.reports.report import write_report

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
}


async def solve(episode: tidegate.Episode, task: int) -> float:
    episode.append([task, 10, 11, 12, 13])
    turn = await episode.generate(max_tokens=60, stop_token_ids=[])
    return float(len(turn.token_ids))


async def test_accepted_draft_tokens_are_audited_counted_and_reported(tmp_path: Path) -> None:
    model, run = make_repeating_model(tmp_path / "model"), tmp_path / "run"
    async with tidegate.serve(
        model=model, **SMALL, run_directory=run, speculative_method=f"draft:{model}"
    ) as rollouts:
        async for batch in rollouts.batches(range(4), episode=solve):
            assert batch.loss_mask.sum() == 4 * 60
        (engine,) = rollouts.statistics().engines
    assert engine.speculative_method == "draft"
    assert 0 < engine.accepted_draft_tokens == engine.draft_tokens  # by a model as good as itself
    assert engine.tokens == 8 * 60
    report = audit_run(run)
    assert report.agrees, report.lines()
    page = write_report(run).read_text()
    assert f"| draft tokens verified | {engine.draft_tokens}, " in page


async def test_an_unknown_draft_source_is_refused(tmp_path: Path) -> None:
    model = make_repeating_model(tmp_path / "model")
    with pytest.raises(TidegateError, match="speculative_method must be"):
        async with tidegate.serve(model=model, **SMALL, speculative_method="tea leaves"):
            pass


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model = open_model(make_repeating_model(tmp_path / "model"), "auto")
    other = make_model_directory(tmp_path / "other", vocab_size=50)
    limits = EngineLimits(
        max_running_turns=1,
        max_step_tokens=1,
        num_blocks=1,
        block_tokens=4,
        context_tokens_max=8,
        vocab_size=model.vocab_size,
    )
    with pytest.raises(ConfigError, match=r"50 tokens, the model's 96; take a smaller model"):
        open_drafts(f"draft:{other}", model, limits, "auto")
    assert isinstance(open_drafts("rollouts", model, limits, "auto"), RolloutDrafts)
