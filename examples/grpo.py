"""How does a trainer learn from asynchronous rollouts? The loop, and one step of GRPO.

It knows no task: whoever calls it says which tasks are trained on, which measure, and how they are
played.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import tidegate
from examples.memory_marks import MemoryMarks
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.records.progress import RunProgress
from tidegate.policies.diagnostics import LagBucket, measure_mismatch, measure_mismatch_by_lag
from tidegate.policies.objectives import decoupled_ppo_loss


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
    targets = batch.token_ids[rows, 1:]
    inputs = {"input_ids": batch.token_ids[rows], "attention_mask": batch.attention_mask[rows]}
    logits = model(**inputs).logits[:, :-1].float()
    logprobs = -torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none"
    )  # [R, T - 1]
    mask = batch.loss_mask[rows, 1:]
    loss, _ = decoupled_ppo_loss(
        logprobs,
        logprobs.detach(),  # one step per batch: the update starts from these very weights
        batch.logprobs[rows, 1:] if corrects else logprobs.detach(),
        batch.advantages[rows, None],
        mask,
        tokens_in_batch=batch.sampled_tokens,
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    log_ratio, versions = logprobs - batch.logprobs[rows, 1:], batch.weight_versions[rows, 1:]
    mismatch = measure_mismatch(log_ratio, mask)
    by_lag = measure_mismatch_by_lag(
        log_ratio, mask, versions, trainer_version=batch.trainer_version
    )
    return OffPolicyness(mismatch.ess, mismatch.k3, by_lag)
