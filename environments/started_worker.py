"""Who starts processes for environments, and what is such a process to the pool that asked for it?

A socket and an end: that is all the pool needs, whether the process is this machine's or another's.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import IO, Protocol

from tidegate.environments.worker_command import child_environment, worker_command

KEEPER_TIMEOUT_S = 10.0
"""For a keeper to end its worker's processes, which it tries for half as long."""


class StartedWorker(Protocol):
    """A process that will be ready soon."""

    name: str
    """For people."""
    connection: socket.socket
    """Takes calls, gives replies."""
    output: IO[bytes]
    """What it prints."""
    start_timeout_s: float
    """Longer than it may take to be ready."""

    @property
    def was_lost(self) -> bool:
        """Whether it ended by nobody's doing in it, as a node that is lost takes it along."""

    def kill(self) -> str:
        """End it now, with all that it has started; how it ended, if it had before."""


class Workers(Protocol):
    """Starts them."""

    def start(self) -> StartedWorker:
        """One more. Called on the pool's loop; raises OSError if there is no room for it."""

    def close(self) -> None:
        """All have ended, or are to now."""


WorkersFactory = Callable[[str, int | None, tuple[str, ...]], Workers]
"""Makes the starter of a pool's processes from the interpreter's path, the address-space limit of
each process in bytes (None: no limit), and the names of variables that they get though they look
like secrets. Raises ConfigError if it can't start any."""


class LocalWorkers:
    """Starts them on this machine."""

    def __init__(
        self, python: str, memory_bytes: int | None, pass_variables: Collection[str] = ()
    ) -> None:
        self._python = python
        self._memory_bytes = memory_bytes
        self._pass_variables = pass_variables

    def start(self) -> StartedWorker:
        """By command line."""
        return LocalWorker(self._python, self._memory_bytes, self._pass_variables)

    def close(self) -> None:
        """Whoever has them has ended them."""


class LocalWorker:
    """One process of this machine, and all that it starts. They die with the thread that started
    it, for the process that is started here is the worker's keeper: see :mod:`worker`."""

    was_lost = False
    start_timeout_s = 60.0
    """A Python with only msgspec takes a tenth of a second, unless the machine is drowned."""

    def __init__(
        self, python: str, memory_bytes: int | None, pass_variables: Collection[str] = ()
    ) -> None:
        """Start it. Raises OSError if there are no processes, memory or files left."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            command = worker_command(python, theirs.fileno(), memory_bytes)
            # Its own session: Ctrl-C is for the run, which then ends its processes; and what
            # environments have started is ended with it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=child_environment(pass_variables),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.name = f"process {self._process.pid}"
        assert self._process.stdout is not None
        self.output = self._process.stdout

    def kill(self) -> str:
        """Have its keeper end all that the worker has started; without its answer, its session."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            return _status(self._process.wait(KEEPER_TIMEOUT_S))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        return _status(self._process.wait())


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
