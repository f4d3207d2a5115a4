"""The recipe on transformers and accelerate: it learns, resumes, evaluates, and runs on two ranks.

accelerate is in TRL's Python, which `make test-hf` creates; otherwise these tests are skipped.
"""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_model

PYTHON = os.environ.get("TIDEGATE_TRL_PYTHON", "")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="accelerate is in TRL's Python: make test-hf"),
    pytest.mark.timeout(2 * TIMEOUT_S),
]

SCRIPT = (
    *("-m", "examples.hf_grpo", "--engines", "1", "--max-staleness", "0", "--held-out", "16"),
    *("--group-size", "4", "--groups-per-batch", "8"),
    *("--checkpoint-every", "2", "--evaluate-every", "2"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_model(path)
    return path


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Output of one process that trains four batches, and what it printed."""
    output = tmp_path_factory.mktemp("straight")
    options = ("--report-to", "tensorboard")
    return output, train(model, output, "--batches", "4", *options)


def train(model: Path, output: Path, *options: str, ranks: int = 1) -> Any:
    """Run the recipe; return its last line, parsed as JSON."""
    launch: tuple[str, ...] = ()
    if ranks > 1:
        launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
        launch += ("--master-port", str(free_port()))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, *launch, *SCRIPT, "--model", str(model), "--output", str(output), *options],
        cwd=ROOT,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_each_second_batch_is_evaluated_saved_and_tracked(straight: tuple[Path, Any]) -> None:
    output, seen = straight
    assert list(seen["evaluations"]) == ["0", "2", "4"]
    assert [step["batch"] for step in seen["steps"]] == [1, 2, 3, 4]
    assert [path.name for path in sorted((output / "checkpoints").iterdir())] == [
        "batch-000002",
        "batch-000004",
    ]
    checkpoint = AutoModelForCausalLM.from_pretrained(output / "checkpoints" / "batch-000004")
    assert checkpoint.num_parameters() == seen["local_parameters"]
    assert list((output / "hf_grpo").rglob("events.out.tfevents.*"))


def test_a_resumed_run_trains_the_batches_that_a_straight_one_does(
    model: Path, straight: tuple[Path, Any], tmp_path: Path
) -> None:
    train(model, tmp_path, "--batches", "2")
    resumed = train(model, tmp_path, "--batches", "4", "--resume")
    assert_same_steps(resumed["steps"], straight[1]["steps"][2:])
    assert list(resumed["evaluations"]) == ["4"]


@pytest.mark.parametrize("mode", [[], ["--fsdp"]], ids=["ddp", "fsdp2"])
def test_two_ranks_split_each_batch_and_take_the_steps_of_one(
    model: Path, straight: tuple[Path, Any], tmp_path: Path, mode: list[str]
) -> None:
    seen = train(model, tmp_path, "--batches", "4", *mode, ranks=2)
    assert seen["rows"] == [16] * 4  # of 32
    assert_same_steps(seen["steps"], straight[1]["steps"])
    whole = straight[1]["local_parameters"]
    assert seen["local_parameters"] == (whole // 2 if mode else whole)
    resumed = train(model, tmp_path, "--batches", "5", "--resume", *mode, ranks=2)
    assert [step["batch"] for step in resumed["steps"]] == [5]


def assert_same_steps(steps: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(steps) == len(expected)
    for step, other in zip(steps, expected, strict=True):
        assert step == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_without_a_checkpoint_resume_says_so(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has no checkpoint to resume from"):
        train(model, tmp_path, "--resume")
