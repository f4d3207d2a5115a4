"""How do the values of many tokens become one? Sums and means by token, sequence and prompt.

It knows nothing of what the values mean.

Shapes, here and wherever ``row_ids`` is an argument: [R, T] for padded rows, each of which is one
sequence; or, with ``row_ids``, any shape (packed: [N]) and for each token the number, from 0, of
the sequence it belongs to. "Tokens" are those with a true ``mask``; what the others hold, NaN
included, changes nothing. A sequence is a rollout's row; it need not have tokens.
"""

import torch
from torch import Tensor


def segment_sum(values: Tensor, segment_ids: Tensor, segments: int) -> Tensor:
    """Add up the values of each segment. [N], [N] int64 in [0, segments) -> [segments]"""
    return values.new_zeros(segments).index_add(0, segment_ids, values)


def over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """The values, 0 where there is no token; no gradient reaches what is masked."""
    return torch.where(mask.bool(), values, 0.0)


def refuse_shapes(mask: Tensor, *, advantages: Tensor | None = None, **tensors: Tensor) -> None:
    """Insist on the mask's shape; torch would broadcast in silence, as [R] along T where R = T.

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
    """Which tokens belong to which sequence: the one place that knows padded from packed."""

    __slots__ = ("count", "mask", "row_ids", "tokens")

    def __init__(self, mask: Tensor, row_ids: Tensor | None = None) -> None:
        """Read the layout.

        Raises:
            ValueError: packed tokens without ``row_ids``, or as many ids as there are not tokens.
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
        """Tokens of each sequence. [R] int64"""

    @property
    def is_empty(self) -> Tensor:
        """Which sequences have no tokens. [R] bool"""
        return self.tokens == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up each sequence's tokens, in float64, for 32,768 small terms lose digits in less.

        ``values``: the mask's shape, or what broadcasts to it. -> [R] of their dtype.
        """
        kept = over_tokens(values, self.mask)
        summed = segment_sum(kept.double().flatten(), self.row_ids.flatten(), self.count)
        return summed.to(kept.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each sequence's tokens, 0 where it has none. -> [R]"""
        return self.sum(values) / self.tokens.clamp(min=1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Give every position the value of its sequence. [R] -> the mask's shape"""
        return per_sequence[self.row_ids]

    def positions(self) -> Tensor:
        """How many tokens of its sequence stand before each token. The mask's shape, int64.

        Sequences may be interleaved; what is not a token counts as 0.
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
        return torch.where(is_last, self.spread(per_sequence), 0.0)


def mean_by_token(values: Tensor, mask: Tensor, *, tokens_in_batch: int | None = None) -> Tensor:
    """``sum_t v_t / tokens``: every token weighs the same, so long sequences weigh more. -> []

    ``tokens_in_batch`` replaces the number of tokens given here. For a batch in micro-batches
    pass the whole batch's, and their results add up. A constant, such as rows times ``max_tokens``,
    gives the loss of Dr. GRPO (arXiv 2503.20783), without any bias by length.

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
    """``sum_i mean_{t in i} v_t / sequences``: every sequence weighs the same. -> []

    Sequences without tokens don't count, unless ``sequences_in_batch`` counts them.

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
    """``sum_g mean_{t in g} v_t / prompts``: every prompt weighs the same, whatever its lengths.

    ``group_ids`` [R] holds the group of each sequence, any integers. Groups without tokens don't
    count, unless ``prompts_in_batch`` counts them. A group must not be split over calls. -> []

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
