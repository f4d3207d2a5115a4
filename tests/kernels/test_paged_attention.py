from dataclasses import replace

import numpy as np
import pytest
import torch

from tidegate.kernels import paged_attention as module
from tidegate.kernels.attention import CacheShape, attend, plan_group, scratch_elements
from tidegate.kernels.paged_attention import (
    AttentionRule,
    PagedRows,
    paged_attention_triton,
)

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Case = tuple[torch.Tensor, torch.Tensor, PagedRows, AttentionRule]


def paged_attention_reference(
    query: torch.Tensor, cache: torch.Tensor, rows: PagedRows, rule: AttentionRule
) -> torch.Tensor:
    """Reference of :func:`paged_attention_triton`, token by token. Slow and obviously right."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    offsets = rows.token_offsets.tolist()
    for row, start in enumerate(rows.starts.tolist()):
        context = cache[rows.tables[row].long()].float()  # [B, 2, K, block_tokens, D]
        keys, values = context.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [K, C, D]
        for position, token in enumerate(range(offsets[row], offsets[row + 1]), start):
            window = rule.window_tokens or position + 1
            attended = slice(max(0, position + 1 - window), position + 1)
            grouped = query[token].float().view(keys.shape[0], -1, keys.shape[2])  # [K, G, D]
            scores = rule.scale * grouped @ keys[:, attended].mT
            if rule.soft_cap is not None:
                scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
            out[token] = (torch.softmax(scores, -1) @ values[:, attended]).flatten(0, 1)
    return out


def make_case(
    starts: list[int],
    counts: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Return rows in a cache whose other slots hold values that would be noticed in a sum."""
    random = np.random.default_rng(len(starts) + sum(starts) + head_dim)
    generator = torch.Generator().manual_seed(int(random.integers(1000)))
    blocks = -(-max(map(sum, zip(starts, counts, strict=True))) // block_tokens)
    tables = random.permutation(len(starts) * blocks).reshape(-1, blocks)
    shape = (tables.size, 2, heads[1], block_tokens, head_dim)
    cache = torch.randn(shape, generator=generator)
    for table, start, count in zip(tables, starts, counts, strict=True):
        for position in range(start + count, blocks * block_tokens):
            cache[table[position // block_tokens], :, :, position % block_tokens] = 1e4
    query = torch.randn(sum(counts), heads[0], head_dim, generator=generator)
    rows = PagedRows(
        token_offsets=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE),
        starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        tables=torch.tensor(tables, dtype=torch.int32, device=DEVICE),
        count_max=max(counts),
    )
    rule = AttentionRule(scale=head_dim**-0.5)
    return query.to(DEVICE, dtype), cache.to(DEVICE, dtype), rows, rule


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = 1e-5 if actual.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("starts", "counts"),
    [([0, 3, 4, 17, 70], [1, 1, 1, 1, 1]), ([5, 0, 62], [4, 4, 4]), ([0, 7, 16, 64], [5, 1, 3, 2])],
    ids=["decode", "equal chunks", "unequal chunks"],
)
def test_the_reference_agrees_with_what_the_engine_does_on_a_cpu(
    starts: list[int], counts: list[int]
) -> None:
    query, cache, rows, rule = make_case(starts, counts)
    shape = CacheShape(num_kv_heads=2, block_tokens=16)
    tables = rows.tables.long().cpu().numpy()
    group = plan_group(
        np.array(starts), np.array(counts), tables, shape, first_token=0, dtype=torch.float32
    )
    scratch = torch.empty(scratch_elements([group], cache))

    expected = attend(query.cpu(), cache.cpu(), group, scratch)

    actual = paged_attention_reference(query, cache, rows, rule)
    torch.testing.assert_close(actual.flatten(1).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 2), 16), ((4, 2), 32), ((4, 1), 64), ((6, 2), 24)]
)
@pytest.mark.parametrize(
    ("starts", "counts"),
    [([0, 15, 16, 64], [1, 1, 1, 1]), ([0, 7, 60], [5, 1, 4])],
    ids=["decode", "chunks"],
)
def test_rows_attend_as_the_reference_does(
    starts: list[int],
    counts: list[int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    case = make_case(starts, counts, heads=heads, head_dim=head_dim, dtype=dtype)

    assert_close(paged_attention_triton(*case), paged_attention_reference(*case))


@pytest.mark.parametrize("window_tokens", [1, 5, 16, 40, 1000])
@pytest.mark.parametrize("counts", [[1, 1], [3, 5]], ids=["decode", "chunks"])
def test_a_sliding_window_masks_older_positions(window_tokens: int, counts: list[int]) -> None:
    query, cache, rows, rule = make_case([90, 2], counts)
    rule = replace(rule, window_tokens=window_tokens)

    expected = paged_attention_reference(query, cache, rows, rule)

    assert_close(paged_attention_triton(query, cache, rows, rule), expected)


@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_scores_are_capped_softly_however_large(soft_cap: float) -> None:
    query, cache, rows, rule = make_case([20, 3], [2, 5])
    rule = replace(rule, soft_cap=soft_cap, scale=30.0)

    expected = paged_attention_reference(query, cache, rows, rule)

    assert_close(paged_attention_triton(query, cache, rows, rule), expected)


def test_more_query_tokens_than_a_tile_holds_are_spread_over_programs() -> None:
    case = make_case([3, 0], [45, 2], heads=(3, 1))  # 10 query tokens a tile of 32

    assert_close(paged_attention_triton(*case), paged_attention_reference(*case))


@pytest.mark.parametrize("block_tokens", [1, 4, 48])
def test_blocks_may_have_any_size(block_tokens: int) -> None:
    case = make_case([30, 5], [1, 3], block_tokens=block_tokens)

    assert_close(paged_attention_triton(*case), paged_attention_reference(*case))


@pytest.mark.parametrize("window_tokens", [None, 20])
def test_a_long_context_is_split_and_merged(
    window_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, cache, rows, rule = make_case([0, 200, 63, 64, 127], [1, 2, 1, 1, 2])
    rule = replace(rule, window_tokens=window_tokens)
    whole = paged_attention_triton(query, cache, rows, rule)
    monkeypatch.setattr(module, "SPLIT_TOKENS", 64)

    split = paged_attention_triton(query, cache, rows, rule)

    assert_close(split, paged_attention_reference(query, cache, rows, rule))
    assert not torch.equal(split, whole)  # or nothing was split


@pytest.mark.parametrize("hurt", ["key", "value"])
def test_a_split_that_is_no_number_is_not_merged_away(
    hurt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, cache, rows, rule = make_case([200], [1])
    monkeypatch.setattr(module, "SPLIT_TOKENS", 64)
    block = int(rows.tables[0, 5])  # positions 80 to 95: all in the second of four splits
    cache[block, 0 if hurt == "key" else 1] = torch.nan

    assert paged_attention_triton(query, cache, rows, rule).isnan().all()


def test_what_a_decoding_row_gets_does_not_depend_on_the_rows_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SPLIT_TOKENS", 64)
    query, cache, rows, rule = make_case([10, 300, 100], [1, 1, 1])

    together = paged_attention_triton(query, cache, rows, rule)

    for row, blocks in enumerate([1, 19, 7]):
        alone = PagedRows(
            token_offsets=rows.token_offsets[:2],
            starts=rows.starts[row : row + 1],
            tables=rows.tables[row : row + 1, :blocks].contiguous(),
            count_max=1,
        )
        apart = paged_attention_triton(query[row : row + 1], cache, alone, rule)
        assert torch.equal(apart, together[row : row + 1])


def test_queries_may_be_part_of_a_wider_tensor() -> None:
    query, cache, rows, rule = make_case([4], [3])
    wide = torch.cat([query, torch.full_like(query, torch.nan)], dim=1)

    actual = paged_attention_triton(wide[:, : query.shape[1]], cache, rows, rule)

    assert_close(actual, paged_attention_reference(query, cache, rows, rule))


def test_shapes_that_would_give_wrong_addresses_are_refused() -> None:
    query, cache, rows, rule = make_case([4], [3])

    with pytest.raises(ValueError, match="4 query heads can't share 3 KV heads"):
        paged_attention_triton(query, cache.new_zeros(2, 2, 3, 16, 16), rows, rule)
    with pytest.raises(ValueError, match="both must agree"):
        paged_attention_triton(query.bfloat16(), cache, rows, rule)
    with pytest.raises(ValueError, match="window_tokens must be at least 1, got 0"):
        paged_attention_triton(query, cache, rows, replace(rule, window_tokens=0))
