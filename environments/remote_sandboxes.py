"""Sandboxes of remote services, through their Python packages: E2B, Modal and Daytona.

Each service provides three primitives: run a shell command, upload a file, download a file. With
these, :class:`RemoteSandbox` runs programs within the time and output limits, with a shell script;
memory, CPU, disk and network are limited as the service does when it creates a sandbox. Passed to
:class:`~tidegate.environments.sandboxes.Sandboxes`; the packages are optional.
"""

import asyncio
import base64
import importlib
import math
import posixpath
import shlex
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tidegate.environments.sandboxes import EndedBy, ProgramResult, SandboxLimits
from tidegate.errors import SandboxFileError, SandboxLost, SandboxUnavailable

WORK = "/tmp/work"
"""Work directory of programs, in the sandbox."""

OWN = "/tmp/tidegate"
"""Directory of the files that a program's input and output pass through, in the sandbox."""

GRACE_S = 30.0
"""Added to a program's time limit for the service's own calls."""

KILLED = 128 + 9
"""Exit status by which a shell, and ``timeout -s KILL``, report SIGKILL."""


Answer = TypeVar("Answer")


class Remote(Protocol):
    """A service's sandbox. Methods raise any exception of the service's package."""

    async def shell(self, command: str, timeout_s: int) -> str:
        """Run a POSIX shell command and return its standard output.

        Raises:
            TimeoutError: it ran for longer than ``timeout_s``.
        """

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file at an absolute path; its directory exists."""

    async def download(self, path: str) -> bytes:
        """Read a file at an absolute path."""

    async def end(self) -> None:
        """End the sandbox."""


def guarded(command: Sequence[str], wall_s: float, output_bytes: int) -> str:
    """Return a shell command that runs a program within limits and prints how it ended.

    It prints the exit status, then standard output and error in base64, a line each. ``head`` ends
    a program that prints too much, by SIGPIPE.
    """
    program = f"timeout -s KILL {wall_s:g} {shlex.join(command)}"
    head = f"head -c {output_bytes + 1}"
    return (
        f"cd {WORK} && {{ {{ {program} <{OWN}/stdin; echo $? >{OWN}/status; }} 2>&3 | "
        f"{head} >{OWN}/stdout; }} 3>&1 | {head} >{OWN}/stderr; "
        f"cat {OWN}/status; base64 <{OWN}/stdout | tr -d '\\n'; echo; "
        f"base64 <{OWN}/stderr | tr -d '\\n'; echo"
    )


class RemoteSandbox:
    """A service's sandbox, as the pool uses it."""

    def __init__(self, remote: Remote, output_bytes: int) -> None:
        self._remote = remote
        self._output_bytes = output_bytes
        self._is_ended = False

    async def prepare(self) -> None:
        """Make the directories."""
        await self._call(self._remote.shell(f"mkdir -p {WORK} {OWN}", math.ceil(GRACE_S)))

    async def run(self, command: Sequence[str], stdin: bytes, wall_s: float) -> ProgramResult:
        """Run a program. Processes that it leaves behind end only with the sandbox."""
        await self._call(self._remote.upload(f"{OWN}/stdin", stdin))
        started_s = time.monotonic()
        script = guarded(command, wall_s, self._output_bytes)
        try:
            printed = await self._call(self._remote.shell(script, math.ceil(wall_s + GRACE_S)))
        except TimeoutError:  # a process left behind holds the pipes
            return ProgramResult("wall_time", -9, "", "", time.monotonic() - started_s)
        elapsed_s = time.monotonic() - started_s
        try:
            number, *encoded = printed.split("\n")
            stdout, stderr = (base64.b64decode(text) for text in encoded[:2])
            status = int(number)
        except ValueError:
            raise SandboxLost(f"the sandbox's shell answered {printed!r:.300}") from None
        if len(stdout) > self._output_bytes or len(stderr) > self._output_bytes:
            ended_by: EndedBy = "output"
        elif status == KILLED and elapsed_s >= wall_s:
            ended_by = "wall_time"
        else:
            ended_by = "exit"
        return ProgramResult(
            ended_by,
            128 - status if status > 128 else status,
            stdout[: self._output_bytes].decode(errors="replace"),
            stderr[: self._output_bytes].decode(errors="replace"),
            elapsed_s,
        )

    async def write(self, path: str, content: bytes) -> None:
        """Write a file."""
        place = _place(path)
        made = f"mkdir -p {shlex.quote(posixpath.dirname(place))} && echo made"
        if "made" not in await self._call(self._remote.shell(made, math.ceil(GRACE_S))):
            raise SandboxFileError(f"can't make the directory of {path!r}")
        await self._call(self._remote.upload(place, content))

    async def read(self, path: str, bytes_max: int) -> bytes:
        """Read a file."""
        place = shlex.quote(_place(path))
        count = await self._call(
            self._remote.shell(f"test -f {place} && wc -c <{place}", math.ceil(GRACE_S))
        )
        if not count.strip().isdigit() or int(count) > bytes_max:
            raise SandboxFileError(f"there is no file {path!r} of at most {bytes_max} bytes")
        return await self._call(self._remote.download(_place(path)))

    async def close(self) -> None:
        """End the sandbox."""
        if not self._is_ended:
            await self._call(self._remote.end())
            self._is_ended = True

    async def _call(self, awaitable: Awaitable[Answer]) -> Answer:
        """Await a service's answer; every error but a timeout means that the sandbox is lost."""
        try:
            return await awaitable
        except (TimeoutError, SandboxLost, asyncio.CancelledError):
            raise
        except Exception as error:
            raise SandboxLost(f"{type(error).__name__}: {error}") from error


