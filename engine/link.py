"""An engine's connection to the orchestrator: handshake, acknowledged step stream and heartbeats.

Own and external engines use it, over a DEALER socket. The link survives a lost connection and a
restarted orchestrator. A session begins with the engine's hello, which lists its turns and weights,
and the orchestrator's welcome; then all unacknowledged step messages are sent again. A message that
arrives between hello and welcome was sent before the hello was read, so it is dropped; the
orchestrator repeats it if it is still valid.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from tidegate.errors import BadFrame, NotUnderstood
from tidegate.transport.clock import Clock
from tidegate.transport.messages import (
    Ack,
    FromOrchestrator,
    Goodbye,
    HeldAdapter,
    Hello,
    HelloRejected,
    Message,
    MessageRejected,
    OrchestratorHeartbeat,
    Shutdown,
    Step,
    Welcome,
    encode,
)
from tidegate.transport.printable import print_stderr
from tidegate.transport.sleep_messages import MemoryTag
from tidegate.transport.streams import SendWindow

WELCOME_TIMEOUT_S = 60.0
"""Seconds without an answer to any hello after which the engine gives up. After a welcome, its
``orchestrator_timeout_s`` is the limit."""

HELLO_INTERVAL_S = 5.0
"""Seconds after which an unanswered hello is repeated, in case it was damaged. Repeating is
harmless, but makes the orchestrator go through its turns each time."""

REFUSALS_MAX = 3
"""Complaints about the same unacknowledged step before the engine gives up. The first two may be
transient, and a replay repairs them; the third means that the step itself is malformed."""


class EngineSocket(Protocol):
    """Methods of a :class:`DealerSocket` that the link calls; a simulated wire has them too."""

    def send(self, message: Message) -> bytes:
        """Queue one message without blocking; return its frame."""

    def send_again(self, frame: bytes) -> None:
        """Queue a frame again that was sent before."""

    def receive(self, timeout_s: float) -> list[FromOrchestrator]:
        """Return all arrived messages, in order; block up to ``timeout_s`` if there are none."""

    def fileno(self) -> int:
        """Return a file descriptor for an event loop."""

    def connection(self) -> int | None:
        """Return the number of the current connection; None while disconnected."""

    def refusal(self) -> str | None:
        """Return why the orchestrator refuses this engine; None if it does not."""


class OrchestratorLink:
    """An engine's end of the wire, across reconnections. For one thread."""

    def __init__(self, socket: EngineSocket, hello: Hello, *, clock: Clock = time) -> None:
        """``hello`` holds the fields that never change in this process."""
        self._socket = socket
        self._clock = clock
        self._hello = hello
        self._window = SendWindow(1)  # the welcome sets the credit
        self._welcome: Welcome | None = None
        """The newest welcome; None before the first."""
        self._connection: int | None = None
        """Connection number seen by the last ``receive``."""
        self._hello_connection: int | None = None
        """Connection on which the hello was sent; None if no hello was sent, or it is no longer
        valid."""
        self._is_welcome = False
        """Whether the hello has been answered by a welcome."""
        self._hello_sent_s = self._last_message_s = self._heartbeat_due_s = self._clock.monotonic()
        self._last_receive_s = self._last_message_s
        """Time of the last ``receive``. The orchestrator's silence is counted up to this time,
        because later messages are unread."""
        self._complaints: deque[int] = deque(maxlen=REFUSALS_MAX)
        """First unacknowledged step at each of the last ``REFUSALS_MAX`` complaints."""

    # ------------------------------------------------------------ hello

    @property
    def is_connected(self) -> bool:
        """Whether a welcome has been received, so that sent messages reach the orchestrator."""
        return self._is_welcome

    @property
    def is_hello_due(self) -> bool:
        """Whether :meth:`send_hello` must be called next."""
        if self._connection is None or self._is_welcome:
            return False
        if self._hello_connection != self._connection:
            return True
        return self._clock.monotonic() - self._hello_sent_s > HELLO_INTERVAL_S

    def send_hello(
        self,
        *,
        weight_version: int,
        turns: Sequence[int],
        asleep: Sequence[MemoryTag] = (),
        needs_weights: bool = False,
        adapters: Sequence[HeldAdapter] = (),
    ) -> None:
        """Send a hello: identity, turns, weights, and the range of steps to replay."""
        self._hello_connection, self._hello_sent_s = self._connection, self._clock.monotonic()
        hello = msgspec.structs.replace(
            self._hello,
            weight_version=weight_version,
            first_seq=self._window.first_seq,
            next_seq=self._window.next_seq(),
            turns=np.array(turns, dtype="<u4").tobytes(),
            asleep=list(asleep),
            needs_weights=needs_weights,
            adapters=list(adapters),
        )
        self._socket.send(hello)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._is_welcome = True
        self._welcome = welcome
        self._window.set_credit(welcome.credit_steps)
        self._last_message_s = self._heartbeat_due_s = self._clock.monotonic()
        for frame in self._window.unacknowledged():
            self._socket.send_again(frame)

    def _disconnect(self) -> None:
        """End the session: messages in either direction are dropped until the next welcome."""
        self._is_welcome = False
        self._hello_connection = None

    # ------------------------------------------------------------ in

    def receive(self, timeout_s: float) -> list[FromOrchestrator]:
        """Return the valid messages that have arrived; wait up to ``timeout_s`` if there are none.

        Raises:
            NotUnderstood: the orchestrator has refused the same step ``REFUSALS_MAX`` times.
        """
        # Read first, so that all messages of an earlier connection are read before the hello.
        self._connection = self._socket.connection()
        if self._hello_connection != self._connection:
            self._disconnect()
        messages = [
            message for message in self._socket.receive(timeout_s) if self._is_for_engine(message)
        ]
        self._last_receive_s = self._clock.monotonic()
        return messages

    def _is_for_engine(self, message: FromOrchestrator) -> bool:
        """Handle the link's own messages; return whether the engine loop must handle this one."""
        match message:
            case Shutdown() | HelloRejected():
                return True
            case Welcome() if self._hello_connection is not None and not self._is_welcome:
                self._on_welcome(message)
                return False
        if not self._is_welcome:
            return False
        self._last_message_s = self._clock.monotonic()
        match message:
            case Ack(seq=seq):
                self._acknowledge(seq)
            case MessageRejected(message=why):
                self._on_complaint(why)
            case Welcome() | OrchestratorHeartbeat():
                pass
            case _:
                return True
        return False

    def _acknowledge(self, seq: int) -> None:
        try:
            self._window.acknowledge(seq)
        except BadFrame as error:
            self.send(MessageRejected(message=str(error)))

    def _on_complaint(self, why: str) -> None:
        """Reconnect with a hello and a replay, because the orchestrator drops steps
        after a bad one."""
        print_stderr(f"orchestrator complained: {why}")
        first_seq = self._window.first_seq
        self._complaints.append(first_seq)
        if self._complaints.count(first_seq) == REFUSALS_MAX:
            raise NotUnderstood(times=REFUSALS_MAX, seq=first_seq, why=why)
        self._disconnect()

    def fileno(self) -> int:
        """Return a file descriptor to poll, see :meth:`DealerSocket.fileno`."""
        return self._socket.fileno()

    # ------------------------------------------------------------ out

    def send(self, message: Message) -> None:
        """Send a message that may be lost: the next hello contains it, or the orchestrator requests
        it again."""
        if self._is_welcome:
            self._socket.send(message)

    def send_goodbye(
        self, reason: str, *, has_failed: bool = False, is_requested: bool = False
    ) -> None:
        """Send a goodbye, if a hello was sent."""
        if self._hello_connection is not None:
            goodbye = Goodbye(reason=reason, has_failed=has_failed, is_requested=is_requested)
            self._socket.send(goodbye)

    @property
    def has_credit(self) -> bool:
        """Whether the window has room for another unacknowledged step message."""
        return self._window.is_open

    @property
    def next_seq(self) -> int:
        """Sequence number of the next step message."""
        return self._window.next_seq()

    def send_step(self, step: Step, *, continues_step: bool = False) -> None:
        """Send a step message, now or after the next welcome; keep it until it is acknowledged.

        ``continues_step``: it is a further message of the decode step that the last one was of.
        """
        frame = self._socket.send(step) if self._is_welcome else encode(step)
        self._window.sent(step.seq, frame, continues_step=continues_step)

    # ------------------------------------------------------------ time

    def take_heartbeat_due(self) -> bool:
        """Return whether a heartbeat is due, and restart the interval if it is."""
        now_s = self._clock.monotonic()
        if self._welcome is None or not self._is_welcome or now_s < self._heartbeat_due_s:
            return False
        self._heartbeat_due_s = now_s + self._welcome.heartbeat_interval_s
        return True

    def heartbeat_due_in_s(self) -> float:
        """Return the seconds until the next heartbeat."""
        return max(0.0, self._heartbeat_due_s - self._clock.monotonic())

    def key_refusal(self) -> str | None:
        """Return why the orchestrator rejects this engine's keys; None if it accepts them."""
        return self._socket.refusal()

    def timeout_reason(self) -> str | None:
        """Return why the orchestrator is considered gone; None while it may still return."""
        silent_s = self._last_receive_s - self._last_message_s
        if self._welcome is None:
            return "not welcomed" if silent_s > WELCOME_TIMEOUT_S else None
        if silent_s > self._welcome.orchestrator_timeout_s:
            return f"heard nothing for {silent_s:.1f} s"
        return None
