"""What of an engine's talk survives a lost connection, or an orchestrator that is started again?

A conversation begins with a hello, which says what the engine holds, and its welcome; then comes
again whatever steps were not acknowledged. What arrives between hello and welcome was sent by one
that had not heard the hello: it counts for nothing, and will be said again if it is still meant.
It knows nothing of turns but their handles, nor of weights but their version.
"""

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from tidegate.errors import BadFrame, NotUnderstood
from tidegate.transport.messages import (
    Ack,
    Complaint,
    FromOrchestrator,
    Goodbye,
    Hello,
    Message,
    OrchestratorHeartbeat,
    Refused,
    Shutdown,
    Step,
    Welcome,
    encode,
)
from tidegate.transport.printable import say
from tidegate.transport.sleep_messages import MemoryTag
from tidegate.transport.sockets import DealerSocket
from tidegate.transport.streams import SendWindow

WELCOME_TIMEOUT_S = 60.0
"""An orchestrator that has answered no hello for so long isn't there. Once it has, it says itself
how long the engine is to wait for it."""

HELLO_INTERVAL_S = 5.0
"""A hello without an answer is said again: it may have been what was damaged. Saying it too often
does no harm, but makes the orchestrator go through its turns each time."""

REFUSALS_MAX = 3
"""Complaints without one step acknowledged in between. The first two may be accidents, which a
replay mends; the third is about bytes that are wrong each time they are sent."""


