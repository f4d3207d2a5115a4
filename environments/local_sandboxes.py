"""Sandboxes on this machine: bubblewrap's, and those of Docker or Podman.

Both start :mod:`sandbox_init` as pid 1 of a new PID namespace and talk to it over a socket that is
its standard input and output. The two differ only in the command line. bubblewrap needs no daemon,
image or rights: a user namespace, a read-only view of ``/usr``, a tmpfs of limited size, no
network. Passed to :class:`~tidegate.environments.sandboxes.Sandboxes`.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import IO, Literal, cast

from tidegate.environments.sandbox_init import OPEN_FILES_MAX
from tidegate.environments.sandboxes import EndedBy, ProgramResult, SandboxLimits
from tidegate.errors import ConfigError, SandboxFileError, SandboxLost, SandboxUnavailable

WORK = "/work"
"""Work directory of programs, in the sandbox."""

NOBODY = 65534
"""User and group id of programs in the sandbox, and outside too if root started the run."""

START_TIMEOUT_S = 30.0
"""Longest time for a sandbox to be ready; bubblewrap's take 0.03 s, containers 0.5 s."""

REPLY_GRACE_S = 30.0
"""Added to a program's time limit before its sandbox counts as lost: the init process kills the
program itself, and is delayed only by an overloaded machine."""

EXIT_TIMEOUT_S = 5.0
"""Longest wait for a container to end with its connection, before it is killed by name."""

SHM_BYTES = 16 << 20
"""Size of /dev/shm in the sandbox."""

FIELDS_MAX = 8
"""Fields of a reply, at most."""

OWN_BYTES_MAX = 65536
"""Bytes of a reply's field that is neither a file nor output, such as an error message."""

STDERR_BYTES = 2000
"""Bytes of a sandbox's own error messages that are shown."""


@cache
def init_source() -> bytes:
    """Return the init process's source, which it gets over its connection: the file itself may lie
    where the sandbox can't read it."""
    return resources.files("tidegate.environments").joinpath("sandbox_init.py").read_bytes()


def init_command(python: str, limits: SandboxLimits, *, processes: int) -> list[str]:
    """Return the command line of the init process, which first reads its own source."""
    count = len(init_source())
    load = (
        f"import os; s = b''\nwhile len(s) < {count}:\n"
        f"    s += os.read(0, {count} - len(s)) or os._exit(1)\nexec(s)"
    )
    numbers = (
        limits.memory_bytes,
        limits.cpu_s,
        processes,
        limits.disk_bytes,
        limits.output_bytes,
    )
    return [python, "-I", "-S", "-c", load, WORK, *map(str, numbers)]


