"""A trainer's whole way, for real: engine processes, the wire, weights in flight, torch batches."""

import asyncio
import itertools
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.mortal_trainer import two_turns
from tests.orchestrator.trainer.runs import SMALL, Weights, audited
from tidegate.errors import (
    AddressInUse,
    EngineLost,
    EngineStartFailed,
    RunClosed,
    WeightsRefused,
)
from tidegate.orchestrator.fleet import processes
from tidegate.transport.security import make_keys

pytestmark = [pytest.mark.wire, pytest.mark.usefixtures("nothing_is_left_running")]


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
    report = audited(run)
    assert report.tokens == statistics.ledger.trained
    if kv_policy == "recompute":
        assert report.spans_mixed == 0


async def test_a_trainer_that_would_wait_trains_on_groups_again_within_the_bound(
    model: Path, tmp_path: Path
) -> None:
    weights, run = Weights(model), tmp_path / "run"
    uses: dict[int, list[int]] = {}

    async def two_late_turns(episode: tidegate.Episode, task: int) -> float:
        # The trainer has nothing but the first groups until it trains on them again. It does so on
        # another loop, so there is no event to wait for.
        while task > 3 and max(map(len, uses.values()), default=0) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await two_turns(episode, task)

    async with tidegate.serve(
        model=model, **SMALL, max_staleness=4, max_uses=2, run_directory=run
    ) as rollouts:
        async for batch in rollouts.batches(range(12), episode=two_late_turns):
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
    report = audited(run)
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
    audited(run)


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


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen3", "not a safetensors file", {}, "safetensors"),
    ("qwen3", "", {"num_kv_blocks": 10**12}, r"memory for a KV cache of 1.*lower num_kv_blo"),
    ("qwen3", "", {"tensor_parallel_size": 3}, "which can't be split evenly over 3 ranks"),
    ("gpt2", "", {"quantization": "int8"}, "transformers computes in full precision"),
    ("qwen3", "", {"speculative_method": "tea leaves"}, "speculative_method must be"),
]
"""Architecture, damage to its weights, settings, and what is said."""


@pytest.mark.parametrize(("architecture", "damage", "settings", "why"), REFUSED)
def test_what_an_engine_can_not_serve_is_refused_in_its_own_words(
    tmp_path: Path, architecture: str, damage: str, settings: dict[str, Any], why: str
) -> None:
    path = make_model_directory(tmp_path, architecture)
    if damage:
        (path / "model.safetensors").write_text(damage)
    with (
        pytest.raises(EngineStartFailed, match=why),
        tidegate.serve_sync(model=path, **SMALL, **settings),
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
