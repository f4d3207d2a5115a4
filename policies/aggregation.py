"""Sums and means of per-token values by token, sequence and prompt: the loss aggregation modes.

Objectives, corrections, diagnostics and users' trainers call these functions.

Shapes, here and wherever ``row_ids`` is an argument: [R, T] for padded rows, each of which is one
sequence; or, with ``row_ids``, any shape (packed: [N]), where ``row_ids`` holds each token's
sequence number, from 0. "Tokens" are positions with a true ``mask``; the values at other positions,
NaN included, change nothing. A sequence is a rollout's row, and may have no tokens.

All formulas of ``policies/`` compute in float32 at least and return it: in bfloat16 a ratio near 1
rounds to 1, and a sum of ones stops at 256.
"""

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Return ``values`` in float32 if their type is a shorter float, else as they are."""
    is_short = values.is_floating_point() and values.element_size() < 4
    return values.float() if is_short else values


def segment_sum(values: Tensor, segment_ids: Tensor, segments: int) -> Tensor:
    """Return the sum of each segment. [N], [N] int64 in [0, segments) -> [segments]"""
    values = at_least_float32(values)
    return values.new_zeros(segments).index_add(0, segment_ids, values)


def over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values``, in float32 at least, with masked positions set to 0.

    No gradient reaches masked positions.
    """
    return torch.where(mask.bool(), at_least_float32(values), 0.0)


def refuse_shapes(mask: Tensor, *, advantages: Tensor | None = None, **tensors: Tensor) -> None:
    """Check that all tensors have the mask's shape, because torch broadcasts [R] along T if R = T.

    Raises:
        ValueError: a tensor has another shape. Advantages may also be [R, 1].
    """
    shape, given = mask.shape, {name: list(tensor.shape) for name, tensor in tensors.items()}
    if any(tensor.shape != shape for tensor in tensors.values()):
        raise ValueError(
            f"these and their mask {list(shape)} must have one shape, [R, T] or [N]: {given}"
        )
    per_row = torch.Size([*shape[:-1], 1]) if len(shape) == 2 else shape
    if advantages is not None and advantages.shape not in (shape, per_row):
        raise ValueError(
            f"advantages must be {list(shape)} or {list(per_row)} to go with a mask {list(shape)}, "
            f"got {list(advantages.shape)}; one per rollout is advantages[:, None]"
        )


