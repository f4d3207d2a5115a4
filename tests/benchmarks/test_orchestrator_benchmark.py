"""Tests that the orchestrator's benchmark measures a real run. They check no figure."""

import http.client
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.wire

ROOT = Path(__file__).parents[2]

FEW = ["--group-size", "2", "--rollouts", "16", "--batch", "4", "--warm-up", "1", "--batches", "3"]


def subject(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.orchestrator.subject", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=120, check=True)
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


@pytest.mark.parametrize(
    "how",
    [
        ["--engines", "3", "--slots", "2", "--steps", "4", "--turn-s", "0.008"],
        ["--engines", "3", "--slots", "2", "--steps", "1", "--turn-s", "0", "--in-process"],
    ],
    ids=["over the wire", "in process"],
)
def test_the_benchmarks_engines_finish_every_turn_of_a_run(how: list[str]) -> None:
    reported = subject("throughput", *FEW, *how)
    assert reported["rollouts"] == 3 * 4 * 2
    assert reported["cpu_s"] > 0
    assert reported["wall_s"] > 0


def test_the_benchmarks_engines_serve_every_adapter_of_a_run() -> None:
    how = ["--engines", "2", "--slots", "4", "--steps", "1", "--turn-s", "0", "--in-process"]
    reported = subject("adapters", *FEW, *how, "--adapters", "5", "--batches", "15")
    assert reported["rollouts"] >= 15


def test_the_peers_stand_in_servers_speak_sglangs_and_vllms_http() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/peers/http_engine.py"), "--tokens", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            answers = []
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
                for path in ("/generate", "/inference/v1/generate", "/health"):
                    client.request("POST", path, body=b'{"input_ids": [1, 2]}')
                    answers.append(json.loads(client.getresponse().read()))
        finally:
            server.terminate()
    sglang, vllm, health = answers
    assert sglang["meta_info"]["output_token_logprobs"] == [[-1.0, t, None] for t in range(3)]
    assert sglang["meta_info"]["finish_reason"]["type"] == "length"
    assert vllm["choices"][0]["token_ids"] == [0, 1, 2]
    assert [each["logprob"] for each in vllm["choices"][0]["logprobs"]["content"]] == [-1.0] * 3
    assert health == {"status": "ok"}
