"""Remote services' sandboxes: the shell script in a real shell, calls against the real packages."""

import builtins
import importlib
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tidegate import Bubblewrap, DaytonaSandboxes, E2BSandboxes, ModalSandboxes, SandboxLimits
from tidegate.environments.local_sandboxes import LocalSandbox
from tidegate.environments.remote_sandboxes import RemoteSandbox
from tidegate.errors import SandboxFileError, SandboxLost, SandboxUnavailable

pytestmark = pytest.mark.wire

LIMITS = SandboxLimits(output_bytes=2000)


class ServiceInBubblewrap:
    """A service whose sandboxes are bubblewrap's, so that scripts run in a real shell."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox = sandbox

    async def shell(self, command: str, timeout_s: int) -> str:
        result = await self._sandbox.run(["sh", "-c", command], b"", timeout_s)
        if result.ended_by == "wall_time":
            raise TimeoutError
        return result.stdout

    async def upload(self, path: str, content: bytes) -> None:
        await self._sandbox.write(path, content)

    async def download(self, path: str) -> bytes:
        return await self._sandbox.read(path, 1 << 20)

    async def end(self) -> None:
        await self._sandbox.close()


@pytest_asyncio.fixture
async def remote() -> AsyncIterator[RemoteSandbox]:
    try:
        local = await Bubblewrap().start(SandboxLimits())
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    sandbox = RemoteSandbox(ServiceInBubblewrap(local), LIMITS.output_bytes)
    await sandbox.prepare()
    yield sandbox
    await sandbox.close()


async def test_a_remote_program_gets_its_input_and_returns_both_outputs(
    remote: RemoteSandbox,
) -> None:
    await remote.write(
        "a/b.py", b"import sys; print(sys.stdin.read() * 2); sys.exit('it\\'s over')"
    )
    result = await remote.run(["python3", "a/b.py"], "ü ".encode(), 10.0)
    assert (result.ended_by, result.exit_status) == ("exit", 1)
    assert (result.stdout, result.stderr) == ("ü ü \n", "it's over\n")
    killed = await remote.run(["sh", "-c", "kill -SEGV $$"], b"", 10.0)
    assert (killed.ended_by, killed.exit_status) == ("exit", -11)


async def test_a_remote_program_is_limited_in_time_and_output(remote: RemoteSandbox) -> None:
    assert (await remote.run(["sleep", "1000"], b"", 0.2)).ended_by == "wall_time"
    endless = await remote.run(["yes"], b"", 10.0)
    assert (endless.ended_by, endless.stdout) == ("output", "y\n" * 1000)


async def test_a_remote_file_outside_or_missing_is_refused(remote: RemoteSandbox) -> None:
    await remote.write("x", b"\xff")
    assert await remote.read("x", 10) == b"\xff"
    for path in ("missing", "../../etc/passwd", "/usr/bin/env"):
        with pytest.raises(SandboxFileError):
            await remote.read(path, 10)


async def test_any_error_of_a_service_means_that_its_sandbox_is_lost(
    remote: RemoteSandbox,
) -> None:
    await remote.close()
    with pytest.raises(SandboxLost):
        await remote.run(["true"], b"", 1.0)


@pytest.mark.parametrize(
    ("provider", "package"),
    [(E2BSandboxes(), "e2b"), (ModalSandboxes(), "modal"), (DaytonaSandboxes(), "daytona")],
)
async def test_a_missing_package_is_named(
    provider: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = importlib.import_module

    def missing(name: str, *arguments: Any) -> Any:
        if name == package:
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SandboxUnavailable, match=rf"pip install 'tidegate\[{package}\]'"):
        await provider.start(LIMITS)


# ---------------------------------------------------------------- the real packages' signatures


class Recorder:
    """Stands in for a service: checks each call against the real class's signature."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[str] = []
        self._answers = answers

    def method(self, function: Any, *, bound: bool = True) -> Any:
        signature = inspect.signature(function)

        async def call(*arguments: Any, **named: Any) -> Any:
            signature.bind(*([None] if bound else []), *arguments, **named)
            self.calls.append(function.__name__)
            answer = self._answers.get(function.__name__)
            if isinstance(answer, builtins.BaseException):
                raise answer
            return answer

        return call


def namespace(**members: Any) -> Any:
    return type(
        "Namespace", (), {k: staticmethod(v) if callable(v) else v for k, v in members.items()}
    )


PRINTED = "0\nb2s=\n\n"
"""What the script prints of a program that printed ``ok``."""


