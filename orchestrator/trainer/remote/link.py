"""Connection of a remote trainer to its run: a ZeroMQ DEALER on a thread, with futures for replies.

The remote handle sends numbered requests through it. The thread sends heartbeats while a train step
computes, repeats lost requests, and gives up a run that is silent.
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


class MayRetry(Exception):
    """The run refuses a request for now, for the reason in the message."""


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """An answer, and the frames that follow it."""

    answer: wire.AnyTrainerReply
    frames: Sequence[bytes]


AnswerFuture = concurrent.futures.Future[RequestAnswered]


@dataclass(slots=True)
class _Pending:
    """A request that has no answer yet."""

    future: AnswerFuture
    frames: Sequence[bytes]


class TrainerLink:
    """One connection to a run. Any thread may use it."""

    def __init__(self, address: str, keys: EngineKeys | None, *, run_timeout_s: float) -> None:
        """Connect; the run need not be there yet.

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
        self._pending: dict[int, _Pending] = {}
        self._newest = 0
        self._failure: TidegateError | None = None
        """Error that ended the link; every later request raises it."""
        self._heard_s = self._pending_since_s = time.monotonic()
        self._wakeup = Wakeup()
        self.has_joined = False
        """Whether the run has accepted this trainer. Heartbeats are sent only after that."""
        self._is_closing = False
        self._farewell: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="tidegate trainer", daemon=True)
        self._thread.start()

    def ask(self, ask: wire.AnyTrainerRequest, frames: Sequence[bytes] = ()) -> AnswerFuture:
        """Send a request; the future has the answer, or the run's error.

        Raises:
            RunLost, RunClosed: the link has ended.
            BadFrame: the request can't be encoded.
            RunForked: this process was forked from the one that connected.
        """
        check_not_forked(self.owner_pid)
        future: AnswerFuture = concurrent.futures.Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number = self._newest + 1
            message = (wire.encode(wire.RequestEnvelope(request_id=number, request=ask)), *frames)
            self._newest = number
            if not self._pending:
                self._pending_since_s = time.monotonic()
            self._pending[number] = _Pending(future, message)
            self._outbox.append(message)
        self._wakeup.wake()
        return future

    def close(self, *, is_done: bool) -> None:
        """Leave the run and close the socket. Harmless if repeated."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._farewell = wire.encode(wire.LeaveRun(is_done=is_done))
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
                    self._beat(now_s)
                self._send_waiting()
                self._receive()
                due_in_s = beat_s + HEARTBEAT_INTERVAL_S - time.monotonic()
                self._socket.wait(self._wakeup.fileno(), due_in_s)
                self._wakeup.quiet()
        except Exception as error:
            log.exception("the link to the run failed")
            self._fail(RunLost(f"the link to {self._address} failed: {error!r}"))
        finally:
            if self._farewell is not None and self._failure is None:
                self._socket.send((self._farewell,))
            self._fail(RunClosed("this trainer has left the run; connect again to go on"))
            self._socket.close()
            self._wakeup.close()

    def _beat(self, now_s: float) -> None:
        if (why := self._socket.refusal) is not None:
            self._fail(ConfigError(why))
        with self._lock:
            pending = sorted(self._pending)
            newest = self._newest
            silent_s = now_s - max(self._heard_s, self._pending_since_s)
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
                    f"the run at {self._address} was not heard for {silent_s:.0f} s; when it is "
                    f"there again, connect anew, with resume=state_dict() of the last checkpoint"
                )
            )

    def _send_waiting(self) -> None:
        while self._outbox:
            frames = self._outbox.popleft()
            try:
                self._socket.send(frames)
            except BadFrame as error:
                self._refuse(frames, error)

    def _refuse(self, frames: Sequence[bytes], error: BadFrame) -> None:
        with self._lock:
            number = next((n for n, p in self._pending.items() if p.frames is frames), 0)
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.future.set_exception(error)

    def _receive(self) -> None:
        while (frames := self._socket.receive()) is not None:
            self._heard_s = time.monotonic()
            try:
                self._take(wire.decode_to_trainer(frames[0]), frames[1:])
            except BadFrame as error:
                log.warning("address=%s said what can't be read: %s", self._address, error)

    def _take(self, message: Message, frames: Sequence[bytes]) -> None:
        match message:
            case wire.ReplyEnvelope():
                if (pending := self._settle(message.request_id)) is not None:
                    pending.future.set_result(RequestAnswered(message.reply, frames))
            case wire.RequestFailed():
                error: Exception = _error(message.error, message.message)
                if message.may_retry:
                    error = MayRetry(message.message)
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
                        f"the run at {self._address} does not know this trainer: it was started "
                        f"anew, or another process has this rank now. Connect again, with resume="
                        f"state_dict() of the last checkpoint"
                    )
                )
            case wire.RunTerminated():
                self._fail(_error(message.error, message.message))

    def _settle(self, number: int) -> _Pending | None:
        with self._lock:
            pending = self._pending.pop(number, None)
        return pending if pending is not None and not pending.future.cancelled() else None

    def _fail(self, error: TidegateError) -> None:
        with self._lock:
            self._failure = self._failure or error
            pending, self._pending = list(self._pending.values()), {}
            self._outbox.clear()
        for one in pending:
            if not one.future.done():
                one.future.set_exception(self._failure)


def _error(name: str, message: str) -> TidegateError:
    """Return the run's error as its own class, with the message only, not its other fields."""
    kind = getattr(errors, name, TidegateError)
    if not (isinstance(kind, type) and issubclass(kind, TidegateError)):
        kind = TidegateError
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error
