"""Do guesses come through a whole run, from a setting to the audit and the report?"""

from pathlib import Path

import pytest

import tidegate
from tests.repeating import make_repeating_model
from tidegate.errors import TidegateError
from tidegate.orchestrator.audit import audit_run
from tidegate.orchestrator.report import write_report

SMALL = {"engines": 1, "group_size": 2, "groups_per_batch": 2, "max_running_turns": 8}


async def solve(episode: tidegate.Episode, task: int) -> float:
    episode.append([task, 10, 11, 12, 13])
    turn = await episode.generate(max_tokens=60, stop_token_ids=[])
    return float(len(turn.token_ids))


async def test_accepted_guesses_are_audited_counted_and_reported(tmp_path: Path) -> None:
    model, run = make_repeating_model(tmp_path / "model"), tmp_path / "run"
    async with tidegate.serve(
        model=model, **SMALL, run_directory=run, speculate="lookup"
    ) as rollouts:
        async for batch in rollouts.batches(range(4), episode=solve):
            assert batch.loss_mask.sum() == 4 * 60
        (engine,) = rollouts.statistics().engines
    assert engine.speculation == "lookup"
    assert 0 < engine.accepted_tokens <= engine.drafted_tokens
    assert engine.tokens == 8 * 60
    report = audit_run(run)
    assert report.agrees, report.lines()
    page = write_report(run).read_text()
    assert f"| tokens guessed | {engine.drafted_tokens}, " in page


async def test_a_source_of_guesses_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = make_repeating_model(tmp_path / "model")
    with pytest.raises(TidegateError, match="speculate must be"):
        async with tidegate.serve(model=model, **SMALL, speculate="tea leaves"):
            pass
