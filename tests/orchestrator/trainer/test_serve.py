"""A trainer's whole way, for real: engine processes, the wire, weights in flight, torch batches."""

import asyncio
import itertools
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.segments import weights_open
from tidegate.errors import (
    AddressInUse,
    ConfigError,
    EngineLost,
    EngineStartFailed,
    EpisodeError,
    ModelError,
    PublishNeeded,
    RunClosed,
    WeightsRefused,
)
from tidegate.observability.audit.audit import audit_run
from tidegate.orchestrator.fleet import processes
from tidegate.transport.security import make_keys

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
    "failure_policy": tidegate.FailurePolicy(retry_delay_s=0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    before = weights_open()
    yield
    assert children(recursive=True) == []
    assert weights_open() <= before


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    """Two turns with an observation between them; the reward is no concern here."""
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=10)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


class Weights:
    """Stands for a trainer's model: a state dict that changes at every step."""

    def __init__(self, model: Path) -> None:
        self.state = load_file(model / "model.safetensors")
        self._noise = torch.Generator().manual_seed(0)

    def step(self) -> dict[str, torch.Tensor]:
        for tensor in self.state.values():
            tensor += 0.02 * torch.randn(tensor.shape, generator=self._noise)
        return self.state


MODES = [("abort", "recompute"), ("keep", "recompute"), ("keep", "keep"), ("wait", "recompute")]


@pytest.mark.parametrize(("pause_mode", "kv_policy"), MODES)
async def test_every_trained_token_is_audited_under_every_kind_of_update(
    model: Path, tmp_path: Path, pause_mode: str, kv_policy: str
) -> None:
    weights, run = Weights(model), tmp_path / "run"
    async with tidegate.serve(
        model=model,
        **{**SMALL, "engines": 2},
        max_staleness=2,
        pause_mode=pause_mode,  # type: ignore[arg-type]
        kv_policy=kv_policy,  # type: ignore[arg-type]
        run_directory=run,
    ) as rollouts:
        async for batch in rollouts.batches(range(24), episode=two_turns):
            assert batch.staleness.max() <= 2
            assert torch.equal(batch.loss_mask, batch.weight_versions >= 0)
            await asyncio.sleep(0.02)  # a train step: rollouts continue meanwhile
            await rollouts.publish(weights.step())
    statistics = rollouts.statistics()
    assert statistics.ledger.error == 0
    assert statistics.trainer_version == statistics.batches == 12
    assert statistics.ledger.trained == statistics.ledger.generated > 0
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained
    if kv_policy == "recompute":
        assert report.spans_mixed == 0


async def test_a_trainer_that_would_wait_trains_on_groups_again_within_the_bound(
    model: Path, tmp_path: Path
) -> None:
    weights, run = Weights(model), tmp_path / "run"
    uses: dict[int, list[int]] = {}
    async with tidegate.serve(
        model=model, **SMALL, max_staleness=4, max_uses=2, step_time_min_s=0.01, run_directory=run
    ) as rollouts:
        async for batch in rollouts.batches(range(12), episode=two_turns):
            assert batch.staleness.max() <= 4
            for group, use in dict(
                zip(*map(torch.Tensor.tolist, (batch.group_ids, batch.uses)), strict=True)
            ).items():
                uses.setdefault(group, []).append(use)
            await rollouts.publish(weights.step())
    statistics, again = rollouts.statistics(), sum(len(each) > 1 for each in uses.values())
    assert again > 0
    assert all(each in ([1], [1, 2]) for each in uses.values())
    assert (statistics.trained_rollouts, statistics.reused_rollouts) == (24, 2 * again)
    assert statistics.ledger.trained == statistics.ledger.generated > statistics.reused_tokens > 0
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained + statistics.reused_tokens


