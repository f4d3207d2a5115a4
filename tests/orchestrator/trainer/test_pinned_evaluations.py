"""Evaluations pinned to one weight version, beside training that publishes newer ones."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.models import make_model_directory
from tests.mortal_trainer import weights
from tidegate.errors import ConfigError, EpisodeError, VersionUnavailable
from tidegate.observability.audit.audit import audit_run
from tidegate.orchestrator.journal.replay import replay_journal
from tidegate.testing import ScriptedEngine, ServeInTests

SMALL: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 1}
SLOW = "7" * 400


class Tags:
    """Episodes that record which versions and engines sampled their tokens."""

    def __init__(self) -> None:
        self.versions: dict[str, list[int]] = {"train": [], "test": []}
        self.engines: dict[str, set[str]] = {"train": set(), "test": set()}

    async def solve(self, episode: tidegate.Episode, task: Any) -> float:
        kind = "test" if isinstance(task, str) else "train"
        for _ in range(2):
            episode.append("a sum: ")
            turn = await episode.generate(max_tokens=60 if kind == "test" else 8)
            for span in turn.spans:
                self.versions[kind] += [span.version] * (span.end - span.start)
                self.engines[kind].add(span.engine)
        return 1.0


@pytest.mark.parametrize("evaluation_engines", [1, 0])
async def test_every_token_of_a_pinned_evaluation_is_of_its_version_while_training_continues(
    tidegate_serve: ServeInTests,
    tidegate_engine: type[ScriptedEngine],
    evaluation_engines: int,
) -> None:
    tags, engines = Tags(), [tidegate_engine(step_s=0.1) for _ in range(2)]
    async with tidegate_serve(
        engines=engines, says=SLOW, evaluation_engines=evaluation_engines, **SMALL
    ) as run:
        await run.publish({})
        evaluation = None
        async for _ in run.batches(iter(range(10_000)), episode=tags.solve):
            if evaluation is None:
                evaluation = asyncio.create_task(
                    run.evaluate(["x"] * 6, episode=tags.solve, version=1)
                )
                await asyncio.sleep(0)
            await run.publish({})
            if evaluation.done():
                break
        versions = run.version
        assert evaluation is not None
        assert (await evaluation).rewards == [1.0] * 6
        assert run.statistics().ledger.error == run.statistics().evaluation_ledger.error == 0
        assert run.batches_received >= 3
        await run.evaluate(["y"], episode=Tags().solve, version=versions)  # it has caught up
    assert tags.versions["test"] == [1] * 720
    assert max(tags.versions["train"]) >= 3
    assert len(tags.engines["test"]) == 1
    if evaluation_engines:
        assert not tags.engines["test"] & tags.engines["train"]


async def test_a_version_that_no_engine_serves_is_refused_with_the_available_ones(
    tidegate_serve: ServeInTests,
) -> None:
    async with tidegate_serve(engines=2, evaluation_engines=1, **SMALL) as run:
        await run.publish({})
        await run.publish({})
        with pytest.raises(VersionUnavailable, match=r"v1 can't be evaluated.*serve v2"):
            await run.evaluate(["x"], episode=Tags().solve, version=1)
    async with tidegate_serve(engines=1, **SMALL) as run:
        with pytest.raises(VersionUnavailable, match="or a second engine"):
            await run.evaluate(["x"], episode=Tags().solve, version=0)
    with pytest.raises(ConfigError, match="leaves none for training"):
        tidegate_serve(engines=2, evaluation_engines=2)


async def test_evaluations_every_few_versions_run_beside_training_and_are_recorded(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    tags, figures = Tags(), list[Mapping[str, float]]()
    engines = [tidegate_engine(step_s=0.01) for _ in range(2)]
    async with tidegate_serve(
        engines=engines, evaluation_engines=1, on_batch=figures.append, **SMALL
    ) as run:
        run.evaluate_every(2, ["x", "y"], episode=tags.solve)
        async for _ in run.batches(range(24), episode=tags.solve):
            await run.publish({})
        assert "evaluate" not in run.statistics().trainer_activity_s
        assert run.batches_received == 12
    assert {0, 12} <= set(tags.versions["test"])
    assert sum("held_out_reward" in each for each in figures) >= 2
    assert not tags.engines["test"] & tags.engines["train"]


async def test_an_engine_that_is_lost_fails_its_pinned_evaluation_and_nothing_waits(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    tags, engines = Tags(), [tidegate_engine(step_s=0.1) for _ in range(2)]
    async with tidegate_serve(engines=engines, says=SLOW, evaluation_engines=1, **SMALL) as run:
        evaluation = asyncio.create_task(run.evaluate(["x"], episode=tags.solve, version=0))
        await asyncio.sleep(1)
        next(engine for engine in engines if engine.tokens).crash()
        with pytest.raises(EpisodeError, match="all 1 episodes of the evaluation failed"):
            await evaluation
        await run.publish({})


async def test_the_only_engine_trains_and_evaluations_wait_until_another_joins(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    tags, engines = Tags(), [tidegate_engine(), tidegate_engine(joins_at_s=50.0)]
    async with tidegate_serve(engines=engines, evaluation_engines=1, **SMALL) as run:
        evaluation = asyncio.create_task(run.evaluate(["x"], episode=tags.solve, version=0))
        async with asyncio.timeout(40.0):
            await anext(run.batches(range(8), episode=tags.solve))
        assert [engine.name for engine in run.engines] == ["engine-0"]
        async with asyncio.timeout(60.0):
            assert (await evaluation).failures == 0
    assert tags.engines == {"train": {"engine-0"}, "test": {"engine-1"}}


@pytest.mark.wire
async def test_a_real_run_evaluates_beside_training_and_its_audit_and_journal_agree(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model")
    tags = Tags()

    async def solve(episode: tidegate.Episode, task: Any) -> float:
        kind = "test" if isinstance(task, str) else "train"
        for _ in range(3 if kind == "test" else 1):
            episode.append([10, 11, 12])
            turn = await episode.generate(max_tokens=20)
            tags.versions[kind] += [span.version for span in turn.spans]
        return 1.0

    async with tidegate.serve(
        model=model,
        engines=2,
        evaluation_engines=1,
        run_directory=tmp_path / "run",
        journal=True,
        **SMALL,
    ) as run:
        run.evaluate_every(3, ["x"] * 4, episode=solve)
        async for _ in run.batches(range(14), episode=solve):
            await run.publish(weights(model, run.version + 1))
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    evaluated = [json.loads(line)["version"] for line in lines]
    assert evaluated[0] == 0
    assert evaluated[-1] == 7
    assert set(tags.versions["test"]) == set(evaluated)
    assert replay_journal(tmp_path / "run").difference is None
    assert audit_run(tmp_path / "run").agrees


async def test_pinned_turns_end_on_an_engine_that_drains_while_newer_versions_are_published(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    async def one_turn(episode: tidegate.Episode, task: str) -> float:
        episode.append("a sum: ")
        return float(len((await episode.generate(max_tokens=60)).token_ids))

    engines = [tidegate_engine(step_s=0.1) for _ in range(2)]
    async with tidegate_serve(engines=engines, says=SLOW, evaluation_engines=1, **SMALL) as run:
        await run.publish({})
        evaluation = asyncio.create_task(run.evaluate(["x"] * 2, episode=one_turn, version=1))
        await asyncio.sleep(1.0)
        (busy,) = [engine.name for engine in run.engines if engine.tokens]
        drain = asyncio.create_task(run.drain(busy, within_s=60.0))
        await asyncio.sleep(0.5)
        assert await run.publish({}) == 2
        assert (await evaluation).rewards == [60.0, 60.0]
        assert await drain == 0
        assert [engine.weight_version for engine in run.engines] == [2]
