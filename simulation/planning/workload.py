"""Input and output of a plan: workload, settings and predicted figures."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from tidegate.errors import ConfigError
from tidegate.simulation.engine.spec import EngineCosts
from tidegate.transport.messages import KvPolicy, PauseMode

SAMPLED_GROUPS = 2048
"""Groups drawn from a length distribution: as many as thirty batches of 64 have."""

GROUP_CORRELATION = 0.5
"""Correlation of the logarithms of two lengths in a group: some prompts need long answers always.

Measured values are about 0.5. ``tidegate plan --from`` uses a run's own groups instead.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWorkload:
    """Rollout lengths and machine speeds, which no setting changes."""

    groups: tuple[tuple[int, ...], ...]
    """Tokens of each rollout, by group: measured in a run, or drawn."""
    costs: EngineCosts
    """Cost model of one engine."""
    trainer_tokens_per_s: float
    """Tokens per second of one trainer, with passes, optimizer and publishing included."""
    turns: int = 1
    """Number of turns per rollout."""

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups) or not self.mean_tokens:
            raise ConfigError(
                "a workload needs at least one group, and a token in each group, got "
                f"{len(self.groups)} groups"
            )
        if not self.trainer_tokens_per_s > 0:
            raise ConfigError(f"a trainer's speed must be > 0, got {self.trainer_tokens_per_s}")

    @property
    def group_size(self) -> float:
        """Mean rollouts per group; not always whole, because rollouts of a run may have failed."""
        return sum(map(len, self.groups)) / len(self.groups)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens per rollout, E[L]."""
        return sum(map(sum, self.groups)) / sum(map(len, self.groups))

    @property
    def mean_squared_tokens(self) -> float:
        """Mean square of the tokens per rollout, E[L^2]."""
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
            raise ConfigError(f"pause_mode must be abort, keep or wait, got {self.pause_mode!r}")

    @property
    def name(self) -> str:
        """Pause mode and KV policy as a table shows them, such as ``keep+recompute``."""
        kv = f"+{self.kv_policy}" if self.pause_mode == "keep" else ""
        return f"{self.pause_mode}{kv}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted figures of a run in its steady state."""

    batch_s: float
    """Time from one batch to the next, in seconds."""
    tokens_per_s: float
    """Number of trained tokens per second."""
    mean_staleness: float
    """Mean staleness of the rollouts' oldest tokens, in versions."""
    trainer_idle_share: float
    """Share of time that the trainer waits for a batch."""
    limit: str = ""
    """As :data:`tidegate.policies.bottlenecks.Limit`; empty if it is not determined."""
    conclusion: str = ""
    """The limit, and what to change by how much."""


def log_normal_groups(
    *, mean_tokens: float, sigma: float, tokens_max: int, group_size: int, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Draw groups of log-normal lengths, cut at ``tokens_max``, with a given mean after the cut.

    Raises:
        ConfigError: no such lengths can have the mean ``mean_tokens``.
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
    """Find the median for a mean by bisection: the mean after the cut rises with the median."""
    low, high = 0.0, float(most)
    count = sum(map(len, factors))
    for _ in range(40):
        middle = (low + high) / 2
        cut = sum(min(most, middle * factor) for group in factors for factor in group) / count
        low, high = (middle, high) if cut < mean else (low, middle)
    return high
