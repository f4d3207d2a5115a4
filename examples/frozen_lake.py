"""How does a model play a game of many turns? A lake of gymnasium, drawn as text, another per task.

    python -m examples.frozen_lake --model PATH      # any model directory; 64 lakes, then the score

The lakes are in processes of their own: two hold all of them, and one that crashes costs its
episode only. To train on it, give :func:`episode` to ``rollouts.batches`` as async_grpo.py does.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

import tidegate
from tidegate.environments.environment_episode import EnvironmentEpisode
from tidegate.integrations.environments.gymnasium_text import GymnasiumText

MOVES = ("l", "d", "r", "u")
"""In gymnasium's order."""
MOVES_MAX = 16
"""The longest way without a detour on a lake of 4 by 4 takes 12 moves, or so; few need over 8."""
MOVES_BEFORE_REST = 4
"""A walk then waits for newer weights while others are begun, as long as the trainer needs none."""
RULES = "Walk from P to G on the ice (.) and not into holes (H). One letter a move: l d r u"


class Lake:
    """One lake, made from the seed; it can be crossed."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._game: GymnasiumText | None = None

    def reset(self, *, seed: int, task: Any) -> tidegate.Observation:
        """Make it, and show it."""
        self._game = GymnasiumText(
            "FrozenLake-v1",
            settings={
                "desc": generate_random_map(self._size, seed=seed),
                "is_slippery": False,
                "max_episode_steps": MOVES_MAX,
            },
            prompt=RULES,
            actions=list(MOVES),
            describe="examples.frozen_lake:drawn",
        )
        return self._game.reset(seed=seed, task=task)

    def step(self, action: str) -> tidegate.Observation:
        """Walk, and show it again; 1.0 for reaching the goal."""
        assert self._game is not None
        return self._game.step(action)

    def close(self) -> None:
        """Close it."""
        if self._game is not None:
            self._game.close()


def drawn(observation: Any, env: Any) -> str:
    """The lake, with P where the player is."""
    rows = ["".join(field.decode() for field in row) for row in env.unwrapped.desc]
    return picture(rows, int(observation))


def picture(rows: Sequence[str], place: int) -> str:
    """The same; places are counted row by row."""
    fields = [list(row) for row in rows]
    row, column = divmod(place, len(fields[0]))
    fields[row][column] = "P"
    text = "\n".join("".join(line) for line in fields)
    return f"\n{text.replace('F', '.').replace('S', '.')}\n> "


def episode(pool: tidegate.EnvironmentPool) -> EnvironmentEpisode:
    """An episode function: up to 16 moves, a token or two each."""
    return tidegate.environment_episode(
        pool.environment("examples.frozen_lake:Lake"),
        max_turns=MOVES_MAX,
        max_tokens=2,
        parks_after_turns=MOVES_BEFORE_REST,
    )


async def play(model: Path, lakes: int) -> None:
    """Let the model walk over so many lakes."""
    async with (
        tidegate.EnvironmentPool(processes=2) as pool,
        tidegate.serve(model=model, engines=1) as rollouts,
    ):
        walk = episode(pool)
        evaluation = await rollouts.evaluate(range(lakes), episode=walk)
    print(f"{evaluation.mean_reward:.3f} of {lakes} lakes crossed, {walk.counts.turns} moves")


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status is 2 for what the user can mend."""
    parser = argparse.ArgumentParser(description="Have a model walk over frozen lakes.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--lakes", type=int, default=64)
    options = parser.parse_args(arguments)
    try:
        asyncio.run(play(options.model, options.lakes))
    except tidegate.TidegateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
