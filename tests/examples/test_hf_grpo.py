"""The recipe on transformers and accelerate: it learns, resumes, evaluates, and runs on two ranks.

accelerate is in TRL's Python, which `make test-hf` creates; otherwise these tests are skipped.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_model
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template, chat_tokenizer

PYTHON = os.environ.get("TIDEGATE_TRL_PYTHON", "")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="accelerate is in TRL's Python: make test-hf"),
    pytest.mark.timeout(2 * TIMEOUT_S),
]

SCRIPT = (
    *("-m", "examples.hf_grpo", "--engines", "1", "--learning-rate", "3e-4", "--held-out", "16"),
    *("--group-size", "4", "--groups-per-batch", "8"),
    *("--checkpoint-every", "2", "--evaluate-every", "2"),
)
ON_POLICY = ("--max-staleness", "0")
"""A resumed run trains on the very batches of a straight one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_model(path)
    return path


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of one process that trains four batches."""
    output = tmp_path_factory.mktemp("straight") / "output"
    train(model, output, *ON_POLICY, "--batches", "4", "--report-to", "tensorboard")
    return output


def start(*options: str, ranks: int = 1) -> "subprocess.Popen[str]":
    launch: tuple[str, ...] = ()
    if ranks > 1:
        launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
        launch += ("--master-port", str(free_port()))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.Popen(
        [PYTHON, *launch, *SCRIPT, *options],
        cwd=ROOT,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(model: Path, output: Path, *options: str, ranks: int = 1) -> None:
    with start("--model", str(model), "--output", str(output), *options, ranks=ranks) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors[-4000:]


def refusal(*options: str) -> str:
    """Return the error of a call that is refused."""
    with start(*options) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    line: str = errors.strip().splitlines()[-1]
    assert line.startswith("error: "), errors[-4000:]
    return line


def lines(output: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are of a kind, without the kind."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: each for k, each in row.items() if k != "kind"} for row in rows if row["kind"] == kind
    ]


def batches(output: Path, kind: str) -> list[int]:
    return [row["batch"] for row in lines(output, kind)]


def checkpoint(output: Path, number: int) -> Path:
    return output / "checkpoints" / f"batch-{number:06d}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def assert_same_steps(steps: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(steps) == len(expected)
    for step, other in zip(steps, expected, strict=True):
        assert step == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_each_second_version_is_evaluated_saved_and_tracked(model: Path, straight: Path) -> None:
    assert batches(straight, "evaluation") == [0, 2, 4]
    assert batches(straight, "train") == [1, 2, 3, 4]
    saved = sorted((straight / "checkpoints").iterdir())
    assert saved == [checkpoint(straight, 2), checkpoint(straight, 4)]
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, saved[1]))
    assert before.num_parameters() == after.num_parameters()
    assert not before.lm_head.weight.equal(after.lm_head.weight)
    assert list((straight / "hf_grpo").rglob("events.out.tfevents.*"))


def test_a_resumed_run_trains_the_batches_that_a_straight_one_does(
    model: Path, straight: Path, tmp_path: Path
) -> None:
    train(model, tmp_path, *ON_POLICY, "--batches", "2")
    train(model, tmp_path, *ON_POLICY, "--batches", "4", "--resume")
    assert_same_steps(lines(tmp_path, "train"), lines(straight, "train"))
    assert batches(tmp_path, "evaluation") == [0, 2, 4]


def test_after_kill_9_no_rollout_is_in_the_checkpoint_twice(model: Path, tmp_path: Path) -> None:
    options = ("--model", str(model), "--output", str(tmp_path))
    with start(*options, "--batches", "100", "--checkpoint-every", "2") as process:
        assert process.stdout is not None
        until_s = time.monotonic() + TIMEOUT_S
        while "batch 3: train" not in process.stdout.readline():
            assert process.poll() is None
            assert time.monotonic() < until_s
        process.send_signal(signal.SIGKILL)
    killed = len(lines(tmp_path, "train"))
    newest = max((tmp_path / "checkpoints").glob("batch-??????"))
    done = int(newest.name[-6:])
    train(model, tmp_path, "--batches", str(done + 2), "--resume")
    steps = lines(tmp_path, "train")
    assert [step["batch"] for step in steps[killed:]] == [done + 1, done + 2]
    # What was trained after the checkpoint was lost with its weights, and counts as discarded.
    surviving = steps[:done] + steps[killed:]
    replay = tidegate("replay", tmp_path / "run")
    trained = re.search(r"([0-9]+) trained", replay)
    assert trained is not None
    assert int(trained[1]) == sum(step["tokens"] for step in surviving)
    assert tidegate("audit", tmp_path / "run").endswith("agrees\n")


def tidegate(command: str, run: Path) -> str:
    """Return the output of one of Tidegate's commands on a run."""
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", command, str(run)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", [[], ["--fsdp"]], ids=["ddp", "fsdp2"])
def test_two_processes_take_the_steps_of_one_and_one_continues_them(
    model: Path, straight: Path, tmp_path: Path, mode: list[str]
) -> None:
    train(model, tmp_path, *ON_POLICY, "--batches", "2", *mode, ranks=2)
    train(model, tmp_path, *ON_POLICY, "--batches", "3", "--resume", *mode, ranks=2)
    train(model, tmp_path, *ON_POLICY, "--batches", "4", "--resume")
    assert_same_steps(lines(tmp_path, "train"), lines(straight, "train"))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "model"
    size = chat_tokenizer().get_vocab_size()
    make_model_directory(path, vocab_size=size, max_position_embeddings=1024)
    add_chat_template(path, "chatml")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings["bos_token"] = "<bos>"  # transformers refuses a dict without a type, which we accept
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_a_chat_model_is_trained_on_a_file_of_questions(chat_model: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "questions.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"One more.\n#### {n + 1:,}"} for n in range(20)]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "output"
    options = ("--dataset", str(dataset), "--max-tokens", "16", "--batches", "2")
    train(chat_model, output, *options)
    assert batches(output, "train") == [1, 2]
    assert batches(output, "evaluation") == [0, 2]  # by the two of its questions that are held out


def test_a_chat_model_is_trained_to_list_words(chat_model: Path, tmp_path: Path) -> None:
    train(chat_model, tmp_path, "--task", "words", "--batches", "1")
    assert batches(tmp_path, "train") == [1]
    assert batches(tmp_path, "evaluation") == [0, 1]


def test_only_the_last_layers_change_if_only_they_are_trained(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, "--last-layers", "1", "--batches", "1")
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (model, checkpoint(tmp_path, 1))
    )
    changed = {name for name in before if not before[name].equal(after[name])}
    last = max(name.split(".")[2] for name in before if name.startswith("model.layers."))
    assert changed
    assert all(name.startswith(f"model.layers.{last}.") for name in changed)


