"""Connection of a remote trainer to its run: a ZeroMQ DEALER on a thread, with futures for replies.

The remote handle sends numbered requests through it. The thread sends heartbeats while a train step
computes, repeats lost requests, and fails all requests once the run has been silent for too long.
"""

import concurrent.futures
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate import errors
from tidegate.errors import (
    BadFrame,
    ConfigError,
    RunClosed,
    RunLost,
    TidegateError,
    check_not_forked,
)
from tidegate.transport import trainer_messages as wire
from tidegate.transport.message import Message
from tidegate.transport.security import EngineKeys
from tidegate.transport.trainer_sockets import TrainerDealer
from tidegate.transport.wakeup import Wakeup

HEARTBEAT_INTERVAL_S = 1.0
"""Time between two heartbeats to the run."""

CLOSE_TIMEOUT_S = 5.0
"""Time that :meth:`TrainerLink.close` waits for the thread, which sends a last message."""

log = logging.getLogger("tidegate")


class RetryLater(Exception):
    """The run refuses a request for now, for the reason in the message."""


@dataclass(frozen=True, slots=True)
class ReceivedReply:
    """A reply, and the frames that follow it on the wire."""

    reply: wire.AnyTrainerReply
    frames: Sequence[bytes]


ReplyFuture = concurrent.futures.Future[ReceivedReply]


@dataclass(slots=True)
class _PendingRequest:
    """A request without a reply yet."""

    future: ReplyFuture
    frames: Sequence[bytes]


