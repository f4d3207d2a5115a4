"""Sandboxes for programs that a model writes: limits, results, and a pool of started sandboxes.

    with tidegate.Sandboxes(tidegate.Bubblewrap(), sandboxes_max=8) as sandboxes:
        async with sandboxes.take() as sandbox:
            result = await sandbox.run(["python3", "a.py"], files={"a.py": text}, stdin="3 4\n")

A program's own failure (a crash, a timeout, too much memory) is in its :class:`ProgramResult`, for
the environment to reward; a sandbox that fails through no fault of the program raises
:class:`~tidegate.errors.SandboxLost`, which the run retries. Providers start the sandboxes:
:mod:`local_sandboxes` on this machine, :mod:`remote_sandboxes` by other services.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tidegate.environments.loop_thread import LoopThread, Result
from tidegate.errors import (
    ConfigError,
    RunClosed,
    SandboxFileError,
    SandboxLost,
    SandboxUnavailable,
)

EndedBy = Literal["exit", "wall_time", "cpu_time", "memory", "output", "disk"]

CLOSE_S = 5.0
"""Longest time in seconds that closing all sandboxes may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of each program in a sandbox, with all processes that it starts."""

    memory_bytes: int = 512 << 20
    """Memory of all processes together, without files in the work directory."""
    cpu_s: float = 10.0
    """CPU time of all processes together. It depends less on the machine's load than time does."""
    wall_s: float = 20.0
    """Time until the program is killed."""
    processes: int = 32
    """Number of processes and threads at a time."""
    disk_bytes: int = 64 << 20
    """Size of the sandbox's work directory, which is in memory. A file counts as at least 4 KB."""
    output_bytes: int = 1 << 18
    """Bytes of standard output and error together; a program that prints more is killed."""
    network: bool = False
    """Whether programs may use the network: all of the host's, its loopback interface included."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "cpu_s", "wall_s", "processes", "disk_bytes", "output_bytes"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} must be above zero, got {value}")


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of a program: how it ended, and its output."""

    ended_by: EndedBy
    """``exit``, or the limit for which it was killed."""
    exit_status: int
    """The program's exit status, or minus the number of the signal that ended it."""
    stdout: str
    """Standard output as UTF-8, with invalid bytes replaced."""
    stderr: str
    """Standard error, likewise."""
    wall_s: float = 0.0
    """Time it ran."""
    cpu_s: float = 0.0
    """CPU time of all its processes; 0 if the provider does not measure it."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself, with exit status 0."""
        return self.ended_by == "exit" and self.exit_status == 0


class ProvidedSandbox(Protocol):
    """A provider's sandbox. Its methods are called one at a time, on the pool's event loop.

    They raise SandboxLost if the sandbox can't be used any more, SandboxFileError if a file can't
    be written or read.
    """

    async def run(self, command: Sequence[str], stdin: bytes, wall_s: float) -> ProgramResult:
        """Run a program in the work directory, and end every process that it leaves behind."""

    async def write(self, path: str, content: bytes) -> None:
        """Write a file in the work directory, with its directories."""

    async def read(self, path: str, bytes_max: int) -> bytes:
        """Read a file in the work directory."""

    async def close(self) -> None:
        """End the sandbox with all its processes. May be called at any time, and again."""


class SandboxProvider(Protocol):
    """Starter of sandboxes."""

    async def start(self, limits: SandboxLimits) -> ProvidedSandbox:
        """Start a sandbox that is ready to run programs.

        Raises:
            SandboxUnavailable: none can be started here; the message says what to install.
            SandboxLost: this one could not be started.
        """


