"""Prefix sharing: which contexts are computed once, and that shared KV is always right."""

import pytest

from tests.engine.external.fake_engine import FakeEngine, uninterrupted
from tidegate.transport.messages import (
    LENGTH,
    RUNNING,
    KvSpan,
    PauseMode,
    Prefill,
)

PROMPT = list(range(10))
"""Two blocks of four tokens, and half of another."""


def run(engine: FakeEngine) -> int:
    """Run until all turns have ended; return the number of positions computed."""
    computed = 0
    for _ in range(10_000):
        rows = engine.step()
        if not rows:
            return computed
        computed += sum(rows.values())
        engine.scheduler.check()
    raise AssertionError("turns that never end")


# ---------------------------------------------------------------- one prompt, many turns


@pytest.mark.parametrize(
    ("length", "computed"),
    [
        pytest.param(30, 30 + 7 * 2, id="a prompt whose prefill takes many steps"),
        pytest.param(8, 8 + 7 * 4, id="full blocks, of which each turn computes the last"),
        pytest.param(3, 8 * 3, id="less than a block"),
    ],
)
def test_samples_of_one_prompt_compute_its_full_blocks_once(length: int, computed: int) -> None:
    engine = FakeEngine(max_running_turns=8, num_blocks=64, max_step_tokens=8)
    for _ in range(8):
        engine.submit(list(range(length)), 1)
    assert run(engine) == computed


def test_no_block_is_shared_with_prefix_caching_off() -> None:
    engine = FakeEngine(shares_prefixes=False)
    for _ in range(3):
        engine.submit(PROMPT, 1)
    assert run(engine) == 30


def test_samples_of_one_prompt_share_its_full_blocks_within_one_step() -> None:
    engine = FakeEngine(max_running_turns=8, num_blocks=64, max_step_tokens=64)
    for _ in range(8):
        engine.submit(PROMPT, 3)

    assert list(engine.step().values()) == [10, 2, 2, 2, 2, 2, 2, 2]
    engine.run()
    for turn, reported in engine.turns.items():
        assert reported.token_ids == uninterrupted(PROMPT, 3)
        assert reported.prefills == [
            Prefill(turn, 0, [KvSpan(0, 0, 10)], cached_tokens=8 if turn else 0)
        ]


def test_a_turn_shares_a_prompt_that_is_being_prefilled() -> None:
    engine = FakeEngine(num_blocks=32)
    prompt = list(range(20))
    engine.submit(prompt, 1)
    assert list(engine.step().values()) == [8]
    late = engine.submit(prompt, 1, priority=-1)

    assert list(engine.step().values()) == [8]
    assert list(engine.step().values()) == [4, 4]  # the last token is each turn's own
    assert engine.turns[late].prefills[0].cached_tokens == 16
    assert engine.turns[late].token_ids == uninterrupted(prompt, 1)


def test_turns_with_equal_outputs_share_their_blocks() -> None:
    engine = FakeEngine(max_step_tokens=64)
    for _ in range(3):
        engine.submit(PROMPT, 11)
    for _ in range(8):
        engine.step()

    engine.scheduler.check()
    # 17 positions: four full blocks for all, and one that is being filled for each.
    assert engine.limits.num_blocks - engine.scheduler.free_blocks == 4 + 3
    engine.run()
    for reported in engine.turns.values():
        assert reported.token_ids == uninterrupted(PROMPT, 11)


# ---------------------------------------------------------------- after a turn


def test_the_next_turn_of_a_rollout_prefills_only_new_tokens() -> None:
    engine = FakeEngine()
    first = engine.submit(PROMPT, 8)
    engine.run()
    context = [*PROMPT, *engine.turns[first].token_ids, 7, 7]  # 17 positions of it were computed

    second = engine.submit(context, 4)
    engine.run()

    assert engine.turns[second].prefills[0] == Prefill(
        second, 0, [KvSpan(0, 0, 20)], cached_tokens=16
    )
    assert engine.turns[second].token_ids == uninterrupted(context, 4)


def test_blocks_of_ended_turns_are_reused_by_new_turns() -> None:
    engine = FakeEngine(num_blocks=5)
    first = engine.submit(PROMPT, 8)
    engine.run()
    assert engine.scheduler.free_blocks == 5

    other = engine.submit([9] * 16, 4)  # needs them all
    engine.run()
    again = engine.submit(PROMPT, 8)
    engine.run()

    assert engine.turns[other].token_ids == uninterrupted([9] * 16, 4)
    assert engine.turns[again].token_ids == engine.turns[first].token_ids
    assert engine.turns[again].prefills[0].cached_tokens == 0


def test_a_turn_starts_if_it_fits_only_with_shared_blocks() -> None:
    engine = FakeEngine(num_blocks=8, max_step_tokens=64)
    prompt = list(range(21))  # six blocks
    turns = [engine.submit(prompt, 3) for _ in range(2)]

    assert list(engine.step().values()) == [21, 1]
    engine.run()
    for turn in turns:
        assert engine.turns[turn].token_ids == uninterrupted(prompt, 3)


