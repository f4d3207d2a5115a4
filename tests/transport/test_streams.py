"""Tests that every step arrives once and in order, over loss, replay and restart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import BadFrame
from tidegate.transport.streams import ReceiveWindow, SendWindow, StepAcceptance


def sent(window: SendWindow, count: int) -> SendWindow:
    for _ in range(count):
        seq = window.next_seq()
        window.sent(seq, str(seq).encode())
    return window


def test_the_window_closes_when_the_credit_is_used_up_and_opens_with_an_ack() -> None:
    window = sent(SendWindow(3), 3)
    assert not window.is_open
    with pytest.raises(ValueError, match="all the credit"):
        window.sent(3, b"3")
    window.acknowledge(1)
    assert window.is_open
    assert window.unacknowledged() == [b"2"]
    assert window.next_seq() == 3


def test_what_was_sent_on_a_larger_credit_is_kept_and_nothing_follows_it() -> None:
    window = sent(SendWindow(4), 4)
    window.set_credit(2)
    window.acknowledge(1)
    assert (window.first_seq, window.is_open, window.unacknowledged()) == (2, False, [b"2", b"3"])
    window.acknowledge(2)
    assert (window.first_seq, window.is_open) == (3, True)


def test_a_repeated_or_older_ack_changes_nothing() -> None:
    window = sent(SendWindow(8), 5)
    window.acknowledge(3)
    for seq in (3, 0, -1):
        window.acknowledge(seq)
    assert window.unacknowledged() == [b"4"]


def test_an_ack_of_what_was_never_sent_is_refused() -> None:
    with pytest.raises(BadFrame, match="seq 5 was acknowledged, but the last one sent is 4"):
        sent(SendWindow(8), 5).acknowledge(5)


def test_a_step_out_of_order_is_the_senders_own_fault() -> None:
    with pytest.raises(ValueError, match="next is 0, got 1"):
        SendWindow(1).sent(1, b"")


@pytest.mark.parametrize("window", [SendWindow, ReceiveWindow])
def test_no_credit_would_mean_no_stream(window: type[SendWindow] | type[ReceiveWindow]) -> None:
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        window(0)


def test_each_kind_of_arrival_gets_its_verdict() -> None:
    window = ReceiveWindow(4)
    verdicts = [window.accept(*key) for key in [(5, 0), (5, 1), (5, 1), (5, 3), (4, 2), (5, 2)]]
    assert verdicts == [
        StepAcceptance.NEW,
        StepAcceptance.NEW,
        StepAcceptance.DUPLICATE,
        StepAcceptance.GAP,
        StepAcceptance.OLD_EPOCH,
        StepAcceptance.NEW,
    ]


def test_a_restarted_engine_begins_again_at_zero_and_its_past_is_dropped() -> None:
    window = ReceiveWindow(4)
    assert [window.accept(1, seq) for seq in range(3)] == [StepAcceptance.NEW] * 3
    assert (
        window.accept(2, 1) is StepAcceptance.GAP
    )  # epoch 2 is known now, but its step 0 is missing
    assert window.accept(1, 3) is StepAcceptance.OLD_EPOCH
    assert window.accept(2, 0) is StepAcceptance.NEW
    assert window.acknowledgement() == 0


def test_acks_are_due_once_per_quarter_of_the_credit() -> None:
    window = ReceiveWindow(8)
    due = []
    for seq in range(6):
        window.accept(0, seq)
        due.append(window.acknowledgement())
    assert due == [None, 1, None, 3, None, 5]


def test_a_duplicate_makes_the_ack_due_again_for_the_first_was_lost() -> None:
    window = ReceiveWindow(100)
    window.accept(0, 0)
    assert window.acknowledgement() is None
    window.accept(0, 0)
    assert window.acknowledgement() == 0
    assert window.acknowledgement() is None


class Wire:
    """Both windows, and the messages in flight between them."""

    def __init__(self, credit_steps: int) -> None:
        self.sender, self.receiver = SendWindow(credit_steps), ReceiveWindow(credit_steps)
        self.steps: list[bytes] = []
        self.acks: list[int] = []
        self.taken: list[int] = []

    def fill(self, steps_total: int) -> None:
        while self.sender.is_open and (seq := self.sender.next_seq()) < steps_total:
            self.steps.append(str(seq).encode())
            self.sender.sent(seq, self.steps[-1])

    def deliver(self, steps: int, acks: int) -> None:
        for frame in self.steps[:steps]:
            if self.receiver.accept(0, int(frame)) is StepAcceptance.NEW:
                self.taken.append(int(frame))
        for seq in self.acks[:acks]:
            self.sender.acknowledge(seq)
        del self.steps[:steps], self.acks[:acks]
        if (due := self.receiver.acknowledgement()) is not None:
            self.acks.append(due)

    def break_and_replay(self) -> None:
        self.steps = self.sender.unacknowledged()
        self.acks = []


MOVES = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 3)), max_size=50)


@settings(deadline=None)
@given(credit_steps=st.integers(1, 20), moves=MOVES)
def test_over_a_wire_that_breaks_every_step_is_taken_in_once_and_in_order(
    credit_steps: int, moves: list[tuple[bool, int, int]]
) -> None:
    wire = Wire(credit_steps)
    for breaks, steps, acks in moves:
        wire.fill(steps_total=60)
        wire.deliver(steps, acks)
        if breaks:
            wire.break_and_replay()
        assert len(wire.sender.unacknowledged()) <= credit_steps
    for _ in range(200):  # reliable from here on; each round trip frees a quarter of the credit
        wire.fill(steps_total=60)
        wire.deliver(len(wire.steps), len(wire.acks))
    assert wire.taken == list(range(60))
    assert len(wire.sender.unacknowledged()) < max(1, credit_steps // 4)