async def test_e2b_is_called_as_its_package_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    e2b = pytest.importorskip("e2b")
    commands = importlib.import_module("e2b.sandbox_async.commands.command").Commands
    files = importlib.import_module("e2b.sandbox_async.filesystem.filesystem").Filesystem
    result = e2b.CommandResult(stderr="", stdout=PRINTED, exit_code=0, error=None)
    service = Recorder(run=result, read=bytearray(b"ok"))
    sandbox = namespace(
        commands=namespace(run=service.method(commands.run)),
        files=namespace(write=service.method(files.write), read=service.method(files.read)),
        kill=service.method(e2b.AsyncSandbox.kill),
    )
    created = Recorder(create=sandbox)
    create = created.method(e2b.AsyncSandbox.create, bound=False)
    monkeypatch.setattr(e2b.AsyncSandbox, "create", create)
    provided = await E2BSandboxes().start(LIMITS)
    assert (await provided.run(["true"], b"", 1.0)).stdout == "ok"
    service._answers["run"] = e2b.TimeoutException("late")
    assert (await provided.run(["true"], b"", 1.0)).ended_by == "wall_time"
    service._answers["run"] = e2b.SandboxNotRunningException("gone")
    with pytest.raises(SandboxLost, match="gone"):
        await provided.run(["true"], b"", 1.0)
    await provided.close()
    assert service.calls == ["run", "write", "run", "write", "run", "write", "run", "kill"]


async def test_daytona_is_called_as_its_package_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    daytona = pytest.importorskip("daytona")
    process = importlib.import_module("daytona._async.process").AsyncProcess
    files = importlib.import_module("daytona._async.filesystem").AsyncFileSystem
    response = daytona.ExecuteResponse(exit_code=0, result=PRINTED)
    service = Recorder(exec=response, download_file=b"ok")
    sandbox = namespace(
        process=namespace(exec=service.method(process.exec)),
        fs=namespace(
            upload_file=service.method(files.upload_file),
            download_file=service.method(files.download_file),
        ),
        delete=service.method(daytona.AsyncSandbox.delete),
    )
    client = Recorder(create=sandbox)
    create = client.method(daytona.AsyncDaytona.create)
    monkeypatch.setattr(daytona, "AsyncDaytona", lambda: namespace(create=create))
    provided = await DaytonaSandboxes().start(LIMITS)
    assert (await provided.run(["true"], b"", 1.0)).stdout == "ok"
    service._answers["exec"] = daytona.DaytonaProcessExecutionTimeoutError("late")
    assert (await provided.run(["true"], b"", 1.0)).ended_by == "wall_time"
    service._answers["exec"] = daytona.DaytonaConnectionError("gone")
    with pytest.raises(SandboxLost, match="gone"):
        await provided.run(["true"], b"", 1.0)
    await provided.close()
    assert service.calls[-1] == "delete"


async def test_modal_is_called_as_its_package_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    modal = pytest.importorskip("modal")
    real = importlib.import_module("modal.sandbox._sandbox")._Sandbox
    files = importlib.import_module("modal.sandbox._filesystem")._SandboxFilesystem
    process = importlib.import_module("modal.container_process")._ContainerProcess

    def aio(function: Any) -> Any:
        return namespace(aio=function)

    async def read() -> str:
        return PRINTED

    service = Recorder(read_bytes=b"ok")
    running = namespace(stdout=namespace(read=aio(read)), wait=aio(service.method(process.wait)))
    service._answers["exec"] = running
    sandbox = namespace(
        exec=aio(service.method(real.exec)),
        filesystem=namespace(
            write_bytes=aio(service.method(files.write_bytes)),
            read_bytes=aio(service.method(files.read_bytes)),
        ),
        terminate=aio(service.method(real.terminate)),
    )
    created = Recorder(create=sandbox)
    monkeypatch.setattr(modal.Sandbox, "create", aio(created.method(real.create, bound=False)))
    lookup = Recorder().method(modal.App.lookup, bound=False)
    monkeypatch.setattr(modal.App, "lookup", aio(lookup))
    provided = await ModalSandboxes().start(LIMITS)
    assert (await provided.run(["true"], b"", 1.0)).stdout == "ok"
    service._answers["exec"] = modal.exception.ExecTimeoutError("late")
    assert (await provided.run(["true"], b"", 1.0)).ended_by == "wall_time"
    service._answers["exec"] = modal.exception.SandboxTerminatedError("gone")
    with pytest.raises(SandboxLost, match="gone"):
        await provided.run(["true"], b"", 1.0)
    await provided.close()
    assert service.calls[-1] == "terminate"
