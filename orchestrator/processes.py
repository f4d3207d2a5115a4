"""How do engine processes on this machine start and end? They are started by command line.

The orchestrator never imports the engine: a worker is another program that speaks the wire.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tidegate.orchestrator.config import RunSettings

LOG_LINES_SHOWN = 8
"""Of a failed engine's log, in the error that reports it."""

STOP_TIMEOUT_S = 5.0
"""After being told to stop, a process has so long before it is killed."""


class EngineProcess:
    """A worker started by this run."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with log.open("ab") as output:
            # Its own session: Ctrl-C in the terminal is for the run, which then ends its engines.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[str], None]) -> None:
        """Have ``loop`` call ``on_exit`` with the name as soon as the process ends."""

        def ended() -> None:
            loop.remove_reader(self._pidfd)
            on_exit(self.name)

        loop.add_reader(self._pidfd, ended)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call nobody any more. Harmless if repeated."""
        loop.remove_reader(self._pidfd)

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def epitaph(self) -> str:
        """Why it ended: its status, and the end of its log."""
        status = self._process.poll()
        how = (
            f"killed by {signal.Signals(-status).name}"
            if status is not None and status < 0
            else f"exit status {status}"
        )
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        if lines and lines[-1].startswith("error: "):
            return lines[-1].removeprefix("error: ")
        return "\n  ".join([f"{how}; end of {self.log}:", *lines]) if lines else how

    def stop(self) -> None:
        """Ask it to end; :meth:`join` waits for it."""
        if self.is_running:
            self._process.terminate()

    def join(self) -> None:
        """Wait until it has ended, killing it if it takes too long."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._pidfd)


def engine_command(settings: RunSettings, name: str, address: str) -> list[str]:
    """The command line of a worker that serves ``settings.model``."""
    command = [sys.executable, "-m", "tidegate.engine.worker", "--die-with-parent"]
    options: dict[str, object] = {
        "connect": address,
        "model": settings.model,
        "engine": name,
        "dtype": settings.dtype,
        "max-running-turns": settings.max_running_turns,
        "threads": settings.threads_per_engine,
    }
    if settings.num_blocks is not None:
        options["num-blocks"] = settings.num_blocks
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    return command
