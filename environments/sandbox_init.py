"""Init process (pid 1) of a sandbox: runs programs one at a time within limits, keeps their files.

The host starts it in a new PID namespace, by bubblewrap or a container runtime, with any Python
from 3.9 on and the standard library only:

    python3 -I -S -c LOADER WORK_DIRECTORY MEMORY_BYTES CPU_S PROCESSES DISK_BYTES OUTPUT_BYTES

The loader reads this source from standard input and executes it. It talks to
:class:`~tidegate.environments.local_sandboxes.LocalSandbox` over standard input and output. A frame
is a u32 number of fields, then each field's u32 length and bytes (big-endian):

    write PATH CONTENT            ->  ok | file_error MESSAGE
    read PATH BYTES_MAX           ->  ok CONTENT | file_error MESSAGE
    run WALL_S STDIN ARGUMENT...  ->  ok ENDED_BY EXIT_STATUS WALL_S CPU_S STDOUT STDERR

Programs can't stop this process: the kernel drops signals from within a PID namespace to its pid 1,
as it is not dumpable, they can neither trace it nor open its descriptors, and a seccomp filter
refuses the calls by which they could change its limits or its scheduling. When a program ends,
``kill(-1)`` ends all processes that it left behind. When the host closes the connection, this
process exits and the kernel ends the namespace.
"""

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

TICK_S = 0.02
"""Interval at which memory, CPU time and files are measured. Within it, one process is bounded by
RLIMIT_DATA and RLIMIT_FSIZE."""

OPEN_FILES_MAX = 256
"""Open files of one process: bounds the kernel's memory in pipes and sockets."""

BYTES_PER_FILE_MIN = 4096
"""An empty file counts as this much disk space, because inodes are kernel memory too."""

CHUNK_BYTES = 65536
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
"""From <linux/prctl.h>."""

SECCOMP_MODE_FILTER = 2
"""From <linux/seccomp.h>."""

AUDIT_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""From <linux/audit.h>."""

X32_BIT = 0x40000000
"""System calls of the x32 ABI have this bit, and would evade the numbers below."""

CALLS_ON_PROCESSES = {
    "x86_64": {
        "prlimit64": (302, 0), "sched_setaffinity": (203, 0), "sched_setscheduler": (144, 0),
        "sched_setparam": (142, 0), "sched_setattr": (314, 0), "setpriority": (141, 1),
        "ioprio_set": (251, 1),
    },
    "aarch64": {
        "prlimit64": (261, 0), "sched_setaffinity": (122, 0), "sched_setscheduler": (119, 0),
        "sched_setparam": (118, 0), "sched_setattr": (274, 0), "setpriority": (140, 1),
        "ioprio_set": (30, 1),
    },
}  # fmt: skip
"""System calls that change another process, with the index of the argument that names the process.
They fail with EPERM for pid 1."""

FORBIDDEN_CALLS = {
    "x86_64": {
        "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "semget": 64, "msgget": 68,
        "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "io_uring_setup": 425,
    },
    "aarch64": {
        "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "semget": 190, "msgget": 186,
        "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "io_uring_setup": 425,
    },
}  # fmt: skip
"""System calls that give memory beyond all limits, or that kernel exploits need and programs do
not. They fail with EPERM, except in containers, whose runtime has a filter and a cgroup."""

SOCKET_CALL = {"x86_64": 41, "aarch64": 198}

ADDRESS_FAMILIES = (1, 2, 10, 16)
"""Families of sockets outside containers: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. A network
namespace does not contain others, such as AF_VSOCK, which reaches a virtual machine's host."""

LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Classic BPF opcodes, from <linux/bpf_common.h>: 32-bit load, two jumps, return."""

NUMBER_OFFSET, ARCH_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
"""Offsets in struct seccomp_data; an argument has 8 bytes, its lower half first."""

ALLOW, REFUSE = (RETURN, 0, 0, 0x7FFF0000), (RETURN, 0, 0, 0x00050000 | errno.EPERM)
"""Instructions that return SECCOMP_RET_ALLOW, and SECCOMP_RET_ERRNO with EPERM."""


class HostGone(Exception):
    """The host has closed the connection."""


class ProgramLimits:
    """Limits of each program, from the command line."""

    def __init__(self, arguments: list[str]) -> None:
        self.work = arguments[0]
        self.memory_bytes = int(arguments[1])
        self.cpu_s = float(arguments[2])
        self.processes = int(arguments[3])
        """Limit of processes and threads, or 0 if the container's runtime limits them."""
        self.disk_bytes = int(arguments[4])
        self.output_bytes = int(arguments[5])

    def apply(self) -> None:
        """Set the resource limits of this process, a program's, before it is executed."""
        for kind, limit in (
            (resource.RLIMIT_DATA, self.memory_bytes),
            (resource.RLIMIT_FSIZE, self.disk_bytes),
            (resource.RLIMIT_NOFILE, OPEN_FILES_MAX),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 65536),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            _set_limit(kind, limit)
        if self.processes:
            _set_limit(resource.RLIMIT_NPROC, self.processes + 1)  # this process counts too


def _set_limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


class Connection:
    """Frames from and to the host."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self._sink = sink

    def receive(self) -> list[bytes]:
        """Return the next frame's fields."""
        (count,) = struct.unpack(">I", self._read(4))
        return [self._read(*struct.unpack(">I", self._read(4))) for _ in range(count)]

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self.source, min(count, 1 << 20))
            if not part:
                raise HostGone
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def send(self, *fields: bytes) -> None:
        """Send a frame."""
        body = b"".join(struct.pack(">I", len(field)) + field for field in fields)
        view = memoryview(struct.pack(">I", len(fields)) + body)
        while view:
            view = view[os.write(self._sink, view) :]


def path_in_work(work: str, given: bytes) -> str:
    """Return the path of a file in the work directory, whatever links programs have made.

    Raises:
        PermissionError: it is elsewhere.
    """
    path = os.path.realpath(os.path.join(work, os.fsdecode(given)))
    if not path.startswith(f"{work}/"):
        raise PermissionError(f"{os.fsdecode(given)!r} is not in the work directory")
    return path


def write_file(work: str, given: bytes, content: bytes) -> None:
    """Write a file, and create its directories."""
    path = path_in_work(work, given)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o755)
    with open(descriptor, "wb") as file:
        file.write(content)


