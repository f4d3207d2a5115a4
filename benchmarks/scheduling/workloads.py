"""Workloads of the scheduling benchmark, from the published model: lengths, costs and bounds.

Symbols: B groups per batch, G rollouts per group, L tokens of
a rollout, C slots of an engine; N_r and N_t machines that roll out and that train. A step is the
time between two versions.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tidegate.simulation.engine.spec import EngineCosts

ROLLOUT_MACHINES = 12
TRAINER_MACHINES = 4
MACHINES = ROLLOUT_MACHINES + TRAINER_MACHINES
"""Number of machines; for colocated policies all of them roll out and train."""

RHO = 0.9
"""Ratio of the published model; that of a workload is :attr:`Workload.rho`."""

SWITCH_S = 4.0
"""Seconds to switch between rollout and training on the same machines, both ways together."""

GROUP_CORRELATION = 0.5
"""Correlation of the logarithms of two lengths in a group: some prompts are hard for every
rollout."""

PROMPT_TOKENS = 512
"""Prompt length, as in :class:`EngineCosts`."""

TOOL_SIGMA = 1.0
"""Standard deviation of the logarithm of a tool call's seconds."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt, with the length of each of its rollouts."""

    index: int
    lengths: tuple[int, ...]
    """Tokens of each rollout, over all its turns."""
    tool_s: tuple[tuple[float, ...], ...]
    """Tool seconds after each turn, per rollout."""

    def turns(self, rollout: int) -> list[int]:
        """Return the tokens of each turn, as equal as possible."""
        count = min(len(self.tool_s[rollout]), self.lengths[rollout])
        whole, rest = divmod(self.lengths[rollout], count)
        return [whole + (turn < rest) for turn in range(count)]


@dataclass(frozen=True)
class Workload:
    """Capped log-normal lengths; agents have ``turns`` turns with a tool call between them."""

    name: str
    median_tokens: float
    sigma: float
    cap_tokens: int
    mean_tokens: float
    """Mean of the capped distribution."""
    groups_per_batch: int = 64
    turns: int = 1
    tool_median_s: float = 0.0
    versions: int = 24
    """Length of a run: enough that figures vary by a few percent."""
    warm_up_versions: int = 7
    """Versions of the warm-up, until the pipeline is full; they do not count."""
    costs: EngineCosts = field(default_factory=EngineCosts)
    rho: float = RHO
    """Ratio of the trainer's seconds per step to the engines', both at their peak."""

    @property
    def group_size(self) -> int:
        """Number of rollouts per group, G."""
        return self.costs.group_size

    @property
    def batch_tokens(self) -> float:
        """Mean number of tokens per batch."""
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
        return self.rho * self.rollout_machine_s * TRAINER_MACHINES / ROLLOUT_MACHINES

    @property
    def bound_tokens_per_s(self) -> float:
        """Upper bound of any policy's tokens per second: no machine is ever idle."""
        bound_s = (self.rollout_machine_s + self.training_machine_s) / MACHINES
        return self.batch_tokens / bound_s

    def of_versions(self, versions: int) -> "Workload":
        """Return the workload for a shorter or longer run, with a proportional warm-up."""
        warm_up = self.warm_up_versions * versions // self.versions
        return replace(self, versions=versions, warm_up_versions=warm_up)

    def tasks(self, seed: int) -> Iterator[Task]:
        """Yield prompts endlessly, deterministically for a seed."""
        index = 0
        while True:
            yield self.task(seed, index)
            index += 1

    def task(self, seed: int, index: int) -> Task:
        """Generate one prompt."""
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
        """Yield the tool seconds of each turn; the last turn calls no tool."""
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
"""Workloads of the published model (its section 6.6)."""
