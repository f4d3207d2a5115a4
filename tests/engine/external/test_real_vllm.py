"""Runs over a real vLLM server on the CPU: ``make test-vllm``.

The audit of a whole run compares every log-prob with transformers on the weights of its tag. So it
proves generation, the meaning of log-probs, pauses with turns in flight, weight updates and
provenance together.
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.engine.external.adapter_runs import train
from tests.models import make_model_directory
from tests.orchestrator.trainer.test_adapters_served import random_adapter, solve_by_adapters
from tests.orchestrator.trainer.test_external_loras import train as train_adapters
from tidegate.cli.engine_doctor.findings import Verdict, findings
from tidegate.cli.engine_doctor.measuring import examined, measure
from tidegate.engine.external.adapter import ScoreRequest
from tidegate.engine.external.loras import PEFT_PREFIX, HostAdapter
from tidegate.engine.external.vllm import make_adapter
from tidegate.errors import ConfigError, TurnRefused, WeightsRefused
from tidegate.transport.messages import KvPolicy, PauseMode

PYTHON = os.environ.get("TIDEGATE_VLLM_PYTHON")

KEY = "sesame"

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="wants vLLM, in a Python of its own: make test-vllm"),
    pytest.mark.timeout(600),
]


@dataclass
class Server:
    """One vLLM process."""

    model: Path
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill all of its processes. Harmless if repeated."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)


def start(model: Path, log: Path, *more: str, python_path: str = "") -> Server:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": python_path,
    }
    options = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    options += ["--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "16"]
    options += [
        "--api-key",
        KEY,
        "--dtype",
        "float32",
        "--logprobs-mode",
        "processed_logprobs",
        *more,
    ]
    assert PYTHON is not None
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *options, "--enable-scale-out"],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Server(model, f"http://127.0.0.1:{port}", process)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("vllm")
    model = make_model_directory(directory / "model", tied=False)
    server = start(model, directory / "log")
    try:
        wait_for(server, directory / "log")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIDEGATE_ENGINE_KEY", KEY)
            yield server
    finally:
        server.kill()


def wait_for(server: Server, log: Path) -> None:
    """Wait until its port answers or its process has ended; pytest's own limit bounds it."""
    while server.process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)  # each look takes time from the start
            continue
        return
    pytest.fail(f"vLLM ended: {log.read_text()[-2000:]}")


async def test_given_tokens_are_scored_as_transformers_scores_them(server: Server) -> None:
    adapter = make_adapter(server.url, server.model)
    capabilities = await adapter.open("v0")
    tokens = [1, 5, 9, 13, 17, 21, 2, 6, 10, 14]
    try:
        scores = await adapter.score(ScoreRequest(tokens, "logprobs", 4, 0, 1.0))
    finally:
        await adapter.close()
    assert capabilities.keeps_kv
    expected = reference(server.model, tokens)[4:]
    assert list(scores.logprobs) == pytest.approx(expected, abs=1e-4)