@pytest.mark.parametrize("weight_channel", ["zmq", "relay"])
async def test_tokens_and_weights_travel_over_tcp_with_keys(
    model: Path, tmp_path: Path, weight_channel: str
) -> None:
    make_keys(tmp_path / "keys")
    weights, run = Weights(model), tmp_path / "run"
    async with tidegate.serve(
        model=model,
        **SMALL,
        listen_address="tcp://127.0.0.1:*",
        curve_key_directory=tmp_path / "keys",
        weight_channel=weight_channel,  # type: ignore[arg-type]
        run_directory=run,
    ) as rollouts:
        async for _ in rollouts.batches(range(8), episode=two_turns):
            await rollouts.publish(weights.step())
    assert rollouts.statistics().trainer_version == 4
    report = audit_run(run)
    assert report.agrees, report.lines()


async def test_generation_continues_while_the_trainer_blocks_its_thread(model: Path) -> None:
    async with tidegate.serve(model=model, **SMALL, max_staleness=2) as rollouts:
        batches = rollouts.batches(range(100), episode=two_turns)
        first = asyncio.ensure_future(anext(batches))
        assert rollouts.statistics().ledger.generated == 0
        await asyncio.sleep(0)  # it is asked for
        deadline = time.monotonic() + 60
        while rollouts.statistics().buffered_groups < 4 and time.monotonic() < deadline:
            time.sleep(0.05)  # noqa: ASYNC251 - what a trainer does that isn't async
        assert rollouts.statistics().buffered_groups >= 4
        assert rollouts.statistics().ledger.generated > 0
        await first
        await batches.aclose()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("programs_are_executed")
def test_the_sync_handle_does_the_same(model: Path) -> None:
    weights = Weights(model)
    with tidegate.serve_sync(model=model, **SMALL, max_staleness=1) as rollouts:
        versions = []
        for batch in rollouts.batches(range(6), episode=two_turns):
            versions.append(batch.trainer_version)
            assert rollouts.publish(weights.step()) == len(versions)
        evaluation = rollouts.evaluate(range(5), episode=two_turns)
    assert versions == [0, 1, 2]
    assert (len(evaluation.rewards), evaluation.failures) == (5, 0)
    with pytest.raises(RunClosed):
        rollouts.evaluate([1], episode=two_turns)


async def test_the_same_evaluation_twice_gives_the_same_rewards(model: Path) -> None:
    async with tidegate.serve(model=model, **SMALL) as rollouts:
        first = await rollouts.evaluate(range(12), episode=two_turns)
        assert await rollouts.evaluate(range(12), episode=two_turns) == first


async def test_a_reward_that_raises_costs_its_rollout_and_no_other(model: Path) -> None:
    async def sometimes(episode: tidegate.Episode, task: int) -> float:
        reward = await two_turns(episode, task)
        if episode.index == 0:
            raise ZeroDivisionError("a bug in the reward")
        return reward

    settings = {**SMALL, "group_size": 3}
    async with tidegate.serve(model=model, **settings, max_staleness=0) as rollouts:
        batches = [b async for b in rollouts.batches(range(2), episode=sometimes)]
    assert [len(batch.rewards) for batch in batches] == [4]
    statistics = rollouts.statistics()
    assert dict(statistics.discarded_rollouts) == {"code_error": 2}
    assert statistics.ledger.discarded["code_error"] > 0
    assert statistics.ledger.error == 0


async def test_an_episode_that_always_fails_ends_the_run_with_its_own_error(model: Path) -> None:
    async def broken(episode: tidegate.Episode, task: int) -> float:
        raise ZeroDivisionError("a bug in every reward")

    async with tidegate.serve(model=model, **SMALL) as rollouts:
        with pytest.raises(EpisodeError, match="ZeroDivisionError: a bug in every reward"):
            await anext(rollouts.batches(itertools.repeat(0), episode=broken))


def not_async(episode: tidegate.Episode, task: int) -> float:
    return 1.0


async def without_a_reward(episode: tidegate.Episode, task: int) -> None:
    episode.append("1+1=")
    await episode.generate(max_tokens=2)


async def without_an_await(episode: tidegate.Episode, task: int) -> float:
    turn: Any = episode.generate(max_tokens=2)
    try:
        return len(turn.text)
    finally:
        turn.close()


