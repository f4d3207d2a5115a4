"""The pool's handle of one worker process: starts it, sends calls, applies timeouts, ends it.

All methods run on the pool's event loop. Calls that compute are sent one at a time, so that the
pool can name the call that a process was running when it died or hung. A call's timeout begins when
it is sent.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from tidegate.environments import calls
from tidegate.environments.started_worker import StartedWorker

OUTPUT_BYTES_KEPT = 4096
"""Bytes kept of a process's output, for the error that reports its death."""

LINES_SHOWN = 20
"""Lines of output in that error: a Python stack and a few lines before it."""


@dataclass(slots=True)
class OutputTail:
    """The last bytes of a process's output."""

    parts: deque[bytes] = field(default_factory=deque)

    def add(self, data: bytes) -> None:
        """Append output."""
        self.parts.append(data[-OUTPUT_BYTES_KEPT:])
        while sum(map(len, self.parts)) - len(self.parts[0]) >= OUTPUT_BYTES_KEPT:
            self.parts.popleft()

    def lines(self) -> list[str]:
        """Return the last :data:`LINES_SHOWN` lines."""
        text = b"".join(self.parts)[-OUTPUT_BYTES_KEPT:].decode(errors="replace")
        return text.splitlines()[-LINES_SHOWN:]


AWAITING_GRACE_S = 5.0
"""Added to twice the timeout of an awaiting call before its process is killed. The worker itself
times out such calls, so this applies only if its event loop is blocked, and the call that blocks
it should time out first."""

OUTPUT_DRAIN_S = 1.0
"""Longest time in seconds to read the output of a process that has ended; its children may keep the
pipe open."""


class ProcessDied(Exception):
    """A worker process ended before it replied."""

    def __init__(self, how: str, *, suspects: int, was_late: bool = False) -> None:
        """``suspects``: number of calls that may be the cause; 0 if this one is not among them."""
        super().__init__(how)
        self.how = how
        self.suspects = suspects
        self.was_late = was_late
        """Whether the process was killed because this call exceeded its timeout."""


@dataclass(slots=True, eq=False)
class _PendingCall:
    """A call from request to reply."""

    call_id: int
    frame: bytes
    timeout_s: float
    reply: "asyncio.Future[calls.WorkerReply]"
    """Cancelled if the caller no longer waits."""
    when_free: Callable[[], None] | None
    """Called once, as soon as the call no longer keeps others waiting."""
    timer: asyncio.TimerHandle | None = None