class LocalSandbox:
    """A sandbox of this machine: the process that contains it, and the connection to its init."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stderr: IO[bytes],
        *,
        reply_bytes_max: int,
        kill: Sequence[str] = (),
    ) -> None:
        """``reply_bytes_max``: limit of one field of a reply, such as a file.

        ``kill``: a command that ends it if it does not end with its connection.
        """
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stderr = stderr
        self._reply_bytes_max = reply_bytes_max
        self._kill = kill
        self._is_closed = False
        self._said = ""
        """Tail of the sandbox's standard error, once the sandbox is closed."""

    async def run(self, command: Sequence[str], stdin: bytes, wall_s: float) -> ProgramResult:
        """Run a program and return how it ended."""
        fields = [b"run", str(wall_s).encode(), stdin, *map(_encoded, command)]
        ended_by, status, elapsed_s, cpu_s, stdout, stderr = await self._request(
            fields, wall_s + REPLY_GRACE_S
        )
        return ProgramResult(
            cast(EndedBy, ended_by.decode()),
            int(status),
            stdout.decode(errors="replace"),
            stderr.decode(errors="replace"),
            float(elapsed_s),
            float(cpu_s),
        )

    async def write(self, path: str, content: bytes) -> None:
        """Write a file."""
        await self._request([b"write", _encoded(path), content], REPLY_GRACE_S)

    async def read(self, path: str, bytes_max: int) -> bytes:
        """Read a file."""
        fields = [b"read", _encoded(path), str(bytes_max).encode()]
        return (await self._request(fields, REPLY_GRACE_S))[0]

    async def ready(self, timeout_s: float) -> None:
        """Send the init process its source, and wait until it is ready.

        Raises:
            SandboxLost: it ended, or is late.
        """
        self._writer.write(init_source())
        await self._receive(timeout_s)

    async def _request(self, fields: Iterable[bytes], timeout_s: float) -> list[bytes]:
        with suppress(ConnectionError):  # then there is no reply either
            self._writer.write(_frame(fields))
            await self._writer.drain()
        kind, *values = await self._receive(timeout_s)
        if kind == b"file_error":
            raise SandboxFileError(values[0].decode(errors="replace"))
        return values

    async def _receive(self, timeout_s: float) -> list[bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                count = await self._number(FIELDS_MAX)
                return [await self._field() for _ in range(count)]
        except TimeoutError:
            await self.close()
            raise SandboxLost(f"the sandbox did not reply within {timeout_s:g} s") from None
        except SandboxLost:
            raise
        except (asyncio.IncompleteReadError, ConnectionError):
            await _has_ended(self._process)
            await self.close()
            raise SandboxLost(f"the sandbox ended: {self._why()}") from None

    async def _field(self) -> bytes:
        return await self._reader.readexactly(await self._number(self._reply_bytes_max))

    async def _number(self, most: int) -> int:
        number = int(struct.unpack(">I", await self._reader.readexactly(4))[0])
        if number > most:
            await self.close()
            raise SandboxLost(f"the sandbox sent an invalid reply: {number}, at most {most}")
        return number

    def _why(self) -> str:
        return f"exit status {self._process.returncode}, {self._said or 'without a message'}"

    async def close(self) -> None:
        """End the init process by closing its connection; the kernel ends all others with it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._writer.transport.abort()
        try:
            if self._kill and not await _has_ended(self._process):
                await asyncio.to_thread(
                    subprocess.run, self._kill, capture_output=True, check=False
                )
        finally:
            self._said = _end(self._process, self._stderr)


def _end(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> str:
    """Kill a sandbox's outer process, and return the tail of its output."""
    if process.poll() is None:
        # Bubblewrap's init dies with its parent, but not the processes that it forked while it
        # started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with stderr:
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - STDERR_BYTES))
        return stderr.read().decode(errors="replace").strip()


async def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Wait for a process's end; return False if it takes longer than EXIT_TIMEOUT_S."""
    pause_s, waited_s = 0.001, 0.0
    while process.poll() is None:
        if waited_s > EXIT_TIMEOUT_S:
            return False
        await asyncio.sleep(pause_s)
        waited_s += pause_s
        pause_s = min(2 * pause_s, 0.05)
    return True


def _encoded(argument: str) -> bytes:
    return argument.encode(errors="replace")  # a model's text may have lone surrogates


def _frame(fields: Iterable[bytes]) -> bytes:
    given = list(fields)
    return struct.pack(">I", len(given)) + b"".join(
        struct.pack(">I", len(field)) + field for field in given
    )


