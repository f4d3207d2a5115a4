"""A run on a real Ray cluster of several nodes, whose nodes and engines die.

Nodes are processes on this machine, as in Ray's own tests.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tidegate.errors import ConfigError, EngineStartFailed
from tidegate.observability.audit.audit import audit_run

ray: Any = pytest.importorskip("ray", reason="`make test-ray` has Ray, in a Python of its own")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # Ray's own
]

WAIT_S = 200.0
"""Far longer than anything here takes; reaching it is a failure."""

STORE_BYTES = 100 * 1024 * 1024

SMALL: dict[str, Any] = {
    "engines": 2,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
    "cluster": "ray",
    "engine_start_timeout_s": WAIT_S,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node that runs no engines, and two nodes with room for one engine each."""
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES},
    )
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=10)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


async def until_engines(rollouts: tidegate.Rollouts, count: int) -> float:
    """Wait until ``count`` engines are in the run; return the seconds it took."""
    begun_s = time.monotonic()
    async with asyncio.timeout(WAIT_S):
        while len(rollouts.statistics().engines) != count:  # noqa: ASYNC110 - Ray brings it about
            await asyncio.sleep(0.02)
    return time.monotonic() - begun_s


async def test_an_actor_that_is_retired_frees_its_place_for_another(
    cluster: Any, model: Path
) -> None:
    """It is not started again by Ray either; the next engine gets its resources."""
    async with tidegate.serve(model=model, **SMALL) as rollouts:
        batches = rollouts.batches(range(8), episode=two_turns)
        await anext(batches)
        await rollouts.retire("engine-1")
        assert [engine.name for engine in rollouts.engines] == ["engine-0"]
        await rollouts.publish(load_file(model / "model.safetensors"))
        await rollouts.scale(engines=2)
        assert len(rollouts.engines) == 2
        async for _ in batches:
            await rollouts.publish(load_file(model / "model.safetensors"))
        assert {engine.weight_version for engine in rollouts.engines} == {rollouts.version}
        await rollouts.scale(engines=1)
        assert len(rollouts.engines) == 1
    assert rollouts.statistics().ledger.error == 0


async def test_a_node_lost_in_mid_run_loses_no_token(
    cluster: Any, model: Path, tmp_path: Path
) -> None:
    state = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    run = tmp_path / "run"
    doomed = cluster.worker_nodes.copy().pop()
    async with tidegate.serve(model=model, **SMALL, run_directory=run) as rollouts:
        batches = 0
        async for _ in rollouts.batches(range(40), episode=two_turns):
            batches += 1
            if batches == 4:
                killed_s = time.monotonic()
                cluster.remove_node(doomed, allow_graceful=False)
                await until_engines(rollouts, 1)
                noticed_s = time.monotonic() - killed_s
            if batches == 10:
                cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
                back_s = await until_engines(rollouts, 2)
            for tensor in state.values():
                tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
            await rollouts.publish(state)
    statistics = rollouts.statistics()
    assert statistics.batches == 20
    assert statistics.ledger.error == 0
    assert statistics.ledger.trained == statistics.ledger.generated > 0
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained
    sys.stderr.write(
        f"a node's death was noticed in {noticed_s:.1f} s; with a new node, its engine was back "
        f"after {back_s:.1f} s\n"
    )


async def test_an_engine_whose_process_dies_restarts_on_the_same_node(
    cluster: Any, model: Path
) -> None:
    async with tidegate.serve(model=model, **SMALL) as rollouts:
        batches = rollouts.batches(range(8), episode=two_turns)
        await anext(batches)
        assert rollouts._run is not None
        engines: Any = rollouts._run._engines
        ray.kill(engines._actors["engine-0"], no_restart=False)
        await until_engines(rollouts, 1)
        await until_engines(rollouts, 2)
        await rollouts.publish(load_file(model / "model.safetensors"))
        assert {e.weight_version for e in rollouts.statistics().engines} == {1}


async def test_a_model_that_no_engine_can_load_ends_the_run_with_the_workers_error(
    cluster: Any, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(EngineStartFailed, match="safetensors"):
        async with tidegate.serve(model=path, **SMALL):
            pass


def test_settings_for_one_host_are_refused_with_ray(model: Path) -> None:
    with pytest.raises(ConfigError, match="Ray places them on any"):
        tidegate.serve(model=model, cluster="ray", weight_channel="shm")
    with pytest.raises(ConfigError, match="from this host only"):
        tidegate.serve(model=model, cluster="ray", listen_address="tcp://127.0.0.1:5555")
