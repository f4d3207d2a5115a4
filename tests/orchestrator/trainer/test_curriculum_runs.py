"""A run draws from a curriculum, reports outcomes to it, and continues both after a crash."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.mortal_trainer import live, two_turns, weights
from tidegate.errors import ResumeMismatch
from tidegate.orchestrator.journal.replay import replay_journal

TASKS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    assert children(recursive=True) == []


def settings(model: Path, directory: Path, **changes: Any) -> dict[str, Any]:
    small = {"engines": 1, "group_size": 2, "groups_per_batch": 2, "max_running_turns": 8}
    return {**small, "model": model, "run_directory": directory, "journal": True, **changes}


def seldom_twice(task: int, seen: tidegate.TaskStatistics) -> float:
    return 1 / (1 + seen.draws) ** 4


def new_curriculum(name: str = "tasks") -> tidegate.Curriculum:
    return tidegate.Curriculum(range(TASKS), weight=seldom_twice, draws=30, seed=1, name=name)


@pytest.mark.wire
async def test_a_resumed_run_has_the_draws_weights_and_statistics_of_the_run_before(
    model: Path, tmp_path: Path
) -> None:
    before, trained = new_curriculum(), 0
    async with tidegate.serve(**settings(model, tmp_path / "run")) as rollouts:
        async for batch in rollouts.batches(before, episode=two_turns):
            trained += len(batch.tasks) // 2
            before.set_weights({3: 0.0, 5: 2.5})
            await rollouts.publish(weights(model, rollouts.version + 1))
            state = rollouts.state_dict()
            await rollouts.ack(state)
            if trained == 8:
                break
    drawn = {item: seen.draws for item, seen in before.statistics.items()}
    after = new_curriculum()
    after.set_weights({5: 1.0})  # first weights: the journal's replace them
    async with tidegate.serve(**settings(model, tmp_path / "run", resume=state)) as rollouts:
        await rollouts.publish(weights(model, rollouts.version))
        await rollouts.offer(after, episode=two_turns)
        kept = after.statistics
        assert {item: kept[item].draws >= draws for item, draws in drawn.items()} == dict.fromkeys(
            drawn, True
        )
        assert sum(seen.trained_groups for seen in kept.values()) >= 8
        draws_of_3 = kept[3].draws if 3 in kept else 0
        while (next_batch := await rollouts.next_batch()) is not None:
            trained += len(next_batch.tasks) // 2
            await rollouts.publish(weights(model, rollouts.version + 1))
        assert rollouts.statistics().ledger.error == 0
    seen = after.statistics
    assert trained == after.num_draws == 30
    assert sum(each.trained_groups for each in seen.values()) == 30
    assert sum(each.rollouts for each in seen.values()) >= 60
    assert (seen[3].draws if 3 in seen else 0) == draws_of_3, "its weight is 0"
    assert all(0 <= (each.mean_staleness or 0) <= 2 for each in seen.values())
    assert replay_journal(tmp_path / "run").difference is None


@pytest.mark.wire
async def test_a_resume_with_other_tasks_than_the_curriculum_is_refused(
    model: Path, tmp_path: Path
) -> None:
    async with tidegate.serve(**settings(model, tmp_path / "run")) as rollouts:
        async for _ in rollouts.batches(new_curriculum(), episode=two_turns):
            break
    for other in (range(TASKS), new_curriculum("others")):
        run = settings(model, tmp_path / "run", resume=True)
        async with tidegate.serve(**run) as rollouts:
            await rollouts.publish(weights(model, rollouts.version))
            with pytest.raises(ResumeMismatch, match="the curriculum 'tasks'"):
                await rollouts.offer(other, episode=two_turns)


@pytest.mark.wire
def test_a_killed_trainers_curriculum_continues_where_it_was(model: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    command = [sys.executable, "-m", "tidegate.engine.worker", "--connect", address]
    command += ["--model", str(model), "--engine", "outsider", "--max-running-turns", "8"]
    engine = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    command = [sys.executable, "-m", "tests.mortal_trainer", str(model), str(tmp_path / "run")]
    try:
        for batches in (2, 3, None):
            process = subprocess.Popen(
                [*command, address, "24", "curriculum"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            live(process, batches)
        assert process.returncode == 0  # its own checks of the statistics have passed
        assert engine.wait(60) == 0
    finally:
        engine.kill()
        engine.wait()
    assert replay_journal(tmp_path / "run").difference is None


async def test_outcomes_change_what_is_drawn_during_the_run(tidegate_serve: Any) -> None:
    def until_solved(task: int, seen: tidegate.TaskStatistics) -> float:
        return 0.0 if seen.recent_reward == 1.0 else 1.0

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("2 + 2 =")
        await episode.generate(max_tokens=4)
        return float(task % 2 or seen_before(task) >= 2)

    def seen_before(task: int) -> int:
        seen = curriculum.statistics.get(task)
        return 0 if seen is None else seen.groups

    curriculum = tidegate.Curriculum(range(6), weight=until_solved)
    async with tidegate_serve(engines=2, group_size=2, groups_per_batch=2) as rollouts:
        async for _ in rollouts.batches(curriculum, episode=solve):
            await rollouts.publish({})
    for task, seen in curriculum.statistics.items():
        assert seen.recent_reward == 1.0
        assert seen.groups >= (1 if task % 2 else 3)


async def test_weights_set_by_the_trainer_hold_from_the_next_draw_on(tidegate_serve: Any) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("2 + 2 =")
        await episode.generate(max_tokens=4)
        return 1.0

    curriculum = tidegate.Curriculum(range(20))
    curriculum.set_weights([float(task < 10) for task in range(20)])
    late: list[int] = []
    async with tidegate_serve(engines=2, group_size=2, groups_per_batch=2) as rollouts:
        async for batch in rollouts.batches(curriculum, episode=solve):
            if batch.number == 3:
                curriculum.set_weights({task: float(task >= 10) for task in range(20)})
            late += [task for task in batch.tasks if task >= 10]
            assert batch.number > 3 or not late
            await rollouts.publish({})
            if batch.number == 12:
                break
    assert len(late) >= 24  # all but the groups that had been drawn before
