"""Tests that a wakeup reaches a waiting thread, and never a later file with its number."""

import os
import select
import threading

import pytest

from tidegate.transport.wakeup import Wakeup

WAIT_MS = 60_000


def is_readable(wakeup: Wakeup, *, wait_ms: int = 0) -> bool:
    poll = select.poll()
    poll.register(wakeup.fileno(), select.POLLIN)
    return bool(poll.poll(wait_ms))


def test_it_wakes_its_waiter_until_it_is_cleared() -> None:
    wakeup = Wakeup()
    assert not is_readable(wakeup)
    waking = threading.Thread(target=wakeup.wake)
    waking.start()
    assert is_readable(wakeup, wait_ms=WAIT_MS)
    waking.join(WAIT_MS / 1000)
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.clear()  # nothing to forget
    wakeup.close()


def test_once_closed_it_touches_no_file_that_has_its_number_since() -> None:
    wakeup = Wakeup()
    number = wakeup.fileno()
    wakeup.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    os.dup2(other, number)
    try:
        wakeup.wake()
        wakeup.clear()
        wakeup.close()
        with pytest.raises(BlockingIOError):  # nothing was written, and it is open
            os.eventfd_read(number)
        with pytest.raises(ValueError, match="closed"):
            wakeup.fileno()
    finally:
        os.close(other)
        if number != other:
            os.close(number)
