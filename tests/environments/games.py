"""A small game of several turns, as a user-defined environment."""

import os
import random
from typing import Any

from tidegate import Observation


class Hunt:
    """Guess a letter; each step says whether it comes before or after the tried one."""

    def reset(self, *, seed: int, task: Any) -> Observation:
        self._secret = random.Random(seed).choice("abcdefgh")
        return Observation(f"{task}: ")

    def step(self, action: str) -> Observation:
        if action == self._secret:
            return Observation("!", reward=1.0, done=True)
        return Observation("<" if self._secret < action else ">", reward=-0.125)

    def close(self) -> None:
        pass


class CrashesAt(Hunt):
    """Hunt that kills its process at one task."""

    def __init__(self, task: int) -> None:
        self._deadly = task

    def reset(self, *, seed: int, task: Any) -> Observation:
        if task == self._deadly:
            os._exit(9)
        return super().reset(seed=seed, task=task)
