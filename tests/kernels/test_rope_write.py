from typing import Any

import pytest
import torch

from tidegate.kernels.rope import apply_rope, rope_table
from tidegate.kernels.rope_write import (
    NO_SLOT,
    rope_write_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, BLOCK_TOKENS, POSITIONS = 5, 16, 90


def rope_write_reference(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    *,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Reference of :func:`rope_write_triton`, step by step. Slow and obviously right."""
    kv_heads, block_tokens = cache.shape[2:4]
    rotations = table[positions].float()  # [T, 2, D]
    turned = apply_rope(qkv[:, :-kv_heads].float(), rotations[:, :1], rotations[:, 1:])
    turned = turned.to(qkv.dtype)
    is_stored = slots != NO_SLOT
    block, offset = slots[is_stored] // block_tokens, slots[is_stored] % block_tokens
    cache[block, 0, :, offset] = turned[is_stored, -kv_heads:]
    cache[block, 1, :, offset] = qkv[is_stored, -kv_heads:]
    return turned[:, :-kv_heads].contiguous()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 16), (7, 6, 2, 32), (5, 4, 1, 64), (3, 40, 8, 64), (4, 3, 3, 24)],
)
def test_queries_are_turned_and_keys_and_values_stored_as_the_reference_does(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    qkv, cache, where = make_case(tokens, heads, kv_heads, head_dim, dtype)
    expected_cache = cache.clone()
    expected = rope_write_reference(qkv, expected_cache, **where)

    query = rope_write_triton(qkv, cache, **where)

    # A GPU may fuse product and sum; Triton's interpreter cuts bfloat16 off where torch rounds.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(query, expected, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(cache, expected_cache, rtol=tolerance, atol=1e-6)


def test_each_token_lands_in_its_slot_and_nowhere_else() -> None:
    qkv, cache, where = make_case(3, 2, 1, 16, torch.float32)
    where["positions"] = torch.zeros_like(where["positions"])  # not turned

    rope_write_triton(qkv, cache, **where)

    by_slot = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)[:, :, 0]  # [slots, 2, D]
    slots = where["slots"]
    assert torch.equal(by_slot[slots], qkv[:, 2:])
    assert (by_slot == 7.0).all(-1).all(-1).sum() == len(by_slot) - 3


@pytest.mark.parametrize("write", [rope_write_reference, rope_write_triton])
def test_a_token_without_a_slot_is_turned_and_not_stored(write: Any) -> None:
    qkv, cache, where = make_case(3, 2, 1, 16, torch.float32)
    expected, expected_cache = rope_write_reference(qkv, cache.clone(), **where), cache.clone()
    others = {name: each if name == "table" else each[1:] for name, each in where.items()}
    rope_write_reference(qkv[1:], expected_cache, **others)
    where["slots"][0] = NO_SLOT

    torch.testing.assert_close(write(qkv, cache, **where), expected)
    torch.testing.assert_close(cache, expected_cache)


def test_the_rotation_is_the_cpu_engines() -> None:
    qkv, cache, where = make_case(6, 4, 2, 32, torch.float32)
    rotations = where["table"][where["positions"]]

    query = rope_write_triton(qkv, cache, **where)

    expected = apply_rope(qkv[:, :4], rotations[:, :1], rotations[:, 1:])
    torch.testing.assert_close(query, expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    qkv, cache, where = make_case(3, 2, 1, 16, torch.float32)

    with pytest.raises(ValueError, match="expected qkv"):
        rope_write_triton(qkv[:, :2].contiguous(), cache, **where)
    with pytest.raises(ValueError, match="one slot for each of 3 tokens"):
        rope_write_triton(qkv, cache, **where | {"slots": where["slots"][:2]})
