"""Contexts of sessions outlast others in the cache, and sessions change nothing else."""

import pytest

from tests.engine.external.fake_engine import FakeEngine, uninterrupted
from tidegate.transport.messages import PauseMode

BLOCKS = 16
"""Blocks of four tokens."""


def play(engine: FakeEngine, prompt: list[int], *, session: int = 0, max_tokens: int = 5) -> int:
    """Run a whole turn; return how many positions of its context were cached."""
    turn = engine.submit(prompt, max_tokens, session=session)
    engine.run()
    engine.scheduler.check()
    reported = engine.turns[turn]
    assert reported.token_ids == uninterrupted(prompt, max_tokens)
    return reported.prefills[0].cached_tokens


def prompt_of(number: int) -> list[int]:
    """Return twelve tokens; with five more they fill four blocks."""
    return [number] * 12


def crowd_out(engine: FakeEngine, turns: int, *, session: int = 0) -> None:
    """Fill the cache with other turns."""
    for number in range(turns):
        play(engine, prompt_of(20 + number), session=session and session + number)


def test_contexts_of_waiting_sessions_outlast_those_of_ended_ones() -> None:
    engine = FakeEngine(num_blocks=BLOCKS)
    play(engine, prompt_of(1), session=1)
    play(engine, prompt_of(2), session=2)
    engine.scheduler.sessions.end([2])

    crowd_out(engine, 6)

    assert play(engine, prompt_of(2)) == 0
    assert play(engine, prompt_of(1)) == 8


def test_without_sessions_the_least_recently_used_context_is_evicted() -> None:
    engine = FakeEngine(num_blocks=BLOCKS)
    play(engine, prompt_of(1))

    crowd_out(engine, 6)

    assert play(engine, prompt_of(1)) == 0


def test_of_waiting_sessions_the_longest_waiting_is_evicted_first() -> None:
    engine = FakeEngine(num_blocks=BLOCKS)
    for session in (1, 2, 3):
        play(engine, prompt_of(session), session=session)

    crowd_out(engine, 2, session=4)

    assert [play(engine, prompt_of(session)) for session in (3, 1)] == [8, 0]


def test_waiting_sessions_do_not_block_new_turns() -> None:
    engine = FakeEngine(num_blocks=BLOCKS)
    for session in (1, 2, 3, 4):
        play(engine, prompt_of(session), session=session)

    assert play(engine, [9] * 50, max_tokens=14) == 0  # it needs all blocks there are
    assert engine.scheduler.free_blocks == BLOCKS


def test_a_session_protects_its_newest_context_only() -> None:
    engine = FakeEngine(num_blocks=BLOCKS)
    play(engine, prompt_of(1), session=1)
    play(engine, prompt_of(2), session=1)  # the agent has begun another conversation

    crowd_out(engine, 6)

    assert play(engine, prompt_of(1)) == 0
    assert play(engine, prompt_of(2)) == 8


def test_a_prompt_is_kept_for_the_last_of_its_group() -> None:
    engine = FakeEngine(num_blocks=BLOCKS)
    for session in (1, 2):
        play(engine, prompt_of(1), session=session)
    engine.scheduler.sessions.end([1])

    crowd_out(engine, 6)
    assert play(engine, prompt_of(1)) == 8

    engine.scheduler.sessions.end([2])
    crowd_out(engine, 6)
    assert play(engine, prompt_of(1)) == 0


def test_sessions_end_with_their_connection() -> None:
    engine = FakeEngine(num_blocks=BLOCKS)
    play(engine, prompt_of(1), session=1)
    engine.scheduler.forget_orchestrator()

    crowd_out(engine, 6)

    assert play(engine, prompt_of(1)) == 0


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_a_swap_discards_the_contexts_of_waiting_sessions(mode: PauseMode) -> None:
    engine = FakeEngine(num_blocks=BLOCKS)
    play(engine, prompt_of(1), session=1)
    running = engine.submit(prompt_of(2), 9, session=2)
    engine.step()
    engine.request_swap(1, mode, "keep")
    engine.run()
    engine.scheduler.check()

    late = engine.submit(prompt_of(1), 3, session=1)
    later = engine.submit(prompt_of(2), 3, session=2)
    engine.run()

    assert [engine.turns[turn].prefills[0].cached_tokens for turn in (late, later)] == [0, 0]
    engine.turns[running].check(vocab=50)
    engine.turns[late].check(vocab=50)
    engine.scheduler.sessions.end([1, 2, 3])
    engine.scheduler.check()


def test_sessions_that_never_end_are_limited_by_the_number_of_blocks() -> None:
    engine = FakeEngine(num_blocks=4)
    for session in range(1, 7):  # all of one context, so that none loses it for want of room
        play(engine, [1] * 6, session=session, max_tokens=1)
    engine.scheduler.sessions.end([3, 4, 5, 6])

    play(engine, [2] * 9)

    assert play(engine, [1] * 6, max_tokens=1) == 0  # 1 and 2 want it no more
