"""Splits a batch's rows among data-parallel ranks: whole groups where possible, equal row counts.

The orchestrator's batches call :func:`split_rows` for trainers with several ranks.
"""

from collections.abc import Sequence

from tidegate.errors import ConfigError


def split_rows(
    group_ids: Sequence[int], lengths_tokens: Sequence[int], *, ranks: int
) -> list[list[int]]:
    """Return each rank's row numbers: every row once, and row counts that differ by at most one.

    Greedy longest-processing-time-first: a whole group goes to the rank with the fewest tokens so
    far that has room for it, the largest groups first. With groups of equal size that divide
    evenly, every group stays whole; the rows of the remaining groups are dealt one by one. Rows
    keep their order within a rank. (Longest first is at most a third above the best balance: Graham
    1969, doi.org/10.1137/0117039; the equal counts cost some of that.)

    Raises:
        ConfigError: ``ranks`` is less than 1.
    """
    if ranks < 1:
        raise ConfigError(f"a batch is split among ranks, at least 1; got ranks={ranks}")
    rows = len(group_ids)
    rows_left = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    tokens = [0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]

    def assign(part: list[int], part_tokens: int) -> bool:
        candidates = [rank for rank in range(ranks) if rows_left[rank] >= len(part)]
        if not candidates:
            return False
        rank = min(candidates, key=lambda r: (tokens[r], r))
        chosen[rank] += part
        rows_left[rank] -= len(part)
        tokens[rank] += part_tokens
        return True

    unassigned: list[int] = []
    for part in _longest_first(group_ids, lengths_tokens):
        if not assign(part, sum(lengths_tokens[row] for row in part)):
            unassigned += part
    for row in sorted(unassigned, key=lambda row: (-lengths_tokens[row], row)):
        assign([row], lengths_tokens[row])
    return [sorted(part) for part in chosen]


def _longest_first(group_ids: Sequence[int], lengths_tokens: Sequence[int]) -> list[list[int]]:
    """Return the rows of each group, groups with the most tokens first."""
    groups: dict[int, list[int]] = {}
    for row, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(row)
    parts = list(groups.values())
    return sorted(parts, key=lambda part: (-sum(lengths_tokens[r] for r in part), part[0]))
