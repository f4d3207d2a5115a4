"""Multi-turn game: gymnasium's FrozenLake drawn as text, a different lake per task.

    python -m examples.frozen_lake --model PATH      # any model directory; 64 lakes, then the score

The lakes run in two worker processes; a lake that crashes costs only its own episode. To train on
it, pass :func:`episode` to ``rollouts.batches`` as async_grpo.py does.
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
"""Moves in the order of gymnasium's action numbers."""
MOVES_MAX = 16
"""Move limit. The longest shortest path over a 4 by 4 lake takes about 12; few take more than 8."""
MOVES_BEFORE_PARKING = 4
"""Moves after which an episode is parked until newer weights are live, unless the trainer waits for
a batch."""
RULES = "Walk from P to G on the ice (.) and not into holes (H). One letter a move: l d r u"


class Lake:
    """Environment with one lake, generated from the seed so that it can be crossed."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._game: GymnasiumText | None = None

    def reset(self, *, seed: int, task: Any) -> tidegate.Observation:
        """Generate the lake and return its picture."""
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
        """Make one move and return the picture; the reward is 1.0 for reaching the goal."""
        assert self._game is not None
        return self._game.step(action)

    def close(self) -> None:
        """Close the environment."""
        if self._game is not None:
            self._game.close()


def drawn(observation: Any, env: Any) -> str:
    """Draw the lake, with P at the player's position."""
    rows = ["".join(field.decode() for field in row) for row in env.unwrapped.desc]
    return picture(rows, int(observation))


def picture(rows: Sequence[str], place: int) -> str:
    """Draw a lake's rows with P at ``place``, counted row by row."""
    fields = [list(row) for row in rows]
    row, column = divmod(place, len(fields[0]))
    fields[row][column] = "P"
    text = "\n".join("".join(line) for line in fields)
    return f"\n{text.replace('F', '.').replace('S', '.')}\n> "


def episode(pool: tidegate.EnvironmentPool) -> EnvironmentEpisode:
    """Return the episode function: up to 16 moves of one or two tokens each."""
    return tidegate.environment_episode(
        pool.environment("examples.frozen_lake:Lake"),
        max_turns=MOVES_MAX,
        max_tokens=2,
        parks_after_turns=MOVES_BEFORE_PARKING,
    )


async def play(model: Path, lakes: int) -> None:
    """Evaluate the model on this many lakes."""
    async with (
        tidegate.EnvironmentPool(processes=2) as pool,
        tidegate.serve(model=model, engines=1) as rollouts,
    ):
        walk = episode(pool)
        evaluation = await rollouts.evaluate(range(lakes), episode=walk)
    print(f"{evaluation.mean_reward:.3f} of {lakes} lakes crossed, {walk.counts.turns} moves")


def main(arguments: list[str] | None = None) -> int:
    """Run the evaluation; exit status 2 for a user error."""
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