def _place(path: str) -> str:
    place = posixpath.normpath(posixpath.join(WORK, path))
    if not place.startswith(f"{WORK}/"):
        raise SandboxFileError(f"{path!r} is not in the work directory")
    return place


async def _started(creating: Any, adapt: type[Any], limits: SandboxLimits) -> RemoteSandbox:
    """Await a new sandbox of a service, and prepare it.

    Raises:
        SandboxLost: the service refuses; the message is its own.
    """
    try:
        remote = adapt(await creating)
    except Exception as error:
        raise SandboxLost(f"{type(error).__name__}: {error}") from error
    sandbox = RemoteSandbox(remote, limits.output_bytes)
    try:
        await sandbox.prepare()
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SandboxUnavailable(
            f"the package {name!r} is not installed: pip install 'tidegate[{name}]' ({error})"
        ) from error


# ---------------------------------------------------------------- E2B


@dataclass(slots=True)
class _E2BRemote:
    """A sandbox of E2B's package."""

    sandbox: Any
    """The service's ``AsyncSandbox``."""

    async def shell(self, command: str, timeout_s: int) -> str:
        e2b = importlib.import_module("e2b")
        try:  # exit statuses other than 0 are exceptions there
            result = await self.sandbox.commands.run(command, timeout=timeout_s)
        except e2b.CommandExitException as error:
            return str(error.stdout)
        except (e2b.SandboxNotRunningException, e2b.SandboxUnreachableException):
            raise
        except e2b.TimeoutException as error:
            raise TimeoutError(str(error)) from error
        return str(result.stdout)

    async def upload(self, path: str, content: bytes) -> None:
        await self.sandbox.files.write(path, content)

    async def download(self, path: str) -> bytes:
        return bytes(await self.sandbox.files.read(path, format="bytes"))

    async def end(self) -> None:
        await self.sandbox.kill()


class E2BSandboxes:
    """Provider of E2B's sandboxes (``pip install 'tidegate[e2b]'``, ``E2B_API_KEY``)."""

    def __init__(self, template: str | None = None, *, lifetime_s: int = 3600) -> None:
        """``template``: its image, CPUs, memory and disk, built beforehand; default is E2B's.

        ``lifetime_s``: time after which E2B ends a sandbox by itself.
        """
        self._template = template
        self._lifetime_s = lifetime_s

    async def start(self, limits: SandboxLimits) -> RemoteSandbox:
        """Create a sandbox."""
        creating = _package("e2b").AsyncSandbox.create(
            template=self._template,
            timeout=self._lifetime_s,
            allow_internet_access=limits.network,
        )
        return await _started(creating, _E2BRemote, limits)


# ---------------------------------------------------------------- Modal


