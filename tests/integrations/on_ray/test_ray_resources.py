"""Placement of environments, trainer ranks and engines on a Ray cluster.

GPUs are numbers declared to the cluster; Ray assigns them like real ones.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tidegate.errors import ConfigError, EnvironmentCrashed, TrainerLost

ray: Any = pytest.importorskip("ray", reason="`make test-ray` has Ray, in a Python of its own")

pytestmark = [pytest.mark.wire, pytest.mark.timeout(500), pytest.mark.filterwarnings("default")]

WAIT_S = 200.0
STORE_BYTES = 100 * 1024 * 1024
GAMES = "tests.environments.unruly"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, each with four CPUs and two declared GPUs."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": STORE_BYTES}
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES},
    )
    for _ in range(2):
        made.add_node(**node)
    ray.init(address=made.address, log_to_driver=False, namespace="places")
    # This module is not importable in actors, so its functions are pickled by value.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield made
    ray.shutdown()
    made.shutdown()


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


def made_group(name: str, bundles: list[dict[str, float]]) -> Any:
    group = ray.util.placement_group(bundles, name=name)
    ray.get(group.ready(), timeout=WAIT_S)
    return group


def where() -> tuple[str, str]:
    """Return this process's node, and the GPUs that Ray lets it see."""
    return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


async def test_environments_on_ray_survive_the_loss_of_a_node(cluster: Any) -> None:
    resources = tidegate.RayResources(cpus=1)
    async with tidegate.EnvironmentPool(
        processes=2, call_timeout_s=WAIT_S, workers=tidegate.ray_workers(resources)
    ) as pool:
        walks = [pool.environment(f"{GAMES}:Walk", length=9)() for _ in range(4)]
        firsts = await asyncio.gather(*(w.reset(seed=n, task=n) for n, w in enumerate(walks)))
        assert [first.text for first in firsts] == [f"{n} {n}: " for n in range(4)]
        before = [(await walk.step("a")).text for walk in walks]
        workers: Any = pool._workers
        ray.kill(next(iter(workers._served.values())))
        after = await asyncio.gather(*(walk.step("b") for walk in walks))
        assert all(now.text.startswith(then) for now, then in zip(after, before, strict=True))
        # The loss may be noticed only at the next call.
        async with asyncio.timeout(WAIT_S):
            while not pool.statistics().replayed:
                await asyncio.gather(*(walk.step("c") for walk in walks))
                await asyncio.sleep(0.1)
        assert pool.statistics().processes == 2


async def test_trainer_ranks_and_an_engine_share_a_bundle_and_its_gpu(
    cluster: Any, model: Path
) -> None:
    made_group("together", [{"CPU": 2, "GPU": 1}] * 2)
    path = str(model / "model.safetensors")

    def train(rollouts: Any) -> tuple[int, tuple[str, str]]:
        rows = 0
        for batch in rollouts.batches():
            rows += len(batch.rewards)
            rollouts.publish(load_file(path) if rollouts.rank == 0 else None)
        return rows, where()

    async with tidegate.serve(
        model=model,
        engines=2,
        group_size=2,
        groups_per_batch=2,
        cluster="ray",
        gpus_per_engine=0.5,
        placement_group="together",
        engine_start_timeout_s=WAIT_S,
    ) as rollouts:
        returned = await tidegate.train_on_ray(
            rollouts,
            train,
            world_size=2,
            resources=tidegate.RayResources(gpus=0.5, placement_group="together"),
            tasks=range(6),
            episode=one_turn,
        )
        assert [rows for rows, _ in returned] == [6, 6]
        assert all(len(gpus) == 1 for _, (_, gpus) in returned)
        assert rollouts.version == 3
        assert rollouts.statistics().ledger.error == 0
        assert rollouts._run is not None
        engines: Any = rollouts._run._engines
        actors = [engines._actors[f"engine-{n}"] for n in range(2)]
        references = [actor.__ray_call__.remote(lambda _: where()) for actor in actors]
        assert ray.get(references, timeout=WAIT_S) == [placed_at for _, placed_at in returned]
    ray.util.remove_placement_group(ray.util.get_placement_group("together"))


