"""GPU kernel for attention over a paged KV cache: decode and chunked prefill in one launch.

The CPU's counterpart is :mod:`tidegate.kernels.attention`, with the same cache layout. Decode and
prefill differ only in the number of query tokens per row.

A program takes one row, one KV head and a few query tokens, and folds the context into a running
softmax a tile of keys at a time, so scores are never stored. The query heads of one KV head are
rows of one matrix product, so each key is read once for all of them. For rows with few query tokens
the context is split too, and the splits are merged by their log-sum-exps. Splits and tiles start at
fixed positions, so a token's context is summed in the same order in every batch.

Sources: online softmax, Milakov & Gimelshein, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691,
section 3.1; paging, arXiv:2309.06180; the split, "Flash-Decoding", Dao et al. 2023.

Letters in shapes: T query tokens of all rows, R rows, B blocks per row, A query heads, K KV heads,
G = A / K, D head_dim, Z splits of the context, C context positions, M query rows of a tile.
"""

from dataclasses import dataclass

import torch

from tidegate.kernels.optional_triton import jit, next_power_of_2, tl
from tidegate.kernels.triton_math import capped, product

TILE_BYTES = 128
"""Size of a tile: its number of keys times the bytes of one number. In bfloat16 a tile has 64 keys,
16 KB with D = 128, and a streaming multiprocessor holds several. In float32 it has half as many,
because those are multiplied in registers, without tensor cores, where 64 would not fit. A tile's
rows, query tokens times G, have the same limit."""

SPLIT_TOKENS = 1024
"""Context positions of one split: 16 tiles in bfloat16, beside which merging costs little."""

SPLIT_QUERIES_MAX = 16
"""Rows with more query tokens are not split: they fill a GPU, and partial
results would be large."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Each row's query tokens and context blocks; tensors are int32, on the cache's device."""

    token_offsets: torch.Tensor
    """[R + 1]: row r's query tokens are ``[token_offsets[r], token_offsets[r + 1])`` of the T."""
    starts: torch.Tensor
    """[R], context position of each row's first query token."""
    tables: torch.Tensor
    """[R, B], the blocks of each row's context, padded with any valid block."""
    count_max: int
    """Query tokens of the longest row; on the host, so that a launch does not read the device."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Scale, soft cap and window of a layer's attention scores."""

    scale: float
    window_tokens: int | None = None
    """Number of positions that a query attends to, its own last; None: all up to its own."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(score / soft_cap)``, as in Gemma 2, arXiv:2408.00118."""