def test_a_turn_does_not_start_if_its_cached_blocks_leave_too_few_for_running_turns() -> None:
    engine = FakeEngine(num_blocks=4, max_running_turns=2)
    engine.submit(PROMPT[:9], 1)
    engine.run()  # two blocks are cached, and no turn holds them
    first = engine.submit([1] * 2, 6)
    engine.step()
    late = engine.submit(PROMPT[:9], 4)
    while engine.turns[first].finish == RUNNING:
        assert engine.scheduler.running_turns <= 1
        engine.step()
    engine.run()
    assert engine.turns[late].prefills[0].cached_tokens == 8


def test_each_prefill_reports_its_own_cached_tokens() -> None:
    engine = FakeEngine(num_blocks=5, max_running_turns=2)
    engine.submit([1] * 8, 1)
    engine.run()
    worse = engine.submit([1] * 8, 8, priority=1)
    engine.step()
    best = engine.submit([2] * 4, 8)
    while not engine.scheduler.waiting_turns or len(engine.turns[best].token_ids) < 2:
        engine.step()
    engine.run()

    assert [prefill.cached_tokens for prefill in engine.turns[worse].prefills] == [4, 8]


# ---------------------------------------------------------------- new weights


def test_a_turn_with_kept_kv_finds_no_kv_of_new_weights() -> None:
    engine = FakeEngine(max_step_tokens=8, num_blocks=32)
    prompt = list(range(20))
    straddler = engine.submit(prompt, 3, priority=1)
    engine.step()
    engine.request_swap(1, "keep", "keep")
    engine.submit(prompt, 3)  # goes first, and has all of it computed by version 1
    engine.run()

    reported = engine.turns[straddler]
    assert reported.prefills == [Prefill(straddler, 0, [KvSpan(0, 0, 8), KvSpan(1, 8, 20)])]


def test_recomputed_samples_share_their_prefix_and_overwrite_no_shared_block() -> None:
    engine = FakeEngine(max_running_turns=4, num_blocks=16, max_step_tokens=64)
    for _ in range(4):
        engine.submit(PROMPT, 9)
    for _ in range(3):
        engine.step()
    engine.request_swap(1, "keep", "recompute")
    engine.settle()
    engine.scheduler.check()

    # 13 tokens each by now, alike, because the fake model is deterministic
    assert list(engine.step().values()) == [13, 1, 1, 1]
    engine.run()
    for turn, reported in engine.turns.items():
        assert reported.prefills[1] == Prefill(
            turn, 3, [KvSpan(1, 0, 13)], cached_tokens=12 if turn else 0
        )
        reported.check(vocab=50)


def test_a_recomputed_turn_without_a_block_preempts_a_lower_ranked_one() -> None:
    engine = FakeEngine(num_blocks=4, max_running_turns=2, max_step_tokens=16)
    best = engine.submit([1] * 7, 8)
    worse = engine.submit([2] * 2, 8)
    engine.step()
    engine.request_swap(1, "keep", "keep")
    while len(engine.turns[best].token_ids) < 6:
        engine.step()  # now one has three blocks and the other one: all there are, and all full
    engine.request_swap(0, "keep", "recompute")  # each keeps what version 0 computed of its KV

    run(engine)

    for turn in (best, worse):
        assert engine.turns[turn].finish == LENGTH
        engine.turns[turn].check(vocab=50)


def test_a_reused_version_number_finds_no_cached_kv() -> None:
    engine = FakeEngine()
    engine.submit(PROMPT, 2)
    engine.run()
    for version in (0, 1, 0):
        engine.request_swap(version, "abort", "keep")
        turn = engine.submit(PROMPT, 2)
        engine.run()
        assert engine.turns[turn].prefills[0].cached_tokens == 0


# ---------------------------------------------------------------- clearing


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_a_pause_that_clears_the_cache_clears_all_of_it(mode: PauseMode) -> None:
    engine = FakeEngine()
    first = engine.submit(PROMPT, 4)
    engine.step()
    engine.scheduler.pause(mode, clear_cache=True)
    engine.run()
    engine.scheduler.resume()
    late = engine.submit(PROMPT, 4)
    engine.run()

    assert engine.turns[late].prefills[0].cached_tokens == 0
    assert engine.turns[late].token_ids == uninterrupted(PROMPT, 4)
    if mode != "abort":
        assert engine.turns[first].token_ids == uninterrupted(PROMPT, 4)


def test_a_pause_that_was_lifted_before_it_took_effect_clears_nothing() -> None:
    engine = FakeEngine()
    engine.submit(PROMPT, 4)
    engine.step()
    engine.scheduler.pause("wait", clear_cache=True)
    engine.scheduler.resume()
    engine.run()
    engine.scheduler.pause("wait")
    engine.settle()
    engine.scheduler.resume()
    late = engine.submit(PROMPT, 4)
    engine.run()

    assert engine.turns[late].prefills[0].cached_tokens == 8
