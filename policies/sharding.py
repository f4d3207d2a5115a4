"""Which rows of a batch does each data-parallel rank train on? Whole groups, equal counts.

It knows rows by their group and their length; who the ranks are, and when they ask, is for others.
"""

from collections.abc import Sequence

from tidegate.errors import ConfigError


def split_rows(
    group_ids: Sequence[int], lengths_tokens: Sequence[int], *, ranks: int
) -> list[list[int]]:
    """Part the rows among ``ranks``: none twice, none left out, the counts equal but for one.

    A group goes to one rank where there is room for it, the longest first and each to the rank with
    the fewest tokens so far; with groups of equal size, as many for each rank, every group does.
    Of the others, rows go one by one. Rows keep their order within a rank. (Longest first is at
    most a third above the best balance: Graham 1969, doi.org/10.1137/0117039; the equal counts
    cost some of that.)

    Raises:
        ConfigError: there is no rank to give them to.
    """
    if ranks < 1:
        raise ConfigError(f"a batch is split among ranks, at least 1; got ranks={ranks}")
    rows = len(group_ids)
    room = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    tokens = [0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]

    def give(part: list[int], size: int) -> bool:
        able = [rank for rank in range(ranks) if room[rank] >= len(part)]
        if not able:
            return False
        rank = min(able, key=lambda r: (tokens[r], r))
        chosen[rank] += part
        room[rank] -= len(part)
        tokens[rank] += size
        return True

    left: list[int] = []
    for part in _longest_first(group_ids, lengths_tokens):
        if not give(part, sum(lengths_tokens[row] for row in part)):
            left += part
    for row in sorted(left, key=lambda row: (-lengths_tokens[row], row)):
        give([row], lengths_tokens[row])
    return [sorted(part) for part in chosen]


def _longest_first(group_ids: Sequence[int], lengths_tokens: Sequence[int]) -> list[list[int]]:
    """The rows of each group; by tokens, the most first."""
    groups: dict[int, list[int]] = {}
    for row, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(row)
    parts = list(groups.values())
    return sorted(parts, key=lambda part: (-sum(lengths_tokens[r] for r in part), part[0]))