async def test_a_failed_rank_ends_the_others_and_the_run_continues_with_new_ranks(
    cluster: Any, model: Path
) -> None:
    def fails(rollouts: Any) -> None:
        next(iter(rollouts.batches()))
        if rollouts.rank == 1:
            raise ValueError("the loss is not finite")
        next(iter(rollouts.batches()))

    def counts(rollouts: Any) -> int:
        return sum(1 for _ in rollouts.batches())

    async with tidegate.serve(
        model=model,
        group_size=2,
        groups_per_batch=2,
        max_staleness=8,
        cluster="ray",
        engine_start_timeout_s=WAIT_S,
    ) as rollouts:
        with pytest.raises(TrainerLost, match=r"rank 1 .*ValueError: the loss is not finite"):
            await tidegate.train_on_ray(
                rollouts, fails, world_size=2, tasks=range(8), episode=one_turn
            )
        [batches] = await tidegate.train_on_ray(
            rollouts, counts, tasks=range(8, 12), episode=one_turn
        )
        assert batches >= 2
        assert rollouts.statistics().ledger.error == 0


def test_a_run_in_an_actors_thread_installs_no_signal_handlers(cluster: Any, model: Path) -> None:
    class Driver:
        def drive(self, path: str) -> int:
            with tidegate.serve_sync(
                model=path,
                group_size=2,
                groups_per_batch=2,
                cluster="ray",
                engine_start_timeout_s=WAIT_S,
            ) as rollouts:
                return sum(1 for _ in rollouts.batches(range(4), episode=one_turn))

    driver: Any = ray.remote(Driver).options(num_cpus=1, max_concurrency=2).remote()
    assert ray.get(driver.drive.remote(str(model)), timeout=WAIT_S) == 2
    ray.kill(driver)


CONFIG = """
[run]
model = "{model}"
group_size = 2
groups_per_batch = 2
max_tokens = 4
engine_start_timeout_s = 200.0
run_directory = "{run}"
[tasks]
use = "on_ray_part:tasks"
[episode]
use = "on_ray_part:solve"
[trainer]
use = "on_ray_part:train"
"""

PART = """
def tasks():
    return range(4)


async def solve(episode, task):
    episode.append([task + 10])
    await episode.generate()
    return 1.0


def train(rollouts, tasks, episode):
    return {"batches_seen": sum(1 for _ in rollouts.batches(tasks, episode=episode))}
"""


def test_the_command_runs_a_file_on_the_cluster(cluster: Any, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(model=model, run=tmp_path / "run"))
    (tmp_path / "on_ray_part.py").write_text(PART)
    command = [sys.executable, "-m", "tidegate.cli", "run", str(config)]
    ended = subprocess.run(
        [*command, "--cluster", "ray", "--run.engines", "2"],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["extra"]["batches_seen"] == 2
    assert (record["settings"]["cluster"], record["settings"]["engines"]) == ("ray", 2)


def test_a_missing_or_too_small_placement_group_is_refused(cluster: Any, model: Path) -> None:
    with pytest.raises(ConfigError, match="no placement group named 'nowhere'"):
        tidegate.EnvironmentPool(
            processes=1,
            workers=tidegate.ray_workers(tidegate.RayResources(placement_group="nowhere")),
        )
    group = made_group("small", [{"CPU": 1}])
    with pytest.raises(ConfigError, match="1 GPU, but a bundle of placement group 'small' has 0"):
        tidegate.EnvironmentPool(
            processes=1,
            workers=tidegate.ray_workers(tidegate.RayResources(gpus=1, placement_group="small")),
        )
    ray.util.remove_placement_group(group)


async def test_an_ended_process_frees_its_bundle_for_the_next(cluster: Any) -> None:
    made_group("games", [{"CPU": 1}] * 2)
    resources = tidegate.RayResources(placement_group="games")
    async with tidegate.EnvironmentPool(
        processes=2, call_timeout_s=WAIT_S, workers=tidegate.ray_workers(resources)
    ) as pool:
        games = [pool.environment(f"{GAMES}:Unruly")() for _ in range(2)]
        for game in games:
            await game.reset(seed=0, task={"name": "x"})
        assert pool.statistics().processes == 2
        with pytest.raises(EnvironmentCrashed, match="exit status 7"):
            await games[1].step("exit")
        again = pool.environment(f"{GAMES}:Unruly")()
        async with asyncio.timeout(WAIT_S):
            await again.reset(seed=0, task={"name": "x"})
        assert pool.statistics().processes == 2
    ray.util.remove_placement_group(ray.util.get_placement_group("games"))
