"""Tests of the demo's model: a complete Hugging Face directory, built deterministically."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

from examples.calculator import FinishedTurn, Task, long_tailed_tasks, solve, tasks
from examples.imitation import COOLED, Phase, Progress
from examples.tiny_model import (
    MARKER,
    WarmUpReport,
    make_model,
    make_tokenizer,
)
from examples.warm_up import demonstrate, measure_performance, tool_actions

pytestmark = pytest.mark.slow

STEPS = 3


@dataclass(frozen=True)
class Made:
    directory: Path
    report: WarmUpReport
    progress: list[Progress]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model warmed up for no more than three steps."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    progress: list[Progress] = []
    report = make_model(directory, seed=3, steps_max=STEPS, on_progress=progress.append)
    return Made(directory, report, progress)


@pytest.fixture
def some_tasks() -> Iterator[Task]:
    return tasks("train", 4)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def remade(made: Made, seed: int = 3) -> WarmUpReport:
    return make_model(made.directory, seed=seed, steps_max=STEPS)


def test_transformers_loads_the_directory(made: Made) -> None:
    model = Qwen3ForCausalLM.from_pretrained(made.directory)

    assert sum(parameter.numel() for parameter in model.parameters()) == 305_920
    assert model.generation_config.eos_token_id == 1
    assert model.config.tie_word_embeddings


def test_the_tokenizer_is_the_same_through_tokenizers_and_transformers(made: Made) -> None:
    plain = Tokenizer.from_file(str(made.directory / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(made.directory)

    assert reference("?3+9").input_ids == plain.encode("?3+9").ids
    assert reference.eos_token_id == plain.token_to_id("<eos>") == 1
    assert len(reference) == plain.get_vocab_size() == 80


def test_a_demonstration_marks_the_policys_own_tokens_and_no_others() -> None:
    tokenizer = make_tokenizer()
    task = Task("3 + 9 =", "3 + 9", {"answer": "12"})

    demonstration = demonstrate(task, ["?3+9", "12"], tokenizer)

    pairs = zip(demonstration.token_ids, demonstration.is_action, strict=True)
    read = [token_id for token_id, is_action in pairs if not is_action]
    assert tokenizer.decode(demonstration.token_ids) == "3 + 9 =?3+9>12\n12"
    assert tokenizer.decode(read) == "3 + 9 =>12\n"
    assert demonstration.token_ids[-1] == 1


@dataclass
class Demonstrator:
    """Plays the tool path as an episode's policy would."""

    actions: list[str]
    text: str = ""

    def append(self, text_or_ids: str) -> None:
        pass

    async def generate(self, *, max_tokens: int) -> FinishedTurn:
        self.text = self.actions.pop(0)
        assert len(make_tokenizer().encode(self.text).ids) < max_tokens
        return self


async def test_the_demonstrated_tool_path_solves_every_task_within_the_limits() -> None:
    for task in islice(long_tailed_tasks("train", 4), 300):
        assert await solve(Demonstrator(tool_actions(task)), task) == 1.0


def test_skill_is_the_probability_of_the_demonstrated_paths(
    made: Made, some_tasks: Iterator[Task]
) -> None:
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(made.directory), make_tokenizer()
    task = next(some_tasks)

    def chance(actions: list[str], given: int) -> float:
        """Probability of these actions, with the first ``given`` tokens fixed, computed one by
        one."""
        way = demonstrate(task, actions, tokenizer)
        logprobs = model(input_ids=torch.tensor([way.token_ids])).logits[0].log_softmax(-1)
        own = [at for at, is_action in enumerate(way.is_action) if is_action][given:]
        return math.exp(sum(logprobs[at - 1, way.token_ids[at]].item() for at in own))

    performance = measure_performance(model, tokenizer, [task])

    by_tool = tool_actions(task)
    assert performance.skill == pytest.approx(chance(by_tool, given=1), rel=1e-4)
    expected = chance(by_tool, given=0) + chance([task.answer], given=0)
    assert performance.accuracy == pytest.approx(expected, rel=1e-4)


def test_the_report_is_what_lies_beside_the_weights(made: Made) -> None:
    assert json.loads((made.directory / MARKER).read_text()) == asdict(made.report)
    assert made.report.steps == STEPS
    assert [made.report.loss] == [progress.loss for progress in made.progress]
    assert made.report.loss < 4.3  # 80 equally likely tokens would cost log(80) = 4.38 nats each


def test_the_learning_rate_of_a_phase_that_cools_falls_to_a_tenth_by_its_last_step() -> None:
    phase = Phase(skill_share=1.0, learning_rate=2.0, check_steps=5, cooling_steps=(10, 20))

    assert [phase.rate(step) for step in (1, 10, 15, 19, 20)] == [2.0, 2.0, 1.0, 0.2, 2 * COOLED]
    assert [phase.is_over(step) for step in (19, 20, 21)] == [False, True, True]
    warm = Phase(skill_share=1.0, learning_rate=2.0, check_steps=5)
    assert warm.rate(1) == warm.rate(1000) == 2.0
    assert not warm.is_over(1000)


def test_a_finished_model_is_reused(made: Made) -> None:
    (made.directory / "model.safetensors").touch()
    before = (made.directory / "model.safetensors").stat().st_mtime_ns

    assert remade(made) == made.report
    assert (made.directory / "model.safetensors").stat().st_mtime_ns == before


def test_the_same_seed_makes_the_same_weights_and_another_seed_others(
    made: Made, tmp_path: Path
) -> None:
    make_model(tmp_path / "same", seed=3, steps_max=STEPS)
    make_model(tmp_path / "other", seed=4, steps_max=STEPS)

    actual, same, other = (
        weights(path)["model.norm.weight"]
        for path in (made.directory, tmp_path / "same", tmp_path / "other")
    )
    assert torch.equal(actual, same)
    assert not torch.equal(actual, other)


@pytest.mark.parametrize("marker", [None, "{", '{"recipe": "old"}'])
def test_an_incomplete_model_directory_is_created_again(tmp_path: Path, marker: str | None) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("someone's own")
    if marker is not None:
        (tmp_path / MARKER).write_text(marker)

    make_model(tmp_path, steps_max=1)

    assert weights(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "someone's own"


def test_another_seed_replaces_the_model_in_the_same_directory(tmp_path: Path) -> None:
    first = make_model(tmp_path, seed=0, steps_max=1)
    second = make_model(tmp_path, seed=1, steps_max=1)

    assert second.recipe != first.recipe
    assert json.loads((tmp_path / MARKER).read_text())["seed"] == 1


def test_the_callers_random_state_and_threads_are_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(17)
    expected = torch.rand(3)
    threads = torch.get_num_threads()
    torch.manual_seed(17)

    make_model(tmp_path, steps_max=1)

    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_a_warm_up_of_no_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps_max must be > 0, got 0"):
        make_model(tmp_path / "model", steps_max=0)

    assert not (tmp_path / "model").exists()
