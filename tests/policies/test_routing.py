"""Tests that each routing policy follows its rule without scanning all engines."""

import random

import pytest

from tidegate.policies.routing import (
    EngineLoads,
    LeastLoaded,
    PowerOfTwoChoices,
    PrefixAffinity,
    RoutingPolicy,
    SessionAffinity,
    TurnToRoute,
)


def loads_of(turns: dict[str, int], capacity: float = 10) -> EngineLoads:
    loads = EngineLoads()
    for name, count in turns.items():
        loads.set(name, count, capacity)
    return loads


def turn(number: int = 0, group_id: int = 0, kv_engine: str | None = None) -> TurnToRoute:
    return TurnToRoute(number=number, group_id=group_id, kv_engine=kv_engine)


POLICIES = [
    LeastLoaded(),
    PowerOfTwoChoices(seed=3),
    SessionAffinity(margin_turns=2),
    PrefixAffinity(margin_turns=4),
    SessionAffinity(otherwise=PrefixAffinity(otherwise=PowerOfTwoChoices())),
]


# ---------------------------------------------------------------- loads


def test_after_any_history_the_least_loaded_is_the_one_that_a_scan_would_find() -> None:
    chance = random.Random(7)
    loads = EngineLoads()
    known: dict[str, float] = {}
    for _ in range(5000):
        name = f"engine-{chance.randrange(12)}"
        if chance.random() < 0.1:
            loads.discard(name)
            known.pop(name, None)
        else:
            turns, capacity = chance.randrange(8), chance.choice((2.0, 4.0))
            known[name] = turns / capacity
            loads.set(name, turns, capacity)
        assert (
            loads.least()
            == min(((load, name) for name, load in known.items()), default=(0.0, None))[1]
        )
        assert loads.names == sorted(known)


def test_an_engine_twice_as_fast_is_as_loaded_with_twice_the_turns() -> None:
    loads = EngineLoads()
    loads.set("slow", 3, 8.0)
    loads.set("twice as fast", 6, 16.0)
    assert loads.is_near_least("twice as fast", 0)
    loads.set("slow", 2, 8.0)
    assert not loads.is_near_least("twice as fast", 1)
    assert loads.is_near_least("twice as fast", 2)


def test_an_outdated_load_is_no_measure_of_the_least() -> None:
    """An outdated heap entry may lie below every current load, never above."""
    loads = loads_of({"a": 0, "b": 9})
    loads.set("a", 8, 10)
    assert loads.is_near_least("b", 1)
    assert not loads.is_near_least("b", 0)
    assert not loads.is_near_least("never there", 100)


# ---------------------------------------------------------------- every policy


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_policy_chooses_an_allowed_engine_and_the_same_one_on_repetition(
    policy: RoutingPolicy,
) -> None:
    chance = random.Random(1)
    known: dict[str, int] = {}
    loads = EngineLoads()
    for number in range(2000):
        name = f"engine-{chance.randrange(6)}"
        if chance.random() < 0.2:
            known.pop(name, None)
            loads.discard(name)
        else:
            known[name] = chance.randrange(20)
            loads.set(name, known[name], 8.0)
        asked = turn(number, chance.randrange(-3, 50), chance.choice((None, "engine-1", "gone")))
        chosen = policy.choose(loads, asked)
        assert chosen in known if known else chosen is None
        assert policy.choose(loads_of(known, 8.0), asked) == chosen  # rebuilt, as after a crash


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_policy_leaves_no_engine_far_behind(policy: RoutingPolicy) -> None:
    turns = dict.fromkeys("abcdef", 0)
    loads = loads_of(turns)
    chance = random.Random(2)
    for number in range(600):
        engine = policy.choose(loads, turn(number, number // 4, chance.choice((None, "a"))))
        assert engine is not None
        turns[engine] += 1
        loads.set(engine, turns[engine], 10)
    assert max(turns.values()) - min(turns.values()) <= 17  # the widest margin, and one turn


# ---------------------------------------------------------------- single policies


def test_two_choices_draw_all_engines_alike_and_other_seeds_others() -> None:
    loads = loads_of(dict.fromkeys("abcdefgh", 1))
    drawn, otherwise = (
        [PowerOfTwoChoices(seed=seed).choose(loads, turn(number)) for number in range(8000)]
        for seed in (5, 6)
    )
    shares = [drawn.count(name) for name in loads.names]
    # Of equal loads the first by name: name i of 8 is it in (7 - i) of 28 pairs.
    for share, pairs in zip(shares, range(7, -1, -1), strict=True):
        assert abs(share - 8000 * pairs / 28) < 200
    assert drawn != otherwise


def test_a_rollout_stays_where_its_kv_is_up_to_the_margin_and_no_further() -> None:
    policy = SessionAffinity(margin_turns=3)
    assert policy.choose(loads_of({"a": 0, "b": 3}), turn(kv_engine="b")) == "b"
    assert policy.choose(loads_of({"a": 0, "b": 4}), turn(kv_engine="b")) == "a"
    assert policy.choose(loads_of({"a": 0, "b": 4}), turn(kv_engine="gone")) == "a"
    assert policy.choose(loads_of({"a": 0, "b": 4}), turn()) == "a"


def test_a_group_stays_together_until_its_engine_is_too_full() -> None:
    policy = PrefixAffinity(margin_turns=2)
    loads = loads_of({"a": 0, "b": 0, "c": 0})
    assert [policy.choose(loads, turn(group_id=group)) for group in range(5)] == list("abcab")
    assert policy.choose(loads_of({"a": 0, "b": 3, "c": 0}), turn(group_id=1)) == "a"


def test_a_margin_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"margin_turns .* got -1"):
        SessionAffinity(margin_turns=-1)
    with pytest.raises(ValueError, match=r"margin_turns .* got -1"):
        PrefixAffinity(margin_turns=-1)
