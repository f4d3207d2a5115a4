"""Which step messages must still be sent, kept or acknowledged? Both ends of a resumable stream.

The sender keeps what is not acknowledged and replays it after a reconnect; the receiver takes each
message once, in order. Neither opens a socket, reads a clock, or knows what a step means.
"""

from collections import deque
from enum import Enum, auto

from tidegate.errors import BadFrame

ACKS_PER_CREDIT = 4
"""An acknowledgement goes out when a quarter of the credit is used up: few messages, and three
quarters of the credit left to bridge its way back."""


class SendWindow:
    """An engine's end: at most ``credit_steps`` frames that the other side hasn't confirmed."""

    def __init__(self, credit_steps: int) -> None:
        _check_credit(credit_steps)
        self._credit_steps = credit_steps
        self._frames: deque[bytes] = deque()
        """Unacknowledged, oldest first; at most ``credit_steps``, unless that was lowered since."""
        self._next_seq = 0
        """``_frames`` are those of the seqs ``[_next_seq - len, _next_seq)``."""

    @property
    def is_open(self) -> bool:
        """Whether another step may be sent now."""
        return len(self._frames) < self._credit_steps

    @property
    def first_seq(self) -> int:
        """Every step before this one is acknowledged."""
        return self._next_seq - len(self._frames)

    def next_seq(self) -> int:
        """The number that the next step message carries; the same until it is :meth:`sent`."""
        return self._next_seq

    def set_credit(self, credit_steps: int) -> None:
        """Another receiver grants another credit; what was sent on the old one stays."""
        _check_credit(credit_steps)
        self._credit_steps = credit_steps

    def sent(self, seq: int, frame: bytes) -> None:
        """Keep ``frame`` until it is acknowledged."""
        if seq != self._next_seq:
            raise ValueError(f"steps are numbered in order: next is {self._next_seq}, got {seq}")
        if not self.is_open:
            raise ValueError(
                f"{self._credit_steps} steps are unacknowledged, which is all the credit there "
                f"is; look at is_open before sending"
            )
        self._frames.append(frame)
        self._next_seq += 1

    def acknowledge(self, seq: int) -> None:
        """Forget every frame up to and including ``seq``. One acknowledged before is ignored.

        Raises:
            BadFrame: ``seq`` was never sent.
        """
        if seq >= self._next_seq:
            raise BadFrame(
                f"seq {seq} was acknowledged, but the last one sent is {self._next_seq - 1}"
            )
        while self._frames and self.first_seq <= seq:
            self._frames.popleft()

    def unacknowledged(self) -> list[bytes]:
        """What to send again after a reconnect, oldest first."""
        return list(self._frames)


class Verdict(Enum):
    """What to do with a step message that has just arrived."""

    NEW = auto()
    """The next one: take it in."""
    DUPLICATE = auto()
    """Taken in before: drop it."""
    GAP = auto()
    """One before it is missing: drop it. The sender's replay will bring both."""
    OLD_EPOCH = auto()
    """From a process that has since been replaced: drop it."""


class ReceiveWindow:
    """The orchestrator's end, one per engine name. ``epoch`` grows with each start of an engine."""

    def __init__(self, credit_steps: int, *, epoch: int | None = None, next_seq: int = 0) -> None:
        """A new stream; or go on at ``next_seq`` of ``epoch`` where another receiver has ended."""
        _check_credit(credit_steps)
        self._steps_per_ack = max(1, credit_steps // ACKS_PER_CREDIT)
        self._epoch = epoch
        self._next_seq = next_seq
        """Every seq below it has been taken in."""
        self._acknowledged_seqs = next_seq
        """Of those, how many the sender was told of; ``<= _next_seq``."""
        self._is_ack_lost = False
        """A replay shows that the sender doesn't know what it was told."""

    def accept(self, epoch: int, seq: int) -> Verdict:
        """Judge one message. A later epoch starts a new stream at seq 0."""
        if self._epoch is None or epoch > self._epoch:
            self._epoch = epoch
            self._next_seq = self._acknowledged_seqs = 0
            self._is_ack_lost = False
        if epoch < self._epoch:
            return Verdict.OLD_EPOCH
        if seq > self._next_seq:
            return Verdict.GAP
        if seq < self._next_seq:
            self._is_ack_lost = True
            return Verdict.DUPLICATE
        self._next_seq += 1
        return Verdict.NEW

    def acknowledgement(self) -> int | None:
        """The seq to acknowledge now, if it is time; asking counts as having sent it.

        Ask after each batch, once its messages are safe.
        """
        pending_steps = self._next_seq - self._acknowledged_seqs
        if pending_steps < self._steps_per_ack and not self._is_ack_lost:
            return None
        self._acknowledged_seqs = self._next_seq
        self._is_ack_lost = False
        return self._next_seq - 1


def _check_credit(credit_steps: int) -> None:
    if credit_steps < 1:
        raise ValueError(
            f"credit_steps counts step messages that may be unacknowledged and must be >= 1, "
            f"got {credit_steps}"
        )
