"""Tests that the right turns move, only where there is room, and deterministically."""

import random
from collections import Counter

import pytest

from tidegate.policies.migration import (
    EngineView,
    EvenOut,
    LongTailLane,
    MigrationPolicy,
    Move,
    RunningTurn,
)

Running = dict[str, list[RunningTurn]]


def views(policy: MigrationPolicy, running: Running, closed: str = "") -> list[EngineView]:
    """Return the views that a core would pass for these engines."""
    reserved = policy.reserve(sorted(running))
    return [
        EngineView(
            name=name,
            is_reserved=name in reserved,
            is_open=name not in closed,
            num_turns=len(running[name]),
            turns=iter(running[name]),
        )
        for name in sorted(running)
    ]


def long_turns(*priorities: int, first_handle: int = 0, tokens: int = 100) -> list[RunningTurn]:
    return [RunningTurn(first_handle + i, p, tokens) for i, p in enumerate(priorities)]


LANE = LongTailLane(min_tokens=100, engines=1, slots=2)


# ---------------------------------------------------------------- LongTailLane


def test_the_oldest_groups_long_turns_move_to_the_lane_while_it_has_room() -> None:
    running = {"a": [], "b": long_turns(5, 1), "c": long_turns(3, first_handle=2)}
    assert LANE.moves(views(LANE, running)) == [Move("b", 1, "a"), Move("c", 2, "a")]
    running["a"] = long_turns(0, first_handle=7)
    assert LANE.moves(views(LANE, running)) == [Move("b", 1, "a")]
    running["a"] = long_turns(0, 0, first_handle=7)
    assert LANE.moves(views(LANE, running)) == []


def test_a_turn_that_is_not_long_yet_stays() -> None:
    running: Running = {"a": [], "b": long_turns(0, tokens=99)}
    assert LANE.moves(views(LANE, running)) == []


def test_nothing_moves_to_a_lane_that_may_get_no_turns() -> None:
    running: Running = {"a": [], "b": long_turns(0)}
    assert LANE.moves(views(LANE, running, closed="a")) == []


def test_the_lane_leaves_an_engine_for_turns_that_begin() -> None:
    lane = LongTailLane(engines=3)
    assert lane.reserve(["a", "b", "c", "d", "e"]) == ["a", "b", "c"]
    assert lane.reserve(["a", "b"]) == ["a"]
    assert lane.reserve(["a"]) == []
    assert lane.reserve([]) == []


def test_turns_are_spread_over_the_lanes_engines() -> None:
    lane = LongTailLane(min_tokens=1, engines=2, slots=3)
    running = {"a": long_turns(0, first_handle=50), "b": [], "c": long_turns(*range(9))}
    assert [move.to for move in lane.moves(views(lane, running))] == ["b", "a", "b", "a", "b"]


@pytest.mark.parametrize("name", ["min_tokens", "engines", "slots", "check_steps"])
def test_a_lane_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        LongTailLane(**{name: 0})


# ---------------------------------------------------------------- EvenOut


def test_the_fullest_gives_half_of_what_it_has_more_the_longest_first() -> None:
    policy = EvenOut(gap_turns=4)
    full = [RunningTurn(handle, 0, tokens) for handle, tokens in enumerate((5, 90, 10, 80))]
    assert policy.moves(views(policy, {"a": full, "b": []})) == [
        Move("a", 1, "b"),
        Move("a", 3, "b"),
    ]
    assert policy.moves(views(policy, {"a": full[:3], "b": []})) == []


def test_turns_that_were_evened_out_stay() -> None:
    chance = random.Random(3)
    policy = EvenOut(gap_turns=2)
    handles = iter(range(1000))
    running = {
        name: [RunningTurn(next(handles), 0, chance.randrange(50)) for _ in range(turns)]
        for name, turns in zip("abcd", (17, 3, 0, 9), strict=True)
    }
    rounds = 0
    while moves := policy.moves(views(policy, running)):
        carry_out(moves, running)
        rounds += 1
        assert rounds < 30
    assert max(map(len, running.values())) - min(map(len, running.values())) < 2


@pytest.mark.parametrize(("name", "least"), [("gap_turns", 2), ("check_steps", 1)])
def test_evening_out_to_and_fro_is_refused(name: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= {least}"):
        EvenOut(**{name: least - 1})


# ---------------------------------------------------------------- all policies


def carry_out(moves: list[Move], running: Running) -> None:
    for move in moves:
        turn = next(turn for turn in running[move.engine] if turn.handle == move.handle)
        running[move.engine].remove(turn)
        running[move.to].append(turn)


@pytest.mark.parametrize(
    "policy",
    [
        MigrationPolicy(),
        LongTailLane(min_tokens=20, engines=2, slots=4),
        LongTailLane(min_tokens=1, engines=9, slots=1),
        EvenOut(gap_turns=3),
    ],
    ids=["none", "lane for few", "lane for all", "even out"],
)
def test_whatever_runs_a_turn_moves_once_between_two_engines_that_are_there(
    policy: MigrationPolicy,
) -> None:
    chance = random.Random(4)
    for _ in range(300):
        names = [f"engine-{number}" for number in range(chance.randint(1, 6))]
        handles = iter(range(1000))
        running = {
            name: [
                RunningTurn(next(handles), chance.randrange(5), chance.randrange(60))
                for _ in range(chance.randrange(12))
            ]
            for name in names
        }
        moves = policy.moves(views(policy, running))
        assert moves == policy.moves(views(policy, running))
        assert all(move.engine != move.to and move.to in running for move in moves)
        assert max(Counter(move.handle for move in moves).values(), default=1) == 1
        carry_out(moves, running)  # checks that each turn was on the engine that the move names
