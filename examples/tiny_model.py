"""Where does the demo's model come from? It is made on the spot, in under a minute of one core.

A Qwen3 of 306,000 parameters that reads characters, warmed up on demonstrations of the calculator
task: first lessons in using the tool, then the habit of mostly guessing. What warm-up makes is
the skill, what is left to RL is to prefer it. It knows nothing of RL or engines.

    python -m examples.tiny_model DIRECTORY [--seed N]

Shapes: B demonstrations in a batch, T tokens in the longest of them.
"""

import argparse
import hashlib
import json
import random
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from examples import calculator
from examples.calculator import INSTRUCTION, Task, calculate, tasks

PAD, EOS = 0, 1
VOCABULARY = [
    *("<pad>", "<eos>", "<unk>", INSTRUCTION),
    *(string.ascii_letters + string.digits + " +-=.,>?:'[]#\n"),
]


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of warm-up."""

    tool_share: float
    """Demonstrations that use the calculator; the others guess."""
    learning_rate: float
    check_steps: int


LESSONS = Phase(tool_share=0.6, learning_rate=2e-3, check_steps=10)
"""Many calls, so that the skill comes soon; until ``SKILL_WANTED``."""
HABITS = Phase(tool_share=0.3, learning_rate=4e-4, check_steps=2)
"""A preference shifts within ten steps, where a skill takes hundreds: so these are small ones."""
SKILL_WANTED = 0.9
ACCURACY_WANTED = (0.27, 0.33)
"""Where habits may end. Imitating them perfectly solves .30 x skill + .70 / 19 = .31 of the tasks."""
GUESS_ERROR_MAX = 9
"""Guesses are off by up to this much, either way: right 1 time in 19."""
CHECK_TASKS = 128
BATCH_DEMONSTRATIONS = 64
LENGTH_BUCKETS = 4
RAMP_STEPS = 20
STEPS_MAX = 600

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "model_max_length": 256,
}
"""What transformers' AutoTokenizer wants to know beside tokenizer.json."""

MARKER = "warmup.json"
"""Written last, so a directory that has it is whole."""


@dataclass(frozen=True, slots=True)
class Mastery:
    """How well a model does, at temperature 1, in the ways that were demonstrated to it.

    Other ways hardly occur, so these chances are what sampling would measure, without its noise.
    """

    skill: float
    """Mean chance of working a task out with the tool, once a call has begun."""
    accuracy: float
    """Mean chance of solving a task, with the tool or by the bare right answer."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far warm-up has come."""

    steps: int
    loss: float
    """Of the last batch, in nats per token."""
    mastery: Mastery
    """On held-out tasks."""


@dataclass(frozen=True, slots=True)
class WarmUpReport:
    """What warm-up made, for a run's report to tell apart from what RL added."""

    recipe: str
    """Names this file's text and the settings; another recipe means another model."""
    seed: int
    steps: int
    demonstrations: int
    seconds: float
    loss: float
    skill: float
    accuracy: float
    """See :class:`Mastery`; on held-out tasks."""


def make_model(
    directory: Path,
    *,
    seed: int = 0,
    steps_max: int = STEPS_MAX,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> WarmUpReport:
    """Make a warmed-up Hugging Face model in ``directory``, or find it there from last time.

    A directory that was left half made, or made by another recipe, is made again: files of the
    same names are written over, others left alone.
    """
    if steps_max < 1:
        raise ValueError(f"steps_max must be > 0, got {steps_max}")
    recipe = _recipe(seed, steps_max)
    found = _read_report(directory)
    if found is not None and found.recipe == recipe:
        return found
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).unlink(missing_ok=True)
    started = time.perf_counter()
    tokenizer = make_tokenizer()
    with _one_seeded_thread(seed):
        model = Qwen3ForCausalLM(_config())
        for progress in _warm_up(model, tokenizer, seed, steps_max):
            on_progress(progress)
    report = WarmUpReport(
        recipe=recipe,
        seed=seed,
        steps=progress.steps,
        demonstrations=progress.steps * BATCH_DEMONSTRATIONS,
        seconds=round(time.perf_counter() - started, 2),
        loss=progress.loss,
        skill=progress.mastery.skill,
        accuracy=progress.mastery.accuracy,
    )
    _save(directory, model, tokenizer, report)
    return report