@pytest.mark.parametrize(
    ("episode", "why"),
    [
        (not_async, "define it with `async def not_async"),
        (without_a_reward, "must return its reward as a finite number.*got None"),
        (without_an_await, "'coroutine' object has no attribute 'text'"),
    ],
)
async def test_an_episode_that_can_never_work_ends_the_run_after_a_few_failures(
    model: Path, episode: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidegate.serve(model=model, **SMALL) as rollouts:
        with pytest.raises(EpisodeError, match=f"8 episodes failed in the same place.*{why}"):
            await anext(rollouts.batches(itertools.repeat(0), episode=episode))
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == 1


@pytest.mark.parametrize("reward", [None, float("nan"), "1.0", 1e39])
async def test_a_reward_that_is_no_finite_number_is_counted_as_a_failure(
    model: Path, reward: Any
) -> None:
    async def odd(episode: tidegate.Episode, task: int) -> Any:
        return reward

    async with tidegate.serve(model=model, **SMALL) as rollouts:
        evaluation = await rollouts.evaluate(range(3), episode=odd)
    assert (evaluation.failures, evaluation.mean_reward) == (3, 0.0)


async def test_an_episode_past_its_time_is_discarded(model: Path) -> None:
    async def stuck(episode: tidegate.Episode, task: int) -> float:
        await asyncio.Event().wait()
        return 0.0

    async with tidegate.serve(model=model, **SMALL, episode_timeout_s=0.05) as rollouts:
        evaluation = await rollouts.evaluate([0], episode=stuck)
    assert evaluation.rewards == [None]


async def test_an_agents_last_turn_ends_with_its_context_and_the_next_is_the_policys_failure(
    model: Path,
) -> None:
    """A long rollout is trained on, with the failure policy's reward, and is no fault of code."""
    finished: list[tuple[str | None, int]] = []

    async def agent(episode: tidegate.Episode, task: int) -> float:
        episode.append([5] * 100)
        while True:
            turn = await episode.generate(max_tokens=150)
            finished.append((turn.finish_reason, len(turn.token_ids)))
            episode.append([6] * 20)

    settings: dict[str, Any] = {**SMALL, "failure_policy": tidegate.FailurePolicy(reward=0.0)}
    async with tidegate.serve(model=model, **settings) as rollouts:
        batch = await anext(rollouts.batches(itertools.repeat(0), episode=agent))
        assert set(batch.rewards.tolist()) == {0.0}
        assert ("length", 512 - 100 - 2 * 170) in finished
        [failures] = rollouts.statistics().episode_failures
    assert (failures.cause, failures.reason) == ("policy", "context_full")
    assert not failures.discarded


async def test_asking_again_without_publishing_says_what_to_do(model: Path) -> None:
    async with tidegate.serve(model=model, **SMALL, max_staleness=0) as rollouts:
        batches = rollouts.batches(itertools.repeat(0), episode=two_turns)
        await anext(batches)
        with pytest.raises(PublishNeeded, match="Say which batches"):
            await anext(batches)


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(model: Path) -> None:
    weights = Weights(model)
    async with tidegate.serve(model=model, **SMALL) as rollouts:
        first = await rollouts.evaluate(range(4), episode=two_turns)
        for damaged in (
            {**weights.state, "model.norm.weight": torch.zeros(7)},
            {**weights.state, "model.no_such.weight": torch.zeros(7)},
            {n: t for n, t in weights.state.items() if n != "model.norm.weight"},
        ):
            with pytest.raises(WeightsRefused, match=r"model\.no"):
                await rollouts.publish(damaged)
        assert await rollouts.evaluate(range(4), episode=two_turns) == first
        assert await rollouts.publish(weights.step()) == 1
        assert await rollouts.evaluate(range(4), episode=two_turns) != first


async def test_a_killed_engines_turns_continue_elsewhere_and_it_comes_back(model: Path) -> None:
    settings = {**SMALL, "engines": 2}
    async with tidegate.serve(model=model, **settings, max_staleness=1) as rollouts:
        weights = Weights(model)
        victim = children(recursive=True)[0]
        trained = 0
        async for batch in rollouts.batches(itertools.count(), episode=two_turns):
            trained += len(batch.rewards)
            if trained == 4:
                victim.kill()
                await asyncio.to_thread(victim.wait, 10)
            version = await rollouts.publish(weights.step())
            engines = rollouts.statistics().engines
            if trained > 40 and [e.weight_version for e in engines] == [version, version]:
                break
    assert rollouts.statistics().ledger.error == 0
    assert rollouts.statistics().max_staleness_seen <= 1


async def test_losing_the_last_engine_for_good_ends_the_run_with_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RESTART_DELAY_FIRST_S", 0.01)
    moved = tmp_path / "model"
    shutil.copytree(model, moved)
    async with tidegate.serve(model=moved, **SMALL) as rollouts:
        shutil.rmtree(moved)  # so that starting it again must fail
        for process in children(recursive=True):
            process.kill()
        batches = rollouts.batches(itertools.repeat(0), episode=two_turns)
        with pytest.raises(EngineLost, match="is not a directory"):
            await anext(batches)


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"groups_per_batch": 0}, "groups_per_batch=0"),
        ({"groups_per_batch": 8, "outstanding_groups_limit": 4}, "can never fill"),
        ({"pause_mode": "stop"}, "pause_mode='stop'"),
        ({"max_stalenes": 1}, "no such setting"),
        ({"engine_timeout_s": 1.0}, "at least twice"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name_and_value(
    model: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tidegate.serve(model=model, **settings)


def test_a_missing_model_directory_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match="nowhere does not exist"),
        tidegate.serve_sync(model=tmp_path / "nowhere"),
    ):
        pass