class WorkerProcess:
    """One worker process. Use it only on the event loop where it was created."""

    def __init__(self, started: StartedWorker) -> None:
        """Take over a process that was just started."""
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_PendingCall] = deque()
        self._computing: _PendingCall | None = None
        """The call that the process runs now; waiting calls are sent after it."""
        self._sent: dict[int, _PendingCall] = {}
        """Calls without a reply, by id: the computing one and the awaiting ones."""
        self._output = OutputTail()
        self.environments = 0
        """Number of open environments, maintained by their owners."""
        self.exit_reason: str | None = None
        self._is_closing = False
        self._is_ready = False
        self._ended = asyncio.Event()
        self._started = started
        self.name = started.name
        self._transport: asyncio.Transport | None = None
        self._tasks = {
            self._loop.create_task(self._connect(started.connection), name=f"{self.name}: replies"),
            self._loop.create_task(self._listen(), name=f"{self.name}: output"),
        }
        self._starting = self._loop.call_later(started.start_timeout_s, self._start_timed_out)

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self.exit_reason is not None

    @property
    def queued(self) -> int:
        """Number of calls that wait or compute."""
        return len(self._waiting) + (self._computing is not None)

    async def request(
        self,
        call: calls.WorkerCall,
        timeout_s: float,
        *,
        when_free: Callable[[], None] | None = None,
    ) -> calls.WorkerReply:
        """Send a call, and return its reply.

        ``when_free`` is called once, as soon as this call no longer keeps others waiting. A caller
        that is cancelled does not stop a call that was sent: the call keeps the process busy until
        its reply or timeout.

        Raises:
            ProcessDied: the process had died, or died meanwhile, perhaps because of this call's
                timeout.
            TypeError, ValueError: the call can't be encoded.
        """
        try:
            if self.exit_reason is not None:
                raise self._died(suspects=0)
            frame = calls.frame(call)
        except BaseException:
            if when_free is not None:
                when_free()
            raise
        pending = _PendingCall(
            call.call_id, frame, timeout_s, self._loop.create_future(), when_free
        )
        self._waiting.append(pending)
        self._send_next()
        return await pending.reply

    def _died(self, *, suspects: int, was_late: bool = False) -> ProcessDied:
        if self._started.was_lost:
            return ProcessDied(self.exit_reason or "", suspects=0)
        # A process that never became ready would fail again, so this call must not be retried.
        suspects = suspects if self._is_ready or self._is_closing else 1
        return ProcessDied(self.exit_reason or "", suspects=suspects, was_late=was_late)

    def _send_next(self) -> None:
        if not self._is_ready or self._is_closing:
            return
        while self._waiting and self._computing is None:
            pending = self._waiting.popleft()
            if pending.reply.cancelled():
                _notify_free(pending)
                continue
            assert self._transport is not None
            self._transport.write(pending.frame)
            pending.timer = self._loop.call_later(pending.timeout_s, self._timed_out, pending)
            self._computing = self._sent[pending.call_id] = pending

    def _timed_out(self, pending: _PendingCall) -> None:
        how = f"killed: no reply within {pending.timeout_s:g} s"
        self._end(how, late=pending)

    # ------------------------------------------------------------ replies and output

    async def _connect(self, connection: socket.socket) -> None:
        await self._loop.create_unix_connection(lambda: _ReplyProtocol(self), sock=connection)

    def connected(self, transport: asyncio.Transport) -> None:
        """Store the transport; the socket is writable."""
        self._transport = transport

    def handle_reply(self, reply: calls.WorkerReply) -> None:
        """Handle one reply."""
        if isinstance(reply, calls.WorkerReady):
            self._is_ready = True
            self._starting.cancel()
            self._send_next()
            return
        pending = self._sent.get(reply.call_id)
        if pending is None:
            return
        if pending.timer is not None:
            pending.timer.cancel()
        if pending is self._computing:
            self._computing = None
            _notify_free(pending)
            self._send_next()
        if isinstance(reply, calls.CallAwaiting):
            late_s = 2 * pending.timeout_s + AWAITING_GRACE_S
            pending.timer = self._loop.call_later(late_s, self._timed_out, pending)
            return
        del self._sent[reply.call_id]
        if not pending.reply.done():
            pending.reply.set_result(reply)

    def connection_closed(self, why: str | None) -> None:
        """Handle a closed socket, or an invalid reply (``why``): then kill the process."""
        if why is not None or self._is_closing or self.is_dead:
            self._end(why)
        else:
            task = self._loop.create_task(self._end_after_output())
            self._tasks.add(task)

    async def _end_after_output(self) -> None:
        listening = [task for task in self._tasks if task is not asyncio.current_task()]
        await asyncio.wait(listening, timeout=OUTPUT_DRAIN_S)
        self._end(None)

    async def _listen(self) -> None:
        """Keep the end of the process's output, and drain the pipe."""
        reader = asyncio.StreamReader()
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._started.output
        )
        try:
            while data := await reader.read(65536):
                self._output.add(data)
        finally:
            transport.close()

    # ------------------------------------------------------------ end

    def kill(self, how: str) -> None:
        """Kill the process now, with all processes that it started."""
        self._end(how)

    def _start_timed_out(self) -> None:
        self._end(f"killed: not ready within {self._started.start_timeout_s:.0f} s")

    def _end(self, how: str | None, *, late: _PendingCall | None = None) -> None:
        if self.exit_reason is not None:
            return
        self._starting.cancel()
        ended = self._started.kill()
        if self._transport is not None:
            self._transport.abort()
        self.exit_reason = how or ended
        if lines := self._output.lines():
            self.exit_reason += "; its last output:\n  " + "\n  ".join(lines)
        self._fail_all(late)
        self._ended.set()

    def _fail_all(self, late: _PendingCall | None) -> None:
        """Fail all calls, with how the process ended and how many calls may have caused it."""
        # A late or computing call is the cause; without one, any awaiting call may be.
        culprit = late or self._computing
        suspects = [culprit] if culprit is not None else list(self._sent.values())
        if self._is_closing:
            suspects = []
        pendings = [*self._sent.values(), *self._waiting]
        for pending in pendings:
            if pending.timer is not None:
                pending.timer.cancel()
            if pending is self._computing or pending.call_id not in self._sent:
                _notify_free(pending)
            if not pending.reply.done():
                count = len(suspects) if pending in suspects else 0
                pending.reply.set_exception(self._died(suspects=count, was_late=pending is late))
        self._waiting.clear()
        self._sent.clear()
        self._computing = None

    async def close(self, grace_s: float) -> None:
        """Let the process close its environments for up to ``grace_s``, then kill it."""
        self._is_closing = True
        if self._transport is not None and not self.is_dead:
            self._transport.write_eof()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), grace_s)
        self._end("the pool was closed")
        # A child of an environment may hold the output open, so reading may not end by itself.
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


class _ReplyProtocol(asyncio.Protocol):
    """asyncio protocol that cuts the socket's bytes into replies."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the transport on."""
        self._process.connected(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        """Pass on every complete reply."""
        self._unread += data
        start = 0
        try:
            while len(self._unread) - start >= calls.LENGTH_BYTES:
                body = start + calls.LENGTH_BYTES
                end = body + calls.body_bytes(self._unread[start:body])
                if len(self._unread) < end:
                    break
                self._process.handle_reply(calls.decode_reply(self._unread[body:end]))
                start = end
        except ValueError as error:  # includes msgspec's DecodeError
            self._process.connection_closed(f"killed: sent an invalid reply: {error}")
        del self._unread[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the process has ended."""
        self._process.connection_closed(None)


def _notify_free(pending: _PendingCall) -> None:
    when_free, pending.when_free = pending.when_free, None
    if when_free is not None:
        when_free()
