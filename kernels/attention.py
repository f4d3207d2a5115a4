"""Attention over a paged KV cache on the CPU, with torch: KV writes, index plans, masked attention.

It runs where compiled code does not apply; ``paged_attention.py`` is the GPU's counterpart. A
layer's cache is one tensor [blocks, 2, K, block_tokens, D], keys at 0 and values at 1. A block of
one head is contiguous, so a context is gathered in one call without a transposition.

Letters in shapes: T tokens of a step, R rows (turns), Q query tokens per row, A query heads, K KV
heads, D head_dim, B blocks per row, C context positions (B x block_tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a layer's cache that indices depend on."""

    num_kv_heads: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Successive rows of a step that attend in one call, padded to a rectangle.

    Computed once per step and used in every layer.
    """

    first_token: int
    end_token: int
    """The group's tokens are ``[first_token, end_token)`` of the step."""
    rows: int
    pad: torch.Tensor | None
    """[R * Q], index of each padded query in the group's tokens, the last repeated; None if all
    rows have the same length."""
    unpad: torch.Tensor | None
    """[end_token - first_token], index of each token in the padded rectangle; None like ``pad``."""
    gather: torch.Tensor
    """[2 * R * K * B], rows of the cache viewed as [blocks * 2 * K, block_tokens * D]."""
    mask: torch.Tensor | None
    """[R, 1, Q, C]: 0 where a query attends to a position, -inf elsewhere. None if there is one
    row, whose Q queries are its context's last tokens and attend to all before them."""
    context_tokens: int
    """Number of positions of the longest row's context."""
    unseen: torch.Tensor | None
    """Rows of the gathered context, viewed as [2 * R * K * C, D], that no query attends to; None
    if there are none. They are zeroed, because another turn may have left NaN there, which a
    mask does not hide."""


def write_index(block: Ints, offset: Ints, shape: CacheShape) -> torch.Tensor:
    """Return the rows [T * 2K] of the cache, viewed as [-1, D], that tokens' KV is written to.

    ``block`` and ``offset`` [T] are each token's block and its position in the block.
    """
    heads = 2 * shape.num_kv_heads
    rows = block[:, None] * heads + np.arange(heads)
    return torch.from_numpy((rows * shape.block_tokens + offset[:, None]).reshape(-1))


def write_kv(cache: torch.Tensor, index: torch.Tensor, keys_values: torch.Tensor) -> None:
    """Store the keys and values [T, 2K, D] of a step's tokens in one layer's cache."""
    head_dim = cache.shape[-1]
    cache.view(-1, head_dim).index_copy_(0, index, keys_values.reshape(-1, head_dim))


def plan_group(
    starts: Ints,
    counts: Ints,
    tables: Ints,
    shape: CacheShape,
    *,
    first_token: int,
    dtype: torch.dtype,
    window_tokens: int | None = None,
    needs_mask: bool = True,
) -> RowGroup:
    """Compute a group's indices and mask.

    Args:
        starts: [R], context position of each row's first query token.
        counts: [R], query tokens per row, at least 1.
        tables: [R, B], the blocks of each row's context, padded with any valid block.
        shape: of the cache.
        first_token: where in the step the group's tokens begin.
        dtype: of the model, for the mask.
        window_tokens: positions that a token attends to, itself included; None: all up to it.
        needs_mask: whether there is a mask even where it can be done without, faster: for models
            with a soft cap or sinks.
    """
    is_chunk = not needs_mask and len(starts) == 1 and counts[0] > 1 and window_tokens is None
    context_starts = np.zeros_like(starts)
    if window_tokens is not None:
        tables, context_starts = _within_window(starts, counts, tables, shape, window_tokens)
    queries = np.arange(counts.max())
    last = counts[:, None] - 1
    query_index = np.minimum(queries, last)  # [R, Q]; padding repeats a row's last token
    context_tokens = tables.shape[1] * shape.block_tokens
    positions = (starts - context_starts)[:, None] + query_index  # [R, Q], in the gathered context
    pad = unpad = None
    if (counts != queries.size).any():
        offsets = np.cumsum(counts) - counts
        pad = torch.from_numpy((offsets[:, None] + query_index).reshape(-1))
        unpad = torch.from_numpy(np.flatnonzero(queries <= last))
    kinds = np.arange(2)[:, None, None, None]
    heads = np.arange(shape.num_kv_heads)[:, None]
    gather = (tables[:, None, :] * 2 + kinds) * shape.num_kv_heads + heads  # [2, R, K, B]
    first_attended = positions[:, :1] - (window_tokens or context_tokens) + 1
    return RowGroup(
        first_token=first_token,
        end_token=first_token + int(counts.sum()),
        rows=counts.size,
        pad=pad,
        unpad=unpad,
        gather=torch.from_numpy(gather.reshape(-1)),
        mask=None
        if is_chunk
        else _mask(positions, context_tokens, window_tokens)[:, None].to(dtype),
        context_tokens=int(positions.max()) + 1,
        unseen=None
        if is_chunk
        else _unseen(first_attended, positions[:, -1:], context_tokens, shape.num_kv_heads),
    )


