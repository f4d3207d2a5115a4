"""Tests of row sharding: each row once, equal counts but for one, whole groups where possible."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.policies.sharding import split_rows

BATCHES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), max_size=24)  # group, length


@given(BATCHES, st.integers(1, 7))
def test_each_row_goes_to_one_rank_and_counts_differ_by_one_at_most(
    rows: list[tuple[int, int]], ranks: int
) -> None:
    parts = split_rows([g for g, _ in rows], [n for _, n in rows], ranks=ranks)
    assert sorted(row for part in parts for row in part) == [*range(len(rows))]
    assert [*map(len, parts)] == sorted(map(len, parts), reverse=True)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part == sorted(part) for part in parts)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_groups_of_equal_size_as_many_for_each_rank_stay_whole(
    ranks: int, groups_each: int, group_size: int
) -> None:
    groups = [g for g in range(ranks * groups_each) for _ in range(group_size)]
    lengths = [(7 * row * row) % 31 + 1 for row in range(len(groups))]
    parts = split_rows(groups, lengths, ranks=ranks)
    owners = [{groups[row] for row in part} for part in parts]
    assert [len(owned) for owned in owners] == [groups_each] * ranks
    assert len(set().union(*owners)) == ranks * groups_each


def test_a_long_group_is_balanced_by_two_short_ones_where_counts_allow() -> None:
    assert split_rows([0, 1, 2, 3], [9, 1, 8, 2], ranks=2) == [[0, 1], [2, 3]]


def test_a_group_that_fits_no_rank_is_split_row_by_row() -> None:
    parts = split_rows([0, 0, 0, 1], [5, 4, 3, 9], ranks=2)
    assert parts == [[2, 3], [0, 1]] or parts == [[1, 3], [0, 2]]
