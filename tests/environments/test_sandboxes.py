"""Hostile and honest programs in bubblewrap's sandboxes; skipped where bubblewrap does not work."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

import tidegate
from tests.models import make_model_directory
from tidegate import Bubblewrap, Containers, Sandbox, Sandboxes, SandboxLimits
from tidegate.environments.local_sandboxes import LocalSandbox, start_sandbox
from tidegate.environments.sandboxes import ProgramResult, SandboxProvider
from tidegate.errors import (
    ConfigError,
    InfrastructureFailed,
    PolicyFailed,
    RunClosed,
    SandboxFileError,
    SandboxLost,
    SandboxUnavailable,
)

pytestmark = pytest.mark.wire

LIMITS = SandboxLimits(
    memory_bytes=128 << 20,
    cpu_s=2.0,
    wall_s=30.0,
    processes=16,
    disk_bytes=8 << 20,
    output_bytes=1 << 16,
)
"""Wall time is long, so that on a loaded machine CPU time is what ends a busy program."""


IMAGE = os.environ.get("TIDEGATE_SANDBOX_IMAGE")
"""A container image with Python: then the programs run in Podman's containers, too."""

PROVIDERS: list[SandboxProvider] = [Bubblewrap()]
if IMAGE:
    options = os.environ.get("TIDEGATE_SANDBOX_OPTIONS", "").split()
    PROVIDERS.append(Containers(IMAGE, options=options))


