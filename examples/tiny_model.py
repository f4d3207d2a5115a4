"""Tiny demo model: a Qwen3 of 306,000 parameters, created in under a minute on one core.

It reads characters and is warmed up on demonstrations of the calculator task: first with many calls
of the tool, then with few. Warm-up provides the skill, and RL learns to prefer it. The demos call
:func:`make_model`.

    python -m examples.tiny_model DIRECTORY [--seed N]
"""

import argparse
import hashlib
import json
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.calculator import INSTRUCTION
from examples.imitation import DemonstrationSource, Progress, warm_up
from examples.warm_up import ToolDemonstrations
from tidegate.engine.models.quiet_transformers import quiet_transformers

PAD, EOS = 0, 1
VOCABULARY = [
    *("<pad>", "<eos>", "<unk>", INSTRUCTION),
    *(string.ascii_letters + string.digits + " +-=.,>?:'[]#\n"),
]


STEPS_MAX = 600

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
}
"""Fields that transformers' AutoTokenizer needs beside tokenizer.json."""

MARKER = "warmup.json"
"""File that is written last, so a directory that has it is complete."""


@dataclass(frozen=True, slots=True)
class WarmUpReport:
    """Result of a warm-up, which a run's report shows beside the gain from RL."""

    recipe: str
    """Fingerprint of the source files and settings; another recipe means another model."""
    seed: int
    steps: int
    demonstrations: int
    seconds: float
    loss: float
    skill: float
    accuracy: float
    """Skill and accuracy as in :class:`Performance`, on held-out tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Parts that a small model is made from."""

    tokenizer: Callable[[], Tokenizer]
    source: Callable[[Tokenizer, int], DemonstrationSource]
    """Creates the source of demonstrations from the tokenizer and a seed."""
    sources: tuple[str, ...]
    """Names of the source files in this directory that define what is taught."""
    context_tokens: int = 256
    chat_template: str | None = None

    def fingerprint(self, seed: int, steps_max: int) -> str:
        """Hash the source files and settings, so that any edit rebuilds the model."""
        names = (Path(__file__).name, "imitation.py", *self.sources)
        sources = [(Path(__file__).parent / name).read_bytes() for name in names]
        settings = f"seed={seed} steps_max={steps_max}".encode()
        return hashlib.sha256(b"\0".join([*sources, settings])).hexdigest()[:16]


def make_model(
    directory: Path,
    *,
    recipe: Recipe | None = None,
    seed: int = 0,
    steps_max: int = STEPS_MAX,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> WarmUpReport:
    """Create a warmed-up Hugging Face model in ``directory``, or reuse the one there.

    A directory that is incomplete, or from another recipe, is rebuilt: files of the same names are
    overwritten, others left alone. The recipe defaults to the calculator's.
    """
    if steps_max < 1:
        raise ValueError(f"steps_max must be > 0, got {steps_max}")
    recipe = recipe or CALCULATOR
    fingerprint = recipe.fingerprint(seed, steps_max)
    found = _read_report(directory)
    if found is not None and found.recipe == fingerprint:
        return found
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).unlink(missing_ok=True)
    started = time.perf_counter()
    tokenizer = recipe.tokenizer()
    with _one_seeded_thread(seed):
        model = Qwen3ForCausalLM(small_config(tokenizer.get_vocab_size(), recipe.context_tokens))
        source = recipe.source(tokenizer, seed)
        for progress in warm_up(source, model, steps_max):
            on_progress(progress)
    report = WarmUpReport(
        recipe=fingerprint,
        seed=seed,
        steps=progress.steps,
        demonstrations=progress.steps * source.plan.batch_demonstrations,
        seconds=round(time.perf_counter() - started, 2),
        loss=progress.loss,
        skill=progress.performance.skill,
        accuracy=progress.performance.accuracy,
    )
    _save(directory, model, tokenizer, recipe, report)
    return report


def find_model(
    given: Path | None, made_at: Path, *, recipe: Recipe | None = None, seed: int
) -> tuple[Path, dict[str, object] | None]:
    """Return the given model directory, or that of the recipe's small model, created or reused from
    the last run; and the small model's report."""
    if given is not None:
        return given, None
    report = make_model(made_at, recipe=recipe, seed=seed, on_progress=show)
    return made_at, asdict(report)


def make_tokenizer() -> Tokenizer:
    """Create the calculator's tokenizer: characters, and one token for the instruction."""
    return character_tokenizer(VOCABULARY, special=VOCABULARY[:3], phrases=[INSTRUCTION])


def character_tokenizer(
    vocabulary: Sequence[str], *, special: Sequence[str], phrases: Sequence[str]
) -> Tokenizer:
    """Create a tokenizer with a token per character, special token and phrase."""
    ids = {text: token_id for token_id, text in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


CALCULATOR = Recipe(
    tokenizer=make_tokenizer,
    source=ToolDemonstrations,
    sources=("calculator.py", "warm_up.py"),
    context_tokens=512,
)
"""Recipe of the calculator demo's model."""


def small_config(vocabulary: int, context_tokens: int) -> Qwen3Config:
    """Return the config of a model of two layers, for so many token ids and positions."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )


def _save(
    directory: Path,
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    recipe: Recipe,
    report: WarmUpReport,
) -> None:
    """Write a Hugging Face model directory, the marker last."""
    with quiet_transformers():
        model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**TOKENIZER_CONFIG, "model_max_length": recipe.context_tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if recipe.chat_template is not None:
        (directory / "chat_template.jinja").write_text(recipe.chat_template)
    (directory / MARKER).write_text(json.dumps(asdict(report), indent=2) + "\n")


def _read_report(directory: Path) -> WarmUpReport | None:
    """Read the report; None if there is no complete or readable one."""
    try:
        return WarmUpReport(**json.loads((directory / MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def _one_seeded_thread(seed: int) -> Iterator[None]:
    """Run torch on one thread from ``seed``, and restore the caller's settings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def show(progress: Progress) -> None:
    """Print a check of the warm-up."""
    measured = progress.performance
    print(
        f"warm-up: step {progress.steps}, loss {progress.loss:.3f}, skill {measured.skill:.2f}, "
        f"accuracy {measured.accuracy:.2f}",
        flush=True,
    )


def main() -> None:
    """Create a model from the command line."""
    parser = argparse.ArgumentParser(description="Make the demo's model, or find it made.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = make_model(arguments.directory, seed=arguments.seed, on_progress=show)
    print(
        f"{arguments.directory}: {report.steps} steps in {report.seconds:.0f} s, "
        f"tool skill {report.skill:.2f}, held-out accuracy {report.accuracy:.2f}"
    )


if __name__ == "__main__":
    main()
