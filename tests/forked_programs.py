"""Starts of engines and trainers by a fork instead of an exec, so that tests import torch once.

An engine's start costs 1.2 s of CPU, 1.1 s of it for imports, and the suite starts 800. Within
:func:`forking`, ``subprocess.Popen`` of a program in ``PROGRAMS`` asks a server process, which has
imported all of them and started no thread, for a fork. The fork is a child of the caller, as
``clone(2)`` with CLONE_PARENT makes it: ``waitpid``, pidfds, ``getppid`` and PR_SET_PDEATHSIG work
as after an exec. It has its own arguments, also in ``/proc/PID/cmdline``, environment, umask,
session and standard streams; ``/proc/PID/environ`` is the server's, and so are the seeds of hashes.
What a fork can't imitate is executed: other options of Python or ``Popen``, or an environment,
working directory, limits or CPUs that are not the server's. The fixture ``programs_are_executed``
has all programs of a test executed.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

PROGRAMS = frozenset(
    {
        "tests.free_drafts_worker",
        "tests.mortal_trainer",
        "tests.remote_trainer",
        "tests.sharded_trainer",
        "tests.shown_process",
        "tidegate.engine.external.worker",
        "tidegate.engine.forked_workers",
        "tidegate.engine.worker",
    }
)
"""Modules that are forked when started as ``python -m MODULE``."""

ALSO_IMPORTED = (
    "tidegate.engine.execution.block_cache",
    "tidegate.engine.external.sglang",
    "tidegate.engine.external.vllm",
    "tidegate.engine.models.fallback_weights",
    "tidegate.engine.weights.weight_conversions",
    "tidegate.orchestrator.trainer.run",
    "transformers.modeling_utils",
)
"""Modules that the programs import late: 1.3 s where a model is computed by transformers."""

MAY_DIFFER = ("TIDEGATE_", "PYTEST_", "MKL_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
"""Beginnings of names of environment variables that no import of the server reads. MKL takes
OMP_NUM_THREADS, which may not differ, where its own is unset; torch.compile sets the last."""

ARGUMENTS_BYTES_MAX = 4096
"""Room for a program's arguments in /proc/PID/cmdline: the server has an argument that long."""

_MACHINES = {"x86_64": (56, True), "aarch64": (220, False)}
"""By machine: number of clone(2), and whether the child's TID pointer comes before its TLS."""

_CLONE = 0x00008000 | 0x00200000 | 0x01000000 | signal.SIGCHLD
"""CLONE_PARENT, and what glibc's fork() passes: CLONE_CHILD_CLEARTID and CLONE_CHILD_SETTID."""

_PR_GET_TID_ADDRESS = 40
"""From <linux/prctl.h>: where glibc keeps the thread's TID, so that the child gets its own."""

_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def children(*, recursive: bool = False) -> list[psutil.Process]:
    """Return the child processes of this process, without the server."""
    server = None if _server is None else _server.pid
    return [each for each in psutil.Process().children(recursive) if each.pid != server]


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Fork ``PROGRAMS`` until the end of the context. Enter in the main thread: the kernel tells
    a child of its parent's death when the thread that started the server ends."""
    global _server
    if platform.machine() not in _MACHINES:
        yield
        return
    _server = _Server()
    subprocess.Popen._execute_child = _fork_or_execute_child  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
        _server.close()
        _server = None


@contextlib.contextmanager
def executing() -> Iterator[None]:
    """Execute all programs until the end of the context."""
    forked = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = forked  # type: ignore[attr-defined]


def _fork_or_execute_child(
    popen: "subprocess.Popen[bytes]",
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Mapping[str, str] | None,
    startupinfo: Any,
    creationflags: int,
    shell: bool,
    p2cread: int,
    p2cwrite: int,
    c2pread: int,
    c2pwrite: int,
    errread: int,
    errwrite: int,
    restore_signals: bool,
    gid: Any,
    gids: Any,
    uid: Any,
    umask: int,
    start_new_session: bool,
    process_group: int,
) -> None:
    """Do what ``Popen._execute_child`` of Python 3.11 to 3.13 does, whose arguments these are."""
    command = [str(each) for each in args] if isinstance(args, (list, tuple)) else []
    environment = dict(os.environ if env is None else env)
    is_plain = (
        command[:2] == [sys.executable, "-m"]
        and command[2] in PROGRAMS
        and (close_fds, restore_signals, umask, process_group) == (True, True, -1, -1)
        and (preexec_fn or gid or gids or uid or shell or executable or cwd) is None
    )
    pid = None
    if is_plain and _server is not None:
        streams = [
            number if fd == -1 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))
        ]
        pid = _server.fork(command, environment, start_new_session, streams, pass_fds)
    if pid is None:
        _execute_child(
            popen, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
            creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
            restore_signals, gid, gids, uid, umask, start_new_session, process_group,
        )  # fmt: skip
        return
    popen.pid = pid
    popen._child_created = True  # type: ignore[attr-defined]
    popen._close_pipe_fds(  # type: ignore[attr-defined]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
    )