def read_file(work: str, given: bytes, bytes_max: int) -> bytes:
    """Return a regular file's content."""
    descriptor = os.open(path_in_work(work, given), os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{os.fsdecode(given)!r} is not a regular file")
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(f"{os.fsdecode(given)!r} is larger than {bytes_max} bytes")
    return content


class SandboxedProgram:
    """Program in a sandbox, from its start until none of its processes is left."""

    def __init__(self, limits: ProgramLimits, host: int, stdin: bytes, argv: list[bytes]) -> None:
        self._limits = limits
        self._host = host
        self._started_s = time.monotonic()
        self._reaped_before_s = _children_cpu_s()
        self._stdin = memoryview(stdin)
        self._output: dict[int, list[bytes]] = {}
        """Output so far, by the pipe's descriptor: standard output, then standard error."""
        self._output_bytes = 0
        self._status: int | None = None
        """Wait status of the first process, once it has ended."""
        self._poll = select.poll()
        self._start(argv)

    def _start(self, argv: list[bytes]) -> None:
        source, self._sink = os.pipe()
        pipes = [os.pipe(), os.pipe()]
        self._pid = os.fork()
        if not self._pid:
            _execute(self._limits, argv, [source, pipes[0][1], pipes[1][1]])
        os.close(source)
        os.set_blocking(self._sink, False)
        for reader, writer in pipes:
            os.close(writer)
            os.set_blocking(reader, False)
            self._output[reader] = []
            self._poll.register(reader, select.POLLIN)
        self._pidfd = os.pidfd_open(self._pid)
        self._poll.register(self._pidfd, select.POLLIN)
        self._poll.register(self._sink, select.POLLOUT)
        self._poll.register(self._host, 0)  # reports only that the host has hung up

    def run_to_end(self, wall_s: float) -> tuple[bytes, ...]:
        """Return how it ended, exit status, wall and CPU seconds, standard output and error."""
        ended_by = self._watch(self._started_s + wall_s)
        elapsed_s = time.monotonic() - self._started_s
        _kill_all()
        self._reap(blocking=True)
        for reader in self._output:
            while ended_by != "output" and self._read(reader):
                if self._output_bytes > self._limits.output_bytes:
                    ended_by = "output"
        for descriptor in (self._sink, self._pidfd, *self._output):
            if descriptor >= 0:
                os.close(descriptor)
        status = 0 if self._status is None else os.waitstatus_to_exitcode(self._status)
        cpu_s = _children_cpu_s() - self._reaped_before_s
        numbers = (str(number).encode() for number in (status, elapsed_s, cpu_s))
        outputs, left = [], self._limits.output_bytes
        for parts in self._output.values():
            outputs.append(b"".join(parts)[:left])
            left -= len(outputs[-1])
        return (ended_by.encode(), *numbers, *outputs)

    def _watch(self, deadline_s: float) -> str:
        """Serve the pipes until the first process ends or a limit is exceeded; return why."""
        tick_s = time.monotonic() + TICK_S
        while True:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return "wall_time"
            if now_s >= tick_s:
                exceeded = self._measure()
                if exceeded:
                    return exceeded
                tick_s = time.monotonic() + TICK_S
            wait_s = max(0.0, min(deadline_s, tick_s) - now_s)
            for descriptor, events in self._poll.poll(int(wait_s * 1000) + 1):
                if descriptor == self._host:
                    raise HostGone
                if descriptor == self._pidfd:
                    return "exit"
                if descriptor == self._sink:
                    self._feed(events)
                elif not self._read(descriptor):
                    self._poll.unregister(descriptor)
                if self._output_bytes > self._limits.output_bytes:
                    return "output"

    def _feed(self, events: int) -> None:
        """Write more of the standard input; close it at its end, or once no process reads it."""
        try:
            if self._stdin and not events & select.POLLERR:
                self._stdin = self._stdin[os.write(self._sink, self._stdin[:CHUNK_BYTES]) :]
                if self._stdin:
                    return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._poll.unregister(self._sink)
        os.close(self._sink)
        self._sink = -1

    def _read(self, reader: int) -> bool:
        """Read output that is there; return False at its end."""
        try:
            part = os.read(reader, CHUNK_BYTES)
        except BlockingIOError:
            return False  # after the end: only what was written before
        self._output[reader].append(part)
        self._output_bytes += len(part)
        return bool(part)

    def _measure(self) -> str:
        """Return the limit that the program's processes exceed together, or an empty string."""
        self._reap(blocking=False)
        cpu_s, memory_bytes = _children_cpu_s() - self._reaped_before_s, 0
        pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        for pid in pids:
            cpu_s += _cpu_s(pid)
            memory_bytes += _resident_bytes(pid)
        if memory_bytes > self._limits.memory_bytes and (
            sum(_proportional_bytes(pid) for pid in pids) > self._limits.memory_bytes
        ):
            return "memory"
        if cpu_s > self._limits.cpu_s:
            return "cpu_time"
        files = os.statvfs(self._limits.work)
        if (files.f_files - files.f_ffree) * BYTES_PER_FILE_MIN > self._limits.disk_bytes:
            return "disk"
        return ""

    def _reap(self, *, blocking: bool) -> None:
        """Reap ended processes, orphans included; the first one's status is kept."""
        try:
            while True:
                pid, status = os.waitpid(-1, 0 if blocking else os.WNOHANG)
                if pid == self._pid:
                    self._status = status
                if not pid:
                    return
        except ChildProcessError:
            return


def _execute(limits: ProgramLimits, argv: list[bytes], descriptors: list[int]) -> None:
    """Become the program, in the process forked for it."""
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        limits.apply()
        os.chdir(limits.work)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"can't run {os.fsdecode(argv[0])}: {error}\n".encode())
        os._exit(127)
    finally:
        os._exit(126)


def _kill_all() -> None:
    """Kill all processes of this PID namespace but this one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _proc(pid: str, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: str) -> float:
    """Return a process's CPU time with that of its reaped children."""
    # "pid (name) state ppid ...": the name may hold parentheses and spaces. See proc(5).
    fields = _proc(pid, "stat").rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def _resident_bytes(pid: str) -> int:
    """Return a process's resident memory without mapped files."""
    return _sum_kilobytes(_proc(pid, "status"), (b"RssAnon:", b"RssShmem:"))