def reference(model: Path, tokens: list[int]) -> list[float]:
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = auto(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [0.0] + [logprobs[n, token].item() for n, token in enumerate(tokens[1:])]


@pytest.mark.parametrize(
    ("pause_mode", "kv_policy"),
    [("keep", "keep"), ("keep", "recompute"), ("abort", "recompute"), ("wait", "recompute")],
)
async def test_every_token_of_a_run_is_what_its_tags_say(
    server: Server, tmp_path: Path, pause_mode: PauseMode, kv_policy: KvPolicy
) -> None:
    report = await train(
        server.model,
        tmp_path / "run",
        batches=8,
        engine_urls=[f"vllm+{server.url}"],
        pause_mode=pause_mode,
        kv_policy=kv_policy,
    )
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0
    assert report.versions > 3
    assert report.version_power.unnoticed_share < 0.05
    # Whether a turn is under way when weights change is chance here; the tests against the double
    # check that kept KV is reported.
    assert kv_policy == "keep" or report.spans_mixed == 0


async def test_a_server_with_a_key_is_not_driven_without_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEGATE_ENGINE_KEY")
    adapter = make_adapter(server.url, server.model)
    try:
        with pytest.raises(ConfigError, match="requires a key"):
            await adapter.open("v0")
    finally:
        await adapter.close()


async def test_a_cpus_server_declares_no_sleep_and_wakes_as_its_source_says(
    server: Server,
) -> None:
    """Its ``/wake_up`` exists all the same, and resumes a paused server."""
    adapter = make_adapter(server.url, server.model)
    try:
        capabilities = await adapter.open("v0")
        assert capabilities.sleep_levels == set()
        await adapter.sleep(1, ["weights", "kv_cache"])
        await adapter.wake(["weights"])
        await adapter.wake(["kv_cache"])
        await adapter._expect_paused(True)
        await adapter.resume()
    finally:
        await adapter.close()


async def test_a_tied_model_is_refused_on_a_cpu(server: Server, tmp_path: Path) -> None:
    tied = make_model_directory(tmp_path / "tied", tied=True)
    adapter = make_adapter(server.url, tied)
    try:
        with pytest.raises(ConfigError, match="old lm_head"):
            await adapter.open("v0")
    finally:
        await adapter.close()


def test_the_doctor_finds_an_update_sound_and_gives_it_its_own_weights_again(
    server: Server,
) -> None:
    measured = measure(examined(server.url), server.model, updates=True)
    found = {one.check: one for one in findings(measured)}
    assert found["weight update"].verdict == Verdict.OK, found
    assert "a prompt with another salt does not find the KV" in found["cache over an update"].says
    again = measure(examined(server.url), server.model)
    assert again.mismatch is not None
    assert again.mismatch.mean < 1e-4


def test_the_doctor_finds_the_tied_head_that_an_update_leaves_old(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model", tied=True)
    server = start(model, tmp_path / "log")
    try:
        wait_for(server, tmp_path / "log")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIDEGATE_ENGINE_KEY", KEY)
            measured = measure(examined(server.url), model, updates=True)
    finally:
        server.kill()
    [found] = [one for one in findings(measured) if one.check == "weight update"]
    assert found.verdict == Verdict.FAIL
    assert "untie it" in found.remedy


async def test_turns_continue_on_another_engine_when_the_server_is_killed(
    server: Server, tmp_path: Path
) -> None:
    report = await train(
        server.model,
        tmp_path / "run",
        after_two=server.kill,
        batches=6,
        engines=1,
        engine_urls=[f"vllm+{server.url}"],
        kv_policy="keep",
    )
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0


async def each_turn_by_an_adapter(episode: tidegate.Episode, task: int) -> float:
    """Every turn has an adapter, because on a CPU turns without one are refused."""
    reward = await solve_by_adapters(episode, task)
    if task % 2:
        with pytest.raises(
            TurnRefused, match="vLLM on a CPU applies LoRA adapters to turns without"
        ):
            await episode.generate(max_tokens=4, adapter="")
    return reward


async def test_lora_adapters_come_change_and_go_and_what_is_too_large_is_refused(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model", tied=False)
    server = start(model, tmp_path / "log", "--enable-lora", "--max-lora-rank", "8")
    try:
        wait_for(server, tmp_path / "log")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIDEGATE_ENGINE_KEY", KEY)
            report = await train_adapters(
                model,
                tmp_path / "run",
                f"vllm+{server.url}",
                episode=each_turn_by_an_adapter,
                kv_policy="keep",
            )
            adapter = make_adapter(server.url, model)
            capabilities = await adapter.open("v0")
            try:
                named = {
                    name.removeprefix(PEFT_PREFIX): tensor
                    for name, tensor in random_adapter(model, 0, rank=16).items()
                }
                large = HostAdapter(named, 1.0)
                large.write(tmp_path / "large", model)
                with pytest.raises(WeightsRefused, match="greater than max_lora_rank 8"):
                    await adapter.load_lora("tidegate-lora-x", tmp_path / "large")
            finally:
                await adapter.close()
    finally:
        server.kill()
    assert capabilities.lora_rank_max == 8
    assert report.agrees, report.lines()
    assert (report.tokens_unreplayable, report.tokens_unknown) == (0, 0)
    assert report.version_power.unnoticed_share < 0.5
