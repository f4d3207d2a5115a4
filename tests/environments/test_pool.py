"""EnvironmentPool: crashes, hangs, cancellation, cleanup, and effects on other environments."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.forked_programs import children
from tidegate import EnvironmentPool
from tidegate.environments.pool import PooledEnvironment
from tidegate.errors import (
    ConfigError,
    EnvironmentCrashed,
    EnvironmentFailed,
    EnvironmentHung,
    NotRepeatable,
    RunClosed,
)

pytestmark = pytest.mark.wire

MODULE = "tests.environments.unruly"


@pytest.fixture(scope="module")
def shared() -> Iterator[EnvironmentPool]:
    """A pool of one process, for tests that leave it intact, or kill it."""
    with EnvironmentPool(processes=1, call_timeout_s=30.0, memory_bytes=4 << 30) as pool:
        yield pool


async def opened(
    pool: EnvironmentPool, name: str = "Unruly", **arguments: object
) -> PooledEnvironment:
    environment = pool.environment(f"{MODULE}:{name}", **arguments)()
    await environment.reset(seed=1, task="t")
    return environment


def is_gone(pid: int) -> bool:
    """Return whether the process has ended, zombies included."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def wait_until_closed(pool: EnvironmentPool) -> None:
    async with asyncio.timeout(30.0):
        while pool.statistics().environments:  # noqa: ASYNC110 (it is for people, and has no event)
            await asyncio.sleep(0.01)


async def test_the_same_seed_and_actions_give_the_same_observations(
    shared: EnvironmentPool,
) -> None:
    walks = []
    for seed in (5, 5, 6):
        walk = shared.environment(f"{MODULE}:Walk", length=2)()
        first = await walk.reset(seed=seed, task={"name": "x"})
        assert first.text == f"{seed} {{'name': 'x'}}: "
        steps = [await walk.step("a"), await walk.step("b")]
        assert [step.done for step in steps] == [False, True]
        assert sum(step.reward for step in steps) == 1.0
        walks.append(steps[-1].text)
        walk.close()
    assert walks[0] == walks[1] != walks[2]
    await wait_until_closed(shared)


@pytest.mark.parametrize("name", ["Walk", "AsyncWalk"])
async def test_two_processes_hold_200_environments_at_once(name: str) -> None:
    async def play(seed: int) -> str:
        walk = pool.environment(f"{MODULE}:{name}", length=4)()
        observation = await walk.reset(seed=seed % 10, task=None)
        while not observation.done:
            observation = await walk.step("x")
        ends.add(pool.statistics().environments)
        return observation.text

    ends: set[int] = set()
    async with EnvironmentPool(processes=2) as pool:
        texts = await asyncio.gather(*(play(seed) for seed in range(200)))
        assert pool.statistics().processes == 2
        assert max(ends) == 200
    assert all(texts[index] == texts[index % 10] for index in range(200))


async def test_environments_beyond_the_limit_wait_for_another_to_close() -> None:
    async with EnvironmentPool(processes=1, environments_max=2) as pool:
        walks = [pool.environment(f"{MODULE}:Walk")() for _ in range(3)]
        for walk in walks[:2]:
            await walk.reset(seed=0, task=None)
        third = asyncio.create_task(walks[2].reset(seed=0, task=None))
        await walks[1].step("a")
        assert not third.done()
        walks[0].close()
        assert (await third).text == "0 None: "


@pytest.mark.parametrize(
    ("action", "error", "says"),
    [
        ("exit", EnvironmentCrashed, "exit status 7"),
        ("segfault", EnvironmentCrashed, "killed by SIGSEGV.*unruly.py"),
        ("raise", EnvironmentFailed, "LookupError: no such door\n.*unruly.py"),
        ("sys.exit", EnvironmentFailed, "SystemExit: enough"),
        ("memory", EnvironmentFailed, "MemoryError"),
        ("wrong type", EnvironmentFailed, r"step\(\) must return a tidegate.Observation, got a"),
        ("nan", EnvironmentFailed, "reward must be finite, got nan"),
        ("unsendable", EnvironmentFailed, "can't be sent"),
        ("scribble", EnvironmentCrashed, "killed: sent an invalid reply"),
    ],
)
async def test_only_the_environment_that_fails_raises_and_is_named(
    shared: EnvironmentPool, action: str, error: type[Exception], says: str
) -> None:
    bad, good = await opened(shared), await opened(shared)
    before = [await good.step("a"), await good.step("b")]
    with pytest.raises(error, match=rf"(?s)unruly:Unruly, step 1: .*{says}"):
        await bad.step(action)
    after = await good.step("c")
    assert after.text.startswith(before[-1].text)  # it may be in another process now
    bad.close()
    good.close()
    await wait_until_closed(shared)


async def test_output_of_an_environment_does_not_corrupt_the_protocol(
    shared: EnvironmentPool,
) -> None:
    loud = await opened(shared)
    assert (await loud.step("print")).text.startswith("print")
    assert (await loud.step("a")).text.startswith("print")
    loud.close()


@pytest.mark.parametrize("name", ["Unruly", "AsyncWalk"])
async def test_a_hanging_environment_is_killed_and_the_others_in_its_process_continue(
    name: str,
) -> None:
    async with EnvironmentPool(processes=1, call_timeout_s=1.0) as pool:
        bad, good = await opened(pool, name), await opened(pool)
        before = await good.step("a")
        hanging = asyncio.create_task(bad.step("hang"))
        (after, _) = await asyncio.gather(good.step("b"), asyncio.sleep(0))
        assert after.text.startswith(before.text)
        with pytest.raises(EnvironmentHung, match="no reply within 1 s"):
            await hanging
        # An awaiting step is cancelled alone; a blocking one is killed with its process.
        assert pool.statistics().replayed <= (name == "Unruly")


