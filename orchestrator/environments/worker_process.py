"""How is one worker process started, asked, watched and ended? And who was it that killed it?

It knows calls, not environments. Calls that compute are sent one at a time, so that it is known
what a process was doing when it died or hung, and a call's time begins when it is really begun.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.orchestrator.environments import calls

OUTPUT_BYTES_KEPT = 4096
"""Of what a process prints: its last words, for the error that reports its death."""

LINES_SHOWN = 20
"""A stack of Python's, with a few lines before it."""

AWAITING_GRACE_S = 5.0
"""Beyond twice its time, for a call that awaits. It is ended inside the process, in time; only one
whose loop is blocked comes to this, and what blocks it should be found first."""

START_TIMEOUT_S = 60.0
"""A Python with nothing but msgspec takes a tenth of a second, unless the machine is drowned."""

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))
"""What another Python must not be given: it has its own."""


class ProcessDied(Exception):
    """The process ended before it had answered."""

    def __init__(self, how: str, *, suspects: int, was_late: bool = False) -> None:
        """``suspects``: how many calls may have killed it, this one among them; 0: not this one."""
        super().__init__(how)
        self.how = how
        self.suspects = suspects
        self.was_late = was_late
        """Whether it was killed because this call took too long."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that was sent."""

    reply: "asyncio.Future[calls.Reply]"
    begun: "asyncio.Future[None]"
    """Done when the process can take another call: it awaits, or has answered."""


@dataclass(slots=True)
class _LastWords:
    """The end of what a process has printed."""

    parts: deque[bytes] = field(default_factory=deque)

    def add(self, data: bytes) -> None:
        self.parts.append(data[-OUTPUT_BYTES_KEPT:])
        while sum(map(len, self.parts)) - len(self.parts[0]) >= OUTPUT_BYTES_KEPT:
            self.parts.popleft()

    def lines(self) -> list[str]:
        text = b"".join(self.parts)[-OUTPUT_BYTES_KEPT:].decode(errors="replace")
        return text.splitlines()[-LINES_SHOWN:]


