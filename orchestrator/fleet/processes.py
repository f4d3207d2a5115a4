"""Engine processes on this machine: command lines, start, restart, logs and end.

The orchestrator never imports the engine: a worker is a separate program that speaks the wire
protocol.
"""

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tidegate.orchestrator.settings.config import EngineSettings, RunSettings
from tidegate.transport.message import keeps_kv
from tidegate.transport.private_directory import make_private_directory, make_private_file
from tidegate.transport.security import ENGINE_DEFAULT

LOG_LINES_REPORTED = 8
"""Last lines of a failed engine's log that its error message quotes."""

RESTARTS_MAX = 3
"""Most restarts of one engine in a run: more crashes are not by accident."""

RESTART_DELAY_FIRST_S = 0.5
"""Delay of the first restart, four times longer each time: 0.5, 2, 8 s."""

WORKER = "tidegate.engine.worker"
"""Module of the worker program, by name, because the orchestrator imports nothing of the engine."""

FORKED_WORKERS = "tidegate.engine.forked_workers"
"""Module of the program that forks several workers."""

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
"""From <linux/prctl.h>: whether orphaned descendants become children of this process."""

GOODBYE_TIMEOUT_S = 0.5
"""Time in which the goodbye of a process that has ended with status 0 is read. It says whether the
engine was asked to leave, and all its steps are read before it."""

FORKED_PIDS_BYTES = 65536
"""Most bytes of the list of PIDs: a pipe's size, so that the list is written at once."""

STOP_TIMEOUT_S = 5.0
"""Time between SIGTERM and SIGKILL for a process that does not end."""


def _execute(
    command: list[str], log: Path, *, pipe: int = subprocess.DEVNULL
) -> "subprocess.Popen[bytes]":
    """Start a worker program that writes to ``log``, or to ``pipe``, and its errors to ``log``."""
    make_private_file(log)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=pipe,
            stdout=output if pipe == subprocess.DEVNULL else pipe,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            # In its own session, Ctrl-C reaches only the run, which then ends its engines.
            start_new_session=True,
        )


class ForkedProcess:
    """A child of this process that another program forked; does what ``Popen`` does."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # waited for elsewhere in the user's program
                pid, status = self.pid, 0
            if pid != 0:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status as soon as the process has ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        if (status := self.poll()) is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
            if (status := self.poll()) is None:
                raise subprocess.TimeoutExpired(WORKER, timeout or 0.0)
        return status

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class EngineProcess:
    """One worker process started by this run."""

    def __init__(
        self, name: str, log: Path, process: "subprocess.Popen[bytes] | ForkedProcess"
    ) -> None:
        self.name = name
        self.log = log
        self._process = process
        self.pid = process.pid
        self._pidfd: int | None = os.pidfd_open(self.pid)
        """None after the process was waited for, because the descriptor is closed then."""

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[str], None]) -> None:
        """Have ``loop`` call ``on_exit`` with the name as soon as the process ends."""

        def notify() -> None:
            self.unwatch(loop)
            on_exit(self.name)

        if self._pidfd is not None:
            loop.add_reader(self._pidfd, notify)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel :meth:`watch`. Harmless if repeated."""
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)

    @property
    def has_succeeded(self) -> bool:
        """Whether the process has ended with status 0."""
        return self._process.poll() == 0

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process.poll() is None

    def exit_reason(self) -> str:
        """Return why the process ended: its exit status, and the end of its log."""
        status = self._process.poll()
        outcome = (
            f"killed by {signal.Signals(-status).name}"
            if status is not None and status < 0
            else f"exit status {status}"
        )
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_REPORTED:]
        if lines and lines[-1].startswith("error: "):
            return lines[-1].removeprefix("error: ")
        return "\n  ".join([f"{outcome}; end of {self.log}:", *lines]) if lines else outcome

    def kill(self) -> None:
        """Kill the process. Harmless if it has ended."""
        self._process.kill()

    def stop(self) -> None:
        """Ask the process to end; :meth:`join` waits for that."""
        if self.is_running:
            self._process.terminate()

    def join(self) -> None:
        """Wait until the process has ended, and kill it if that takes too long. Harmless if
        repeated.

        Call :meth:`unwatch` first.
        """
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)