class Link:
    """An engine's end of the wire, from one conversation to the next. Used by one thread."""

    def __init__(self, socket: DealerSocket, hello: Hello) -> None:
        """``hello`` says what never changes in this process."""
        self._socket = socket
        self._hello = hello
        self._window = SendWindow(1)  # the welcome says how many
        self._welcome: Welcome | None = None
        """The newest; None before the first."""
        self._connection: int | None = None
        """As of the last look."""
        self._greeted: int | None = None
        """The connection on which a hello was said, if nothing has made that void."""
        self._is_welcome = False
        """Whether the hello has been answered: a conversation is on."""
        self._greeted_at_s = self._heard_at_s = self._heartbeat_due_s = time.monotonic()
        self._listened_at_s = self._heard_at_s
        """Of the last look. What came after it was not missed, however long ago that was."""
        self._refused: deque[int] = deque(maxlen=REFUSALS_MAX)
        """The oldest unacknowledged step at each of the last complaints."""

    # ------------------------------------------------------------ hello

    @property
    def is_on(self) -> bool:
        """Whether what is sent now reaches somebody who knows this engine."""
        return self._is_welcome

    @property
    def hello_due(self) -> bool:
        """Whether :meth:`say_hello` is the next thing to do."""
        if self._connection is None or self._is_welcome:
            return False
        if self._greeted != self._connection:
            return True
        return time.monotonic() - self._greeted_at_s > HELLO_INTERVAL_S

    def say_hello(
        self,
        *,
        weight_version: int,
        turns: Sequence[int],
        asleep: Sequence[MemoryTag] = (),
        lacks_weights: bool = False,
    ) -> None:
        """Begin a conversation: who we are, what we hold, and which steps come again."""
        self._greeted, self._greeted_at_s = self._connection, time.monotonic()
        hello = msgspec.structs.replace(
            self._hello,
            weight_version=weight_version,
            first_seq=self._window.first_seq,
            next_seq=self._window.next_seq(),
            turns=np.array(turns, dtype="<u4").tobytes(),
            asleep=list(asleep),
            lacks_weights=lacks_weights,
        )
        self._socket.send(hello)

    def _begin(self, welcome: Welcome) -> None:
        self._is_welcome = True
        self._welcome = welcome
        self._window.set_credit(welcome.credit_steps)
        self._heard_at_s = self._heartbeat_due_s = time.monotonic()
        for frame in self._window.unacknowledged():
            self._socket.send_again(frame)

    def _break_off(self) -> None:
        """Whatever is said from now on, either way, belongs to no conversation."""
        self._is_welcome = False
        self._greeted = None

    # ------------------------------------------------------------ in

    def receive(self, timeout_s: float) -> list[FromOrchestrator]:
        """What has arrived and counts; if nothing has, wait up to ``timeout_s`` for it.

        Raises:
            NotUnderstood: the orchestrator has refused the same step again and again.
        """
        # Looked at first: all that an earlier connection brought is then read before a hello.
        self._connection = self._socket.connection()
        if self._greeted != self._connection:
            self._break_off()
        messages = [one for one in self._socket.receive(timeout_s) if self._counts(one)]
        self._listened_at_s = time.monotonic()
        return messages

    def _counts(self, message: FromOrchestrator) -> bool:
        """Whether the engine has to do with this message; what is the link's own is done here."""
        match message:
            case Shutdown() | Refused():
                return True
            case Welcome() if self._greeted is not None and not self._is_welcome:
                self._begin(message)
                return False
        if not self._is_welcome:
            return False
        self._heard_at_s = time.monotonic()
        match message:
            case Ack(seq=seq):
                self._acknowledge(seq)
            case Complaint(message=why):
                self._take_complaint(why)
            case Welcome() | OrchestratorHeartbeat():
                pass
            case _:
                return True
        return False

    def _acknowledge(self, seq: int) -> None:
        try:
            self._window.acknowledge(seq)
        except BadFrame as error:
            self.send(Complaint(message=str(error)))

    def _take_complaint(self, why: str) -> None:
        """Something we said was dropped, and every step after it is: say hello, and all of it."""
        say(f"orchestrator complained: {why}")
        first_seq = self._window.first_seq
        self._refused.append(first_seq)
        if self._refused.count(first_seq) == REFUSALS_MAX:
            raise NotUnderstood(times=REFUSALS_MAX, seq=first_seq, why=why)
        self._break_off()

    def fileno(self) -> int:
        """What an event loop can wait for, as :meth:`DealerSocket.fileno` says."""
        return self._socket.fileno()

    # ------------------------------------------------------------ out

    def send(self, message: Message) -> None:
        """Say something that is told by the next hello, or asked for again, if nobody hears it."""
        if self._is_welcome:
            self._socket.send(message)

    def leave(self, reason: str, *, has_failed: bool = False) -> None:
        """Say goodbye, if there is anybody who may have heard of this engine."""
        if self._greeted is not None:
            self._socket.send(Goodbye(reason=reason, has_failed=has_failed))

    @property
    def has_credit(self) -> bool:
        """Whether there is room to keep another step message."""
        return self._window.is_open

    @property
    def next_seq(self) -> int:
        """What the next step message carries."""
        return self._window.next_seq()

    def send_step(self, step: Step) -> None:
        """Send a step message, now or after the next welcome; keep it until it is acknowledged."""
        frame = self._socket.send(step) if self._is_welcome else encode(step)
        self._window.sent(step.seq, frame)

    # ------------------------------------------------------------ time

    def take_heartbeat_due(self) -> bool:
        """Whether it is time for a heartbeat; asking counts as having sent it."""
        now_s = time.monotonic()
        if self._welcome is None or not self._is_welcome or now_s < self._heartbeat_due_s:
            return False
        self._heartbeat_due_s = now_s + self._welcome.heartbeat_interval_s
        return True

    def heartbeat_due_in_s(self) -> float:
        """How long until the next one."""
        return max(0.0, self._heartbeat_due_s - time.monotonic())

    def shut_out(self) -> str | None:
        """Why no connection will be let in, for want of the right keys; None if one may."""
        return self._socket.refusal()

    def given_up(self) -> str | None:
        """Why the orchestrator must be gone for good; None while it may come back."""
        silent_s = self._listened_at_s - self._heard_at_s
        if self._welcome is None:
            return "not welcomed" if silent_s > WELCOME_TIMEOUT_S else None
        if silent_s > self._welcome.orchestrator_timeout_s:
            return f"heard nothing for {silent_s:.1f} s"
        return None
