"""Coding task: the model writes a Python program, which hidden tests run in a sandbox.

    python -m examples.coding --model PATH      # any model directory; 16 tasks, then the score

It needs bubblewrap (``apt-get install bubblewrap``). ``agent_demo --task code`` trains on it. A
task such as ``+3*2-7: `` asks for a program that reads a number and does these steps in this order:
``print((int(input())+3)*2-7)``.
"""

import argparse
import asyncio
import hashlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tidegate
from examples.calculator import Split
from tidegate.environments.environment_episode import EnvironmentEpisode

PROGRAM_TOKENS_MAX = 24
"""Token limit of a program. Right ones take 13; the rest is slack."""
TESTS = 2
LIMITS = tidegate.SandboxLimits(cpu_s=2.0, wall_s=20.0, memory_bytes=128 << 20, processes=8)


class Coding:
    """Environment of one program: its tests stay outside of the sandbox."""

    def __init__(self, sandboxes: tidegate.Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._steps = ""
        self._inputs: list[int] = []

    def reset(self, *, seed: int, task: Any) -> tidegate.Observation:
        """Return the task; draw the inputs of its hidden tests."""
        self._steps = task
        self._inputs = random.Random(seed).sample(range(1, 100), TESTS)
        return tidegate.Observation(f"{task}: ")

    async def step(self, action: str) -> tidegate.Observation:
        """Run the program on every input; the reward is 1.0 if all its answers are right."""
        reward = 1.0
        async with self._sandboxes.take() as sandbox:
            for number in self._inputs:
                result = await sandbox.run(
                    ["python3", "-I", "-S", "program.py"],
                    files={"program.py": action},
                    stdin=f"{number}\n",
                )
                if not result.succeeded or result.stdout.strip() != str(
                    solved(self._steps, number)
                ):
                    reward = 0.0
                    break
        return tidegate.Observation("", reward=reward, done=True)

    def close(self) -> None:
        """Do nothing: a sandbox is taken and closed in each step."""


def steps(task: str) -> tuple[str, str, str]:
    """Return the three steps of a task, each an operator and a digit."""
    return task[0:2], task[2:4], task[4:6]


def solved(task: str, number: int) -> int:
    """Return the right answer for an input."""
    for step in steps(task):
        operator, operand = step[0], int(step[1])
        match operator:
            case "+":
                number += operand
            case "-":
                number -= operand
            case "*":
                number *= operand
    return number


def right_program(task: str) -> str:
    """Return a program that passes."""
    first, second, third = steps(task)
    return f"print((int(input()){first}){second}{third})"


def wrong_program(task: str) -> str:
    """Return the program that forgets the parentheses, and passes no tests."""
    return f"print(int(input()){task})"


def tasks(split: Split, seed: int) -> Iterator[str]:
    """Yield tasks of one split, endlessly; each of the 2,048 tasks belongs to one split only."""
    numbers = random.Random(seed)
    while True:
        first, second, third = (numbers.randint(2, 9) for _ in range(3))
        task = f"{numbers.choice('+-')}{first}*{second}{numbers.choice('+-')}{third}"
        digest = hashlib.md5(task.encode(), usedforsecurity=False).digest()
        if (digest[0] % 5 == 0) == (split == "held_out"):
            yield task


def episode(sandboxes: tidegate.Sandboxes) -> EnvironmentEpisode:
    """Return the episode function: one turn, the program."""
    return tidegate.environment_episode(
        lambda: Coding(sandboxes), max_turns=1, max_tokens=PROGRAM_TOKENS_MAX
    )


async def play(model: Path, count: int) -> None:
    """Evaluate the model on this many tasks."""
    with tidegate.Sandboxes(tidegate.Bubblewrap(), limits=LIMITS) as sandboxes:
        async with tidegate.serve(model=model, engines=1) as rollouts:
            held_out = list(itertools.islice(tasks("held_out", 0), count))
            evaluation = await rollouts.evaluate(held_out, episode=episode(sandboxes))
    print(f"{evaluation.mean_reward:.3f} of {count} programs passed")


def main(arguments: list[str] | None = None) -> int:
    """Run the evaluation; exit status 2 for a user error."""
    parser = argparse.ArgumentParser(description="Have a model write programs.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--tasks", type=int, default=16)
    options = parser.parse_args(arguments)
    try:
        asyncio.run(play(options.model, options.tasks))
    except tidegate.TidegateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