async def test_a_replay_with_different_observations_raises_not_repeatable(
    shared: EnvironmentPool,
) -> None:
    fickle, bad = await opened(shared, "Fickle"), await opened(shared)
    with pytest.raises(EnvironmentCrashed):
        await bad.step("exit")
    with pytest.raises(NotRepeatable, match=r"reset: replayed .* another observation"):
        await fickle.step("a")
    bad.close()
    fickle.close()


async def test_a_factory_or_task_that_can_not_work_raises_an_error_that_names_it(
    shared: EnvironmentPool,
) -> None:
    for name, task, error, says in [
        ("fails", None, EnvironmentFailed, "RuntimeError: no licence"),
        ("nothing", None, EnvironmentFailed, "ImportError: .*has no callable 'nothing'"),
        ("Walk", object(), ConfigError, "must be plain data"),
    ]:
        environment = shared.environment(f"{MODULE}:{name}")()
        with pytest.raises(error, match=says):
            await environment.reset(seed=0, task=task)
        environment.close()
    with pytest.raises(ConfigError, match="'no colon' can't be imported"):
        shared.environment("no colon")


async def test_a_cancelled_episode_closes_only_its_own_environment(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with EnvironmentPool(processes=1, call_timeout_s=1.0) as pool:
        environment = await opened(pool, marker=str(marker))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await environment.step("hang")
        environment.close()
        other = await opened(pool)  # waits until the first one's process was killed
        assert (await other.step("a")).text.startswith("a")
        await asyncio.sleep(0)
        assert pool.statistics().environments == 1


async def test_closing_the_pool_closes_environments_and_fails_pending_calls(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "marker"
    before = set(children())
    pool = EnvironmentPool(processes=2)
    idle = await opened(pool, marker=str(marker))
    hanging = asyncio.create_task((await opened(pool)).step("hang"))
    await idle.step("a")
    await asyncio.to_thread(pool.close)
    assert marker.read_text() == "closed"
    with pytest.raises((RunClosed, asyncio.CancelledError)):
        await hanging
    with pytest.raises(RunClosed):
        await idle.step("b")
    assert set(children()) <= before


def daemons_of(marker: Path) -> list[int]:
    """Return the process ids of the daemons that an environment started, once they exist."""
    paths = [Path(f"{marker}.{number}") for number in range(2)]
    until_s = time.monotonic() + 30.0
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until_s, "no daemon was started"
        time.sleep(0.01)
    return [int(path.read_text()) for path in paths]


@pytest.mark.parametrize("action", ["daemons", "daemons, then exit", "daemons, then hang"])
async def test_daemons_of_an_environment_end_with_its_process(action: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with EnvironmentPool(processes=1, call_timeout_s=5.0) as pool:
        environment = await opened(pool, marker=str(marker))
        stepping = asyncio.create_task(environment.step(action))
        daemons = await asyncio.to_thread(daemons_of, marker)
        if action == "daemons":
            await stepping
            assert not any(map(is_gone, daemons))
        elif action == "daemons, then exit":
            with pytest.raises(EnvironmentCrashed, match="exit status 7"):
                await stepping
        else:
            with pytest.raises(EnvironmentHung, match="no reply within 5 s"):
                await stepping
    assert all(map(is_gone, daemons))


async def test_worker_processes_get_secret_variables_only_if_passed_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = ["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "PGPASSWORD", "GITHUB_PAT"]
    plain = ["TOKENIZERS_PARALLELISM", "MY_KEYBOARD", "HOME", "PATH"]
    for name in [*secret, *plain[:2]]:
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:sesame@db/x")
    monkeypatch.setenv("INDEX_URL", "https://pypi.example/simple@1")
    monkeypatch.setenv("TIDEGATE_ENGINE_KEY", "sesame")
    passed = ["HF_TOKEN", "DATABASE_URL", "TIDEGATE_ENGINE_KEY"]
    async with EnvironmentPool(processes=1, pass_variables=passed) as pool:
        variables = (await pool.environment(f"{MODULE}:Variables")().reset(seed=0, task=None)).text
    names = {variable.partition("=")[0] for variable in variables.split(" ")}
    assert {"HF_TOKEN", "DATABASE_URL", "INDEX_URL", *plain} <= names
    assert names.isdisjoint({*secret[1:], "TIDEGATE_ENGINE_KEY"})


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_child_or_daemon_outlives_its_run(tmp_path: Path, end: signal.Signals) -> None:
    marker = tmp_path / "marker"
    program = f"""
import asyncio, faulthandler, tidegate
faulthandler.dump_traceback_later(25.0)
async def main():
    with tidegate.EnvironmentPool(processes=1) as pool:
        environment = pool.environment({MODULE!r} + ":Unruly", marker={str(marker)!r})()
        await environment.reset(seed=0, task=None)
        await environment.step("daemons")
        await environment.step("hang with a child")
asyncio.run(main())
"""
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        run = subprocess.Popen([sys.executable, "-c", program], stderr=stderr)
    while not (marker.exists() and marker.read_text().count(" ")):
        time.sleep(0.01)
        assert run.poll() is None
    left = [*map(int, marker.read_text().split()), *daemons_of(marker)]
    run.send_signal(end)
    try:
        run.wait(30.0)
    except subprocess.TimeoutExpired:
        run.kill()
        pytest.fail(errors.read_text())  # what each thread waited for
    while not all(map(is_gone, left)):
        time.sleep(0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        {"processes": 0},
        {"environments_max": 0},
        {"call_timeout_s": 0.0},
        {"python": "/none"},
        {"pass_variables": "HF_TOKEN"},
    ],
)
def test_pool_settings_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EnvironmentPool(**wrong)  # type: ignore[arg-type]
