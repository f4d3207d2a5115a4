"""Pytest plugin that runs TRL's own tests, unchanged, on Tidegate in place of vLLM and of stubs.

    # trl_tests: a copy of the folder tests/ of TRL's repository
    PYTHONPATH=.:… .venv-trl/bin/python -m pytest -p tests.integrations.trl_own_tests \
        --trl-model DIRECTORY trl_tests/test_vllm_client_server.py \
        trl_tests/experimental/test_async_grpo_trainer.py

Tests of the client get a Tidegate server, and tests of the asynchronous trainer a run. What they
download is replaced by a model directory and a few rows, and their need for GPUs is passed over.
"""

import contextlib
import functools
import socket
import subprocess
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import import_utils
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
)
from trl.scripts import vllm_serve

import tidegate
from examples.trl_async_grpo import run_on_cpu
from examples.trl_grpo_server import GlooClient
from examples.trl_grpo_server import run_on_cpu as run_client_on_cpu
from tests.integrations.trl_dispatch import PROMPT, solve

CLASSES = ("TestVLLMClientServer", "TestAsyncGRPOTrainer")
OPENED = contextlib.ExitStack()
"""Servers and runs, which end with the session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the model's directory."""
    parser.addoption("--trl-model", required=True, help="a Hugging Face directory")


def pytest_configure() -> None:
    """Let TRL run on a CPU, and add names that tests of an older TRL import for other tests."""
    run_on_cpu()
    run_client_on_cpu()
    for module in (vllm_serve, import_utils, async_grpo_trainer, async_rollout_worker):
        module.__getattr__ = _former_name


def _former_name(name: str) -> Any:
    """Return a function in place of one that the installed TRL no longer has."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the two classes, without their marks, and put Tidegate in their modules."""
    model = config.getoption("--trl-model")
    items[:] = [item for item in items if getattr(item.parent, "name", "") in CLASSES]
    for item in items:
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]
        replace = _replace_server if "vllm" in item.module.__name__ else _replace_worker  # type: ignore[attr-defined]
        replace(item.module, item.cls, model)  # type: ignore[attr-defined]


def pytest_unconfigure() -> None:
    """Close servers and runs."""
    OPENED.close()


def _replace_server(module: Any, tests: Any, model: str) -> None:
    """Have the tests' client ask a Tidegate server, which is started with the first client."""

    def client(**_: Any) -> Any:
        settings: dict[str, Any] = {"weight_transfer": "gloo", "needs_control_token": False}
        server = OPENED.enter_context(tidegate.vllm_server(model=model, engines=1, **settings))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return GlooClient(base_url=server.url, group_port=port)

    tests.model_id = model
    module.VLLMClient = client
    module.subprocess = SimpleNamespace(Popen=lambda *_, **__: None, PIPE=subprocess.PIPE)
    module.kill_process = lambda _: None
    module.AutoModelForCausalLM = SimpleNamespace(
        from_pretrained=lambda path, **_: AutoModelForCausalLM.from_pretrained(path)
    )


def _replace_worker(module: Any, _: Any, model: str) -> None:
    """Have the tests' trainer take its rows from a run."""
    about: dict[str, Any] = {"dtype": "float32", "bf16": False, "gradient_checkpointing": False}
    config = functools.partial(AsyncGRPOConfig, use_cpu=True, **about)
    completion = [{"role": "assistant", "content": "here"}]
    rows = [{"prompt": PROMPT, "completion": completion}] * 4

    def trainer(**given: Any) -> Any:
        if "rollout_worker" in given:
            args = given.setdefault(
                "args", config(output_dir=OPENED.enter_context(tempfile.TemporaryDirectory()))
            )
            size = given["rollout_worker"]
            rows_per_sync = args.per_device_train_batch_size * args.gradient_accumulation_steps
            groups = max(1, rows_per_sync * args.weight_sync_steps // size)
            if args.token_budget != 0:  # TRL's micro-batches then have any number of rows
                groups = 32
            shape = {"group_size": size, "groups_per_batch": groups, "max_staleness": 2}
            run = OPENED.enter_context(tidegate.serve_sync(model=model, **shape))
            tasks = ({"prompt": PROMPT} for _ in iter(int, 1))
            worker = tidegate.TRLRollouts(run, tasks, episode=_solve, args=args)
            given |= {"rollout_worker": worker, "weight_transfer": worker}
        return AsyncGRPOTrainer(**(given | {"model": model}))

    module.AsyncGRPOConfig, module.AsyncGRPOTrainer = config, trainer
    module._StubRolloutWorker = lambda *_, num_generations: num_generations
    module._StubWeightTransfer = lambda: None
    module.load_dataset = lambda *_, **__: Dataset.from_list(rows)
    module.AutoTokenizer = SimpleNamespace(
        from_pretrained=lambda _: AutoTokenizer.from_pretrained(model)
    )


async def _solve(episode: tidegate.Episode, task: dict[str, Any]) -> float:
    """Generate one answer; the reward differs among rollouts of a group."""
    return await solve(episode, task["prompt"]) + float(episode.rollout_id % 2)
