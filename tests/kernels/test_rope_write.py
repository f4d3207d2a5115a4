import pytest
import torch

from tidegate.kernels.rope import apply_rope, rope_table
from tidegate.kernels.rope_write import NO_SLOT, rope_write_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, BLOCK_TOKENS, POSITIONS = 5, 16, 90


def make_case(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(tokens + heads + head_dim)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
    cache = torch.full((BLOCKS, 2, kv_heads, BLOCK_TOKENS, head_dim), 7.0)
    frequencies = 1 / 100 ** (torch.arange(0, head_dim, 2) / head_dim)
    where = {
        "table": rope_table(frequencies, POSITIONS, dtype),
        "positions": torch.randint(0, POSITIONS, (tokens,), generator=generator),
        "slots": torch.randperm(BLOCKS * BLOCK_TOKENS, generator=generator)[:tokens],
    }
    where = {name: tensor.to(DEVICE) for name, tensor in where.items()}
    return qkv.to(DEVICE, dtype), cache.to(DEVICE, dtype), where


def written(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    *,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Write the cache in torch; return the queries."""
    kv_heads, block_tokens = cache.shape[2:4]
    rotations = table[positions].float()
    turned = apply_rope(qkv[:, :-kv_heads].float(), rotations[:, :1], rotations[:, 1:])
    turned = turned.to(qkv.dtype)
    block, offset = slots // block_tokens, slots % block_tokens
    cache[block, 0, :, offset] = turned[:, -kv_heads:]
    cache[block, 1, :, offset] = qkv[:, -kv_heads:]
    return turned[:, :-kv_heads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 16), (7, 6, 2, 32), (5, 4, 1, 64), (3, 40, 8, 64), (4, 3, 3, 24)],
)
def test_queries_are_turned_and_keys_and_values_stored_in_their_slots_only(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    qkv, cache, where = make_case(tokens, heads, kv_heads, head_dim, dtype)
    expected_cache = cache.clone()
    expected = written(qkv, expected_cache, **where)

    query = rope_write_triton(qkv, cache, **where)

    # A GPU may fuse product and sum; Triton's interpreter cuts bfloat16 off where torch rounds.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(query, expected, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(cache, expected_cache, rtol=tolerance, atol=1e-6)


def test_a_token_without_a_slot_is_turned_and_not_stored() -> None:
    qkv, cache, where = make_case(3, 2, 1, 16, torch.float32)
    expected, expected_cache = written(qkv, cache.clone(), **where), cache.clone()
    others = {name: each if name == "table" else each[1:] for name, each in where.items()}
    written(qkv[1:], expected_cache, **others)
    where["slots"][0] = NO_SLOT

    torch.testing.assert_close(rope_write_triton(qkv, cache, **where), expected)
    torch.testing.assert_close(cache, expected_cache)


def test_shapes_that_do_not_fit_are_refused() -> None:
    qkv, cache, where = make_case(3, 2, 1, 16, torch.float32)

    with pytest.raises(ValueError, match="expected qkv"):
        rope_write_triton(qkv[:, :2].contiguous(), cache, **where)
    with pytest.raises(ValueError, match="one slot for each of 3 tokens"):
        rope_write_triton(qkv, cache, **where | {"slots": where["slots"][:2]})