async def start_sandbox(
    command: Sequence[str],
    limits: SandboxLimits,
    *,
    variables: Mapping[str, str],
    kill: Sequence[str] = (),
) -> LocalSandbox:
    """Start a command that becomes a sandbox's init, and wait until it is ready.

    Raises:
        SandboxLost: it was not ready in time, or the system has no processes or memory left.
    """
    connection, child_end = socket.socketpair()
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads might fill)
    with child_end:
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 (asyncio's takes no less time)
                command,
                stdin=child_end.fileno(),
                stdout=child_end.fileno(),
                stderr=stderr,
                env=dict(variables),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            connection.close()
            stderr.close()
            raise SandboxLost(f"can't start {command[0]}: {error}") from error
    try:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        _end(process, stderr)
        raise
    reply_bytes_max = max(limits.disk_bytes, limits.output_bytes) + OWN_BYTES_MAX
    sandbox = LocalSandbox(
        process, reader, writer, stderr, reply_bytes_max=reply_bytes_max, kill=kill
    )
    try:
        await sandbox.ready(START_TIMEOUT_S)
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


# ---------------------------------------------------------------- bubblewrap


class Bubblewrap:
    """Provider of sandboxes by bubblewrap, which needs neither a daemon nor root.

    Programs see ``/usr``, a few files of ``/etc`` and the Python installation, read-only, and one
    writable directory, ``/work`` (also ``/tmp``). They have no network, none of the run's
    environment variables, and see no process but their own. They share the host's kernel.
    """

    def __init__(
        self,
        *,
        python: str | Path | None = None,
        read_only: Iterable[str | Path] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Set what programs see. Nothing is started.

        Args:
            python: interpreter of the sandbox, and programs' ``python3``: 3.9 or newer. Default:
                the one that runs this process, without its virtual environment's packages.
            read_only: further host paths to show at the same place, such as a virtual environment.
            variables: environment variables of the programs.
        """
        self._python = None if python is None else str(python)
        self._read_only = [str(Path(path).absolute()) for path in read_only]
        self._variables = dict(variables or {})

    async def start(self, limits: SandboxLimits) -> LocalSandbox:
        """Start a sandbox.

        Raises:
            SandboxUnavailable: bubblewrap is not installed, or may not create namespaces.
        """
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailable(
                "bubblewrap is not installed: no bwrap in PATH. Install it "
                "(apt-get install bubblewrap, dnf install bubblewrap), or use Containers()"
            )
        python = self._python or default_python()
        command = [
            *_as_nobody(),
            bwrap,
            *_namespaces(limits, self._shown(python)),
            "--",
            *init_command(python, limits, processes=limits.processes),
        ]
        folders = [str(Path(python).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        variables = {
            "PATH": ":".join(dict.fromkeys(folders)),
            "HOME": WORK,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            **self._variables,
        }
        try:
            return await start_sandbox(command, limits, variables=variables)
        except SandboxLost as lost:
            hint = _why_not()
            if hint is None:
                raise
            raise SandboxUnavailable(f"bubblewrap can't start a sandbox: {lost}. {hint}") from lost

    def _shown(self, python: str) -> list[str]:
        """Return the host paths to show beside /usr: installations, and those asked for."""
        places = [Path(python).absolute(), Path(python).resolve()]
        prefixes = [str(place.parents[1]) for place in places]
        beside = [prefix for prefix in prefixes if not prefix.startswith("/usr") and prefix != "/"]
        return list(dict.fromkeys([*beside, *self._read_only]))


ETC = ("ld.so.cache", "alternatives", "localtime")
"""Files of /etc that programs may need and that reveal nothing about the machine."""

ETC_OF_THE_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "ssl", "ca-certificates", "pki")


def _namespaces(limits: SandboxLimits, shown: Iterable[str]) -> list[str]:
    """Return bubblewrap's options."""
    options = ["--unshare-all", "--unshare-user", "--disable-userns"]
    options += ["--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox"]
    options += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    if limits.network:
        options.append("--share-net")
    options += ["--ro-bind", "/usr", "/usr"]
    for folder in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", folder)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for name in (*ETC, *(ETC_OF_THE_NETWORK if limits.network else ())):
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for path_shown in shown:
        options += ["--ro-bind", path_shown, path_shown]
    options += ["--proc", "/proc", "--dev", "/dev"]
    options += ["--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    options += ["--size", str(limits.disk_bytes), "--tmpfs", WORK, "--symlink", WORK, "/tmp"]
    return [*options, "--chdir", WORK, "--remount-ro", "/"]


def _as_nobody() -> list[str]:
    """Return the beginning of a command line that gives up root, if this process has it.

    The kernel does not limit root's processes (RLIMIT_NPROC), not even in a user namespace.
    """
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise SandboxUnavailable(
            "a run as root needs setpriv to start sandboxes as another user: install util-linux, "
            "or run as a normal user"
        )
    return [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


def default_python() -> str:
    """Return this process's interpreter, or the system's if sandboxes can't read this one."""
    own = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    candidates = [own, str(Path(sys.executable).resolve())]
    candidates += [f"{folder}/python3" for folder in ("/usr/bin", "/usr/local/bin")]
    for candidate in candidates:
        if Path(candidate).exists() and (os.geteuid() != 0 or _all_can_read(Path(candidate))):
            return candidate
    raise SandboxUnavailable(
        f"sandboxes of a run as root can't read {own}, because a directory above it is closed to "
        "other users, and there is no /usr/bin/python3. Install the system's Python "
        "(apt-get install python3), run as a normal user, or name another with "
        "Bubblewrap(python=...)"
    )


def _all_can_read(path: Path) -> bool:
    resolved = path.resolve()
    return all(part.stat().st_mode & stat.S_IXOTH for part in (resolved, *resolved.parents))


def _why_not() -> str | None:
    """Return why bubblewrap does not work on this machine, and what to do; empty if unknown."""
    # A minimal sandbox distinguishes a machine without namespaces from a wrong setting.
    test = [*_as_nobody(), "bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc"]
    done = subprocess.run([*test, "true"], capture_output=True, text=True, check=False)
    if not done.returncode:
        version = subprocess.run(
            ["bwrap", "--version"], capture_output=True, text=True, check=False
        )
        return (
            f"Its simplest sandbox works, with {version.stdout.strip()}: 0.8 or newer is needed, a "
            "Python 3.9 or newer, and access to it and to read_only's paths for all users"
        )
    if _number_in("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"):
        return (
            "AppArmor forbids unprivileged user namespaces here: allow them with "
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or with a profile for bwrap"
        )
    for name in ("user/max_user_namespaces", "kernel/unprivileged_userns_clone"):
        if _number_in(f"/proc/sys/{name}") == 0:
            setting = name.replace("/", ".")
            return f"The kernel makes no user namespaces here: sysctl {setting} is 0; raise it"
    return (
        "If this is a container, its runtime forbids namespaces or mounting /proc: start it with "
        "--privileged, or with --security-opt seccomp=unconfined, apparmor=unconfined and "
        "systempaths=unconfined; or use a remote service's sandboxes"
    )


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


# ---------------------------------------------------------------- containers


class Containers:
    """Provider of sandboxes by Docker's or Podman's command line, with an image of your choice.

    Memory, processes and CPU are limited by the container's cgroup too. Docker needs its daemon.
    """

    def __init__(
        self,
        image: str = "docker.io/library/python:3.12-slim",
        *,
        program: Literal["podman", "docker"] = "podman",
        python: str = "python3",
        cpus: float = 1.0,
        options: Sequence[str] = (),
    ) -> None:
        """Set the image. Nothing is started.

        Args:
            image: an image with Python 3.9 or newer.
            program: ``podman`` or ``docker``.
            python: the interpreter in the image.
            cpus: cores that a container may use at a time.
            options: further options of ``run``, such as ``--runtime=runsc`` for gVisor.
        """
        if program not in ("podman", "docker"):
            raise ConfigError(f"program must be 'podman' or 'docker', got {program!r}")
        self._image = image
        self._program = program
        self._python = python
        self._cpus = cpus
        self._options = list(options)

    async def start(self, limits: SandboxLimits) -> LocalSandbox:
        """Start a container.

        Raises:
            SandboxUnavailable: the program is not installed, or can't start containers here.
        """
        if shutil.which(self._program) is None:
            raise SandboxUnavailable(
                f"there is no {self._program} in PATH: install it (apt-get install podman), or use "
                "Bubblewrap()"
            )
        name = f"tidegate-{uuid.uuid4().hex[:12]}"
        # The client needs its own HOME, PATH, DOCKER_HOST, ...; containers don't get them.
        try:
            return await start_sandbox(
                self.command(name, limits),
                limits,
                variables=os.environ,
                kill=[self._program, "kill", name],
            )
        except SandboxLost as lost:
            works = await asyncio.to_thread(
                subprocess.run, [self._program, "info"], capture_output=True, text=True, check=False
            )
            if not works.returncode:
                raise
            raise SandboxUnavailable(
                f"{self._program} does not work here: {works.stderr.strip()[-STDERR_BYTES:]}"
            ) from lost

    def command(self, name: str, limits: SandboxLimits) -> list[str]:
        """Return the command line that runs a container."""
        memory = limits.memory_bytes + limits.disk_bytes + SHM_BYTES
        network = [] if limits.network else ["--network=none"]
        tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_bytes}"
        # Podman would add unlimited ones at /run, /tmp and /var/tmp; Docker adds none.
        none_else = ["--read-only-tmpfs=false"] if self._program == "podman" else []
        return [
            self._program,
            "run",
            "--rm",
            "--interactive",
            f"--name={name}",
            *network,
            "--read-only",
            *none_else,
            f"--tmpfs={WORK}:{tmpfs}",
            f"--tmpfs=/tmp:{tmpfs}",
            f"--shm-size={SHM_BYTES}",
            f"--memory={memory}",
            f"--memory-swap={memory}",
            f"--pids-limit={limits.processes + 1}",
            f"--cpus={self._cpus:g}",
            f"--ulimit=nofile={OPEN_FILES_MAX}:{OPEN_FILES_MAX}",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            f"--user={NOBODY}:{NOBODY}",
            f"--workdir={WORK}",
            f"--env=HOME={WORK}",
            "--log-driver=none",
            *self._options,
            "--entrypoint=",
            self._image,
            *init_command(self._python, limits, processes=0),
        ]