class _Server:
    """The server process, as its client uses it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._inherited = _inherited(os.environ)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*command, "-" * ARGUMENTS_BYTES_MAX],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid

    def fork(
        self,
        command: list[str],
        environment: dict[str, str],
        is_session_leader: bool,
        streams: list[int],
        pass_fds: Sequence[int],
    ) -> int | None:
        """Return the PID of the program's process, or None if it has to be executed."""
        if os.getpid() != self._owner or _inherited(environment) != self._inherited:
            return None
        start = json.dumps([command, environment, _umask(), is_session_leader, list(pass_fds)])
        with self._lock:
            try:
                socket.send_fds(self._socket, [start.encode()], [*streams, *pass_fds])
                reply = self._socket.recv(64)
            except OSError:
                return None
        return int(reply) if reply else None

    def close(self) -> None:
        """End the server, which its forks survive."""
        self._socket.close()
        self._process.wait()


_server: _Server | None = None


def _inherited(environment: Mapping[str, str]) -> list[object]:
    """Return what a forked program gets from the server, and an executed one from its parent."""
    variables = {
        name: value for name, value in environment.items() if not name.startswith(MAY_DIFFER)
    }
    limits = [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    ]
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    return [variables, str(Path.cwd()), limits, os.sched_getaffinity(0), niceness]


def _umask() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("\nUmask:")[2].split()[0], 8)


def _main() -> None:
    """Serve until the client closes the socket; in a fork, run the program that it is."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Ctrl-C is for the client, and what a fork gets before it is ready must reach it then.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    for module in (*PROGRAMS, *ALSO_IMPORTED):
        importlib.import_module(module)
    for module in PROGRAMS:  # `runpy` warns of those that are imported
        del sys.modules[module]
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("a process with threads can't be forked: set OMP_NUM_THREADS=1")
    while True:
        data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 64)
        if not data:
            os._exit(0)  # what the imports want done at the exit, the forks do
        pid = _fork_sibling()
        if pid == 0:
            break
        connection.send(str(pid).encode())
        for fd in fds:
            os.close(fd)
    connection.close()
    _exit_after(lambda: _become(fds, *json.loads(data)))


def _fork_sibling() -> int:
    """Fork a child of this process's parent; return its PID, or 0 in the child."""
    libc = ctypes.PyDLL(None)  # keeps Python's interpreter lock, as os.fork does
    tid = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0):
        tid = ctypes.c_void_p()
    number, has_tid_first = _MACHINES[platform.machine()]
    none = ctypes.c_long(0)
    last = (tid, none) if has_tid_first else (none, tid)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(libc.syscall(ctypes.c_long(number), ctypes.c_long(_CLONE), none, none, *last))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise SystemExit("clone(2) failed")
    return pid


def _become(
    fds: list[int],
    command: list[str],
    environment: dict[str, str],
    umask: int,
    is_session_leader: bool,
    pass_fds: list[int],
) -> None:
    """Run the program as ``python -m`` does, in a process with the state of a new one."""
    from tidegate.engine.forked_workers import show_command  # imports torch

    wanted = [0, 1, 2, *pass_fds]
    above = max([*fds, *wanted]) + 1
    for index, fd in enumerate(fds):  # out of the way of the numbers wanted
        os.dup2(fd, above + index)
        os.close(fd)
    for index, number in enumerate(wanted):
        os.dup2(above + index, number)
        os.close(above + index)
    if is_session_leader:
        os.setsid()
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    show_command(command)
    sys.orig_argv = command
    sys.argv = command[2:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


def _exit_after(run: Callable[[], None]) -> NoReturn:
    """Run a program and end as Python does, but without taking all modules apart: half of the CPU
    time of a fork, because each page of memory is copied for that."""
    try:
        run()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 - as Python does at its top
        traceback.print_exc()
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


if __name__ == "__main__":
    _main()
