"""The trainer's batch: torch tensors over the rows of its rollouts, padded and packed.

Trainers get a :class:`Batch` from ``rollouts.batches()``; the handle makes it from the core's
groups.

Shapes: R rows, T tokens of the longest row, N tokens of all rows. A row is the whole context of a
rollout, or of one branch of a rollout that forked: prompts, sampled tokens and observations in the
order the model saw them; ``loss_mask`` marks the sampled tokens to train on.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tidegate.orchestrator.batches.attachment_columns import attachment_columns
from tidegate.orchestrator.batches.media_inputs import media_inputs
from tidegate.orchestrator.batches.version_runs import NOT_SAMPLED, Int64s, VersionRuns
from tidegate.orchestrator.core.group import Group, kept_rows
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.telemetry.html_tables import html_table, line
from tidegate.policies.advantages import relative_to_group, relative_to_trained_first
from tidegate.transport.attachments import BATCH_COLUMNS, RAGGED_COLUMNS, AttachmentColumns
from tidegate.transport.images import ImageReader


@dataclass(frozen=True, repr=False)
class PackedBatch(AttachmentColumns[torch.Tensor]):
    """A batch without padding: rows one after the other, for variable-length attention."""

    token_ids: torch.Tensor
    """[N] int64: context of each row."""
    cu_seqlens: torch.Tensor
    """[R + 1] int32: row r is ``[cu_seqlens[r], cu_seqlens[r + 1])``."""
    loss_mask: torch.Tensor
    """[N] bool: as :attr:`Batch.loss_mask`."""
    logprobs: torch.Tensor
    """[N] float32: as :attr:`Batch.logprobs`."""
    weight_versions: torch.Tensor
    """[N] int32: as :attr:`Batch.weight_versions`."""
    attachments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Columns that turns requested, by the names of :class:`AttachmentColumns`."""

    # Computed at first use, on the device of the other columns: training on padded rows never
    # needs them.

    @cached_property
    def row_ids(self) -> torch.Tensor:
        """[N] int64: row of each token."""
        lengths = self.cu_seqlens.diff().long()
        rows = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(rows, lengths, output_size=len(self.token_ids))

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """[N] int64: position of each token in its row, from 0."""
        starts = self.cu_seqlens[:-1].long()[self.row_ids]
        return torch.arange(len(starts), device=starts.device) - starts

    def attachment(self, column: str) -> torch.Tensor | None:
        """Return a column for attachments; None if no turn requested it."""
        return self.attachments.get(column)

    def __repr__(self) -> str:
        rows, tokens = len(self.cu_seqlens) - 1, len(self.token_ids)
        return line("PackedBatch", {"rows": rows, "tokens": tokens})


@dataclass(frozen=True, slots=True)
class BatchShard:
    """Which part of a batch a data-parallel rank has."""

    rank: int
    world_size: int
    rows_total: int
    """Number of rows of the whole batch, over all ranks."""
    sampled_tokens_total: int
    """Number of ``loss_mask`` tokens of the whole batch: the divisor of a mean loss over all
    tokens."""
    rows: tuple[int, ...] = ()
    """[R]: indices of this rank's rows in the whole batch."""


