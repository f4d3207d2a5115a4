"""GPU kernel that rotates queries and keys, and writes keys and values to the paged KV cache.

In separate kernels a GPU would read and write keys three times (rotate, concatenate with the
values, store). The rotation is that of :mod:`tidegate.kernels.rope`, but computed in float32 and
rounded once.

Source: RoFormer, arXiv:2104.09864.

Letters in shapes: T tokens, A query heads, K KV heads, D head_dim, P positions.
"""

import torch

from tidegate.kernels.optional_triton import jit, next_power_of_2, tl

TILE_ELEMENTS = 1024
"""Elements of one program: 8 heads with D = 128, which is 8 elements for each of 128 threads."""

NO_SLOT = -1
"""Slot of tokens whose keys and values are not stored."""


def rope_write_triton(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    *,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys by their positions, and store keys and values in the cache.

    Runs on a CPU only with Triton's interpreter.

    Args:
        qkv: [T, A + 2K, D], contiguous: each token's query, key and value heads.
        cache: [blocks, 2, K, block_tokens, D] of one layer, contiguous, of ``qkv``'s dtype.
        table: [P, 2, D] of :func:`~tidegate.kernels.rope.rope_table`.
        positions: [T], int64, each in [0, P).
        slots: [T], int64: ``block * block_tokens + offset`` of each token, no two alike; or
            :data:`NO_SLOT`, for tokens that are not stored.

    Returns:
        The rotated queries [T, A, D], fresh memory.
    """
    tokens, all_heads, head_dim = qkv.shape
    _, _, kv_heads, block_tokens, cache_dim = cache.shape
    heads = all_heads - 2 * kv_heads
    if heads < 1 or cache_dim != head_dim or table.shape[1:] != (2, head_dim):
        raise ValueError(
            f"expected qkv [T, A + 2K, D], cache [blocks, 2, K, block_tokens, D] and table "
            f"[P, 2, D], got {list(qkv.shape)}, {list(cache.shape)} and {list(table.shape)}"
        )
    if not (qkv.is_contiguous() and cache.is_contiguous() and table.is_contiguous()):
        raise ValueError("qkv, cache and table must be contiguous")
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(
            f"expected one position and one slot for each of {tokens} tokens, "
            f"got {list(positions.shape)} and {list(slots.shape)}"
        )
    query = qkv.new_empty(tokens, heads, head_dim)
    dims = next_power_of_2(head_dim)
    head_tile = min(next_power_of_2(all_heads), max(1, TILE_ELEMENTS // dims))
    if tokens:
        _rope_write_kernel[(tokens, -(-all_heads // head_tile))](
            qkv, cache, table, positions, slots, query,
            HEADS=heads, KV_HEADS=kv_heads, BLOCK_TOKENS=block_tokens, D=head_dim,
            HEAD_TILE=head_tile, DIMS=dims,
        )  # fmt: skip
    return query


@jit
def _rope_write_kernel(
    qkv_ptr,  # [T, A + 2K, D]
    cache_ptr,  # [blocks, 2, K, BLOCK_TOKENS, D]
    table_ptr,  # [P, 2, D]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    query_ptr,  # [T, A, D] out
    HEADS: tl.constexpr,  # A
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    D: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program per token and tile of heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    d = tl.arange(0, DIMS)
    other_d = (d + D // 2) % D
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    inside = (head < all_heads)[:, None] & (d < D)[None, :]
    vector = (token * all_heads + head) * D
    x = tl.load(qkv_ptr + vector[:, None] + d[None, :], mask=inside, other=0.0)
    other = tl.load(qkv_ptr + vector[:, None] + other_d[None, :], mask=inside, other=0.0)
    rotation = table_ptr + tl.load(positions_ptr + token) * 2 * D + d
    cosine = tl.load(rotation, mask=d < D, other=0.0).to(tl.float32)
    sine = tl.load(rotation + D, mask=d < D, other=0.0).to(tl.float32)
    turned = x.to(tl.float32) * cosine[None, :] + other.to(tl.float32) * sine[None, :]
    is_value = head >= HEADS + KV_HEADS
    out = tl.where(is_value[:, None], x, turned.to(x.dtype))

    is_query = head < HEADS
    query_at = (token * HEADS + head) * D
    tl.store(query_ptr + query_at[:, None] + d[None, :], out, mask=inside & is_query[:, None])
    slot = tl.load(slots_ptr + token)
    # Keys are heads [0, K) of a block, values [K, 2K): the same order as in qkv.
    cache_head = slot // BLOCK_TOKENS * 2 * KV_HEADS + (head - HEADS)
    cache_at = (cache_head * BLOCK_TOKENS + slot % BLOCK_TOKENS) * D
    is_stored = head >= tl.where(slot >= 0, HEADS, all_heads)
    tl.store(cache_ptr + cache_at[:, None] + d[None, :], out, mask=inside & is_stored[:, None])