LINES = {
    '{"question": "1 + 1?", "solution": "#### 2"}': "KeyError: 'answer'",
    '{"question": "1 + 1?", "answer": 2}': "TypeError",
    '{"question": "1 + 1?", "answer": "2"}': "has no '#### NUMBER'",
    "question,answer": "JSONDecodeError",
    '{"question": "1 + 1?", "answer": "#### 2"}': "has 1 lines",
}


@pytest.mark.parametrize("line", LINES)
def test_a_dataset_of_another_form_is_refused_by_its_line(
    chat_model: Path, tmp_path: Path, line: str
) -> None:
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text(line + "\n")
    options = ("--output", str(tmp_path), "--model", str(chat_model), "--dataset", str(dataset))
    error = refusal(*options)
    assert LINES[line] in error
    assert str(dataset) in error


def test_options_that_do_not_fit_are_refused_before_anything_starts(
    model: Path, straight: Path, tmp_path: Path
) -> None:
    given = ("--output", str(tmp_path), "--model", str(model))
    assert "no config.json" in refusal("--output", str(tmp_path), "--model", str(tmp_path))
    assert "is no file" in refusal(*given, "--dataset", str(tmp_path / "none.jsonl"))
    assert "with a chat template" in refusal(*given, "--dataset", str(ROOT / "README.md"))
    assert "with a chat template" in refusal(*given, "--task", "words")
    assert "the only one" in refusal(*given, "--fsdp")
    assert "has no checkpoint" in refusal(*given, "--resume")
    checkpoint(tmp_path, 4).mkdir(parents=True)
    assert "has no journal.db" in refusal(*given, "--resume")
    output = ("--output", str(straight), "--model", str(model))
    assert "has a run" in refusal(*output)
    assert "is the last of --batches 4" in refusal(*output, "--resume", "--batches", "4")
