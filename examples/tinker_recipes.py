r"""The Tinker cookbook's minimal recipes, unmodified, over `tidegate tinker`: sums, learned.

    make test-tinker             # makes .venv-tinker, where the cookbook is
    .venv-tinker/bin/python -m examples.tinker_recipes

``tinker_cookbook.recipes.rl_loop`` and ``sl_loop`` run as they do against the Tinker service. Both
download a data set, so ``datasets.load_dataset`` is replaced, by sums in the form of GSM8K and of
No Robots. The server serves a tiny model under the name of a public one, by which the recipes find
their renderer; its tokenizer is registered with the cookbook. The tiny model is warmed up on right
answers, and then mostly on random ones.

Prints rl_loop's mean reward and sl_loop's mean negative log-likelihood of each step.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import torch
from tinker_cookbook import renderers
from tinker_cookbook.recipes import rl_loop, sl_loop
from tinker_cookbook.tokenizer_utils import register_tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

import tidegate
from examples.tiny_model import PAD, TOKENIZER_CONFIG, character_tokenizer, small_config

NAME = "Qwen/Qwen3-8B-Base"
"""Name of the served model, for which the cookbook renders plain text: ``User: …``."""

INSTEAD = "importance_sampling"
"""Loss that the server computes for ``stable_reinforce``, which is rl_loop's default and has no
published formula."""

TERMS = range(1, 7)
QUESTION_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""What rl_loop adds to each question."""

EXAMPLE = (
    "How many r's are in strawberry?",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
)
"""The conversation that rl_loop begins each prompt with; the tokenizer has a token for each part,
so that the tiny model reads a prompt of 30 tokens."""

PHRASES = [QUESTION_SUFFIX, *EXAMPLE, "\\boxed{", "User:", "Assistant:", "\n\n"]

CORRECT_STEPS, MIXED_STEPS = 150, 30
"""Warm-up steps on correct answers; then those of which most have a random answer."""

CORRECT_SHARE = 0.3
WARM_UP_RATE, MIXED_RATE = 1e-3, 1e-4
LEARNING_RATE = 3e-3
"""Large, because the model is tiny and its adapter begins at zero."""


def question(a: int, b: int) -> str:
    """Return the question of a sum."""
    return f"{a}+{b}?"


def load_dataset(name: str, *_: Any) -> datasets.DatasetDict:
    """Return sums in place of the data set of this name, in its form."""
    numbers = random.Random(1)
    pairs = [(numbers.choice(TERMS), numbers.choice(TERMS)) for _ in range(4096)]
    if name == "openai/gsm8k":
        columns: dict[str, list[Any]] = {
            "question": [question(a, b) for a, b in pairs],
            "answer": [f"#### {a + b}" for a, b in pairs],
        }
    else:
        columns = {
            "messages": [
                [
                    {"role": "user", "content": question(a, b)},
                    {"role": "assistant", "content": f"\\boxed{{{a + b}}}"},
                ]
                for a, b in pairs
            ]
        }
    return datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)})


# ---------------------------------------------------------------- the model


def make_model(directory: Path) -> None:
    """Write the tiny model, warmed up on rl_loop's prompts."""
    characters = sorted({*"0123456789+-? ", "}", *"".join(PHRASES)})
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = [*special, *PHRASES, *characters]
    tokenizer = character_tokenizer(vocabulary, special=special, phrases=PHRASES)
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(small_config(len(vocabulary), 256))
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    warm_up(model, AutoTokenizer.from_pretrained(directory))
    model.save_pretrained(directory)


def warm_up(model: Any, tokenizer: Any) -> None:
    """Train the model to answer, correctly in some of the cases."""
    renderer: Any = renderers.get_renderer("role_colon", tokenizer)
    numbers = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_RATE)
    prefix = [
        {"role": "user", "content": EXAMPLE[0] + QUESTION_SUFFIX},
        {"role": "assistant", "content": EXAMPLE[1]},
    ]
    for step in range(CORRECT_STEPS + MIXED_STEPS):
        is_correct_phase = step < CORRECT_STEPS
        rows: list[tuple[list[int], list[int]]] = []
        for a, b in itertools.product(TERMS, TERMS):
            is_correct = is_correct_phase or numbers.random() < CORRECT_SHARE
            answer = a + b if is_correct else numbers.randint(2, 12)
            asked = {"role": "user", "content": question(a, b) + QUESTION_SUFFIX}
            prompt = renderer.build_generation_prompt([*prefix, asked]).to_ints()
            said = tokenizer.encode(f" \\boxed{{{answer}}}\n\nUser:", add_special_tokens=False)
            rows.append((prompt, said))
        longest = max(len(prompt) + len(said) for prompt, said in rows)
        ids = torch.full((len(rows), longest), PAD)
        labels = torch.full_like(ids, -100)
        for row, (prompt, said) in enumerate(rows):
            length = len(prompt) + len(said)
            ids[row, :length] = torch.tensor(prompt + said)
            labels[row, len(prompt) : length] = torch.tensor(said)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = (
                WARM_UP_RATE * min(1.0, (step + 1) / 30) if is_correct_phase else MIXED_RATE
            )
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- the recipes


def run_rl_loop(url: str, log: Path, *, steps: int, loss_fn: str) -> list[float]:
    """Run rl_loop; return the mean reward of each step."""
    config = rl_loop.Config(
        base_url=url,
        log_path=str(log),
        model_name=NAME,
        loss_fn=loss_fn,
        batch_size=16,
        group_size=8,
        learning_rate=LEARNING_RATE,
        lora_rank=16,
        max_tokens=12,
        max_steps=steps,
    )
    rl_loop.main(config)
    return metric(log, "reward/total")


def run_sl_loop(url: str, log: Path, *, steps: int) -> list[float]:
    """Run sl_loop; return the mean negative log-likelihood of each step's answers."""
    config = sl_loop.Config(
        base_url=url,
        log_path=str(log),
        model_name=NAME,
        batch_size=64,
        learning_rate=LEARNING_RATE,
        lora_rank=16,
        max_steps=steps,
    )
    sl_loop.main(config)
    return metric(log, "train_mean_nll")


def metric(log: Path, name: str) -> list[float]:
    """Return a metric of each step from the cookbook's log."""
    rows = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[None]:
    """Make the model, and replace what the recipes download until the end of the `with`."""
    make_model(model)
    os.environ.setdefault("TINKER_API_KEY", "tml-anybody")
    register_tokenizer(NAME, lambda: AutoTokenizer.from_pretrained(model))
    with mock.patch.object(datasets, "load_dataset", load_dataset):
        yield


def main() -> None:
    """Make the model, serve it, and run both recipes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--loss", default="stable_reinforce", help="rl_loop's loss_fn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        with (
            prepared(model),
            tidegate.tinker_server(
                model=model, engines=2, served_model_name=NAME, stable_reinforce=INSTEAD
            ) as server,
        ):
            rewards = run_rl_loop(
                server.url, folder / "rl", steps=options.steps, loss_fn=options.loss
            )
            losses = run_sl_loop(server.url, folder / "sl", steps=options.steps)
        print("rl_loop, mean rewards:", *(f"{each:.2f}" for each in rewards))
        print("sl_loop, mean NLL:", *(f"{each:.2f}" for each in losses))


if __name__ == "__main__":
    main()