@dataclass(frozen=True, slots=True, repr=False)
class Batch(AttachmentColumns[torch.Tensor]):
    """The rows of one update. Rows of a group are adjacent."""

    token_ids: torch.Tensor
    """[R, T] int64: context of each row, padded on the right."""
    attention_mask: torch.Tensor
    """[R, T] bool: False on padding."""
    loss_mask: torch.Tensor
    """[R, T] bool: True on sampled tokens that are not masked as too old. The log-probability of
    token t comes from position t - 1 of a causal model."""
    logprobs: torch.Tensor
    """[R, T] float32: behaviour log-probabilities, as sampled; 0 on other tokens."""
    weight_versions: torch.Tensor
    """[R, T] int32: version that sampled each token; -1 on other tokens."""
    rewards: torch.Tensor
    """[R] float32: reward of the row's rollout."""
    group_advantages: torch.Tensor
    """[R] float32: :attr:`advantages`, for code that is not the trainer's: reading this field does
    not count as use."""
    group_ids: torch.Tensor
    """[R] int64: group of each row."""
    staleness: torch.Tensor
    """[R] int64: ``trainer_version`` minus the version of the row's oldest trained token."""
    trainer_version: int
    """Version at which the batch is trained, from which staleness is counted."""
    packed: PackedBatch
    """The same rows without padding."""
    tasks: tuple[object, ...] = ()
    """[R]: task of each row, as the user's iterator gave it."""
    rollout_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[R] int64: rollout of each row. An episode that forked has several rows, each with its
    rollout's reward and advantage."""
    uses: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[R] int64: use of its group that each row is for: 1 the first, higher with ``max_uses``. A
    row has the same tokens and log-probs in each use."""
    turn_rewards: torch.Tensor | None = None
    """[R, T] float32: rewards of single turns, each at its turn's last token; None without any."""
    media: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Arguments of the model's forward pass for the rows' images, beside ``input_ids`` and
    ``attention_mask``; empty without images."""
    number: int = 0
    """Number of the batch in its run, from 1; the same on all ranks. 0 outside a run."""
    shard: BatchShard | None = None
    """This rank's part of the batch; None if it is the whole batch."""
    columns_read: set[str] = field(default_factory=set)
    """``{"advantages"}`` once the trainer has read them in this batch, or in another of its run.
    Only then the run warns that they are all 0: a trainer may have a baseline of its own."""

    @property
    def advantages(self) -> torch.Tensor:
        """[R] float32: group-relative advantages (GRPO): the reward minus its group's mean, over
        the group's standard deviation. With ``deadline_policy="split"``, a late rollout's reward
        minus the mean of its siblings that were trained at the deadline. Their rewards are not in
        this batch, so another estimator over ``group_ids`` gives a late rollout 0 if no other late
        one is in it."""
        self.columns_read.add("advantages")
        return self.group_advantages

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the loss sees."""
        return int(self.loss_mask.sum())

    def attachment(self, column: str) -> torch.Tensor | None:
        """Return a column for attachments, padded when it is read."""
        values = self.packed.attachment(column)
        if values is None or column in RAGGED_COLUMNS:
            return values
        shape = (*self.attention_mask.shape, *values.shape[1:])
        out = values.new_full(shape, BATCH_COLUMNS[column])
        out[self.attention_mask] = values
        return out

    def _figures(self) -> dict[str, object]:
        rows, tokens = self.token_ids.shape
        mean = f"{self.rewards.mean().item():.3f}" if rows else "-"
        return {
            "number": self.number,
            "trainer version": self.trainer_version,
            "shape": f"{rows} x {tokens}",
            "groups": len(np.unique(self.group_ids.cpu().numpy())),
            "sampled tokens": self.sampled_tokens,
            "reward": f"mean {mean}",
            "staleness": f"max {int(self.staleness.max()) if rows else 0}",
        }

    def __repr__(self) -> str:
        return line("Batch", self._figures())

    def _repr_html_(self) -> str:
        return html_table("Batch", self._figures())


def build_batch(groups: Sequence[Group], trainer_version: int, number: int = 0) -> Batch:
    """Lay out the rollouts of these groups as tensors, without images."""
    return batch_of_rows(kept_rows(groups), groups, trainer_version, number)


def batch_of_rows(
    rows: Sequence[tuple[Rollout, Group]],
    groups: Sequence[Group],
    trainer_version: int,
    number: int,
    images: ImageReader | None = None,
) -> Batch:
    """Lay out a batch from the rows that :func:`kept_rows` returned. ``images`` is None if the
    run processes none."""
    rollouts = [rollout for rollout, _ in rows]
    contexts = [rollout.filed_token_ids for rollout in rollouts]  # none is deferred now
    lengths = np.array(list(map(len, contexts)), dtype=np.int64)
    sampled = VersionRuns(rollouts, lengths)
    packed = _pack(rollouts, contexts, lengths, sampled)
    return Batch(
        **padded_rows(packed, lengths),
        rewards=_floats([rollout.reward or 0.0 for rollout in rollouts]),
        group_advantages=_advantages(rollouts, groups),
        group_ids=_ints([rollout.group_id for rollout in rollouts]),
        staleness=torch.from_numpy(sampled.staleness(trainer_version)),
        trainer_version=trainer_version,
        tasks=tuple([group.task for _, group in rows]),
        rollout_ids=_ints(
            [row.rollout_id if row.branch_of is None else row.root.rollout_id for row in rollouts]
        ),
        uses=_ints([rollout.use for rollout in rollouts]),
        turn_rewards=_turn_rewards(rollouts, (len(lengths), lengths.max(initial=0))),
        number=number,
        media={} if images is None else media_inputs(rollouts, int(lengths.max(initial=0)), images),
    )


def padded_rows(packed: PackedBatch, lengths: Int64s) -> dict[str, Any]:
    """Return fields of :class:`Batch`: ``packed``, and its columns padded to rows of ``lengths``
    [R]."""
    is_token = np.arange(lengths.max(initial=0)) < lengths[:, None]  # [R, T]
    fields: dict[str, Any] = {"attention_mask": torch.from_numpy(is_token), "packed": packed}
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
        values = getattr(packed, name).numpy()
        fill = NOT_SAMPLED if name == "weight_versions" else 0
        out = np.full(is_token.shape, fill, dtype=values.dtype)
        out[is_token] = values
        fields[name] = torch.from_numpy(out)
    return fields


def _ints(values: list[int]) -> torch.Tensor:
    """Build with numpy, which reads a list in half of torch's time."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _floats(values: list[float]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _advantages(rollouts: Sequence[Rollout], groups: Sequence[Group]) -> torch.Tensor:
    """Return group-relative advantages over whole rollouts, however many rows each has.

    Later rollouts of a split group are compared with those that were trained first. A rollout alone
    in its group gets 0.
    """
    remainders = [group for group in groups if group.sibling_rewards]
    if len({rollout.group_id for rollout in rollouts}) == len(rollouts) and not remainders:
        return _floats([0.0] * len(rollouts))  # the same as below, in a twentieth of the time
    advantages: list[float] = []
    for group in groups:
        rows = group.kept
        roots = [row for row in rows if row.branch_of is None]
        # As in batches: equal float32 rewards give exactly 0.
        rewards = array("f", [row.reward or 0.0 for row in roots]).tolist()
        if group.sibling_rewards:
            first = array("f", group.sibling_rewards).tolist()
            own = relative_to_trained_first(rewards, first)
        else:
            own = relative_to_group(rewards)
        if len(roots) < len(rows):
            of_rollout = {root.rollout_id: each for root, each in zip(roots, own, strict=True)}
            own = [of_rollout[row.root.rollout_id] for row in rows]
        advantages += own
    return _floats(advantages)