def paged_attention_triton(
    query: torch.Tensor, cache: torch.Tensor, rows: PagedRows, rule: AttentionRule
) -> torch.Tensor:
    """Compute the attention of each row's query tokens to its context, themselves included.

    Runs on a CPU only with Triton's interpreter.

    Args:
        query: [T, A, D], rotated, each token's heads contiguous.
        cache: [blocks, 2, K, block_tokens, D] of one layer, contiguous, of ``query``'s dtype, with
            the query tokens' own keys and values in it.
        rows: in the order of their tokens.
        rule: of the layer.

    Returns:
        [T, A, D] of ``query``'s dtype; softmax and sums are float32.
    """
    _refuse_shapes(query, cache, rows, rule)
    tokens, heads, head_dim = query.shape
    _, _, kv_heads, block_tokens, _ = cache.shape
    share = heads // kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    splits = 1
    if rows.count_max <= SPLIT_QUERIES_MAX:
        splits = -(-rows.tables.shape[1] * block_tokens // SPLIT_TOKENS)
    partial, log_sums = out, out  # not used by a single split
    if splits > 1:
        partial = query.new_empty((splits, tokens, heads, head_dim), dtype=torch.float32)
        log_sums = query.new_empty((splits, tokens, heads), dtype=torch.float32)
    rows_needed = next_power_of_2(share * rows.count_max)
    tile = TILE_BYTES // query.element_size()
    query_rows = max(min(rows_needed, tile), next_power_of_2(share), 16)  # tl.dot takes 16 or more
    tiles = -(-rows.count_max // (query_rows // share))
    _attend_kernel[(rows.starts.numel() * tiles, kv_heads, splits)](
        query, cache, rows.tables, rows.token_offsets, rows.starts, partial, log_sums,
        tokens, tiles, rows.tables.stride(0), query.stride(0),
        rule.scale, rule.window_tokens or 0, rule.soft_cap or 0.0,
        KV_HEADS=kv_heads, SHARE=share, D=head_dim, BLOCK_TOKENS=block_tokens,
        QUERY_ROWS=query_rows, KEYS=tile, DIMS=max(16, next_power_of_2(head_dim)),
        SPLIT=SPLIT_TOKENS if splits > 1 else 0,
        WINDOWED=rule.window_tokens is not None, CAPPED=rule.soft_cap is not None,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(tokens * heads,)](
            partial, log_sums, out, tokens * heads, splits,
            D=head_dim, DIMS=next_power_of_2(head_dim),
        )  # fmt: skip
    return out


def _refuse_shapes(
    query: torch.Tensor, cache: torch.Tensor, rows: PagedRows, rule: AttentionRule
) -> None:
    """Check the kernel's assumptions, because a wrong address raises no error on a GPU."""
    if query.ndim != 3 or cache.ndim != 5 or query.shape[2] != cache.shape[4]:
        raise ValueError(
            f"expected query [T, A, D] and cache [blocks, 2, K, block_tokens, D], "
            f"got {list(query.shape)} and {list(cache.shape)}"
        )
    if query.shape[1] % cache.shape[2]:
        raise ValueError(
            f"{query.shape[1]} query heads can't share {cache.shape[2]} KV heads evenly"
        )
    if query.dtype != cache.dtype:
        raise ValueError(f"query is {query.dtype} and the cache {cache.dtype}; both must agree")
    if not cache.is_contiguous() or query.stride()[1:] != (query.shape[2], 1):
        raise ValueError("cache must be contiguous, and so must each token's heads in query")
    if rows.tables.stride(1) != 1 or rows.token_offsets.numel() != rows.starts.numel() + 1:
        raise ValueError(
            f"rows of tables must be contiguous, and token_offsets one longer than starts; got "
            f"{rows.token_offsets.numel()} offsets and {rows.starts.numel()} starts"
        )
    if rule.window_tokens is not None and rule.window_tokens < 1:
        raise ValueError(f"window_tokens must be at least 1, got {rule.window_tokens}")


@jit
def _bounds(
    first, end, window, split, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr
):
    """Return the positions of a split that queries at [first, end) may attend to,
    from a tile's start."""
    low = 0
    high = end
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0)
    if SPLIT > 0:
        low = tl.maximum(low, split * SPLIT)
        high = tl.minimum(high, (split + 1) * SPLIT)
    return low // KEYS * KEYS, high


@jit
def _scores(
    query, key, distance, window, scale, soft_cap, WINDOWED: tl.constexpr, CAPPED: tl.constexpr
):
    """Return scores of keys ``distance`` positions before each query; -inf if masked. [M, KEYS]"""
    score = product(query, tl.trans(key)) * scale
    if CAPPED:
        score = capped(score, soft_cap)
    is_attended = distance >= 0
    if WINDOWED:
        is_attended = is_attended & (distance < window)
    return tl.where(is_attended, score, float("-inf"))


@jit
def _vectors(
    table_ptr, position, is_key, kv_head, KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):
    """Return the keys' indices in the cache, in vectors of D; values are
    KV_HEADS blocks further."""
    block = tl.load(table_ptr + position // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
    return (block * 2 * KV_HEADS + kv_head) * BLOCK_TOKENS + position % BLOCK_TOKENS


@jit
def _cached(cache_ptr, vector, is_key, D: tl.constexpr, DIMS: tl.constexpr):
    """Load the vectors at these indices, 0 past the keys. [KEYS, DIMS]"""
    d = tl.arange(0, DIMS)
    inside = is_key[:, None] & (d < D)[None, :]
    return tl.load(cache_ptr + vector[:, None] * D + d[None, :], mask=inside, other=0.0)


@jit
def _folded(state, score, value):
    """Return the running softmax after one more tile of keys with scores [M, KEYS]."""
    peak, total, summed = state
    new_peak = tl.maximum(peak, tl.max(score, axis=1))
    # A tile may be fully masked for a query: -inf minus -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp(score - base[:, None])
    shrink = tl.exp(peak - base)
    total = total * shrink + tl.sum(weight, axis=1)
    summed = summed * shrink[:, None] + product(weight.to(value.dtype), value)
    return new_peak, total, summed


@jit(do_not_specialize=["tokens", "window"])
def _attend_kernel(
    query_ptr,  # [T, A, D]
    cache_ptr,  # [blocks, 2, K, BLOCK_TOKENS, D]
    tables_ptr,  # [R, B]
    offsets_ptr,  # [R + 1]
    starts_ptr,  # [R]
    out_ptr,  # [T, A, D], or [Z, T, A, D] float32 with SPLIT
    log_sums_ptr,  # [Z, T, A] float32, with SPLIT
    tokens,  # T
    tiles,  # of the longest row's query tokens
    table_stride,
    token_stride,
    scale,
    window,
    soft_cap,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # G
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT: tl.constexpr,  # context positions of a split; 0 for a single split
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One program per row and tile of query tokens, KV head, and split."""
    row = tl.program_id(0) // tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    queries: tl.constexpr = QUERY_ROWS // SHARE
    first_query = (tl.program_id(0) % tiles) * queries
    first_token = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - first_token
    if first_query >= count:
        return
    start = tl.load(starts_ptr + row)
    m = tl.arange(0, QUERY_ROWS)
    d = tl.arange(0, DIMS)
    query_index = first_query + m // SHARE
    head = kv_head * SHARE + m % SHARE
    is_query = (m // SHARE < queries) & (query_index < count)
    is_element = is_query[:, None] & (d < D)[None, :]
    token = (first_token + query_index).to(tl.int64)  # int64: T * A * D may pass 2^31
    query_at = query_ptr + (token * token_stride + head * D)[:, None] + d[None, :]
    query = tl.load(query_at, mask=is_element, other=0.0)

    end_query = tl.minimum(first_query + queries, count)
    low, high = _bounds(
        start + first_query, start + end_query, window, split, KEYS, SPLIT, WINDOWED
    )
    table_ptr = tables_ptr + row * table_stride
    peak = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    summed = tl.zeros([QUERY_ROWS, DIMS], tl.float32)
    for tile in range(low, high, KEYS):
        position = tile + tl.arange(0, KEYS)
        is_key = position < high
        vector = _vectors(table_ptr, position, is_key, kv_head, KV_HEADS, BLOCK_TOKENS)
        key = _cached(cache_ptr, vector, is_key, D, DIMS)
        value = _cached(cache_ptr, vector + KV_HEADS * BLOCK_TOKENS, is_key, D, DIMS)
        distance = (start + query_index)[:, None] - position[None, :]
        score = _scores(query, key, distance, window, scale, soft_cap, WINDOWED, CAPPED)
        peak, total, summed = _folded((peak, total, summed), score, value)
    # A split may be fully masked for a query; NaN stays NaN and is reported by the sampler.
    total = tl.where(total == 0, 1.0, total)
    vector = (split.to(tl.int64) * tokens + token) * (KV_HEADS * SHARE) + head
    out_at = out_ptr + vector[:, None] * D + d[None, :]
    tl.store(out_at, (summed / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_element)
    if SPLIT > 0:
        tl.store(log_sums_ptr + vector, peak + tl.log(total), mask=is_query)


@jit(do_not_specialize=["vectors", "splits"])
def _merge_kernel(
    partial_ptr,  # [Z, vectors, D]
    log_sums_ptr,  # [Z, vectors], -inf where a split held nothing that is seen
    out_ptr,  # [vectors, D]
    vectors,  # T * A
    splits,
    D: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program per token and head: the splits' mean, weighted by their shares of the softmax."""
    vector = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIMS)
    peak = float("-inf")
    total = 0.0
    summed = tl.zeros([DIMS], tl.float32)
    for split in range(0, splits):
        at = vector + split * vectors
        log_sum = tl.load(log_sums_ptr + at)
        if log_sum != float("-inf"):  # not >, so that NaN is merged and detected
            mean = tl.load(partial_ptr + at * D + d, mask=d < D, other=0.0)
            new_peak = tl.maximum(peak, log_sum)
            shrink = tl.exp(peak - new_peak)
            weight = tl.exp(log_sum - new_peak)
            summed = summed * shrink + mean * weight
            total = total * shrink + weight
            peak = new_peak
    tl.store(out_ptr + vector * D + d, (summed / total).to(out_ptr.dtype.element_ty), mask=d < D)
