"""How does a trainer learn from asynchronous rollouts? The loop, and one step of GRPO.

It knows no task: whoever calls it says which tasks are trained on, which measure, and how they are
played.

Shapes: R rows in a batch, P of them in one pass, T tokens in the longest of these, N sampled ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import tidegate
from examples.memory_marks import MemoryMarks
from tidegate.observability.progress import RunProgress
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.policies.diagnostics import LagBucket, measure_mismatch, measure_mismatch_by_lag
from tidegate.policies.objectives import decoupled_ppo_loss

TOKENS_TOGETHER = 4096
"""In one pass, padding included: enough that a small model's passes cost no more than their
multiplications, and few enough that rows of one pass are of like length."""


@dataclass(frozen=True, slots=True)
class OffPolicyness:
    """How far off-policy a batch was, before the step that was made of it."""

    ess: float
    """Share of the batch that its importance weights leave, in (0, 1]."""
    k3: float
    """KL of the policy that sampled from the one that trains, in nats per token."""
    by_lag: tuple[LagBucket, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """Mean reward on held-out tasks, measured in the same way twice."""

    before: float
    after: float
    mismatch: dict[str, float]
    """How far what was sampled from was from what trained on it: old weights, or rounded ones."""
    memory_mb: dict[str, int]
    """The most that trainer and engines took together, while rollouts were waited for, and while
    the trainer trained."""


async def learn(
    rollouts: tidegate.Rollouts,
    episode: EpisodeFunction,
    *,
    model: Path,
    training: Iterable[Any],
    held_out: Sequence[Any],
    batches: int,
    learning_rate: float,
    corrects: bool = True,
    is_colocated: bool = False,
) -> Gain:
    """Measure, train, measure again. ``model`` is what the engines were started with.

    If it ``is_colocated``, engines give their memory back for as long as the trainer trains.
    """
    policy, optimizer = load_trainer(model, learning_rate)
    before = await rollouts.evaluate(held_out, episode=episode)
    print(f"held-out reward before training: {before.mean_reward:.3f}", flush=True)
    measured: list[OffPolicyness] = []
    with (
        RunProgress(rollouts.statistics, batches_total=batches) as progress,
        MemoryMarks() as marks,
    ):
        marks.begin("rollout")
        async for batch in rollouts.batches(training, episode=episode):
            if is_colocated:
                await rollouts.sleep(level=2, mode="keep")  # weights, too: new ones come anyway
            marks.begin("train")
            if (seen := train_step(policy, optimizer, batch, corrects=corrects)) is not None:
                measured.append(seen)
                await rollouts.observe(
                    effective_sample_size=seen.ess, mismatch_kl=seen.k3, by_lag=seen.by_lag
                )
            if is_colocated:
                optimizer.zero_grad()  # gives the gradients' memory back, before engines want it
            marks.begin("rollout")
            await rollouts.publish(policy.state_dict())  # wakes engines' weights, not their caches
            if is_colocated:
                await rollouts.wake()
            progress.batch({"reward": batch.rewards.mean().item()})
    after = await rollouts.evaluate(held_out, episode=episode)
    print(f"held-out reward after training:  {after.mean_reward:.3f}", flush=True)
    return Gain(before.mean_reward, after.mean_reward, summary(measured), marks.megabytes)


def summary(measured: Sequence[OffPolicyness]) -> dict[str, float]:
    """Of all batches: the mean and the highest KL in nats per token, and what the importance
    weights left of the batch that they left least of."""
    kl = [each.k3 for each in measured] or [0.0]
    ess = min((each.ess for each in measured), default=1.0)
    return {"mean_kl": sum(kl) / len(kl), "highest_kl": max(kl), "lowest_ess": ess}


def load_trainer(path: Path, learning_rate: float) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """The model as the trainer holds it, and what changes it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    return model, optimizer


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: tidegate.Batch,
    *,
    corrects: bool = True,
) -> OffPolicyness | None:
    """One optimizer step on a batch; None if nothing can be learned from it.

    Only groups whose rewards differ carry a gradient, so only their rows are computed. Tokens are
    weighed by how much likelier they are now than when they were sampled, unless ``corrects`` is
    False: that is what one loses.
    """
    rows = batch.advantages.nonzero().squeeze(1)
    if not len(rows):
        return None
    optimizer.zero_grad()
    log_ratios, versions = [], []
    for some in rows_of_like_length(batch, rows):
        log_ratio, version = _backward(model, batch, some, corrects=corrects)
        log_ratios.append(log_ratio)
        versions.append(version)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    log_ratio = torch.cat(log_ratios)[None]  # [1, N]
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    mismatch = measure_mismatch(log_ratio, mask)
    by_lag = measure_mismatch_by_lag(
        log_ratio, mask, torch.cat(versions)[None], trainer_version=batch.trainer_version
    )
    return OffPolicyness(mismatch.ess, mismatch.k3, by_lag)


def rows_of_like_length(batch: tidegate.Batch, rows: Tensor) -> Iterator[Tensor]:
    """These rows in parts that go through the model together, the longest first. [R] -> [P] each

    Agents' rows differ much: padded to the longest of a batch, walks over lakes are four times as
    many tokens.
    """
    lengths = batch.attention_mask[rows].sum(1)
    order = lengths.argsort(descending=True)
    start = 0
    while start < len(rows):
        longest = int(lengths[order[start]])
        end = start + max(1, TOKENS_TOGETHER // longest)
        yield rows[order[start:end]]
        start = end


def _backward(
    model: PreTrainedModel, batch: tidegate.Batch, rows: Tensor, *, corrects: bool
) -> tuple[Tensor, Tensor]:
    """Add some rows' gradient; their sampled tokens' log-ratios to behaviour, and versions. [N]"""
    longest = int(batch.attention_mask[rows].sum(1).max())
    token_ids = batch.token_ids[rows, :longest]
    # Without attention_mask: rows are padded at the end, where nothing that counts attends to it,
    # and a plain causal mask takes half the time.
    logits = model(input_ids=token_ids).logits[:, :-1].float()
    logprobs = -torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), token_ids[:, 1:], reduction="none"
    )  # [P, T - 1]
    mask = batch.loss_mask[rows, 1:longest].bool()
    behaviour = batch.logprobs[rows, 1:longest]
    loss, _ = decoupled_ppo_loss(
        logprobs,
        logprobs.detach(),  # one step per batch: the update starts from these very weights
        behaviour if corrects else logprobs.detach(),
        batch.advantages[rows, None],
        mask,
        tokens_in_batch=batch.sampled_tokens,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    log_ratio = (logprobs.detach() - behaviour)[mask]
    return log_ratio, batch.weight_versions[rows, 1:longest][mask]
