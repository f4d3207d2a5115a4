"""User-defined Gymnasium environments; imported in the pool's processes only."""

from typing import Any

import gymnasium
import numpy
from gymnasium import spaces


def field(observation: Any, env: Any) -> str:
    """Return the row and column of a FrozenLake observation."""
    row, column = divmod(int(observation), env.unwrapped.ncol)
    return f"row {row}, column {column}\n"


class Words(gymnasium.Env[Any, Any]):
    """Rewards saying the word given in the options."""

    observation_space = spaces.Dict(
        {"said": spaces.Text(8, min_length=0), "left": spaces.Box(0.0, 9.0, (2,))}
    )
    action_space = spaces.Text(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._word = options["word"]
        return self._seen(""), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._seen(action), float(action == self._word), False, False, {}

    def _seen(self, said: str) -> dict[str, Any]:
        return {"said": said, "left": (1.5, numpy.float64(2.0), (0, 1))}


class Pairs(gymnasium.Env[Any, Any]):
    """Rewards the sum of a pair of numbers."""

    observation_space = spaces.Discrete(1)
    action_space = spaces.Tuple((spaces.Discrete(9), spaces.Discrete(9)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def step(self, action: tuple[int, int]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return 0, float(sum(action)), True, False, {}


def pair(text: str) -> tuple[int, int]:
    """Parse an action of Pairs."""
    left, comma, right = text.partition(",")
    if not comma:
        raise ValueError("two numbers, with a comma between")
    return int(left), int(right)


for name in ("Words", "Pairs"):
    gymnasium.register(f"tests/{name}-v0", f"{__name__}:{name}", disable_env_checker=True)