class WorkerProcess:
    """One process, from the loop that it was started on."""

    def __init__(self, python: str, memory_bytes: int | None) -> None:
        """Start it. Raises OSError if there are no processes, memory or files left."""
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[calls.Reply]] = set()
        self._said = _LastWords()
        self.queued = 0
        """Calls that wait here, or keep others waiting."""
        self.environments = 0
        """Open in it; counted by who opens them."""
        self.how_it_died: str | None = None
        self._is_closing = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = _command(python, theirs.fileno(), memory_bytes)
            # Its own session: Ctrl-C is for the run, which then ends its processes; and what
            # environments have started is ended with it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=child_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._reading = self._loop.create_task(self._read(), name=f"worker {self.pid}: replies")
        self._listening = self._loop.create_task(self._listen(), name=f"worker {self.pid}: output")
        self._writer: asyncio.StreamWriter | None = None
        self._ready = asyncio.Event()
        """Set when it takes calls; also when it has died."""
        self._was_ready = False

    @property
    def is_dead(self) -> bool:
        """Whether it can be asked nothing more."""
        return self.how_it_died is not None

    async def ask(
        self, call: calls.Call, timeout_s: float, *, when_free: Callable[[], None] | None = None
    ) -> calls.Reply:
        """The process's answer, in time or not at all.

        ``when_free`` is called once, as soon as this call keeps nobody from being answered.

        Who is cancelled leaves a call that was sent to come to its end: it keeps the process busy,
        and is ended in time as any.

        Raises:
            ProcessDied: it did, before or meanwhile, perhaps because this took too long.
            TypeError, ValueError: the call can't be sent.
        """
        wanted = asyncio.Event()
        wanted.set()
        answering = self._loop.create_task(self._ask(call, timeout_s, wanted, when_free))
        self._tasks.add(answering)
        answering.add_done_callback(self._forget)
        try:
            return await asyncio.shield(answering)
        except asyncio.CancelledError:
            wanted.clear()
            raise

    def _forget(self, task: "asyncio.Task[calls.Reply]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more

    async def _ask(
        self,
        call: calls.Call,
        timeout_s: float,
        wanted: asyncio.Event,
        when_free: Callable[[], None] | None,
    ) -> calls.Reply:
        self.queued += 1
        try:
            frame = calls.frame(call)
            async with self._turn:
                await self._wait_until_ready()
                if not wanted.is_set():
                    raise asyncio.CancelledError
                pending = self._send(call.call_id, frame)
                await self._in_time(pending.begun, timeout_s)
        finally:
            self.queued -= 1
            if when_free is not None:
                when_free()
        # It awaits, or has answered.
        await self._in_time(pending.reply, 2 * timeout_s + AWAITING_GRACE_S)
        del self._pending[call.call_id]
        return pending.reply.result()

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError:
            self.kill(f"killed, for it was not ready in {START_TIMEOUT_S:.0f} s")

    def _send(self, call_id: int, frame: bytes) -> _Pending:
        if self.how_it_died is not None:
            # One that never was ready won't be if it is started again.
            raise ProcessDied(self.how_it_died, suspects=0 if self._was_ready else 1)
        pending = _Pending(self._loop.create_future(), self._loop.create_future())
        self._pending[call_id] = pending
        assert self._writer is not None
        self._writer.write(frame)
        return pending

    async def _in_time(self, future: "asyncio.Future[Any]", timeout_s: float) -> None:
        """Wait for it; kill the process if it takes too long."""
        await asyncio.wait([future], timeout=timeout_s)
        if not future.done():
            how = f"killed, for it gave no answer in {timeout_s:g} s"
            self.kill(how)
            raise ProcessDied(how, suspects=1, was_late=True)
        future.result()

    # ------------------------------------------------------------ what comes from it

    async def _read(self) -> None:
        """Take in replies until there are no more."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        why = None
        try:
            while True:
                head = await reader.readexactly(calls.LENGTH_BYTES)
                body = await reader.readexactly(calls.body_bytes(head))
                self._take(calls.decode_reply(body))
        except (asyncio.IncompleteReadError, OSError):
            pass  # it has ended, or is about to
        except ValueError as error:  # msgspec's too
            why = f"killed, for it wrote what is no reply: {error}"
        self._writer.close()
        if why is None and not self.is_dead:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._listening), 1.0)
        self._end(why)

    def _take(self, reply: calls.Reply) -> None:
        if isinstance(reply, calls.Ready):
            self._was_ready = True
            self._ready.set()
        pending = self._pending.get(reply.call_id)
        if pending is None:
            return
        if not pending.begun.done():
            pending.begun.set_result(None)
        if not isinstance(reply, calls.Awaiting) and not pending.reply.done():
            pending.reply.set_result(reply)

    async def _listen(self) -> None:
        """Keep the end of what it prints, and let it print on."""
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            while data := await reader.read(65536):
                self._said.add(data)
        finally:
            transport.close()

    # ------------------------------------------------------------ its end

    def kill(self, how: str) -> None:
        """End it now, with all that it has started."""
        self._end(how)

    def _end(self, how: str | None) -> None:
        if self.how_it_died is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        status = self._process.wait()
        self.how_it_died = how or _status(status)
        if lines := self._said.lines():
            self.how_it_died += "; it had printed:\n  " + "\n  ".join(lines)
        self._ready.set()
        guilty = [pending for pending in self._pending.values() if not pending.begun.done()]
        # One that computes is found at it; else any of those that await may have done it.
        suspects = guilty or [p for p in self._pending.values() if not p.reply.done()]
        if self._is_closing:
            suspects = []
        for pending in self._pending.values():
            count = len(suspects) if pending in suspects else 0
            died = ProcessDied(self.how_it_died, suspects=count)
            for future in (pending.begun, pending.reply):
                if not future.done():
                    future.set_exception(died)
                    future.exception()  # only one of the two is waited for

    async def close(self, grace_s: float) -> None:
        """Let it close its environments, for so long; then it ends."""
        self._is_closing = True
        if self._writer is not None and not self.is_dead:
            self._writer.write_eof()
        await asyncio.wait([self._reading], timeout=grace_s)
        self._end("the pool was closed")
        # A grandchild may hold the output open; nobody listens any more.
        self._listening.cancel()
        await asyncio.wait([self._reading, self._listening])


def _command(python: str, descriptor: int, memory_bytes: int | None) -> list[str]:
    module = "tidegate.orchestrator.environments.worker"
    command = [python, "-X", "faulthandler", "-m", module]
    command += ["--socket", str(descriptor), "--parent", str(os.getpid())]
    return command if memory_bytes is None else [*command, "--memory-bytes", str(memory_bytes)]


def child_environment() -> dict[str, str]:
    """The variables of a process that finds modules as this one does, but for those that are
    installed: it may be another Python, and have its own."""
    places = [str(Path(place or ".").absolute()) for place in sys.path]
    ours = [p for p in places if not p.startswith(INSTALLED) and not p.endswith(".zip")]
    before = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(ours)), "PYTHONUNBUFFERED": "1"}
    return {**before, **os.environ, **own}


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