class LocalEngines:
    """Engines that a run has started on this machine; one that dies is started again."""

    def __init__(
        self,
        settings: RunSettings,
        address: str,
        logs: Path,
        *,
        on_exit: Callable[[str, str], None],
    ) -> None:
        """``on_exit`` is called with the name of each engine that ends, and the reason."""
        self._settings = settings
        self._address = address
        self._logs = logs
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._processes: dict[str, EngineProcess] = {}
        self._restarts: Counter[str] = Counter()
        self._pending: dict[str, asyncio.TimerHandle] = {}
        """Timers of engines that will be started again."""
        self._retired: set[str] = set()
        """Engines that were asked to leave, and are not started again."""
        self._timers: set[asyncio.TimerHandle] = set()
        """Timers of engines whose end is yet to be handled."""
        self.may_restart = False
        """Whether engines that die are restarted; set once the first ones are ready."""
        self._forking: list[str] = []
        """Engines that ``_forks`` has not forked yet."""
        self._forks: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start all engines; they join when they have loaded the model."""
        make_private_directory(self._logs)
        names = [f"engine-{index}" for index in range(self._settings.fleet.engines_started)]
        own = [name for name in names if engine_number(name) not in self._server_numbers]
        # A device's engines are few, and forks of torch that then use CUDA have not been tried.
        if len(own) > 1 and not self._settings.engine.uses_gpu and self._fork(own):
            names = [name for name in names if name not in own]
        for name in names:
            self._start(name)

    def _fork(self, names: list[str]) -> bool:
        """Start a program that imports torch once and forks these engines; return whether it
        runs."""
        logs = [self._log(name) for name in names]
        for log in logs:
            make_private_file(log)
        starts = [[self._command(name), str(log)] for name, log in zip(names, logs, strict=True)]
        command = [sys.executable, "-m", FORKED_WORKERS, json.dumps(starts)]
        try:
            self._forks = _execute(command, logs[0], pipe=subprocess.PIPE)
        except OSError:  # more engines than an argument has room for
            return False
        self._forking = names
        assert self._forks.stdout is not None
        self._loop.add_reader(self._forks.stdout, self._adopt)
        return True

    def _adopt(self) -> None:
        """Make the forked engines children of this process, and have them begin; execute them if
        they could not be forked."""
        forks, names = self._forks, self._forking
        assert forks is not None
        assert forks.stdout is not None
        pids: list[int] = []
        # Else the program has ended, or an import has printed something.
        with contextlib.suppress(ValueError):
            reply = json.loads(os.read(forks.stdout.fileno(), FORKED_PIDS_BYTES))
            if isinstance(reply, list):
                pids = reply
        self._loop.remove_reader(forks.stdout)
        libc, was_subreaper = ctypes.CDLL(None), ctypes.c_int()
        libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was_subreaper), 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            forks.communicate(b"\n" if pids else b"", STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            forks.kill()
            forks.communicate()
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, was_subreaper.value, 0, 0, 0)
        self._forks, self._forking = None, []
        if forks.returncode != 0:
            pids = []  # the forks end
        for name, pid in itertools.zip_longest(names, pids):
            self._start(name, pid)
            if name in self._retired:
                self.kill(name)

    def _command(self, name: str) -> list[str]:
        """Return an engine's command; workers for ``engine_urls`` are numbered after the engines
        that the run begins with."""
        settings, number = self._settings, engine_number(name)
        if number not in self._server_numbers:
            return engine_command(settings, name, self._address)
        url = settings.fleet.engine_urls[number - settings.fleet.engines]
        return adapter_command(settings, name, self._address, url)

    @property
    def names(self) -> list[str]:
        """Names of the engines of the run's model that run or will be restarted, by number."""
        names = {*self._processes, *self._pending, *self._forking} - self._retired
        servers = self._server_numbers
        return sorted(
            (name for name in names if engine_number(name) not in servers), key=engine_number
        )

    @property
    def _server_numbers(self) -> range:
        fleet = self._settings.fleet
        return range(fleet.engines, fleet.engines_started)

    def add(self, count: int) -> list[str]:
        """Start more engines of the run's model; return their names: the lowest unused numbers."""
        present = (*self._processes, *self._pending, *self._forking)
        used = {engine_number(name) for name in present}
        used.update(self._server_numbers)
        numbers = itertools.islice((n for n in itertools.count() if n not in used), count)
        names = [f"engine-{number}" for number in numbers]
        for name in names:
            self._retired.discard(name)
            del self._restarts[name]
            self._start(name)
        return names

    def retire(self, name: str) -> None:
        """Don't restart an engine that was asked to end; kill it if it does not end in time."""
        if name not in {*self._processes, *self._pending, *self._forking}:
            return
        self._retired.add(name)
        if (timer := self._pending.pop(name, None)) is not None:
            timer.cancel()
        if (process := self._processes.get(name)) is not None:
            self._later(STOP_TIMEOUT_S, process.kill)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            self._timers.discard(timer)
            action()

        timer = self._loop.call_later(delay_s, act)
        self._timers.add(timer)

    @property
    def are_gone(self) -> bool:
        """Whether no engine runs, and none will be started again."""
        running = any(process.is_running for process in self._processes.values())
        return not running and not self._pending and not self._forking

    def _start(self, name: str, pid: int | None = None) -> None:
        """Execute an engine, or take over the forked process ``pid``."""
        self._pending.pop(name, None)
        log = self._log(name)
        try:
            forked = None if pid is None else ForkedProcess(pid)
            process = EngineProcess(name, log, forked or _execute(self._command(name), log))
        except OSError as error:  # no processes, memory or files left
            self._on_exit(name, f"could not be started: {error}")
            return
        process.watch(self._loop, self._ended)
        self._processes[name] = process

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _ended(self, name: str) -> None:
        if self._processes[name].has_succeeded:
            self._later(GOODBYE_TIMEOUT_S, lambda: self._handle_end(name))
        else:
            self._handle_end(name)

    def _handle_end(self, name: str) -> None:
        process = self._processes.pop(name)
        why = process.exit_reason()
        process.join()
        if name in self._retired:
            return
        if self.may_restart and self._restarts[name] < RESTARTS_MAX:
            delay_s = RESTART_DELAY_FIRST_S * 4 ** self._restarts[name]
            self._restarts[name] += 1
            self._pending[name] = self._loop.call_later(delay_s, self._start, name)
        self._on_exit(name, why)

    def lost(self, name: str) -> None:
        """Do nothing: the end of the process shows the loss."""

    def kill(self, name: str) -> None:
        """Kill an engine that does not answer, even a stopped process; it is restarted."""
        if name in self._processes:
            self._processes[name].kill()

    def kill_all(self) -> None:
        """Kill all processes, as a last resort, from any thread."""
        for process in list(self._processes.values()):
            process.kill()
        if (forks := self._forks) is not None:
            forks.kill()

    def stop(self) -> None:
        """End all engines and wait for that; those that don't end in time are killed."""
        for timer in (*self._pending.values(), *self._timers):
            timer.cancel()
        if (forks := self._forks) is not None:
            assert forks.stdout is not None
            self._loop.remove_reader(forks.stdout)
            forks.kill()
            forks.communicate()
        for process in self._processes.values():
            process.unwatch(self._loop)
            process.stop()
        for process in self._processes.values():
            process.join()


