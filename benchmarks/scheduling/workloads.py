"""What do rollouts and trainers of the published model cost? Lengths, seconds, and the bounds.

Symbols: B groups to a batch, G rollouts to a group, L tokens of a rollout, C slots of an engine;
N_r and N_t machines that roll out and that train. A step is what lies between two versions.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tidegate.simulation.engine_costs import EngineCosts

ROLLOUT_MACHINES = 12
TRAINER_MACHINES = 4
MACHINES = ROLLOUT_MACHINES + TRAINER_MACHINES
"""All of them roll out, and all train, where a policy does one after the other."""

RHO = 0.9
"""Seconds that a step takes the trainer over those it takes the engines, at their peak."""

SWITCH_S = 4.0
"""Between rolling out and training on the same machines, both ways together."""

GROUP_CORRELATION = 0.5
"""Of the logarithms of two lengths in a group: some prompts are hard for every rollout."""

PROMPT_TOKENS = 512
"""As :class:`EngineCosts` has them."""

TOOL_SIGMA = 1.0
"""Of the logarithm of a tool call's seconds."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt: how long each of its rollouts will be."""

    index: int
    lengths: tuple[int, ...]
    """In tokens, over all turns of a rollout."""
    tool_s: tuple[tuple[float, ...], ...]
    """Per rollout, after each of its turns."""

    def turns(self, rollout: int) -> list[int]:
        """Tokens of each turn; all as long, as far as they can be."""
        count = min(len(self.tool_s[rollout]), self.lengths[rollout])
        whole, rest = divmod(self.lengths[rollout], count)
        return [whole + (turn < rest) for turn in range(count)]


@dataclass(frozen=True)
class Workload:
    """Log-normal lengths, capped; ``turns`` calls of a tool, if it is an agent's."""

    name: str
    median_tokens: float
    sigma: float
    cap_tokens: int
    mean_tokens: float
    """Of the capped distribution."""
    groups_per_batch: int = 64
    turns: int = 1
    tool_median_s: float = 0.0
    versions: int = 24
    """A run's length: enough that a version's figures vary by a few percent."""
    warm_up_versions: int = 7
    """Before them the pipeline is not full, so they don't count."""
    costs: EngineCosts = field(default_factory=EngineCosts)

    @property
    def group_size(self) -> int:
        """G."""
        return self.costs.group_size

    @property
    def batch_tokens(self) -> float:
        """Of a batch, on average."""
        return self.groups_per_batch * self.group_size * self.mean_tokens

    @property
    def rollout_machine_s(self) -> float:
        """W_R: machine-seconds to generate a batch at peak throughput."""
        prefill_s = self.groups_per_batch * self.costs.prompt_tokens
        return (
            self.batch_tokens / self.costs.peak_tokens_per_s
            + prefill_s / self.costs.prefill_tokens_per_s
        )

    @property
    def training_machine_s(self) -> float:
        """W_T: machine-seconds to train on a batch."""
        return RHO * self.rollout_machine_s * TRAINER_MACHINES / ROLLOUT_MACHINES

    @property
    def bound_tokens_per_s(self) -> float:
        """No policy is faster: no machine is ever idle."""
        bound_s = (self.rollout_machine_s + self.training_machine_s) / MACHINES
        return self.batch_tokens / bound_s

    def of_versions(self, versions: int) -> "Workload":
        """The same for a shorter or longer run; as much of it is warm-up."""
        warm_up = self.warm_up_versions * versions // self.versions
        return replace(self, versions=versions, warm_up_versions=warm_up)

    def tasks(self, seed: int) -> Iterator[Task]:
        """Prompts without end; the same for the same seed."""
        index = 0
        while True:
            yield self.task(seed, index)
            index += 1

    def task(self, seed: int, index: int) -> Task:
        """One prompt."""
        chance = random.Random(f"{self.name}/{seed}/{index}")
        of_group = math.sqrt(GROUP_CORRELATION) * chance.gauss(0.0, 1.0)
        own = math.sqrt(1.0 - GROUP_CORRELATION)
        lengths = tuple(
            self._length(of_group + own * chance.gauss(0.0, 1.0)) for _ in range(self.group_size)
        )
        tool_s = tuple(tuple(self._tool_s(chance)) for _ in range(self.group_size))
        return Task(index, lengths, tool_s)

    def _length(self, z: float) -> int:
        return max(1, min(self.cap_tokens, round(self.median_tokens * math.exp(self.sigma * z))))

    def _tool_s(self, chance: random.Random) -> Iterator[float]:
        """The last turn calls no tool."""
        for turn in range(self.turns):
            is_last = turn == self.turns - 1
            yield 0.0 if is_last else self.tool_median_s * chance.lognormvariate(0.0, TOOL_SIGMA)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("math-8k", 1500, 0.6, 8192, 1790),
        Workload("reasoning-32k", 2500, 1.0, 32768, 4040),
        Workload("reasoning-64k", 4000, 1.2, 65536, 7781, versions=20),
        Workload(
            "large-batch",
            2500,
            1.0,
            32768,
            4040,
            groups_per_batch=256,
            versions=11,
            warm_up_versions=4,
        ),
        Workload(
            "agentic",
            6000,
            0.8,
            32768,
            8032,
            turns=20,
            tool_median_s=4.0,
            versions=14,
            warm_up_versions=6,
        ),
    )
}
"""As the published model has them (its section 6.6)."""
