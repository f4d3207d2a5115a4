"""Script of one simulated episode: its turns, the tokens it appends, and how it ends.

Plain data, drawn by the random numbers that a scenario names.
"""

import random
from dataclasses import dataclass, field
from typing import Any

LONG_TOOL_MAX_S = 2.0
"""Longer than most runs take to publish several versions, and far from an episode's timeout."""


@dataclass(slots=True)
class ScriptedTurn:
    """One turn of a script."""

    given: list[int]
    """Tokens appended before it."""
    max_tokens: int
    patience_s: float | None
    """The episode waits so long for it, and then goes on with what there is; None waits on."""
    tool_s: float
    """Time spent after it."""
    is_scored: bool = False
    """Whether the episode asks then how likely its context is."""
    parks: bool = False
    """Whether it waits for newer weights after that."""


@dataclass(slots=True)
class Script:
    """Turns and fate of one episode."""

    turns: list[ScriptedTurn]
    reward: float
    fate: str
    """``returns``, or how it fails: ``raises``, ``asks too much``, ``hangs``, ``ends engines``."""
    forks_before: int | None = None
    """Which of its turns; None: it doesn't fork."""
    branch: list[ScriptedTurn] = field(default_factory=list)
    """What it does beside, then."""

    @property
    def failure(self) -> str | None:
        """None, or the reason for which its rollout will be discarded."""
        if self.fate == "returns":
            return None
        return "episode_timeout" if self.fate == "hangs" else "episode_error"


@dataclass(frozen=True, slots=True)
class Work:
    """What episodes may do, and the share of them, or of turns, that do it."""

    turns_max: int
    output_tokens_max: int
    failing_episodes: float
    giving_up_turns: float
    forking_episodes: float
    scored_turns: float
    long_tools: float
    parking_turns: float
    deadly_turns: float

    @property
    def is_plain(self) -> bool:
        """Whether they take their turns and do nothing else."""
        habits = self.forking_episodes + self.scored_turns + self.long_tools + self.parking_turns
        return not habits


def draw_script(work: Work, chance: random.Random) -> Script:
    """One episode's turns and its end."""
    turns = [_turn(work, chance) for _ in range(chance.choice((1, 1, 2, 3)))]
    fate = "returns"
    if chance.random() < work.failing_episodes:
        fate = chance.choice(("raises", "raises", "raises", "asks too much", "hangs"))
    return Script(turns[: work.turns_max], chance.choice((0.0, 0.5, 1.0)), fate)


def _turn(work: Work, chance: random.Random) -> ScriptedTurn:
    given = [chance.randrange(2, 1000) for _ in range(chance.randint(1, 12))]
    tokens, tool_s = chance.choice((4, 16, 40)), chance.choice((0.0, 0.0, 0.01, 0.1))
    patience_s = chance.choice((0.0, 0.02, 0.1, 0.5))
    is_patient = chance.random() >= work.giving_up_turns
    return ScriptedTurn(
        given=given,
        max_tokens=min(tokens, work.output_tokens_max),
        patience_s=None if is_patient else patience_s,
        tool_s=tool_s,
    )


def draw_habits(chance: random.Random) -> dict[str, Any]:
    """What a scenario's episodes do besides taking turns; in half of them, nothing."""
    if chance.random() < 0.5:
        return {}
    return {
        "forking_episodes": chance.choice((0.0, 0.5)),
        "scored_turns": chance.choice((0.0, 0.3)),
        "long_tools": chance.choice((0.0, 0.2)),
        "parking_turns": chance.choice((0.0, 0.0, 0.3)),
        "episode_budget_s": chance.choice((None, None, 0.05, 0.5)),
    }


def add_habits(script: Script, work: Work, chance: random.Random) -> None:
    """Have an episode do some of them."""
    if chance.random() < work.forking_episodes:
        script.forks_before = chance.randrange(len(script.turns))
        script.branch = [_turn(work, chance) for _ in range(chance.choice((1, 1, 2)))]
        del script.branch[work.turns_max - script.forks_before :]  # no context is longer for it
    for turn in (*script.turns, *script.branch):
        turn.is_scored = chance.random() < work.scored_turns
        turn.parks = chance.random() < work.parking_turns
        if chance.random() < work.long_tools:
            turn.tool_s = min(LONG_TOOL_MAX_S, 0.02 * chance.paretovariate(1.0))