def engine_command(settings: RunSettings, name: str, address: str) -> list[str]:
    """Return the command line of a worker that serves ``settings.model``."""
    command = [sys.executable, "-m", WORKER, "--die-with-parent", str(os.getpid())]
    if settings.fleet.curve_key_directory is not None:
        command += [
            "--curve-key-directory",
            str(settings.fleet.curve_key_directory / ENGINE_DEFAULT),
        ]
    device = settings.engine.device_of(engine_number(name))
    if settings.engine.num_kv_blocks is None:
        command += ["--memory-sharers", str(settings.memory_sharers(device))]
    threads = settings.engine_threads
    return [*command, *engine_options(settings.model, settings.engine, name, address, threads)]


def engine_number(name: str) -> int:
    """Return the number of an engine that a run has started, from its name: ``engine-3``."""
    return int(name.removeprefix("engine-"))


def engine_options(
    model: Path, settings: EngineSettings, name: str, address: str, threads: int | None = None
) -> list[str]:
    """Return a worker's options; ``threads`` is given if it runs on this host."""
    command: list[str] = []
    options: dict[str, object] = {
        "connect": address,
        "model": model,
        "engine": name,
        "dtype": settings.dtype,
        "max-running-turns": settings.max_running_turns,
        "threads": threads or settings.threads_per_engine or 1,
    }
    if settings.uses_gpu:
        options["device"] = settings.device_of(engine_number(name))
    if settings.adapters_max != EngineSettings().adapters_max:
        options["adapters-max"] = settings.adapters_max
    if settings.num_kv_blocks is not None:
        options["num-kv-blocks"] = settings.num_kv_blocks
    if settings.kv_memory_share is not None:
        options["kv-memory-share"] = settings.kv_memory_share
    if settings.step_time_min_s:
        options["step-time-min"] = settings.step_time_min_s
    if settings.speculative_method is not None:
        options["speculative-method"] = settings.speculative_method
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    if settings.quantization is not None:
        command += ["--quantization", settings.quantization]
    if settings.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    if settings.deterministic is not None:
        command.append("--deterministic" if settings.deterministic else "--no-deterministic")
    for module in settings.logits_processors:
        command += ["--logits-processors", module]
    for directory in settings.image_directories:
        command += ["--image-directory", str(directory)]
    return command


def _stream_interval_tokens(settings: RunSettings) -> int:
    """Return how many tokens of a turn a server may collect: only one if weights change under
    frozen turns, because collected tokens come without the version that sampled each."""
    weights = settings.weights
    collects = not keeps_kv(weights.pause_mode, weights.kv_policy)
    return settings.fleet.stream_interval_tokens if collects else 1


def adapter_command(settings: RunSettings, name: str, address: str, url: str) -> list[str]:
    """Return the command line of a worker that drives the external server at ``url``."""
    command = [sys.executable, "-m", "tidegate.engine.external.worker"]
    options: dict[str, object] = {
        "die-with-parent": os.getpid(),
        "connect": address,
        "url": url,
        "model": settings.model,
        "engine": name,
        "max-running-turns": settings.engine.max_running_turns,
        "stream-interval-tokens": _stream_interval_tokens(settings),
    }
    if settings.fleet.curve_key_directory is not None:
        options["curve-key-directory"] = settings.fleet.curve_key_directory / ENGINE_DEFAULT
    directory = settings.records.run_directory
    if directory is not None:  # more likely than /tmp to be shared with the server
        options["weights-directory"] = (directory / "published" / name).resolve()
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    return command
