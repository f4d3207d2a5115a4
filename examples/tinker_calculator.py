"""The Tinker cookbook's RL loop, unmodified, over `tidegate tinker`: the calculator task, learned.

    make test-tinker             # makes .venv-tinker, where the cookbook is
    .venv-tinker/bin/python -m examples.tinker_calculator              # sync, then async
    .venv-tinker/bin/python -m examples.tinker_calculator --async-only --steps 40

``tinker_cookbook.rl.train`` runs as it does against the Tinker service: only the server's address,
the task (:mod:`examples.calculator`, with its tool as an environment of several turns) and the base
model, the demos' tiny one, are set. It prints the mean reward of each training step, which begins
at about .3 and ends above .8.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import chz
import tinker
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tokenizers import Tokenizer

import tidegate
from examples.calculator import ACTION_TOKENS_MAX, ACTIONS_SPARE, Calculator, Task, grade, tasks
from examples.tiny_model import EOS, make_model

GROUPS_PER_BATCH, GROUP_SIZE = 16, 8
LEARNING_RATE = 3e-3
"""Large, because the model is tiny and its adapter begins at zero."""

STEPS_OFF_POLICY = 2

LOSS = "ppo"
"""Named twice below, because the asynchronous loop's default is ``stable_reinforce``, whose formula
is not published."""


class CalculatorEnv(Env):
    """One sum: each action is a call of the calculator, or the answer."""

    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._calculator = Calculator(task)
        self._actions_left = len(task.continuations) + 2 + ACTIONS_SPARE
        self._token_ids: list[int] = tokenizer.encode(task.question).ids

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        """Return the question, and the token that ends an action."""
        return tinker.ModelInput.from_ints(self._token_ids), [EOS]

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Answer a call, or grade an answer."""
        text = self._tokenizer.decode(action, skip_special_tokens=True)
        self._actions_left -= 1
        is_call = text.startswith("?") and self._actions_left > 0
        if is_call:
            shown = self._tokenizer.encode(self._calculator.answer(text)).ids
            self._token_ids = [*self._token_ids, *action, *shown]
        return StepResult(
            reward=0.0 if text.startswith("?") else grade(text, self._task),
            episode_done=not is_call,
            next_observation=tinker.ModelInput.from_ints(self._token_ids),
            next_stop_condition=[EOS],
        )


class CalculatorGroup(EnvGroupBuilder):
    """The attempts at one sum."""

    def __init__(self, task: Task, tokenizer_file: str) -> None:
        self._task = task
        self._tokenizer_file = tokenizer_file

    async def make_envs(self) -> Sequence[Env]:
        """Make an environment for each attempt."""
        tokenizer = Tokenizer.from_file(self._tokenizer_file)
        return [CalculatorEnv(self._task, tokenizer) for _ in range(GROUP_SIZE)]


class CalculatorDataset(RLDataset):
    """Batches of sums."""

    def __init__(self, tokenizer_file: str, batches: int) -> None:
        drawn = islice(tasks("train", seed=1), batches * GROUPS_PER_BATCH)
        self._groups = [CalculatorGroup(task, tokenizer_file) for task in drawn]

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return a batch's groups."""
        return self._groups[index * GROUPS_PER_BATCH : (index + 1) * GROUPS_PER_BATCH]

    def __len__(self) -> int:
        return len(self._groups) // GROUPS_PER_BATCH


@chz.chz
class CalculatorBuilder(RLDatasetBuilder):
    """Makes the dataset, as the cookbook wants it."""

    tokenizer_file: str
    batches: int

    async def __call__(self) -> tuple[RLDataset, None]:
        """Return the dataset, and no test set."""
        return CalculatorDataset(self.tokenizer_file, self.batches), None


def run_cookbook(url: str, model: Path, log: Path, *, steps: int, is_async: bool) -> list[float]:
    """Run the cookbook's loop against a server; return the mean reward of each step."""
    config = train.Config(
        base_url=url,
        model_name=str(model),
        recipe_name="calculator",
        dataset_builder=CalculatorBuilder(
            tokenizer_file=str(model / "tokenizer.json"), batches=steps
        ),
        learning_rate=LEARNING_RATE,
        lora_rank=16,
        max_tokens=ACTION_TOKENS_MAX,
        loss_fn=LOSS,
        log_path=str(log),
        eval_every=0,
        save_every=0,
        async_config=train.AsyncConfig(
            max_steps_off_policy=STEPS_OFF_POLICY,
            groups_per_batch=GROUPS_PER_BATCH,
            loss_fn=LOSS,
        )
        if is_async
        else None,
    )
    asyncio.run(train.main(config))
    lines = (log / "metrics.jsonl").read_text().splitlines()
    rewards = (json.loads(line).get("env/all/reward/total") for line in lines)
    return [reward for reward in rewards if reward is not None]


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """Serve the Tinker API; yield its URL."""
    with tidegate.tinker_server(model=model, engines=2) as server:
        yield server.url


def main() -> None:
    """Make the model, serve it, and train it with the cookbook."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--async-only", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-anybody")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        for is_async in (True,) if options.async_only else (False, True):
            log = Path(folder) / ("async" if is_async else "sync")
            with served(model) as url:
                rewards = run_cookbook(url, model, log, steps=options.steps, is_async=is_async)
            shown = " ".join(f"{reward:.2f}" for reward in rewards)
            print(f"{'asynchronous' if is_async else 'synchronous'} mean rewards: {shown}")


if __name__ == "__main__":
    main()