class TrainerLink:
    """One connection to a run. Any thread may use it."""

    def __init__(self, address: str, keys: EngineKeys | None, *, run_timeout_s: float) -> None:
        """Connect; the run need not listen yet.

        Raises:
            ConfigError: the address or the keys are wrong.
        """
        self.owner_pid = os.getpid()
        """Process that has the link's thread and socket; a forked child has neither."""
        self._address = address
        self._run_timeout_s = run_timeout_s
        identity = f"trainer-{uuid.uuid4().hex}".encode()
        self._socket = TrainerDealer(address, identity=identity, keys=keys)
        self._lock = threading.Lock()
        self._outbox: deque[Sequence[bytes]] = deque()
        self._pending: dict[int, _PendingRequest] = {}
        self._newest = 0
        self._failure: TidegateError | None = None
        """Error that ended the link; every later request raises it."""
        self._last_received_s = self._pending_since_s = time.monotonic()
        self._wakeup = Wakeup()
        self.has_joined = False
        """Whether the run has accepted this trainer. Heartbeats are sent only after that."""
        self._is_closing = False
        self._leave_frame: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="tidegate trainer", daemon=True)
        self._thread.start()

    def request(self, request: wire.AnyTrainerRequest, frames: Sequence[bytes] = ()) -> ReplyFuture:
        """Send a request; the future has the reply, or the run's error.

        Raises:
            RunLost, RunClosed: the link has ended.
            BadFrame: the request can't be encoded.
            RunForked: this process was forked from the one that connected.
        """
        check_not_forked(self.owner_pid)
        future: ReplyFuture = concurrent.futures.Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number = self._newest + 1
            message = (
                wire.encode(wire.RequestEnvelope(request_id=number, request=request)),
                *frames,
            )
            self._newest = number
            if not self._pending:
                self._pending_since_s = time.monotonic()
            self._pending[number] = _PendingRequest(future, message)
            self._outbox.append(message)
        self._wakeup.wake()
        return future

    def close(self, *, is_done: bool) -> None:
        """Leave the run and close the socket. Harmless if repeated."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._leave_frame = wire.encode(wire.LeaveRun(is_done=is_done))
        self._wakeup.wake()
        self._thread.join(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        beat_s = 0.0
        try:
            while not self._is_closing:
                now_s = time.monotonic()
                if now_s - beat_s >= HEARTBEAT_INTERVAL_S:
                    beat_s = now_s
                    self._heartbeat(now_s)
                self._send_queued()
                self._receive()
                due_in_s = beat_s + HEARTBEAT_INTERVAL_S - time.monotonic()
                self._socket.wait(self._wakeup.fileno(), due_in_s)
                self._wakeup.clear()
        except Exception as error:
            log.exception("the link to the run failed")
            self._fail(RunLost(f"the link to {self._address} failed: {error!r}"))
        finally:
            if self._leave_frame is not None and self._failure is None:
                self._socket.send((self._leave_frame,))
            self._fail(RunClosed("this trainer has left the run; connect again to continue"))
            self._socket.close()
            self._wakeup.close()

    def _heartbeat(self, now_s: float) -> None:
        if (why := self._socket.refusal) is not None:
            self._fail(ConfigError(why))
        with self._lock:
            pending = sorted(self._pending)
            newest = self._newest
            silent_s = now_s - max(self._last_received_s, self._pending_since_s)
        if self.has_joined:
            self._socket.send(
                (
                    wire.encode(
                        wire.TrainerHeartbeat(last_request_id=newest, pending_request_ids=pending)
                    ),
                )
            )
        if pending and silent_s > self._run_timeout_s:
            self._fail(
                RunLost(
                    f"the run at {self._address} sent nothing for {silent_s:.0f} s; when it is "
                    f"available again, connect with resume=state_dict() of the last checkpoint"
                )
            )

    def _send_queued(self) -> None:
        while self._outbox:
            frames = self._outbox.popleft()
            try:
                self._socket.send(frames)
            except BadFrame as error:
                self._fail_unsendable(frames, error)

    def _fail_unsendable(self, frames: Sequence[bytes], error: BadFrame) -> None:
        with self._lock:
            number = next((n for n, p in self._pending.items() if p.frames is frames), 0)
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.future.set_exception(error)

    def _receive(self) -> None:
        while (frames := self._socket.receive()) is not None:
            self._last_received_s = time.monotonic()
            try:
                self._handle(wire.decode_to_trainer(frames[0]), frames[1:])
            except BadFrame as error:
                log.warning("address=%s sent a malformed message: %s", self._address, error)

    def _handle(self, message: Message, frames: Sequence[bytes]) -> None:
        match message:
            case wire.ReplyEnvelope():
                if (pending := self._settle(message.request_id)) is not None:
                    pending.future.set_result(ReceivedReply(message.reply, frames))
            case wire.RequestFailed():
                error: Exception = _error(message.error, message.message)
                if message.may_retry:
                    error = RetryLater(message.message)
                if (pending := self._settle(message.request_id)) is not None:
                    pending.future.set_exception(error)
            case wire.RunHeartbeat():
                with self._lock:
                    lost = [
                        self._pending[n].frames
                        for n in message.missing_request_ids
                        if n in self._pending
                    ]
                    self._outbox.extend(frames for frames in lost if frames not in self._outbox)
            case wire.UnknownTrainer():
                self._fail(
                    RunLost(
                        f"the run at {self._address} does not know this trainer, because the run "
                        f"was restarted or another process has taken this rank; connect again with "
                        f"resume=state_dict() of the last checkpoint"
                    )
                )
            case wire.RunTerminated():
                self._fail(_error(message.error, message.message))

    def _settle(self, number: int) -> _PendingRequest | None:
        with self._lock:
            pending = self._pending.pop(number, None)
        return pending if pending is not None and not pending.future.cancelled() else None

    def _fail(self, error: TidegateError) -> None:
        with self._lock:
            self._failure = self._failure or error
            pending, self._pending = list(self._pending.values()), {}
            self._outbox.clear()
        for request in pending:
            if not request.future.done():
                request.future.set_exception(self._failure)


def _error(name: str, message: str) -> TidegateError:
    """Return the run's error as an instance of its class; of its fields only the message is set."""
    kind = getattr(errors, name, TidegateError)
    if not (isinstance(kind, type) and issubclass(kind, TidegateError)):
        kind = TidegateError
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error
