"""Sleep and wake of external engines, and the weights that they compute with afterwards.

Against doubles that lose what real servers lose. test_real_vllm.py and test_real_sglang.py have the
real servers on a CPU.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.engine.external.sglang_double import SglangDouble, make_app
from tests.engine.external.sglang_streams import TOLERANCE, SglangAndDouble, off_by, sglang
from tests.engine.external.vllm_double import VllmDouble
from tests.engine.orchestra import Orchestra
from tests.served_app import served
from tidegate.engine.external.http import Query
from tidegate.engine.external.vllm import VllmAdapter, make_adapter
from tidegate.errors import EngineGone
from tidegate.observability.audit.audit import audit_run
from tidegate.transport.messages import (
    Pause,
    Resume,
    SamplingParams,
    Shutdown,
    TurnsPaused,
    TurnsResumed,
)
from tidegate.transport.sleep_messages import Asleep, Awake, Sleep, SleepLevel, Wake

pytestmark = pytest.mark.wire

PROGRAM = "tidegate.engine.external.worker"

SLEEPS = {"enable_memory_saver": True}
KEEPS = SLEEPS | {"enable_weights_cpu_backup": True}

FEW = SamplingParams(max_tokens=6)


@asynccontextmanager
async def paused_vllm(model: Path) -> AsyncIterator[tuple[VllmAdapter, VllmDouble]]:
    with VllmDouble(model, enable_sleep_mode=True) as double:
        adapter = make_adapter(double.url, model)
        try:
            capabilities = await adapter.open("v0")
            assert capabilities.sleep_levels == {1, 2}
            await adapter.pause("abort")
            double.calls.clear()
            yield adapter, double
        finally:
            await adapter.close()


async def test_vllm_sleeps_in_parts_though_it_puts_all_to_sleep_at_once(
    directories: list[Path],
) -> None:
    async with paused_vllm(directories[0]) as (adapter, double):
        await adapter.sleep(1, ["kv_cache"])
        assert double.sleeping == {"kv_cache"}
        await adapter.sleep(2, ["weights"])
        assert double.sleeping == {"weights", "kv_cache"}
        await adapter.wake(["weights"])
        assert double.sleeping == {"kv_cache"}
        await adapter.load_weights(directories[1], "v1")
        await adapter.wake(["kv_cache"])
        assert (double.sleeping, double.paused) == (set(), "new")  # it continues by itself: stopped
        calls = [call for call in double.calls if not call.startswith("pause")]
    assert calls == [
        "sleep 1 abort",  # for weights that are to stay must be what they were
        "wake weights",
        "wake",
        "sleep 2 abort",
        "wake weights",
        "reload",
        "wake kv_cache",
    ]


async def test_a_vllm_that_another_client_wakes_is_given_up(directories: list[Path]) -> None:
    async with paused_vllm(directories[0]) as (adapter, double):
        await adapter.sleep(1, ["weights", "kv_cache"])
        double.sleeping.clear()
        with pytest.raises(EngineGone, match="another client"):
            await adapter.wake(["kv_cache"])


async def test_an_empty_reply_of_vllm_counts_as_success(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paused_vllm(directories[0]) as (adapter, double):
        call = adapter._sleep_call

        async def call_without_answer(path: str, query: Query) -> None:
            await call(path, query)

        monkeypatch.setattr(adapter, "_sleep_call", call_without_answer)
        await adapter.sleep(2, ["weights"])
        assert double.sleeping == {"weights"}
        await adapter.wake(["weights"])
        assert double.sleeping == set()


async def test_a_vllm_that_sleeps_since_another_run_is_woken(directories: list[Path]) -> None:
    async with paused_vllm(directories[0]) as (adapter, double):
        await adapter.sleep(2, ["weights", "kv_cache"])
        again = make_adapter(double.url, directories[0])
        await again.open("v1")
        await again.close()
        assert (double.sleeping, double.label) == (set(), "v1")


@pytest.mark.parametrize(
    ("settings", "levels"),
    [({}, ()), (SLEEPS, (2,)), (KEEPS, (1, 2))],
    ids=["no saver", "saver", "backup"],
)
async def test_sglang_sleeps_at_the_levels_that_it_was_started_for(
    directories: list[Path], settings: dict[str, Any], levels: tuple[SleepLevel, ...]
) -> None:
    async with sglang(directories[0], settings=settings) as engine:
        assert engine.capabilities.sleep_levels == set(levels)
        if levels:
            await sleep_and_wake(engine, directories, levels[0])


async def sleep_and_wake(
    engine: SglangAndDouble, directories: list[Path], level: SleepLevel
) -> None:
    await engine.adapter.pause("abort")
    await engine.adapter.sleep(level, ["weights", "kv_cache"])
    await engine.adapter.wake(["weights"])
    if level == 2:
        await engine.adapter.load_weights(directories[1], "v1")
    await engine.adapter.wake(["kv_cache"])
    await engine.adapter.resume()
    stream = await engine.stream(FEW, salt="after").end()
    assert off_by(directories, stream, [(level - 1, 6)]) < TOLERANCE


@pytest.fixture(scope="module")
def sleepy(
    directories: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Orchestra, VllmDouble]]:
    """A worker shared by tests that leave it awake and running."""
    with VllmDouble(directories[0], enable_sleep_mode=True) as double:
        options = ["--url", f"vllm+{double.url}"]
        directory = tmp_path_factory.mktemp("sleepy")
        with Orchestra(directory, directories[0], options, program=PROGRAM) as engine:
            engine.welcome(credit_steps=64)
            yield engine, double
            engine.send(Shutdown())
            assert engine.exit_status() == 0


def test_turns_that_came_while_a_resumed_engine_slept_start_once_it_is_woken(
    sleepy: tuple[Orchestra, VllmDouble],
) -> None:
    engine, _ = sleepy
    engine.send(Pause(mode="abort"))
    engine.await_one(TurnsPaused)
    engine.send(Sleep(request_id=1, level=1, tags=["weights", "kv_cache"]))
    engine.await_one(Asleep)
    engine.send(Resume())
    engine.await_one(TurnsResumed)
    turn = engine.submit([1, 2, 3], FEW)
    engine.send(Wake(request_id=2, tags=["weights", "kv_cache"]))
    assert len(engine.finish(turn).token_ids) == FEW.max_tokens


def test_the_hello_waits_until_the_sleep_state_is_known(
    sleepy: tuple[Orchestra, VllmDouble],
) -> None:
    engine, double = sleepy
    engine.send(Pause(mode="abort"))
    engine.await_one(TurnsPaused)
    double.falls_asleep.clear()
    double.calls.clear()
    engine.send(Sleep(request_id=1, level=1, tags=["weights", "kv_cache"]))
    engine.read_until(lambda: "sleep 1 abort" in double.calls)
    engine.break_connection()
    later = threading.Timer(0.3, double.falls_asleep.set)  # a wrong hello comes in milliseconds
    later.start()
    assert engine.welcome(credit_steps=64).asleep == ["weights", "kv_cache"]
    later.join()
    engine.send(Wake(request_id=2, tags=["weights", "kv_cache"]))
    assert engine.await_one(Awake).tags == []
    assert len(engine.generate([1, 2, 3], FEW).token_ids) == FEW.max_tokens


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    """Turns of some length, so that some are frozen while others make up a batch."""
    episode.append([3, 5, 7, 11 + task % 50])
    turn = await episode.generate(max_tokens=4 + 11 * (task % 4))
    return float(turn.token_ids[0] % 2)


async def train_asleep(model: Path, run: Path, urls: list[str]) -> None:
    """Sleep and wake once before the first publish, then around each publish; audit the run."""
    state, noise = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    async with tidegate.serve(
        model=model,
        engine_urls=urls,
        group_size=2,
        groups_per_batch=2,
        max_staleness=1,
        kv_policy="keep",
        run_directory=run,
    ) as rollouts:
        await rollouts.sleep(2)
        await rollouts.wake()  # by the model directory's weights, for there are no others
        async for _ in rollouts.batches(range(4), episode=one_turn):
            await rollouts.sleep(2, mode="keep")
            for tensor in state.values():
                tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
            await rollouts.wake(["weights"])
            await rollouts.publish(state)
            assert rollouts.statistics().asleep == ("kv_cache",)
            await rollouts.wake()
            await rollouts.sleep(2, tags=["weights"])
            await rollouts.wake()  # by the weights published last
        statistics = rollouts.statistics()
    assert (statistics.trainer_version, statistics.ledger.error) == (2, 0)
    report = await asyncio.to_thread(audit_run, run)
    assert report.problems == ()
    assert report.agrees, report.lines()
    assert report.tokens_unknown == 0


async def test_a_run_sleeps_over_vllm_and_sglang_and_every_token_audits(
    directories: list[Path], tmp_path: Path
) -> None:
    """SGLang keeps no weights and is sent new ones over HTTP; vLLM reads them from files."""
    double = SglangDouble(directories[0], settings=SLEEPS)
    with (
        served(lambda: (make_app(double), double.sample_for_ever)) as url,
        VllmDouble(directories[0], enable_sleep_mode=True) as vllm,
    ):
        urls = [f"sglang+{url}#weights=http", f"vllm+{vllm.url}"]
        await train_asleep(directories[0], tmp_path / "run", urls)
        assert (double.sleeping, double.paused, double.is_dead) == (set(), None, False)
        assert (vllm.sleeping, vllm.paused) == (set(), "")
    calls = [path for path, _ in double.calls]
    assert "/update_weights_from_disk" not in calls
    assert "/update_weights_from_tensor" in calls