def _proportional_bytes(pid: str) -> int:
    """Return the same with pages that are shared by n processes counted as 1/n; else the same."""
    rollup = _proc(pid, "smaps_rollup")
    if not rollup:
        return _resident_bytes(pid)
    return _sum_kilobytes(rollup, (b"Pss_Anon:", b"Pss_Shmem:"))


def _sum_kilobytes(text: bytes, names: tuple[bytes, ...]) -> int:
    lines = (line.split() for line in text.splitlines() if line.startswith(names))
    return 1024 * sum(int(line[1]) for line in lines)


def serve(connection: Connection, limits: ProgramLimits) -> None:
    """Answer requests until the host closes the connection."""
    connection.send(b"ready")
    while True:
        kind, *fields = connection.receive()
        try:
            if kind == b"write":
                write_file(limits.work, *fields)
                connection.send(b"ok")
            elif kind == b"read":
                connection.send(b"ok", read_file(limits.work, fields[0], int(fields[1])))
            else:
                program = SandboxedProgram(limits, connection.source, fields[1], fields[2:])
                connection.send(b"ok", *program.run_to_end(float(fields[0])))
        except HostGone:
            raise
        except Exception as error:  # a name with a NUL, or of more levels than Python recurses
            if kind == b"run":
                raise
            message = str(error) or repr(error)
            connection.send(b"file_error", message.encode(errors="replace"))


def seccomp_program(machine: str, *, is_container: bool) -> bytes:
    """Return a seccomp filter: it refuses calls of other ABIs and ``CALLS_ON_PROCESSES`` on pid 1,
    and unless the container's runtime has a filter, ``FORBIDDEN_CALLS`` and other sockets."""
    # Each instruction: opcode, instructions to skip if true, if false, operand.
    program = [
        (LOAD, 0, 0, ARCH_OFFSET),
        (JUMP_IF_EQUAL, 1, 0, AUDIT_ARCHES[machine]),
        REFUSE,
        (LOAD, 0, 0, NUMBER_OFFSET),
        (JUMP_IF_AT_LEAST, 0, 1, X32_BIT),
        REFUSE,
    ]
    for number, argument in CALLS_ON_PROCESSES[machine].values():
        load = (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * argument)
        program += [(JUMP_IF_EQUAL, 0, 4, number), load, (JUMP_IF_EQUAL, 0, 1, 1), REFUSE, ALLOW]
    if is_container:
        return _encoded([*program, ALLOW])
    for number in FORBIDDEN_CALLS[machine].values():
        program += [(JUMP_IF_EQUAL, 0, 1, number), REFUSE]
    count = len(ADDRESS_FAMILIES)
    program += [(JUMP_IF_EQUAL, 0, count + 3, SOCKET_CALL[machine]), (LOAD, 0, 0, ARGUMENTS_OFFSET)]
    for place, family in enumerate(ADDRESS_FAMILIES):
        program.append((JUMP_IF_EQUAL, count - place, 0, family))
    return _encoded([*program, REFUSE, ALLOW, ALLOW])


def _encoded(program: list[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


class _FilterProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _protect(limits: ProgramLimits) -> None:
    """Keep programs from tracing or changing this process, whose children inherit the filter."""
    prctl, machine = ctypes.CDLL(None, use_errno=True).prctl, os.uname().machine
    if machine not in AUDIT_ARCHES:
        sys.exit(f"sandboxes run on {' and '.join(AUDIT_ARCHES)}, and this machine is {machine}")
    instructions = seccomp_program(machine, is_container=not limits.processes)
    program = _FilterProgram(len(instructions) // 8, instructions)
    for call in (
        (PR_SET_DUMPABLE, 0, 0, 0, 0),
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if prctl(*call):
            sys.exit(f"prctl({call[0]}) failed: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    """Serve the host that started this sandbox."""
    if os.getpid() != 1:
        sys.exit("the sandbox's init process must be pid 1 of a PID namespace of its own")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would let programs deliver it
    limits = ProgramLimits(sys.argv[1:])
    _protect(limits)
    if not os.access(limits.work, os.W_OK):
        sys.exit(f"{limits.work} is not writable: the image must not have such a directory")
    connection = Connection(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        serve(connection, limits)
    except (HostGone, BrokenPipeError, ConnectionResetError):
        os._exit(0)


if __name__ == "__main__":
    main()