@dataclass(slots=True)
class _ModalRemote:
    """A sandbox of Modal's package."""

    sandbox: Any
    """The service's ``Sandbox``."""

    async def shell(self, command: str, timeout_s: int) -> str:
        modal = importlib.import_module("modal")
        try:
            process = await self.sandbox.exec.aio("sh", "-c", command, timeout=timeout_s)
            printed = await process.stdout.read.aio()
            await process.wait.aio()
        except modal.exception.ExecTimeoutError as error:
            raise TimeoutError(str(error)) from error
        return str(printed)

    async def upload(self, path: str, content: bytes) -> None:
        await self.sandbox.filesystem.write_bytes.aio(content, path)

    async def download(self, path: str) -> bytes:
        return bytes(await self.sandbox.filesystem.read_bytes.aio(path))

    async def end(self) -> None:
        await self.sandbox.terminate.aio()


class ModalSandboxes:
    """Provider of Modal's sandboxes (``pip install 'tidegate[modal]'``, ``modal token new``)."""

    def __init__(
        self,
        image: Any = None,
        *,
        app: str = "tidegate",
        lifetime_s: int = 3600,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Set what sandboxes are created with.

        Args:
            image: a ``modal.Image``; Debian with Python by default.
            app: name of the Modal app that they belong to, created if missing.
            lifetime_s: time after which Modal ends a sandbox by itself.
            options: further arguments of ``modal.Sandbox.create``, such as ``cpu``.
        """
        self._image = image
        self._app = app
        self._lifetime_s = lifetime_s
        self._options = dict(options or {})

    async def start(self, limits: SandboxLimits) -> RemoteSandbox:
        """Create a sandbox."""
        modal = _package("modal")
        return await _started(self._create(modal, limits), _ModalRemote, limits)

    async def _create(self, modal: Any, limits: SandboxLimits) -> Any:
        app = await modal.App.lookup.aio(self._app, create_if_missing=True)
        megabytes = math.ceil((limits.memory_bytes + limits.disk_bytes) / 2**20)
        return await modal.Sandbox.create.aio(
            app=app,
            image=modal.Image.debian_slim() if self._image is None else self._image,
            timeout=self._lifetime_s,
            memory=(megabytes, megabytes),  # reserved, and the limit
            block_network=not limits.network,
            **self._options,
        )


# ---------------------------------------------------------------- Daytona


@dataclass(slots=True)
class _DaytonaRemote:
    """A sandbox of Daytona's package."""

    sandbox: Any
    """The service's ``AsyncSandbox``."""

    async def shell(self, command: str, timeout_s: int) -> str:
        daytona = importlib.import_module("daytona")
        try:
            response = await self.sandbox.process.exec(
                f"sh -c {shlex.quote(command)}", timeout=timeout_s
            )
        except daytona.DaytonaProcessExecutionTimeoutError as error:
            raise TimeoutError(str(error)) from error
        return str(response.result)

    async def upload(self, path: str, content: bytes) -> None:
        await self.sandbox.fs.upload_file(content, path)

    async def download(self, path: str) -> bytes:
        return bytes(await self.sandbox.fs.download_file(path))

    async def end(self) -> None:
        await self.sandbox.delete()


class DaytonaSandboxes:
    """Provider of Daytona's sandboxes (``pip install 'tidegate[daytona]'``, DAYTONA_API_KEY)."""

    def __init__(self, image: str = "python:3.12-slim", *, cpus: int = 1) -> None:
        """``image``: a container image with a shell. ``cpus``: cores of each sandbox."""
        self._image = image
        self._cpus = cpus
        self._client: Any = None

    async def start(self, limits: SandboxLimits) -> RemoteSandbox:
        """Create a sandbox."""
        daytona = _package("daytona")
        return await _started(self._create(daytona, limits), _DaytonaRemote, limits)

    async def _create(self, daytona: Any, limits: SandboxLimits) -> Any:
        if self._client is None:
            self._client = daytona.AsyncDaytona()
        resources = daytona.Resources(
            cpu=self._cpus,
            memory=math.ceil(limits.memory_bytes / 2**30),
            disk=math.ceil(limits.disk_bytes / 2**30),
        )  # in GiB
        parameters = daytona.CreateSandboxFromImageParams(
            image=self._image,
            resources=resources,
            network_block_all=not limits.network,
            ephemeral=True,
        )
        return await self._client.create(parameters, timeout=300)
