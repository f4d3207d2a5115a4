"""Tests that other callbacks run while expensive messages wait."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.conftest import Inbox
from tidegate.transport.messages import Goodbye
from tidegate.transport.router import FRAMES_AT_FIRST, FRAMES_MIN, TURN_S, DrainBudget
from tidegate.transport.sockets import DealerSocket, RouterSocket

pytestmark = pytest.mark.wire


@given(
    per_frame_s=st.floats(1e-6, 0.05),
    frames_max=st.integers(1, 4096),
    before=st.lists(st.floats(0, 10), max_size=30),
)
def test_a_turn_of_the_loop_comes_to_last_no_longer_than_it_should_whatever_a_message_costs(
    per_frame_s: float, frames_max: int, before: list[float]
) -> None:
    budget = DrainBudget(frames_max)
    for turn_s in before:
        budget.took(turn_s)
    for _ in range(20):
        budget.took(budget.frames * per_frame_s)
    least = min(FRAMES_MIN, frames_max)
    assert least <= budget.frames <= frames_max
    assert budget.frames * per_frame_s <= TURN_S or budget.frames == least
    assert budget.frames * per_frame_s >= TURN_S / 4 or budget.frames == frames_max


def test_messages_are_read_on_where_others_take_the_time() -> None:
    budget = DrainBudget(1024)
    read = 0
    for _ in range(40):
        read += budget.frames
        budget.took(2 * TURN_S + budget.frames * 1e-5)
    assert read > 40 * 256


async def test_no_reading_takes_more_at_once_while_each_message_takes_long(
    router: RouterSocket,
) -> None:
    loop = asyncio.get_running_loop()
    real_time, slept_s = loop.time, 0.0
    loop.time = lambda: real_time() + slept_s  # type: ignore[method-assign]
    dealer = DealerSocket(router.address, b"engine-0")
    for number in range(500):
        dealer.send(Goodbye(reason=str(number)))
    inbox = Inbox(router)

    def be_slow(peer: bytes, frame: bytes) -> None:
        nonlocal slept_s
        slept_s += 0.01

    inbox.on_frame = be_slow
    try:
        await inbox.wait_for(500)
    finally:
        dealer.close()
    assert max(inbox.batch_sizes) <= FRAMES_AT_FIRST