def _turn_rewards(rollouts: Sequence[Rollout], shape: tuple[int, ...]) -> torch.Tensor | None:
    rewarded = [
        (row, turn.start + turn.length - 1, turn.reward)
        for row, rollout in enumerate(rollouts)
        for turn in rollout.turns
        if turn.reward is not None and turn.length
    ]
    if not rewarded:
        return None
    out = torch.zeros(shape, dtype=torch.float32)
    for row, last, reward in rewarded:
        out[row, last] = reward
    return out


def _pack(
    rollouts: Sequence[Rollout],
    contexts: "Sequence[array[int]]",
    lengths: Int64s,
    sampled: VersionRuns,
) -> PackedBatch:
    """Build with numpy, which takes a tenth of torch's time for thousands of small pieces."""
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
    weight_versions = sampled.of_tokens()
    token_ids = np.frombuffer(b"".join(contexts), dtype=np.int32)
    joined_logprobs = bytearray().join([rollout.filed_logprobs for rollout in rollouts])
    logprobs = np.frombuffer(joined_logprobs, dtype=np.float32)
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        loss_mask=torch.from_numpy(weight_versions >= sampled.oldest_trainable),
        logprobs=torch.from_numpy(logprobs),
        weight_versions=torch.from_numpy(weight_versions),
        attachments=attachment_columns(rollouts, lengths),
    )
