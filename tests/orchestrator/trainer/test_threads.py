"""Threads of engines and of the trainer: divided over the cores, or reported as too many."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tidegate.orchestrator.fleet.processes import engine_command, engine_options
from tidegate.orchestrator.settings import config
from tidegate.orchestrator.settings.config import RunSettings, run_settings
from tidegate.orchestrator.trainer.rollouts import share_cores
from tidegate.testing import ServeInTests


def settings(**values: Any) -> RunSettings:
    return run_settings(**{"model": Path("model"), "engines": 1, **values})


@pytest.fixture
def on_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    return monkeypatch


@pytest.mark.parametrize(
    ("values", "threads"),
    [
        ({"engines": 1}, 6),
        ({"engines": 2}, 4),
        ({"engines": 2, "tensor_parallel_size": 2}, 2),
        ({"engines": 40}, 1),
        ({"engines": 1, "threads_per_engine": 5}, 5),
        ({"engines": 1, "device": "cuda"}, 1),
    ],
)
def test_cores_are_shared_out_among_engines_and_the_trainer(
    on_cores: pytest.MonkeyPatch, values: dict[str, Any], threads: int
) -> None:
    asked = settings(**values)
    command = engine_command(asked, "engine-0", "ipc://x")
    assert command[command.index("--threads") + 1] == str(threads)
    assert asked.engine_threads <= config.ENGINE_THREADS_MAX


def test_omp_num_threads_is_heeded_and_another_host_gets_one_thread(
    on_cores: pytest.MonkeyPatch,
) -> None:
    on_cores.setenv("OMP_NUM_THREADS", "3")
    assert settings().engine_threads == 3
    assert settings(threads_per_engine=2).engine_threads == 2
    on_cores.setenv("OMP_NUM_THREADS", "none")
    assert settings().engine_threads == 6
    asked = settings()
    elsewhere = engine_options(asked.model, asked.engine, "engine-0", "tcp://x")
    assert elsewhere[elsewhere.index("--threads") + 1] == "1"


@pytest.mark.parametrize(
    ("values", "omp", "before", "after", "said"),
    [
        ({"engines": 2}, None, 4, 4, ""),
        ({"engines": 2}, None, 12, 4, "engines use the other 8 of 12 cores"),
        ({"engines": 2}, None, 6, 4, "engines use the other 8 of 12 cores"),  # physical cores
        ({"engines": 2}, None, 7, 7, "set OMP_NUM_THREADS=4"),  # somebody chose it
        ({"engines": 2, "threads_per_engine": 4}, "12", 12, 12, "set OMP_NUM_THREADS=4"),
        ({"engines": 12}, None, 1, 1, ""),  # it can't have fewer
        ({"engines": 0, "listen_address": "tcp://127.0.0.1:5555"}, None, 12, 12, ""),
        ({"engines": 1, "device": "cuda"}, None, 12, 12, ""),
    ],
)
def test_a_trainers_torch_gets_the_free_cores_unless_its_user_chose_a_number(
    on_cores: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    values: dict[str, Any],
    omp: str | None,
    before: int,
    after: int,
    said: str,
) -> None:
    threads = [before]
    on_cores.setattr(torch, "get_num_threads", lambda: threads[-1])
    on_cores.setattr(torch, "set_num_threads", threads.append)
    on_cores.setattr(os, "cpu_count", lambda: 12)
    if omp:
        on_cores.setenv("OMP_NUM_THREADS", omp)
    share_cores(settings(**values))
    assert threads[-1] == after
    assert [said in record.getMessage() for record in caplog.records] == [True] * bool(said)


def options_of(asked: RunSettings, name: str) -> tuple[str | None, str]:
    """Return an engine's device, and how many share its memory."""
    command = engine_command(asked, name, "ipc://x")
    device = command[command.index("--device") + 1] if "--device" in command else None
    return device, command[command.index("--memory-sharers") + 1]


def test_engines_take_the_given_gpus_in_turn_and_share_the_memory_of_each() -> None:
    asked = run_settings(model="model", devices=["cuda:1", "cuda:2"], engines=3)
    found = [options_of(asked, f"engine-{number}") for number in range(3)]
    assert found == [("cuda:1", "2"), ("cuda:2", "1"), ("cuda:1", "2")]
    assert asked.engine_threads == 1


def test_on_a_cpu_all_engines_and_the_trainer_share_the_memory() -> None:
    assert options_of(settings(engines=2, tensor_parallel_size=2), "engine-1") == (None, "5")
    assert "--memory-sharers" not in engine_command(
        settings(num_kv_blocks=9), "engine-0", "ipc://x"
    )


def test_engines_get_the_share_of_the_memory_that_the_run_sets() -> None:
    command = engine_command(settings(engines=2, kv_memory_share=0.5), "engine-0", "ipc://x")
    assert command[command.index("--kv-memory-share") + 1] == "0.5"


def test_a_trainer_that_publishes_on_the_engines_gpu_shares_its_memory() -> None:
    asked = settings(device="cuda:0", weight_channel="cuda_ipc")
    assert options_of(asked, "engine-0") == ("cuda:0", "2")


async def test_a_simulated_run_leaves_torch_its_threads(
    on_cores: pytest.MonkeyPatch, tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    threads = [12]
    on_cores.setattr(torch, "get_num_threads", lambda: threads[-1])
    on_cores.setattr(torch, "set_num_threads", threads.append)
    async with tidegate_serve(engines=2):
        pass
    assert threads == [12]
    assert "torch_threads" not in caplog.text
