from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tidegate.kernels.attention import (
    CacheShape,
    RowGroup,
    attend,
    plan_group,
    scratch_elements,
    write_index,
    write_kv,
)

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 6, 2, 8, 4
SHAPE = CacheShape(KV_HEADS, BLOCK_TOKENS)


@dataclass
class Case:
    """Rows with whole contexts in a cache, whose last ``counts`` tokens are queries."""

    starts: np.ndarray[tuple[int], np.dtype[np.int64]]
    counts: np.ndarray[tuple[int], np.dtype[np.int64]]
    tables: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    cache: torch.Tensor

    def group(self, **options: Any) -> RowGroup:
        """Return the plan of a step that computes all rows together."""
        rows = (self.starts, self.counts, self.tables)
        return plan_group(*rows, SHAPE, first_token=0, dtype=torch.float32, **options)


def make_case(starts: list[int], counts: list[int]) -> Case:
    generator = torch.Generator().manual_seed(0)
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    blocks = -(-max(ends) // BLOCK_TOKENS)
    tables = np.random.default_rng(0).permutation(len(ends) * blocks).reshape(len(ends), blocks)
    keys = [torch.randn(end, KV_HEADS, HEAD_DIM, generator=generator) for end in ends]
    values = [torch.randn(end, KV_HEADS, HEAD_DIM, generator=generator) for end in ends]
    queries = [torch.randn(count, HEADS, HEAD_DIM, generator=generator) for count in counts]
    # What no row wrote is no number, as another's overflow leaves it: even masked, it would spread.
    cache = torch.full((tables.size, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), torch.nan)
    for table, key, value in zip(tables, keys, values, strict=True):
        block, offset = np.divmod(np.arange(len(key)), BLOCK_TOKENS)
        write_kv(cache, write_index(table[block], offset, SHAPE), torch.cat([key, value], 1))
    return Case(np.array(starts), np.array(counts), tables, keys, values, queries, cache)


def naive_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float = HEAD_DIM**-0.5,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one query token's attention [A, D] over its context [C, K, D], head by head."""
    outputs = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = keys[:, shared] @ query[head] * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1]])
        weights = torch.softmax(scores, -1)[: len(keys)]
        outputs.append(weights @ values[:, shared])
    return torch.cat(outputs)


shapes = pytest.mark.parametrize(
    ("starts", "counts"),
    [
        ([0], [1]),
        ([0, 3, 4, 11], [1, 1, 1, 1]),
        ([0], [9]),
        ([5, 0, 2], [4, 4, 4]),
        ([0, 7, 3, 12], [5, 1, 4, 2]),
    ],
    ids=["first token", "decode", "one prompt", "equal chunks", "unequal chunks"],
)


@shapes
def test_padded_rows_attend_to_their_own_contexts_up_to_each_query(
    starts: list[int], counts: list[int]
) -> None:
    case = make_case(starts, counts)
    group = case.group()
    scratch = torch.empty(scratch_elements([group], case.cache))

    outputs = attend(torch.cat(case.queries), case.cache, group, scratch)

    expected = [
        naive_attention(query, case.keys[row][: position + 1], case.values[row][: position + 1])
        for row, queries in enumerate(case.queries)
        for position, query in enumerate(queries, start=starts[row])
    ]
    torch.testing.assert_close(outputs, torch.stack(expected))


@pytest.mark.parametrize(("start", "count"), [(0, 9), (5, 4), (1, 6), (300, 40)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_chunk_attends_without_a_mask_to_its_whole_context_up_to_each_query(
    start: int, count: int, scale: float | None
) -> None:
    case = make_case([start], [count])
    group = case.group(needs_mask=False)
    assert group.mask is None
    scratch = torch.empty(scratch_elements([group], case.cache))
    [queries], [keys], [values] = case.queries, case.keys, case.values
    given: dict[str, Any] = {} if scale is None else {"scale": scale}
    expected = torch.stack(
        [
            naive_attention(query, keys[: position + 1], values[: position + 1], **given)
            for position, query in enumerate(queries, start=start)
        ]
    )
    outputs = attend(queries, case.cache, group, scratch, scale=scale)
    torch.testing.assert_close(outputs, expected)
    short = case.cache.bfloat16()
    outputs = attend(queries.bfloat16(), short, group, scratch.bfloat16(), scale=scale)
    torch.testing.assert_close(outputs.float(), expected, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("window_tokens", [None, 3])
def test_there_is_a_mask_where_rows_share_a_call_or_have_a_window(
    window_tokens: int | None,
) -> None:
    for starts, counts in (([5, 2], [4, 4]), ([0, 3], [1, 1]), ([5], [4]), ([7], [1])):
        case = make_case(starts, counts)
        group = case.group(window_tokens=window_tokens, needs_mask=False)
        assert (group.mask is None) == (window_tokens is None and counts == [4])


@shapes
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-3, 3, HEADS)])
@pytest.mark.parametrize("window_tokens", [None, 1, 3, 4, 5, 9])
def test_queries_see_their_window_only_and_scores_are_scaled_capped_and_joined_by_sinks(
    starts: list[int],
    counts: list[int],
    window_tokens: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    case = make_case(starts, counts)
    group = case.group(window_tokens=window_tokens)
    scratch = torch.empty(scratch_elements([group], case.cache))

    queries = torch.cat(case.queries)
    options: dict[str, Any] = {"scale": 0.5, "soft_cap": soft_cap, "sinks": sinks}
    outputs = attend(queries, case.cache, group, scratch, **options)

    expected = []
    for row, its_queries in enumerate(case.queries):
        for position, query in enumerate(its_queries, start=starts[row]):
            first = 0 if window_tokens is None else max(0, position + 1 - window_tokens)
            keys, values = (all_[row][first : position + 1] for all_ in (case.keys, case.values))
            expected.append(naive_attention(query, keys, values, **options))
    torch.testing.assert_close(outputs, torch.stack(expected))


def test_blocks_before_the_window_are_not_gathered() -> None:
    case = make_case([40, 30], [1, 3])
    group = case.group(window_tokens=6)

    # Positions 35 to 40 are in blocks 8 to 10, positions 25 to 32 in blocks 6 to 8.
    assert group.gather.numel() == 2 * 2 * KV_HEADS * 3
