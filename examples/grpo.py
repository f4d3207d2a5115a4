"""GRPO training loop on asynchronous rollouts, and one optimizer step of it.

The demos (``async_grpo``, ``agent_demo``, ``configured``) call :func:`learn` with their tasks and
episode.

Shapes: R rows in a batch, P of them in one pass, T tokens in the longest of these, S from the first
sampled one to the end, N sampled ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import tidegate
from examples.memory_marks import MemoryMarks
from tidegate.engine.models.quiet_transformers import quiet_transformers
from tidegate.kernels.compiled import processor
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.policies.diagnostics import LagBucket, measure_mismatch, measure_mismatch_by_lag
from tidegate.policies.objectives import decoupled_ppo_loss

TOKENS_TOGETHER = 4096
"""Tokens per forward pass, padding included: enough that a small model's passes are bound by their
multiplications, few enough that rows of one pass have similar lengths."""

WeighTokens = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of tokens' log-ratios, behaviour log-probabilities, advantages and mask that returns
their weights in the loss. [P, S] each, but advantages [P, 1]."""


@dataclass(frozen=True, slots=True)
class OffPolicyness:
    """Off-policyness of a batch, measured before its optimizer step."""

    ess: float
    """Effective sample size as a share of the batch's tokens, in (0, 1]."""
    k3: float
    """KL of the training policy from the behaviour policy, in nats per token."""
    by_lag: tuple[LagBucket, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the trainer measured over all batches."""

    mismatch: dict[str, float]
    """Mismatch of behaviour and training policy (old or quantized weights); see :func:`summary`."""
    memory_mb: dict[str, int]
    """Peak memory of trainer and engines together, by phase: waiting for rollouts, and training."""


async def learn(
    rollouts: tidegate.Rollouts,
    episode: EpisodeFunction,
    *,
    model: Path,
    training: Sequence[Any],
    learning_rate: float,
    corrects: bool = True,
    is_colocated: bool = False,
    last_layers: int | None = None,
    rows_max: int | None = None,
) -> Measured:
    """Train on all tasks. ``model`` is the engines' initial model directory.

    If ``is_colocated``, engines release their memory while the trainer trains. ``last_layers`` is
    as of :func:`load_trainer`; then publishes bring these layers only. ``rows_max`` is as of
    :func:`train_step`.
    """
    policy, optimizer = load_trainer(model, learning_rate, last_layers)
    measured: list[OffPolicyness] = []
    with MemoryMarks() as marks:
        marks.begin("rollout")
        async for batch in rollouts.batches(training, episode=episode):
            if is_colocated:
                # level 2 discards weights too: new ones follow anyway
                await rollouts.sleep(level=2, mode="keep")
            marks.begin("train")
            seen = train_step(policy, optimizer, batch, corrects=corrects, rows_max=rows_max)
            if seen is not None:
                measured.append(seen)
                await rollouts.report_off_policyness(
                    effective_sample_size=seen.ess, mismatch_kl=seen.k3, by_lag=seen.by_lag
                )
            if is_colocated:
                optimizer.zero_grad()  # frees the gradients' memory before the engines need it
            marks.begin("rollout")
            # wakes the engines' weights, not their KV caches
            if last_layers is None:
                await rollouts.publish(policy.state_dict())
            else:
                layers = trained_weights(policy)
                await rollouts.publish(layers, batches=[batch], partial=True)
            if is_colocated:
                await rollouts.wake()
    return Measured(summary(measured), marks.megabytes)


def summary(measured: Sequence[OffPolicyness]) -> dict[str, float]:
    """Return the mean and highest KL over all batches, in nats per token, and the lowest effective
    sample size."""
    kl = [each.k3 for each in measured] or [0.0]
    ess = min((each.ess for each in measured), default=1.0)
    return {"mean_kl": sum(kl) / len(kl), "highest_kl": max(kl), "lowest_ess": ess}


def load_trainer(
    path: Path, learning_rate: float, last_layers: int | None = None
) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """Load the trainer's model and its optimizer.

    It trains all parameters in float32; or with ``last_layers`` only these layers: they are kept in
    float32 and computed in the model's own type, as all others are. Where the processor does not
    multiply bfloat16, all are computed in float32, because torch is a hundred times as slow there.
    """
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32 if last_layers is None else "auto", local_files_only=True
        )
    if last_layers is not None:
        if "bf16" not in processor():
            module: torch.nn.Module = model
            module.to(torch.float32)
        model.requires_grad_(False)
        layers: Any = model.base_model.layers
        layers[-last_layers:].float().requires_grad_(True)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return model, optimizer


def trained_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters that are trained, in the type that the model was loaded in."""
    return {
        name: each.detach().to(model.config.dtype)
        for name, each in model.named_parameters()
        if each.requires_grad
    }


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: tidegate.Batch,
    *,
    corrects: bool = True,
    weigh: WeighTokens | None = None,
    rows_max: int | None = None,
) -> OffPolicyness | None:
    """Take one optimizer step on a batch; return None if no group carries a gradient.

    Only rows with a non-zero advantage are computed. Tokens get importance weights (trainer over
    behaviour probability) unless ``corrects`` is False, which shows what the correction is worth.
    ``weigh`` is another correction, applied to each pass alone. ``rows_max`` computes only so many
    rows, those of the largest advantages, which teach most.
    """
    rows = batch.advantages.nonzero().squeeze(1)
    if rows_max is not None and rows_max < len(rows):
        rows = rows[batch.advantages[rows].abs().topk(rows_max).indices]
    if not len(rows):
        return None
    optimizer.zero_grad()
    log_ratios, versions = [], []
    for part in rows_of_like_length(batch, rows):
        log_ratio, version = _backward(model, batch, part, corrects=corrects, weigh=weigh)
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
    """Yield the rows in parts of similar length, the longest first. [R] -> [P] each

    Agents' rows differ much in length: padded to the longest of a batch, walks over lakes take four
    times as many tokens.
    """
    lengths = batch.attention_mask[rows].sum(1)
    order = lengths.argsort(descending=True)
    start = 0
    while start < len(rows):
        longest = int(lengths[order[start]])
        end = start + max(1, TOKENS_TOGETHER // longest)
        yield rows[order[start:end]]
        start = end


def first_trained(batch: tidegate.Batch, rows: Tensor) -> int:
    """Return the position of the first token that any of these rows is trained on; 1 if none is."""
    return max(1, int(batch.loss_mask[rows].any(0).int().argmax()))


def _backward(
    model: PreTrainedModel,
    batch: tidegate.Batch,
    rows: Tensor,
    *,
    corrects: bool,
    weigh: WeighTokens | None,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of some rows; return their tokens' log-ratios and versions. [N]"""
    longest = int(batch.attention_mask[rows].sum(1).max())
    token_ids = batch.token_ids[rows, :longest]
    # The prompt that all rows begin with needs no logits: half the multiplications of a small model
    # with a large vocabulary.
    first = first_trained(batch, rows)
    # Without attention_mask: padding is at the end, where no counted token attends to it, and a
    # plain causal mask takes half the time.
    with torch.autocast("cpu", model.dtype, enabled=model.dtype != torch.float32):
        # Indices, not a slice: contiguous, or the gradient takes three times as long.
        kept = torch.arange(first - 1, longest - 1)
        logits = model(input_ids=token_ids, logits_to_keep=kept).logits
    sampled = token_ids[:, first:]
    logprobs = -torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), sampled.flatten(), reduction="none"
    ).view_as(sampled)  # [P, S]
    mask = batch.loss_mask[rows, first:longest].bool()
    behaviour = batch.logprobs[rows, first:longest]
    advantages = batch.advantages[rows, None]
    weight = None
    if weigh is not None:
        weight = weigh(logprobs.detach() - behaviour, behaviour, advantages, mask)
    loss, _ = decoupled_ppo_loss(
        logprobs,
        logprobs.detach(),  # one step per batch: the proximal policy is this one
        behaviour if corrects else logprobs.detach(),
        advantages,
        mask,
        weight=weight,
        tokens_in_batch=batch.sampled_tokens,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    log_ratio = (logprobs.detach() - behaviour)[mask]
    return log_ratio, batch.weight_versions[rows, first:longest][mask]