def test_an_unsupported_architecture_is_refused_by_the_engine_in_its_own_words(
    tmp_path: Path,
) -> None:
    path = make_model_directory(tmp_path / "m")
    config = path / "config.json"
    config.write_text(config.read_text().replace("qwen3", "gpt2").replace("Qwen3", "GPT2"))
    with (
        pytest.raises(EngineStartFailed, match=r"(?i)gpt2"),
        tidegate.serve_sync(model=path, **SMALL),
    ):
        pass


def test_damaged_weights_are_refused_by_the_engine_in_its_own_words(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"not a safetensors file")
    with (
        pytest.raises(EngineStartFailed, match="safetensors"),
        tidegate.serve_sync(model=path, **SMALL),
    ):
        pass


def test_an_address_in_use_is_refused(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(AddressInUse, match="in use by another process"),
            tidegate.serve_sync(model=model, **SMALL, listen_address=address),
        ):
            pass


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("signal_number", "statuses"),
    [(signal.SIGINT, {-2, 1}), (signal.SIGTERM, {143, -15}), (signal.SIGKILL, {-9})],
)
@pytest.mark.parametrize("moment", ["starting", "running"])
def test_a_signal_at_any_moment_leaves_nothing_running(
    model: Path, tmp_path: Path, signal_number: int, statuses: set[int], moment: str
) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import asyncio, sys, tidegate\n"
        "async def solve(episode, task):\n"
        "    episode.append([5, 6, 7])\n"
        "    await episode.generate(max_tokens=200)\n"
        "    return 1.0\n"
        "async def main():\n"
        "    print('starting', flush=True)\n"
        f"    async with tidegate.serve(model={str(model)!r}) as rollouts:\n"
        "        print('running', flush=True)\n"
        "        async for batch in rollouts.batches(iter(int, 1), episode=solve):\n"
        "            await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert trainer.stdout is not None
    with trainer:
        while trainer.stdout.readline().strip() != moment:
            assert trainer.poll() is None
        engines = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(signal_number)
        assert trainer.wait(30) in statuses
        _, alive = psutil.wait_procs(engines, timeout=15)
        assert alive == []
