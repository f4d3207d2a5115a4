"""Start of a pool's worker processes: the interfaces, and the implementation on this machine.

:class:`EnvironmentPool` starts processes through them; :mod:`worker_process` uses a process's
connected socket, its output, and its ``kill``. `integrations/ray/ray_environments.py` implements
the interfaces on a Ray cluster.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from tidegate.transport import server_keys

KEEPER_TIMEOUT_S = 10.0
"""Longest wait for a keeper to kill its worker's processes; it tries for half as long."""


class StartedWorker(Protocol):
    """A worker process that was started and will report that it is ready."""

    name: str
    """Name for logs and errors."""
    connection: socket.socket
    """Socket that carries calls and replies."""
    output: IO[bytes]
    """The process's standard output and error."""
    start_timeout_s: float
    """Longest time until the process must be ready."""

    @property
    def was_lost(self) -> bool:
        """Whether it ended through no fault of its own, as on a lost node."""

    def kill(self) -> str:
        """Kill it with all processes that it started; return how it ended, if it had before."""


class Workers(Protocol):
    """Starter of worker processes."""

    def start(self) -> StartedWorker:
        """Start one. Called on the pool's loop.

        Raises:
            OSError: there are no resources for it.
        """

    def close(self) -> None:
        """Release everything; all processes have ended, or are to end now."""


WorkersFactory = Callable[[str, int | None, tuple[str, ...]], Workers]
"""Creates a pool's :class:`Workers` from the interpreter's path, the address-space limit of each
process in bytes (None: no limit), and the names of variables to pass on although they resemble
secrets. Raises ConfigError if it can't start any."""


class LocalWorkers:
    """Starts worker processes on this machine."""

    def __init__(
        self, python: str, memory_bytes: int | None, pass_variables: Collection[str] = ()
    ) -> None:
        self._python = python
        self._memory_bytes = memory_bytes
        self._pass_variables = pass_variables

    def start(self) -> StartedWorker:
        """Start one with :func:`worker_command`."""
        return LocalWorker(self._python, self._memory_bytes, self._pass_variables)

    def close(self) -> None:
        """Do nothing: the pool has ended the processes."""


class LocalWorker:
    """A worker process on this machine, and all processes that it starts. The child started here
    is the worker's keeper (see :mod:`worker`), which dies with the thread that started it."""

    was_lost = False
    start_timeout_s = 60.0
    """A Python with only msgspec starts in 0.1 s, unless the machine is overloaded."""

    def __init__(
        self, python: str, memory_bytes: int | None, pass_variables: Collection[str] = ()
    ) -> None:
        """Start the process.

        Raises:
            OSError: there are no processes, memory or descriptors left.
        """
        self.connection, child_end = socket.socketpair()
        with child_end:
            command = worker_command(python, child_end.fileno(), memory_bytes)
            # Its own session, so that Ctrl-C reaches only the run, which then ends its processes,
            # and so that processes started by environments can be killed with it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=child_environment(pass_variables),
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
        self.name = f"process {self._process.pid}"
        assert self._process.stdout is not None
        self.output = self._process.stdout

    def kill(self) -> str:
        """Make the keeper kill all processes of the worker; if it hangs, kill its session."""
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


INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))
"""Library directories of this Python, which another Python must not get: it has its own."""

KEYS = (
    server_keys.VARIABLE,
    server_keys.FILE_VARIABLE,
    server_keys.OWN_KEY_VARIABLE,
    f"{server_keys.OWN_KEY_VARIABLE}_FILE",
    server_keys.CONTROL_TOKEN_VARIABLE,
    f"{server_keys.CONTROL_TOKEN_VARIABLE}_FILE",
    server_keys.DASHBOARD_TOKEN_VARIABLE,
)
"""Variables that hold keys of engine servers, our server and the dashboard; never passed on."""


def worker_command(python: str, descriptor: int, memory_bytes: int | None) -> list[str]:
    """Return the command line of a worker that communicates through the socket ``descriptor``."""
    module = "tidegate.environments.worker"
    command = [python, "-X", "faulthandler", "-m", module]
    command += ["--socket", str(descriptor), "--parent", str(os.getpid())]
    return command if memory_bytes is None else [*command, "--memory-bytes", str(memory_bytes)]


SECRET_NAMES = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH)S?(_|$)"
    r"|(^|_)(PASS|PAT|COOKIE|DSN)(_|$)",
    re.IGNORECASE,
)
"""Names of variables that may hold secrets: ``HF_TOKEN``, ``AWS_ACCESS_KEY_ID``,
``SSH_AUTH_SOCK``."""

SECRET_VALUES = re.compile(r"://[^/@\s]+:[^/@\s]+@")
"""Values with a password in a URL: ``postgres://user:password@host/``."""


def holds_secret(name: str, value: str) -> bool:
    """Return whether a variable's name or value resembles a secret."""
    return bool(SECRET_NAMES.search(name) or SECRET_VALUES.search(value))


def child_environment(pass_variables: Collection[str] = ()) -> dict[str, str]:
    """Return the environment variables of a worker process.

    Code written by a model may run there. So variables that resemble secrets are not passed on,
    except for names in ``pass_variables``; :data:`KEYS` are never passed on. PYTHONPATH has this
    process's module path without installed packages, because the worker may use another Python.
    """
    paths = [str(Path(path or ".").absolute()) for path in sys.path]
    own_paths = [p for p in paths if not p.startswith(INSTALLED) and not p.endswith(".zip")]
    defaults = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    fixed = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(own_paths)), "PYTHONUNBUFFERED": "1"}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in KEYS and (name in pass_variables or not holds_secret(name, value))
    }
    return {**defaults, **inherited, **fixed}