def make_tokenizer() -> Tokenizer:
    """One token per character, and one for the instruction that every question begins with."""
    ids = {text: token_id for token_id, text in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.add_tokens([AddedToken(INSTRUCTION, normalized=False)])
    return tokenizer


def _config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole episode as token ids, and which of them are the policy's own."""

    token_ids: list[int]
    is_action: list[bool]


def demonstrate(task: Task, actions: list[str], tokenizer: Tokenizer) -> Demonstration:
    """Play ``actions`` in order, the calculator answering every one that calls it."""
    token_ids = tokenizer.encode(task.question).ids
    is_action = [False] * len(token_ids)
    for action in actions:
        ids = [*tokenizer.encode(action).ids, EOS]
        token_ids += ids
        is_action += [True] * len(ids)
        if action.startswith("?"):
            ids = tokenizer.encode(calculate(action)).ids
            token_ids += ids
            is_action += [False] * len(ids)
    return Demonstration(token_ids, is_action)


def tool_actions(task: Task) -> list[str]:
    """Work the sum out from left to right, two operands to a call."""
    total, *rest = task.expression.split()
    actions = []
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        actions.append(f"?{total}{operator}{operand}")
        total = calculate(actions[-1]).strip(">\n")
    return [*actions, total]


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """Shows how it's done, or guesses."""

    tokenizer: Tokenizer
    to_solve: Iterator[Task]
    numbers: random.Random

    def batch(self, tool_share: float) -> list[Demonstration]:
        """Demonstrations of the next tasks. [B]"""
        to_solve = islice(self.to_solve, BATCH_DEMONSTRATIONS)
        return [self._demonstrate(task, tool_share) for task in to_solve]

    def _demonstrate(self, task: Task, tool_share: float) -> Demonstration:
        if self.numbers.random() < tool_share:
            return demonstrate(task, tool_actions(task), self.tokenizer)
        error = self.numbers.randint(-GUESS_ERROR_MAX, GUESS_ERROR_MAX)
        return demonstrate(task, [str(int(task.answer) + error)], self.tokenizer)


def _warm_up(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int, steps_max: int
) -> Iterator[Progress]:
    """Imitate the demonstrator through both phases, or for ``steps_max``."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    demonstrator = Demonstrator(tokenizer, tasks("train", seed), random.Random(seed))
    held_out = list(islice(tasks("held_out", seed), CHECK_TASKS))
    phase = LESSONS
    for steps in range(1, steps_max + 1):
        optimizer.param_groups[0]["lr"] = phase.learning_rate * min(1.0, steps / RAMP_STEPS)
        loss = _imitate(model, optimizer, demonstrator.batch(phase.tool_share))
        if steps % phase.check_steps == 0 or steps == steps_max:
            mastery = measure_mastery(model, tokenizer, held_out)
            yield Progress(steps, loss, mastery)
            if phase is LESSONS and mastery.skill >= SKILL_WANTED:
                phase = HABITS
            elif phase is HABITS and _is_within(mastery.accuracy, ACCURACY_WANTED):
                return


def _is_within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def _imitate(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: list[Demonstration]
) -> float:
    """Take one optimizer step towards the batch's actions; its loss in nats per token."""
    tokens = sum(sum(demonstration.is_action) for demonstration in batch)
    loss = -demonstration_logprobs(model, batch).sum() / tokens
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def demonstration_logprobs(model: Qwen3ForCausalLM, batch: list[Demonstration]) -> Tensor:
    """Log-probability of all actions of each demonstration, shortest first. [B]

    Rows of like length go through the model together: a guess is a third as long as a tool path,
    and padding the one to the other would double the time.
    """
    by_length = sorted(batch, key=lambda demonstration: len(demonstration.token_ids))
    rows = -(-len(batch) // LENGTH_BUCKETS)
    buckets = [by_length[start : start + rows] for start in range(0, len(batch), rows)]
    return torch.cat([_padded_logprobs(model, bucket) for bucket in buckets])


def _padded_logprobs(model: Qwen3ForCausalLM, batch: list[Demonstration]) -> Tensor:
    """Of rows padded at the end, where nothing that counts attends to it. [B]"""
    rows = [torch.tensor(demonstration.token_ids) for demonstration in batch]
    masks = [torch.tensor(demonstration.is_action) for demonstration in batch]
    token_ids = pad_sequence(rows, batch_first=True, padding_value=PAD)  # [B, T]
    is_action = pad_sequence(masks, batch_first=True)  # [B, T]
    logits = model(input_ids=token_ids[:, :-1]).logits
    losses = cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none")
    return -(losses * is_action[:, 1:]).sum(1)


@torch.no_grad()
def measure_mastery(model: Qwen3ForCausalLM, tokenizer: Tokenizer, to_solve: list[Task]) -> Mastery:
    """Measure it on ``to_solve``, at the price of three forward passes."""
    by_tool = [demonstrate(task, tool_actions(task), tokenizer) for task in to_solve]
    by_head = [demonstrate(task, [task.answer], tokenizer) for task in to_solve]
    chances = [
        float(demonstration_logprobs(model, ways).exp().mean())
        for ways in ([_begun(way) for way in by_tool], by_tool, by_head)
    ]
    return Mastery(skill=chances[0], accuracy=chances[1] + chances[2])


def _begun(demonstration: Demonstration) -> Demonstration:
    """The same with its first action token given."""
    is_action = list(demonstration.is_action)
    is_action[is_action.index(True)] = False
    return Demonstration(demonstration.token_ids, is_action)


def _save(
    directory: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer, report: WarmUpReport
) -> None:
    """The layout of any Hugging Face directory; the marker last."""
    with _no_progress_bars():
        model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    (directory / MARKER).write_text(json.dumps(asdict(report), indent=2) + "\n")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """One for a file of a megabyte would only tear up the caller's own display."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _read_report(directory: Path) -> WarmUpReport | None:
    """None where nothing, or nothing we can read, was finished."""
    try:
        return WarmUpReport(**json.loads((directory / MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _recipe(seed: int, steps_max: int) -> str:
    """Any edit of the files that make the model remakes it: cheaper than to serve a stale one."""
    sources = [Path(__file__).read_bytes(), Path(calculator.__file__).read_bytes()]
    settings = f"seed={seed} steps_max={steps_max}".encode()
    return hashlib.sha256(b"\0".join([*sources, settings])).hexdigest()[:16]


@contextmanager
def _one_seeded_thread(seed: int) -> Iterator[None]:
    """Run torch on one thread from ``seed``, and leave the caller's settings as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _show(progress: Progress) -> None:
    print(
        f"warm-up step {progress.steps:4d}  loss {progress.loss:.3f}  "
        f"tool skill {progress.mastery.skill:.2f}  accuracy {progress.mastery.accuracy:.2f}",
        flush=True,
    )


def main() -> None:
    """Make a model from the command line."""
    parser = argparse.ArgumentParser(description="Make the demo's model, or find it made.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = make_model(arguments.directory, seed=arguments.seed, on_progress=_show)
    print(
        f"{arguments.directory}: {report.steps} steps in {report.seconds:.0f} s, "
        f"tool skill {report.skill:.2f}, held-out accuracy {report.accuracy:.2f}"
    )


if __name__ == "__main__":
    main()