class Sandbox:
    """Handle of a sandbox that was taken from :class:`Sandboxes`, for any event loop.

    Files in its work directory stay from one program to the next; processes do not.
    """

    def __init__(self, pool: "Sandboxes", provided: ProvidedSandbox) -> None:
        self._pool = pool
        self._provided = provided
        self._is_closed = False
        self._turn = asyncio.Lock()

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        wall_s: float | None = None,
    ) -> ProgramResult:
        """Run a program in the sandbox, and wait for its end.

        If the caller is cancelled meanwhile, the sandbox is closed.

        Args:
            command: the program and its arguments, without a shell.
            files: contents by path in the work directory, written before.
            stdin: its standard input.
            wall_s: time until it is killed; the limits' by default.

        Raises:
            SandboxLost: the sandbox ended, through no fault of the program.
        """
        if isinstance(command, str) or not command:
            raise ConfigError(
                f"command must be a list of arguments such as ['python3', 'a.py'], got {command!r}"
            )
        limit_s = self._pool.limits.wall_s if wall_s is None else wall_s
        return await self._call(
            self._run(list(command), dict(files or {}), _encoded(stdin), limit_s)
        )

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file in the work directory.

        Raises:
            SandboxFileError: programs have filled the disk, or replaced a directory.
            SandboxLost: the sandbox ended.
        """
        await self._call(self._provided.write(path, _encoded(content)))

    async def read(self, path: str) -> bytes:
        """Read a file in the work directory.

        Raises:
            SandboxFileError: there is no such file, or it is larger than the disk's limit.
            SandboxLost: the sandbox ended.
        """
        return await self._call(self._provided.read(path, self._pool.limits.disk_bytes))

    async def close(self) -> None:
        """End the sandbox. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.release(self._provided)

    async def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        if self._is_closed:
            coroutine.close()
            raise RunClosed("the sandbox is closed; take another one from the pool")
        try:
            return await self._pool.run(self._one_at_a_time(coroutine))
        except (asyncio.CancelledError, SandboxLost):
            await self.close()  # it may still run the program, or is gone
            raise

    # ------------------------------------------------------------ on the pool's event loop

    async def _one_at_a_time(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        try:
            async with self._turn:
                return await coroutine
        finally:
            coroutine.close()

    async def _run(
        self, command: list[str], files: dict[str, str | bytes], stdin: bytes, wall_s: float
    ) -> ProgramResult:
        try:
            for path, content in files.items():
                await self._provided.write(path, _encoded(content))
        except SandboxFileError as error:
            return ProgramResult("disk", 1, "", f"{error}\n")
        return await self._provided.run(command, stdin, wall_s)


def _encoded(content: str | bytes) -> bytes:
    """Encode as UTF-8; lone surrogates, which a model's text may have, become ``?``."""
    return content.encode(errors="replace") if isinstance(content, str) else bytes(content)


class Sandboxes(LoopThread):
    """Pool that starts sandboxes ahead of need and limits their number. Close it, or use ``with``.

    Each sandbox is used once. The pool has a thread and an event loop of its own, so it can be used
    from any loop or thread.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        *,
        limits: SandboxLimits | None = None,
        sandboxes_max: int = 16,
        ready: int = 2,
    ) -> None:
        """Start the first sandbox, to learn now whether there can be any.

        Args:
            provider: :class:`Bubblewrap`, :class:`Containers`, or a remote service's.
            limits: limits of each program.
            sandboxes_max: largest number of sandboxes in use; further episodes wait.
            ready: number of sandboxes started ahead, in addition to those in use.

        Raises:
            SandboxUnavailable: no sandbox can be started here; the message says what to install.
            ConfigError: a number is too small.
        """
        for name, value, least in (("sandboxes_max", sandboxes_max, 1), ("ready", ready, 0)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        self.limits = limits or SandboxLimits()
        self._provider = provider
        self._ready_max = ready
        self._ready: deque[ProvidedSandbox] = deque()
        self._open: set[ProvidedSandbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(sandboxes_max)
        self._starting = 0
        super().__init__("pool of sandboxes")
        try:
            self.submit(self._start_first()).result()
        except BaseException:
            self.close()
            raise

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Sandbox]:
        """Take a new sandbox for the block; see :meth:`open`."""
        sandbox = await self.open()
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def open(self) -> Sandbox:
        """Take a new sandbox, which the caller closes.

        Raises:
            SandboxLost: none could be started now.
            RunClosed: the pool is closed.
        """
        taken: list[ProvidedSandbox] = []
        try:
            await self.run(self._take(taken))
        except asyncio.CancelledError:
            with suppress(RunClosed):
                self.submit(self._give_back(taken))
            raise
        return Sandbox(self, taken[0])

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the pool's loop; see :meth:`LoopThread.run`. Closing the pool ends
        its sandboxes."""
        try:
            return await super().run(coroutine)
        except SandboxLost:
            if self._is_closed:
                raise RunClosed("the pool of sandboxes was closed") from None
            raise

    def release(self, provided: ProvidedSandbox) -> None:
        """Close a sandbox that was taken. For :class:`Sandbox`."""
        with suppress(RunClosed):  # closing the pool closes its sandboxes
            self.submit(self._release(provided))

    # ------------------------------------------------------------ on the pool's event loop

    async def _start_first(self) -> None:
        try:
            sandbox = await self._provider.start(self.limits)
        except SandboxLost as lost:
            raise SandboxUnavailable(str(lost)) from lost
        self._open.add(sandbox)
        self._ready.append(sandbox)
        self._refill()

    async def _take(self, taken: list[ProvidedSandbox]) -> None:
        """Append a sandbox to ``taken``: a result would be lost if its caller is cancelled."""
        await self._places.acquire()
        try:
            taken.append(self._ready.popleft() if self._ready else await self._start())
        except BaseException:
            self._places.release()
            raise
        self._refill()

    async def _give_back(self, taken: list[ProvidedSandbox]) -> None:
        for sandbox in taken:
            await self._release(sandbox)

    async def _start(self) -> ProvidedSandbox:
        try:
            sandbox = await self._provider.start(self.limits)
        except SandboxUnavailable as error:  # the first one was started, so this may pass
            raise SandboxLost(str(error)) from error
        self._open.add(sandbox)
        return sandbox

    def _refill(self) -> None:
        while len(self._ready) + self._starting < self._ready_max and not self._is_closed:
            self._starting += 1
            task = asyncio.get_running_loop().create_task(self._start_ready())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _start_ready(self) -> None:
        # One that fails is not tried again here: the next episode will, and gets the error.
        try:
            with suppress(SandboxLost):
                self._ready.append(await self._start())
        finally:
            self._starting -= 1

    async def _release(self, provided: ProvidedSandbox) -> None:
        try:
            await self._close_one(provided)
        finally:
            self._places.release()

    async def _close_one(self, provided: ProvidedSandbox) -> None:
        await provided.close()
        self._open.discard(provided)

    async def _shut_down(self) -> None:
        await super()._shut_down()
        closing = [self._close_one(sandbox) for sandbox in list(self._open)]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), CLOSE_S)
        await asyncio.sleep(0)  # let closed connections end
