"""Script of one simulated episode: its turns, the tokens it appends, and how it ends.

Drawn by :mod:`scenario`, played by :mod:`episodes`, checked by :mod:`invariants`. Scripts are plain
data, drawn with random numbers that the scenario's seed determines. Standard library only.
"""

import random
from dataclasses import dataclass, field
from typing import Any

LONG_TOOL_MAX_S = 2.0
"""Longest tool call, in seconds: longer than most runs take to publish several versions, and far
below an episode's timeout."""


@dataclass(slots=True)
class ScriptedTurn:
    """One turn of a script, with the steps that follow the turn."""

    given: list[int]
    """Tokens that the episode appends before the turn."""
    max_tokens: int
    timeout_s: float | None
    """Time that the episode waits for the turn, in seconds, before it continues with the tokens
    sampled so far; None: no limit."""
    tool_s: float
    """Duration of the tool call after the turn, in seconds."""
    is_scored: bool = False
    """Whether the episode requests log-probs of its context after the turn."""
    parks: bool = False
    """Whether the episode waits for newer weights after the turn."""


@dataclass(slots=True)
class Script:
    """Turns, reward and end of one episode."""

    turns: list[ScriptedTurn]
    reward: float
    fate: str
    """``returns``, ``raises once`` (and returns when it begins again), or the kind of failure:
    ``raises``, ``asks too much``, ``hangs`` or ``ends engines``."""
    forks_before: int | None = None
    """Index of the turn before which the episode forks; None: the episode doesn't fork."""
    branch: list[ScriptedTurn] = field(default_factory=list)
    """Turns of the forked branch."""

    @property
    def failure(self) -> str | None:
        """Reason for which the episode's rollout is discarded; None if the episode returns."""
        match self.fate:
            case "returns" | "raises once":
                return None
            case "hangs":
                return "episode_timeout"
            case "raises":
                return "episode_error"
        return "turn_refused"


@dataclass(frozen=True, slots=True)
class Work:
    """Limits of episodes, and the shares of episodes, turns or tool calls with each behavior."""

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
        """Whether episodes neither fork, score, park nor call long tools."""
        habits = self.forking_episodes + self.scored_turns + self.long_tools + self.parking_turns
        return not habits


def draw_script(work: Work, chance: random.Random) -> Script:
    """Draw one episode's turns, reward and end."""
    turns = [_turn(work, chance) for _ in range(chance.choice((1, 1, 2, 3)))]
    fate = "returns"
    if chance.random() < work.failing_episodes:
        fate = chance.choice(("raises", "raises", "raises", "asks too much", "hangs"))
    return Script(turns[: work.turns_max], chance.choice((0.0, 0.5, 1.0)), fate)


def _turn(work: Work, chance: random.Random) -> ScriptedTurn:
    given = [chance.randrange(2, 1000) for _ in range(chance.randint(1, 12))]
    tokens, tool_s = chance.choice((4, 16, 40)), chance.choice((0.0, 0.0, 0.01, 0.1))
    timeout_s = chance.choice((0.0, 0.02, 0.1, 0.5))
    is_patient = chance.random() >= work.giving_up_turns
    return ScriptedTurn(
        given=given,
        max_tokens=min(tokens, work.output_tokens_max),
        timeout_s=None if is_patient else timeout_s,
        tool_s=tool_s,
    )


def draw_habits(chance: random.Random) -> dict[str, Any]:
    """Draw a scenario's settings for forks, scoring, long tools and parking.

    Half of the scenarios have none of these.
    """
    if chance.random() < 0.5:
        return {}
    return {
        "forking_episodes": chance.choice((0.0, 0.5)),
        "scored_turns": chance.choice((0.0, 0.3)),
        "long_tools": chance.choice((0.0, 0.2)),
        "parking_turns": chance.choice((0.0, 0.0, 0.3)),
        "episode_park_after_s": chance.choice((None, None, 0.05, 0.5)),
    }


def add_habits(script: Script, work: Work, chance: random.Random) -> None:
    """Add forks, scoring, parking and long tools to a script, by the shares in ``work``."""
    if chance.random() < work.forking_episodes:
        script.forks_before = chance.randrange(len(script.turns))
        script.branch = [_turn(work, chance) for _ in range(chance.choice((1, 1, 2)))]
        del script.branch[
            work.turns_max - script.forks_before :
        ]  # a branch makes no context longer
    for turn in (*script.turns, *script.branch):
        turn.is_scored = chance.random() < work.scored_turns
        turn.parks = chance.random() < work.parking_turns
        if chance.random() < work.long_tools:
            turn.tool_s = min(LONG_TOOL_MAX_S, 0.02 * chance.paretovariate(1.0))
