"""EnvironmentPool with processes behind tunnels, as on Ray's nodes, but without Ray."""

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from tidegate import EnvironmentPool, RayResources
from tidegate.environments.started_worker import StartedWorker
from tidegate.errors import ConfigError, EnvironmentCrashed, EnvironmentHung
from tidegate.integrations.ray.ray_environments import RayEnvironmentWorker, RayWorker, ray_workers
from tidegate.transport.security import ephemeral_keys
from tidegate.transport.tunnels import Tunnel, TunnelEntrance

pytestmark = pytest.mark.wire

MODULE = "tests.environments.unruly"


class Actors:
    """Threads in place of Ray actors."""

    def __init__(self) -> None:
        keys, self._worker_keys = ephemeral_keys()
        self.entrance = TunnelEntrance("tcp://127.0.0.1:*", keys)
        self.tunnels: list[Tunnel] = []
        self._names = (f"actor-{n}" for n in itertools.count())
        self._threads: list[threading.Thread] = []

    def start(self) -> StartedWorker:
        tunnel = self.entrance.open(next(self._names))
        self.tunnels.append(tunnel)
        actor = RayEnvironmentWorker(self.entrance.address, tunnel.name, self._worker_keys)
        self._threads.append(threading.Thread(target=actor.serve, args=(sys.executable, None)))
        self._threads[-1].start()
        return RayWorker(tunnel, self.entrance, lambda: None)

    def close(self) -> None:
        self.entrance.close()
        for thread in self._threads:
            thread.join(20.0)
            assert not thread.is_alive()


@pytest.fixture
async def elsewhere() -> AsyncIterator[tuple[EnvironmentPool, Actors]]:
    actors = Actors()
    async with EnvironmentPool(processes=1, call_timeout_s=30.0) as pool:
        pool._workers = actors
        yield pool, actors


async def test_remote_workers_give_the_same_observations_and_errors_as_local_ones(
    elsewhere: tuple[EnvironmentPool, Actors],
) -> None:
    pool, _ = elsewhere
    walk = pool.environment(f"{MODULE}:Unruly")()
    first = await walk.reset(seed=5, task={"name": "x"})
    assert first.text == "5 {'name': 'x'}: "
    assert (await walk.step("a")).text.startswith("a")
    with pytest.raises(EnvironmentCrashed, match="exit status 7"):
        await walk.step("exit")
    again = pool.environment(f"{MODULE}:Unruly")()
    assert (await again.reset(seed=5, task={"name": "x"})).text == first.text


async def test_an_environment_on_a_lost_node_is_replayed_elsewhere(
    elsewhere: tuple[EnvironmentPool, Actors],
) -> None:
    pool, actors = elsewhere
    walk = pool.environment(f"{MODULE}:Walk")()
    await walk.reset(seed=1, task=None)
    before = (await walk.step("a")).text
    actors.entrance.lose(actors.tunnels[0], "its actor or node was lost")
    async with asyncio.timeout(60.0):
        while pool.statistics().processes:  # noqa: ASYNC110 (it is for people, and has no event)
            await asyncio.sleep(0.01)
    assert (await walk.step("b")).text.startswith(before)
    assert pool.statistics().replayed == 1


async def test_a_lost_node_does_not_count_as_a_failure_of_the_environment_that_hangs_on_it(
    elsewhere: tuple[EnvironmentPool, Actors],
) -> None:
    pool, actors = elsewhere
    pool.call_timeout_s = 5.0
    unruly = pool.environment(f"{MODULE}:Unruly")()
    await unruly.reset(seed=1, task=None)
    step = asyncio.create_task(unruly.step("hang"))
    async with asyncio.timeout(60.0):
        while not pool._processes[0]._computing:  # noqa: ASYNC110 (another thread's)
            await asyncio.sleep(0.01)
    actors.entrance.lose(actors.tunnels[0], "its node was lost")
    with pytest.raises(EnvironmentHung, match="no reply within 5 s"):  # in the next process
        await step
    assert pool.statistics().replayed == 1


def test_a_pool_that_was_never_used_closes_its_workers() -> None:
    actors = Actors()
    with EnvironmentPool(processes=1) as pool:
        pool._workers = actors
    assert not actors.entrance._thread.is_alive()


def test_a_pool_on_ray_without_a_number_of_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="processes must be set"):
        EnvironmentPool(workers=ray_workers(RayResources()))
