"""Runs whose elasticity policy starts and retires real engines, over the wire."""

import asyncio
import itertools
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.orchestrator.trainer.runs import Weights
from tests.orchestrator.trainer.test_engines_leave import process_of
from tidegate.errors import TidegateError
from tidegate.observability.audit.audit import audit_run
from tidegate.policies.elasticity import Elastic

pytestmark = pytest.mark.wire

ELASTIC: dict[str, Any] = {
    "engines_max": 2,
    "trainer_hour_cost": 8.0,
    "start_s": 0.0,
    "cool_down_s": 0.0,
    "batches": 3,
}
"""A policy that decides as soon as it can."""

SLOW: dict[str, Any] = {
    "engines": 1,
    "group_size": 4,
    "groups_per_batch": 4,
    "max_staleness": 2,
    "max_running_turns": 4,
    "step_time_min_s": 0.005,
}

TURN_TOKENS = 40
BATCHES_MAX = 200
"""Batches within which the fleet must have followed the trainer; it takes about ten."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


async def turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    tokens = TURN_TOKENS + task % 3
    sampled = await episode.generate(max_tokens=tokens, min_tokens=tokens)
    return float(sampled.token_ids[0] % 2)


class Trainer:
    """Trains on batches of a run, one after the other."""

    def __init__(self, rollouts: tidegate.Rollouts, model: Path) -> None:
        self._rollouts = rollouts
        self._weights = Weights(model)
        self._batches = rollouts.batches(itertools.count(), episode=turn)

    async def until_engines(self, names: list[str], *, train_s: float) -> None:
        """Train until these engines serve the run."""
        for _ in range(BATCHES_MAX):
            if [engine.name for engine in self._rollouts.engines] == names:
                return
            await anext(self._batches)
            await asyncio.sleep(train_s)
            await self._rollouts.publish(self._weights.step())
        raise AssertionError(f"{names} never served; the last decision: {self.decision}")

    @property
    def decision(self) -> str:
        """The policy's last decision."""
        return self._rollouts.statistics().scaling


async def test_a_fleet_of_local_engines_grows_and_shrinks_with_the_trainer_and_loses_no_token(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tidegate")
    run = tmp_path / "run"
    async with tidegate.serve(
        model=model, **SLOW, elasticity=Elastic(**ELASTIC), run_directory=run
    ) as rollouts:
        trainer = Trainer(rollouts, model)
        await trainer.until_engines(["engine-0", "engine-1"], train_s=0.0)
        assert trainer.decision.startswith("from=1 to=2 because=")
        await trainer.until_engines(["engine-0"], train_s=1.5)
        assert trainer.decision.startswith("from=2 to=1 because=")
        assert "engine-1" not in {name for p in children() for name in p.cmdline()}
    decided = [each for each in caplog.messages if each.startswith("event=scale")]
    assert [each.partition(" because=")[0] for each in decided] == [
        "event=scale from=1 to=2",
        "event=scale from=2 to=1",
    ]
    statistics = rollouts.statistics()
    assert statistics.ledger.error == 0
    assert statistics.ledger.discarded.keys() <= {"run_ended", "cancelled"}
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.tokens_unknown == 0


async def test_engines_that_functions_of_the_user_start_are_replaced_and_stopped(
    model: Path, tmp_path: Path
) -> None:
    machines: dict[str, subprocess.Popen[bytes]] = {}
    stopped: list[str] = []

    async def start(name: str, address: str) -> None:
        command = [sys.executable, "-m", "tidegate.engine.worker", "--connect", address]
        options = ["--model", str(model), "--engine", name, "--max-running-turns", "4"]
        machines[name] = await asyncio.to_thread(subprocess.Popen, [*command, *options])

    def stop(name: str) -> None:
        machines[name].terminate()
        machines[name].wait(20)
        stopped.append(name)

    elastic = Elastic(**ELASTIC, engines_min=2, start=start, stop=stop)
    address = f"ipc://{tmp_path}/wire"
    async with tidegate.serve(
        model=model, **{**SLOW, "engines": 2}, elasticity=elastic, listen_address=address
    ) as rollouts:
        trainer = Trainer(rollouts, model)
        await trainer.until_engines(["engine-0", "engine-1"], train_s=0.0)
        await rollouts.retire("engine-1")
        await trainer.until_engines(["engine-0", "engine-1"], train_s=0.0)
        assert stopped == ["engine-1"]
    assert sorted(stopped) == ["engine-0", "engine-1", "engine-1"]
    assert all(machine.poll() is not None for machine in machines.values())


async def test_a_run_whose_engines_can_not_be_started_says_so(model: Path, tmp_path: Path) -> None:
    def start(name: str, address: str) -> None:
        raise OSError("no machine is left")

    elastic = Elastic(**ELASTIC, start=start, stop=lambda name: None)
    with pytest.raises(TidegateError, match=r"engine-0.*no machine is left"):
        async with tidegate.serve(
            model=model, **SLOW, elasticity=elastic, listen_address=f"ipc://{tmp_path}/wire"
        ):
            pass


async def test_a_killed_engine_is_started_again_and_the_policy_wants_it_still(model: Path) -> None:
    elastic = Elastic(**ELASTIC, engines_min=2)
    async with tidegate.serve(
        model=model, **{**SLOW, "engines": 2}, elasticity=elastic
    ) as rollouts:
        trainer = Trainer(rollouts, model)
        await trainer.until_engines(["engine-0", "engine-1"], train_s=0.0)
        process = process_of("engine-1")
        process.kill()
        await asyncio.to_thread(process.wait, 20)
        while len(rollouts.engines) == 2:  # noqa: ASYNC110 - its end sets no event
            await asyncio.sleep(0.01)
        await trainer.until_engines(["engine-0", "engine-1"], train_s=0.0)
        assert rollouts.statistics().engines_wanted == 2
        assert rollouts.statistics().ledger.error == 0


async def test_a_resumed_run_wants_as_many_engines_as_it_had(model: Path, tmp_path: Path) -> None:
    settings = {**SLOW, "journal": True, "run_directory": tmp_path / "run"}
    settings["elasticity"] = Elastic(**{**ELASTIC, "cool_down_s": 1e6})
    async with tidegate.serve(model=model, **{**settings, "engines": 2}) as rollouts:
        batches = rollouts.batches(itertools.count(), episode=turn)
        await anext(batches)
        await rollouts.publish(Weights(model).step())
    async with tidegate.serve(model=model, **settings, resume=True) as rollouts:
        assert rollouts.statistics().engines_wanted == 2
        await rollouts.publish(Weights(model).step(), batches=[])
        await Trainer(rollouts, model).until_engines(["engine-0", "engine-1"], train_s=0.0)
        assert rollouts.statistics().ledger.error == 0
