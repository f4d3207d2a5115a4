"""Reprs of runs and batches, in one line and as HTML for notebooks."""

from pathlib import Path
from typing import Any

import tidegate


async def one_turn(episode: tidegate.Episode, task: object) -> float:
    episode.append("Guess: ")
    await episode.generate(max_tokens=2)
    return 1.0


async def test_a_batch_is_shown_by_its_size_reward_and_age(tidegate_serve: Any) -> None:
    async with tidegate_serve(group_size=2, groups_per_batch=3) as run:
        async for batch in run.batches(range(3), episode=one_turn):
            shown = repr(batch)
            assert shown.startswith("Batch(number 1, trainer version 0, shape 6 x ")
            assert "groups 3, sampled tokens 12, reward mean 1.000, staleness max 0)" in shown
            assert (
                repr(batch.packed) == f"PackedBatch(rows 6, tokens {len(batch.packed.token_ids)})"
            )
            assert "<th style='text-align:left'>groups</th>" in batch._repr_html_()
            await run.publish({})


async def test_an_evaluation_is_shown_by_its_mean_and_not_by_all_rewards(
    tidegate_serve: Any,
) -> None:
    async with tidegate_serve() as run:
        evaluation = await run.evaluate(range(20), episode=one_turn)
    assert repr(evaluation) == "Evaluation(mean reward 1.000, tasks 20, failures 0)"
    assert "<td style='text-align:left'>1.000</td>" in evaluation._repr_html_()


async def test_a_run_is_shown_with_its_state_and_progress(tidegate_serve: Any) -> None:
    async with tidegate_serve(group_size=1, groups_per_batch=1) as run:
        assert "state running" in repr(run)
        async for _ in run.batches(range(2), episode=one_turn):
            await run.publish({})
        assert "weight version 2, batches 2" in repr(run)
        assert "2 trained, 0 discarded" in run._repr_html_()
    assert "state ended" in repr(run)
    assert "2 trained, 0 discarded" in run._repr_html_()


def test_a_run_that_was_not_started_is_shown_by_its_settings(tmp_path: Path) -> None:
    model = tmp_path / "<model>"
    for run in (tidegate.serve(model=model), tidegate.serve_sync(model=model, engines=3)):
        assert "state not started" in repr(run)
        assert "&lt;model&gt;" in run._repr_html_()
    assert repr(run).startswith("SyncRollouts(")
    assert "engines 3" in repr(run)