class Sequences:
    """Maps tokens to sequences, for both padded and packed layouts."""

    __slots__ = ("count", "mask", "row_ids", "tokens")

    def __init__(self, mask: Tensor, row_ids: Tensor | None = None) -> None:
        """Read the layout from the mask and, if packed, the row ids.

        Raises:
            ValueError: ``row_ids`` is missing for packed tokens, or differs in shape from ``mask``.
        """
        if row_ids is None and mask.ndim != 2:
            raise ValueError(
                f"tokens that are not padded rows [R, T] need row_ids, the sequence of each; "
                f"got a mask {list(mask.shape)} without (a Batch has them as packed.row_ids)"
            )
        if row_ids is not None and row_ids.shape != mask.shape:
            raise ValueError(
                f"row_ids holds the sequence of each token and must have the mask's shape "
                f"{list(mask.shape)}, got {list(row_ids.shape)}"
            )
        if row_ids is None:
            self.count = len(mask)
            row_ids = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
        else:
            self.count = int(row_ids.max()) + 1 if row_ids.numel() else 0
        self.mask = mask.bool()
        self.row_ids = row_ids.long()
        self.tokens = segment_sum(self.mask.flatten().long(), self.row_ids.flatten(), self.count)
        """Number of tokens of each sequence. [R] int64"""

    @property
    def is_empty(self) -> Tensor:
        """Whether each sequence has no tokens. [R] bool"""
        return self.tokens == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return each sequence's sum, accumulated in float64: 32,768 small terms lose digits.

        ``values`` has the mask's shape or broadcasts to it. Returns [R] in the dtype of ``values``,
        or float32 if that is shorter.
        """
        kept = over_tokens(values, self.mask)
        summed = segment_sum(kept.double().flatten(), self.row_ids.flatten(), self.count)
        return summed.to(kept.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over each sequence's tokens, 0 for sequences without tokens. -> [R]"""
        return self.sum(values) / self.tokens.clamp(min=1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Return the sequence's value at each of its positions. [R] -> the mask's shape"""
        return per_sequence[self.row_ids]

    def positions(self) -> Tensor:
        """Return each token's index within its sequence, counting tokens only. int64

        The mask's shape. Sequences may be interleaved. Positions with a false mask get 0.
        """
        rows = self.row_ids[self.mask]
        order = rows.argsort(stable=True)
        starts = self.tokens.cumsum(0) - self.tokens
        ranks = torch.empty_like(rows)
        ranks[order] = torch.arange(len(rows), device=rows.device) - starts[rows[order]]
        return torch.zeros_like(self.row_ids).masked_scatter(self.mask, ranks)

    def at_last_token(self, per_sequence: Tensor) -> Tensor:
        """Put each sequence's value on its last token, 0 elsewhere. [R] -> the mask's shape"""
        is_last = self.mask & (self.positions() == self.spread(self.tokens) - 1)
        return torch.where(is_last, self.spread(at_least_float32(per_sequence)), 0.0)


def mean_by_token(values: Tensor, mask: Tensor, *, tokens_in_batch: int | None = None) -> Tensor:
    """Return ``sum_t v_t / tokens``: every token weighs the same. -> []

    So long sequences weigh more than short ones. ``tokens_in_batch`` replaces the number of tokens
    in ``mask``. For micro-batches pass the whole batch's number; the results then add up. A
    constant, such as rows times ``max_tokens``, gives the loss of Dr. GRPO (arXiv 2503.20783),
    which has no length bias.

    Source: DAPO, arXiv 2503.14476 (token-level loss).
    """
    tokens = _denominator(mask.bool(), tokens_in_batch, "tokens_in_batch")
    return over_tokens(values, mask).sum() / tokens


def mean_by_sequence(
    values: Tensor,
    mask: Tensor,
    *,
    row_ids: Tensor | None = None,
    sequences_in_batch: int | None = None,
) -> Tensor:
    """Return ``sum_i mean_{t in i} v_t / sequences``: every sequence weighs the same. -> []

    The divisor is the number of sequences with tokens, or ``sequences_in_batch``.

    Source: GRPO, arXiv 2402.03300, section 4.1.
    """
    sequences = Sequences(mask, row_ids)
    count = _denominator(~sequences.is_empty, sequences_in_batch, "sequences_in_batch")
    return sequences.mean(values).sum() / count


def mean_by_prompt(
    values: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    row_ids: Tensor | None = None,
    prompts_in_batch: int | None = None,
) -> Tensor:
    """Return ``sum_g mean_{t in g} v_t / prompts``: every prompt weighs the same. -> []

    ``group_ids`` [R] holds the group of each sequence, any integers. The divisor is the number of
    groups with tokens, or ``prompts_in_batch``. A group must not be split over calls.

    Source: ScaleRL, arXiv 2510.13786 (prompt-level loss aggregation).
    """
    sequences = Sequences(mask, row_ids)
    if group_ids.shape != sequences.tokens.shape:
        raise ValueError(
            f"group_ids holds the group of each of the {sequences.count} sequences, "
            f"got {list(group_ids.shape)}"
        )
    names, group_of_sequence = torch.unique(group_ids, return_inverse=True)
    tokens = segment_sum(sequences.tokens, group_of_sequence, len(names))
    sums = segment_sum(sequences.sum(values), group_of_sequence, len(names))
    prompts = _denominator(tokens > 0, prompts_in_batch, "prompts_in_batch")
    return (sums / tokens.clamp(min=1)).sum() / prompts


def _denominator(counted: Tensor, given: int | None, name: str) -> int:
    if given is not None and given < 1:
        raise ValueError(f"{name} divides the loss and must be > 0, got {given}")
    return max(int(counted.sum()), 1) if given is None else given