def _mask(positions: Ints, context_tokens: int, window_tokens: int | None) -> torch.Tensor:
    """Return the mask of queries at ``positions`` [R, Q] of a context: 0 or -inf.
    [R, Q, C], float32"""
    positions = positions[:, :, None]
    context = np.arange(context_tokens)
    is_attended = context <= positions
    if window_tokens is not None:
        is_attended &= context > positions - window_tokens
    return torch.from_numpy(np.where(is_attended, np.float32(0), np.float32(-np.inf)))


def _unseen(first: Ints, last: Ints, context_tokens: int, kv_heads: int) -> torch.Tensor | None:
    """Return the indices in the gathered context [2, R, K, C] that no query attends to, for rows
    that attend from ``first`` to ``last``, both [R, 1]."""
    context = np.arange(context_tokens)
    unseen = (context < first) | (context > last)
    if not unseen.any():
        return None
    size = (2, len(unseen), kv_heads, context_tokens)
    return torch.from_numpy(np.flatnonzero(np.broadcast_to(unseen[:, None], size)))


def _within_window(
    starts: Ints, counts: Ints, tables: Ints, shape: CacheShape, window_tokens: int
) -> tuple[Ints, Ints]:
    """Drop the blocks before each row's first query's window.

    Returns:
        [R, B], fewer blocks; [R], the context position of each row's first remaining block.
    """
    firsts = np.maximum(0, starts + 1 - window_tokens) // shape.block_tokens
    ends = -(-(starts + counts) // shape.block_tokens)
    columns = firsts[:, None] + np.arange((ends - firsts).max())
    kept = np.take_along_axis(tables, np.minimum(columns, tables.shape[1] - 1), axis=1)
    return kept, firsts * shape.block_tokens


def scratch_elements(groups: Sequence[RowGroup], cache: torch.Tensor) -> int:
    """Return the size of the scratch memory that suffices for each of ``groups`` in turn."""
    block_tokens, head_dim = cache.shape[-2:]
    most = max((group.gather.numel() for group in groups), default=0)
    return most * block_tokens * head_dim


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    group: RowGroup,
    scratch: torch.Tensor,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the attention of one group's tokens to their contexts, after :func:`write_kv`.

    Args:
        query: [T, A, D], the group's own tokens, rotated.
        cache: tensor of one layer.
        group: of :func:`plan_group`.
        scratch: at least :func:`scratch_elements` of the cache's dtype, overwritten. A parameter
            because fresh memory for a long context costs more than gathering into it.
        scale: factor of the products of queries and keys; None: 1 / sqrt(D).
        soft_cap: makes scores s into ``soft_cap * tanh(s / soft_cap)``.
        sinks: [A], float32, one more score per head that takes part in the softmax and has no
            value, as in gpt-oss.

    Returns:
        [T, A * D] of ``query``'s dtype.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, block_tokens = cache.shape[2], cache.shape[3]
    blocks = cache.view(-1, block_tokens * head_dim)
    contexts = scratch[: group.gather.numel() * blocks.shape[1]]
    torch.index_select(blocks, 0, group.gather, out=contexts.view(-1, blocks.shape[1]))
    if group.unseen is not None:
        contexts.view(-1, head_dim).index_fill_(0, group.unseen, 0)
    keys, values = contexts.view(2, group.rows, kv_heads, -1, head_dim)
    if group.mask is None:
        return _attend_chunk(query, keys, values, group.context_tokens, scale)
    if group.pad is not None:
        query = query.index_select(0, group.pad)
    if query.shape[0] == group.rows:  # one query each: the heads of a KV head act as queries
        shared = query.view(group.rows, kv_heads, heads // kv_heads, head_dim)
        if sinks is not None:
            sinks = sinks.view(kv_heads, -1)
        out = _mix(shared, keys, values, group.mask, scale, soft_cap, sinks)
        return out.reshape(group.rows, heads * head_dim)
    query = query.view(group.rows, -1, heads, head_dim).transpose(1, 2)
    if sinks is not None:
        sinks = sinks[:, None]
    out = _mix(query, keys, values, group.mask, scale, soft_cap, sinks)
    out = out.transpose(1, 2).reshape(-1, heads * head_dim)
    return out if group.unpad is None else out.index_select(0, group.unpad)


def _attend_chunk(
    query: torch.Tensor,  # [Q, A, D]
    keys: torch.Tensor,  # [1, K, C, D]
    values: torch.Tensor,  # [1, K, C, D]
    context_tokens: int,
    scale: float | None,
) -> torch.Tensor:
    """Attention of the last Q tokens of a context to those before, and each other. [Q, A * D]

    Without a mask: of the tokens before, which all are attended to, by the query heads of a KV head
    as if they were more queries; and of the Q among each other, which is causal. The two softmaxes
    are joined by their sums, as in flash-decoding.
    """
    queries, heads, head_dim = query.shape
    before = context_tokens - queries
    query = query.transpose(0, 1)[None]  # [1, A, Q, D]
    own_keys, own_values = keys[:, :, before:context_tokens], values[:, :, before:context_tokens]
    if (copies := heads // keys.shape[1]) > 1:
        own_keys = own_keys.repeat_interleave(copies, 1)
        own_values = own_values.repeat_interleave(copies, 1)
    own, own_log_sums = _flash(query, own_keys, own_values, is_causal=True, scale=scale)
    if before:
        many = query.reshape(1, keys.shape[1], -1, head_dim)
        past, log_sums = _flash(
            many, keys[:, :, :before], values[:, :, :before], is_causal=False, scale=scale
        )
        past_share = torch.sigmoid(log_sums.reshape(own_log_sums.shape) - own_log_sums)[..., None]
        past = past.reshape(own.shape)
        own = torch.lerp(own.float(), past.float(), past_share).to(own.dtype)
    return own[0].transpose(0, 1).reshape(queries, heads * head_dim)


def _flash(
    query: torch.Tensor,  # [1, A, Q, D]
    keys: torch.Tensor,  # [1, A, C, D]
    values: torch.Tensor,  # [1, A, C, D]
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's fused attention [1, A, Q, D], and the logarithms of its softmaxes' sums
    [1, A, Q], which ``scaled_dot_product_attention`` does not return."""
    output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, attn_mask=None, scale=scale
    )
    return output, log_sums


def _mix(
    query: torch.Tensor,  # [R, A, Q, D]
    keys: torch.Tensor,  # [R, K, C, D]
    values: torch.Tensor,  # [R, K, C, D]
    mask: torch.Tensor,  # [R, 1, Q, C]
    scale: float | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [A, Q] or [A, 1]
) -> torch.Tensor:
    """Softmax attention of A query heads to K KV heads, A / K to each. [R, A, Q, D]

    torch's fused attention has no soft cap and no sinks, so with them its steps are computed here.
    """
    if soft_cap is None and sinks is None:
        shares = query.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=shares
        )
    rows, heads, queries, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    shared = query.view(rows, keys.shape[1], -1, queries, head_dim)  # [R, K, A / K, Q, D]
    scores = shared @ keys[:, :, None].transpose(-1, -2)
    if soft_cap is None:
        scores *= scale
    else:
        scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    scores = scores.add_(mask[:, :, None]).float()
    if sinks is not None:
        column = sinks.view(*shared.shape[1:3], -1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1].to(values.dtype)
    else:
        weights = scores.softmax(-1).to(values.dtype)
    return (weights @ values[:, :, None]).view(rows, heads, queries, head_dim)
