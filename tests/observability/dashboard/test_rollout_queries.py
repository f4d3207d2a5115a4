"""Filters, searches and orders of the dashboard's list of rollouts."""

import math

import pytest

from tidegate.errors import ConfigError
from tidegate.observability.dashboard.rollout_queries import RolloutQuery
from tidegate.observability.metrics.snapshots import RolloutLine


def line(rollout_id: int, **fields: object) -> RolloutLine:
    known: dict[str, object] = {
        "rollout_id": rollout_id,
        "group_id": 0,
        "index": 0,
        "state": "trained",
        "reason": "",
        "fork_reason": "",
        "context_tokens": 8,
        "turns": 1,
        "reward": 1.0,
        "staleness": 0,
        "oldest_version": 0,
        "newest_version": 0,
        "task": "1+1",
    }
    return RolloutLine(**{**known, **fields})  # type: ignore[arg-type]


LINES = [
    line(1, reward=0.5, staleness=2),
    line(2, reward=None, staleness=None, state="discarded", reason="stale"),
    line(3, reward=math.nan, fork_reason="compaction", newest_version=1),
    line(4, reward=0.25, staleness=1, group_id=7),
]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, [1, 2, 3, 4]),
        ({"state": "discarded"}, [2]),
        ({"group": "7"}, [4]),
        ({"mixed": "1"}, [3]),
        ({"reason": "STALE"}, [2]),
        ({"reason": "compact"}, [3]),
        ({"reward_min": "0.3"}, [1]),
        ({"reward_max": "0.3"}, [4]),
        ({"staleness_min": "1"}, [1, 4]),
        ({"staleness_max": "1"}, [3, 4]),
        ({"staleness_min": "1", "reward_max": "0.4"}, [4]),
    ],
)
def test_a_filter_selects_its_rollouts(query: dict[str, str], ids: list[int]) -> None:
    parsed = RolloutQuery.parse(query)
    assert [each.rollout_id for each in LINES if parsed.matches(each)] == ids


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, [1, 2, 3, 4]),
        ({"sort": "reward"}, [4, 1, 2, 3]),
        ({"sort": "reward", "descending": "1"}, [1, 4, 2, 3]),
        ({"sort": "rollout_id", "descending": "1"}, [4, 3, 2, 1]),
    ],
)
def test_rollouts_without_a_value_come_last_in_both_orders(
    query: dict[str, str], ids: list[int]
) -> None:
    assert [each.rollout_id for each in RolloutQuery.parse(query).ordered(LINES)] == ids


def test_evaluations_follow_the_trainings_rollouts_unless_an_order_is_asked_for() -> None:
    lines = [line(1, group_id=-3), line(2, group_id=0), line(3, group_id=-1), line(4, group_id=1)]
    assert [each.rollout_id for each in RolloutQuery().ordered(lines)] == [2, 4, 1, 3]


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"state": "lost"}, "state must be one of running"),
        ({"sort": "colour"}, "sort must be one of rollout_id"),
        ({"group": "x"}, "group must be a whole number, got 'x'"),
        ({"skip": "-1"}, "skip must be 0 or more"),
        ({"reward_min": "high"}, "reward_min must be a number, got 'high'"),
        ({"staleness_max": "9" * 30}, "staleness_max must be a whole number"),
        ({"text": "x" * 201}, "text may have 200 characters, got 201"),
    ],
)
def test_an_invalid_query_is_refused_with_what_is_allowed(
    query: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        RolloutQuery.parse(query)
