"""Warm-up demonstrations for the FrozenLake player: good and partly random walks over lakes.

``agent_demo`` makes :class:`LakeDemonstrations` for ``tiny_model``, which trains on them.

Shapes: B walks in a batch, T tokens in the longest of them.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from examples.agent_model import agent_tokenizer
from examples.calculator import Split
from examples.frozen_lake import MOVES, MOVES_MAX, RULES, picture
from examples.imitation import Demonstration, Performance, Phase, Plan
from examples.tiny_model import Recipe
from tidegate.environments.environment_episode import group_seed

SIZE = 4
LAKES_MAX = 1000
"""Number of distinct lakes; they repeat with different walks."""
RANDOM_MOVE_SHARE = 0.2
"""Share of random moves in the first phase, which reach more places. These moves are not
imitated."""
CHECK_LAKES = 64

PLAN = Plan(
    skill_phase=Phase(skill_share=1.0, learning_rate=2e-3, check_steps=10),
    skill_wanted=0.75,
    mixed_phase=Phase(skill_share=0.5, learning_rate=4e-4, check_steps=2),
    accuracy_wanted=(0.50, 0.64),
    batch_demonstrations=32,
)
"""Skill is the probability of a move that leads nearer to the goal. In the second phase half the
moves are such by choice, and about a third of the others, which are random."""


def lakes(split: Split, seed: int) -> Iterator[int]:
    """Yield tasks of one split, endlessly; each lake belongs to one split only."""
    numbers = random.Random(seed)
    while True:
        task = numbers.randrange(2**31)
        digest = hashlib.md5("".join(lake_of(task)).encode(), usedforsecurity=False).digest()
        if (digest[0] % 5 == 0) == (split == "held_out"):
            yield task


def lake_of(task: int) -> list[str]:
    """Return the rows of the lake of this task's episodes."""
    rows: list[str] = generate_random_map(SIZE, seed=group_seed(task, 0))
    return rows


def moved(place: int, move: str) -> int:
    """Return where a move leads; a move over the edge stays in place."""
    row, column = divmod(place, SIZE)
    match move:
        case "l":
            column = max(column - 1, 0)
        case "d":
            row = min(row + 1, SIZE - 1)
        case "r":
            column = min(column + 1, SIZE - 1)
        case "u":
            row = max(row - 1, 0)
    return row * SIZE + column


@dataclass(frozen=True, slots=True)
class Lake:
    """A lake with the best moves from each place."""

    rows: list[str]
    good: dict[int, str]
    """Moves from each place that lead nearer to the goal; none in holes and at the goal."""

    def is_end(self, place: int) -> bool:
        """Return whether a walk ends at this place."""
        return "".join(self.rows)[place] in "HG"


def surveyed(rows: list[str]) -> Lake:
    """Find the moves that lead nearer to the goal, by breadth-first search from it."""
    fields = "".join(rows)
    distances = {fields.index("G"): 0}
    for distance in range(SIZE * SIZE):
        for place in range(SIZE * SIZE):
            if place in distances or fields[place] == "H":
                continue
            if any(distances.get(moved(place, move)) == distance for move in MOVES):
                distances[place] = distance + 1
    good = {
        place: "".join(m for m in MOVES if distances.get(moved(place, m)) == distance - 1)
        for place, distance in distances.items()
    }
    return Lake(rows, good)


@dataclass(frozen=True, slots=True)
class Walk:
    """A demonstration, with the good moves at each of its steps."""

    demonstration: Demonstration
    good: list[str]


@dataclass(slots=True)
class LakeDemonstrations:
    """Demonstrations of walks over lakes."""

    tokenizer: Tokenizer
    seed: int
    plan: Plan = PLAN
    _lakes: list[Lake] = field(init=False)
    _held_out: list[Walk] = field(init=False)
    _numbers: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = random.Random(self.seed)
        shown = itertools.islice(lakes("train", self.seed), LAKES_MAX)
        self._lakes = [surveyed(lake_of(task)) for task in shown]
        unseen = itertools.islice(lakes("held_out", self.seed), CHECK_LAKES)
        self._held_out = [self.walk(surveyed(lake_of(task)), 1.0) for task in unseen]

    def batch(self, skill_share: float) -> list[Demonstration]:
        """Return walks over randomly chosen lakes. [B]"""
        chosen = self._numbers.choices(self._lakes, k=self.plan.batch_demonstrations)
        random_share = (
            RANDOM_MOVE_SHARE if skill_share == self.plan.skill_phase.skill_share else 0.0
        )
        return [self.walk(lake, skill_share, random_share).demonstration for lake in chosen]

    def performance(self, model: Qwen3ForCausalLM) -> Performance:
        """Measure the probability that a move is good, on held-out lakes."""
        chance = self._chance_of_good(model, self._held_out)
        return Performance(skill=chance, accuracy=chance)

    def walk(self, lake: Lake, skill_share: float, random_share: float = 0.0) -> Walk:
        """Generate a walk from start to end, with a share of good moves and the rest random.

        ``random_share`` is the share of additional random moves that are not to be imitated.
        """
        shown = Demonstration()
        shown.add(self.tokenizer, f"{RULES}{picture(lake.rows, 0)}", is_action=False)
        place = 0
        good: list[str] = []
        while not lake.is_end(place) and len(good) < MOVES_MAX:
            is_random = self._numbers.random() < random_share
            is_meant = not is_random and self._numbers.random() < skill_share
            good.append(lake.good[place])
            move = self._numbers.choice(lake.good[place] if is_meant else MOVES)
            shown.add(self.tokenizer, f"{move}<eos>", is_action=not is_random)
            place = moved(place, move)
            if not lake.is_end(place):
                shown.add(self.tokenizer, picture(lake.rows, place), is_action=False)
        return Walk(shown, good)

    @torch.no_grad()
    def _chance_of_good(self, model: Qwen3ForCausalLM, walks: list[Walk]) -> float:
        """Return the mean over all moves of these walks."""
        rows = [torch.tensor(walk.demonstration.token_ids) for walk in walks]
        token_ids = pad_sequence(rows, batch_first=True, padding_value=0)  # [B, T]
        chances = model(input_ids=token_ids).logits.softmax(-1)  # [B, T, vocabulary]
        prompt_token_id = self._encode(">")[0]
        found = []
        for row, walk in enumerate(walks):
            # The prompt ends with "> "; the move follows the space.
            places = (token_ids[row] == prompt_token_id).nonzero().squeeze(1) + 1
            for place, good in zip(places.tolist(), walk.good, strict=True):
                found.append(chances[row, place, self._encode(good)].sum())
        return float(torch.stack(found).mean())

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


LAKE_PLAYER = Recipe(
    tokenizer=agent_tokenizer,
    source=LakeDemonstrations,
    sources=("lake_demonstrations.py", "agent_model.py", "frozen_lake.py"),
    context_tokens=1024,
)
"""Recipe of the FrozenLake player's model."""
