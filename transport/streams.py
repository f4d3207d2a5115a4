"""Resumable stream of step messages: acknowledgements, replay, credit-based flow control.

Engines hold a :class:`SendWindow`, the orchestrator one :class:`ReceiveWindow` per engine. The
sender keeps unacknowledged messages and replays them after a reconnect; the receiver accepts each
message once, in order. Sans-IO: no sockets, no clock.
"""

from collections import deque
from enum import Enum, auto

from tidegate.errors import BadFrame

ACKS_PER_CREDIT = 4
"""An acknowledgement is sent when a quarter of the credit is used: few messages, and three quarters
of the credit left for its round trip."""


class SendWindow:
    """The sender's end: at most ``credit_steps`` frames that the receiver has not acknowledged."""

    def __init__(self, credit_steps: int) -> None:
        _check_credit(credit_steps)
        self._credit_steps = credit_steps
        self._frames: deque[bytes] = deque()
        """Unacknowledged frames, oldest first; at most ``credit_steps``, unless that was lowered
        since."""
        self._next_seq = 0
        """Next sequence number; ``_frames`` holds the seqs ``[_next_seq - len, _next_seq)``."""

    @property
    def is_open(self) -> bool:
        """Whether another step may be sent now."""
        return len(self._frames) < self._credit_steps

    @property
    def first_seq(self) -> int:
        """Oldest unacknowledged seq; all steps before it are acknowledged."""
        return self._next_seq - len(self._frames)

    def next_seq(self) -> int:
        """Return the seq of the next step message; it advances when :meth:`sent` is called."""
        return self._next_seq

    def set_credit(self, credit_steps: int) -> None:
        """Change the credit after a reconnect; frames sent under the old credit stay."""
        _check_credit(credit_steps)
        self._credit_steps = credit_steps

    def sent(self, seq: int, frame: bytes, *, continues_step: bool = False) -> None:
        """Keep ``frame`` until it is acknowledged.

        ``continues_step``: the decode step has a message in the window already, and all messages of
        a step are sent together, even beyond the credit.
        """
        if seq != self._next_seq:
            raise ValueError(f"steps are numbered in order: next is {self._next_seq}, got {seq}")
        if not self.is_open and not continues_step:
            raise ValueError(
                f"{self._credit_steps} steps are unacknowledged, which is all the credit there "
                f"is; check is_open before sending"
            )
        self._frames.append(frame)
        self._next_seq += 1

    def acknowledge(self, seq: int) -> None:
        """Drop every frame up to and including ``seq``; an earlier ``seq`` is ignored.

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
        """Return the frames to replay after a reconnect, oldest first."""
        return list(self._frames)


class StepAcceptance(Enum):
    """Decision about a step message that has just arrived."""

    NEW = auto()
    """The next in sequence: process it."""
    DUPLICATE = auto()
    """The step was processed before: drop it."""
    GAP = auto()
    """A message before it is missing: drop it. The sender's replay will bring both."""
    OLD_EPOCH = auto()
    """From a process that has since been replaced: drop it."""


class ReceiveWindow:
    """The receiver's end, one per engine name. ``epoch`` increases with each start of an engine."""

    def __init__(self, credit_steps: int, *, epoch: int | None = None, next_seq: int = 0) -> None:
        """Start a new stream, or continue at ``next_seq`` of ``epoch`` where another receiver
        ended."""
        _check_credit(credit_steps)
        self._steps_per_ack = max(1, credit_steps // ACKS_PER_CREDIT)
        self._epoch = epoch
        self._next_seq = next_seq
        """All seqs below this one have been accepted."""
        self._acknowledged_seqs = next_seq
        """All seqs below this one have been acknowledged; ``<= _next_seq``."""
        self._is_ack_lost = False
        """Whether a replay has shown that an acknowledgement was lost."""

    def accept(self, epoch: int, seq: int) -> StepAcceptance:
        """Classify one message. A later epoch starts a new stream at seq 0."""
        if self._epoch is None or epoch > self._epoch:
            self._epoch = epoch
            self._next_seq = self._acknowledged_seqs = 0
            self._is_ack_lost = False
        if epoch < self._epoch:
            return StepAcceptance.OLD_EPOCH
        if seq > self._next_seq:
            return StepAcceptance.GAP
        if seq < self._next_seq:
            self._is_ack_lost = True
            return StepAcceptance.DUPLICATE
        self._next_seq += 1
        return StepAcceptance.NEW

    def acknowledgement(self) -> int | None:
        """Return the seq to acknowledge now, or None; a returned seq counts as sent.

        Call it after each batch, once its messages are processed.
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
