"""Processes that a benchmark starts, loads and ends: servers, and others that answer lines."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0


def free_port() -> int:
    """Return a port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def started(
    command: Sequence[str], health_url: str, log: Path, environment: Mapping[str, str]
) -> Iterator[int]:
    """Run a server until the end of the `with`; yield the id of its session, once it answers."""
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            _wait_for(server, health_url, log)
            yield server.pid
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(server.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(END_TIMEOUT_S)
            with suppress(ProcessLookupError):  # what the server has left, or the server
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_for(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")


class LineProcess:
    """A process that answers each line of its standard input with a line."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # its input ends, and so does the process

    def send(self, line: str) -> None:
        """Send a line, whose answer comes later."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def receive(self) -> str:
        """Wait for the next answer."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args!r} has ended; its error is above")
        return line
