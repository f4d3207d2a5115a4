"""Counters of discards, and the length bias of filters that favour short rollouts."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.orchestrator.core.discards import (
    LENGTH_BUCKETS,
    TASKS_COUNTED,
    WINDOW_ROLLOUTS,
    Discards,
    DiscardStatistics,
    LengthBiasStatistics,
    SavedDiscards,
    TaskDiscards,
    length_bucket,
)
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.transport.messages import SamplingParams


def rollout_of(tokens: int) -> Rollout:
    """Make a rollout with a prompt, so that sampled and given tokens differ."""
    rollout = Rollout(0, 0, 0)
    rollout.extend([1, 2, 3])
    turn = Turn(rollout, SamplingParams(max_tokens=max(1, tokens)))
    rollout.turns.append(turn)
    for _ in range(tokens):
        turn.append(7, -1.0, 0, "engine-0")
    return rollout


SHORT, LONG = rollout_of(4), rollout_of(60)


def test_each_reason_says_how_much_how_long_and_of_which_tasks() -> None:
    discards = Discards()
    for rollout, reason, index in [
        (LONG, "stale", 5),
        (SHORT, "stale", 5),
        (LONG, "stale", 8),
        (rollout_of(0), "episode_error", 1),
    ]:
        discards.count_discarded(rollout, reason, TaskKey(0, index))
    discards.count_discarded(SHORT, "cancelled", None)
    discards.count_trained([LONG.sampled_tokens])

    assert discards.by_reason(generated_tokens=496) == {
        "cancelled": DiscardStatistics(1, 4, 4.0, 4 / 496, {4: 1}),
        "episode_error": DiscardStatistics(1, 0, 0.0, 0.0, {0: 1}, (TaskDiscards(0, 1, 1, 1),)),
        "stale": DiscardStatistics(
            rollouts=3,
            tokens=124,
            mean_tokens=124 / 3,
            share_of_generated=0.25,
            lengths={4: 1, 32: 2},
            tasks=(TaskDiscards(0, 5, 2, 2), TaskDiscards(0, 8, 1, 1)),
        ),
    }


def test_a_run_that_drops_nothing_has_nothing_to_say() -> None:
    assert Discards().by_reason(generated_tokens=0) == {}
    assert Discards().length_bias() is None


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (2**30, 31), (2**40, 31)]
)
def test_lengths_are_kept_in_doublings_and_the_longest_share_one(tokens: int, bucket: int) -> None:
    assert length_bucket(tokens) == bucket < LENGTH_BUCKETS


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3 * TASKS_COUNTED), max_size=400))
def test_a_task_hit_often_is_counted_however_many_tasks_there_are(tasks: list[int]) -> None:
    discards, true = Discards(), Counter(tasks)
    for index in tasks:
        discards.count_discarded(SHORT, "stale", TaskKey(0, index))

    counted = discards.saved().tallies[0].tasks if tasks else []

    for _, index, rollouts, unsure in counted:
        assert rollouts - unsure <= true[index] <= rollouts
    often = {index for index, count in true.items() if count > len(tasks) / TASKS_COUNTED}
    assert often <= {index for _, index, _, _ in counted}


def test_what_is_kept_has_a_limit_however_long_the_run() -> None:
    discards = Discards()
    for index in range(4 * WINDOW_ROLLOUTS):
        discards.count_discarded(SHORT, "stale", TaskKey(index % 7, index))

    saved = discards.saved()

    assert len(saved.tallies[0].tasks) == TASKS_COUNTED
    assert len(saved.blocks) == 2
    assert sum(saved.tallies[0].lengths) == saved.tallies[0].rollouts == 4 * WINDOW_ROLLOUTS


def test_the_bias_is_the_mean_trained_length_over_the_mean_generated_one() -> None:
    lengths = [3, 9, 17, 40, 60, 60, 120, 500]
    discards = Discards()
    for tokens in lengths:
        if tokens < 60:
            discards.count_trained([tokens])
        else:
            discards.count_discarded(rollout_of(tokens), "stale", None)

    bias = discards.length_bias()

    assert bias is not None
    assert bias.rollouts == 8
    assert bias.mean_generated_tokens == pytest.approx(sum(lengths) / 8)
    assert bias.mean_trained_tokens == pytest.approx((3 + 9 + 17 + 40) / 4)
    assert bias.ratio == pytest.approx(2 * (3 + 9 + 17 + 40) / sum(lengths))
    assert bias.survival == {2: 1.0, 8: 1.0, 16: 1.0, 32: 1 / 3, 64: 0.0, 256: 0.0}


def test_a_bias_that_is_over_is_forgotten() -> None:
    discards = Discards()
    for _ in range(WINDOW_ROLLOUTS):
        discards.count_trained([SHORT.sampled_tokens])
        discards.count_discarded(LONG, "stale", None)
    before = discards.length_bias()
    for _ in range(WINDOW_ROLLOUTS):
        discards.count_trained([SHORT.sampled_tokens])
        discards.count_trained([LONG.sampled_tokens])

    after = discards.length_bias()

    assert before is not None
    assert before.ratio == pytest.approx(4 / 32)
    assert after == LengthBiasStatistics(
        rollouts=2 * WINDOW_ROLLOUTS,
        mean_generated_tokens=32.0,
        mean_trained_tokens=32.0,
        ratio=1.0,
        survival={4: 1.0, 32: 1.0},
    )


def test_the_end_of_a_run_is_no_bias() -> None:
    discards = Discards()
    discards.count_trained([LONG.sampled_tokens])
    discards.count_discarded(SHORT, "run_ended", TaskKey(0, 3))

    bias = discards.length_bias()

    assert bias is not None
    assert (bias.rollouts, bias.ratio) == (1, 1.0)
    assert discards.by_reason(generated_tokens=64)["run_ended"].rollouts == 1


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from([SHORT, LONG]), st.integers(0, 50)), max_size=60),
    st.integers(0, 60),
)
def test_a_run_continues_from_saved_counters_as_if_it_had_not_stopped(
    history: list[tuple[Rollout, int]], cut: int
) -> None:
    def live(discards: Discards, part: list[tuple[Rollout, int]]) -> None:
        for rollout, index in part:
            if index % 3:
                discards.count_discarded(rollout, f"reason {index % 3}", TaskKey(1, index))
            else:
                discards.count_trained([rollout.sampled_tokens])

    whole, first, second = Discards(), Discards(), Discards()
    live(whole, history)
    live(first, history[:cut])
    body = msgspec.msgpack.encode(first.saved())
    second.load(msgspec.msgpack.decode(body, type=SavedDiscards))
    live(first, [(LONG, 1)])  # events elsewhere change nothing here
    live(second, history[cut:])

    assert msgspec.msgpack.encode(second.saved()) == msgspec.msgpack.encode(whole.saved())
    assert second.length_bias() == whole.length_bias()
