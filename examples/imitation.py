"""Supervised warm-up of a small model on demonstrations, by cross-entropy.

``tiny_model`` runs it in two phases: the first, until the model has a skill; the second, in which
it learns to use the skill rarely, so that RL has something to improve. A
:class:`DemonstrationSource` supplies demonstrations and measures the skill.

Shapes: B demonstrations in a batch, T tokens in the longest of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

LENGTH_BUCKETS = 4
RAMP_STEPS = 20
COOLED = 0.1
"""Share of the learning rate that is left at the end of a phase's cooling."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of warm-up."""

    skill_share: float
    """Share of demonstrations that use the skill; the others show behaviour without it."""
    learning_rate: float
    check_steps: int
    cooling_steps: tuple[int, int] | None = None
    """Steps of the phase between which the learning rate falls to a tenth and after which the phase
    ends; None: the rate is constant, and the phase ends by its measure alone."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of this phase, counted from 1."""
        if self.cooling_steps is None:
            return self.learning_rate
        begin, end = self.cooling_steps
        return self.learning_rate * min(1.0, max(COOLED, (end - step) / (end - begin)))

    def is_over(self, step: int) -> bool:
        """Return whether the phase ends after this step, whatever was learned."""
        return self.cooling_steps is not None and step >= self.cooling_steps[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """Schedule of a warm-up."""

    skill_phase: Phase
    """First phase, with a high share of skill, so that it is learned soon."""
    skill_wanted: float
    """Skill at which the first phase ends."""
    mixed_phase: Phase
    """Second phase. A preference shifts within ten steps, while a skill takes hundreds."""
    accuracy_wanted: tuple[float, float]
    """Range of accuracy in which the second phase ends."""
    batch_demonstrations: int = 64


@dataclass(frozen=True, slots=True)
class Performance:
    """Measured performance of a model at temperature 1, in the ways that were demonstrated."""

    skill: float
    """Probability of success once the model has chosen to use the skill."""
    accuracy: float
    """Probability of success overall."""


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a warm-up at a check."""

    steps: int
    loss: float
    """Loss of the last batch, in nats per token."""
    performance: Performance
    """Performance on held-out tasks."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole episode as token ids, with a flag for each token that the policy is to imitate."""

    token_ids: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)

    def add(self, tokenizer: Tokenizer, text: str, *, is_action: bool) -> None:
        """Append a text, which is tokenized by itself, as episodes do it."""
        ids = tokenizer.encode(text).ids
        self.token_ids.extend(ids)
        self.is_action.extend([is_action] * len(ids))


class DemonstrationSource(Protocol):
    """Source of demonstrations for a task, and of its performance measure."""

    @property
    def plan(self) -> Plan:
        """Schedule of the warm-up."""

    def batch(self, skill_share: float) -> list[Demonstration]:
        """Return the next demonstrations. [B]"""

    def performance(self, model: Qwen3ForCausalLM) -> Performance:
        """Measure a model on held-out tasks."""


def warm_up(
    source: DemonstrationSource, model: Qwen3ForCausalLM, steps_max: int
) -> Iterator[Progress]:
    """Imitate through both phases, or for ``steps_max`` steps; yield each check."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    plan = source.plan
    phase = plan.skill_phase
    begun = 0
    for steps in range(1, steps_max + 1):
        rate = phase.rate(steps - begun)
        optimizer.param_groups[0]["lr"] = rate * min(1.0, steps / RAMP_STEPS)
        loss = _imitate(model, optimizer, source.batch(phase.skill_share))
        if steps % phase.check_steps == 0 or steps == steps_max:
            performance = source.performance(model)
            yield Progress(steps, loss, performance)
            if phase is plan.skill_phase and (
                performance.skill >= plan.skill_wanted or phase.is_over(steps)
            ):
                phase, begun = plan.mixed_phase, steps
            elif phase is plan.mixed_phase and _is_within(
                performance.accuracy, plan.accuracy_wanted
            ):
                return


def _is_within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def _imitate(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: list[Demonstration]
) -> float:
    """Take one optimizer step on the batch's actions; return its loss in nats per token."""
    tokens = sum(sum(demonstration.is_action) for demonstration in batch)
    loss = -demonstration_logprobs(model, batch).sum() / tokens
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def demonstration_logprobs(model: Qwen3ForCausalLM, batch: list[Demonstration]) -> Tensor:
    """Return the log-probability of all actions of each demonstration, shortest first. [B]

    Rows of similar length share a forward pass: an answer without the tool is a third as long as a
    tool path, and padding would double the time.
    """
    by_length = sorted(batch, key=lambda demonstration: len(demonstration.token_ids))
    rows = -(-len(batch) // LENGTH_BUCKETS)
    buckets = [by_length[start : start + rows] for start in range(0, len(batch), rows)]
    return torch.cat([_padded_logprobs(model, bucket) for bucket in buckets])


def _padded_logprobs(model: Qwen3ForCausalLM, batch: list[Demonstration]) -> Tensor:
    """Compute one bucket, padded at the end, where no counted token attends to it. [B]"""
    rows = [torch.tensor(demonstration.token_ids) for demonstration in batch]
    masks = [torch.tensor(demonstration.is_action) for demonstration in batch]
    token_ids = pad_sequence(rows, batch_first=True, padding_value=0)  # [B, T]
    is_action = pad_sequence(masks, batch_first=True)  # [B, T]
    logits = model(input_ids=token_ids[:, :-1]).logits
    losses = cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none")
    return -(losses * is_action[:, 1:]).sum(1)
