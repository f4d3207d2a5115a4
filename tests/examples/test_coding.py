"""Tests of the coding example: right programs pass, hostile ones do not, a model is trained."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from examples import agent_demo
from examples.coding import LIMITS, Coding, main, right_program, solved, tasks, wrong_program
from examples.coding_demonstrations import CODER
from examples.tiny_model import make_model
from tests.models import make_model_directory
from tidegate import Bubblewrap, Sandboxes
from tidegate.errors import SandboxUnavailable
from tidegate.observability.audit.audit import AUDIT_FILE

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    try:
        pool = Sandboxes(Bubblewrap(), limits=LIMITS, ready=1)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with pool:
        yield pool


async def reward(sandboxes: Sandboxes, task: str, program: str) -> float:
    coding = Coding(sandboxes)
    coding.reset(seed=3, task=task)
    observation = await coding.step(program)
    assert observation.done
    return observation.reward


def test_the_steps_of_a_task_are_done_in_their_order() -> None:
    assert solved("+3*2-7", 10) == 19


async def test_a_right_program_passes_and_one_without_parentheses_does_not(
    sandboxes: Sandboxes,
) -> None:
    for task in islice(tasks("held_out", 0), 3):
        assert await reward(sandboxes, task, right_program(task)) == 1.0
        assert await reward(sandboxes, task, wrong_program(task)) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "print(",
        "import os\nwhile True: os.fork()",
        "while True: print(1)",
        "import os, signal; os.kill(1, signal.SIGKILL); os.kill(os.getppid(), signal.SIGKILL)",
        "x = bytearray(1 << 40)",
        "import sys; sys.exit(0)",
        "\0",
    ],
)
async def test_a_hostile_program_has_no_reward_and_fails_no_episode(
    sandboxes: Sandboxes, program: str
) -> None:
    assert await reward(sandboxes, "+3*2-7", program) == 0.0


def test_a_model_that_knows_nothing_writes_to_the_end(
    sandboxes: Sandboxes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_directory(tmp_path / "model")
    assert main(["--model", str(model), "--tasks", "2"]) == 0
    assert "of 2 programs passed" in capsys.readouterr().out


def test_without_bubblewrap_the_example_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["--model", "nowhere"]) == 2
    assert "apt-get install bubblewrap" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_trains_on_its_programs_and_every_token_agrees(
    sandboxes: Sandboxes, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    make_model(model, recipe=CODER, steps_max=3)
    common = ["--task", "code", "--model", str(model), "--runs", str(tmp_path), "--name", "run"]
    short = ["--versions", "2", "--groups-per-batch", "2", "--held-out", "4"]
    assert agent_demo.main([*common, *short]) == 0
    report = json.loads((tmp_path / "run-code" / "report.json").read_text())
    assert report["versions"] == 2
    assert report["max_staleness"] <= 2
    assert report["discarded_rollouts"] == {}
    audit = json.loads((tmp_path / "run-code" / AUDIT_FILE).read_text())
    assert audit["tokens_agreeing"] == audit["tokens"]
    assert not audit["problems"]
