"""Draws follow the weights exactly, whatever the order in which the weights were set."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import ConfigError
from tidegate.policies.task_sampling import HardTaskReplay, PrefixSums, TaskSampler

Updates = list[tuple[int, float, bool, float | None, int]]

SIZE = 7

updates = st.lists(
    st.tuples(
        st.integers(0, SIZE - 1),
        st.sampled_from([0.0, 1e-9, 0.1, 1.0, 2.5]),
        st.booleans(),
        st.sampled_from([None, 0.0, 0.5, 1.0]),
        st.integers(0, 3),
    ),
    max_size=30,
)


def sampler_of(changes: Updates, replay: HardTaskReplay | None = None) -> TaskSampler:
    sampler = TaskSampler(SIZE, seed=3, replay=replay)
    for item, weight, is_running, reward, replays in changes:
        sampler.update(item, weight, is_running=is_running, recent_reward=reward, replays=replays)
    return sampler


@given(st.lists(st.integers(0, 9), max_size=40), st.data())
def test_prefix_sums_find_the_same_items_as_counting_them_one_by_one(
    weights: list[int], data: st.DataObject
) -> None:
    sums = PrefixSums([0] * len(weights))
    for item in data.draw(st.permutations(range(len(weights)))):
        sums[item] = weights[item]
    expected = [item for item, weight in enumerate(weights) for _ in range(weight)]
    assert sums.total == len(expected)
    assert [sums.item_at(position) for position in range(sums.total)] == expected
    assert [PrefixSums(weights).item_at(p) for p in range(sums.total)] == expected


@given(updates, st.integers(0, 1000))
def test_draws_depend_on_the_present_weights_alone(changes: Updates, number: int) -> None:
    replay = HardTaskReplay(share=0.5, times_max=2)
    newest = {change[0]: change for change in changes}
    in_order = [newest[item] for item in sorted(newest)]
    drawn = sampler_of(changes, replay).draw(number)
    assert drawn == sampler_of(in_order, replay).draw(number)


@given(updates, st.integers(0, 50))
def test_a_draw_is_of_a_task_that_may_be_drawn(changes: Updates, number: int) -> None:
    replay = HardTaskReplay(share=0.5, reward_max=0.5, times_max=2)
    newest = {change[0]: change[1:] for change in changes}
    drawn = sampler_of(changes, replay).draw(number)
    positive = {item for item, (weight, *_) in newest.items() if weight}
    if drawn is None:
        assert not positive
        return
    item, is_replay = drawn
    weight, is_running, reward, replays = newest[item]
    assert weight
    idle = {each for each in positive if not newest[each][1]}
    assert not is_running or not idle, "a running task was drawn though another was idle"
    if is_replay:
        assert reward in (0.0, 0.5)
        assert replays < 2
        assert not is_running


def test_shares_of_draws_are_those_of_the_weights_and_of_replays() -> None:
    chance, weights = random.Random(1), [0.0, 1.0, 2.0, 3.0, 0.5, 0.0, 3.5]
    sampler = TaskSampler(SIZE, seed=chance.randrange(100), replay=HardTaskReplay(share=0.2))
    for item, weight in enumerate(weights):
        sampler.update(item, weight, is_running=False, recent_reward=0.1 if item == 4 else None)
    draws = [sampler.draw(number) for number in range(20_000)]
    replays = [draw for draw in draws if draw is not None and draw[1]]
    assert {item for item, _ in replays} == {4}
    assert math.isclose(len(replays) / len(draws), 0.2, abs_tol=0.01)
    counts = Counter(draw[0] for draw in draws if draw is not None and not draw[1])
    for item, weight in enumerate(weights):
        share = counts[item] / sum(counts.values())
        assert math.isclose(share, weight / sum(weights), abs_tol=0.015), item


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e10])
def test_a_weight_that_is_no_weight_is_refused_with_its_task(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight of task 2"):
        TaskSampler(SIZE, seed=0).update(2, weight, is_running=False)