@pytest.fixture(scope="module", params=PROVIDERS, ids=lambda provider: type(provider).__name__)
def sandboxes(request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    try:
        pool = Sandboxes(request.param, limits=LIMITS, sandboxes_max=2, ready=1)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with pool:
        yield pool


@pytest_asyncio.fixture
async def sandbox(sandboxes: Sandboxes) -> AsyncIterator[Sandbox]:
    async with sandboxes.take() as taken:
        yield taken


BUBBLEWRAP_ONLY = pytest.mark.parametrize(
    "sandboxes", PROVIDERS[:1], indirect=True, ids=["Bubblewrap"]
)
"""What a container's cgroup does otherwise, or its runtime's own filter of system calls."""


async def python(sandbox: Sandbox, text: str, *arguments: str) -> ProgramResult:
    return await sandbox.run(["python3", "program.py", *arguments], files={"program.py": text})


async def assert_works_and_is_empty(sandbox: Sandbox) -> None:
    """The sandbox still runs programs, and none but init and this one is left."""
    result = await python(
        sandbox, "import os; print(sorted(n for n in os.listdir('/proc') if n.isdigit()))"
    )
    assert result.succeeded, result
    assert len(result.stdout.split(",")) == 2, result


async def assert_prints(sandbox: Sandbox, text: str, expected: str = "") -> None:
    """The program succeeds with this output, and leaves a sandbox that works and is empty."""
    result = await python(sandbox, text)
    assert (result.succeeded, result.stdout) == (True, expected), result
    await assert_works_and_is_empty(sandbox)


# ---------------------------------------------------------------- honest programs


async def test_a_program_gets_its_files_arguments_and_input(sandbox: Sandbox) -> None:
    text = "import sys; print(sys.argv[1:], sys.stdin.read(), open('data/a.bin', 'rb').read())"
    files: dict[str, str | bytes] = {"a.py": text, "data/a.bin": b"\xff"}
    result = await sandbox.run(["python3", "a.py", "1", "two words"], files=files, stdin="three")
    assert result.stdout == "['1', 'two words'] three b'\\xff'\n"
    assert (result.succeeded, result.stderr) == (True, "")


async def test_a_program_that_fails_is_no_error_of_the_sandbox(sandbox: Sandbox) -> None:
    raised = await python(sandbox, "raise ValueError('no')")
    assert (raised.ended_by, raised.exit_status, raised.succeeded) == ("exit", 1, False)
    assert "ValueError: no" in raised.stderr
    crashed = await python(sandbox, "import os; os.kill(os.getpid(), 11)")
    assert (crashed.ended_by, crashed.exit_status) == ("exit", -signal.SIGSEGV)
    missing = await sandbox.run(["no-such-program"])
    assert missing.exit_status == 127
    assert "No such file" in missing.stderr


async def test_large_input_and_output_cross_while_the_program_runs(sandbox: Sandbox) -> None:
    text = "import sys; data = sys.stdin.read(); sys.stdout.write(data[:60_000]); print(len(data))"
    result = await sandbox.run(["python3", "-c", text], stdin="x" * 3_000_000)
    assert result.stdout == "x" * 60_000 + "3000000\n"
    assert (await sandbox.run(["true"], stdin="x" * 3_000_000)).succeeded  # which nothing reads


async def test_processes_can_share_semaphores_and_memory(sandbox: Sandbox) -> None:
    text = "import multiprocessing as m; print(m.get_context('fork').Pool(2).map(abs, [-1, -2]))"
    await assert_prints(sandbox, text, "[1, 2]\n")


async def test_files_stay_between_programs_and_no_longer(sandboxes: Sandboxes) -> None:
    async with sandboxes.take() as first:
        await python(first, "open('left', 'w').write('12')")
        assert (await python(first, "print(open('/work/left').read())")).stdout == "12\n"
        assert await first.read("left") == b"12"
    async with sandboxes.take() as second:
        with pytest.raises(SandboxFileError, match="left"):
            await second.read("left")


async def test_texts_that_no_encoding_has_do_not_end_the_sandbox(sandbox: Sandbox) -> None:
    result = await sandbox.run(["echo", "\ud800\udfff"], stdin="\ud800")
    assert result.stdout == "??\n"
    assert (await sandbox.run(["echo", "a\0b"])).exit_status == 126
    await assert_works_and_is_empty(sandbox)


# ---------------------------------------------------------------- hostile programs


async def test_a_fork_bomb_ends_at_its_limit(sandbox: Sandbox) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    result = await python(sandbox, bomb)
    assert result.ended_by in ("cpu_time", "wall_time")
    await assert_works_and_is_empty(sandbox)


async def test_a_program_has_no_more_processes_than_its_limit(sandbox: Sandbox) -> None:
    text = """
import os, signal
count = 1
try:
    while True:
        if not os.fork():
            signal.pause()
        count += 1
except BlockingIOError:
    print(count)
"""
    result = await python(sandbox, text)
    assert result.stdout == f"{LIMITS.processes}\n", result
    await assert_works_and_is_empty(sandbox)


async def test_endless_output_is_cut_and_its_program_killed(sandbox: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        result = await python(sandbox, f"import sys\nwhile True: sys.{stream}.write('y' * 999)")
        assert result.ended_by == "output"
        assert getattr(result, stream) == ("y" * 999 * 99)[: LIMITS.output_bytes]
    await assert_works_and_is_empty(sandbox)


async def test_a_process_that_wants_too_much_memory_gets_none(sandbox: Sandbox) -> None:
    result = await python(sandbox, f"bytearray({LIMITS.memory_bytes})")
    assert "MemoryError" in result.stderr


HOGS = {
    "processes": """
import os, signal
for _ in range(4):
    if not os.fork():
        memory = bytearray(b"x") * (50 << 20)
        signal.pause()
signal.pause()
""",
    "shared memory": """
import mmap, time
maps = []
while True:
    maps.append(mmap.mmap(-1, 4 << 20))
    maps[-1].write(b"x" * (4 << 20))
""",
}


@BUBBLEWRAP_ONLY
@pytest.mark.parametrize("text", HOGS.values(), ids=HOGS)
async def test_memory_is_limited_for_all_processes_together(sandbox: Sandbox, text: str) -> None:
    assert (await python(sandbox, text)).ended_by == "memory"
    await assert_works_and_is_empty(sandbox)


async def test_pages_shared_by_forked_processes_count_once(sandbox: Sandbox) -> None:
    text = """
import os, time
memory = bytearray(b"x") * (70 << 20)
for _ in range(3):
    if not os.fork():
        time.sleep(0.3)  # some of the measurements
        os._exit(0)
for _ in range(3):
    os.wait()
"""
    assert (await python(sandbox, text)).succeeded


@BUBBLEWRAP_ONLY
async def test_memory_that_no_process_owns_is_refused(sandbox: Sandbox) -> None:
    text = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
IPC_CREAT = 0o1000
print(libc.shmget(7, 4096, IPC_CREAT), libc.msgget(7, IPC_CREAT), libc.semget(7, 1, IPC_CREAT))
for call in (
    lambda: os.memfd_create("x"),
    lambda: open("/dev/shm/x", "wb").write(b"x" * (17 << 20)),
):
    try:
        call()
        print(call)
    except OSError as error:
        pass
"""
    await assert_prints(sandbox, text, "-1 -1 -1\n")


async def test_the_disk_is_limited(sandbox: Sandbox) -> None:
    text = "import itertools\nfor n in itertools.count(): open(str(n), 'wb').write(b'x' * 100_000)"
    result = await python(sandbox, text)
    assert "No space left on device" in result.stderr
    full = await python(sandbox, "x" * 2_000_000)
    assert full.ended_by == "disk"
    with pytest.raises(SandboxFileError, match="No space left") as caught:
        await sandbox.write("more", "x" * 2_000_000)
    assert isinstance(caught.value, PolicyFailed)


async def test_empty_files_fill_the_disk_too(sandbox: Sandbox) -> None:
    text = "import itertools, os\nfor n in itertools.count(): os.symlink('x', str(n))"
    assert (await python(sandbox, text)).ended_by == "disk"


async def test_time_is_limited_for_sleepers_and_for_many_that_compute(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["sleep", "1000"], wall_s=0.2)).ended_by == "wall_time"
    spin = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    result = await python(sandbox, spin)
    assert result.ended_by == "cpu_time"
    await assert_works_and_is_empty(sandbox)


async def test_nothing_of_the_host_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host-secret")
    monkeypatch.setenv("INNOCENT_NAME", "host-secret")
    places = [str(secret), "/etc/passwd", "/etc/shadow", "/root", "/home", "/sys", "/run", "/var"]
    places += ["/proc/1/environ", "/proc/1/mem", "/proc/1/fd/3", "/proc/1/root", "/dev/kmsg"]
    text = f"""
import os
for place in {places!r}:
    try:
        print(place, os.listdir(place) if os.path.isdir(place) else open(place, "rb").read())
    except OSError:
        pass
print(dict(os.environ))
print([open(f"/proc/{{pid}}/cmdline").read() for pid in os.listdir("/proc") if pid.isdigit()])
"""
    with _pool(ready=0) as pool:
        async with pool.take() as sandbox:
            result = await python(sandbox, text)
    assert result.succeeded, result
    assert "host-secret" not in result.stdout
    assert result.stdout.startswith("{"), result.stdout


async def test_nothing_can_be_written_outside_of_the_work_directory(sandbox: Sandbox) -> None:
    text = """
for place in ["/x", "/usr/x", "/usr/bin/python3", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname"]:
    try:
        open(place, "w")
        print(place)
    except OSError:
        pass
"""
    await assert_prints(sandbox, text)


async def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0tidegate-test-of-sandboxes")
        local.listen()
        text = f"""
import socket
for kind, address in [
    (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
    (socket.AF_INET, ("1.1.1.1", 53)),
    (socket.AF_UNIX, "\\0tidegate-test-of-sandboxes"),
]:
    try:
        socket.socket(kind).connect(address)
        print(address)
    except OSError as error:
        pass
"""
        await assert_prints(sandbox, text)


async def test_a_daemon_ends_with_its_program(sandbox: Sandbox) -> None:
    text = """
import os, signal
if not os.fork():
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if not os.fork():
        print("daemon", flush=True)
        while True:
            signal.sigwait([signal.SIGUSR1])
    os._exit(0)
os.wait()
"""
    result = await python(sandbox, text)
    assert result.ended_by == "exit"
    await assert_works_and_is_empty(sandbox)


async def test_signals_do_not_reach_the_init_process() -> None:
    text = """
import contextlib, os, signal
for number in sorted(signal.valid_signals()):
    os.kill(1, number)
    with contextlib.suppress(ProcessLookupError):  # there is no other process
        os.kill(-1, number)
print(open("/proc/1/stat").read().split()[2])
"""
    # A process that ignores SIGINT, as jobs of a shell do, passes that on: then Python has no
    # handler of it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _pool(ready=0) as pool:
            async with pool.take() as sandbox:
                result = await python(sandbox, text)
                assert result.stdout.strip() in ("S", "R"), result
                await assert_works_and_is_empty(sandbox)
    finally:
        signal.signal(signal.SIGINT, before)


async def test_a_program_that_changes_the_init_process_is_refused_and_judged(
    sandbox: Sandbox,
) -> None:
    text = """
import os, resource
for call in (
    lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
    lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),
    lambda: resource.prlimit(1, resource.RLIMIT_AS),
    lambda: os.sched_setaffinity(1, {0}),
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.sched_setparam(1, os.sched_param(0)),
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
):
    try:
        call()
        print(call)
    except PermissionError:
        pass
resource.prlimit(0, resource.RLIMIT_NOFILE, (64, 64))
resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (32, 32))
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.nice(1)
"""
    await assert_prints(sandbox, text)


def test_the_filter_of_containers_protects_their_init_process_only() -> None:
    text = """
import os, resource, socket, types
from tidegate.environments import sandbox_init
sandbox_init._protect(types.SimpleNamespace(processes=0))
os.close(os.memfd_create("x"))
resource.prlimit(0, resource.RLIMIT_NOFILE)
try:
    resource.prlimit(1, resource.RLIMIT_NOFILE)
except PermissionError as error:
    print(error.strerror)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "Operation not permitted\n", done


async def test_file_names_that_no_system_takes_are_refused_and_the_sandbox_lives(
    sandbox: Sandbox,
) -> None:
    for path in ("a\0b", "a/" * 1000 + "b", "x" * 300, "", "\udc80/x"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path)
    for path in ("a\0b", "x" * 300, "a/" * 5000 + "b"):
        with pytest.raises(SandboxFileError):
            await sandbox.write(path, "x")
    with pytest.raises(SandboxFileError):
        await sandbox.write("a/" * 1500 + "b", "x")
    assert not (await sandbox.run(["python3", "a\0b"])).succeeded
    await assert_works_and_is_empty(sandbox)


@BUBBLEWRAP_ONLY
async def test_sockets_that_a_network_namespace_does_not_contain_are_refused(
    sandbox: Sandbox,
) -> None:
    text = """
import socket
for family in range(64):
    try:
        socket.socket(family, socket.SOCK_STREAM if family != 16 else socket.SOCK_RAW)
        print(family)
    except OSError as error:
        pass
socket.socketpair()
"""
    result = await python(sandbox, text)
    assert result.succeeded, result
    assert {int(each) for each in result.stdout.split()} <= {1, 2, 10, 16}
    assert "1" in result.stdout.split()


@BUBBLEWRAP_ONLY
async def test_the_init_process_can_not_be_traced_nor_namespaces_made(sandbox: Sandbox) -> None:
    text = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, CLONE_NEWUSER, CLONE_NEWNET = 16, 0x10000000, 0x40000000
print(libc.ptrace(PTRACE_ATTACH, 1, 0, 0))
print(libc.unshare(CLONE_NEWUSER), libc.unshare(CLONE_NEWNET))
print(libc.mount(b"none", b"/work", b"tmpfs", 0, None))
"""
    await assert_prints(sandbox, text, "-1\n-1 -1\n-1\n")


async def test_links_and_pipes_do_not_mislead_the_host(sandbox: Sandbox) -> None:
    text = """
import os
os.symlink("/proc/self/status", "outside")
os.mkfifo("pipe")
os.mkdir("folder")
os.symlink("/usr", "usr")
"""
    assert (await python(sandbox, text)).succeeded
    for path in ("outside", "pipe", "folder", "usr/bin/env", "../etc/ld.so.cache", "/usr/bin/env"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path)
    for path in ("folder", "usr/x", "/etc/x", "pipe"):
        with pytest.raises(SandboxFileError):
            await sandbox.write(path, "x")
    await assert_works_and_is_empty(sandbox)


# ---------------------------------------------------------------- whose failure it is


def _pool(**settings: int) -> Sandboxes:
    try:
        return Sandboxes(Bubblewrap(), limits=LIMITS, **settings)
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def _outer_processes(pool: Sandboxes) -> list[psutil.Process]:
    """Return the processes outside of the pool's sandboxes that contain them."""
    pids = [sandbox._process.pid for sandbox in pool._open if isinstance(sandbox, LocalSandbox)]
    return [psutil.Process(pid) for pid in pids]


async def test_a_sandbox_that_is_killed_from_outside_is_lost() -> None:
    with _pool(sandboxes_max=1, ready=0) as pool:
        async with pool.take() as sandbox:
            running = asyncio.create_task(sandbox.run(["sleep", "1000"]))
            await asyncio.sleep(0)
            _outer_processes(pool)[0].kill()
            with pytest.raises(SandboxLost, match="the sandbox ended: exit status -9") as caught:
                await running
        assert isinstance(caught.value, InfrastructureFailed)
        assert caught.value.reason == "sandbox_lost"
        async with pool.take() as another:
            assert (await another.run(["true"])).succeeded


async def test_an_episode_whose_sandbox_is_lost_begins_again(tmp_path: Path) -> None:
    retries: list[int] = []

    async def play(episode: tidegate.Episode, task: int) -> float:
        retries.append(episode.retries)
        episode.append("a")
        await episode.generate(max_tokens=2)
        async with pool.take() as sandbox:
            if not episode.retries:
                _outer_processes(pool)[0].kill()
            return float((await sandbox.run(["true"])).succeeded)

    policy = tidegate.FailurePolicy(retry_delay_s=0.01)
    model = make_model_directory(tmp_path / "model")
    with _pool(ready=0, sandboxes_max=1) as pool:
        async with tidegate.serve(model=model, engines=1, failure_policy=policy) as rollouts:
            evaluation = await rollouts.evaluate([0], episode=play)
    assert evaluation.rewards == [1.0]
    assert retries == [0, 1]


async def test_a_cancelled_program_ends_with_its_sandbox_and_gives_its_place_back() -> None:
    with _pool(sandboxes_max=1, ready=0) as pool:
        sandbox = await pool.open()
        waiting = asyncio.create_task(pool.open())  # may be cancelled, too
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        running = asyncio.create_task(sandbox.run(["sleep", "1000"]))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(RunClosed):
            await sandbox.run(["true"])
        async with pool.take() as next_one:
            assert (await next_one.run(["true"])).succeeded


async def test_closing_the_pool_ends_all_sandboxes_and_says_so() -> None:
    pool = _pool(sandboxes_max=1, ready=1)
    sandbox = await pool.open()
    pending: list[asyncio.Task[Any]] = [asyncio.create_task(sandbox.run(["sleep", "1000"]))]
    pending.append(asyncio.create_task(pool.open()))  # waits for a place
    await asyncio.sleep(0)
    outer = _outer_processes(pool)
    children = [child for process in outer for child in process.children(recursive=True)]
    assert len(outer) <= len(children)
    await asyncio.to_thread(pool.close)
    for task in pending:
        with pytest.raises(RunClosed):
            await task
    assert psutil.wait_procs([*outer, *children], timeout=30)[1] == []
    with pytest.raises(RunClosed):
        await pool.open()


async def test_closing_a_pool_leaves_no_process_of_a_sandbox_that_is_being_started() -> None:
    def orphans() -> set[int]:
        """Processes of bubblewrap whose own parent is gone: other tests' have theirs."""
        each_of = psutil.process_iter(["name", "ppid"])
        return {p.pid for p in each_of if p.info["name"] == "bwrap" and p.info["ppid"] == 1}

    before = orphans()
    for number in range(20):
        pool = _pool()
        opening = asyncio.ensure_future(pool.open())
        await asyncio.sleep(0.003 * number)
        opening.cancel()
        pool.close()
        await asyncio.wait([opening])
    left = [psutil.Process(pid) for pid in orphans() - before if psutil.pid_exists(pid)]
    assert psutil.wait_procs(left, timeout=10)[1] == []


def test_sandboxes_end_with_the_process_that_started_them() -> None:
    _pool(ready=0).close()
    program = """
import asyncio, os, psutil, signal
import tidegate
async def main():
    pool = tidegate.Sandboxes(tidegate.Bubblewrap(), ready=0)
    sandbox = await pool.open()
    task = asyncio.create_task(sandbox.run(["sleep", "1000"]))
    while True:
        children = psutil.Process().children(recursive=True)
        if any(child.name() == "sleep" for child in children):
            break
        await asyncio.sleep(0.01)
    print(*(child.pid for child in children), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(processes, timeout=30)[1] == []


@pytest.mark.parametrize("reply", [b"\xff" * 8, b"\0\0\0\1" + b"\xff" * 4])
async def test_a_reply_without_limits_is_not_read(reply: bytes) -> None:
    program = f"import os; os.write(1, {reply!r}); os.read(0, 1 << 20); os.read(0, 1)"
    with pytest.raises(SandboxLost, match="invalid reply: 4294967295"):
        await start_sandbox([sys.executable, "-c", program], LIMITS, variables={})


# ---------------------------------------------------------------- machines that can't


def test_a_machine_without_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        Sandboxes(Bubblewrap())


def test_a_machine_that_forbids_namespaces_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bwrap = tmp_path / "bwrap"
    message = "bwrap: No permissions to create new namespace"
    bwrap.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match=f"(?s){message}.*(container|sysctl)"):
        Sandboxes(Bubblewrap())


async def test_settings_and_commands_that_can_not_work_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="memory_bytes must be above zero, got 0"):
        SandboxLimits(memory_bytes=0)
    with pytest.raises(ConfigError, match="sandboxes_max must be at least 1, got 0"):
        Sandboxes(Bubblewrap(), sandboxes_max=0)
    with pytest.raises(ConfigError, match="list of arguments"):
        await sandbox.run("echo x")
