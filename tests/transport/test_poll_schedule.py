"""Tests that a socket is polled by timer only while no peer waits for answers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests.transport.conftest import WAIT_S
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import Ack, TurnsResumed, encode
from tidegate.transport.router import (
    BUSY_WAKEUPS,
    BUSY_WITHIN_S,
    MESSAGES_PER_ACK,
    POLL_INTERVAL_S,
    QUIET_POLL_INTERVAL_S,
    UNPRODUCTIVE_POLLS_MAX,
    PollSchedule,
    RouterSocket,
)

pytestmark = pytest.mark.wire


def by_the_clock() -> PollSchedule:
    """Return the schedule of a thousand messages a second, at the end of its first wakeups."""
    schedule = PollSchedule()
    firsts = [schedule.woken(1.0 + 0.001 * index) for index in range(BUSY_WAKEUPS)]
    assert firsts == [None] * (BUSY_WAKEUPS - 1) + [POLL_INTERVAL_S]
    return schedule


def test_wakeups_that_are_far_between_or_answered_stay_wakeups() -> None:
    slow, answered = PollSchedule(), PollSchedule()
    for index in range(4 * BUSY_WAKEUPS):
        assert slow.woken(2 * index * BUSY_WITHIN_S / BUSY_WAKEUPS) is None
        answered.sends += 1
        assert answered.woken(0.001 * index) is None


def test_a_stream_without_answers_is_polled_ever_less_often() -> None:
    schedule = by_the_clock()
    assert [schedule.polled(16) for _ in range(5)] == [0.008, 0.016, 0.032, 0.032, 0.032]
    assert QUIET_POLL_INTERVAL_S == 0.032
    schedule.sends = 1
    assert [schedule.polled(16) for _ in range(3)] == [POLL_INTERVAL_S, 0.008, 0.016]


def test_acknowledgements_are_no_answers_unless_an_engine_may_wait_for_them() -> None:
    schedule = by_the_clock()
    reported = []
    for messages in (MESSAGES_PER_ACK, MESSAGES_PER_ACK, MESSAGES_PER_ACK - 1):
        schedule.acks = 1
        reported.append(schedule.polled(messages))
    assert reported == [0.008, 0.016, POLL_INTERVAL_S]


def test_a_stream_that_is_answered_now_and_then_is_polled_at_short_intervals() -> None:
    schedule = by_the_clock()
    for _ in range(9):
        schedule.sends = 4
        assert schedule.polled(16) == POLL_INTERVAL_S


@pytest.mark.parametrize(("messages", "sends"), [(0, 0), (16, 5)])
def test_the_descriptor_wakes_again_where_nothing_comes_or_much_is_answered(
    messages: int, sends: int
) -> None:
    schedule = by_the_clock()
    reported = []
    for _ in range(UNPRODUCTIVE_POLLS_MAX):
        schedule.sends = sends
        reported.append(schedule.polled(messages))
    assert reported == [POLL_INTERVAL_S] * (UNPRODUCTIVE_POLLS_MAX - 1) + [None]


@dataclass(eq=False)
class Timer:
    """A pending ``call_later`` of the loop."""

    among: "list[Timer]"
    delay_s: float
    callback: Callable[[], None]

    def cancel(self) -> None:
        """Remove the timer; a no-op if it was called."""
        if self in self.among:
            self.among.remove(self)


class HandDriven:
    """An event loop whose timers and readers a test calls by hand."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] | None = None
        self.timers: list[Timer] = []

    def time(self) -> float:
        """Constant time."""
        return 1.0

    def add_reader(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Store the callback of the only descriptor."""
        self.wake = callback

    def remove_reader(self, descriptor: int) -> None:
        """Remove the callback."""
        self.wake = None

    def call_soon(self, callback: Callable[[], None]) -> Any:
        """Store the callback as a timer without delay."""
        return self._timer(0.0, callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        """Store the callback until the test fires it."""
        return self._timer(delay_s, callback)

    def _timer(self, delay_s: float, callback: Callable[[], None]) -> Any:
        timer = Timer(self.timers, delay_s, callback)
        self.timers.append(timer)
        return timer

    def fire(self) -> float:
        """Call the only timer; return its delay."""
        [timer] = self.timers
        self.timers.clear()
        timer.callback()
        return timer.delay_s


def test_a_message_sent_into_a_quiet_stream_has_its_answer_polled_for_sooner(
    router: RouterSocket, request: pytest.FixtureRequest
) -> None:
    dealer, loop = DealerSocket(router.address, b"engine-0"), HandDriven()
    request.addfinalizer(dealer.close)
    seen: list[bytes] = []
    router.attach(cast(asyncio.AbstractEventLoop, loop), lambda b: seen.extend(f for _, f in b))
    for _ in range(BUSY_WAKEUPS):
        assert loop.wake is not None
        loop.wake()
    dealer.send(TurnsResumed())
    assert router._socket.poll(round(1000 * WAIT_S))
    assert loop.fire() == POLL_INTERVAL_S
    assert seen == [encode(TurnsResumed())]
    assert [timer.delay_s for timer in loop.timers] == [2 * POLL_INTERVAL_S]

    assert router.send(b"engine-0", Ack(seq=0))
    assert (router._poll_schedule.acks, router._poll_schedule.sends) == (1, 0)
    assert router.send(b"engine-0", TurnsResumed())
    assert (router._poll_schedule.acks, router._poll_schedule.sends) == (1, 1)
    assert [timer.delay_s for timer in loop.timers] == [POLL_INTERVAL_S]
    router.detach()
