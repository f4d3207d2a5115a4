"""Input and output of a plan: lengths, speeds and machines; the settings; the predicted figures."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from tidegate.errors import ConfigError
from tidegate.simulation.engine_costs import EngineCosts
from tidegate.transport.messages import KvPolicy, PauseMode

SAMPLED_GROUPS = 2048
"""Drawn where only a distribution is known: its longest is then that of thirty batches of 64."""

GROUP_CORRELATION = 0.5
"""Of the logarithms of two lengths in a group: some prompts are hard for every rollout. Measured
figures are about that; ``tidegate plan --from`` uses a run's own groups and assumes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWorkload:
    """What is given: lengths, speeds and machines, which no setting changes."""

    groups: tuple[tuple[int, ...], ...]
    """Tokens of each rollout, group by group: as in a run, or drawn."""
    costs: EngineCosts
    """Of one engine."""
    trainer_tokens_per_s: float
    """Of one trainer, all its work on a batch included: passes, optimizer, publishing."""
    turns: int = 1
    """Of a rollout."""

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups) or not self.mean_tokens:
            raise ConfigError("lengths are needed: at least one group with a token")
        if not self.trainer_tokens_per_s > 0:
            raise ConfigError(f"a trainer's speed must be > 0, got {self.trainer_tokens_per_s}")

    @property
    def group_size(self) -> float:
        """On the mean: in a run, rollouts may have failed."""
        return sum(map(len, self.groups)) / len(self.groups)

    @property
    def mean_tokens(self) -> float:
        """Of a rollout."""
        return sum(map(sum, self.groups)) / sum(map(len, self.groups))

    @property
    def mean_squared_tokens(self) -> float:
        """Of a rollout."""
        squares = sum(tokens * tokens for group in self.groups for tokens in group)
        return squares / sum(map(len, self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """Settings that a plan compares."""

    max_staleness: int
    groups_per_batch: int
    engines: int
    trainers: int = 1
    pause_mode: PauseMode = "keep"
    kv_policy: KvPolicy = "keep"

    def __post_init__(self) -> None:
        for name in ("groups_per_batch", "engines", "trainers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be >= 0, got {self.max_staleness}")
        if self.pause_mode not in get_args(PauseMode):
            raise ConfigError(f"a pause is abort, keep or wait, got {self.pause_mode!r}")

    @property
    def name(self) -> str:
        """In a table."""
        kv = f"+{self.kv_policy}" if self.pause_mode == "keep" else ""
        return f"{self.pause_mode}{kv}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted figures of a run in its steady state."""

    batch_s: float
    """From one batch to the next."""
    tokens_per_s: float
    """Trained."""
    mean_staleness: float
    """In versions, of a rollout's oldest token."""
    trainer_idle_share: float
    limit: str = ""
    """What a batch waits for: ``trainer``, ``engines`` or ``admission``; empty: not told apart."""


def log_normal_groups(
    *, mean_tokens: float, sigma: float, tokens_max: int, group_size: int, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Groups of log-normal lengths, cut at ``tokens_max``, of this mean after the cut.

    Raises:
        ConfigError: no such lengths can have that mean.
    """
    if not 1 <= mean_tokens < tokens_max or sigma < 0 or group_size < 1:
        raise ConfigError(
            f"lengths need 1 <= mean < most, sigma >= 0 and a group of at least 1, got mean "
            f"{mean_tokens}, most {tokens_max}, sigma {sigma}, group {group_size}"
        )
    chance = random.Random(seed)
    of_group, own = math.sqrt(GROUP_CORRELATION), math.sqrt(1 - GROUP_CORRELATION)
    exponents = []
    for _ in range(SAMPLED_GROUPS):
        shared = of_group * chance.gauss(0, 1)
        exponents.append([sigma * (shared + own * chance.gauss(0, 1)) for _ in range(group_size)])
    factors = [[math.exp(each) for each in group] for group in exponents]
    median = _median_for(factors, mean_tokens, tokens_max)
    return tuple(
        tuple(max(1, min(tokens_max, round(median * factor))) for factor in group)
        for group in factors
    )


def _median_for(factors: Sequence[Sequence[float]], mean: float, most: int) -> float:
    """By halving: the mean after the cut rises with the median."""
    low, high = 0.0, float(most)
    count = sum(map(len, factors))
    for _ in range(40):
        middle = (low + high) / 2
        cut = sum(min(most, middle * factor) for group in factors for factor in group) / count
        low, high = (middle, high) if cut < mean else (low, middle)
    return high
